"""The programs of bench/ run to their end with a tiny model on the CPU, and leave nobody out without a word."""

import json
import pathlib
import subprocess
import sys

import pytest

BENCH = pathlib.Path(__file__).parents[3] / "bench"
LEFT_OUT = {
    "FSDP2 CPUOffloadPolicy, torch's AdamW": ("FSDP2 needs several ranks", "params are on the CPU"),
    "torchao CPUOffloadOptimizer, bf16, no clipping": ("torchao is not installed", "it needs a GPU"),
    "Megatron HybridDeviceOptimizer": ("megatron is not installed", "it needs a GPU"),
}


@pytest.mark.parametrize(
    "launcher", [[], ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]]
)
def test_iterations_of_everybody_are_measured_or_named(launcher, tmp_path):
    written = tmp_path / "iteration.json"
    arguments = ["--device", "cpu", "--iterations", "1", "--micro-batches", "1", "2", "--early-gib", "1"]
    ended = subprocess.run(
        [sys.executable, *launcher, BENCH / "iteration.py", *arguments, "--fractions", "1.0", "--json", written],
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert ended.returncode == 0, ended.stderr
    results = json.loads(written.read_text())["results"]
    measured = {name: result for name, result in results.items() if "seconds" in result}
    assert list(measured)[0] == "all on the device"
    assert {"hybridopt 100% fp32 state", "hybridopt 100% fp32 state, overlap, hooks"} < set(measured)
    assert "hybridopt 100% fp32 state, early updates, overlap, hooks" in measured
    for result in measured.values():
        assert set(result["seconds"]) == {"1", "2"}
        assert all(seconds > 0 for seconds in result["seconds"].values())
    for name, result in results.items():
        if name not in measured:
            assert f"{name}: left out, {result['left_out']}" in ended.stdout
    for name, reasons in LEFT_OUT.items():
        assert results[name]["left_out"].startswith(reasons)


def test_stashes_of_everybody_are_measured_or_named_and_have_the_bits_of_none(tmp_path):
    written = tmp_path / "stash.json"
    arguments = ["--device", "cpu", "--iterations", "1", "--rounds", "1", "--fractions", "0.5", "1.0"]
    ended = subprocess.run(
        [sys.executable, BENCH / "stash.py", *arguments, "--json", written], capture_output=True, text=True, timeout=600
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
