"""bench/iteration.py runs to its end with a tiny model on the CPU, and leaves nobody out without a word."""

import json
import pathlib
import subprocess
import sys

import pytest

BENCH = pathlib.Path(__file__).parents[3] / "bench/iteration.py"
LEFT_OUT = {
    "FSDP2 CPUOffloadPolicy, torch's AdamW": ("FSDP2 needs several ranks", "params are on the CPU"),
    "torchao CPUOffloadOptimizer, bf16, no clipping": ("torchao is not installed", "it needs a GPU"),
    "Megatron HybridDeviceOptimizer": ("megatron is not installed", "it needs a GPU"),
}


@pytest.mark.parametrize(
    "launcher", [[], ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]]
)
def test_everybody_is_measured_or_named(launcher, tmp_path):
    written = tmp_path / "iteration.json"
    arguments = ["--device", "cpu", "--iterations", "1", "--micro-batches", "1", "2", "--early-gib", "1"]
    ended = subprocess.run(
        [sys.executable, *launcher, BENCH, *arguments, "--fractions", "1.0", "--json", written],
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
