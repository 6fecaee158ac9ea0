"""Every change between two steps is noticed, even if most things stay as they were. An optimizer that looks only at
what has changed makes the same random training as one that looks at everything, and ends with the same bits.

Patches of weights are at the end: a second model that gets only them has every bit of the first one, whatever steps,
loads and other code have done in between. A patch that is lost, damaged or out of order is refused as a whole."""

import copy
import gc
import json
import math
import os
import random
import stat
import sys
import weakref

import pytest
import torch
from torch import nn
from torch.nn import Parameter

import hybridopt
from hybridopt import abi
from hybridopt.abi import handles
from hybridopt.changes import wire_forms
from hybridopt.changes.part import Part
from hybridopt.changes.patch import hash_of
from hybridopt.changes.take_memory import TakeMemory
from hybridopt.optimizers import adopting
from hybridopt.params import slot_batch
from hybridopt.state import entries as states
from models import PAIRS, WITH_TORCH, bits, clone, drawn_seeds, run, set_gradients, watch_params

SHAPES = [(4, 3), (5,), (), (2, 8), (16, 2), (40,)]


@pytest.fixture
def small_parts(monkeypatch):
    """Makes batches and parts so small that few params fill several of them."""
    monkeypatch.setattr(slot_batch, "BATCH_SLOTS", 7)
    monkeypatch.setattr(hybridopt.params.bound, "BATCH_SLOTS", 7)
    monkeypatch.setattr(states, "PART_ENTRIES", 5)


class LookingAtAll:
    """Inside of its `with`, the optimizer treats everything as changed."""

    def __enter__(self):
        self.patch = pytest.MonkeyPatch()
        self.patch.setattr(slot_batch.Forms, "match", lambda *_: False)
        self.patch.setattr(states.Snapshot, "matches", lambda *_: False)
        self.patch.setattr(hybridopt.params.registered.Registered, "_are_the_same", lambda *_: False)
        return self.patch

    def __exit__(self, *_):
        self.patch.undo()


def make(dtype, options):
    generator = torch.Generator().manual_seed(3)
    params = [
        Parameter(torch.randn(SHAPES[i % len(SHAPES)], generator=generator).to(dtype))
        for i in range(30)
    ]
    groups = [{"params": params[:11]}, {"params": params[11:25], "lr": 1e-3}]
    groups.append({"params": params[25:28]})
    for param in params[20:22] + params[28:]:
        param.requires_grad_(False)
    return params, hybridopt.AdamW(groups, lr=1e-2, threads=1, **options)


# Each function takes an optimizer, its params, one of these params, and a random generator.


def new_gradient(_, params, param, draw):
    gradients(params, draw, keep=False)


def no_gradient(_, params, param, draw):
    param.grad = None


def gradient_elsewhere(_, params, param, draw):
    if param.grad is not None:
        param.grad.data = param.grad + 1


def gradient_in_other_order(_, params, param, draw):
    if param.dim() == 2:
        param.grad = torch.ones(param.shape[::-1], dtype=param.dtype).t() * draw.random()


def gradient_beside(_, params, param, draw):
    param.decoupled_grad = torch.full_like(param, draw.random())


def no_gradient_beside(_, params, param, draw):
    vars(param).pop("decoupled_grad", None)


def moved(_, params, param, draw):
    param.data = param.data.clone()


def replaced(_, params, param, draw):
    param.data = torch.full_like(param, draw.random())


def written(_, params, param, draw):
    param.copy_(torch.full_like(param, draw.random()))


def written_unseen(_, params, param, draw):
    param.data.flatten()[-1:].fill_(draw.random())
    param.data.add_(0.5)


def group_changed(optimizer, params, param, draw):
    draw.choice(optimizer.param_groups)["lr"] = draw.random() / 100


def unfrozen(_, params, param, draw):
    param.requires_grad_()


def frozen(_, params, param, draw):
    param.requires_grad_(False)


def taken_out(optimizer, params, param, draw):
    group = draw.choice(optimizer.param_groups)
    if len(group["params"]) > 2:
        group["params"].pop(draw.randrange(len(group["params"])))


def looked_at(optimizer, params, param, draw):
    list(optimizer.state)


def entry_of(optimizer, param):
    return optimizer.state.get(param) or None


def moment_written(optimizer, params, param, draw):
    if entry := entry_of(optimizer, param):
        entry["exp_avg"].fill_(draw.random())


def moment_assigned(optimizer, params, param, draw):
    if entry := entry_of(optimizer, param):
        entry["exp_avg"] = torch.full_like(entry["exp_avg"], draw.random())


def moment_elsewhere(optimizer, params, param, draw):
    if entry := entry_of(optimizer, param):
        entry["exp_avg_sq"].data = torch.full_like(entry["exp_avg_sq"], draw.random())


def count_written(optimizer, params, param, draw):
    if entry := entry_of(optimizer, param):
        entry["step"].fill_(draw.randrange(1, 9))


def count_elsewhere(optimizer, params, param, draw):
    if entry := entry_of(optimizer, param):
        entry["step"].data = torch.tensor(float(draw.randrange(1, 9)))


def master_written(optimizer, params, param, draw):
    if (entry := entry_of(optimizer, param)) and "master_param" in entry:
        entry["master_param"].mul_(1.0 + 2.0**-12)


def entry_deleted(optimizer, params, param, draw):
    optimizer.state.pop(param, None)


