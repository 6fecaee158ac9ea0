#!/bin/bash
# Checks the annotations of the Python package with mypy, and a program that uses the package with
# mypy's strictest checks. mypy's cache of torch is in the build folder.
# Usage: python_test.sh SOURCE_DIR BUILD_DIR
set -euo pipefail
python=$1/.venv/bin/python
[[ -e $1/.venv/complete ]] || { echo "FAILED: no $1/.venv; run scripts/venv"; exit 1; }
cd "$1/bindings/python"
"$python" -m mypy --config-file pyproject.toml --cache-dir "$2/mypy" ||
  { echo "FAILED: annotations and code disagree, here or where a program uses the package (above)"; exit 1; }
