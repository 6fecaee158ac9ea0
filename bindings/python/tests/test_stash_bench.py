"""bench/stash.py runs to its end with a tiny model on the CPU, and everybody has the bits of no stash."""

import json
import pathlib
import subprocess
import sys

BENCH = pathlib.Path(__file__).parents[3] / "bench/stash.py"


def test_everybody_is_measured_or_named(tmp_path):
    written = tmp_path / "stash.json"
    arguments = ["--device", "cpu", "--iterations", "1", "--rounds", "1", "--fractions", "0.5", "1.0"]
    ended = subprocess.run(
        [sys.executable, BENCH, *arguments, "--json", written], capture_output=True, text=True, timeout=600
    )
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.startswith("the CPU, a tiny model")
    found = json.loads(written.read_text())
    results = found["results"]
    left_out = {name: result.pop("left_out") for name, result in results.items() if "left_out" in result}
    for name, reason in left_out.items():
        assert name == "torchtune OffloadActivations" and f"{name}: left out, {reason}" in ended.stdout
    measured = {name: result for name, result in results.items() if name not in left_out}
    names = ["no stash", "stash", "stash, wrapped blocks", "stash, 50%", "stash, 100%", "torch save_on_cpu"]
    assert list(measured) == names
    for result in measured.values():
        assert result["seconds"] > 0 and result["same_bits"]
    whole, half = (measured[f"stash, {share}"]["choice"] for share in ("100%", "50%"))
    assert 0 < half["chosen_bytes"] <= half["eligible_bytes"] / 2 < whole["chosen_bytes"]
    assert measured["stash, 100%"]["stats"]["pushed_bytes"] > 0
    assert list(found["link"]) == ["in the step's context", "in another context"]
    for figures in found["link"].values():
        assert figures["prefetch_alone_seconds"] > 0 and figures["step_beside_seconds"] > 0
    assert found["link"]["in another context"]["gave_way_copies"] == 0
    assert "beside steps whose state streams" in ended.stdout