def entry_assigned(optimizer, params, param, draw):
    if entry := entry_of(optimizer, param):
        optimizer.state[param] = {key: value.clone() for key, value in entry.items()}


def entry_filled(optimizer, params, param, draw):
    """Creates an empty entry first, as code does that asks for an entry which does not exist."""
    if param.requires_grad and not entry_of(optimizer, param):
        optimizer.state[param].update(
            step=torch.tensor(3.0),
            exp_avg=torch.full(param.shape, draw.random()),
            exp_avg_sq=torch.full(param.shape, draw.random()),
        )


def entries_swapped(optimizer, params, param, draw):
    like = [p for p in params if p.shape == param.shape and entry_of(optimizer, p)]
    if len(like) > 1:
        one, other = draw.sample(like, 2)
        state = optimizer.state
        state[one], state[other] = state[other], state[one]


CHANGES = [
    *(new_gradient, no_gradient, gradient_elsewhere, gradient_in_other_order, gradient_beside),
    *(no_gradient_beside, moved, replaced, written, written_unseen, group_changed, unfrozen, frozen),
    *(taken_out, looked_at, moment_written, moment_assigned, moment_elsewhere, count_written),
    *(count_elsewhere, master_written, entry_deleted, entry_assigned, entry_filled),
    entries_swapped,
]


def gradients(params, draw, keep):
    """Sets other gradients, in the existing tensors or in new ones."""
    generator = torch.Generator().manual_seed(draw.randrange(1 << 30))
    for param in params:
        numbers = torch.randn(param.shape, generator=generator).to(param.dtype)
        if keep and param.grad is not None:
            param.grad.copy_(numbers)
        elif param.requires_grad or draw.random() < 0.1:
            param.grad = numbers


def state_of(optimizer, params):
    place = {param: index for index, param in enumerate(params)}
    return [
        (place[param], key, bits([torch.as_tensor(value)]))
        for param, entry in optimizer.state.items()
        for key, value in entry.items()
    ]


def train(dtype, options, seed, changes, steps):
    """The params and the state after each step."""
    draw = random.Random(seed)
    params, optimizer = make(dtype, options)
    trail = []
    with torch.no_grad():
        gradients(params, draw, keep=False)
        for step in range(steps):
            if step > 2:  # by now nothing is new any more
                for _ in range(draw.choice([0, 1, 1, 3])):
                    draw.choice(changes)(optimizer, params, draw.choice(params), draw)
            gradients([p for p in params if p.grad is not None], draw, keep=True)
            optimizer.step()
            trail.append((step, bits(params), optimizer.stats().steps_applied))
            if draw.random() < 0.2:
                trail.append(state_of(optimizer, params))
    trail.append(state_of(optimizer, params))
    return trail


def check(dtype, options, seed, changes=CHANGES, steps=40, watched=False):
    """Watched params must have the same result as comparing all params. Only written masters are an exception: if
    all params are compared, a param that differs from its rounded master counts as written."""
    if watched:
        changes = [change for change in changes if change is not master_written]
    with LookingAtAll():
        expected = train(dtype, options, seed, changes, steps)
    with pytest.MonkeyPatch.context() as patch:
        watch_params(patch, watched)
        assert train(dtype, options, seed, changes, steps) == expected


OPTIONS = {
    "all compared": {},
    "watched": {},
    "split": {"master_layout": "split"},
    "bf16 moments": {"state_dtype": torch.bfloat16},
}


@pytest.mark.parametrize("seed", drawn_seeds(4))
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_random_changes(dtype, options, seed, small_parts):
    check(dtype, OPTIONS[options], seed, watched=options == "watched")


@pytest.mark.parametrize("change", CHANGES)
def test_each_change(change, small_parts):
    check(torch.bfloat16, {}, 7, changes=[change], steps=16)


@pytest.mark.parametrize("change", [moved, replaced, written, written_unseen])
def test_each_change_of_params_that_are_watched(change, small_parts):
    check(torch.bfloat16, {}, 7, changes=[change], steps=16, watched=True)


def calls_of_first_step(count, monkeypatch):
    """The number of calls of Python functions and of library functions while an optimizer of `count` params is made
    and steps for the first time."""
    params = [Parameter(torch.zeros(4, dtype=torch.bfloat16)) for _ in range(count)]
    for param in params:
        param.grad = torch.ones_like(param)
    of_python, of_library = 0, []

    def note(_, event, __):
        nonlocal of_python
        of_python += event in ("call", "c_call")

    call = handles.Handle._call

    def counted(handle, name, *arguments):
        of_library.append(name)
        call(handle, name, *arguments)

    monkeypatch.setattr(handles.Handle, "_call", counted)
    sys.setprofile(note)
    try:
        optimizer = hybridopt.AdamW(params, lr=1e-2, threads=1)
        optimizer.step()
    finally:
        sys.setprofile(None)
    monkeypatch.undo()
    return of_python, of_library


def test_the_first_step_does_little_for_each_param(monkeypatch):
    calls_of_first_step(10, monkeypatch)  # imports modules
    few, library_few = calls_of_first_step(256, monkeypatch)
    many, library_many = calls_of_first_step(1280, monkeypatch)
    assert library_many == library_few
    assert (many - few) / 1024 < 100, (many, few)  # an earlier version made 150, on torch 2.13


