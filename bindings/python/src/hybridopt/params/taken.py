"""Taken: a gradient that a hook has taken off its param and that is still read, by copies to the host or messages to other
ranks. Other code may have kept the tensor, and must not write it meanwhile."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NoReturn

from torch import Tensor

from .. import abi
from ..params.tensors import version_of


def owns_storage(tensor: Tensor) -> bool:
    """Whether a storage holds this tensor alone, and is not a buffer from which several are cut."""
    return tensor.untyped_storage().nbytes() == tensor.nbytes


class Taken:
    """Keeps the tensor, and its memory, because a tensor may get other memory."""

    def __init__(self, name: str, tensor: Tensor) -> None:
        self.name = name
        self.tensor = tensor
        self.storage = tensor.untyped_storage()
        # Tensors that are cut from one buffer have one version: the gradient of another param may change it.
        self.may_be_written = not owns_storage(tensor)
        self._version = version_of(tensor)

    @property
    def is_written(self) -> bool:
        """Whether torch has written the tensor, which it may not."""
        return not self.may_be_written and version_of(self.tensor) != self._version


def written_of(taken: Iterable[Taken]) -> str | None:
    """The name of the first param whose gradient has been written."""
    return next((each.name for each in taken if each.is_written), None)


def refuse_written(name: str) -> NoReturn:
    raise abi.InvalidStateError(
        f"the gradient of parameter {name!r} was written in place after hook_gradients() had taken it and before its "
        "step had read it, so that the step may use other numbers; change gradients in a hook that is registered before "
        "hook_gradients() is called, or call synchronize() before you reuse this tensor; zero_grad() drops the gradients of "
        "this step"
    )
