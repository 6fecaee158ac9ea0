#!/bin/bash
# Builds fuzz targets with clang's libFuzzer, address and undefined-behaviour sanitizers, and runs
# each for so many inputs. Without clang the test is skipped (status 77).
# Usage: fuzz_test.sh SOURCE_DIR TARGETS RUNS [NEW_INPUTS_DIR], where TARGETS are some of "manifest",
# "head" and "calls". With NEW_INPUTS_DIR what the fuzzer finds is kept there, for a long run by hand.
set -euo pipefail
root=$(cd "$1" && pwd)
targets=$2
runs=$3
seed=${HYBRIDOPT_TEST_SEED:-1}
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT

clang=$(command -v clang++-14 || command -v clang++ || true)
echo 'extern "C" int LLVMFuzzerTestOneInput(const unsigned char*, unsigned long) { return 0; }' \
  >"$scratch/probe.cpp"
flags=(-std=c++20 -O1 -gline-tables-only -fsanitize=fuzzer,address,undefined -fno-sanitize-recover=all)
if [[ -z $clang ]] || ! "$clang" "${flags[@]}" "$scratch/probe.cpp" -o "$scratch/probe"; then
  echo "skipped: no clang with libFuzzer here (Debian: clang-14 libclang-rt-14-dev)"
  exit 77
fi

# compile NAME [SOURCE]. It takes ten times as long as the default number of runs, so targets share the objects.
compile() {
  local object=$scratch/$1.o source=${2:-$root/$1.cpp}
  mkdir -p "${object%/*}"
  "$clang" "${flags[@]}" -fsanitize=fuzzer-no-link -I"$root/src" -I"$root/include" \
    -DHYBRIDOPT_VERSION='"fuzzed"' -DHYBRIDOPT_TEST_SCALE_DEFAULT=1 -c "$source" -o "$object"
}
# All that the formats need as one file, since most of the time goes into headers that all include. The calls
# need the whole library.
formats=$scratch/formats.cpp
for source in base/{box_overlap,shard,status} checkpoint/format/{format,hash,json,manifest,reshard,safetensors} \
  kernels/coefficients; do
  echo "#include \"$source.cpp\""
done >"$formats"
if [[ " $targets " == *" calls "* ]]; then
  while read -r source; do
    [[ -e $scratch/${source%.cpp}.o ]] || compile "${source%.cpp}"
  done < <(cd "$root" && find src tests/fault/random_calls -name '*.cpp' \
    ! -path '*/cuda/*' ! -path '*/adaptors/*' | sort)
fi

for target in $targets; do
  if [[ $target == calls ]]; then
    mapfile -t linked < <(find "$scratch/src" "$scratch/tests" -name '*.o')
    linked+=(-lgtest -lpthread -ldl)
    limits=(-max_len=4096 -timeout=120 -rss_limit_mb=8192)
  else
    linked=("$scratch/formats.o")
    [[ -e $scratch/formats.o ]] || compile formats "$formats"
    # No input asks for memory beyond what a few times its size takes.
    limits=(-max_len=8192 -timeout=20 -malloc_limit_mb=8 -rss_limit_mb=1024)
  fi
  found=${4:-$scratch/found_$target}
  mkdir -p "$found"
  "$clang" "${flags[@]}" -I"$root/src" -I"$root/include" -o "$scratch/$target" \
    "$root/tests/fuzz/${target}_fuzz.cpp" "${linked[@]}"
  "$scratch/$target" -runs="$runs" -seed="$seed" "${limits[@]}" \
    -print_final_stats=1 -artifact_prefix="$scratch/" \
    "$found" "$root/tests/fuzz/corpus/$target" >"$scratch/log" 2>&1 || {
    tail -50 "$scratch/log"
    for input in "$scratch"/crash-* "$scratch"/oom-* "$scratch"/timeout-*; do
      [[ -e $input ]] && { echo "the input:"; od -A d -c "$input" | head -100; }
    done
    echo "FAILED: the $target target"
    exit 1
  }
  grep 'stat::number_of_executed_units' "$scratch/log"
done
