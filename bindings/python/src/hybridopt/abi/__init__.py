"""The C ABI in Python: its structs, constants and functions by their names, its statuses as
exceptions, its handles as objects. Needs no torch. The manual is offload.h."""

from .checkpoints import StoredTensor, checkpoint_inspect, checkpoint_newest, checkpoint_verify
from .errors import (
    CheckpointCorruptError,
    CheckpointError,
    CheckpointMismatchError,
    CommFailedError,
    DeviceFailedError,
    HybridoptError,
    InternalError,
    InvalidArgumentError,
    InvalidStateError,
    IoFailedError,
    OutOfDeviceMemoryError,
    OutOfHostMemoryError,
    OutOfMemoryError,
    PoisonedError,
    TimedOutError,
    UnsupportedError,
)
from .generated import *  # noqa: F403
from .handles import Context, Handle, Optimizer
from .library import abi_version, build_info, call, library, library_path, status_name
