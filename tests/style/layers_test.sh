#!/bin/bash
# Includes inside src/ go downward only:
#   abi -> optimizer -> {step, move, save, stash, exchange} -> state_io -> place -> {state, machine}
#       -> {checkpoint, comm} -> {memory, runtime} -> device -> kernels -> base
# Layers in braces are neighbours and do not include each other.
# Usage: layers_test.sh SOURCE_DIR
set -euo pipefail

# Prints every include in DIR/src that breaks the order; succeeds if there is none.
check_layers() {
  (cd "$1/src" && find . -name '*.h' -o -name '*.cpp' -o -name '*.cu' -o -name '*.inc') |
    sed 's|^\./||' | sort | (cd "$1/src" && xargs -r -d '\n' awk '
    BEGIN {
      rank["base"] = 0; rank["kernels"] = 1; rank["device"] = 2; rank["memory"] = 3
      rank["runtime"] = 3; rank["checkpoint"] = 4; rank["comm"] = 4; rank["machine"] = 5
      rank["state"] = 5; rank["place"] = 6; rank["state_io"] = 7; rank["step"] = 8
      rank["save"] = 8; rank["stash"] = 8; rank["move"] = 8; rank["exchange"] = 8
      rank["optimizer"] = 9; rank["abi"] = 10
    }
    function layer(path) { sub(/[\/.].*/, "", path); return path }
    function refuse(why) { print "src/" FILENAME ":" FNR ": " $0 "  (" why ")"; bad = 1 }
    FNR == 1 { own = layer(FILENAME); if (!(own in rank)) refuse(own " is not a layer") }
    /^[ \t]*#[ \t]*include[ \t]*"/ {
      path = $0; sub(/^[^"]*"/, "", path); sub(/".*/, "", path)
      if (path == "offload.h") next
      target = layer(path)
      if (!(target in rank)) refuse(target " is not a layer")
      else if (own in rank && own != target && rank[target] >= rank[own])
        refuse(own " may not include " target)
    }
    END { exit bad }')
}

# Tests the check: one tree must pass, and eleven must not.
self_test() {
  local scratch
  scratch=$(mktemp -d)
  mkdir -p "$scratch/src/optimizer" "$scratch/src/step" "$scratch/src/save" "$scratch/src/state" \
    "$scratch/src/base" "$scratch/src/stash" "$scratch/src/memory" "$scratch/src/runtime" \
    "$scratch/src/move" "$scratch/src/place"
  local good='#include "base/status.h"'
  echo "$good" >"$scratch/src/step/step.cpp"
  check_layers "$scratch" || { echo "FAILED: the check refuses a good include"; exit 1; }
  local file include
  while read -r file include; do
    echo "#include \"$include\"" >"$scratch/src/$file"
    if check_layers "$scratch" >/dev/null; then
      echo "FAILED: the check lets src/$file include \"$include\""
      exit 1
    fi
    rm "$scratch/src/$file"
  done <<'CASES'
base/status.h step/step.h
memory/arena.cpp runtime/worker_pool.h
save/saver.h step/step.h
state/residence.h machine/lanes.h
place/state_locator.h state_io/transfer.h
step/step.h move/mover.h
move/mover.h step/step.h
step/step.h save/saver.h
stash/stash.h step/step.h
optimizer/optimizer.cpp abi.h
optimizer/optimizer.cpp ../tests/helper.h
CASES
  rm -r "$scratch"
}

self_test
check_layers "$1" || { echo "FAILED: includes must go downward"; exit 1; }
echo "every include goes downward"
