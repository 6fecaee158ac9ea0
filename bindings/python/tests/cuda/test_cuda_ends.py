"""Trainings with params on a GPU, one after the other in one process. Each leaves nothing behind, neither on the
device nor on the host."""

import functools

import pytest
import torch
from torch import nn

from remains import (
    accumulating, assert_that_nothing_piles_up, closed, everything, failing, hooked_in_a_pass, in_a_phase, overlapping,
    plain, resident_bytes, stashed_by_name, with_weights_away,
)  # fmt: skip

WIDTH = 1024
LAYERS = 4


def model():
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))).bfloat16().cuda()


EARLY = {"early_update_bytes": 16 << 20}
TRAININGS = {
    "plain": plain,
    "mixed": functools.partial(plain, offload_fraction=0.5),
    "hooked": hooked_in_a_pass,
    "accumulating": accumulating,
    "overlapping": functools.partial(overlapping, offload_fraction=0.5),
    "early": lambda module: hooked_in_a_pass(module, overlap=module, **EARLY),  # some state has been updated early
    "stashed": stashed_by_name,
    "with_weights": with_weights_away,
    "everything": functools.partial(everything, **EARLY),
    "in_a_phase": functools.partial(in_a_phase, offload_fraction=0.5),
    "closed": functools.partial(closed, **EARLY),
    "failing": functools.partial(failing, **EARLY),
}


def allocated_bytes():
    torch.cuda.synchronize()
    return torch.cuda.memory_allocated()


@pytest.mark.parametrize("first_gone", [0, -1])
@pytest.mark.parametrize("training", TRAININGS)
def test_memory_of_the_device_and_of_the_host_returns(training, first_gone):
    resident = []

    def train():
        module = model()
        found = TRAININGS[training](module)
        resident.append(resident_bytes())
        return module, *(found if isinstance(found, tuple) else (found,))

    assert_that_nothing_piles_up(train, repetitions=5, bytes_now=allocated_bytes, first_gone=first_gone)
    # A leak of the state of one training, in fp32, would show in each repetition.
    state_bytes = 12 * LAYERS * WIDTH * WIDTH
    assert max(resident[2:]) - resident[1] < state_bytes
