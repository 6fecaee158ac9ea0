"""Finds how many ranks share this process's CPUs, and which number this process has among them.

Launchers do not always say: LOCAL_WORLD_SIZE may be 1 although there are more ranks on the host, or it may be
missing. And a rank that a launcher has bound to CPUs of its own shares them with no other rank. So each rank counts
itself in the store of the process group, under a name that is the same for all ranks that may run on the same CPUs.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Iterable
from typing import Any

import torch.distributed as dist

from ..base.checks import is_whole, listed, shown

MOST_RANKS = 65536  # of the library

# By process and name: the number that this process got when it counted itself, and that number together with the count
# of all, as it was when the first context was made.
_places: dict[tuple[int, str], int] = {}
_known: dict[tuple[int, str], tuple[int, int]] = {}


def count_in(numa_nodes: int) -> None:
    """Counts this process, once. Each rank does so when it makes an optimizer. So at the first step, which ranks
    with a common model do together, all ranks have counted themselves."""
    key = (os.getpid(), _name(numa_nodes))
    if _has_others() and key not in _places:
        count = _added(key[1], 1)
        if count is not None:
            _places[key] = count - 1


def local_rank_and_world(numa_nodes: int) -> tuple[int, int]:
    """This process's number among the ranks that share its CPUs, and the number of these ranks. Both are 0 if there
    is no process group: the library then reads LOCAL_RANK and LOCAL_WORLD_SIZE."""
    count_in(numa_nodes)
    key = (os.getpid(), _name(numa_nodes))
    if key not in _known and key in _places and _has_others():
        count = _added(key[1], 0)
        if count is not None:
            _known[key] = _places[key], count
    return _known.get(key) or ((0, 0) if _environment_makes_sense() else (0, 1))


def _has_others() -> bool:
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def _environment_makes_sense() -> bool:
    rank, world = (os.environ.get(name, "") for name in ("LOCAL_RANK", "LOCAL_WORLD_SIZE"))
    return rank.isdecimal() and world.isdecimal() and int(rank) < int(world)


def _name(numa_nodes: int) -> str:
    """A name for the CPUs that this process may use: host, container, affinity, and the NUMA nodes that the user
    names."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            host = file.read().strip()
        container = os.readlink("/proc/self/ns/mnt")
    except OSError:
        host, container = platform.node(), ""
    cpus = ",".join(map(str, sorted(os.sched_getaffinity(0))))
    return f"hybridopt/ranks on {host}/{container}/{cpus}/{numa_nodes}"


def _added(name: str, value: int) -> int | None:
    """Adds to the number of that name and returns the sum; None if the store is gone."""
    try:
        return dist.distributed_c10d._get_default_store().add(name, value)
    except (AttributeError, RuntimeError):
        return None


def nodes_of(numa_nodes: Any) -> tuple[int, ...] | None:
    """The option `numa_nodes` as a tuple."""
    if numa_nodes is None:
        return None
    nodes = listed(numa_nodes)
    if not nodes or not all(is_whole(node, 0, 64) for node in nodes):
        raise ValueError(
            f"Invalid numa_nodes: {shown(numa_nodes)}, expected numbers of NUMA nodes from 0 to 63, such as "
            "[0, 1], or None for those near the device"
        )
    return tuple(nodes)


def mask_of(nodes: Iterable[int] | None) -> int:
    """The nodes as bits."""
    mask = 0
    for node in nodes or ():
        mask |= 1 << node
    return mask


def check_local_rank(local_rank: int | None, local_world: int | None) -> None:
    """Refuses one of the two without the other, and a rank outside of its world."""
    if local_rank is None and (local_world is None or is_whole(local_world, 1, 2)):
        return
    if not is_whole(local_world, 1, MOST_RANKS + 1) or not is_whole(local_rank, 0, local_world or 0):
        raise ValueError(
            f"Invalid local_rank={shown(local_rank)} with local_world={shown(local_world)}, expected 0 <= local_rank < "
            f"local_world <= {MOST_RANKS}: the number of this rank among those that share the host's CPUs, and how many "
            "these are; local_world=1 alone for a rank with CPUs of its own, or leave both out"
        )
