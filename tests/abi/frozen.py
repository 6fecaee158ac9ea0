#!/usr/bin/env python3
"""Compares what the library promises to compiled callers with the list of its minor version, frozen.txt: exported
symbols, the types of functions, offsets and sizes of struct fields, values of constants.

Usage: frozen.py SOURCE_DIR LIBHYBRIDOPT_SO LAYOUT_TEST [--update]
--update writes the list anew; the build's target frozen_abi calls it.
"""

import pathlib
import re
import subprocess
import sys

WHAT_TO_DO = """
What to do:
  1. Note the change in CHANGELOG.md, under the version that is in work.
  2. If a line was changed or removed, or a name keeps its line and has another meaning now, compiled callers break: while
     0.1.0 is unreleased a note is enough; after it raise the minor version (VERSION in CMakeLists.txt, the node in
     src/abi.map, kAbiVersion in src/abi.cpp, and docs/ABI.md). Lines that were only added break nobody.
  3. Write the list anew, and commit it with the change:  cmake --build --preset dev --target frozen_abi
"""


def output(*command):
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def symbols(library):
    """As "symbol offload_init@@HYBRIDOPT_0.1"; the version itself is an absolute symbol."""
    rows = [line.split() for line in output("readelf", "--dyn-syms", "--wide", library).splitlines()]
    exported = [row[7] for row in rows if len(row) == 8 and row[6] not in ("UND", "ABS", "Ndx")]
    return {f"symbol {name}": "" for name in sorted(exported)}


def functions(header):
    """The types of results and parameters; names of parameters are free to change."""
    code = " ".join(re.sub(r"/\*.*?\*/", " ", header, flags=re.S).split())
    found = {}
    for result, name, parameters in re.findall(r"OFFLOAD_API ([^;(]*?)(\w+)\(([^)]*)\);", code):
        types = [re.sub(r"\s*\b\w+$", "", text.strip()) for text in parameters.split(",")]
        found[f"function {name}"] = f"{result.strip()} ({', '.join(types) if parameters != 'void' else 'void'})"
    return found


def layout(layout_test):
    """Fields with offset and size, structs with 0 and size, constants with their value."""
    rows = [line.split() for line in output(layout_test, "--table").splitlines()]
    return {f"layout {row[0]}": " ".join(row[1:]) for row in rows}


def read(path):
    lines = path.read_text().splitlines() if path.exists() else []
    return dict(line.split(" = ") if " = " in line else (line, "") for line in lines)


def written(promises):
    return "".join(f"{key} = {value}\n" if value else f"{key}\n" for key, value in promises.items())


def differences(frozen, now):
    """Lines that say what is added, removed and changed."""
    for key in sorted(frozen.keys() | now.keys()):
        if key not in frozen:
            yield f"added:   {key} {now[key]}".rstrip()
        elif key not in now:
            yield f"removed: {key} {frozen[key]}".rstrip()
        elif frozen[key] != now[key]:
            yield f"changed: {key}: {frozen[key]}  ->  {now[key]}"


def main():
    source, library, layout_test = pathlib.Path(sys.argv[1]), sys.argv[2], sys.argv[3]
    path = source / "tests" / "abi" / "frozen.txt"
    now = symbols(library) | functions((source / "include" / "offload.h").read_text()) | layout(layout_test)
    counts = [sum(key.startswith(kind) for key in now) for kind in ("symbol", "function", "layout")]
    if counts[0] != counts[1] or counts[0] < 50 or counts[2] < 300:
        sys.exit(f"FAILED: not understood: {counts[0]} symbols, {counts[1]} functions, {counts[2]} lines of layout")
    found = list(differences(read(path), now))
    if sys.argv[4:] == ["--update"]:
        path.write_text(written(now))
        print(*found, f"{len(found)} lines differ from the list that was there", sep="\n")
    elif found:
        sys.exit("\n".join(["FAILED: the ABI is not that of tests/abi/frozen.txt", *found, WHAT_TO_DO]))
    else:
        print(f"{counts[0]} functions and {counts[2]} sizes, offsets and values are as in tests/abi/frozen.txt")


main()
