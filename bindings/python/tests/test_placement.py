"""How much state goes on the device, and what the command line says of it."""

import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

import hybridopt
from hybridopt.placement import AUTO, choose


def planner(calls, least=100, most=1100, step=1):
    """Plans of a device that takes memory in units of `step` bytes."""

    def plan_of(fraction):
        calls.append(fraction)
        needed = least + fraction * (most - least)
        return SimpleNamespace(device_bytes=-(-int(needed) // step) * step)

    return plan_of


@pytest.mark.parametrize("step", [1, 7, 64])
@pytest.mark.parametrize("budget", [101, 300, 550, 1000, 1099])
def test_auto_fills_the_budget_and_no_more(budget, step):
    calls = []
    placement = choose(AUTO, budget, False, planner(calls, step=step))
    if placement.offload_fraction == 1.0:
        assert budget < 100 + 2 * step
    used = planner([], step=step)(placement.device_fraction).device_bytes
    assert used <= max(budget, 100 + step)
    assert used > budget - 2 * step - 2
    assert len(calls) < 20
    assert placement.reason


def test_auto_at_its_ends():
    everything = choose(AUTO, 1100, False, planner([]))
    assert everything.offload_fraction == 0.0 and "all state is" in everything.reason
    nothing = choose(AUTO, 100, False, planner([]))
    assert nothing.offload_fraction == 1.0 and "even without state" in nothing.reason


def test_on_the_host_there_is_nothing_to_choose():
    placement = choose(AUTO, 1, True, None)
    assert placement.offload_fraction == 1.0 and "in host memory" in placement.reason
    assert choose(0.25, None, False, None).device_fraction == 0.75


def test_the_fraction_may_be_set_at_any_time():
    param = torch.nn.Parameter(torch.ones(8))
    optimizer = hybridopt.AdamW([param], offload_fraction=0.5)
    optimizer.set_offload_fraction(0.25)  # before the first step too
    for _ in range(2):
        param.grad = torch.ones(8)
        optimizer.step()
        before = optimizer.state[param]["exp_avg"].clone()
        optimizer.set_offload_fraction(0.0)
        assert optimizer.state[param]["exp_avg"].equal(before)  # a view of where it is now
    assert optimizer.plan().offload_fraction == 1.0  # in host memory there is nothing to split
    for wrong in (-0.5, 2.0, float("nan"), "auto"):
        with pytest.raises(ValueError, match="offload_fraction"):
            optimizer.set_offload_fraction(wrong)


def test_auto_says_why(capfd):
    import torch

    import hybridopt

    param = torch.nn.Parameter(torch.ones(3))
    optimizer = hybridopt.AdamW([param], offload_fraction="auto", device_budget_bytes=10)
    param.grad = torch.ones(3)
    optimizer.step()
    assert "hybridopt: offload_fraction 1.0000: the parameters are in" in capfd.readouterr().err
    plan = optimizer.plan()
    assert (plan.offload_fraction, plan.element_count, plan.fits) == (1.0, 3, True)
    assert "in host memory" in plan.reason
    assert plan.host_state_bytes.keys() == {"exp_avg", "exp_avg_sq"}


def test_memory_that_is_interleaved_gives_the_same_bits_and_a_fall_back_is_told(capfd):
    import torch

    import hybridopt
    from hybridopt import abi

    bits = []
    for policy in ("near", "interleaved"):
        param = torch.nn.Parameter(torch.linspace(-1, 1, 100_000))
        optimizer = hybridopt.AdamW([param], numa_policy=policy)
        param.grad = torch.linspace(1, -1, 100_000)
        optimizer.step()
        bits.append(param.detach().numpy().tobytes())
        plan = optimizer.plan()
        assert sum(plan.numa_bytes.values()) + plan.numa_unknown_bytes == plan.host_bytes
    assert bits[0] == bits[1]
    told = "memory is not interleaved" in capfd.readouterr().err
    with abi.Context(numa_policy=abi.OFFLOAD_NUMA_INTERLEAVED) as context:
        assert told == (context.info().numa_policy == abi.OFFLOAD_NUMA_NEAR)


def command(*arguments):
    return subprocess.run(
        [sys.executable, "-m", "hybridopt", *arguments], capture_output=True, text=True
    )


def test_info():
    run = command("info")
    assert run.returncode == 0, run.stderr
    first, *rest = run.stdout.splitlines()
    assert first.startswith("hybridopt 0.")
    assert [line.split()[0] for line in rest[:4]] == ["library", "ABI", "kernels", "threads"]


@pytest.mark.parametrize(
    ("arguments", "host", "device"),
    [
        (["7e9"], 7e9 * 12, 0),  # master and two moments
        (["7e9", "--offload-fraction", "0.25"], 7e9 * 3, 7e9 * 9),
        (["1e9", "--algorithm", "lion", "--dtype", "float32"], 1e9 * 8, 0),
        (["2e9", "--algorithm", "sgd", "--dtype", "float16"], 2e9 * 8, 0),
    ],
)
def test_plan(arguments, host, device):
    run = command("plan", *arguments)
    assert run.returncode == 0, run.stderr
    sizes = {line.split()[0]: float(line.split()[1]) for line in run.stdout.splitlines()[1:3]}
    # Beside the state: the staging ring, below 100 MiB.
    assert sizes["host"] == pytest.approx(host / 2**30, rel=0.002, abs=0.1)
    assert sizes["device"] == pytest.approx(device / 2**30, rel=0.002, abs=0.06)


@pytest.mark.parametrize("text", ["0", "abc", "nan", "inf", "-7B", "B", "", "7BB", "0.5"])
def test_plan_of_what_is_no_number(text):
    run = command("plan", "--", text)
    assert run.returncode == 2
    assert f"argument elements: {text!r}, expected how many parameters, at least 1, as 7e9" in run.stderr


@pytest.mark.parametrize("text", ["2", "-1", "nan", "half"])
def test_plan_of_no_fraction(text):
    run = command("plan", "7B", f"--offload-fraction={text}")
    assert run.returncode == 2
    assert f"argument --offload-fraction: {text!r}, expected 0 (all on the device) to 1" in run.stderr


def test_plan_takes_numbers_as_people_write_them():
    plans = {command("plan", text).stdout for text in ("7e9", "7B", "7b", "7000M", "7000000000")}
    assert len(plans) == 1 and "7,000,000,000 elements" in plans.pop()
