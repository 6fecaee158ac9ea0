"""Activations that are put aside: saved tensors lie on the host between forward and backward pass."""

from .activation_stash import ActivationStash as ActivationStash
from .choice import Choice as Choice
from .choice import Link as Link
from .layers import Wrapping as Wrapping
from .megatron_settings import wrap_as_megatron as wrap_as_megatron
from .stats import StashStats as StashStats
from .table import Row as Row
from .table import Table as Table
