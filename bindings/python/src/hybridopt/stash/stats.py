"""Statistics of a stash, and the speed of the link to the host."""

from __future__ import annotations

import dataclasses
from typing import Any

from .choice import Link


@dataclasses.dataclass(frozen=True)
class StashStats:
    """What a stash has done since it was made, and what it holds.

    Attributes:
        saved, saved_bytes: tensors that autograd has saved while the stash looked on, and their bytes.
        twice, twice_bytes: of these, tensors over memory that was put aside already.
        pushed_bytes: copied to the host.
        refused_bytes: that found no room within the budget and stayed on the device.
        returned_bytes: copied back.
        host_bytes, host_bytes_max: on the host now, and at most.
        slabs_bytes: pinned host memory of the stash.
        down_bytes_per_second, up_bytes_per_second: of copies to the host and back, as the device has timed
            them; 0.0 on the CPU.
        waited_seconds: for which the device waited for copies.
        ahead_bytes: of steps and moves of the same context, that were on their way to the device when copies back began
            to wait for the link: the sum over these.
        weights_host_bytes: of host_bytes, copies of weights (wrap(weights=True)).
        weights_away_bytes: weights that are on the host only.
    """

    saved: int
    saved_bytes: int
    twice: int
    twice_bytes: int
    pushed_bytes: int
    refused_bytes: int
    returned_bytes: int
    host_bytes: int
    host_bytes_max: int
    slabs_bytes: int
    down_bytes_per_second: float
    up_bytes_per_second: float
    waited_seconds: float
    ahead_bytes: int
    weights_host_bytes: int
    weights_away_bytes: int


@dataclasses.dataclass
class Saved:
    """Counts of the tensors that autograd has saved while the stash was active, and of those over memory that was
    put aside already."""

    count: int = 0
    bytes: int = 0
    twice: int = 0
    twice_bytes: int = 0


def link_of(stats: Any) -> Link | None:
    """The speed of the link, as the device has measured it; None before any copy has been measured."""
    if stats.down_seconds <= 0.0 or stats.up_seconds <= 0.0:
        return None
    return Link(stats.down_timed_bytes / stats.down_seconds, stats.up_timed_bytes / stats.up_seconds)


def stats_of(stats: Any, saved: Saved, weights_host_bytes: int, weights_away_bytes: int) -> StashStats:
    """`stats` are offload_stash_stats_t."""
    link = link_of(stats)
    return StashStats(
        saved=saved.count,
        saved_bytes=saved.bytes,
        twice=saved.twice,
        twice_bytes=saved.twice_bytes,
        pushed_bytes=stats.pushed_bytes,
        refused_bytes=stats.refused_bytes,
        returned_bytes=stats.prefetched_bytes,
        host_bytes=stats.held_bytes,
        host_bytes_max=stats.used_bytes_max,
        slabs_bytes=stats.slabs_bytes,
        down_bytes_per_second=0.0 if link is None else link.down,
        up_bytes_per_second=0.0 if link is None else link.up,
        waited_seconds=stats.release_wait_seconds + stats.pop_wait_seconds,
        ahead_bytes=stats.ahead_bytes,
        weights_host_bytes=weights_host_bytes,
        weights_away_bytes=weights_away_bytes,
    )
