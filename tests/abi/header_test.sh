#!/bin/bash
# Checks the text of the public header: its middle is plain, it compiles as C99 and C++20, and the
# layout test covers all of it.
# Usage: header_test.sh SOURCE_DIR LAYOUT_TEST
set -euo pipefail
header=$1/include/offload.h
layout_test=$2
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT

fail() {
  echo "FAILED: $*"
  exit 1
}

sed -n '/begin-plain-c99/,/end-plain-c99/p' "$header" >"$scratch/plain"
[[ $(grep -c 'plain-c99' "$scratch/plain") == 2 ]] || fail "begin- and end-plain-c99 not found"
! grep -n '^[[:space:]]*#' "$scratch/plain" || fail "a preprocessor line in the plain part"
echo "the plain part has no preprocessor line"

# The index at the top names what there is.
names=$(sed -n '/^ \* BY TASK/,/^ \* RULES FOR ALL/p' "$header" | grep -oiE '\boffload_[a-z_]*[a-z](\.h)?' | sort -u)
(($(wc -w <<<"$names") > 20)) || fail "the index by task was not found"
for name in $names; do
  [[ -e $1/include/$name ]] || grep -qwE "$name|${name}_(params|grads|states)" "$scratch/plain" "$1/include/offload_simple.h" ||
    fail "the index by task names $name, which is not declared"
done
echo "the index by task names functions that are declared"

# Each header compiles alone, as the first include of a program.
echo '#include "offload_simple.h"' >"$scratch/only.c"
cp "$scratch/only.c" "$scratch/only.cpp"
flags=(-Wall -Wextra -Wpedantic -Werror -fsyntax-only -I"$1/include")
for compilers in gcc:g++ clang:clang++; do
  if ! command -v "${compilers%:*}" >/dev/null || ! command -v "${compilers#*:}" >/dev/null; then
    echo "${compilers%:*} is not installed; left out"
    continue
  fi
  "${compilers%:*}" -std=c99 "${flags[@]}" "$scratch/only.c" || fail "not C99"
  "${compilers#*:}" -std=c++20 "${flags[@]}" "$scratch/only.cpp" || fail "not C++20"
  echo "C99 and C++20 by ${compilers%:*}"
done

# Names of the structs, fields and constants that the header declares, as the layout test writes
# them. gcc -E takes the comments out.
gcc -std=c99 -E -P -x c "$scratch/plain" -o "$scratch/code"
awk '
  /^typedef struct [a-z_0-9]+ \{/ { inside = "struct"; fields = ""; next }
  /^enum [a-z_0-9]+ \{.*\};/ { sub(/^[^{]*\{/, ""); sub(/\}.*/, ""); list($0); next }
  /^enum [a-z_0-9]+ \{/ { inside = "enum"; next }
  inside == "struct" && /^\}/ {
    type = $2; sub(/;.*/, "", type); print type
    count = split(fields, names, " ")
    for (i = 1; i <= count; i++) print type "." names[i]
    inside = ""; next
  }
  /^\}/ { inside = ""; next }
  inside == "enum" { list($0) }
  inside == "struct" && /\(\*/ && !/;/ { begun = $0; next }  # a pointer to a function, in two lines
  inside == "struct" && /;/ {
    $0 = begun $0; begun = ""
    if (sub(/.*\(\*/, "")) sub(/\).*/, "")  # a pointer to a function
    sub(/(\[[^]]*\])*;.*/, ""); sub(/.*[ *]/, ""); fields = fields " " $0
  }
  function list(text,   parts, i, count) {
    count = split(text, parts, ",")
    for (i = 1; i <= count; i++) {
      sub(/=.*/, "", parts[i]); gsub(/[ \t]/, "", parts[i])
      if (parts[i] != "") print parts[i]
    }
  }' "$scratch/code" | sort >"$scratch/declared"
"$layout_test" --list | sort >"$scratch/pinned"
[[ $(wc -l <"$scratch/declared") -gt 100 ]] || fail "the header's declarations were not understood"
diff "$scratch/declared" "$scratch/pinned" ||
  fail "left: declared in offload.h; right: pinned in layout_test.c"
echo "all $(wc -l <"$scratch/declared") structs, fields and constants are pinned"
