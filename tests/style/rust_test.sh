#!/bin/bash
# rustfmt agrees with every Rust file, clippy finds nothing that is wrong or suspicious, and the crates
# hold their license and description when cargo packages them. rustfmt or clippy is left out where it
# is not installed; without both the test is skipped (status 77).
# Usage: rust_test.sh SOURCE_DIR BUILD_DIR
set -euo pipefail
cd "$1/bindings/rust"
example=../../examples/06_rust/Cargo.toml
export CARGO_TARGET_DIR=$2/rust HYBRIDOPT_LIB_DIR=$2

ran=()
if cargo fmt --version &>/dev/null; then
  cargo fmt --check || { echo "FAILED: run cargo fmt in bindings/rust"; exit 1; }
  cargo fmt --check --manifest-path "$example" ||
    { echo "FAILED: run cargo fmt in examples/06_rust"; exit 1; }
  ran+=(rustfmt)
fi
if cargo clippy --version &>/dev/null; then
  # New releases know new matters of taste; they warn.
  for manifest in Cargo.toml "$example"; do
    cargo clippy --offline --locked --quiet --all-targets --manifest-path "$manifest" -- \
      -D clippy::correctness -D clippy::suspicious -D unused-imports
  done
  ran+=(clippy)
fi
for crate in hybridopt-sys hybridopt; do
  files=$(cargo package --offline --locked --allow-dirty --list --package "$crate" 2>/dev/null)
  for file in LICENSE README.md; do
    grep -qx "$file" <<<"$files" ||
      { echo "FAILED: the package of $crate would not hold $file"; exit 1; }
  done
done
((${#ran[@]})) || { echo "skipped: neither rustfmt nor clippy is installed"; exit 77; }
echo "no complaints from ${ran[*]}"
