#!/bin/bash
# Checks the file of the shared library: it exports exactly the functions of offload.h, all under one
# version, and needs only the C and C++ runtimes.
# Usage: symbols_test.sh SOURCE_DIR LIBHYBRIDOPT_SO
set -euo pipefail
source=$1
library=$2
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
export LC_ALL=C

fail() {
  echo "FAILED: $*"
  exit 1
}

grep -A 1 '^OFFLOAD_API' "$source/include/offload.h" | grep -o 'offload_[a-z0-9_]*(' | tr -d '(' |
  sort >"$scratch/declared"
grep -o 'offload_[a-z0-9_]*;' "$source/src/abi.map" | tr -d ';' | sort >"$scratch/mapped"
# Columns of a row: number, value, size, type, binding, visibility, section, name@@version. The
# only absolute symbol is the version itself.
readelf --dyn-syms --wide "$library" |
  awk '$1 ~ /^[0-9]+:$/ && $7 != "UND" && $7 != "ABS" { print $8 }' | sort >"$scratch/exported"
sed 's/$/@@HYBRIDOPT_0.1/' "$scratch/mapped" >"$scratch/expected"

[[ -s $scratch/declared ]] || fail "no function found in offload.h"
diff "$scratch/declared" "$scratch/mapped" || fail "left: in offload.h; right: in src/abi.map"
diff "$scratch/expected" "$scratch/exported" || fail "left: in src/abi.map; right: in the library"
echo "exports exactly the $(wc -l <"$scratch/declared") functions of offload.h"

readelf --dynamic --wide "$library" >"$scratch/dynamic"
grep -q 'Library soname: \[libhybridopt\.so\.0\.1\]' "$scratch/dynamic" ||
  fail "SONAME is not libhybridopt.so.0.1: $(grep SONAME "$scratch/dynamic")"
needed=$(sed -n 's/.*(NEEDED).*\[\(.*\)\]/\1/p' "$scratch/dynamic")
for name in $needed; do
  [[ $name =~ ^(libstdc\+\+|libm|libgcc_s|libc|ld-linux.*)\.so\.[0-9]+$ ]] ||
    fail "needs $name; a bare system need not have it"
done
grep -q 'Flags:.*NODELETE' "$scratch/dynamic" || fail "dlclose would take its threads' code away"
! grep -E 'RPATH|RUNPATH|TEXTREL' "$scratch/dynamic" || fail "carries a run path or text relocations"
echo "needs only" $needed
