"""How much state goes to the device, and what is printed about it."""

import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

import hybridopt
from hybridopt.engine import making
from hybridopt.engine.engine import Engine
from hybridopt.settings.placement import AUTO, Leftover, choose
from hybridopt.state.state_memory import StateMemory


def planner(calls, least=100, most=1100, step=1):
    """Plans for a device that allocates memory in units of `step` bytes."""

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
    optimizer.set_offload_fraction(0.25)  # also before the first step
    for _ in range(2):
        param.grad = torch.ones(8)
        optimizer.step()
        before = optimizer.state[param]["exp_avg"].clone()
        optimizer.set_offload_fraction(0.0)
        assert optimizer.state[param]["exp_avg"].equal(before)  # a view of the state's new place
    assert optimizer.plan().offload_fraction == 1.0  # on the host device there is nothing to split
    for wrong in (-0.5, 2.0, float("nan"), "auto"):
        with pytest.raises(ValueError, match="offload_fraction"):
            optimizer.set_offload_fraction(wrong)


class FakeMemory:
    """A device as placement.Leftover expects it."""

    def __init__(self, left, total):
        self.left, self.total, self.failures = left, total, 0

    def left_bytes(self):
        return self.left

    def total_bytes(self):
        return self.total

    def out_of_memory_count(self):
        return self.failures


def test_auto_takes_what_the_device_has_left_after_two_steps():
    memory, moves = FakeMemory(left=600, total=2000), []
    leftover = Leftover(memory, headroom=0.1)
    assert leftover.after_step(planner([]), moves.append) is None and moves == []
    placement = leftover.after_step(planner([]), moves.append)
    # 100 bytes of state are there already. Of the 600 bytes that are left, 200 are headroom. All state takes 1000
    # bytes.
    assert moves == [pytest.approx(0.4)] and placement.device_fraction == moves[0]
    assert "after 2 steps the device had 600 bytes left" in placement.reason
    for _ in range(3):
        assert leftover.after_step(planner([]), moves.append) is None
    assert not leftover.has_run_out()
    memory.failures = 1
    assert leftover.has_run_out()
    placement = leftover.give_back(moves.append)
    assert moves[1:] == [0.0] and placement.offload_fraction == 1.0 and "ran out" in placement.reason
    memory.failures = 2
    assert not leftover.has_run_out()  # nothing to give back


def test_auto_leaves_the_headroom_alone():
    memory = FakeMemory(left=200, total=2000)
    memory.failures = 3  # before Leftover took anything
    leftover = Leftover(memory, headroom=0.1)
    leftover.after_step(planner([]), None)
    placement = leftover.after_step(planner([]), None)
    assert placement.offload_fraction == 1.0 and "no room for state" in placement.reason
    memory.failures = 4
    assert not leftover.has_run_out()


@pytest.mark.parametrize("room", [0.3, 0.0])
def test_auto_tries_less_where_memory_is_in_pieces(room):
    moves = []

    def move(fraction):
        moves.append(fraction)
        if fraction > room:
            raise hybridopt.abi.OutOfDeviceMemoryError("no piece is as large", 0)

    leftover = Leftover(FakeMemory(left=500, total=2000), headroom=0.0)
    leftover.after_step(planner([]), move)
    placement = leftover.after_step(planner([]), move)
    if room > 0.0:
        assert moves == pytest.approx([0.5, 0.375, 0.281])
        assert placement.device_fraction == moves[-1]
    else:
        assert len(moves) == 5 and placement.offload_fraction == 1.0


@pytest.mark.parametrize("noticed_by", ["zero_grad", "step"])
def test_auto_moves_state_between_steps_and_says_so(noticed_by, monkeypatch, capfd):
    memory = FakeMemory(left=1 << 20, total=1 << 21)
    leftover = Leftover(memory, 0.25)
    monkeypatch.setattr(
        making,
        "leftover_of",
        lambda _, options: leftover if options["offload_fraction"] == AUTO else None,
    )
    moved = []
    move = Engine.set_device_fraction
    monkeypatch.setattr(
        Engine, "set_device_fraction", lambda *given: (moved.append(given[-1]), move(*given))
    )
    params = [torch.nn.Parameter(torch.ones(8)), torch.nn.Parameter(torch.ones(8))]
    optimizer = hybridopt.AdamW(params[:1], offload_fraction="auto", threads=1)
    plain = hybridopt.AdamW(params[1:], threads=1)

    def step():
        for param in params:
            param.grad = torch.ones(8)
        optimizer.step(), plain.step()
        assert torch.equal(*params)

    step()
    assert moved == []
    step()
    # These plans are for the host device, where state takes no bytes of a device's memory.
    assert moved == [1.0] and "512.0 KiB are headroom" in optimizer.plan().reason
    assert "after 2 steps the device had 1.0 MiB left" in capfd.readouterr().err
    step()
    assert moved == [1.0]
    memory.failures += 1
    optimizer.zero_grad() if noticed_by == "zero_grad" else step()
    assert moved == [1.0, 0.0] and optimizer.plan().offload_fraction == 1.0
    assert "torch ran out of device memory" in capfd.readouterr().err
    assert optimizer.memory_timeline()[-1 if noticed_by == "zero_grad" else -3].label == "auto"
    step()
    optimizer.set_offload_fraction(0.5)  # from now on the caller decides
    memory.failures += 1
    step()
    assert moved == [1.0, 0.0, 0.5]


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
    assert plan.state_bytes.host.keys() == {"exp_avg", "exp_avg_sq"}


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


def test_state_that_has_moved_is_made_visible_when_it_is_read(monkeypatch):
    """Views of moved state are made only when `state` is read: if a param is partly on the host they are copies,
    which take longer than the move."""
    param, plain_param = torch.nn.Parameter(torch.ones(64)), torch.nn.Parameter(torch.ones(64))
    optimizer = hybridopt.AdamW([param], threads=1)
    plain = hybridopt.AdamW([plain_param], threads=1)
    shown = []
    show = StateMemory.show
    monkeypatch.setattr(StateMemory, "show", lambda *given: shown.append(given[1:]) or show(*given))
    for fraction in (0.25, 0.75):
        param.grad, plain_param.grad = torch.ones(64), torch.ones(64)
        optimizer.step(), plain.step()
        optimizer.set_offload_fraction(fraction)
        assert shown == []
    for key in ("exp_avg", "exp_avg_sq"):
        assert torch.equal(optimizer.state[param][key], plain.state[plain_param][key])
    assert len(shown) == 4  # two entries of each optimizer
    optimizer.set_offload_fraction(0.5)
    assert len(shown) == 4
    assert set(optimizer.state[param]) == {"step", "exp_avg", "exp_avg_sq"} and len(shown) == 6
