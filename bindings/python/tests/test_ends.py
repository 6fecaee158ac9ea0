"""A training leaves nothing behind, in whatever order its model and its optimizer are released, and however it has
ended. The tests look for params, modules, optimizers, the library's objects and threads one by one."""

import _thread
import contextlib
import copy
import faulthandler
import functools
import gc
import io
import itertools
import pickle
import subprocess
import sys
import threading
import time
import types
import weakref

import models
import pytest
import ranks
import torch
import torch.distributed as dist
from remains import (
    PATIENCE_SECONDS, Remains, accumulating, adamw, assert_that_nothing_piles_up, backward, closed, everything, failing, forget_failed_pass,
    hooked, hooked_in_a_pass, in_a_phase, overlapping, plain, resident_bytes, stash_of, stashed, stashed_by_name, steps,
    with_weights_away, wrapped,
)  # fmt: skip
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.optim.optimizer import _global_optimizer_pre_hooks

import hybridopt
from hybridopt import abi
from hybridopt.abi import ends
from hybridopt.params.tensors import local
from hybridopt.ranks.process_group import ProcessGroupComm
from hybridopt.traps.trap import Trap

WIDTH = 8


# dynamo looks at the gradients of what a layer gets
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")


def model():
    torch.manual_seed(0)
    return nn.Sequential(*(models.Block(WIDTH, 16) for _ in range(3)))


# Each function trains a model and returns the optimizer, and other objects that the user may keep. remains.py has more.


def overlapping_from_the_start(module):
    optimizer = adamw(module, overlap=module)
    steps(module, optimizer)
    return optimizer


def overlapping_until_the_end(module):
    optimizer, overlap = overlapping(module)
    optimizer.synchronize()
    return optimizer, overlap


def with_weights(module):
    return wrapped(module, weights=True)


def compiled(module):
    for block in module:
        block.compile(backend="eager")
    return everything(module)


def scheduled(module):
    """torch's scheduler makes a reference cycle."""
    optimizer, overlap = overlapping(module)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    steps(module, optimizer)
    scheduler.step()
    return optimizer, overlap, scheduler


def in_a_circle(module):
    """The param and the module refer to the optimizer. A step under way must not keep this cycle alive."""
    optimizer, overlap = overlapping(module)
    module.trainer = module[0].up.weight.trainer = optimizer
    return optimizer, overlap


def in_a_circle_apart(module):
    """One garbage collection ends the optimizer, the stash, and the library's objects behind them, in any order."""
    optimizer, stash, *others = stashed(module)
    circle = [optimizer, stash]
    circle.append(circle)
    return optimizer, stash, *others


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


def failing_in_hooks(module):
    """A backward pass that raises because no step has used the gradients of the pass before."""
    found = everything(module)
    backward(module)
    with pytest.raises(abi.InvalidStateError, match="has been taken already, and another backward pass"):
        backward(module)
    forget_failed_pass(module)
    return found


def removed(module):
    optimizer = adamw(module)
    overlap, hooks = optimizer.overlap(module), optimizer.hook_gradients()
    stash = stash_of(module)
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
    in_a_circle, in_a_circle_apart, copied, loaded, failing, failing_in_hooks, closed, removed, in_check_mode,
]  # fmt: skip
every_training = pytest.mark.parametrize("training", TRAININGS, ids=lambda each: each.__name__)


def trained(training, remains):
    """Trains, and returns the model and what the training has returned."""
    module = model()
    found = training(module)
    found = found if isinstance(found, tuple) else (found,)
    remains.watch(module, *found)
    return module, *found


@pytest.fixture(scope="module", autouse=True)
def first_training():
    """The first training imports modules, whose frames only a garbage collection frees."""
    plain(model())


# Only a garbage collection frees a reference cycle: torch's scheduler makes one, and so does dynamo.
CIRCLES = (compiled, scheduled, in_a_circle, in_a_circle_apart, copied)


@every_training
def test_nothing_is_left_of_a_training(training):
    """Memory is freed with the last reference, unless there is a cycle."""
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
    """Counts the hooks on a model and its params."""
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
    """Inside of this context a step is under way for which something must wait."""
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
    if kind == "removed last":  # the first optimizer continues
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
    """Both wrappings replace the call of a compiled module."""
    monkeypatch.setenv("HYBRIDOPT_CHECK_OVERLAP", "1")
    module = model()
    for block in module:
        block.compile(backend="eager")
    stash = stash_of(module)
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
    """If one training leaked its params and state, each repetition would add at least 32 MiB."""

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

    taken()  # the first training adds threads, pools and modules
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


