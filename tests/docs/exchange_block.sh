#!/bin/bash
# Prints the example of docs/RANKS.md as a C file.
# Usage: exchange_block.sh SOURCE_DIR
set -euo pipefail
echo '#include "exchange_example.h"'
awk '/^```c$/ { block = ""; inside = 1; next }
  /^```/ { if (inside && block ~ /offload_exchange_create/) printf "%s", block; inside = 0 }
  inside { block = block $0 "\n" }' "$1/docs/RANKS.md"