def test_python_collects_no_garbage_while_state_is_adopted(monkeypatch):
    """A collection would go through the objects of all params again and again. With 10,000 params it took two fifths
    of the time."""
    params = [Parameter(torch.zeros(4)) for _ in range(20)]
    optimizer = hybridopt.AdamW(params[:10], threads=1)
    run(optimizer, params, range(2))
    seen = []
    adopt = adopting.adopt_entry
    monkeypatch.setattr(adopting, "adopt_entry", lambda *_: seen.append(gc.isenabled()) or adopt(*_))
    optimizer.add_param_group({"params": params[10:]})
    run(optimizer, params, [2])
    assert seen == [False] * 10 and gc.isenabled()
    optimizer.state[params[0]] = {"step": torch.tensor(1.0), "exp_avg": torch.zeros(4), "exp_avg_sq": torch.zeros(5)}
    with pytest.raises(ValueError, match=r"has 'exp_avg_sq' of shape \(5,\), expected \(4,\)"):
        optimizer.step()
    assert gc.isenabled()
    gc.disable()
    try:
        del optimizer.state[params[0]]
        optimizer.step()
        assert not gc.isenabled()
    finally:
        gc.enable()


# -------------------------------------------------------------------------------- a plain step --

# In a plain step nothing has changed since the last one, and nothing is hidden, offloaded or scaled. It runs in few
# modules, so that a reader can follow it.
MOST_MODULES = 12


def modules_of(function):
    """The modules of the package that have functions which `function` runs. A garbage collection would run others."""
    modules = set()

    def note(frame, event, _):
        if event == "call":
            modules.add(frame.f_globals.get("__name__", ""))

    gc.disable()
    sys.setprofile(note)
    try:
        function()
    finally:
        sys.setprofile(None)
        gc.enable()
    return sorted(module for module in modules if module.split(".")[0] == "hybridopt")


