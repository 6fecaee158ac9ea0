#!/bin/bash
# An example that is started wrongly says so, in this text and before it trains.
# Usage: refused_test.sh TEXT PROGRAM [ARGUMENT...]
set -euo pipefail
text=$1
shift

status=0
output=$("$@" 2>&1) || status=$?
echo "$output"
((status == 1)) || { echo "FAILED: $* gave $status, not 1"; exit 1; }
grep -qF -- "$text" <<<"$output" || { echo "FAILED: no line says '$text'"; exit 1; }
! grep -q '^step' <<<"$output" || { echo "FAILED: it has trained"; exit 1; }
