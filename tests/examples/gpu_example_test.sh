#!/bin/bash
# Runs an example on a GPU and reads its output.
# Usage: gpu_example_test.sh NAME PROGRAM ARGUMENT...
set -euo pipefail
name=$1
shift

status=0
output=$("$@") || status=$?
echo "$output"
fail() { echo "FAILED: $*"; exit 1; }
((status == 0)) || fail "$1 exited with status $status"
grep -qF "same bits: yes" <<<"$output" || fail "no line says 'same bits: yes'"

if [[ $name == 04_train_lm ]]; then
  # The changes that cudaMemGetInfo shows are those of the plan, in pages of 2 MiB.
  read -r measured planned < <(
    sed -n 's|^  \(.*\) MiB of device memory saved, \(.*\) MiB by the plan$|\1 \2|p' <<<"$output") || true
  awk -v m="${measured:-0}" -v p="${planned:-0}" 'BEGIN { exit !(p > 60 && m > p - 4 && m < p + 8) }' ||
    fail "measured ${measured:-nothing} MiB, the plan says ${planned:-nothing}"
  # The model learns: the loss starts at 8 bits a byte.
  last=$(sed -n 's|^  step .*held out \(.*\) bits/byte$|\1|p' <<<"$output" | tail -n 1)
  awk -v b="${last:-9}" 'BEGIN { exit !(b > 0 && b < 5) }' || fail "${last:-no} bits a byte at the end"
else
  # In each rollout, training holds no params, gradients or states on the GPU.
  rollouts=$(grep -c '^ *rollout ' <<<"$output") || fail "no rollout"
  empty=$(grep -c '^ *rollout .* WWCCCCCCCC\.* *0\.0 *0\.0 *0\.0 ' <<<"$output") || true
  ((rollouts == 2 && empty == 2)) || fail "$empty of $rollouts rollouts have the device alone"
fi
