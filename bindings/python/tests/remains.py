"""Short trainings on the device of their model, and checks of what exists after their last reference is gone. Not a
test itself."""

import gc
import os
import time
import warnings
import weakref

import pytest
import torch
from torch import nn

import hybridopt

PATIENCE_SECONDS = 10


def parts_of(*roots):
    """The objects of a training by name: modules, params, optimizers and others, and the library's objects behind
    its optimizers."""
    parts = {}
    for number, root in enumerate(roots):
        parts[f"{number} {type(root).__name__}"] = root
        if hasattr(root, "named_modules"):
            parts.update((f"module {name!r} of {number}", module) for name, module in root.named_modules())
            parts.update((f"param {name} of {number}", param) for name, param in root.named_parameters())
        engine = getattr(root, "_engine", None)
        if engine is not None:
            parts[f"the library's optimizer of {number}"] = engine.handle
            parts[f"the library's context of {number}"] = engine.context
        comm = getattr(root, "_comm", None)
        if comm is not None:
            parts[f"the ranks of {number}"] = comm
    return parts


class Remains:
    """Keeps weak references to parts of a training, and the threads that existed before it."""

    def __init__(self):
        gc.collect()
        self._threads = threads()
        self._parts = {}

    def watch(self, *roots):
        self._parts.update((name, weakref.ref(part)) for name, part in parts_of(*roots).items())

    def alive(self):
        """The names of the parts that are alive."""
        return [name for name, part in self._parts.items() if part() is not None]

    def assert_nothing(self):
        assert self._parts
        gc.collect()
        assert self.alive() == []
        self.assert_no_thread()

    def assert_nothing_later(self):
        """As assert_nothing(), after another thread has ended its work."""
        end = time.monotonic() + PATIENCE_SECONDS
        while self.alive() and time.monotonic() < end:
            time.sleep(0.001)
        self.assert_nothing()

    def assert_no_thread(self):
        """The system may list a thread for a moment after it has been joined."""
        end = time.monotonic() + PATIENCE_SECONDS
        while threads() > self._threads and time.monotonic() < end:
            time.sleep(0.001)
        assert threads() <= self._threads


def threads():
    return len(os.listdir("/proc/self/task"))


def resident_bytes():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def tensor_bytes():
    """The bytes of all tensors on the CPU that the garbage collector knows."""
    storages = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # some objects warn when their class is asked for
        for each in gc.get_objects():
            if issubclass(type(each), torch.Tensor) and each.device.type == "cpu" and each.layout == torch.strided:
                storage = getattr(each, "_local_tensor", each).untyped_storage()
                storages[storage._cdata] = storage.nbytes()
    return sum(storages.values())


def assert_that_nothing_piles_up(train, repetitions=4, bytes_now=tensor_bytes, first_gone=0):
    """train() trains once and returns the parts that shall be freed; they are released from the first to the last,
    or from the last to the first (first_gone=-1). The first training may leave what a framework keeps itself, and
    the second one creates the group by which several ranks agree on other groups."""
    counts = []
    for _ in range(repetitions):
        remains = Remains()
        parts = list(train())
        remains.watch(*parts)
        while parts:
            parts.pop(first_gone)
            gc.collect()
        assert remains.alive() == []
        if len(counts) >= 2:
            remains.assert_no_thread()
        counts.append(bytes_now())
    assert counts[1:] == counts[1:2] * (repetitions - 1)


# ------------------------------------------------------------------------------------- trainings --


class Failing(Exception):
    pass


def inputs_of(module, seed=0):
    """The input of the model; the last dimension of the model's first param is its width."""
    param = next(module.parameters())
    drawn = torch.randn(4, param.shape[-1], generator=torch.Generator().manual_seed(seed))
    return drawn.to(param.device, param.dtype)


def loss_of(module, seed=0):
    return module(inputs_of(module, seed)).float().square().sum()


def backward(module, seed=0):
    loss_of(module, seed).backward()


def steps(module, optimizer, count=3):
    for seed in range(count):
        backward(module, seed)
        optimizer.step()
        optimizer.zero_grad()


def adamw(module, **options):
    options = {"lr": 1e-2, "threads": 2, "max_grad_norm": 1.0, **options}
    return hybridopt.AdamW(module.named_parameters(), **options)


def stash_of(module, **options):
    """A stash that puts aside all activations and weights of the model."""
    weight_bytes = sum(param.nbytes for param in module.parameters())
    slab_bytes = 4096 if weight_bytes < 1 << 20 else 1 << 20
    budget = max(1 << 20, 8 * weight_bytes)
    return hybridopt.ActivationStash(budget, min_bytes=1, slab_bytes=slab_bytes, fraction=1.0, keep_last=0, **options)


# Each function trains a model, which is a sequence of layers, with options of the optimizer. It returns the optimizer,
# and other objects that the user may keep.


def plain(module, **options):
    optimizer = adamw(module, **options)
    steps(module, optimizer)
    assert optimizer.state_dict()["state"]
    return optimizer


def hooked(module, **options):
    optimizer = adamw(module, **options)
    hooks = optimizer.hook_gradients()
    steps(module, optimizer)
    return optimizer, hooks


def hooked_in_a_pass(module, **options):
    """The gradients of a backward pass are on the host, and no step has used them."""
    optimizer, hooks = hooked(module, **options)
    backward(module)
    return optimizer, hooks


def accumulating(module, **options):
    optimizer = adamw(module, **options)
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


def everything(module, **options):
    optimizer = adamw(module, overlap=module, **options)
    hooks = optimizer.hook_gradients()
    stash = stash_of(module, model=module)
    wrapping = stash.wrap(list(module), weights=True)
    steps(module, optimizer)
    return optimizer, hooks, stash, wrapping


def stashed(module, **options):
    optimizer, stash = adamw(module), stash_of(module, **options)
    for seed in range(3):
        with stash:
            loss = loss_of(module, seed)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert stash.stats().pushed_bytes > 0
    return optimizer, stash


def stashed_by_name(module):
    return stashed(module, model=module)


def wrapped(module, **options):
    optimizer, stash = adamw(module), stash_of(module)
    wrapping = stash.wrap(list(module), **options)
    steps(module, optimizer)
    assert stash.stats().pushed_bytes > 0
    return optimizer, stash, wrapping


def with_weights_away(module):
    optimizer, stash, wrapping = wrapped(module, weights=True)
    backward(module)
    assert stash.stats().weights_away_bytes > 0
    return optimizer, stash, wrapping


def in_a_phase(module, **options):
    """Params and state have been offloaded and have not come back."""
    optimizer = adamw(module, movable=("params", "grads", "states"), **options)
    steps(module, optimizer)
    optimizer.offload(params=True, grads=True, states=True)
    return optimizer


def closed(module, **options):
    found = everything(module, **options)
    found[0].close()
    found[2].close()
    return found


def failing(module, **options):
    """A forward and a backward pass that raise."""
    found = everything(module, **options)
    layer = [each for each in module[1].modules() if isinstance(each, nn.Linear)][-1]

    def fail(*_):
        raise Failing

    for register in (layer.register_forward_pre_hook, layer.weight.register_hook):
        fails = register(fail)
        with pytest.raises(Failing):
            backward(module)
        fails.remove()
    forget_failed_pass(module)
    return found


def forget_failed_pass(module):
    """If a backward pass fails, torch keeps what the pass had queued until the next one."""
    torch.zeros(1, requires_grad=True, device=next(module.parameters()).device).sum().backward()