def passes_without_a_step(rank, world):
    for _ in range(30):
        module = fully_shard(nn.Sequential(nn.Linear(256, 256), nn.GELU(), nn.Linear(256, 256)))
        optimizer = hybridopt.ShardedMuon(hybridopt.muon_groups(module), threads=1)
        optimizer.hook_gradients()
        module(torch.ones(4, 256)).sum().backward()
        del module, optimizer
        gc.collect()
        dist.barrier()


def test_ranks_may_let_an_optimizer_go_while_gradients_are_on_their_way_home():
    """gloo sent nothing more to the other rank, so that the barrier did not end."""
    ranks.run(passes_without_a_step, 2)


def before_a_step():
    """Two equal models, of which the second one has had the step that the optimizer of the first one is about to make."""
    module, other = fully_shard(model()), fully_shard(model())
    expected, optimizer = adamw(other), adamw(module, overlap=module)
    steps(other, expected), steps(module, optimizer)
    optimizer.synchronize()
    backward(other), backward(module)
    expected.step()
    return module, other, optimizer


def collected_in_a_comm_function(rank, world):
    faulthandler.dump_traceback_later(60, exit=True)  # the step would wait for itself for ever
    let_go, collected = threading.Event(), threading.Event()
    gather = ProcessGroupComm._gather

    def gather_after_collection(comm, *arguments):
        if threading.current_thread() is not threading.main_thread() and not collected.is_set():
            let_go.wait()
            gc.collect()
            collected.set()
            time.sleep(0.1)  # the program can use params now, if nothing waits
        return gather(comm, *arguments)

    module, other, optimizer = before_a_step()
    gc.collect()
    gc.disable()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ProcessGroupComm, "_gather", gather_after_collection)
        optimizer.step()
        handle = weakref.ref(optimizer._engine.handle)
        circle = [optimizer]
        circle.append(circle)
        del optimizer, circle
        let_go.set()
        collected.wait()
        assert models.bits(map(local, module.parameters())) == models.bits(map(local, other.parameters()))
    end = time.monotonic() + PATIENCE_SECONDS
    while handle() is not None and time.monotonic() < end:
        time.sleep(0.001)
    assert handle() is None
    faulthandler.cancel_dump_traceback_later()


def test_a_garbage_collection_in_a_comm_function_may_end_the_optimizer_of_the_step():
    """The model still waits for the step."""
    ranks.run(collected_in_a_comm_function, 2)


def let_go_on_another_thread(rank, world, collects):
    waits, gather, drain = threading.Event(), ProcessGroupComm._gather, abi.Optimizer.drain

    def gather_later(comm, *arguments):
        if threading.current_thread() is not threading.main_thread():
            waits.wait()
            time.sleep(0.1)  # the program can use params now, if nothing waits
        return gather(comm, *arguments)

    def drain_seen(handle, *arguments):
        waits.set()
        drain(handle, *arguments)

    module, other, optimizer = before_a_step()
    gc.collect()
    gc.disable()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ProcessGroupComm, "_gather", gather_later)
        patch.setattr(abi.Optimizer, "drain", drain_seen)
        optimizer.step()
        kept = [optimizer]
        end = threading.Thread(target=gc.collect if collects else kept.clear)
        if collects:
            kept.append(kept)
            del kept
        del optimizer
        end.start()
        waits.wait()
        assert models.bits(map(local, module.parameters())) == models.bits(map(local, other.parameters()))
        end.join()
    assert not [each for each in map(local, module.parameters()) if isinstance(each, Trap)]


@pytest.mark.parametrize("collects", [False, True], ids=["its last reference", "a garbage collection"])
def test_the_model_waits_for_a_step_whose_optimizer_ends_on_another_thread(collects):
    ranks.run(let_go_on_another_thread, 2, collects)


COLLECTED_IN_THREADING = """
import _thread, contextlib, faulthandler, threading
from hybridopt.abi import ends
faulthandler.dump_traceback_later(60, exit=True)
called = threading.Event()

def end():
    locks = [each for name, each in vars(threading).items() if name.endswith("_lock") and hasattr(each, "release")]
    assert locks
    with contextlib.ExitStack() as held:
        for each in locks:
            held.enter_context(each)
        ends.outside(called.set)

_thread.start_new_thread(end, ())
called.wait()
"""


