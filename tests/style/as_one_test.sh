#!/bin/bash
# Compiles the files of src/device and of src/device/cuda as one, as builds without tests do
# (cmake/folders_as_one.cmake). Builds with tests compile them one by one, and builds with sanitizers
# have no CUDA, so nothing else sees two definitions of one name there. No code is made.
# Usage: as_one_test.sh SOURCE_DIR COMPILER CUDA_INCLUDE_DIR
set -euo pipefail
cd "$1"
for file in src/device/*.cpp src/device/cuda/*.cpp; do
  [[ $file == */no_cuda.cpp ]] || echo "#include \"$file\""
done | "$2" -std=c++20 -Wall -Wextra -Werror -fsyntax-only -I. -Isrc -Iinclude -isystem "$3" -x c++ -
