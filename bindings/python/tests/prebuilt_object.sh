#!/bin/bash
# A compiler launcher for test_wheel.py: prebuilt_object.sh COMPILER ARGUMENT... copies the object from
# the build in HYBRIDOPT_PREBUILT if that build has compiled the same source. Sources that depend on the
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
prebuilt=$HYBRIDOPT_PREBUILT/${output#hybridopt/}
if [[ $output == hybridopt/*.o && -e $prebuilt ]] && ! grep -q HYBRIDOPT_HAS_ "$source"; then
  exec cp "$prebuilt" "$output"
fi
exec "$@"
