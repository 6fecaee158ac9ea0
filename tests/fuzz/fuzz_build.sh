#!/bin/bash
# Builds fuzz targets with clang's libFuzzer, address and undefined-behaviour sanitizers:
# OUT_DIR/TARGET. Without clang: status 77.
# Usage: fuzz_build.sh SOURCE_DIR OUT_DIR TARGET..., of "manifest", "head" and "calls"
set -euo pipefail
root=$(cd "$1" && pwd)
out=$2
targets=${*:3}

clang=$(command -v clang++-14 || command -v clang++ || true)
echo 'extern "C" int LLVMFuzzerTestOneInput(const unsigned char*, unsigned long) { return 0; }' \
  >"$out/probe.cpp"
flags=(-std=c++20 -O1 -gline-tables-only -fsanitize=fuzzer,address,undefined -fno-sanitize-recover=all
  -I"$root/src" -I"$root/include" -DHYBRIDOPT_VERSION='"fuzzed"' -DHYBRIDOPT_TEST_SCALE_DEFAULT=1)
if [[ -z $clang ]] || ! "$clang" "${flags[@]}" "$out/probe.cpp" -o "$out/probe"; then
  echo "skipped: no clang with libFuzzer here (Debian: clang-14 libclang-rt-14-dev)"
  exit 77
fi

# compile NAME [SOURCE]. Compiling takes ten times as long as the default number of runs, so targets
# share the objects.
compile() {
  local object=$out/$1.o source=${2:-$root/$1.cpp}
  mkdir -p "${object%/*}"
  "$clang" "${flags[@]}" -fsanitize=fuzzer-no-link -c "$source" -o "$object"
}
# All sources that the formats need, in one file, since most of the time is spent on headers that all of
# them include. The calls need the whole library.
formats=$out/formats.cpp
for source in base/{box_overlap,shard,status,utf8} checkpoint/format/{format,hash,json,manifest,reshard,safetensors} \
  kernels/coefficients; do
  echo "#include \"$source.cpp\""
done >"$formats"

for target in $targets; do
  if [[ $target == calls ]]; then
    while read -r source; do
      compile "${source%.cpp}"
    done < <(cd "$root" && find src tests/fault/random_calls -name '*.cpp' \
      ! -path '*/cuda/*' ! -path '*/adaptors/*' | sort)
    mapfile -t linked < <(find "$out/src" "$out/tests" -name '*.o')
    linked+=(-lgtest -lpthread -ldl)
  else
    linked=("$out/formats.o")
    [[ -e $out/formats.o ]] || compile formats "$formats"
  fi
  "$clang" "${flags[@]}" -o "$out/$target" "$root/tests/fuzz/${target}_fuzz.cpp" "${linked[@]}"
done
