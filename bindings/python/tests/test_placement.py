"""How much state goes to the device and to disk, and what is printed about it. On disk it has the same bits, in steps, in
`state`, in state dicts and in checkpoints."""

import copy
import os
import pickle
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import hybridopt
from hybridopt import abi
from hybridopt.engine import making
from hybridopt.engine.engine import Engine
from hybridopt.settings.placement import AUTO, Leftover, choose
from hybridopt.state.state_memory import StateMemory
from models import PAIRS, bits, run


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
    move = Engine.set_fractions
    monkeypatch.setattr(
        Engine, "set_fractions", lambda *given: (moved.append(given[-2]), move(*given))
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


@pytest.mark.parametrize("share", [0.0, 0.05])  # state that lies in several places is copied
def test_state_that_has_moved_cannot_be_used_by_those_who_hold_it(share, tmp_path):
    optimizer, model = made(tmp_path, share, steps=range(1))
    other = hybridopt.AdamW(module().named_parameters(), threads=1)
    held = optimizer.state[model[0].weight]["exp_avg"]
    saved = optimizer.state_dict()
    other.load_state_dict(saved)
    copied, expected = copy.deepcopy(saved), everything(optimizer, model)
    if share == 0.0:
        optimizer.set_offload_fraction(0.5)
    else:
        optimizer.set_offload_fraction(1.0, disk_fraction=1.0)
    text = "^a tensor of an optimizer's state is used by '.*' after the state has moved .*; read optimizer.state or state_dict"
    assert held.shape == model[0].weight.shape
    for use in (held.sum, lambda: held[0], lambda: held.mul_(2), lambda: torch.equal(held, held), held.clone, held.detach):
        with pytest.raises(abi.InvalidStateError, match=text):
            use()
    with pytest.raises(abi.InvalidStateError, match=text):
        copy.deepcopy(saved)
    assert everything(optimizer, model) == expected
    optimizer.load_state_dict(copied)
    assert everything(optimizer, model) == expected


# ------------------------------------------------------------------------------------- on disk --

SHARES = [0.3, 1.0]
LAYOUTS = [{}, {"state_dtype": "bf16"}, {"master_layout": "split"}, {"master_layout": "split24", "state_dtype": "bf16"}]


def module(dtype=torch.bfloat16):
    torch.manual_seed(0)
    made = nn.Sequential(nn.Linear(40, 300), nn.Tanh(), nn.Linear(300, 7), nn.LayerNorm(7)).to(dtype)
    made[2].weight.data = made[2].weight.detach().T.contiguous().T  # not in the order of dimensions
    return made


def made(folder, share, name="AdamW", dtype=torch.bfloat16, steps=(), **options):
    cls, _, arguments = PAIRS[name]
    if share > 0:
        options |= {"disk_fraction": share, "disk_paths": folder}
    model = module(dtype)
    optimizer = cls(model.named_parameters(), **arguments, threads=1, **options)
    run(optimizer, list(model.parameters()), steps)
    return optimizer, model


def everything(optimizer, model):
    """The bits of params and of all state."""
    state = [entry[key] for _, entry in sorted(optimizer.state_dict()["state"].items()) for key in sorted(entry)]
    return bits([*model.parameters(), *state])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("share", SHARES)
@pytest.mark.parametrize("name", PAIRS)
def test_every_optimizer_has_the_bits_of_memory(name, share, dtype, tmp_path):
    on_disk, in_memory = (made(tmp_path, each, name, dtype, range(3)) for each in (share, 0))
    assert everything(*on_disk) == everything(*in_memory)
    run(on_disk[0], list(on_disk[1].parameters()), [3])  # after a look at `state`
    run(in_memory[0], list(in_memory[1].parameters()), [3])
    assert everything(*on_disk) == everything(*in_memory)
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("options", LAYOUTS)
@pytest.mark.parametrize("share", SHARES)
def test_state_dicts_go_from_and_to_disk(share, options, tmp_path):
    (optimizer, model), (plain, own) = (made(tmp_path, each, steps=range(3), **options) for each in (share, 0))
    saved = copy.deepcopy(optimizer.state_dict())
    others = [made(tmp_path, each, steps=(7, 8), **options) for each in (share, 0)]
    for other, its_model in others:
        its_model.load_state_dict(model.state_dict())
        other.load_state_dict(saved)
    for each, its_model in [(optimizer, model), (plain, own), *others]:
        run(each, list(its_model.parameters()), [3, 4])
    assert {str(everything(*each)) for each in [(optimizer, model), *others]} == {str(everything(plain, own))}


@pytest.mark.parametrize("options", LAYOUTS)
@pytest.mark.parametrize("share", SHARES)
def test_checkpoints_go_from_and_to_disk(share, options, tmp_path):
    pairs = [made(tmp_path, each, **options) for each in (share, 0, share)]
    for _, model in pairs:  # checkpoints are in the order of dimensions
        model[2].weight.data = model[2].weight.detach().contiguous()
    for optimizer, model in pairs[:2]:
        run(optimizer, list(model.parameters()), range(3))
    for optimizer, name in zip((pairs[0][0], pairs[1][0]), ("from_disk", "from_memory")):
        optimizer.save_checkpoint(tmp_path / name)
    pairs[1][0].load_checkpoint(tmp_path / "from_disk")
    pairs[2][0].load_checkpoint(tmp_path / "from_memory")
    for optimizer, model in pairs:
        run(optimizer, list(model.parameters()), [3])
    assert everything(*pairs[0]) == everything(*pairs[1]) == everything(*pairs[2])


def test_copies_and_pickles_have_the_state(tmp_path):
    optimizer, model = made(tmp_path, 1.0, steps=range(3))
    copied, its_model = copy.deepcopy((optimizer, model))
    pickled, other = pickle.loads(pickle.dumps((optimizer, model)))
    for each, params in ((optimizer, model), (copied, its_model), (pickled, other)):
        run(each, list(params.parameters()), [3])
    assert everything(optimizer, model) == everything(copied, its_model) == everything(pickled, other)


def test_what_is_written_to_state_counts_in_the_next_step(tmp_path):
    pairs = [made(tmp_path, share, steps=range(3)) for share in (0.3, 0)]
    for optimizer, model in pairs:
        for param in model.parameters():
            optimizer.state[param]["exp_avg"].mul_(0.5)
            optimizer.state[param]["exp_avg_sq"] = torch.full_like(param, 2.0, dtype=torch.float32)
        del optimizer.state[model[0].bias]
        run(optimizer, list(model.parameters()), [3])
    assert everything(*pairs[0]) == everything(*pairs[1])


@pytest.mark.parametrize("share", SHARES)
@pytest.mark.parametrize("options", LAYOUTS)
def test_state_shows_what_was_assigned_and_deleted_without_a_step(options, share, tmp_path):
    pairs = [made(tmp_path, each, steps=range(3), **options) for each in (share, 0)]
    for optimizer, model in pairs:
        for param in model.parameters():
            optimizer.state[param]["exp_avg"] = torch.full_like(param, 2.0, dtype=torch.float32)
        for param in (model[0].bias, model[2].weight):
            del optimizer.state[param]
        optimizer.materialize()
    assert everything(*pairs[0]) == everything(*pairs[1])
    assert not any(pairs[0][0].state[pairs[0][1][2].weight]["exp_avg"].flatten())


@pytest.mark.parametrize("share", SHARES)
@pytest.mark.parametrize("options", LAYOUTS)
def test_state_shows_masters_that_have_followed_params_without_a_step(options, share, tmp_path):
    pairs = [made(tmp_path, each, dtype=torch.float16, steps=range(2), **options) for each in (share, 0)]
    for optimizer, model in pairs:
        before = everything(optimizer, model)  # a look at `state`, which takes copies of what is on disk
        with torch.no_grad():
            for param in model.parameters():
                param.add_(1)
        optimizer.master_of(model[0].weight)  # makes all masters follow
        assert everything(optimizer, model) != before
    assert everything(*pairs[0]) == everything(*pairs[1])


@pytest.mark.parametrize("layout", ["fp32", "split"])
def test_a_loaded_master_does_not_replace_a_param_that_differs(layout, tmp_path):
    pairs = [made(tmp_path, share, steps=range(3), master_layout=layout) for share in (0.7, 0)]
    saved = copy.deepcopy(pairs[1][0].state_dict())
    for optimizer, model in pairs:
        with torch.no_grad():
            for param in model.parameters():
                param.mul_(3)
        optimizer.load_state_dict(saved)
        run(optimizer, list(model.parameters()), [3])
    assert everything(*pairs[0]) == everything(*pairs[1])


@pytest.mark.parametrize("options", LAYOUTS)
def test_state_that_hooks_take_over_in_a_backward_pass_leaves_params_as_they_are(options, tmp_path):
    """Autograd refuses a param that something has written since the forward pass."""
    pairs = [made(tmp_path, share, **options) for share in (1.0, 0)]
    for optimizer, model in pairs:
        optimizer.hook_gradients()
        for seed in range(3):
            torch.manual_seed(seed)
            model(torch.randn(5, 40).bfloat16()).float().square().mean().backward()
            optimizer.step()
            optimizer.load_state_dict(optimizer.state_dict())
    assert everything(*pairs[0]) == everything(*pairs[1])


@pytest.mark.parametrize("options", LAYOUTS)
def test_masters_on_disk_are_written_where_their_params_are_now(options, tmp_path):
    """A load writes masters before a step has bound params that have got other memory: the old one may belong to others."""
    pairs = [made(tmp_path, share, steps=range(2), **options) for share in (1.0, 0)]
    for optimizer, model in pairs:
        state = copy.deepcopy(optimizer.state_dict())
        with torch.no_grad():
            for param in model.parameters():
                param.view(torch.int16).bitwise_xor_(1)
        before = [param.data for param in model.parameters()]
        for param in model.parameters():
            param.data = param.detach().clone()
            param.data.view(torch.int16).bitwise_xor_(1)
        kept = bits(before)
        optimizer.load_state_dict(state)
        run(optimizer, list(model.parameters()), [2])
        assert bits(before) == kept
    assert everything(*pairs[0]) == everything(*pairs[1])


@pytest.mark.parametrize("written", [False, True])
@pytest.mark.parametrize("layout", ["split", "split24"])
def test_masters_that_hooks_take_over_fit_their_params_after_the_backward_pass(layout, written):
    """Masters halfway between two bf16 numbers, which fp32 masters round to even and split masters do not."""
    source, model = made(None, 0, steps=[0])
    with torch.no_grad():
        for param in model.parameters():
            param.view(torch.int16).bitwise_and_(~1)
            halfway = (param.view(torch.int16).to(torch.int32) << 16) + 0x8000
            source.state[param]["master_param"].copy_(halfway.view(torch.float32))
            assert torch.equal(source.state[param]["master_param"].bfloat16(), param)
    state, weights = copy.deepcopy((source.state_dict(), model.state_dict()))
    results = []
    for hooked in (False, True):
        optimizer, model = made(None, 0, master_layout=layout)
        model.load_state_dict(weights)
        if hooked:
            optimizer.hook_gradients()
        optimizer.load_state_dict(state)
        for seed in range(3):
            torch.manual_seed(seed)
            model(torch.randn(5, 40).bfloat16()).float().square().mean().backward()
            if written and seed == 0:
                with torch.no_grad():
                    model[0].weight[::2].mul_(2)  # this is right then, and its lower halves are not
            optimizer.step()
            optimizer.zero_grad()
        results.append(everything(optimizer, model))
    assert results[0] == results[1]


def read_by_now(optimizer):
    """The bytes that have been read when threads read nothing ahead any more."""
    read, before = optimizer.stats().disk_read_bytes, -1
    while read != before:
        time.sleep(0.1)
        read, before = optimizer.stats().disk_read_bytes, read
    return read


def test_a_step_lets_copies_go_and_a_look_makes_new_ones(tmp_path):
    optimizer, model = made(tmp_path, 1.0, steps=range(2))
    param = model[0].weight
    entry = optimizer.state[param]
    moment, before = entry["exp_avg"], bits([entry["exp_avg"]])
    assert optimizer.state[param] is entry  # no second copy
    for known, _ in optimizer.state.items():
        optimizer.master_of(known)  # changes no entry
    read = read_by_now(optimizer)
    run(optimizer, list(model.parameters()), [2])
    # The step, and what is read ahead for the next one; no look.
    assert read_by_now(optimizer) - read == 2 * optimizer.plan().disk_step_bytes
    assert bits([moment]) == before != bits([optimizer.state[param]["exp_avg"]])
    assert list(optimizer.state) == list(model.parameters())


def test_overlap_and_skipped_steps_have_the_same_bits(tmp_path):
    pairs = [made(tmp_path, share) for share in (0.5, 0)]
    for optimizer, model in pairs:
        optimizer.overlap(model)
        with pytest.warns(UserWarning, match="skipped"):
            for seed in range(4):
                torch.manual_seed(seed)
                optimizer.zero_grad()
                model(torch.randn(5, 40).bfloat16()).float().square().mean().backward()
                if seed == 2:
                    model[0].weight.grad[0, 0] = torch.inf
                optimizer.step()
    assert everything(*pairs[0]) == everything(*pairs[1])


@pytest.mark.parametrize("share", [{}, {"disk_fraction": 1.0}])
def test_an_entry_that_was_deleted_comes_back_with_its_params_next_step_alone(share, tmp_path):
    params = [nn.Parameter(torch.ones(500)) for _ in range(2)]
    options = {**share, "disk_paths": str(tmp_path)} if share else {}
    optimizer = hybridopt.SGD(params, lr=1e-2, momentum=0.9, **options)
    run(optimizer, params, [0])
    del optimizer.state[params[0]]
    params[0].grad = None
    for seed in (1, 2):
        run(optimizer, params[1:], [seed])
        assert set(optimizer.state) == {params[1]}
    run(optimizer, params, [3])
    assert set(optimizer.state) == set(params)


def test_reports_tell_what_is_on_disk(tmp_path):
    (tmp_path / "a").mkdir()
    optimizer, model = made(tmp_path / "a", 0.5)
    plan = optimizer.plan()
    count = sum(param.numel() for param in model.parameters())
    assert abs(plan.elements.disk - count / 2) <= 1 and plan.elements.disk + plan.elements.host == count
    assert plan.disk_bytes >= plan.disk_step_bytes > 0 < plan.host_disk_bytes <= 256 << 20
    run(optimizer, list(model.parameters()), range(2))
    assert optimizer.stats().state_bytes.disk == 12 * plan.elements.disk and "KiB on disk" in repr(optimizer)
    # The ring has room for all state, so threads read all of it ahead for a third step.
    assert plan.host_disk_bytes >= plan.disk_step_bytes
    assert read_by_now(optimizer) == 3 * plan.disk_step_bytes
    assert optimizer.memory_timeline()


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"disk_fraction": 0.5}, "disk_paths is None with disk_fraction=0.5, expected a directory"),
        ({"disk_ring_bytes": 9}, "disk_ring_bytes is 9 without disk_paths, expected 0"),
        ({"disk_fraction": 0.5, "disk_paths": ["a:b"]}, r"Invalid disk_paths: \['a:b'\], expected a directory, or several"),
        (
            {"disk_fraction": 0.5, "disk_paths": ".", "offload_fraction": 0.25},
            "disk_fraction=0.5 with offload_fraction=0.25, expected at most that",
        ),
        (
            {"disk_fraction": 0.5, "disk_paths": ".", "offload_fraction": "auto"},
            r"offload_fraction='auto' with disk_paths=\('.',\): .*; give offload_fraction a number",
        ),
        (
            {"disk_fraction": 0.5, "disk_paths": ".", "save_buffer_bytes": 9},
            r"save_buffer_bytes=9 with disk_paths=\('.',\): a step waits .*; leave save_buffer_bytes out",
        ),
    ],
)
def test_options_that_do_not_go_together_are_refused(options, text):
    with pytest.raises(ValueError, match=f"^{text}"):
        hybridopt.AdamW(module().named_parameters(), **options)


