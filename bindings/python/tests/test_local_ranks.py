"""Which CPUs a rank takes: from what the launcher says of the host, from what ranks find out, and from what callers
pass."""

import os

import pytest
import ranks
import torch
import torch.distributed as dist

import hybridopt
from hybridopt import abi

LAUNCHERS = {
    "torchrun": lambda rank, world: {"LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(world)},
    "accelerate": lambda rank, world: {"LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": "1"},
    "ray": lambda rank, world: {"LOCAL_RANK": str(rank)},
    "none": lambda rank, world: {},
}


def launched_by(name, rank, world):
    for variable in ("LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        os.environ.pop(variable, None)
    os.environ.update(LAUNCHERS[name](rank, world))


def part_of_the_host(**options):
    """The library's information on an optimizer's context after a step. Ranks meet before the step, as in a backward
    pass."""
    weight = torch.nn.Parameter(torch.ones(3))
    optimizer = hybridopt.SGD([weight], lr=1.0, **options)
    weight.grad = torch.ones(3)
    if dist.is_initialized():
        dist.barrier()
    optimizer.step()
    assert weight.tolist() == [0.0] * 3
    info = optimizer._engine.context.info()
    return info.local_rank, info.local_world, info.cpus, info.numa_nodes


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_ranks_share_the_cpus_of_the_host_whatever_the_launcher_says(launcher):
    parts = ranks.run(part_of_a_rank, 2, launcher)
    assert sorted(part[:2] for part in parts) == [(0, 2), (1, 2)]
    assert sum(part[2] for part in parts) == max(2, len(os.sched_getaffinity(0)))


def part_of_a_rank(rank, world, launcher):
    launched_by(launcher, rank, world)
    first = part_of_the_host()
    assert part_of_the_host(threads=1) == first
    return first


def bound_to_a_cpu(rank, world):
    launched_by("torchrun", rank, world)
    cpus = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cpus[rank % len(cpus)]})
    return part_of_the_host(), len(cpus)


def test_ranks_that_the_launcher_has_bound_apart_share_nothing():
    for part, cpus in ranks.run(bound_to_a_cpu, 2):
        if cpus > 1:
            assert part[:3] == (0, 1, 1)
        else:  # the machine has one CPU, so the ranks do share it
            assert part[1] == 2


@pytest.mark.parametrize(
    "launcher, expected", {"torchrun": (1, 2), "accelerate": (0, 1), "ray": (0, 1)}.items()
)
def test_without_a_process_group_the_launcher_is_believed_where_it_makes_sense(
    launcher, expected, monkeypatch
):
    for variable, value in LAUNCHERS[launcher](1, 2).items():
        monkeypatch.setenv(variable, value)
    assert part_of_the_host(threads=2)[:2] == expected


def test_callers_may_say_it_themselves(monkeypatch):
    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    cpus = len(os.sched_getaffinity(0))
    assert part_of_the_host(local_rank=2, local_world=3)[:2] == (2, 3)
    assert part_of_the_host(local_world=1)[:3] == (0, 1, cpus)
    assert part_of_the_host(local_world=1, numa_nodes=[0])[3] == 1
    with pytest.raises(abi.InvalidArgumentError, match="numa_nodes names node 63, but the nodes"):
        part_of_the_host(local_world=1, numa_nodes=[63])


@pytest.mark.parametrize(
    "options, text",
    [
        ({"local_rank": 1}, "local_rank=1 with local_world=None, expected 0 <= local_rank < local_world"),
        ({"local_world": 2}, "local_rank=None with local_world=2, expected .*; local_world=1 alone"),
        ({"local_rank": 2, "local_world": 2}, "local_rank=2 with local_world=2, expected"),
        ({"local_rank": "0", "local_world": "2"}, "local_rank='0' with local_world='2', expected"),
        ({"numa_nodes": [64]}, r"numa_nodes: \[64\], expected numbers of NUMA nodes from 0 to 63"),
        ({"numa_nodes": ["0"]}, r"numa_nodes: \['0'\], expected numbers of NUMA nodes"),
    ],
)
def test_what_cannot_be_meant_is_refused(options, text):
    with pytest.raises(ValueError, match=text):
        hybridopt.SGD([torch.nn.Parameter(torch.ones(1))], **options)
