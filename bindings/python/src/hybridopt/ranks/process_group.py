"""The ranks of a torch.distributed process group as the library's comm table.

A step combines two numbers of all ranks: the sum of squares of all gradients, and whether any gradient is
Inf or NaN. The library's own thread does this while the training thread goes on. So the table has its own
group, over gloo, whatever backend the training uses: gloo needs no device, and calls of a group of their
own cannot come between the calls of NCCL, whose order must be the same on all ranks.

There is no deadlock with the interpreter's lock: ctypes takes it when the library calls a function of the
table, but torch releases it while it waits for other ranks, and ctypes releases it while Python waits for
the library. So no thread holds the lock while it waits.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import datetime
import enum
import logging
import os
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist

from .. import abi
from .gloo_groups import groups_of

_log = logging.getLogger("hybridopt")

# The number of values that fit into the message that names the call. More values go in a second message.
SHORT = 32


class Call(enum.IntEnum):
    """The calls for which ranks meet. str() gives the words of error texts."""

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
    """A comm table over some ranks (None: all). All of them must make it at the same point of their program,
    because the constructor makes the table's group, or agrees on one that an earlier table has used.

    Every rank gathers all values and combines them in rank order, so that all get the same bits."""

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
        # Sorted, because new_group() sorts ranks; before torch 2.12 this cannot be switched off.
        ranks = list(range(dist.get_world_size())) if ranks is None else sorted(ranks)
        if dist.get_rank() not in ranks:
            raise ValueError(
                f"rank {dist.get_rank()} is not among the ranks {ranks} of the process group; make "
                "the optimizer on those only"
            )
        self.rank = ranks.index(dist.get_rank())
        self.world = len(ranks)
        self.timeout_ns = int(timeout_seconds * 1e9)
        self.error = ""  # why the first failed call failed
        self.no_clipping = no_clipping  # the reason why clipping is refused: these ranks may not have the whole norm
        self.no_saving = ""  # why a checkpoint cannot hold the params of these ranks
        self._gloo = groups_of(tuple(ranks)).take(self, datetime.timedelta(seconds=timeout_seconds))

    @property
    def group(self) -> dist.ProcessGroup:
        return self._gloo.group

    @property
    def table(self) -> abi.offload_comm_t:
        """The library calls the table's functions until the optimizer is destroyed. The optimizer keeps the table
        alive, the table keeps the functions alive, and the functions keep this object alive, which does not refer to
        the table."""
        return abi.offload_comm_t(
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
        """Makes the interpreter wait for queued work before it ends: the library's thread cannot call Python
        functions after that."""
        referred = weakref.ref(optimizer)
        process = os.getpid()  # a forked child does not wait for its parent's work

        def finish() -> None:
            alive = referred()
            if alive is None or alive.closed or os.getpid() != process:
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
        """Meets the other ranks. All call this before they exchange information about their params."""
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
            # As doubles, which represent 32-bit ints exactly too.
            own = torch.tensor(values[:count], dtype=torch.float64, device="cpu")
            first, *others = self._gather(call, own, timeout_ns)
            for other in others:
                first = combine(first, other)
            for i, value in enumerate(first.tolist()):
                values[i] = number(value)

        return self._guarded(reduce)

    def _gather(self, call: Call, own: torch.Tensor, timeout_ns: int) -> list[torch.Tensor]:
        """Every rank's tensor, in rank order. The message names the call, so that ranks at different calls
        get an error instead of each other's values."""
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
        return self._gloo.all_gather(own, datetime.timedelta(microseconds=max(1, timeout_ns // 1000)))

    @contextlib.contextmanager
    def exchanging(self) -> Iterator[None]:
        """In this context ranks exchange information with the group. After an error that only some ranks may have
        got, no rank uses the group again."""
        try:
            yield
        except ValueError:  # the exchanged information is wrong, and all ranks see that
            raise
        except BaseException:
            self._gloo.fail()
            raise

    def _guarded(self, action: Callable[[], object]) -> int:
        """Runs an action and returns its status: no exception may reach the library. After a failure all later
        calls fail too, because ranks may be at different calls and would gather values of an earlier one."""
        if self.error:
            return abi.OFFLOAD_COMM_FAILED
        try:
            action()
        except BaseException as error:  # noqa: BLE001
            self.error = f"{type(error).__name__}: {error}"
            self._gloo.fail()
            _log.error("rank %d of %d: %s", self.rank, self.world, self.error)
            timed_out = "timed out" in str(error).lower()
            return abi.OFFLOAD_TIMED_OUT if timed_out else abi.OFFLOAD_COMM_FAILED
        return abi.OFFLOAD_OK


def _field(name: str) -> Any:
    """The type of a function of the table."""
    return next(field[1] for field in abi.offload_comm_t._fields_ if field[0] == name)