def test_fractions_that_do_not_go_leave_state_where_it_is(tmp_path):
    optimizer, model = made(tmp_path, 0.5, steps=range(1))
    before, on_disk = everything(optimizer, model), optimizer.plan().elements.disk
    with pytest.raises(ValueError, match="^disk_fraction=0.5 with offload_fraction=0.25, expected at most that"):
        optimizer.set_offload_fraction(0.25)
    with pytest.raises(ValueError, match="^Invalid disk_fraction: 1.5, expected 0.0 .no state on disk. to 1.0"):
        optimizer.set_offload_fraction(1.0, disk_fraction=1.5)
    assert everything(optimizer, model) == before and optimizer.plan().elements.disk == on_disk
    in_memory = hybridopt.AdamW(module().named_parameters())
    with pytest.raises(ValueError, match="^disk_paths is None with disk_fraction=0.5, .*, where the optimizer is made"):
        in_memory.set_offload_fraction(1.0, disk_fraction=0.5)


def test_state_moves_to_disk_and_back_between_steps(tmp_path):
    """Also before the first step, with state that has been read and written, and beside a saved state dict."""
    plain, plain_model = made(tmp_path, 0.0)
    optimizer, model = made(tmp_path, 0.0, disk_paths=str(tmp_path))
    count = sum(param.numel() for param in model.parameters())
    shares = (0.5, None, 1.0, 0.25, 0.0, 0.75)
    written = 0
    for seed, share in enumerate(shares):
        optimizer.set_offload_fraction(1.0, disk_fraction=share)
        for each, params in ((plain, plain_model.parameters()), (optimizer, model.parameters())):
            params = list(params)
            run(each, params, [seed])
            each.state[params[0]]["exp_avg"].add_(0.125)
        assert everything(optimizer, model) == everything(plain, plain_model)
        share = 0.5 if share is None else share
        assert abs(optimizer.plan().elements.disk - share * count) <= 1
        assert optimizer.stats().disk_written_bytes >= written
        written = optimizer.stats().disk_written_bytes
    assert written > 0



def test_a_directory_that_there_is_not_and_a_small_ring_are_told(tmp_path):
    for options, text in (
        ({"disk_paths": tmp_path / "nothing"}, "^disk_paths names '.*nothing', where .* could not make a file"),
        ({"disk_paths": tmp_path, "disk_ring_bytes": 1}, r"^disk_ring_bytes is 1, expected at least .* raise it$"),
    ):
        optimizer = hybridopt.AdamW(module().named_parameters(), disk_fraction=1.0, **options)
        with pytest.raises(abi.HybridoptError, match=text):
            optimizer.materialize()
