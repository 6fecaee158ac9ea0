"""The C ABI in Python: structs, constants and functions by their names, statuses as exceptions and handles
as objects. It does not need torch. The manual is offload.h."""

import types as _types

# "as": type checkers export no other names.
from .checkpoints import StoredTensor as StoredTensor
from .checkpoints import checkpoint_inspect as checkpoint_inspect
from .checkpoints import checkpoint_newest as checkpoint_newest
from .checkpoints import checkpoint_verify as checkpoint_verify
from .errors import CheckpointCorruptError as CheckpointCorruptError
from .errors import CheckpointError as CheckpointError
from .errors import CheckpointMismatchError as CheckpointMismatchError
from .errors import CommFailedError as CommFailedError
from .errors import DeviceFailedError as DeviceFailedError
from .errors import HybridoptError as HybridoptError
from .errors import InternalError as InternalError
from .errors import InvalidArgumentError as InvalidArgumentError
from .errors import InvalidStateError as InvalidStateError
from .errors import IoFailedError as IoFailedError
from .errors import OutOfDeviceMemoryError as OutOfDeviceMemoryError
from .errors import OutOfHostMemoryError as OutOfHostMemoryError
from .errors import OutOfMemoryError as OutOfMemoryError
from .errors import PoisonedError as PoisonedError
from .errors import TimedOutError as TimedOutError
from .errors import UnsupportedError as UnsupportedError
from .errors import error_of as error_of
from .generated import *  # noqa: F403
from .handles import Context as Context
from .handles import Handle as Handle
from .handles import Optimizer as Optimizer
from .handles import array_of as array_of
from .handles import await_transfers as await_transfers
from .handles import encoded as encoded
from .library import abi_version as abi_version
from .library import build_info as build_info
from .library import call as call
from .library import content_hash as content_hash
from .library import library as library
from .library import library_path as library_path
from .library import status_name as status_name
from .pool import Pool as Pool
from .stash import Stash as Stash
from .stash import stash_plan as stash_plan

# What generated.py imports comes along with its names.
_IMPORTED = ("Any", "CFUNCTYPE", "NamedTuple", "POINTER", "annotations", "ctypes")


def __dir__() -> list[str]:
    """The names that completion and help() list: only the public ones."""
    return sorted(
        name
        for name, value in globals().items()
        if not name.startswith("_") and name not in _IMPORTED and not isinstance(value, _types.ModuleType)
    )
