#!/bin/bash
# Runs examples/06_rust on the host and on the simulated device: the same losses. Without cargo it is
# skipped. Usage: rust_test.sh SOURCE_DIR BUILD_DIR
set -euo pipefail
source_dir=$1
build=$2

if ! command -v cargo >/dev/null; then
  echo "skipped: cargo is not installed"
  exit 77
fi
export CARGO_TARGET_DIR=$build/rust HYBRIDOPT_LIB_DIR=$build
run=(cargo run --offline --locked --quiet --manifest-path "$source_dir/examples/06_rust/Cargo.toml")
mkdir -p "$build/rust"
"${run[@]}" >"$build/rust/host"
"${run[@]}" -- --sim >"$build/rust/sim"
diff <(grep '^step' "$build/rust/host") <(grep '^step' "$build/rust/sim")
[[ $(grep -c '^step' "$build/rust/host") == 9 ]] || { echo "FAILED: not 9 lines of losses"; exit 1; }
labels=$(grep -v '^step' "$build/rust/host" | sed 's/[0-9][0-9]* bytes on the host/N bytes on the host/')
made="AdamW over 4 params with 257 elements; its state takes N bytes on the host, 0 on the device"
[[ $labels == "$made"$'\n'"saved before step 200; a new optimizer goes on from the checkpoint"$'\n'"$made" ]] ||
  { echo "$labels"; echo "FAILED: not these lines around the losses"; exit 1; }
grep -q 'bytes of the device are free' "$build/rust/sim" || { echo "FAILED: nothing left"; exit 1; }
cat "$build/rust/sim"
