#!/bin/bash
# The Rust crates' own tests, doc tests included, against the library of this build. Without cargo they
# are skipped.
# Usage: rust_test.sh SOURCE_DIR BUILD_DIR
set -euo pipefail
source_dir=$1
build=$2

if ! command -v cargo >/dev/null; then
  echo "skipped: cargo is not installed"
  exit 77
fi
cargo --version
export CARGO_TARGET_DIR=$build/rust
export HYBRIDOPT_LIB_DIR=$build
export LD_LIBRARY_PATH=$build  # for the doc tests of older cargos
export HYBRIDOPT_LAYOUT_TEST=$build/tests/abi_layout_test
export HYBRIDOPT_TRAINING_STEP=$build/tests/bindings_training_step
cd "$source_dir/bindings/rust"
mkdir -p "$build/rust"

# The build script finds the library in three ways. If it finds none, it says what to do.
CARGO_MANIFEST_DIR=$PWD/hybridopt-sys rustc --edition 2021 hybridopt-sys/build.rs \
  -o "$build/rust/build_script"
# says TEXT ENVIRONMENT...: the build script's output in that environment contains the text.
says() {
  local text=$1
  shift
  rm -rf "$build/rust/out"
  mkdir "$build/rust/out"
  env "$@" OUT_DIR="$build/rust/out" "$build/rust/build_script" &>"$build/rust/said" || true
  grep -qF "$text" "$build/rust/said" ||
    { cat "$build/rust/said"; echo "FAILED: the build script did not say $text"; exit 1; }
}
says "cargo:lib_dir=$build"
[[ -e $build/rust/out/libhybridopt.so ]]
says "HYBRIDOPT_LIB_DIR is /nowhere, but there is no libhybridopt.so in it" \
  HYBRIDOPT_LIB_DIR=/nowhere
mkdir -p "$build/rust/pkgconfig"
printf 'libdir=%s\nName: hybridopt\nDescription: -\nVersion: 0\n' "$build" \
  >"$build/rust/pkgconfig/hybridopt.pc"
says "cargo:lib_dir=$build" -u HYBRIDOPT_LIB_DIR PKG_CONFIG_PATH="$build/rust/pkgconfig"
if [[ $build == "$source_dir"/build/* ]]; then
  says "cargo:lib_dir=$source_dir/build/" -u HYBRIDOPT_LIB_DIR PKG_CONFIG_PATH=/nowhere \
    PKG_CONFIG_LIBDIR=/nowhere
fi

cargo test --offline --locked
