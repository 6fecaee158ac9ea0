"""MicroBatches: which backward pass of a step is the last one, whose gradients hooks take."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from torch import Tensor

from .. import abi


class MicroBatches:
    def __init__(self, count: int | None) -> None:
        self._count = count  # of a step; None: last() tells the last one
        self._is_last = False  # inside of last()
        self._passes: dict[Tensor, int] = {}  # backward passes of this step that a param took part in

    @contextlib.contextmanager
    def last(self) -> Iterator[None]:
        """Marks the backward pass in this context as the last one of a step."""
        was_last, self._is_last = self._is_last, True
        try:
            yield
        finally:
            self._is_last = was_last

    def end_pass(self, param: Tensor) -> bool:
        """Counts a backward pass that has made a gradient of the param. Returns whether it was the last one."""
        passes = self._passes[param] = self._passes.get(param, 0) + 1
        return self._is_last or (self._count is not None and passes >= self._count)

    def begin_step(self) -> None:
        self._passes.clear()


def refuse_another_pass(name: str, further: str = "") -> None:
    """Raises where a backward pass has made a gradient after that of this step has been taken. `further`: ways out
    besides the usual ones."""
    raise abi.InvalidStateError(
        f"the gradient of parameter {name!r} has been taken already, and another backward pass has made one; call step() "
        "or zero_grad() before that pass. If a step has several, say how many by hook_gradients(micro_batches=n), or "
        f"micro_batches=None and the last one in `with optimizer.last_micro_batch():`{further}"
    )
