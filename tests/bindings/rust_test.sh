#!/bin/bash
# The Rust crates' own tests, doc tests included, against the library of this build. Without cargo
# they are skipped. Usage: rust_test.sh SOURCE_DIR BUILD_DIR
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
cargo test --offline --locked

# The example trains, and offloading changes nothing.
cargo run --offline --locked --quiet --example train | grep '^step' >"$build/rust/host"
cargo run --offline --locked --quiet --example train -- --sim | grep '^step' >"$build/rust/sim"
diff "$build/rust/host" "$build/rust/sim"
[[ $(wc -l <"$build/rust/host") == 9 ]] || { echo "FAILED: not 9 lines of losses"; exit 1; }
tail -n 1 "$build/rust/host"
