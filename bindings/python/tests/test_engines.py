"""Which engine an optimizer has, and how it gets one. The first tests go through the table at the top of
engine/engines.py, row by row. Random walks through the table are compared in bits with an optimizer that keeps one
engine. The last tests step params part by part, each part alone in param_groups, as DeepSpeed's stage 3 does. They
compare every bit with an optimizer that makes its state anew for each part, or that steps all params at once."""

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
from hybridopt.engine import engines, making
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


# ------------------------------------------------------------------------------- transitions --

MADE, KEPT, PUT_ASIDE = ("nothing", "PRESENT"), ("PRESENT", "PRESENT"), ("PRESENT", "ASIDE")
ENDED, TAKEN_BACK, ENDED_ASIDE = ("PRESENT", "ENDED"), ("ASIDE", "PRESENT"), ("ASIDE", "ENDED")


class Walk:
    """An optimizer whose param groups hold one part of the params at a time, and a record of the transitions of its
    engines."""

    def __init__(self, dtype=torch.float32, **options):
        self.params = new_params(dtype)
        self.model = torch.nn.Module()
        self.model.weights = torch.nn.ParameterList(self.params)
        options = {"lr": 1e-2, "threads": 1, "max_grad_norm": None, "movable": ("states",), **options}
        self.optimizer = hybridopt.AdamW(self.params, **options)
        self.seen = []  # all engines so far; a reference here does not keep an engine in use
        self.transitions = set()

    def places(self):
        owned = self.optimizer._engines
        places = dict.fromkeys(owned.aside(), "ASIDE")
        if owned.present is not None:
            assert owned.present not in places
            places[owned.present] = "PRESENT"
        slots = [slot.param for engine in places for slot in engine.slots]
        assert len(slots) == len(set(slots))  # no param belongs to two engines
        return places

    def note(self, act):
        """Calls act() and returns the transitions."""
        before = self.places()
        act()
        after = self.places()
        found = {(before.get(engine, "nothing"), after.get(engine, "ENDED")) for engine in before | after}
        self.seen += [engine for engine in after if engine not in self.seen]
        self.transitions |= found
        return found

    def put(self, *numbers):
        self.optimizer.param_groups[0]["params"] = [self.params[number] for number in numbers]

    def step(self, *numbers, seed=0):
        """Steps the params of these numbers, which are then the only ones in param_groups."""
        self.put(*numbers)
        set_gradients(self.params, seed)
        return self.note(self.optimizer.step)


def test_all_transitions_are_those_of_the_table():
    walk = Walk()
    assert walk.step(0, 1) == {MADE}
    assert walk.step(0, 1) == {KEPT}
    assert walk.step(2, 3) == {PUT_ASIDE, MADE}
    assert walk.step(0, 1) == {TAKEN_BACK, PUT_ASIDE}
    assert walk.step(0) == {ENDED, MADE, ("ASIDE", "ASIDE")}
    assert walk.step(0, 2) == {ENDED, ENDED_ASIDE, MADE}
    assert walk.note(walk.optimizer.close) == {ENDED}
    assert walk.transitions == {MADE, KEPT, PUT_ASIDE, TAKEN_BACK, ENDED, ENDED_ASIDE, ("ASIDE", "ASIDE")}


def other_momentum(walk):
    """Gives a param group hyperparameters for which the library has no room."""
    for group in walk.optimizer.param_groups:
        group["params"] = walk.params[:2]
    walk.optimizer.add_param_group({"params": [walk.params[4]]})
    set_gradients(walk.params, 1)
    walk.optimizer.step()


ENDS_OF_PRESENT = {
    "some of its params": lambda walk: walk.step(1, 2),
    "more params": lambda walk: walk.step(0, 1, 2),
    "more groups": other_momentum,
    "hooks": lambda walk: walk.optimizer.hook_gradients(),
    "close": lambda walk: walk.optimizer.close(),
}


@pytest.mark.parametrize("reason", ENDS_OF_PRESENT)
def test_the_present_engine_ends(reason):
    walk = Walk()
    walk.step(0, 1)
    (engine,) = walk.seen
    walk.note(lambda: ENDS_OF_PRESENT[reason](walk))
    assert engine not in walk.places() and ENDED in walk.transitions


def state_gone(walk):
    walk.optimizer.state.clear()
    walk.step(4)


def state_offloaded(walk):
    walk.optimizer.offload(states=True)
    walk.optimizer.reload(states=True)


ENDS_ASIDE = {
    "some of its params": lambda walk: walk.step(1, 4),
    "nothing of it in state": state_gone,
    "hooks": lambda walk: walk.optimizer.hook_gradients(),
    "overlap": lambda walk: walk.optimizer.overlap(walk.model),
    "offload": state_offloaded,
    "fraction": lambda walk: walk.optimizer.set_offload_fraction(1.0),
    "close": lambda walk: walk.optimizer.close(),
}


@pytest.mark.parametrize("reason", ENDS_ASIDE)
def test_engines_that_are_aside_end(reason):
    walk = Walk()
    walk.step(0, 1)
    assert walk.step(2, 3) == {PUT_ASIDE, MADE}
    aside = walk.seen[0]
    walk.note(lambda: ENDS_ASIDE[reason](walk))
    assert aside not in walk.places() and ENDED_ASIDE in walk.transitions


