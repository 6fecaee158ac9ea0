#!/bin/bash
# Runs the MPI adaptor with processes for ranks. Skipped (status 77) where there is no mpirun, or
# where the build found no MPI. Usage: mpi_test.sh MODE [PROGRAM]
set -euo pipefail
mode=$1
program=${2:-}

if [[ -z $program ]]; then
  echo "skipped: built without MPI (HYBRIDOPT_MPI)"
  exit 77
fi
if ! command -v mpirun >/dev/null; then
  echo "skipped: no mpirun"
  exit 77
fi

options=()
if mpirun --version 2>/dev/null | grep -q 'Open MPI'; then
  # One machine, no network; more ranks than cores; perhaps root, perhaps without ssh.
  options=(--allow-run-as-root --oversubscribe --bind-to none
    --mca pml ob1 --mca btl self,vader --mca plm isolated)
fi

# Processes of a lost run must not outlive it: timeout ends mpirun, and mpirun its ranks.
run() {
  local status=0
  timeout --kill-after=10 "$1" mpirun "${options[@]}" -n "$2" "$program" "$mode" || status=$?
  ((status != 124 && status != 137)) || { echo "FAILED: hangs"; exit 1; }
  return "$status"
}

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
