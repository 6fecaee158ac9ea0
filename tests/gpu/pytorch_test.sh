#!/bin/bash
# Runs a Python test on the GPU with the virtual environment's torch; skipped (status 77) if that
# torch has no CUDA.
# Usage: gpu_test.sh PROBE bash pytorch_test.sh SOURCE_DIR LIBHYBRIDOPT_SO TEST
set -euo pipefail
root=$1

[[ -e $root/.venv/complete ]] || { echo "FAILED: no $root/.venv; run scripts/venv"; exit 1; }
if ! "$root/.venv/bin/python" -c 'import torch; raise SystemExit(not torch.cuda.is_available())'; then
  echo "skipped: the torch in $root/.venv has no CUDA"
  exit 77
fi
exec bash "$root/tests/python_test.sh" "$root" "$2" -m pytest \
  -c "$root/bindings/python/pyproject.toml" "$3"