def test_the_oldest_one_ends_when_too_many_are_aside(monkeypatch):
    monkeypatch.setattr(engines, "MOST_ASIDE", 2)
    walk = Walk()
    for number in range(3):
        walk.step(number)
    assert walk.step(3) == {PUT_ASIDE, MADE, ENDED_ASIDE, ("ASIDE", "ASIDE")}
    assert walk.seen[0] not in walk.places() and walk.seen[1] in walk.places()


@pytest.mark.filterwarnings("ignore:overlap\\(\\) has seen no forward pass:UserWarning")
@pytest.mark.parametrize("begin", ["hooks", "overlap"])
def test_what_depends_on_the_model_is_not_put_aside(begin):
    walk = Walk()
    walk.step(0, 1)
    if begin == "hooks":
        walk.optimizer.hook_gradients()
    else:
        walk.optimizer.overlap(walk.model)
    walk.step(0, 1)
    assert walk.step(2, 3) == {ENDED, MADE}


@pytest.mark.parametrize("part", [(2, 3), (1, 2)], ids=["to be put aside", "to be ended"])
def test_no_transition_happens_while_content_is_offloaded(part):
    walk = Walk()
    walk.step(0, 1)
    walk.optimizer.offload(states=True)
    walk.put(*part)
    before = walk.places()
    with pytest.raises(abi.InvalidStateError, match=r"but params or states are offloaded; call reload\("):
        walk.optimizer.step()
    with pytest.raises(abi.InvalidStateError, match="the optimizer is to be closed, but params or states are"):
        walk.optimizer.close()
    assert walk.places() == before
    walk.optimizer.param_groups[0]["params"] = walk.params[:2]
    walk.optimizer.reload(states=True)
    assert walk.step(0, 1) == {KEPT}


def test_invalid_params_leave_the_engine_as_it_is():
    walk = Walk()
    walk.step(0, 1)
    walk.params[2].data = walk.params[2].data.to(torch.complex64)
    walk.put(0, 1, 2)
    before = walk.places()
    with pytest.raises(TypeError, match="is torch.complex64, expected"):
        walk.optimizer.step()
    assert walk.places() == before
    assert walk.step(0, 1) == {KEPT}


def test_an_engine_that_cannot_be_made_leaves_the_state_to_the_next_try(monkeypatch):
    walk, other = Walk(), Walk()
    for each in (walk, other):
        each.step(0, 1, seed=1)
        each.step(2, 3, seed=2)
    with monkeypatch.context() as patch:
        patch.setattr(making, "make_engine", lambda *_: (_ for _ in ()).throw(abi.OutOfHostMemoryError("no memory")))
        with pytest.raises(abi.OutOfHostMemoryError, match="no memory"):
            walk.step(0, 1, 2, 3, seed=3)
    assert walk.places() == {}
    for each in (walk, other):
        each.step(0, 1, 2, 3, seed=3)
    assert bits(walk.params) == bits(other.params)
    assert state_bits(walk.optimizer) == state_bits(other.optimizer)


def test_a_closed_optimizer_has_no_engine_any_more():
    walk = Walk()
    walk.step(0, 1)
    walk.step(2, 3)
    walk.optimizer.close()
    assert walk.places() == {} and len(walk.optimizer.state) == 0
    with pytest.raises(abi.InvalidStateError, match="this AdamW is closed; make a new one"):
        walk.step(0, 1)
    assert walk.places() == {}
    walk.optimizer.close()


def hooked(walk):
    walk.optimizer.hook_gradients().remove()


def looked(walk):
    assert walk.optimizer.state_dict()["state"]


def loaded(walk):
    walk.put(*range(len(SHAPES)))
    state_dict = walk.optimizer.state_dict()
    walk.optimizer.load_state_dict(
        {"state": {key: {k: v.clone() for k, v in entry.items()} for key, entry in state_dict["state"].items()},
         "param_groups": state_dict["param_groups"]}
    )


BETWEEN = {"hooks": hooked, "offload": state_offloaded, "looked at": looked, "loaded": loaded}


def drawn_walk(seed, dtype, options):
    """Steps drawn parts, with other actions in between. The optimizer with all params makes the same steps."""
    draw = random.Random(seed)
    walk = Walk(dtype, **options)
    others = clone(walk.params)
    plain = hybridopt.AdamW(others, lr=1e-2, threads=1, **options)
    set_gradients(others, 0)
    first = [(0, 1), (0, 1), (2, 3), (0, 1), (1, 2)]  # all transitions
    parts = [(0, 1), (2, 3), (4, 5), (0, 1), (2, 3), (0,), (1, 2, 4), (0, 1, 2, 3, 4, 5)]
    for seed, part in enumerate([*first, *draw.choices(parts, k=35)]):
        walk.step(*part, seed=seed)
        set_gradients(others, seed)
        for number, other in enumerate(others):
            if number not in part:
                other.grad = None
        plain.step()
        if draw.random() < 0.15:
            walk.put(*range(len(SHAPES)))
            walk.note(lambda: BETWEEN[draw.choice(list(BETWEEN))](walk))
        assert bits(walk.params) == bits(others)
    walk.put(*range(len(SHAPES)))
    assert state_bits(walk.optimizer) == state_bits(plain)
    assert walk.optimizer.stats().steps_applied == plain.stats().steps_applied
    assert walk.transitions >= {MADE, KEPT, PUT_ASIDE, TAKEN_BACK, ENDED, ENDED_ASIDE}


