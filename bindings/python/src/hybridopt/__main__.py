"""The `hybridopt` command, and `python -m hybridopt`: runs the program that is installed with the package, or the
program that HYBRIDOPT_TOOL names."""

from __future__ import annotations

import os
import pathlib
import sys


def main() -> None:
    inside = pathlib.Path(__file__).with_name("bin") / "hybridopt"
    program = os.environ.get("HYBRIDOPT_TOOL") or str(inside)
    if not os.access(program, os.X_OK):
        sys.exit(
            f"hybridopt: there is no program {program}; install the package with pip, or let "
            "HYBRIDOPT_TOOL name a program that CMake built (build/release/tools/hybridopt)"
        )
    os.execv(program, ["hybridopt", *sys.argv[1:]])


if __name__ == "__main__":
    main()
