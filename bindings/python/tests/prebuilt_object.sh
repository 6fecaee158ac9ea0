#!/bin/bash
# A compiler launcher for test_wheel.py: prebuilt_object.sh COMPILER ARGUMENT... takes objects from the
# build in HYBRIDOPT_PREBUILT if that build has compiled the same sources. That build compiles each source
# alone; the objects of a source that CMake has made of several are joined. Sources that depend on the
# library's build options are compiled.
set -euo pipefail
output=
source=
for ((i = 1; i < $#; ++i)); do
  next=$((i + 1))
  case ${!i} in
    -o) output=${!next} ;;
    -c) source=${!next} ;;
  esac
done

compile() { exec "$@"; }
[[ $output == hybridopt/*.o ]] || compile "$@"
object=$HYBRIDOPT_PREBUILT/${output#hybridopt/}
if [[ $output != */Unity/* ]]; then
  sources=("$source")
  objects=("$object")
else
  target=${object%/Unity/*} # the folder of a target's objects
  root=$(cd "$(dirname "$0")/../../.." && pwd)
  mapfile -t sources < <(sed -n 's/^#include "\(.*\)"$/\1/p' "$source")
  objects=()
  for one in "${sources[@]}"; do
    name=${one#"$root/"}.o
    # A target of the folder `tools` calls its sources by their names in there, and others `__`.
    for path in "$target/$name" "$target/${name#*/}" "$target/__/$name"; do
      if [[ -e $path ]]; then
        objects+=("$path")
        break
      fi
    done
  done
fi
[[ ${#objects[@]} == "${#sources[@]}" && -e ${objects[0]} ]] || compile "$@"
if grep -q HYBRIDOPT_HAS_ "${sources[@]}"; then compile "$@"; fi
if [[ ${#objects[@]} == 1 ]]; then exec cp "${objects[0]}" "$output"; fi
exec ld -r -o "$output" "${objects[@]}"
