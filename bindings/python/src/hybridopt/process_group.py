"""The ranks of a torch.distributed process group as the library's comm table.

A step asks the other ranks for two numbers: the sum of squares of all gradients, and whether any is
Inf or NaN. It asks from the library's own thread, at a time of its own, while the training thread
goes on. So the table has a group of its own, over gloo, whatever the training uses: gloo needs no
device, and calls of its own group cannot get in between those of NCCL, whose order must be the same
on all ranks.

ctypes takes the interpreter's lock for each call, and torch gives it up while it waits for others,
as ctypes does while Python waits for the library: nobody holds it who waits for someone else.
"""

from __future__ import annotations

import atexit
import ctypes
import datetime
import enum
import logging
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from . import abi

_log = logging.getLogger("hybridopt")

# Values that go along with the word what they are for; more of them follow it.
SHORT = 32


class Call(enum.IntEnum):
    """What ranks meet for, in the words of error texts."""

    STEPPING = 1
    STEPPING_OR_SAVING = 2
    WAITING = 3
    REGISTERING = 4

    def __str__(self) -> str:
        return {
            Call.STEPPING: "in step()",
            Call.STEPPING_OR_SAVING: "in step(), save_checkpoint() or load_checkpoint()",
            Call.WAITING: "at a barrier",
            Call.REGISTERING: "registering parameters, as before a first step and when some have been "
            "added, unfrozen or taken out",
        }[self]


