#!/bin/bash
# Checks that no file has a tab, or white space at the end of a line.
# Usage: whitespace_test.sh SOURCE_DIR
set -euo pipefail
source "$(dirname "$0")/files.sh"
root=$(cd "$1" && pwd)

mapfile -t files < <(
  files_of "$root" '*.c' '*.h' '*.cpp' '*.cu' '*.inc' '*.sh' '*.cmake' '*.in' '*.map' '*.py' \
    CMakeLists.txt CMakePresets.json
  find "$root/scripts" "$root/.ci" -type f
)
((${#files[@]} > 20)) || { echo "FAILED: only ${#files[@]} files found under $root"; exit 1; }
if grep -nP '\t|[ \r]$' "${files[@]}"; then
  echo "FAILED: a tab or white space at a line's end (above)"
  exit 1
fi
echo "${#files[@]} files without tabs and trailing white space"
