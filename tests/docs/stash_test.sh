#!/bin/bash
# Checks that the program in docs/STASH.md is examples/10_stash.c.
# Usage: stash_test.sh SOURCE_DIR
set -euo pipefail
diff <(sed -n '/^```c$/,/^```$/{/^```/!p}' "$1/docs/STASH.md") "$1/examples/10_stash.c" ||
  { echo "FAILED: left: in docs/STASH.md; right: examples/10_stash.c"; exit 1; }
echo "docs/STASH.md shows examples/10_stash.c"
