"""GlooGroups: process groups over gloo, each of which serves one optimizer after the other.

Each group has threads and connections of its own. torch gives them back by destroy_process_group() alone, and puts
the number of groups that the rank has at that moment into the name of a new group. Ranks end their optimizers at
different moments, so the names would differ, and the ranks would wait for each other for ever. So a group is not
destroyed here: the next optimizer over the same ranks takes it when the optimizer before has ended on all ranks."""

from __future__ import annotations

import datetime
import time
import weakref
from typing import Any

import torch
import torch.distributed as dist

from .. import abi

# The state of a group that its optimizer still uses, or whose calls have failed.
TAKEN = -1
# Ranks tell each other of this number of groups. If more optimizers exist at the same time, their groups are used only
# once.
MOST_GROUPS = 64


class GlooGroup:
    """A group, and the number of calls that this rank has made with it. If these numbers differ between ranks, gloo
    matches a call of one rank with a different call of another."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        # torch owns the group: it ends with destroy_process_group().
        self._group = weakref.ref(group)
        self._calls = 0
        self._last: tuple[torch.Tensor, list[torch.Tensor]] | None = None  # the tensors of the last call
        self._has_failed = False
        self._user: weakref.ref[object] | None = None

    @property
    def group(self) -> dist.ProcessGroup:
        group = self._group()
        if group is None:
            raise RuntimeError("the process group has been destroyed; make a new optimizer")
        return group

    @property
    def is_there(self) -> bool:
        return self._group() is not None

    @property
    def state(self) -> int:
        """The number of calls if the group is free, else TAKEN."""
        is_taken = self._user is not None and self._user() is not None
        return TAKEN if is_taken or self._has_failed else self._calls

    def serve(self, user: object) -> None:
        self._user = weakref.ref(user)

    def fail(self) -> None:
        """To be called when a call has failed: ranks may be at different calls."""
        self._has_failed = True

    def all_gather(self, own: torch.Tensor, timeout: datetime.timedelta) -> list[torch.Tensor]:
        """Every rank's tensor, in rank order."""
        group = self.group
        gathered = [torch.empty_like(own) for _ in range(group.size())]
        c10d: Any = dist.distributed_c10d
        options = c10d.AllgatherOptions()
        options.timeout = timeout
        self._calls += 1
        # These tensors live until the next call. torch's thread drops its references a moment after the wait. If they
        # were the last references, this thread would need the interpreter; at the end of the process that would
        # terminate it.
        self._last = own, gathered
        group.allgather([gathered], [own], options).wait(timeout)
        _await_torch([own, *gathered])
        return gathered


def _await_torch(tensors: list[torch.Tensor]) -> None:
    """Waits until Python has the last references to these tensors, for a second at most: on a busy machine the next
    call may come before torch's thread drops its own."""
    count_of: Any = getattr(torch.Tensor, "_use_count", None)
    if count_of is None:  # it is private: not every version of torch has it
        return
    until = time.monotonic() + 1.0
    while any(count_of(tensor) > 1 for tensor in tensors) and time.monotonic() < until:
        time.sleep(1e-5)


class GlooGroups:
    """The groups over the same ranks."""

    def __init__(self, ranks: tuple[int, ...]) -> None:
        self._ranks = ranks
        self._groups: list[GlooGroup] = []
        self._agreement: GlooGroup | None = None  # ranks use it to agree on a group

    def take(self, user: object, timeout: datetime.timedelta) -> GlooGroup:
        """A group for as long as the user lives. All ranks must call this at the same point of their program."""
        if not all(each.is_there for each in self._groups):
            self._groups, self._agreement = [], None  # destroy_process_group() has ended them
        found = self._agreed(timeout) if self._groups else None
        if found is None:
            found = self._made(timeout)
            self._groups.append(found)
        found.serve(user)
        return found

    def _agreed(self, timeout: datetime.timedelta) -> GlooGroup | None:
        """A group that is free on all ranks, if there is one."""
        if self._agreement is None:
            self._agreement = self._made(timeout)
        message = torch.full((MOST_GROUPS,), TAKEN, dtype=torch.int64, device="cpu")
        for index, each in enumerate(self._groups[:MOST_GROUPS]):
            message[index] = each.state
        try:
            told = torch.stack(self._agreement.all_gather(message, timeout))
        except RuntimeError as error:
            raise abi.CommFailedError(
                f"ranks {list(self._ranks)} have not all come within {timeout.total_seconds():g} seconds to make an "
                f"optimizer together: {error}; all ranks must make the same optimizers, in the same order"
            ) from error
        is_free = (told == told[0]).all(0) & (told[0] != TAKEN)
        free: list[int] = is_free.nonzero().flatten().tolist()
        return self._groups[free[0]] if free else None

    def _made(self, timeout: datetime.timedelta) -> GlooGroup:
        return GlooGroup(
            dist.new_group(
                list(self._ranks),
                timeout=timeout,
                backend="gloo",
                use_local_synchronization=True,
                group_desc="hybridopt",
            )
        )


_of_ranks: dict[tuple[int, ...], GlooGroups] = {}


def groups_of(ranks: tuple[int, ...]) -> GlooGroups:
    return _of_ranks.setdefault(ranks, GlooGroups(ranks))
