# Sourced by the style tests. Prints the files of the tree that match any of the given patterns, except
# build outputs. It does not use git, so it also works in a source archive.
# Usage: files_of SOURCE_DIR PATTERN...
files_of() {
  local root=$1 pattern names=()
  shift
  for pattern in "$@"; do names+=(-o -name "$pattern"); done
  find "$root" \( -path "$root/build" -o -path "$root/.git" -o -path "$root/.venv" -o \
    -path "$root/.venv-peers" \) -prune -o \
    -type f \( "${names[@]:1}" \) -print | sort
}
