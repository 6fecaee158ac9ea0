#!/bin/bash
# Runs the MPI adaptor with processes for ranks. Skipped (status 77) where there is no mpirun, or
# where the build found no MPI. Usage: mpi_test.sh MODE [PROGRAM]
set -euo pipefail
mode=$1
program=${2:-}

source "$(dirname "$0")/mpirun.sh"
run() { mpi_run "$1" "$2" "$program" "$mode"; }

fail() {
  echo "FAILED: $*"
  exit 1
}

case $mode in
  table | step)
    for ranks in 1 2 4; do
      run 90 "$ranks" || fail "$ranks ranks"
    done
    ;;
  state)
    run 60 1 || fail "states of MPI"
    ;;
  hang)
    # The ranks that are left end the job with 3, when each has been told and has destroyed all.
    status=0
    run 90 4 || status=$?
    ((status == 3)) || fail "status $status"
    ;;
  exit)
    # mpirun ends the others as soon as one has exited; or they find out first.
    status=0
    run 90 4 || status=$?
    ((status == 5 || status == 3)) || fail "status $status"
    ;;
  *)
    fail "unknown mode $mode"
    ;;
esac
