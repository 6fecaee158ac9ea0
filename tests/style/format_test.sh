#!/bin/bash
# Checks that every C and C++ file is formatted by clang-format. Releases of clang-format format
# differently, so only version 14 can tell; without it the test is skipped (status 77).
# Usage: format_test.sh SOURCE_DIR
set -euo pipefail
source "$(dirname "$0")/files.sh"
root=$(cd "$1" && pwd)
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT

if ! command -v clang-format-14 >/dev/null; then
  echo "skipped: clang-format-14 is not installed"
  exit 77
fi
mapfile -t files < <(files_of "$root" '*.c' '*.h' '*.cpp' '*.cu' '*.inc')
((${#files[@]} > 20)) || { echo "FAILED: only ${#files[@]} files found under $root"; exit 1; }
if ! clang-format-14 --dry-run -Werror "${files[@]}" 2>"$scratch/complaints"; then
  grep -o '^[^:]*:[0-9]*:[0-9]*: error' "$scratch/complaints" | cut -d : -f 1 | uniq -c
  echo "FAILED: run clang-format-14 -i on the files above"
  exit 1
fi
echo "${#files[@]} files are formatted"
