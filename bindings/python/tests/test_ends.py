"""What a training leaves behind: nothing, in whatever order its model and its optimizer go, and however it has ended.
Params, modules, optimizers, the library's objects and threads are looked for one by one."""

import contextlib
import copy
import gc
import io
import pickle

import models
import pytest
import ranks
import torch
import torch.distributed as dist
from remains import Remains, assert_that_nothing_piles_up, resident_bytes
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.optim.optimizer import _global_optimizer_pre_hooks

import hybridopt
from hybridopt import abi

WIDTH = 8


# dynamo looks at the gradients of what a layer gets
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")


class Failing(Exception):
    pass


def model():
    torch.manual_seed(0)
    return nn.Sequential(*(models.Block(WIDTH, 16) for _ in range(3)))


def backward(module, seed=0):
    generator = torch.Generator().manual_seed(seed)
    module(torch.randn(4, WIDTH, generator=generator)).square().sum().backward()


def steps(module, optimizer, count=3):
    for seed in range(count):
        backward(module, seed)
        optimizer.step()
        optimizer.zero_grad()


def adamw(module, **options):
    options = {"lr": 1e-2, "threads": 2, "max_grad_norm": 1.0, **options}
    return hybridopt.AdamW(module.named_parameters(), **options)


def stash_of(**options):
    return hybridopt.ActivationStash(1 << 20, min_bytes=1, slab_bytes=4096, fraction=1.0, keep_last=0, **options)


# Each function trains a model and returns the optimizer, and what else the user may keep.


def plain(module):
    optimizer = adamw(module)
    steps(module, optimizer)
    assert optimizer.state_dict()["state"]
    return optimizer


def hooked(module):
    optimizer = adamw(module)
    hooks = optimizer.hook_gradients()
    steps(module, optimizer)
    return optimizer, hooks


def hooked_in_a_pass(module):
    """The gradients of a backward pass have left, and no step has used them."""
    optimizer, hooks = hooked(module)
    backward(module)
    return optimizer, hooks


def accumulating(module):
    optimizer = adamw(module)
    hooks = optimizer.hook_gradients(accumulate=True)
    steps(module, optimizer)
    return optimizer, hooks


def overlapping(module, **options):
    """A step is under way."""
    optimizer = adamw(module, **options)
    overlap = optimizer.overlap(module)
    steps(module, optimizer)
    assert optimizer._engine.under_way
    return optimizer, overlap


def overlapping_from_the_start(module):
    optimizer = adamw(module, overlap=module)
    steps(module, optimizer)
    return optimizer


def overlapping_until_the_end(module):
    optimizer, overlap = overlapping(module)
    optimizer.synchronize()
    return optimizer, overlap


def everything(module):
    optimizer = adamw(module, overlap=module)
    hooks = optimizer.hook_gradients()
    stash = stash_of(model=module)
    wrapping = stash.wrap(list(module), weights=True)
    steps(module, optimizer)
    return optimizer, hooks, stash, wrapping


def stashed(module, **options):
    optimizer, stash = adamw(module), stash_of(**options)
    for seed in range(3):
        with stash:
            loss = module(torch.randn(4, WIDTH)).square().sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert stash.stats().pushed_bytes > 0
    return optimizer, stash


def stashed_by_name(module):
    return stashed(module, model=module)


def wrapped(module, **options):
    optimizer, stash = adamw(module), stash_of()
    wrapping = stash.wrap(list(module), **options)
    steps(module, optimizer)
    assert stash.stats().pushed_bytes > 0
    return optimizer, stash, wrapping


def with_weights(module):
    return wrapped(module, weights=True)


def with_weights_away(module):
    optimizer, stash, wrapping = wrapped(module, weights=True)
    backward(module)
    assert stash.stats().weights_away_bytes > 0
    return optimizer, stash, wrapping


def compiled(module):
    for block in module:
        block.compile(backend="eager")
    return everything(module)


def in_a_phase(module):
    """Params and state have been moved away and have not come back."""
    optimizer = adamw(module, movable=("params", "grads", "states"))
    steps(module, optimizer)
    optimizer.offload(params=True, grads=True, states=True)
    return optimizer


def scheduled(module):
    """torch's scheduler makes a circle of references."""
    optimizer, overlap = overlapping(module)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    steps(module, optimizer)
    scheduler.step()
    return optimizer, overlap, scheduler


def in_a_circle(module):
    """Param and module refer to the optimizer, which a step under way must not keep alive."""
    optimizer, overlap = overlapping(module)
    module.trainer = module[0].up.weight.trainer = optimizer
    return optimizer, overlap


def copied(module):
    optimizer = adamw(module, overlap=module)
    optimizer.hook_gradients()
    steps(module, optimizer)
    optimizer.synchronize()
    others = copy.deepcopy(module), pickle.loads(pickle.dumps(module)), copy.deepcopy(optimizer)
    return optimizer, *others


def loaded(module):
    optimizer = plain(module)
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    steps(module, optimizer)
    return optimizer


