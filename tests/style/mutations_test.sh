#!/bin/bash
# Checks that every bug of scripts/mutate can still be planted.
# Usage: mutations_test.sh SOURCE_DIR
set -euo pipefail
PYTHONDONTWRITEBYTECODE=1 python3 "$1/scripts/mutate" --check ||
  { echo "FAILED: src/ has changed where tests/mutations plants a bug (above): correct the lines there"; exit 1; }
