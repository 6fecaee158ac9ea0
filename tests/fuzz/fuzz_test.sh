#!/bin/bash
# Runs fuzz targets, each for a number of inputs in addition to those that are kept. Without clang the
# test is skipped (status 77).
# Usage: fuzz_test.sh SOURCE_DIR TARGETS RUNS [NEW_INPUTS_DIR], where TARGETS are some of "manifest",
# "head" and "calls". The inputs that the fuzzer finds are kept in NEW_INPUTS_DIR, for a long run by
# hand.
set -euo pipefail
root=$(cd "$1" && pwd)
targets=$2
runs=$3
seed=${HYBRIDOPT_TEST_SEED:-1}
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT

bash "$root/tests/fuzz/fuzz_build.sh" "$root" "$scratch" $targets

for target in $targets; do
  if [[ $target == calls ]]; then
    limits=(-max_len=4096 -timeout=120 -rss_limit_mb=8192)
  else
    # No input makes the library allocate more than a few times the input's size.
    limits=(-max_len=8192 -timeout=20 -malloc_limit_mb=8 -rss_limit_mb=1024)
  fi
  kept=$scratch/kept_$target
  python3 "$root/tests/fuzz/corpus.py" unpack "$target" "$kept"
  found=${4:-$scratch/found_$target}
  mkdir -p "$found"
  "$scratch/$target" -runs="$runs" -seed="$seed" "${limits[@]}" \
    -print_final_stats=1 -artifact_prefix="$scratch/" "$found" "$kept" >"$scratch/log" 2>&1 || {
    tail -50 "$scratch/log"
    for input in "$scratch"/crash-* "$scratch"/oom-* "$scratch"/timeout-*; do
      [[ -e $input ]] && { echo "the input:"; od -A d -c "$input" | head -100; }
    done
    echo "FAILED: the $target target"
    exit 1
  }
  grep 'stat::number_of_executed_units' "$scratch/log"
done