class ProcessGroupComm:
    """A comm table over some ranks (None: all). Each of them makes one, at the same point of its
    program, for the table's own group is made here.

    Every rank gathers all values and combines them in rank order: the same bits everywhere."""

    def __init__(
        self,
        ranks: Sequence[int] | None = None,
        timeout_seconds: float = 600.0,
        no_clipping: str = "",
    ) -> None:
        if not dist.is_available() or not dist.is_initialized():
            raise RuntimeError(
                "there is no process group; call torch.distributed.init_process_group() first"
            )
        if not timeout_seconds > 0:
            raise ValueError(f"timeout_seconds is {timeout_seconds}, expected more than 0")
        # In this order, for new_group() sorts: torch before 2.12 does so whatever it is told.
        ranks = list(range(dist.get_world_size())) if ranks is None else sorted(ranks)
        if dist.get_rank() not in ranks:
            raise ValueError(
                f"rank {dist.get_rank()} is not among the ranks {ranks} of the process group; make "
                "the optimizer on those only"
            )
        self.rank = ranks.index(dist.get_rank())
        self.world = len(ranks)
        self.timeout_ns = int(timeout_seconds * 1e9)
        self.error = ""  # why the first call failed
        self.no_clipping = no_clipping  # why these ranks' norm may not be that of all gradients
        self.no_saving = ""  # why a checkpoint cannot hold what these ranks have
        self.group = dist.new_group(
            ranks,
            timeout=datetime.timedelta(seconds=timeout_seconds),
            backend="gloo",
            use_local_synchronization=True,
            group_desc="hybridopt",
        )
        # The table's functions are called until the optimizer is destroyed; they live as long as
        # the table, which the optimizer keeps.
        self.table = abi.offload_comm_t(
            rank=self.rank,
            world=self.world,
            sum=_field("sum")(self._sum),
            max=_field("max")(self._max),
            barrier=_field("barrier")(self._barrier),
        )

    def options(self) -> dict[str, Any]:
        """Fields of offload_optimizer_options_t."""
        return {"comm": ctypes.pointer(self.table), "comm_timeout_ns": self.timeout_ns}

    def finish_at_exit(self, optimizer: abi.Optimizer) -> None:
        """Lets queued work end before the interpreter does: the library's thread cannot call
        functions of an interpreter that is gone."""
        referred = weakref.ref(optimizer)

        def finish() -> None:
            alive = referred()
            if alive is None or alive.closed:
                return
            try:
                alive.wait(timeout_ns=self.timeout_ns)
            except abi.HybridoptError as error:
                _log.error("rank %d of %d: work queued at exit: %s", self.rank, self.world, error)

        atexit.register(finish)
        weakref.finalize(optimizer, atexit.unregister, finish).atexit = False

    def _sum(self, _: int | None, values: Any, count: int, timeout_ns: int) -> int:
        return self._reduce(Call.STEPPING, values, count, timeout_ns, float, torch.add)

    def _max(self, _: int | None, values: Any, count: int, timeout_ns: int) -> int:
        return self._reduce(
            Call.STEPPING_OR_SAVING, values, count, timeout_ns, int, torch.maximum
        )

    def _barrier(self, _: int | None, timeout_ns: int) -> int:
        return self._guarded(lambda: self._meet(Call.WAITING, timeout_ns))

    def register(self) -> None:
        """All ranks call this before they tell each other of their params."""
        if self._guarded(lambda: self._meet(Call.REGISTERING, self.timeout_ns)) != abi.OFFLOAD_OK:
            raise abi.CommFailedError(self.error)

    def _meet(self, call: Call, timeout_ns: int) -> None:
        self._gather(call, torch.empty(0, dtype=torch.float64, device="cpu"), timeout_ns)

    def _reduce(
        self,
        call: Call,
        values: Any,
        count: int,
        timeout_ns: int,
        number: type[float] | type[int],
        combine: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
    ) -> int:
        def reduce() -> None:
            # In doubles, which hold 32-bit ints too.
            own = torch.tensor(values[:count], dtype=torch.float64, device="cpu")
            first, *others = self._gather(call, own, timeout_ns)
            for other in others:
                first = combine(first, other)
            for i, value in enumerate(first.tolist()):
                values[i] = number(value)

        return self._guarded(reduce)

    def _gather(self, call: Call, own: torch.Tensor, timeout_ns: int) -> list[torch.Tensor]:
        """Every rank's tensor, in rank order. It goes with what it is for: ranks that are not at the
        same call hear of it, instead of taking each other's values or waiting."""
        count = own.numel()
        message = torch.zeros(2 + SHORT, dtype=torch.float64, device="cpu")
        message[0], message[1] = int(call), count
        if count <= SHORT:
            message[2 : 2 + count] = own
        gathered = self._all(message, timeout_ns)
        for rank, other in enumerate(gathered):
            if other[0] != message[0]:
                raise RuntimeError(
                    f"rank {rank} is {Call(int(other[0]))}, while rank {self.rank} is {call}; all "
                    "ranks must make the same calls, and change what is trained before the same step"
                )
        if count <= SHORT:
            return [other[2 : 2 + count] for other in gathered]
        return self._all(own, timeout_ns)

    def _all(self, own: torch.Tensor, timeout_ns: int) -> list[torch.Tensor]:
        gathered = [torch.empty_like(own) for _ in range(self.world)]
        work = self.group.allgather([gathered], [own])
        work.wait(datetime.timedelta(microseconds=max(1, timeout_ns // 1000)))
        return gathered

    def _guarded(self, action: Callable[[], object]) -> int:
        """The status of an action. Nothing may be raised into the library, and after a failure the
        ranks are out of step for good: what a later call gathered would be of an earlier one."""
        if self.error:
            return abi.OFFLOAD_COMM_FAILED
        try:
            action()
        except BaseException as error:  # noqa: BLE001
            self.error = f"{type(error).__name__}: {error}"
            _log.error("rank %d of %d: %s", self.rank, self.world, self.error)
            timed_out = "timed out" in str(error).lower()
            return abi.OFFLOAD_TIMED_OUT if timed_out else abi.OFFLOAD_COMM_FAILED
        return abi.OFFLOAD_OK


def _field(name: str) -> Any:
    """The type of a function of the table."""
    return next(field[1] for field in abi.offload_comm_t._fields_ if field[0] == name)