def failing(module):
    """A forward and a backward pass and a step that raise."""
    optimizer = adamw(module, overlap=module)
    hooks = optimizer.hook_gradients()
    stash = stash_of()
    wrapping = stash.wrap(list(module), weights=True)
    steps(module, optimizer)

    def fail(*_):
        raise Failing

    fails = module[1].down.register_forward_pre_hook(fail)
    with pytest.raises(Failing):
        backward(module)
    fails.remove()
    fails = module[1].down.weight.register_hook(fail)
    with pytest.raises(Failing):
        backward(module)
    fails.remove()
    optimizer.zero_grad()
    backward(module)
    with pytest.raises(abi.InvalidStateError, match="has been taken already, and another backward pass"):
        backward(module)
    # torch keeps what a backward pass that has failed had queued until the next one.
    torch.zeros(1, requires_grad=True).sum().backward()
    return optimizer, hooks, stash, wrapping


def closed(module):
    found = everything(module)
    found[0].close()
    found[2].close()
    return found


def removed(module):
    optimizer = adamw(module)
    overlap, hooks = optimizer.overlap(module), optimizer.hook_gradients()
    stash = stash_of()
    wrapping = stash.wrap(list(module), weights=True)
    steps(module, optimizer)
    for each in (hooks, wrapping, overlap):
        each.remove()
    steps(module, optimizer)
    return optimizer, stash, wrapping


def in_check_mode(module):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HYBRIDOPT_CHECK_OVERLAP", "1")
        return overlapping(module)


TRAININGS = [
    plain, hooked, hooked_in_a_pass, accumulating, overlapping, overlapping_from_the_start, overlapping_until_the_end,
    everything, stashed, stashed_by_name, wrapped, with_weights, with_weights_away, compiled, in_a_phase, scheduled,
    in_a_circle, copied, loaded, failing, closed, removed, in_check_mode,
]  # fmt: skip
every_training = pytest.mark.parametrize("training", TRAININGS, ids=lambda each: each.__name__)


def trained(training, remains):
    """The model, and what the training has returned."""
    module = model()
    found = training(module)
    found = found if isinstance(found, tuple) else (found,)
    remains.watch(module, *found)
    return module, *found


@pytest.fixture(scope="module", autouse=True)
def first_training():
    """The first one imports modules, whose frames need the collection of garbage."""
    plain(model())


# A circle of references needs the collection of garbage: torch's scheduler makes one, and so does dynamo.
CIRCLES = (compiled, scheduled, in_a_circle, copied)


@every_training
def test_nothing_is_left_of_a_training(training):
    """Memory returns with the last reference already, unless there is a circle."""
    remains = Remains()
    gc.disable()
    try:
        trained(training, remains)
        assert training in CIRCLES or remains.alive() == []
    finally:
        gc.enable()
    remains.assert_nothing()


@every_training
def test_the_model_may_go_first(training):
    remains = Remains()
    module, *others = trained(training, remains)
    del module
    gc.collect()
    optimizer = others[0]
    del others
    if training in (plain, loaded, in_a_phase):
        optimizer.reload(params=True) if training is in_a_phase else optimizer.state_dict()
    del optimizer
    remains.assert_nothing()


@every_training
def test_the_optimizer_may_go_first(training):
    remains = Remains()
    module, *others = trained(training, remains)
    module.trainer = module[0].up.weight.trainer = None
    del others
    gc.collect()
    left = [name for name in remains.alive() if "AdamW" in name or "library's optimizer" in name]
    assert left == []
    if training is not in_a_phase:
        backward(module)
    del module
    remains.assert_nothing()


@pytest.mark.parametrize("training", [hooked_in_a_pass, overlapping, everything, failing], ids=lambda f: f.__name__)
def test_what_hook_gradients_and_overlap_return_keeps_nothing_alive(training):
    remains = Remains()
    module = model()
    optimizer, kept, *others = training(module)
    remains.watch(module, optimizer)
    del module, optimizer, others
    remains.assert_nothing()
    kept.remove()


def hooks_of(module):
    """The number of hooks on a model and its params."""
    count = 0
    for each in module.modules():
        names = ("_forward_hooks", "_forward_pre_hooks", "_state_dict_pre_hooks", "_load_state_dict_pre_hooks")
        count += sum(len(vars(each)[name]) for name in names)
    return count + sum(len(param._post_accumulate_grad_hooks or ()) for param in module.parameters())


@pytest.mark.parametrize("training", [hooked, overlapping], ids=lambda f: f.__name__)
def test_hooks_do_not_pile_up_on_a_model_that_is_trained_again(training):
    module = model()
    module.unused = nn.Linear(2, 2)  # whose hooks are never called
    module.unused.forward = nn.Identity().forward
    counts = []
    for _ in range(4):
        optimizer = training(module)[0]
        counts.append(hooks_of(module))
        del optimizer
    assert counts[0] > 0 and counts == counts[:1] * 4


@contextlib.contextmanager
def waiting(module, optimizer):
    """In this context a step is under way, for which something must wait."""
    backward(module)
    optimizer.step()
    assert optimizer._engine.under_way
    yield
    assert not optimizer._engine.under_way
    optimizer.zero_grad()


