"""Runs examples/05_pytorch.py in its quick mode, in each of its ways."""

import argparse
import contextlib
import importlib
import io
import pathlib
import re
import subprocess
import sys
import tempfile
import unittest.mock

import matplotlib.image
import torch

sys.path.insert(0, str(pathlib.Path(sys.argv[1]).parent))
train_gpt = importlib.import_module("05_pytorch")


def run(*arguments):
    command = [sys.executable, sys.argv[1], "--quick", *arguments]
    output = subprocess.run(command, stdout=subprocess.PIPE, text=True)
    print(output.stdout)
    assert output.returncode == 0, f"{arguments}: exit status {output.returncode}"
    return output.stdout


def refused(*arguments):
    """The error text of a program that refuses before it trains."""
    command = [sys.executable, sys.argv[1], "--quick", *arguments]
    output = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert output.returncode == 1, f"{arguments}: exit status {output.returncode}"
    assert "step 1," not in output.stdout, "it has trained before it refused"
    return output.stderr


def not_parsed(*arguments):
    """The error text about a command line, which the program reads before all else."""
    text = io.StringIO()
    with contextlib.redirect_stderr(text), unittest.mock.patch("sys.argv", ["05_pytorch.py", "--quick", *arguments]):
        try:
            train_gpt.parse()
        except SystemExit as error:
            return text.getvalue() if error.code == 2 else f"{error.code}\n"
    raise AssertionError(f"{arguments} are not refused")


def losses(output, name):
    return [line.split("loss")[1] for line in output.splitlines() if f"{name}: step" in line]


with tempfile.TemporaryDirectory() as folder:
    plot = pathlib.Path(folder) / "losses.png"
    output = run("--compare", "--plot", str(plot))
    assert "as exact as fp32 can be: yes" in output
    assert len(losses(output, "torch")) == len(losses(output, "hybridopt")) == 11
    for name in ("torch", "hybridopt"):
        assert re.search(rf"{name}: [1-9]\d* tokens/s; a step takes \d+\.\d ms \(median\)", output)
    assert re.search(r"^  update +\d+\.\d ms$", output, re.MULTILINE)
    assert matplotlib.image.imread(plot).shape[:2] == (600, 960)
    # If gradients leave during the backward pass, the steps are the same, to the last digit shown.
    overlapped = run("--overlap")
    assert losses(overlapped, "hybridopt") == losses(output, "hybridopt")
    first, last = (float(losses(output, "hybridopt")[i]) for i in (0, -1))
    assert last < first - 0.5, (first, last)

    # A step of several batches is followed in float64 too, and gradients that leave in its last pass change nothing.
    accumulated = run("--micro-batches", "3")
    assert "as exact as fp32 can be: yes" in accumulated
    assert losses(run("--micro-batches", "3", "--overlap"), "hybridopt") == losses(accumulated, "hybridopt")
    assert losses(accumulated, "hybridopt") != losses(overlapped, "hybridopt")

    # The preset for a model that is too large for its GPU keeps activations on the host, and has the same losses.
    small_state = ("--dtype", "bfloat16", "--master-layout", "split", "--state-dtype", "bfloat16", "--overlap")
    short = ("--steps", "4", "--batch", "4")
    plain = run(*small_state, *short)
    plot = pathlib.Path(folder) / "memory.png"
    preset = run("--preset", "14g", "--stash-budget", str(2 / 1024), "--memory-plot", str(plot), *short)
    assert losses(preset, "hybridopt") == losses(plain, "hybridopt") != losses(overlapped, "hybridopt")
    assert re.search(r"the host will hold \d+\.\d MiB of state, gradients .* \d+\.\d MiB are available", preset)
    rows = re.findall(r"^  (forward|backward|step) +(.*?)  \| (.*)$", preset, re.MULTILINE)
    assert [label for label, _, _ in rows] == 3 * ["forward", "backward", "step"]
    host = [[float(number) for number in numbers.split()] for _, _, numbers in rows]
    params = 2 * int(re.search(r"^(\d+) params", preset, re.MULTILINE)[1]) / (1 << 20)
    assert host[0][2] > 1 and host[1][2] == host[2][2] == 0  # the stash
    assert abs(host[1][1] - params) < 0.1 and host[2][1] == 0  # gradients, which have left
    assert abs(host[1][0] - 3 * params) < 0.2  # state: lower halves of masters and two moments
    peak, everything = re.search(r"peak on the device (\S+) MiB; all of it there would take (\S+) MiB", preset).groups()
    assert float(peak) < float(everything)
    assert matplotlib.image.imread(plot).shape[:2] == (720, 1080)
    text = refused("--stash", "--stash-budget", "1000000")
    assert re.search(r"the host will hold 10240\d+\.\d MiB .*; choose a smaller model, --stash-budget or", text), text

    # So is what the training cannot have.
    short_text = pathlib.Path(folder) / "short.txt"
    short_text.write_bytes(bytes(1319))
    for path, found in ((short_text, 1319), (f"{folder}/none", 0)):
        text = refused("--data", str(path))
        assert text == f"--data: found {found} bytes of text in '{path}', expected at least 1320\n", text
    for flag in ("--steps", "--micro-batches", "--heads"):
        for value in ("0", "-1", "2.5", "many"):
            assert f"argument {flag}: got '{value}', expected a whole number above 0" in not_parsed(f"{flag}={value}")
    assert "--width is 64, expected a multiple of --heads, which is 3" in not_parsed("--heads", "3")

    # What would keep a picture from being drawn is told before the training.
    for flag in (("--compare", "--plot"), ("--timeline",), ("--memory-plot",)):
        with unittest.mock.patch.dict(sys.modules, {"matplotlib": None}):
            text = not_parsed(*flag, str(plot))
        assert text == f"{flag[0]} draws a picture, which needs matplotlib: pip install matplotlib\n", text
        for path in (f"{folder}/none/plot.png", folder):
            text = not_parsed(*flag, path)
            assert text == f"{flag[0]}: got {path!r}, expected a file in a folder that can be written to\n", text

    # The preset with masters of 24 bits has the losses of its options too, with part of the state where the params are.
    masters24 = ("--dtype", "bfloat16", "--master-layout", "split24", "--state-dtype", "bfloat16", "--overlap")
    plain24 = run(*masters24, *short)
    preset24 = run("--preset", "20g", "--stash-budget", str(2 / 1024), "--memory-plot", str(plot), *short)
    assert losses(preset24, "hybridopt") == losses(plain24, "hybridopt")
    state = [float(re.search(r"^memory: (\S+) MiB of state", each, re.MULTILINE)[1]) for each in (plain, plain24)]
    assert state[0] > state[1]  # few steps may show the same losses with either

# The settings of the presets on a GPU.
for name, count in (("14g", 14_060_747_008), ("20g", 20_403_652_864)):
    with torch.device("meta"):
        model = train_gpt.Gpt(argparse.Namespace(**train_gpt.PRESETS[name]["cuda"]))
    assert sum(param.numel() for param in model.parameters()) == count, name
