#!/bin/bash
# Checks that rustfmt has formatted every Rust file, that clippy finds nothing wrong or suspicious, and
# that the crates contain their license and description when cargo packages them. If rustfmt or clippy
# is not installed, its check is left out; without both the test is skipped (status 77).
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
  # New releases have new style lints, which only warn here.
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
