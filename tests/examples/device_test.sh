#!/bin/bash
# If no GPU is visible, an example with --device says why, with the given text.
# Usage: device_test.sh PROGRAM WHY
set -euo pipefail
program=$1
why=$2
export CUDA_VISIBLE_DEVICES=

# expect STATUS TEXT ARGUMENT...
expect() {
  local status=0 output wanted=$1 text=$2
  shift 2
  output=$("$program" "$@" 2>&1) || status=$?
  ((status == wanted)) || { echo "$output"; echo "FAILED: $* gave $status, not $wanted"; exit 1; }
  grep -qF -- "$text" <<<"$output" || { echo "$output"; echo "FAILED: $*: no '$text'"; exit 1; }
}

expect 1 "--device: got nothing, expected auto, cpu or gpu" --device
expect 1 "--device: got tpu, expected auto, cpu or gpu" --device tpu
expect 1 "--device gpu: $why" --device gpu
# With auto, the example says why there is no GPU, and continues.
if [[ $program == */04_train_lm ]]; then
  expect 1 "no GPU: $why" --data "$0"
  expect 1 "--data: found " --data "$0"  # this file is too short, so training does not begin
else
  expect 0 "no GPU: $why" --iterations 1
  expect 0 "A simulated device" --iterations 1
  expect 0 "same bits: yes" --iterations 1
fi
