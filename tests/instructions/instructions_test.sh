#!/bin/bash
# Counts with valgrind how many instructions each kernel (AVX2) needs per element, and compares the
# counts with those that recorded.csv has for this compiler: a count that is more than 3 % higher fails.
# Counts do not depend on the machine's load. Running this with the argument "record" records the
# present counts, after an improvement or an intended cost.
# Usage: instructions_test.sh PROGRAM RECORDED [record]
set -euo pipefail
program=$1 recorded=$2 record=${3:-}

command -v valgrind >/dev/null || { echo "SKIPPED: valgrind is missing; run scripts/setup"; exit 77; }
out=$(mktemp -d)
trap 'rm -rf "$out"' EXIT

compiler=$("$program" none | sed -n 's/^compiler //p') || { echo "SKIPPED: no AVX2 here"; exit 77; }
elements=$("$program" none | sed -n 's/^elements //p')
if [[ -z $record ]] && ! grep -q "^$compiler," "$recorded"; then
  echo "SKIPPED: $recorded has nothing for the compiler '$compiler'; record it with"
  echo "  bash $0 $* record"
  exit 77
fi

failed=0
for kernel in fp32 split bf16_moments split_bf16_moments split24 split24_bf16_moments norm; do
  LD_BIND_NOW=1 valgrind --tool=callgrind --callgrind-out-file="$out/callgrind" \
    --toggle-collect=MeasuredUpdate --toggle-collect=MeasuredNorm "$program" "$kernel" \
    >"$out/log" 2>&1 || { echo "SKIPPED: valgrind cannot run this here"; cat "$out/log"; exit 77; }
  total=$(sed -n 's/.*Collected : *\([0-9]*\).*/\1/p' "$out/log")
  count=$(awk -v total="$total" -v elements="$elements" 'BEGIN { printf "%.3f", total / elements }')
  if [[ $record ]]; then
    sed -i "/^$compiler,$kernel,/d" "$recorded"
    printf '%s,%s,%s\n' "$compiler" "$kernel" "$count" >>"$recorded"
    continue
  fi
  limit=$(awk -F , -v c="$compiler" -v k="$kernel" '$1 == c && $2 == k { print $3 }' "$recorded")
  [[ $limit ]] || { echo "FAILED: $recorded has no figure for $kernel"; failed=1; continue; }
  if awk -v count="$count" -v limit="$limit" 'BEGIN { exit !(count > limit * 1.03 || count == 0) }'
  then
    echo "FAILED: $kernel takes $count instructions an element, recorded are $limit"
    failed=1
  else
    echo "$kernel: $count instructions an element, recorded $limit"
  fi
done
exit $failed