@pytest.mark.parametrize("most_aside", [2, 256])
@pytest.mark.parametrize(
    "dtype, options",
    [(torch.float32, {}), (torch.bfloat16, {}), (torch.bfloat16, {"master_layout": "split"})],
    ids=["fp32", "bf16", "split"],
)
@pytest.mark.parametrize("seed", drawn_seeds(2))
def test_drawn_walks_come_to_the_bits_of_one_engine(seed, dtype, options, most_aside, monkeypatch):
    monkeypatch.setattr(engines, "MOST_ASIDE", most_aside)
    drawn_walk(seed, dtype, options)


@pytest.mark.filterwarnings("ignore:overlap\\(\\) has seen no forward pass:UserWarning")
def test_a_new_engine_is_hooked():
    walk = Walk()
    walk.optimizer.hook_gradients()
    walk.optimizer.overlap(walk.model)
    added = Parameter(torch.ones(3))
    assert walk.note(lambda: walk.optimizer.add_param_group({"params": [added]})) == {ENDED, MADE}
    assert len(added._post_accumulate_grad_hooks) == 2
    walk.optimizer.close()
    assert not added._post_accumulate_grad_hooks and not walk.params[0]._post_accumulate_grad_hooks


# ------------------------------------------------------------------------- params part by part --


def parts_of(params, count=3):
    return [params[i::count] for i in range(count)]


def step_parts(optimizer, parts):
    """Steps each part alone in the first group; at the end the group has all params again."""
    group = optimizer.param_groups[0]
    for part in parts:
        group["params"] = list(part)
        optimizer.step()
        group["params"] = []


def put_back(optimizer, params):
    optimizer.param_groups[0]["params"] = list(params)


@pytest.fixture
def made(monkeypatch):
    """Collects the param counts of the engines that are made."""
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
    # The random bits of moments depend on the position among the params of a step, so here one part has all params.
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
    has_state = len(optimizer.state) > 0  # without state there is nothing to keep
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
    """Copies state through a state_dict into another optimizer, as a resume from a file does."""
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
    if layout == "watched":  # a new engine compares once, even if it watches
        changes.remove(master_written)
    if layout != "fp32":  # while their engine exists, the masters of deleted entries keep their values
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
    assert optimizer.stats().state_bytes.host == other.stats().state_bytes.host
    held = optimizer.memory_timeline()[-1].state_bytes.host
    assert held == other.memory_timeline()[-1].state_bytes.host
    put_back(optimizer, params)
    optimizer.step()
    assert optimizer.stats().state_bytes.host == other.stats().state_bytes.host
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
    """The hidden step counts belong to that state, because the random bits with which moments are rounded depend on
    them."""
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
    return [weakref.ref(engine) for engine in (*optimizer._engines.aside(), optimizer._engine)]


def alive(references):
    gc.collect()
    return sum(reference() is not None for reference in references)


def test_memory_is_given_back():
    params = new_params()
    optimizer = hybridopt.AdamW(params)
    set_gradients(params, 0)
    step_parts(optimizer, parts_of(params))
    references = engines_of(optimizer)
    assert alive(references) == 3
    optimizer.close()
    assert alive(references) == 0 and optimizer.stats().state_bytes.host == 0


def test_engines_whose_state_nobody_has_any_more_end():
    params = new_params()
    optimizer = hybridopt.AdamW(params)
    for part in parts_of(params):  # for example, each part may belong to another model
        set_gradients(part, 0)
        step_parts(optimizer, [part])
        optimizer.state.clear()
    assert alive(engines_of(optimizer)) == 1


def test_there_are_not_too_many(monkeypatch, made):
    monkeypatch.setattr(engines, "MOST_ASIDE", 2)
    params = new_params()
    others = clone(params)
    optimizer, other = hybridopt.AdamW(params), hybridopt.AdamW(others)
    for seed in range(3):
        set_gradients(params, seed)
        set_gradients(others, seed)
        step_parts(optimizer, parts_of(params, 6))
        other.step()
    assert len(optimizer._engines.aside()) == 2 and made.count(1) == 18
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
    references = engines_of(optimizer)
    assert alive(references) == 2
    put_back(optimizer, params)
    if begin == "hooks":
        optimizer.hook_gradients()
    elif begin == "overlap":
        optimizer.overlap(model)
    else:
        optimizer.offload(states=True)
        optimizer.reload(states=True)
    assert len(optimizer._engines.aside()) == 0
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    optimizer.synchronize()
    assert {int(entry["step"]) for entry in optimizer.state.values()} == {2}
