#!/bin/bash
# Runs the virtual environment's Python with the library of this build and the package of this tree.
# Usage: python_test.sh SOURCE_DIR LIBHYBRIDOPT_SO ARGUMENT...
set -euo pipefail
root=$1
export HYBRIDOPT_LIBRARY=$2
shift 2

python=$root/.venv/bin/python
[[ -e $root/.venv/complete ]] || { echo "FAILED: no $root/.venv; run scripts/venv"; exit 1; }
export OMP_NUM_THREADS=1  # tests share the CPUs; torch's idle threads would spin
export PYTHONPATH=$root/bindings/python/src PYTHONDONTWRITEBYTECODE=1
exec "$python" "$@"
