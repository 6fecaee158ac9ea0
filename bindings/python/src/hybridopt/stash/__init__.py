"""Activations that are put aside: saved tensors lie on the host between forward and backward pass."""

from .activation_stash import ActivationStash
from .choice import Choice, Link
from .layers import Wrapping
from .megatron_settings import wrap_as_megatron
from .stats import StashStats
from .table import Row, Table

__all__ = ["ActivationStash", "Choice", "Link", "Row", "StashStats", "Table", "Wrapping", "wrap_as_megatron"]


def __dir__() -> list[str]:
    """The names that completion and help() list: only the public ones."""
    return __all__