def assert_everything_waits(module, optimizer):
    optimizer.synchronize()
    weights = copy.deepcopy(module.state_dict())
    for use in (
        module.state_dict,
        lambda: module.load_state_dict(weights),
        module.float,
        lambda: module.zero_grad(set_to_none=False),
        lambda: module(torch.randn(4, WIDTH)),
    ):
        with waiting(module, optimizer):
            use()


@pytest.mark.parametrize("kind", ["forgotten", "removed first", "removed last"])
@pytest.mark.parametrize("is_compiled", [False, True])
def test_a_model_waits_for_its_latest_optimizer_whatever_was_before(kind, is_compiled):
    module = model()
    if is_compiled:
        for block in module:
            block.compile(backend="eager")
    first, overlap = overlapping(module)
    if kind == "forgotten":
        del first, overlap
    else:
        first.synchronize()
    optimizer = adamw(module)
    other = optimizer.overlap(module)
    steps(module, optimizer)
    if kind == "removed first":
        overlap.remove()
    if kind == "removed last":  # the first one goes on
        other.remove()
        optimizer = first
        steps(module, first, 1)
    assert_everything_waits(module, optimizer)


@pytest.mark.parametrize("how", [copy.deepcopy, lambda module: torch.load(saved(module), weights_only=False)])
def test_a_copy_of_a_model_waits_for_its_own_optimizer(how):
    module = model()
    optimizer, _ = overlapping(module)
    optimizer.synchronize()
    other = how(module)
    another, _ = overlapping(other)
    assert_everything_waits(other, another)


def saved(module):
    file = io.BytesIO()
    torch.save(module, file)
    file.seek(0)
    return file


def test_a_wrapping_that_ends_leaves_the_wait_that_came_after_it(monkeypatch):
    """Both replace the call of a compiled module."""
    monkeypatch.setenv("HYBRIDOPT_CHECK_OVERLAP", "1")
    module = model()
    for block in module:
        block.compile(backend="eager")
    stash = stash_of()
    wrapping = stash.wrap(list(module))
    optimizer, _ = overlapping(module)
    wrapping.remove()
    pushed = stash.stats().pushed_bytes
    steps(module, optimizer)
    assert stash.stats().pushed_bytes == pushed


def test_a_stash_that_ends_takes_its_part_in_the_steps_of_all_optimizers_with_it():
    with_weights(model())
    before = len(_global_optimizer_pre_hooks)
    for _ in range(3):
        with_weights(model())
    assert len(_global_optimizer_pre_hooks) == before


def test_an_error_of_a_step_lets_the_training_go_with_it():
    remains = Remains()
    module = model()
    optimizer, _ = overlapping(module)
    remains.watch(module, optimizer)
    backward(module)
    optimizer.step()
    module[0].up.weight.grad.mul_(2)
    with pytest.raises(abi.InvalidStateError, match="was written in place while a step read it") as raised:
        optimizer.synchronize()
    optimizer.zero_grad()
    error = raised.value
    del raised, module, optimizer
    assert remains.alive()  # in the frames of the traceback
    error.__traceback__ = None
    remains.assert_nothing()


@pytest.mark.parametrize("training", [hooked, overlapping, everything], ids=lambda f: f.__name__)
def test_trainings_in_one_process_take_the_memory_of_one(training):
    """A leak of one training's params and state would show as at least 32 MiB in each repetition."""

    def run():
        torch.manual_seed(0)
        module = nn.Sequential(*(nn.Linear(1024, 1024) for _ in range(2)))
        optimizer = adamw(module)
        if training is not overlapping:
            optimizer.hook_gradients()
        if training is not hooked:
            optimizer.overlap(module)
        stash = None
        if training is everything:
            stash = hybridopt.ActivationStash(16 << 20, slab_bytes=1 << 20)
            stash.wrap(list(module), weights=True)
        for _ in range(2):
            module(torch.randn(2, 1024)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()

    def taken():
        run()
        gc.collect()
        return resident_bytes()

    taken()  # threads, pools and modules of the first one
    before, *after = (taken() for _ in range(5))
    assert max(after) - before < 32 << 20


# --------------------------------------------------------------------------------------- several ranks --


def on_ranks(rank, world, is_sharded):
    everyone = {"process_group": dist.group.WORLD, "replica_group": dist.group.WORLD}

    def train():
        module = model()
        if is_sharded:
            for index in range(len(module)):
                fully_shard(module[index])
            fully_shard(module)
        optimizer = adamw(module, **({} if is_sharded else everyone))
        overlap, hooks = optimizer.overlap(module), optimizer.hook_gradients()
        steps(module, optimizer)
        assert optimizer._comm is not None
        return module, optimizer, overlap, hooks

    assert_that_nothing_piles_up(train)


@pytest.mark.parametrize("is_sharded", [False, True])
def test_trainings_of_several_ranks_leave_nothing(is_sharded):
    ranks.run(on_ranks, 2, is_sharded)
