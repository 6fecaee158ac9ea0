# What tests with processes for ranks share; to be sourced with $program set. The test is skipped
# (status 77) where there is no mpirun, or where the build found no MPI and the program is empty.
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
  # One machine, no network; more ranks than cores; perhaps root, perhaps without ssh.
  mpi_options=(--allow-run-as-root --oversubscribe --bind-to none
    --mca pml ob1 --mca btl self,vader --mca plm isolated)
fi

# mpi_run SECONDS RANKS PROGRAM [ARGUMENT...]. Processes of a lost run must not outlive it: timeout
# ends mpirun, and mpirun its ranks.
mpi_run() {
  local status=0
  timeout --kill-after=10 "$1" mpirun "${mpi_options[@]}" -n "$2" "${@:3}" || status=$?
  ((status != 124 && status != 137)) || { echo "FAILED: hangs"; exit 1; }
  return "$status"
}