def three_params(dtype=torch.float32):
    return [Parameter(torch.ones(shape).to(dtype)) for shape in [(4, 3), (7,), ()]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", PAIRS)
def test_a_plain_step_runs_in_few_modules(name, dtype):
    ours, _, arguments = PAIRS[name]
    params = three_params(dtype)
    optimizer = ours(params, threads=1, **arguments)
    run(optimizer, params, range(3))
    modules = modules_of(optimizer.step)
    assert "hybridopt.optimizers.optimizer" in modules and "hybridopt.abi.handles" in modules
    assert len(modules) <= MOST_MODULES, modules


@pytest.mark.parametrize(
    "options", [{"max_grad_norm": 1.0}, {"master_layout": "split"}, {"state_dtype": "bf16"}], ids=str
)
def test_a_plain_step_with_options_runs_in_few_modules(options):
    params = three_params(torch.bfloat16)
    optimizer = hybridopt.AdamW(params, threads=1, **options)
    run(optimizer, params, range(3))
    assert len(modules_of(optimizer.step)) <= MOST_MODULES


def lr_assigned(group):
    group["lr"] = 0.5


def lr_in_place(group):
    if isinstance(group["lr"], torch.Tensor):
        group["lr"].fill_(0.5)


def betas_in_place(group):
    if isinstance(group.get("betas"), list):
        group["betas"][0] = 0.5


def flag(group):
    group["maximize"] = True


def put_elsewhere(group):
    """The same values in other objects, under the same keys in another order."""
    for key in list(group):
        if key != "params":
            group[key] = group.pop(key)


def param_taken_out(group):
    group["params"] = group["params"][1:]


def param_taken_out_in_place(group):
    del group["params"][0]


CHANGES_OF_A_GROUP = [
    lr_assigned, lr_in_place, betas_in_place, flag, put_elsewhere, param_taken_out, param_taken_out_in_place,
]  # fmt: skip


@pytest.mark.parametrize("kinds", ["numbers", "that change in place"])
@pytest.mark.parametrize("change", CHANGES_OF_A_GROUP)
@pytest.mark.parametrize("name", WITH_TORCH)
def test_what_changes_in_a_group_has_its_effect(name, change, kinds):
    """The reference is a new optimizer that begins with the changed group, since it checks everything."""
    ours, _, arguments = PAIRS[name]
    if kinds != "numbers":
        arguments = {**arguments, "lr": torch.tensor(float(arguments["lr"]))}
    params = three_params()
    optimizer = ours(params, threads=1, **arguments)
    if kinds != "numbers" and "betas" in optimizer.param_groups[0]:
        optimizer.param_groups[0]["betas"] = list(optimizer.param_groups[0]["betas"])
    run(optimizer, params, range(3))
    others = clone(params)
    other = ours(others, threads=1, **{**arguments, "lr": float(arguments["lr"])})
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    change(optimizer.param_groups[0])
    group = other.param_groups[0]
    for key, value in optimizer.param_groups[0].items():
        if key == "params":
            group[key] = others[len(others) - len(value) :]
        else:
            group[key] = float(value) if isinstance(value, torch.Tensor) else value
    set_gradients(params, 7)
    set_gradients(others, 7)
    optimizer.step()
    other.step()
    assert bits(params) == bits(others)


@pytest.mark.parametrize(
    "change, text",
    [
        (lambda group: group.update(amsgrad=True), r"does not support amsgrad=True \(param group 0\)"),
        (lambda group: group.update(threads=2), "param group 0 has threads=2, an option of the whole optimizer"),
        (lambda group: group.update(nesterov=True), "param group 0 has nesterov=True, but AdamW does not use it"),
        (lambda group: group.update(lr="fast"), "param group 0 has lr='fast', expected a number"),
        (lambda group: group.update(betas=(0.9,)), r"param group 0 has betas=\(0.9,\), expected two numbers"),
    ],
)
def test_what_is_put_into_a_group_later_is_refused(change, text):
    params = three_params()
    optimizer = hybridopt.AdamW(params, threads=1)
    run(optimizer, params, range(3))
    before = bits(params)
    change(optimizer.param_groups[0])
    for _ in range(2):  # a refused group is checked again the second time
        with pytest.raises((ValueError, RuntimeError), match=text):
            optimizer.step()
    assert bits(params) == before


# ------------------------------------------------------------------------------ patches of weights


class Model(nn.Module):
    """Tied weights, a param that never gets a gradient, one without elements, and one with strides of its own."""

    def __init__(self, dtype):
        super().__init__()
        self.embedding = nn.Embedding(40, 24)
        self.head = nn.Linear(24, 40, bias=False)
        self.head.weight = self.embedding.weight
        self.body = nn.Linear(24, 24)
        self.idle = nn.Parameter(torch.randn(5, 7))
        self.empty = nn.Parameter(torch.empty(0, 3))
        self.turned = nn.Parameter(torch.randn(24, 24).t())
        self.to(dtype)

    def forward(self, tokens):
        return self.head(self.body(self.embedding(tokens)) @ self.turned)


def trained(model, optimizer, seed, scale=1.0):
    torch.manual_seed(seed)
    tokens = torch.randint(0, 40, (4, 8))
    optimizer.zero_grad()
    loss = model(tokens).float().logsumexp(-1).mean() * scale
    loss.backward()
    optimizer.step()


def made(dtype=torch.bfloat16, lr=1e-4, **options):
    torch.manual_seed(0)
    model = Model(dtype)
    optimizer = hybridopt.AdamW(model.named_parameters(), lr=lr, track_changes=True, **options)
    follower = copy.deepcopy(model)
    return model, optimizer, follower


def bits_of(model):
    return {
        name: param.detach().contiguous().reshape(-1).view(torch.uint8)
        for name, param in model.named_parameters()
    }


def same(model, follower):
    expected, got = bits_of(model), bits_of(follower)
    return all(torch.equal(expected[name], got[name]) for name in expected)


def publish(optimizer, follower, **options):
    patch = optimizer.weight_changes(**options)
    hybridopt.apply_changes(follower, patch)
    patch.acknowledge()
    return patch


SETTINGS = [
    {"dtype": torch.bfloat16},
    {"dtype": torch.bfloat16, "master_layout": "split", "state_dtype": "bf16"},
    {"dtype": torch.bfloat16, "master_layout": "split24"},
    {"dtype": torch.float16},
    {"dtype": torch.float32},
]


@pytest.mark.parametrize("setting", SETTINGS, ids=lambda setting: "-".join(map(str, setting.values())))
def test_a_follower_has_every_bit_after_each_patch(setting):
    model, optimizer, follower = made(**setting)
    assert all(change.dense for _, change in publish(optimizer, follower))
    sparse = 0
    for seed in range(6):
        trained(model, optimizer, seed)
        if seed % 2:
            trained(model, optimizer, 100 + seed, scale=torch.inf if seed == 3 else 1.0)  # one is skipped
        patch = publish(optimizer, follower, dense_above=1.0)
        assert same(model, follower)
        assert patch["idle"].values.numel() == 0
        sparse += sum(change.values.numel() for _, change in patch if not change.dense)
    elements = sum(param.numel() for param in model.parameters())
    assert 0 < sparse < 6 * elements


def test_a_patch_that_is_lost_costs_nothing():
    model, optimizer, follower = made()
    publish(optimizer, follower)
    trained(model, optimizer, 1)
    lost = optimizer.weight_changes(dense_above=1.0)
    trained(model, optimizer, 2)
    later = optimizer.weight_changes(dense_above=1.0)
    for name, change in lost:
        if not change.dense:
            assert set(change.indices.tolist()) <= set(later[name].indices.tolist())
    hybridopt.apply_changes(follower, later)
    assert same(model, follower)
    hybridopt.apply_changes(follower, later)  # again: it has no effect
    assert same(model, follower)


def addresses_of(patch):
    return [change.indices.data_ptr() for _, change in patch if not change.dense and change.values.numel()]


def memory_of(optimizer):
    return optimizer._engines.present.take_memory._memory


def test_a_patch_uses_the_memory_of_the_one_before_again():
    model, optimizer, follower = made(lr=1e-2)  # so that each step changes about as many elements
    publish(optimizer, follower)
    used = set()
    for seed in range(3):
        trained(model, optimizer, seed)
        patch = publish(optimizer, follower, dense_above=1.0)
        begin = memory_of(optimizer).data_ptr()
        assert all(begin <= address < begin + memory_of(optimizer).numel() for address in addresses_of(patch))
        assert same(model, follower)
        del patch
        publish(optimizer, follower)  # nothing has changed
        used.add(begin)
    assert len(used) == 1


KEPT = {
    "the patch": lambda patch: patch,
    "one tensor": lambda patch: patch["body.weight"].values,
    "a view": lambda patch: patch["body.weight"].indices[1:],
    "an array of numpy": lambda patch: patch["body.weight"].indices.numpy(),
    "the bytes of an array": lambda patch: patch["body.weight"].indices.numpy().data,
    "a tensor of the same storage": lambda patch: torch.empty(0, dtype=torch.int64).set_(
        patch["body.weight"].indices.untyped_storage()
    ),
    "a tensor by DLPack": lambda patch: torch.from_dlpack(patch["body.weight"].indices),
}


def content_of(kept):
    if isinstance(kept, hybridopt.WeightPatch):
        return [(change.indices.tolist(), change.values.tolist()) for _, change in kept if not change.dense]
    return kept.tolist()


@pytest.mark.parametrize("kept", KEPT)
def test_a_patch_does_not_write_over_one_that_is_kept(kept):
    model, optimizer, follower = made(lr=1e-2)
    publish(optimizer, follower)
    trained(model, optimizer, 1)
    patch = publish(optimizer, follower, dense_above=1.0)
    before = addresses_of(patch)
    kept = KEPT[kept](patch)
    expected = content_of(kept)
    del patch
    for seed in (2, 3):
        trained(model, optimizer, seed)
        patch = publish(optimizer, follower, dense_above=1.0)
        assert addresses_of(patch)[0] != before[0]
        assert content_of(kept) == expected
        assert same(model, follower)
        del patch
    optimizer.close()
    assert content_of(kept) == expected


def test_memory_of_patches_is_bounded_and_goes_with_the_optimizer():
    memory = TakeMemory()
    assert memory.lend().bytes == 0
    assert memory.lend(1000).bytes == 1500
    memory.note_used(1000)
    memory.note_used(0)
    loan = memory.lend()
    address = loan.address
    del loan
    assert memory.lend(1500).address == address
    assert memory.lend(1501).bytes == 2251
    memory.note_used(500)
    assert memory.lend().bytes == 750  # it was more than four times as large as needed
    model, optimizer, follower = made()
    publish(optimizer, follower)
    trained(model, optimizer, 1)
    patch = publish(optimizer, follower, dense_above=1.0)
    storage = weakref.ref(memory_of(optimizer))
    assert storage() is not None
    del patch
    optimizer.close()
    assert storage() is None


def in_place(model):
    with torch.no_grad():
        model.body.weight[3].add_(1.0)


def copied(model):
    with torch.no_grad():
        model.idle.copy_(torch.ones(5, 7))


@pytest.mark.parametrize("write", [in_place, copied])
@pytest.mark.parametrize("setting", SETTINGS, ids=lambda setting: "-".join(map(str, setting.values())))
def test_what_other_code_writes_in_place_is_in_the_next_patch(setting, write):
    model, optimizer, follower = made(**setting)
    for published_between in (False, True):
        trained(model, optimizer, 1)
        publish(optimizer, follower)
        write(model)
        if published_between:
            publish(optimizer, follower)
            assert same(model, follower)
        trained(model, optimizer, 2)
        publish(optimizer, follower)
        assert same(model, follower)


def test_after_a_load_and_after_a_mark_params_come_whole(tmp_path):
    model, optimizer, follower = made()
    for each in (model, follower):  # checkpoints hold elements in the order of dimensions
        each.turned = nn.Parameter(each.turned.detach().contiguous())
    optimizer = hybridopt.AdamW(model.named_parameters(), lr=1e-4, track_changes=True)
    trained(model, optimizer, 1)
    optimizer.save_checkpoint(tmp_path / "checkpoint")
    trained(model, optimizer, 2)
    publish(optimizer, follower)
    optimizer.load_checkpoint(tmp_path / "checkpoint")
    assert all(change.dense for _, change in publish(optimizer, follower))
    assert same(model, follower)
    optimizer.mark_weights_changed()
    assert all(change.dense for _, change in publish(optimizer, follower))
    assert not any(change.dense for name, change in publish(optimizer, follower) if name != "empty")


def test_a_write_through_data_shows_in_the_hash():
    model, optimizer, follower = made(dtype=torch.float32)
    publish(optimizer, follower)
    model.body.weight.data[0, 0] += 1
    with pytest.raises(ValueError, match="parameter 'body.weight'"):
        publish(optimizer, follower)
    optimizer.mark_weights_changed()
    publish(optimizer, follower)
    assert same(model, follower)


# ------------------------------------------------------------------------------------------ files


def test_a_file_has_the_patch_bit_for_bit(tmp_path):
    model, optimizer, follower = made()
    for step in range(3):
        path = tmp_path / f"{step}.safetensors"
        patch = optimizer.weight_changes()
        patch.to_file(path)
        patch.acknowledge()
        read = hybridopt.WeightPatch.from_file(path)
        assert len(read) == len(patch) == 6
        for name, change in patch:
            assert torch.equal(read[name].values, change.values)
            assert read[name].hash == change.hash and read[name].base_hash == change.base_hash
        hybridopt.apply_changes(follower, read)
        assert same(model, follower)
        with pytest.raises(abi.InvalidStateError, match="comes from a file"):
            read.acknowledge()
        trained(model, optimizer, step)
    assert sorted(path.name for path in tmp_path.iterdir()) == [f"{step}.safetensors" for step in range(3)]


def test_a_file_of_whole_params_leaves_their_memory_to_torch(tmp_path):
    model, optimizer, _ = made(movable=("params", "grads", "states"))
    patch = optimizer.weight_changes()
    patch.to_file(tmp_path / "patch.safetensors")
    change = patch["embedding.weight"]
    wire_forms._overwriting("", wire_forms._content("", model.embedding.weight, change), change)
    before = bits_of(copy.deepcopy(model))
    with optimizer.offloaded():
        assert model.embedding.weight.untyped_storage().nbytes() == 0
    assert all(torch.equal(before[name], value) for name, value in bits_of(model).items())


def test_the_file_is_one_that_safetensors_reads(tmp_path):
    safetensors = pytest.importorskip("safetensors.torch")
    model, optimizer, follower = made()
    publish(optimizer, follower)
    trained(model, optimizer, 1)
    patch = optimizer.weight_changes(dense_above=1.0)
    patch.to_file(tmp_path / "patch.safetensors")
    tensors = safetensors.load_file(tmp_path / "patch.safetensors")
    change = patch["body.weight"]
    assert torch.equal(tensors["body.weight.indices"], change.indices)
    assert torch.equal(tensors["body.weight.values"], change.values)


@pytest.mark.parametrize("mask", [0o022, 0o077, 0o002])
def test_a_file_has_the_rights_that_the_process_gives_files(mask, tmp_path):
    _, optimizer, _ = made()
    before = os.umask(mask)
    try:
        optimizer.weight_changes().to_file(tmp_path / "patch")
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "patch").stat().st_mode) == 0o666 & ~mask


