"""Activations that are put aside: saved tensors lie on the host between forward and backward pass."""

from .activation_stash import ActivationStash as ActivationStash
from .activation_stash import StashStats as StashStats
from .activation_stash import Wrapping as Wrapping
from .choice import Choice as Choice
from .choice import Link as Link
from .megatron_settings import wrap_as_megatron as wrap_as_megatron
from .table import Row as Row
from .table import Table as Table
