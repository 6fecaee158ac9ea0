#!/bin/bash
# Runs an example: it must succeed and print a line with the text.
# Usage: example_test.sh TEXT PROGRAM [ARGUMENT...]
set -euo pipefail
text=$1
shift

scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
[[ ${*: -1} == --test ]] && set -- "$@" "$scratch"  # this example needs a directory
status=0
output=$("$@") || status=$?
echo "$output"
((status == 0)) || { echo "FAILED: $1 exited with status $status"; exit 1; }
grep -qF -- "$text" <<<"$output" || { echo "FAILED: no line says '$text'"; exit 1; }