def test_patches_are_on_the_host_whatever_the_default_device(tmp_path):
    model, optimizer, follower = made()
    publish(optimizer, follower)
    trained(model, optimizer, 1)
    with torch.device("meta"):
        patch = optimizer.weight_changes(dense_above=1.0)
        patch.to_file(tmp_path / "patch")
        read = hybridopt.WeightPatch.from_file(tmp_path / "patch")
        content = wire_forms._content("", model.body.weight, patch["body.weight"])
        wire_forms._overwriting("", content, patch["body.weight"])
        hybridopt.apply_changes(follower, read)
    assert same(model, follower)
    assert {change.values.device.type for _, change in read} == {"cpu"}


def test_a_follower_made_for_inference_alone_follows():
    model, optimizer, _ = made()
    with torch.inference_mode():
        follower = copy.deepcopy(model)
        for param in follower.parameters():
            param.data = torch.zeros_like(param)
    publish(optimizer, follower)
    trained(model, optimizer, 1)
    publish(optimizer, follower)
    assert same(model, follower)


def test_what_is_no_model_or_no_patch_is_refused():
    model, optimizer, _ = made()
    with pytest.raises(TypeError, match="patch is a str, expected a WeightPatch; read a file by WeightPatch.from_file"):
        hybridopt.apply_changes(model, "patch")
    for wrong in ([("a", model.body.weight)], model.named_parameters()):
        with pytest.raises(TypeError, match="model is a (list|generator), expected a module, or a dict of tensors by name"):
            hybridopt.apply_changes(wrong, optimizer.weight_changes())


