"""The lines of Python in docs/BINDINGS.md that import MODULE run as they are and print what they say.

Usage: docs_test.py MODULE SOURCE_DIR, with MODULE on PYTHONPATH
"""

import contextlib
import io
import os
import re
import sys

module, source = sys.argv[1:]
os.chdir(source)
with open("docs/BINDINGS.md", encoding="utf-8") as file:
    blocks = re.findall(r"^```python\n(.*?)^```", file.read(), re.DOTALL | re.MULTILINE)
(code,) = (block for block in blocks if f"import {module}" in block)
printed = io.StringIO()
with contextlib.redirect_stdout(printed):
    exec(compile(code, "docs/BINDINGS.md", "exec"), {})
(expected,) = re.findall(r"^print\(.*\)  # (.*)$", code, re.MULTILINE)
assert printed.getvalue() == f"{expected}\n", printed.getvalue()
