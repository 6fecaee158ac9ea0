"""Runs Python programs, each to the end of its interpreter. Not a test itself. The programs are forked from one
process that has imported torch and has no threads, because the import takes longer than most programs. ten_lines()
is one of the programs."""

import json
import os
import pathlib
import re
import subprocess
import sys
from types import SimpleNamespace

SERVER = """
import json, os, sys
import hybridopt.optimizers.algorithms, torch
import torch._dynamo  # an optimizer's first call does it

for line in sys.stdin:
    request = json.loads(line)
    pipes = [os.pipe(), os.pipe()]
    child = os.fork()
    if child == 0:
        for number, pipe in enumerate(pipes, 1):
            os.dup2(pipe[1], number)
            os.close(pipe[0]), os.close(pipe[1])
        sys.argv = request["argv"]
        # The code runs with the globals of this program, which live until the interpreter ends.
        exec(compile(request["code"], "script", "exec"), globals())
        break
    texts = []
    for reading, writing in pipes:
        os.close(writing)
        with open(reading) as output:
            texts.append(output.read())
    print(json.dumps([os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), *texts]), flush=True)
"""


class Scripts:
    """run() is subprocess.run() of `python -c CODE ARGUMENT...`, with its output as text."""

    def __init__(self):
        self._server = subprocess.Popen(
            [sys.executable, "-c", SERVER],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def run(self, code, *arguments):
        request = {"code": code, "argv": ["-c", *map(os.fspath, arguments)]}
        self._server.stdin.write(json.dumps(request) + "\n")
        self._server.stdin.flush()
        status, stdout, stderr = json.loads(self._server.stdout.readline())
        return SimpleNamespace(returncode=status, stdout=stdout, stderr=stderr)

    def close(self):
        self._server.stdin.close()
        self._server.stdout.close()
        self._server.wait()


def ten_lines():
    """The README's lines of PyTorch."""
    readme = (pathlib.Path(__file__).parents[3] / "README.md").read_text()
    blocks = re.findall(r"^```python\n(.*?)^```", readme, re.DOTALL | re.MULTILINE)
    (code,) = (block for block in blocks if "hybridopt.AdamW(" in block)
    return code