@pytest.mark.parametrize("options", [{}, {"master_layout": "split"}], ids=["fp32", "split"])
def test_another_tensor_at_the_same_address_counts_as_a_write(options):
    """The allocator gives the memory of a tensor that has been freed to the next one."""
    dtype = torch.bfloat16 if options else torch.float32
    memory = bytearray(b"\1" * 64 * dtype.itemsize)
    param = nn.Parameter(torch.frombuffer(memory, dtype=dtype))
    optimizer = hybridopt.AdamW([("param", param)], lr=0.0, track_changes=True, **options)
    param.grad = torch.ones_like(param)
    optimizer.step()
    follower = {"param": torch.zeros_like(param)}
    patch = optimizer.weight_changes()
    hybridopt.apply_changes(follower, patch)
    patch.acknowledge()
    del patch
    other = torch.frombuffer(memory, dtype=dtype)
    other.add_(2.0)
    param.data = other
    hybridopt.apply_changes(follower, optimizer.weight_changes())
    assert torch.equal(follower["param"], param)


def test_a_file_that_is_damaged_or_no_patch_is_refused(tmp_path):
    model, optimizer, follower = made()
    publish(optimizer, follower)
    trained(model, optimizer, 1)
    path = tmp_path / "patch"
    optimizer.weight_changes(dense_above=1.0).to_file(path)
    content = path.read_bytes()
    before = bits_of(copy.deepcopy(follower))

    def refused(changed, match):
        path.write_bytes(changed)
        with pytest.raises(ValueError, match=match):
            hybridopt.apply_changes(follower, hybridopt.WeightPatch.from_file(path))
        assert all(torch.equal(bits, before[name]) for name, bits in bits_of(follower).items())

    for length in (0, 7, 100, len(content) - 1):
        refused(content[:length], "is no patch that can be read")
    flipped = bytearray(content)
    flipped[-1] ^= 0x40
    refused(bytes(flipped), "the patch is damaged, or|does not fit together")
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    header["__metadata__"]["format"] = "another"
    text = json.dumps(header).encode()
    refused(len(text).to_bytes(8, "little") + text + content[8 + length :], "its format is 'another'")


# ---------------------------------------------------------------------------------------- refusals


