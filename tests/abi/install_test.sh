#!/bin/bash
# Installs the build, moves the tree, then builds and runs a C99 consumer by pkg-config and a C++20
# consumer by find_package against it. Usage: install_test.sh BUILD_DIR LIBDIR
set -euo pipefail
build=$1
libdir=$2
consumer=$(cd "$(dirname "$0")/consumer" && pwd)
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT

cmake --install "$build" --prefix "$scratch/first" >/dev/null
mv "$scratch/first" "$scratch/moved"
prefix=$scratch/moved
headers="offload.h"
for adaptor in mpi nccl; do
  [[ ! -e $prefix/$libdir/libhybridopt_$adaptor.so ]] || headers+=" offload_$adaptor.h"
done
headers+=" offload_simple.h"
[[ $(find "$prefix" -name '*.h' -printf '%P\n' | sort | xargs) == \
  "$(printf 'include/%s ' $headers | xargs)" ]] ||
  { echo "FAILED: $headers must be the only headers that are installed"; exit 1; }

if [[ -e $build/tools/hybridopt ]]; then
  env -u LD_LIBRARY_PATH "$prefix/bin/hybridopt" --version  # it finds the library by itself
fi

export LD_LIBRARY_PATH=$prefix/$libdir

export PKG_CONFIG_PATH=$prefix/$libdir/pkgconfig
gcc -std=c99 -Wall -Wextra -Wpedantic -Werror "$consumer/consumer.c" -o "$scratch/consumer" \
  $(pkg-config --cflags --libs hybridopt)
"$scratch/consumer"
echo "C99 consumer by pkg-config: $(pkg-config --modversion hybridopt)"

# With the run path that docs/guides/from_c.md gives, it needs no LD_LIBRARY_PATH.
gcc -std=c99 "$consumer/consumer.c" -o "$scratch/consumer_rpath" $(pkg-config --cflags --libs hybridopt) \
  -Wl,-rpath,"$(pkg-config --variable=libdir hybridopt)"
env -u LD_LIBRARY_PATH "$scratch/consumer_rpath" >/dev/null

# The README's program, as it stands there, prints what its comment says.
sed -n '/^```c$/,/^```$/p' "$consumer/../../../README.md" | sed '1d;$d' >"$scratch/readme.c"
gcc -std=c99 -Wall -Wextra -Wpedantic -Werror "$scratch/readme.c" -o "$scratch/readme" \
  $(pkg-config --cflags --libs hybridopt)
printed=$("$scratch/readme")
[[ -n $printed ]] && grep -qF "/* $printed */" "$scratch/readme.c" ||
  { echo "FAILED: README.md's program prints '$printed'"; exit 1; }
echo "README.md's program"

cmake -S "$consumer" -B "$scratch/build" -G Ninja -DCMAKE_PREFIX_PATH="$prefix"
cmake --build "$scratch/build"
"$scratch/build/consumer"
echo "C++20 consumer by find_package"

# The Debian package holds the same files, and names what it needs.
(cd "$scratch" && cpack -G DEB --config "$build/CPackConfig.cmake" >"$scratch/cpack" 2>&1) ||
  { cat "$scratch/cpack"; exit 1; }
package=$(echo "$scratch"/hybridopt_*.deb)
dpkg-deb --extract "$package" "$scratch/package"
diff <(cd "$prefix" && find . -type f,l | sort) <(cd "$scratch/package/usr" && find . -type f,l | sort) ||
  { echo "FAILED: left: installed; right: in the Debian package"; exit 1; }
[[ $(dpkg-deb --field "$package" Depends) == *libc6* ]] ||
  { echo "FAILED: the Debian package does not say that it needs libc6"; exit 1; }
echo "Debian package: $(basename "$package")"