def test_a_garbage_collection_in_a_function_of_threading_may_end_objects():
    """The thread holds locks that threading.Thread.start() takes."""
    ended = subprocess.run([sys.executable, "-c", COLLECTED_IN_THREADING], capture_output=True, text=True)
    assert (ended.returncode, ended.stderr) == (0, "")


def test_the_interpreter_waits_for_no_thread_that_could_not_start(monkeypatch):
    def refuse(*_):
        raise RuntimeError("can't start new thread")

    def on_a_thread_of_the_library():
        try:
            ends.outside(told.append, "called")
        except RuntimeError as error:
            told.append(str(error))
        over.set()

    told, over = [], threading.Event()
    monkeypatch.setattr(ends, "_thread", types.SimpleNamespace(start_new_thread=refuse))
    _thread.start_new_thread(on_a_thread_of_the_library, ())
    over.wait()
    assert told == ["can't start new thread"] and not ends._calls


COLLECTED_IN_A_SAVE = """
import faulthandler, gc, sys, threading, time
import hybridopt, torch
faulthandler.dump_traceback_later(60, exit=True)  # the save would wait for itself for ever
model = torch.nn.Linear(4, 4)
optimizer = hybridopt.AdamW(model.named_parameters())
model(torch.ones(2, 4)).sum().backward()
optimizer.step()
let_go, collected = threading.Event(), threading.Event()

def progress(done, total):
    if not collected.is_set():
        let_go.wait()
        gc.collect()
        collected.set()
        threading.main_thread().join()
        time.sleep(0.1)  # the process can end now, if nothing waits

gc.collect()
gc.disable()
optimizer.save_checkpoint(sys.argv[1], wait=False, progress=progress)
circle = [optimizer]
circle.append(circle)
del optimizer, circle
let_go.set()
collected.wait()
"""


def test_a_garbage_collection_in_a_progress_function_may_end_the_optimizer_of_the_save(tmp_path):
    path = str(tmp_path / "saved")
    ended = subprocess.run([sys.executable, "-c", COLLECTED_IN_A_SAVE, path], capture_output=True, text=True)
    assert (ended.returncode, ended.stderr) == (0, "")
    abi.checkpoint_verify(path)


# `sys` keeps all modules, so that the interpreter clears their globals one module after the other, the last import first:
# those of the package are gone when the model and the optimizer end, which are globals of the program.
KEPT_TO_THE_END = """
import sys
import hybridopt, torch
model = torch.nn.Linear(4, 4)
optimizer = hybridopt.AdamW(model.named_parameters(), max_grad_norm=1.0)
{}
sys.kept = dict(sys.modules)
"""

TAKEN = """
optimizer.hook_gradients()
model(torch.ones(2, 4)).sum().backward()
"""

UNDER_WAY = """
optimizer.overlap(model)
model(torch.ones(2, 4)).sum().backward()
optimizer.step()
assert optimizer._engine.under_way
"""


@pytest.mark.parametrize("before_the_end", [TAKEN, UNDER_WAY], ids=["gradients taken", "a step under way"])
def test_an_interpreter_that_ends_in_the_middle_of_a_step_says_nothing(before_the_end):
    program = KEPT_TO_THE_END.format(before_the_end)
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (ended.returncode, ended.stderr) == (0, "")


