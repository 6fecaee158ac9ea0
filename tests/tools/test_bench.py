"""hybridopt bench: steps compared with their ceilings. No figure is compared with a limit."""

import json
import os
import subprocess
import sys

import pytest
from command import DONE, USAGE, misuse, on_a_terminal, refuse, succeed, tool

SMALL = ["bench", "--memory", "16MiB", "--seconds", "0"]
LAYOUTS = ["fp32", "split", "small"]
STATE = {"fp32": 12, "split": 10, "small": 6}  # bytes of a param, which a step reads and writes
# In addition to its state, a step on the host reads the gradient and writes the param; with split masters it also reads
# the param.
STEP = {"fp32": 28, "split": 26, "small": 18}


@pytest.fixture(scope="module")
def told():
    return json.loads(succeed(*SMALL, "--device", "sim", "--json"))


def test_every_executor_is_measured_with_every_layout(told):
    assert told["status"] == "OK" and told["memory_bytes_per_s"] > 0 and len(told["link"]) == 3
    kinds = [("host", True), ("host", False), ("cpu", True), ("streamed", True), ("both", True), ("device", True)]
    rows = [(row["executor"], row["gradients_checked"], row["layout"]) for row in told["rows"]]
    assert rows == [(*kind, layout) for kind in kinds for layout in LAYOUTS]
    for row in told["rows"]:
        assert row["rounds"] == 3 and row["seconds"] > 0  # without a time limit there are the fewest rounds
        assert row["params_per_s"] * row["seconds"] == pytest.approx(told["elements"])


def test_bytes_are_those_that_a_step_moves(told):
    elements = told["elements"]
    for row in told["rows"]:
        layout, executor = row["layout"], row["executor"]
        moved = [row[key] / elements for key in ("memory_bytes", "down_bytes", "up_bytes")]
        if executor == "host":
            assert moved == [STEP[layout] + (2 if row["gradients_checked"] else 0), 0, 0]
        elif executor == "cpu":
            down = 2 if layout == "fp32" else 4  # split masters also need the param
            assert moved == [STEP[layout] + down + 2, down, 2]
        elif executor == "streamed":
            assert moved == [2 * STATE[layout], STATE[layout], STATE[layout]]
        elif executor == "device":
            assert moved == [0, 0, 0]


def test_a_row_has_a_limit_where_bytes_are_moved(told):
    for row in told["rows"]:
        if row["executor"] == "device":
            assert row["limit"] is None and row["speed_of_light_share"] is None
        else:
            assert row["limit"] in ("memory", "link down", "link up", "link both ways")
            assert row["speed_of_light_share"] > 0
        if row["executor"] == "host":
            assert row["limit"] == "memory"


def test_text_is_a_table_without_the_device_where_there_is_none():
    lines = succeed(*SMALL, "--device", "none").splitlines()
    assert lines[0].startswith("hybridopt 0.") and "AdamW over 0.75 Mi params of bf16" in lines[1]
    assert lines[2].startswith("memory ") and "link" not in lines[2] and lines[3] == ""
    assert lines[4].split("  ")[0] == "step" and lines[4].endswith("% of speed of light")
    assert len(lines) == 5 + 2 * len(LAYOUTS)
    assert all(line.split("  ")[0] in ("CPU threads, params on the host", ".. gradients known to be finite")
               for line in lines[5:])  # fmt: skip


def test_figures_of_a_busy_machine_are_told_from_others():
    spin = [sys.executable, "-c", "while True: pass"]
    others = [subprocess.Popen(spin) for _ in os.sched_getaffinity(0)]
    try:
        line = succeed(*SMALL, "--device", "none").splitlines()[1]
    finally:
        for other in others:
            other.kill()
            other.wait()
    assert line.endswith(" CPUs busy: run it again while the machine is quiet, these figures say little")


def test_a_terminal_sees_what_is_being_measured():
    shown, _ = on_a_terminal(*SMALL, "--device", "none")
    assert "\rmeasuring CPU threads, params on the host, split masters ..\x1b[K" in shown
    assert shown.endswith("\r\x1b[K")


def test_what_cannot_be_measured_is_refused():
    refuse(USAGE, "--memory is 1048576 bytes, expected 16.0 MiB to ", "bench", "--memory", "1MiB")
    refused = tool("bench", "--device", "cuda", "--memory", "16MiB", "--seconds", "0")
    assert refused.returncode == DONE or refused.stderr.startswith("hybridopt: th")
    for seconds in ("3s", "-1", "1e9", "nan", ""):
        expected = "expected a number of seconds from 0 to 3600, as 30"
        misuse(f"--seconds: got '{seconds}', {expected}", "bench", "--seconds", seconds)
    misuse("--device: got 'tpu', expected cuda, sim or none", "bench", "--device", "tpu")
    misuse("'here' was not expected: no more words belong here", "bench", "here")
