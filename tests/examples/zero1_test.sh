#!/bin/bash
# Runs 09_zero1 on 1, 2 and 4 ranks, and on 4 ranks that save and 2 that continue: all have the same
# hashes.
# Usage: zero1_test.sh [PROGRAM]
set -euo pipefail
program=${1:-}
source "$(dirname "$0")/../comm/mpirun.sh"

scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
hashes() {
  mpi_run 90 "$1" "$program" "${@:2}" >"$scratch/output" || { cat "$scratch/output"; exit 1; }
  cat "$scratch/output" >&2
  grep '^params' "$scratch/output"
}

one=$(hashes 1)
[[ $one == params*masters* ]] || { echo "FAILED: no hashes"; exit 1; }
for ranks in 2 4; do
  [[ $(hashes "$ranks") == "$one" ]] || { echo "FAILED: $ranks ranks have other bits"; exit 1; }
done
half=$(hashes 4 --steps 20 --save "$scratch/half")
[[ $half != "$one" ]] || { echo "FAILED: 20 steps have the bits of 40"; exit 1; }
[[ $(hashes 2 --load "$scratch/half") == "$one" ]] ||
  { echo "FAILED: a run that was saved and loaded has other bits"; exit 1; }

# The loss falls.
awk '/^step/ { if (!first) first = $4; last = $4 } END { exit !(last > 0 && last < first) }' \
  "$scratch/output" || { echo "FAILED: the loss does not fall"; exit 1; }

# Invalid arguments are refused with a reason.
refused() {
  local text=$1
  shift
  if mpi_run 60 "$@" &>"$scratch/output"; then echo "FAILED: $* is accepted"; exit 1; fi
  grep -qF -- "$text" "$scratch/output" || { cat "$scratch/output"; echo "FAILED: no '$text'"; exit 1; }
}
refused "got 3 ranks, expected 1, 2, 4 or 8" 3 "$program"
refused "--load: got nothing, expected a directory" 1 "$program" --load
refused "--lode: no such flag, expected --steps N" 1 "$program" --lode
# A checkpoint that cannot be saved is refused before the first step.
refused "--save: '$scratch/half' exists, expected a directory to make" 1 "$program" --save "$scratch/half/"
refused "--save: '$scratch/no/half' cannot be made in '$scratch/no': No such file or directory" \
  1 "$program" --save "$scratch/no/half"
! grep -q '^step' "$scratch/output" || { echo "FAILED: trained before --save was refused"; exit 1; }
refused "--save: got '', expected a directory to make" 1 "$program" --save ""
echo "the same bits on 1, 2 and 4 ranks"
