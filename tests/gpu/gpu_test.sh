#!/bin/bash
# Runs a test program on the GPU; skipped (status 77) if PROBE finds no GPU.
# Usage: gpu_test.sh PROBE PROGRAM ARGUMENT...
set -euo pipefail
probe=$1
shift

if ! [[ -x $probe ]]; then
  echo "skipped: this build has no CUDA, or no cuBLAS where an example needs it"
  exit 77
fi
"$probe"
HYBRIDOPT_TEST_DEVICES=cuda exec "$@"