def test_a_patch_on_a_wrong_base_is_refused_and_changes_nothing():
    model, optimizer, follower = made()
    publish(optimizer, follower)
    behind = copy.deepcopy(follower)
    trained(model, optimizer, 1)
    publish(optimizer, follower)
    trained(model, optimizer, 2)
    patch = optimizer.weight_changes()
    before = bits_of(copy.deepcopy(behind))
    with pytest.raises(ValueError, match=r"the patch does not fit parameter '.*': it begins from the hash \w{16}"):
        hybridopt.apply_changes(behind, patch)
    assert all(torch.equal(bits, before[name]) for name, bits in bits_of(behind).items())
    hybridopt.apply_changes(follower, patch)
    assert same(model, follower)


def test_a_model_with_other_params_is_refused():
    _, optimizer, _ = made()
    patch = optimizer.weight_changes()
    with pytest.raises(ValueError, match="the patch has parameter 'idle', and the model has none"):
        hybridopt.apply_changes(nn.Linear(2, 2), patch)
    other = Model(torch.float32)
    with pytest.raises(ValueError, match=r"is torch.float32 of shape \(5, 7\) here, and torch.bfloat16"):
        hybridopt.apply_changes(other, patch)


def test_wrong_calls_say_what_is_wrong():
    model = Model(torch.bfloat16)
    optimizer = hybridopt.AdamW(model.named_parameters())
    for call in (optimizer.weight_changes, optimizer.mark_weights_changed):
        with pytest.raises(abi.InvalidStateError, match="make the optimizer with track_changes=True"):
            call()
    with pytest.raises(ValueError, match="Invalid track_changes: 1, expected True or False"):
        hybridopt.AdamW(model.named_parameters(), track_changes=1)
    _, optimizer, _ = made()
    for value in (0, 2.0, True, "1"):
        with pytest.raises(ValueError, match="expected a fraction above 0 and up to 1, or None"):
            optimizer.weight_changes(dense_above=value)
    with pytest.raises(ValueError, match="Invalid on_device: 'cuda', expected True or False"):
        optimizer.weight_changes(on_device="cuda")
    with pytest.raises(ValueError, match="Invalid on_device: True, but the parameters are on the CPU; leave it out"):
        optimizer.weight_changes(on_device=True)


@pytest.mark.parametrize("seed", drawn_seeds(20))
def test_indices_in_a_part_are_those_of_its_elements(seed):
    draw = random.Random(seed)
    shape = tuple(draw.randrange(1, 6) for _ in range(draw.randrange(1, 4)))
    offsets = [tuple(draw.randrange(size) for size in shape) for _ in range(draw.randrange(1, 4))]
    boxes = tuple(
        (offset, tuple(draw.randrange(size - first + 1) for first, size in zip(offset, shape))) for offset in offsets
    )
    part = Part(shape, boxes)
    if draw.random() < 0.5:
        first = draw.randrange(part.count + 1)
        part = Part(shape, boxes, (first, draw.randrange(part.count - first + 1)))
    assert Part.of(json.loads(json.dumps(part.content()))) == part
    indices = torch.arange(torch.Size(shape).numel()).view(shape)
    assert torch.equal(part.in_tensor(torch.arange(part.count)), part.elements_of(indices))


def test_the_hash_is_the_one_that_offload_h_defines():
    def mix(x):
        mask = (1 << 64) - 1
        x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & mask
        x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & mask
        return x ^ (x >> 31)

    for count in (0, 1, 3, 4, 5, 1000):
        tensor = torch.randn(count).bfloat16()
        content = bytes(tensor.view(torch.uint8).tolist())
        content += bytes(-len(content) % 8)
        words = [int.from_bytes(content[i : i + 8], "little") for i in range(0, len(content), 8)]
        expected = mix(2 * count)
        for index, word in enumerate(words):
            expected += mix((word + (index + 1) * 0x9E3779B97F4A7C15) & ((1 << 64) - 1))
        assert hash_of(tensor) == expected & ((1 << 64) - 1)


# ------------------------------------------------------------------------------------- wire forms
# tests/integrations gives patches in these forms to the projects' own receivers.

needs_hash = pytest.mark.skipif(not hasattr(torch, "hash_tensor"), reason="this torch has no hash_tensor")


def whole_param(values):
    return hybridopt.WeightChange(tuple(values.shape), None, values, 0, None)


def changed_in(shape, indices, values, **more):
    return hybridopt.WeightChange(shape, torch.tensor(indices), values, 0, 0, **more)


def mixed():
    """Params of two dtypes, whole, changed in places, unchanged, empty."""
    return hybridopt.WeightPatch(
        {
            "a": changed_in((2, 3), [1, 5], torch.tensor([1.5, -2]).bfloat16()),
            "unchanged": changed_in((4,), [], torch.empty(0).bfloat16()),
            "b": whole_param(torch.arange(6.0).view(3, 2).bfloat16()),
            "empty": whole_param(torch.empty(0, 2)),
            "c": changed_in((), [0], torch.tensor([3.0])),
        }
    )


IN_FORMS = {
    "a": ((2, 3), [1, 5], [1.5, -2]),
    "b": ((3, 2), [0, 1, 2, 3, 4, 5], [0, 1, 2, 3, 4, 5]),
    "c": ((), [0], [3]),
}


def test_vllms_patches_have_every_change_once():
    patches = wire_forms.vllm_patches(mixed())
    assert {p.name: (p.shape, p.indices.tolist(), p.values.tolist()) for p in patches} == IN_FORMS
    for patch in patches:
        assert patch.full_shape == patch.shape and patch.dtype == patch.values.dtype
        assert patch.indices.dtype == torch.int32 and patch.indices.dim() == patch.values.dim() == 1
        assert patch.indices.is_contiguous() and patch.values.is_contiguous()


