#!/bin/bash
# Runs the MPI adaptor on several ranks, each a process. Skipped (status 77) if there is no mpirun, or
# if the build found no MPI.
# Usage: mpi_test.sh MODE [PROGRAM]
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
  table | step | exchange)
    for ranks in 1 2 4; do
      run 90 "$ranks" || fail "$ranks ranks"
    done
    ;;
  state)
    run 60 1 || fail "states of MPI"
    ;;
  hang)
    # The remaining ranks end the job with status 3 after each has got the error and has destroyed
    # everything.
    status=0
    run 90 4 || status=$?
    ((status == 3)) || fail "status $status"
    ;;
  exit)
    # mpirun ends the other ranks as soon as one has exited, unless they find out before that.
    status=0
    run 90 4 || status=$?
    ((status == 5 || status == 3)) || fail "status $status"
    ;;
  *)
    fail "unknown mode $mode"
    ;;
esac