class WithGaps(nn.Module):
    """Its weight has gaps between its elements."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(-1, 1, 2 * WIDTH * WIDTH).reshape(WIDTH, 2 * WIDTH)[:, ::2])
        self.bias = nn.Parameter(torch.zeros(WIDTH))

    def forward(self, inputs):
        return inputs @ self.weight + self.bias


def pair_with_gaps(overlap):
    module, other = WithGaps(), WithGaps()
    expected, optimizer = adamw(other), adamw(module, overlap=module if overlap else None)
    steps(other, expected), steps(module, optimizer)
    return module, other, optimizer


@pytest.mark.parametrize("collects", [False, True], ids=["its last reference", "a garbage collection"])
def test_a_step_of_an_optimizer_that_ends_reaches_params_with_gaps(collects):
    module, other, optimizer = pair_with_gaps(overlap=True)
    assert optimizer._engine.under_way
    circle = [optimizer]
    if collects:
        circle.append(circle)
    del optimizer, circle
    gc.collect()
    assert models.bits(module.parameters()) == models.bits(other.parameters())


def test_a_step_whose_wait_is_cut_off_reaches_params_with_gaps(monkeypatch):
    module, other, optimizer = pair_with_gaps(overlap=False)
    backward(module), backward(other)
    expected = adamw(other)
    expected.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    expected.step()
    with monkeypatch.context() as patch:
        patch.setattr(abi.Optimizer, "wait", interrupted)
        with pytest.raises(KeyboardInterrupt):
            optimizer.step()
    assert models.bits(module.parameters()) == models.bits(other.parameters())


def test_a_wait_that_is_cut_off_anywhere_reaches_params_with_gaps():
    for line in itertools.count(1):
        module, other, optimizer = pair_with_gaps(overlap=True)
        if not models.cut_off(optimizer.synchronize, line):
            assert line > 100
            return
        assert models.bits(module.parameters()) == models.bits(other.parameters())


@pytest.mark.parametrize("call", ["step", "load"])
def test_a_call_that_is_cut_off_anywhere_writes_all_params_or_none(call, tmp_path):
    def trained():
        module = WithGaps()
        optimizer = adamw(module)
        steps(module, optimizer)
        backward(module)
        return module, optimizer

    module, optimizer = trained()
    optimizer.save_checkpoint(tmp_path / "saved", progress=False)
    saved = models.bits(module.parameters())
    optimizer.step()
    stepped = models.bits(module.parameters())
    for line in range(1 + models.drawn_seeds(1)[0] % 5, 1 << 20, 5):
        module, optimizer = trained()
        function = optimizer.step
        if call == "load":
            optimizer.step()
            function = functools.partial(optimizer.load_checkpoint, tmp_path / "saved", progress=False)
        if not models.cut_off(function, line):
            assert line > 300
            return
        assert models.bits(module.parameters()) in (saved, stepped), line


def interrupted(*_):
    raise KeyboardInterrupt


def test_ctrl_c_in_the_end_of_an_optimizer_keeps_nothing_alive(monkeypatch):
    """Python ignores exceptions of such an end; another thread waits on for the step."""
    remains = Remains()
    module = model()
    optimizer, _ = overlapping(module)
    remains.watch(module, optimizer)
    with monkeypatch.context() as patch:
        patch.setattr(abi.Optimizer, "drain", interrupted_once(abi.Optimizer.drain))
        patch.setattr(sys, "unraisablehook", lambda _: None)
        del optimizer, _
    del module
    remains.assert_nothing_later()


def interrupted_once(function):
    calls = []

    def call(*arguments):
        calls.append(None)
        if len(calls) == 1:
            raise KeyboardInterrupt
        function(*arguments)

    return call


def test_a_compiled_model_finds_no_trap_after_its_optimizer_ended_on_a_thread_of_the_library():
    torch._dynamo.reset()  # other tests compile the same code
    module = model()
    for block in module:
        block.compile(backend="eager", fullgraph=True)
    optimizer, _ = overlapping(module)
    kept = [optimizer]
    del optimizer, _
    _thread.start_new_thread(kept.clear, ())
    end = time.monotonic() + PATIENCE_SECONDS
    while any(isinstance(each, Trap) for each in module.parameters()) and time.monotonic() < end:
        time.sleep(0.001)
    backward(module)


COLLECTED_WITH_A_LOCK = """
import faulthandler, gc, sys, threading
import hybridopt, torch
faulthandler.dump_traceback_later(60, exit=True)  # the collection would wait for the save, which waits for the lock
model = torch.nn.Linear(4, 4)
optimizer = hybridopt.AdamW(model.named_parameters())
model(torch.ones(2, 4)).sum().backward()
optimizer.step()
lock = threading.Lock()

def progress(done, total):
    with lock:
        pass

gc.collect()
gc.disable()
with lock:
    optimizer.save_checkpoint(sys.argv[1], wait=False, progress=progress)
    circle = [optimizer]
    circle.append(circle)
    del optimizer, circle
    gc.collect()
"""


def test_a_garbage_collection_may_end_an_optimizer_beside_a_lock_that_its_save_needs(tmp_path):
    path = str(tmp_path / "saved")
    ended = subprocess.run([sys.executable, "-c", COLLECTED_WITH_A_LOCK, path], capture_output=True, text=True)
    assert (ended.returncode, ended.stderr) == (0, "")
    abi.checkpoint_verify(path)


# The step waits for the save, which reads the state from where the step writes it.
WAITED_FOR_IN_A_SAVE = """
import faulthandler, os, sys, threading
import hybridopt, torch
faulthandler.dump_traceback_later(60, exit=True)  # the progress function would wait for itself
model = torch.nn.Linear(64, 64)
optimizer = hybridopt.AdamW(model.named_parameters(), overlap=model, save_buffer_bytes=0)

