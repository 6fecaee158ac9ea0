"""The programs of bench/ run to their end with a tiny model on the CPU, and name every contender that they leave
out."""

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


def test_phases_of_each_fraction_are_measured():
    command = [sys.executable, BENCH / "phases.py", "--device", "cpu", "--layers", "1", "--width", "64"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert ended.returncode == 0, ended.stderr
    rows = [line.split("|")[1:-1] for line in ended.stdout.splitlines()[2:]]
    assert [row[0].strip() for row in rows] == ["0.00", "0.25", "0.50", "0.75"]
    assert all(float(row[4]) > 0 and float(row[5]) > 0 for row in rows)


def few_bytes(*arguments):
    ended = subprocess.run(
        [sys.executable, BENCH / "few_bytes.py", "--device", "cpu", "--no-compile", *arguments],
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout


def test_codes_of_few_bytes_are_what_their_file_says():
    lines = few_bytes("--check").splitlines()
    assert len(lines) == 14 and all(line.endswith(": good") for line in lines)


def test_trainings_in_few_bytes_run_once_for_a_file(tmp_path):
    results = tmp_path / "few_bytes.jsonl"
    forms = ["fp32", "fp32, nudged", "ratio, log 10 of 128, 24, misread", "softsign, root of 32"]
    arguments = ["--tiny", "--problems", "outliers", "sparse", "switch", "--forms", *forms, "--results", results]
    assert few_bytes(*arguments, "--budget-seconds", "0").endswith("switch: ratio, log 10 of 128, 24, misread\n")
    assert results.read_text() == ""
    assert few_bytes(*arguments).endswith("nothing is left\n")
    rows = [json.loads(line) for line in results.read_text().splitlines()]
    batches = [("outliers", 0), ("outliers", 1), ("outliers", 3), ("sparse", 0), ("sparse", 1)]
    batches += [("switch", 0), ("switch", 1), ("switch", 2)]
    assert [(row["problem"], row["form"], row["seed"]) for row in rows] == [
        (problem, forms[index], seed) for problem, index in batches for seed in (1, 2)
    ]
    assert all(0.1 < row["loss"] < 10 for row in rows)
    # A call that was interrupted: the last line is incomplete, and only its run is trained again.
    whole = results.read_text()
    results.write_text(whole[:-20])
    few_bytes(*arguments)
    again = [json.loads(line) for line in results.read_text().split("\n") if line.endswith("}")]
    assert [(row["problem"], row["form"], row["seed"], row["loss"]) for row in again] == [
        (row["problem"], row["form"], row["seed"], row["loss"]) for row in rows
    ]


def test_the_gate_of_few_bytes_is_the_one_in_its_head(tmp_path):
    results, forms = tmp_path / "few_bytes.jsonl", ("bf16", "bf16, 24", "softsign, root of 32")
    # The variance among the fp32 and nudged runs of a seed is 0.5 %^2, so two standard errors of two seeds are 1.414 %.
    text = {"fp32": (2, 4), "fp32, nudged": (2.02, 3.96), forms[0]: (2.026, 4.06), forms[1]: (2.028, 4.062)}
    text[forms[2]] = (2, 4)
    outliers = {"fp32": (1, 1), forms[0]: (1.009, 0.991), forms[1]: (1, 1), forms[2]: (1, 0.989)}
    scales = {"fp32": (1, 1), forms[0]: (3, 3), forms[1]: (1, float("nan"))}
    rows = [
        {"problem": problem, "form": form, "seed": seed, "loss": loss, "ends": [[0]], "steps": 1, "device": "CPU"}
        for problem, losses in (("text", text), ("outliers", outliers), ("scales", scales))
        for form, pair in losses.items()
        for seed, loss in zip((1, 2), pair, strict=True)
    ]
    results.write_text("".join(json.dumps(row) + "\n" for row in rows))
    printed = few_bytes("--table", results)
    assert "the mean within 1.414 %, two standard errors" in printed
    gate = [[cell.strip() for cell in line.split("|")[1:-1]] for line in printed.splitlines() if "betas" in line]
    assert [cells[0] for cells in gate] == list(forms)
    assert [cells[2:4] for cells in gate] == [["PASS", ""], ["FAIL", "text, scales"], ["FAIL", "outliers"]]


def test_steps_of_muon_on_the_cpu_are_measured():
    command = [sys.executable, BENCH / "muon_cpu.py", "--shapes", "16x8", "8x16", "--rounds", "1", "--json"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert ended.returncode == 0, ended.stderr
    results = json.loads(ended.stdout)["results"]
    assert list(results) == ["16x8", "8x16"]
    for result in results.values():
        assert {"hybridopt", "torch, products of fp32"} <= set(result)
        assert all(row["seconds"] > 0 and row["cpu_seconds"] > 0 for row in result.values())


def test_iterations_with_state_on_disk_are_measured(tmp_path):
    written = tmp_path / "disk.json"
    command = [sys.executable, BENCH / "disk.py", "--folder", tmp_path, "--disk-fraction", "0.5", "--saves", "--json", written]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert ended.returncode == 0, ended.stderr
    rows = json.loads(written.read_text())["rows"]
    assert len(rows) == 2 and all(value > 0 for row in rows for value in row)
    assert [path.name for path in tmp_path.iterdir()] == ["disk.json"]


def test_iterations_beside_saves_are_measured(tmp_path):
    written = tmp_path / "saves.json"
    command = [sys.executable, BENCH / "saves.py", "--folder", tmp_path, "--iterations", "1", "--json", written]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert ended.returncode == 0, ended.stderr
    results = json.loads(written.read_text())["results"]
    assert list(results) == ["auto, save 1", "auto, save 2", "0, save 1", "0, save 2"]
    for name, result in results.items():
        assert result["bytes"] > 0 and result["beside"] and name in ended.stdout
        assert (result["buffer"] > 0) == name.startswith("auto")
    assert [path.name for path in tmp_path.iterdir()] == ["saves.json"]
