"""Runs examples/train_gpt.py in its quick mode, in its ways. Usage: train_gpt_test.py PATH"""

import pathlib
import re
import subprocess
import sys
import tempfile

import matplotlib.image


def run(*arguments):
    command = [sys.executable, sys.argv[1], "--quick", *arguments]
    output = subprocess.run(command, stdout=subprocess.PIPE, text=True)
    print(output.stdout)
    assert output.returncode == 0, f"{arguments}: exit status {output.returncode}"
    return output.stdout


def losses(output, name):
    return [line.split("loss")[1] for line in output.splitlines() if f"{name}: step" in line]


with tempfile.TemporaryDirectory() as folder:
    plot = pathlib.Path(folder) / "losses.png"
    output = run("--compare", "--plot", str(plot))
    assert "as float64 has it: yes" in output
    assert len(losses(output, "torch")) == len(losses(output, "hybridopt")) == 11
    for name in ("torch", "hybridopt"):
        assert re.search(rf"{name}: [1-9]\d* tokens/s; a step takes \d+\.\d ms \(median\)", output)
    assert re.search(r"^  update +\d+\.\d ms$", output, re.MULTILINE)
    assert matplotlib.image.imread(plot).shape[:2] == (600, 960)
    # Gradients that have left during backward make the same steps, to the last digit shown.
    overlapped = run("--overlap")
    assert losses(overlapped, "hybridopt") == losses(output, "hybridopt")
    first, last = (float(losses(output, "hybridopt")[i]) for i in (0, -1))
    assert last < first - 0.5, (first, last)