def read_flush(flush):
    named = dict(flush)
    spec = json.loads(bytes(named["__delta_spec__"].tolist()))
    positions = named.get("__positions__", torch.empty(0, dtype=torch.uint8))
    for param in spec["params"]:
        assert getattr(torch, param["dtype"]) == named["__values__"].dtype and param["pos_width"] == 4
        own = positions[param["pos_start"] : param["pos_end"]].view(torch.int32)
        values = named["__values__"][param["val_start"] : param["val_end"]]
        yield spec["encoding"], param["name"], tuple(param["shape"]), own.tolist(), values.tolist()


@needs_hash
@pytest.mark.parametrize("flush_bytes", [16, 20, 30, 1 << 20])
def test_verls_flushes_have_every_change_once(flush_bytes):
    found = {}
    flushes = list(wire_forms.verl_flushes(mixed(), flush_bytes=flush_bytes))
    for flush in flushes:
        assert flush_bytes < 1 << 20 or len(flushes) == 2  # one for each dtype
        for encoding, name, shape, indices, values in read_flush(flush):
            assert encoding == "indices"
            known = found.setdefault(name, (shape, [], []))
            known[1].extend(indices)
            known[2].extend(values)
        named = dict(flush)
        assert named["__values__"].nbytes + named["__positions__"].nbytes <= flush_bytes
    assert found == IN_FORMS


@needs_hash
def test_a_patch_of_whole_params_has_the_form_of_verls_first_synchronization():
    numbers = torch.arange(6.0).view(3, 2)
    [flush] = wire_forms.verl_flushes(hybridopt.WeightPatch({"a": whole_param(numbers), "b": whole_param(-numbers)}))
    assert [name for name, _ in flush] == ["__delta_spec__", "__values__"]
    assert list(read_flush(flush)) == [
        ("dense", "a", (3, 2), [], [0, 1, 2, 3, 4, 5]),
        ("dense", "b", (3, 2), [], [0, -1, -2, -3, -4, -5]),
    ]


@needs_hash
def test_nothing_is_sent_where_nothing_has_changed(tmp_path):
    nothing = hybridopt.WeightPatch({"a": changed_in((4,), [], torch.empty(0))})
    assert wire_forms.vllm_patches(nothing) == [] == list(wire_forms.verl_flushes(nothing))


FORMS = {
    "vLLM": wire_forms.vllm_patches,
    "verl": lambda patch: list(wire_forms.verl_flushes(patch)),
}


@needs_hash
@pytest.mark.parametrize("name", FORMS)
def test_what_a_form_cannot_say_is_refused(name):
    change = changed_in((4,), [2], torch.tensor([math.nan]))
    with pytest.raises(ValueError, match=f"parameter 'a' has a NaN, which {name} takes for an element that has not"):
        FORMS[name](hybridopt.WeightPatch({"a": change}))
    large = changed_in(((1 << 31) + 1,), [2], torch.zeros(1))
    with pytest.raises(ValueError, match=f"parameter 'a' has 2147483649 elements, and {name}'s form counts them in 31"):
        FORMS[name](hybridopt.WeightPatch({"a": large}))
    for shard in (changed_in((4,), [2], torch.zeros(1), shard=Part((8,), (((0,), (4,)),))),):
        with pytest.raises(ValueError, match=r"has a shard of parameter 'a', .* hybridopt.gather_changes\(\)"):
            FORMS[name](hybridopt.WeightPatch({"a": shard}))
    replica = changed_in((8,), [2], torch.zeros(1), shard=Part((8,), (((0,), (8,)),)))
    assert len(FORMS[name](hybridopt.WeightPatch({"a": replica}))) == 1


@needs_hash
@pytest.mark.parametrize("value", [0, 15, True, 1e9, None])
def test_a_wrong_size_of_a_flush_is_refused(value):
    with pytest.raises(ValueError, match="Invalid flush_bytes: .*, expected an int of at least 16"):
        list(wire_forms.verl_flushes(mixed(), flush_bytes=value))


@pytest.mark.skipif(hasattr(torch, "hash_tensor"), reason="this torch has what verl's form needs")
def test_a_torch_without_hashes_is_told():
    with pytest.raises(RuntimeError, match=r"verl's form has a checksum of torch.hash_tensor, which torch .* has not"):
        list(wire_forms.verl_flushes(mixed()))


def test_wrong_arguments_say_what_is_wrong(tmp_path, monkeypatch):
    for value in (0, -1, True, 1.0, "1", None):
        with pytest.raises(ValueError, match="Invalid version: .*, expected an int from 1 on"):
            wire_forms.write_slime_version(mixed(), nn.Linear(1, 1), tmp_path, value)
    monkeypatch.setitem(sys.modules, "zstandard", None)
    with pytest.raises(ImportError, match=r"slime's form is compressed; install zstandard"):
        wire_forms.write_slime_version(mixed(), nn.Linear(1, 1), tmp_path, 1)
    assert not list(tmp_path.iterdir())


def test_an_older_torch_is_told_for_verls_checksum(monkeypatch):
    monkeypatch.delattr(torch, "hash_tensor", raising=False)
    with pytest.raises(RuntimeError, match=r"verl's form has a checksum of torch.hash_tensor, which torch .* has not"):
        list(wire_forms.verl_flushes(mixed()))
