"""Params that are stepped part by part, each part alone in param_groups, as DeepSpeed's stage 3 does it. Every
bit is compared with an optimizer that makes its state anew for each part, or that steps all params at once."""

import copy
import gc
import random
import weakref

import pytest
import torch
from test_changes import CHANGES, entry_deleted, master_written, state_of, taken_out
from torch.nn import Parameter

import hybridopt
from hybridopt import abi
from hybridopt.engine import aside, making
from models import PAIRS, bits, clone, drawn_seeds, set_gradients, state_bits, watch_params

SHAPES = [(4, 3), (5,), (2, 8), (40,), (7, 1), (16, 2)]
LAYOUTS = {
    "fp32": (torch.float32, {}),
    "bf16": (torch.bfloat16, {}),
    "bf16 moments": (torch.bfloat16, {"state_dtype": "bf16"}),
    "split": (torch.bfloat16, {"master_layout": "split"}),
}


def new_params(dtype=torch.float32):
    generator = torch.Generator().manual_seed(5)
    return [Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in SHAPES]


def parts_of(params, count=3):
    return [params[i::count] for i in range(count)]


def step_parts(optimizer, parts):
    """Each alone in the first group; in the end all are there."""
    group = optimizer.param_groups[0]
    for part in parts:
        group["params"] = list(part)
        optimizer.step()
        group["params"] = []


def put_back(optimizer, params):
    optimizer.param_groups[0]["params"] = list(params)


@pytest.fixture
def made(monkeypatch):
    """The param counts of the engines that have been made."""
    counts = []
    make = making.make_engine

    def counted(members, *args):
        counts.append(len(members))
        return make(members, *args)

    monkeypatch.setattr(making, "make_engine", counted)
    return counts


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", PAIRS)
def test_parts_come_to_the_bits_of_all_at_once(name, layout, made):
    ours, _, arguments = PAIRS[name]
    dtype, options = LAYOUTS[layout]
    params = new_params(dtype)
    others = clone(params)
    # Random bits of moments depend on the place among the params of a step: one part that has all.
    parts = parts_of(params, 1 if layout == "bf16 moments" else 3)
    optimizer = ours(params, threads=1, **arguments, **options)
    other = ours(others, threads=1, **arguments, **options)
    for seed in range(5):
        set_gradients(params, seed)
        set_gradients(others, seed)
        step_parts(optimizer, parts)
        other.step()
    put_back(optimizer, params)
    assert bits(params) == bits(others)
    assert state_bits(optimizer) == state_bits(other)
    has_state = len(optimizer.state) > 0  # without any there is nothing to keep
    assert sum(made) == (2 if has_state else 6) * len(params)


def train(seed, dtype, options, changes, may_put_aside):
    draw = random.Random(seed)
    params = new_params(dtype)
    optimizer = hybridopt.AdamW(params, lr=1e-2, threads=1, **options)
    parts = parts_of(params)
    trail = []
    with pytest.MonkeyPatch.context() as patch, torch.no_grad():
        if not may_put_aside:
            patch.setattr(hybridopt.AdamW, "_may_put_aside", lambda _: False)
        set_gradients(params, seed)
        for step in range(30):
            for _ in range(draw.choice([0, 1, 1, 3])):
                change = draw.choice(changes)
                optimizer = change(optimizer, params, draw.choice(params), draw) or optimizer
            if draw.random() < 0.1:
                draw.shuffle(params)
                parts = parts_of(params, draw.choice([1, 2, 3, 6]))
            step_parts(optimizer, parts)
            trail.append((step, bits(params), optimizer.stats().steps_applied, optimizer.last_step().step))
            trail.append(state_of(optimizer, params))
            put_back(optimizer, params)
            if draw.random() < 0.2:
                optimizer.step()
    return trail


def copied(optimizer, params, param, draw):
    """State goes through a state_dict into another optimizer, as from a file."""
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))


def fraction_set(optimizer, params, param, draw):
    optimizer.set_offload_fraction(1.0)


def all_state_gone(optimizer, params, param, draw):
    optimizer.state.clear()


