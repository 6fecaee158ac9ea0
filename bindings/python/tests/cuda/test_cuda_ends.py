"""Trainings with params on a GPU, one after the other in one process: of each nothing is left, neither on the device nor
on the host."""

import pytest
import torch
from torch import nn

import hybridopt
from remains import assert_that_nothing_piles_up, resident_bytes

WIDTH = 1024
LAYERS = 4


class Failing(Exception):
    pass


def model():
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))).bfloat16().cuda()


def backward(module):
    module(torch.randn(8, WIDTH, dtype=torch.bfloat16, device="cuda")).float().square().mean().backward()


def steps(module, optimizer, count=3):
    for _ in range(count):
        backward(module)
        optimizer.step()
        optimizer.zero_grad()


def adamw(module, fraction=1.0, **options):
    options = {"lr": 1e-2, "max_grad_norm": 1.0, "offload_fraction": fraction, **options}
    return hybridopt.AdamW(module.named_parameters(), **options)


def stash_of(**options):
    return hybridopt.ActivationStash(64 << 20, min_bytes=1, slab_bytes=1 << 20, fraction=1.0, keep_last=0, **options)


# Each function trains a model, and returns the optimizer and what else the user may keep.


def plain(module):
    optimizer = adamw(module)
    steps(module, optimizer)
    return optimizer


def mixed(module):
    optimizer = adamw(module, 0.5)
    steps(module, optimizer)
    assert optimizer.state_dict()["state"]
    return optimizer


def hooked(module):
    optimizer = adamw(module)
    hooks = optimizer.hook_gradients()
    steps(module, optimizer)
    backward(module)  # whose gradients no step uses
    return optimizer, hooks


def accumulating(module):
    optimizer = adamw(module)
    hooks = optimizer.hook_gradients(accumulate=True)
    steps(module, optimizer)
    return optimizer, hooks


def overlapping(module):
    """The last step is under way at the end."""
    optimizer = adamw(module, 0.5)
    overlap = optimizer.overlap(module)
    steps(module, optimizer)
    return optimizer, overlap


def early(module):
    optimizer = adamw(module, early_update_bytes=16 << 20, overlap=module)
    hooks = optimizer.hook_gradients()
    steps(module, optimizer)
    backward(module)  # after which the library has updated some state early
    return optimizer, hooks


def stashed(module):
    optimizer, stash = adamw(module), stash_of(model=module)
    for _ in range(3):
        with stash:
            loss = module(torch.randn(8, WIDTH, dtype=torch.bfloat16, device="cuda")).float().square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return optimizer, stash


def with_weights(module):
    optimizer, stash = adamw(module), stash_of()
    wrapping = stash.wrap(list(module), weights=True)
    steps(module, optimizer)
    backward(module)
    assert stash.stats().weights_away_bytes > 0
    return optimizer, stash, wrapping


def everything(module):
    optimizer = adamw(module, overlap=module, early_update_bytes=16 << 20)
    hooks = optimizer.hook_gradients()
    stash = stash_of()
    wrapping = stash.wrap(list(module), weights=True)
    steps(module, optimizer)
    return optimizer, hooks, stash, wrapping


def in_a_phase(module):
    optimizer = adamw(module, 0.5, movable=("params", "grads", "states"))
    steps(module, optimizer)
    optimizer.offload(params=True, grads=True, states=True)
    return optimizer


def closed(module):
    found = everything(module)
    found[0].close()
    found[2].close()
    return found


def failing(module):
    found = everything(module)

    def fail(*_):
        raise Failing

    for register in (module[1].register_forward_pre_hook, module[1].weight.register_hook):
        fails = register(fail)
        with pytest.raises(Failing):
            backward(module)
        fails.remove()
    # torch keeps what a backward pass that has failed had queued until the next one.
    torch.zeros(1, requires_grad=True, device="cuda").sum().backward()
    return found


TRAININGS = [
    plain, mixed, hooked, accumulating, overlapping, early, stashed, with_weights, everything, in_a_phase, closed, failing,
]  # fmt: skip


def allocated_bytes():
    torch.cuda.synchronize()
    return torch.cuda.memory_allocated()


@pytest.mark.parametrize("first_gone", [0, -1])
@pytest.mark.parametrize("training", TRAININGS, ids=lambda each: each.__name__)
def test_memory_of_the_device_and_of_the_host_returns(training, first_gone):
    resident = []

    def train():
        module = model()
        found = training(module)
        resident.append(resident_bytes())
        return module, *(found if isinstance(found, tuple) else (found,))

    assert_that_nothing_piles_up(train, repetitions=5, bytes_now=allocated_bytes, first_gone=first_gone)
    # A leak of the state of one training, in fp32, would show in each repetition.
    state_bytes = 12 * LAYERS * WIDTH * WIDTH
    assert max(resident[2:]) - resident[1] < state_bytes
