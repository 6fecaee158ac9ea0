"""The README's lines of Python that import MODULE run as they are and print what they say.

Usage: readme_test.py MODULE SOURCE_DIR, with MODULE on PYTHONPATH
"""

import contextlib
import io
import os
import re
import sys

module, source = sys.argv[1:]
os.chdir(source)
with open("README.md", encoding="utf-8") as file:
    blocks = re.findall(r"^```python\n(.*?)^```", file.read(), re.DOTALL | re.MULTILINE)
(code,) = (block for block in blocks if f"import {module}" in block)
printed = io.StringIO()
with contextlib.redirect_stdout(printed):
    exec(compile(code, "README.md", "exec"), {})
(expected,) = re.findall(r"^print\(.*\)  # (.*)$", code, re.MULTILINE)
assert abs(float(printed.getvalue()) - float(expected)) < 1e-6, printed.getvalue()