@pytest.mark.parametrize("seed", drawn_seeds(3))
@pytest.mark.parametrize("layout", [*LAYOUTS, "watched"])
def test_whatever_is_changed_in_between(layout, seed, monkeypatch):
    dtype, options = LAYOUTS.get(layout, (torch.bfloat16, {}))
    watch_params(monkeypatch, layout == "watched")
    changes = [change for change in CHANGES if change is not taken_out]
    changes += [copied, fraction_set, all_state_gone]
    if layout == "watched":  # a new engine compares once, watched or not
        changes.remove(master_written)
    if layout != "fp32":  # masters of deleted entries stay as they are, where their engine does
        changes.remove(entry_deleted)
        changes.remove(all_state_gone)
    assert train(seed, dtype, options, changes, True) == train(seed, dtype, options, changes, False)


def test_each_part_is_made_once(made):
    params = new_params()
    optimizer = hybridopt.AdamW(params)
    set_gradients(params, 0)
    for _ in range(4):
        step_parts(optimizer, parts_of(params))
    assert made == [2, 2, 2]
    put_back(optimizer, params)
    optimizer.step()
    assert made == [2, 2, 2, 6]
    step_parts(optimizer, [params[:4], params[4:]])
    assert made == [2, 2, 2, 6, 4, 2]


def test_bytes_and_steps_count_those_that_are_aside():
    params = new_params()
    optimizer, other = hybridopt.AdamW(params), hybridopt.AdamW(clone(params))
    set_gradients(params, 0)
    set_gradients(other.param_groups[0]["params"], 0)
    other.step()
    for turn in range(1, 4):
        step_parts(optimizer, parts_of(params))
        assert optimizer.stats().steps_applied == optimizer.last_step().step == 3 * turn
    assert [result.step for result in optimizer.step_results()] == list(range(1, 10))
    assert optimizer.stats().cpu_elements == 3 * other.stats().cpu_elements
    assert optimizer.stats().states_on_host_bytes == other.stats().states_on_host_bytes
    held = optimizer.memory_timeline()[-1].states_on_host_bytes
    assert held == other.memory_timeline()[-1].states_on_host_bytes
    put_back(optimizer, params)
    optimizer.step()
    assert optimizer.stats().states_on_host_bytes == other.stats().states_on_host_bytes
    assert optimizer.stats().steps_applied == 10


def test_state_that_lies_aside_is_in_what_is_saved(tmp_path):
    params = new_params(torch.bfloat16)
    others = clone(params)
    optimizer, other = hybridopt.AdamW(params), hybridopt.AdamW(others)
    for which, stepped in ((optimizer, params), (other, others)):
        set_gradients(stepped, 0)
        for _ in range(2):
            step_parts(which, parts_of(stepped))
        put_back(which, stepped)
    expected = state_bits(other)
    assert state_bits(optimizer) == expected
    loaded = hybridopt.AdamW(clone(params))
    loaded.load_state_dict(optimizer.state_dict())
    assert state_bits(loaded) == expected
    optimizer.save_checkpoint(tmp_path / "all")
    again = hybridopt.AdamW(clone(params))
    again.load_checkpoint(tmp_path / "all")
    assert state_bits(again) == expected
    step_parts(optimizer, parts_of(params))
    step_parts(other, parts_of(others))
    assert bits(params) == bits(others)


def test_copies_know_the_state_that_lies_aside():
    """The hidden step counts among it: the random bits that moments are rounded with depend on them."""
    params = new_params(torch.bfloat16)
    optimizer = hybridopt.Lion(params, lr=1e-2, state_dtype="bf16")
    set_gradients(params, 0)
    for _ in range(3):
        step_parts(optimizer, parts_of(params))
    put_back(optimizer, params)
    other = copy.deepcopy(optimizer)
    other.__setstate__(other.__getstate__())
    others = other.param_groups[0]["params"]
    for which, stepped in ((optimizer, params), (other, others)):
        set_gradients(stepped, 1)
        which.step()
        assert set(which._engine.hidden_counts(which.state).values()) == {4}
    assert bits(params) == bits(others)
    assert state_bits(optimizer) == state_bits(other)