def step():
    model(torch.ones(2, 64)).sum().backward()
    optimizer.step()

step()
step()
optimizer.synchronize()
before = sys.argv[1] + "-before"
optimizer.save_checkpoint(before, progress=False)
goes_on, errors = threading.Event(), []

def progress(done, total):
    goes_on.wait()
    try:
        {}
    except hybridopt.abi.InvalidStateError as error:
        errors.append(str(error))

save = optimizer.save_checkpoint(sys.argv[1], wait=False, progress=progress)
step()
goes_on.set()
save.wait()
print(*errors[:1], sep="")
"""
VERIFIES = "hybridopt.abi.checkpoint_verify(before, progress=lambda *_: None); optimizer.synchronize()"
FORKS = "child = os.fork(); child or os._exit(0); os.waitpid(child, 0)"
OWN_WAIT = (
    "a progress function waits for the optimizer whose save or load has called it, and would wait for itself, for "
    "example by a param that a step still writes; leave that to the code that waits for the save\n"
)


@pytest.mark.parametrize(
    "call, printed",
    [
        (FORKS, "\n"),
        ("model.weight.norm()", OWN_WAIT),
        ("optimizer.synchronize()", OWN_WAIT),
        (VERIFIES, OWN_WAIT),
    ],
    ids=["a fork", "a use of a param", "a wait", "a wait behind a verification"],
)
def test_a_progress_function_does_not_wait_for_itself(call, printed, tmp_path):
    program = WAITED_FOR_IN_A_SAVE.format(call)
    ended = subprocess.run([sys.executable, "-c", program, str(tmp_path / "saved")], capture_output=True, text=True)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, printed, "")


# The function that ends last leaves the other thread time for another save, in which the interpreter ends. That thread
# calls nothing of torch, whose functions end the process with SIGABRT where Python ends a thread inside of them.
ENDS_IN_A_SAVE = """
import atexit, faulthandler, itertools, sys, threading, time
faulthandler.dump_traceback_later(60, exit=True)
begun, ending, over = threading.Event(), threading.Event(), threading.Event()
atexit.register(lambda: (ending.set(), over.wait()))
import hybridopt, torch
model = torch.nn.Linear(4, 4)
optimizer = hybridopt.AdamW(model.named_parameters())
model(torch.ones(2, 4)).sum().backward()
optimizer.step()
handle = optimizer._engine.handle

def progress(done, total):
    begun.set()
    if ending.is_set():
        over.set()
    time.sleep(0.2)  # the interpreter can end now

def save():
    for number in itertools.count():
        handle.wait(handle.save(f"{sys.argv[1]}/{number}", progress=progress))
        if ending.is_set():
            over.set()

threading.Thread(target=save, daemon=True).start()
begun.wait()
"""


def test_an_interpreter_may_end_while_another_thread_saves(tmp_path):
    """A progress function that the library called then ended the process with SIGABRT."""
    program = ENDS_IN_A_SAVE
    ended = subprocess.run([sys.executable, "-c", program, str(tmp_path)], capture_output=True, text=True)
    assert (ended.returncode, ended.stderr) == (0, "")


FORKED_WITH_RANKS = """
import os, sys
import hybridopt, torch
import torch.distributed as dist
dist.init_process_group("gloo", init_method=f"file://{sys.argv[1]}", rank=0, world_size=1)
model = torch.nn.Linear(4, 4)
optimizer = hybridopt.AdamW(model.named_parameters(), process_group=dist.group.WORLD, overlap=model)
model(torch.ones(2, 4)).sum().backward()
optimizer.step()
child = os.fork()
if child == 0:
    import atexit
    atexit._run_exitfuncs()  # as at the end of the interpreter, but torch's gloo does not end in a child
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
"""


def test_a_forked_child_ends_without_a_word_about_the_work_of_its_parent(tmp_path):
    path = str(tmp_path / "store")
    ended = subprocess.run([sys.executable, "-c", FORKED_WITH_RANKS, path], capture_output=True, text=True)
    assert (ended.returncode, ended.stderr) == (0, "")
