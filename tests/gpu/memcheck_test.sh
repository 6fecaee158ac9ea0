#!/bin/bash
# Runs the kernels on the GPU under compute-sanitizer, where accesses outside of allocations fail.
# Skipped (status 77) if PROBE finds no GPU or there is no compute-sanitizer.
# Usage: memcheck_test.sh PROBE COMPUTE_SANITIZER PORT_TEST LAYOUTS_TEST STEP_TEST
set -euo pipefail
probe=$1 sanitizer=$2 port_test=$3 layouts_test=$4 step_test=$5

if ! [[ -x $probe ]]; then
  echo "skipped: this build has no CUDA"
  exit 77
fi
"$probe"
if ! [[ -x $sanitizer ]]; then
  echo "skipped: no compute-sanitizer (it comes with the CUDA toolkit)"
  exit 77
fi

export HYBRIDOPT_TEST_DEVICES=cuda HYBRIDOPT_TEST_SCALE=0.02
check() {
  # Calls that fail on purpose, for example for lack of memory, are not errors of the kernels.
  "$sanitizer" --tool memcheck --error-exitcode 9 --report-api-errors no "$@"
}
check "$port_test" --gtest_filter='*Norm*:*Update*:*Widen*:*BlockSums*'
check "$layouts_test" --gtest_filter='*Order*:*AllKinds*:*Nan*'
check "$step_test" --gtest_filter='*EverySetting*'