def test_a_part_is_not_saved_as_if_it_were_all(tmp_path):
    params = new_params()
    optimizer = hybridopt.AdamW(params)
    set_gradients(params, 0)
    step_parts(optimizer, parts_of(params))
    part = parts_of(params)[0]
    put_back(optimizer, part)
    left_out = r"would leave out the state of 4 parameters that are not in param_groups; put them there"
    with pytest.raises(abi.InvalidStateError, match=rf"state_dict\(\) {left_out}"):
        optimizer.state_dict()
    with pytest.raises(abi.InvalidStateError, match=rf"save_checkpoint\(\) {left_out}"):
        optimizer.save_checkpoint(tmp_path / "part")
    for param in set(params) - set(part):
        del optimizer.state[param]
    optimizer.save_checkpoint(tmp_path / "part")
    assert set(optimizer.state_dict()["state"]) == {0, 1}


@pytest.mark.parametrize("layout", ["bf16", "split"])
def test_weights_that_are_written_aside_become_masters(layout, monkeypatch):
    watch_params(monkeypatch)
    dtype, options = LAYOUTS[layout]
    params = new_params(dtype)
    optimizer = hybridopt.AdamW(params, **options)
    set_gradients(params, 0)
    step_parts(optimizer, parts_of(params))
    for param in params:
        param.data.fill_(0.5)
    optimizer.refresh_masters()
    for part in parts_of(params):
        put_back(optimizer, part)
        for param in part:
            assert torch.equal(optimizer.master_of(param), torch.full(param.shape, 0.5))


def engines_of(optimizer):
    return [weakref.ref(engine) for engine in (*optimizer._aside._pauses, optimizer._engine)]


def alive(references):
    gc.collect()
    return sum(reference() is not None for reference in references)


def test_memory_is_given_back():
    params = new_params()
    optimizer = hybridopt.AdamW(params)
    set_gradients(params, 0)
    step_parts(optimizer, parts_of(params))
    engines = engines_of(optimizer)
    assert alive(engines) == 3
    optimizer.close()
    assert alive(engines) == 0 and optimizer.stats().states_on_host_bytes == 0


def test_engines_whose_state_nobody_has_any_more_end():
    params = new_params()
    optimizer = hybridopt.AdamW(params)
    for part in parts_of(params):  # as where each part is another model's, say
        set_gradients(part, 0)
        step_parts(optimizer, [part])
        optimizer.state.clear()
    assert alive(engines_of(optimizer)) == 1


def test_there_are_not_too_many(monkeypatch, made):
    monkeypatch.setattr(aside, "MOST_ENGINES", 2)
    params = new_params()
    others = clone(params)
    optimizer, other = hybridopt.AdamW(params), hybridopt.AdamW(others)
    for seed in range(3):
        set_gradients(params, seed)
        set_gradients(others, seed)
        step_parts(optimizer, parts_of(params, 6))
        other.step()
    assert len(optimizer._aside._pauses) == 2 and made.count(1) == 18
    put_back(optimizer, params)
    assert bits(params) == bits(others) and state_bits(optimizer) == state_bits(other)


def test_what_is_offloaded_is_not_put_aside():
    params = new_params()
    optimizer = hybridopt.AdamW(params, movable=("params",))
    set_gradients(params, 0)
    put_back(optimizer, params[:3])
    optimizer.step()
    optimizer.offload(params=True)
    put_back(optimizer, params[3:])
    with pytest.raises(abi.InvalidStateError, match="params or states are offloaded; call reload"):
        optimizer.step()
    put_back(optimizer, params[:3])
    optimizer.reload(params=True)
    optimizer.step()


@pytest.mark.parametrize("begin", ["hooks", "overlap", "offload"])
def test_what_is_for_all_params_ends_those_that_are_aside(begin):
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
    params = list(model.parameters())
    optimizer = hybridopt.AdamW(params, movable=("states",), max_grad_norm=None)
    set_gradients(params, 0)
    step_parts(optimizer, [params[:2], params[2:]])
    engines = engines_of(optimizer)
    assert alive(engines) == 2
    put_back(optimizer, params)
    if begin == "hooks":
        optimizer.hook_gradients()
    elif begin == "overlap":
        optimizer.overlap(model)
    else:
        optimizer.offload(states=True)
        optimizer.reload(states=True)
    assert len(optimizer._aside._pauses) == 0
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    optimizer.synchronize()
    assert {int(entry["step"]) for entry in optimizer.state.values()} == {2}
