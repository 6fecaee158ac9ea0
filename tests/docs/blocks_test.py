"""The Python blocks of pages run as they are, and print what their comments say. The blocks of a page run one after
the other, as one program, in an empty folder that contains the header.

Usage: blocks_test.py [--having WORD] PAGE..., from the source folder; --having leaves out blocks without the word
"""

import argparse
import contextlib
import io
import os
import re
import tempfile
from pathlib import Path


def run(page, word):
    blocks = re.findall(r"^```python\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE)
    blocks = [block for block in blocks if word in block]
    if not blocks:
        raise SystemExit(f"FAILED: {page} has no block of Python with '{word}'")
    variables, printed = {"__name__": "__main__"}, io.StringIO()
    with tempfile.TemporaryDirectory() as folder:
        source = os.getcwd()
        Path(folder, "include").symlink_to(Path("include").resolve())
        os.chdir(folder)
        with contextlib.redirect_stdout(printed):
            for number, block in enumerate(blocks, 1):
                exec(compile(block, f"{page}, block {number}", "exec"), variables)
        os.chdir(source)
    expected = re.findall(r"^\s*print\(.*\)  # (.*)$", "".join(blocks), re.MULTILINE)
    if printed.getvalue().splitlines() != expected:
        raise SystemExit(f"FAILED: {page} prints {printed.getvalue().splitlines()}, its comments say {expected}")
    print(f"{os.path.relpath(page)}: {len(blocks)} blocks, {len(expected)} lines printed")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--having", default="")
    parser.add_argument("pages", nargs="+", type=Path)
    options = parser.parse_args()
    for page in options.pages:
        run(page.resolve(), options.having)
