# Shared by the tests that run ranks as processes; to be sourced with $program set. The test is skipped
# (status 77) if there is no mpirun, or if the build found no MPI, so that the program is empty.
if [[ -z $program ]]; then
  echo "skipped: built without MPI (HYBRIDOPT_MPI)"
  exit 77
fi
if ! command -v mpirun >/dev/null; then
  echo "skipped: no mpirun"
  exit 77
fi

mpi_options=()
if mpirun --version 2>/dev/null | grep -q 'Open MPI'; then
  # For one machine without a network, with more ranks than cores, perhaps as root and without ssh.
  mpi_options=(--allow-run-as-root --oversubscribe --bind-to none
    --mca pml ob1 --mca btl self,vader --mca plm isolated)
fi

# mpi_run SECONDS RANKS PROGRAM [ARGUMENT...]. If a run hangs, its processes must not outlive it:
# timeout ends mpirun, and mpirun ends its ranks.
mpi_run() {
  local status=0
  timeout --kill-after=10 "$1" mpirun "${mpi_options[@]}" -n "$2" "${@:3}" || status=$?
  ((status != 124 && status != 137)) || { echo "FAILED: hangs"; exit 1; }
  return "$status"
}
