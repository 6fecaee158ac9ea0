"""The statuses of the ABI as exceptions. The text of an exception is that of offload_last_error()."""

from __future__ import annotations

from . import generated as c


class HybridoptError(RuntimeError):
    """A call of the library failed. `status` is the ABI's status."""

    status: int = c.OFFLOAD_INTERNAL


class InvalidArgumentError(HybridoptError, ValueError):
    """An argument is wrong. Nothing has changed."""

    status = c.OFFLOAD_INVALID_ARGUMENT


class InvalidStateError(HybridoptError):
    """The object is in a state that does not allow the call. Nothing has changed."""

    status = c.OFFLOAD_INVALID_STATE


class UnsupportedError(HybridoptError, NotImplementedError):
    """This build, device or release does not support the call. Nothing has changed."""

    status = c.OFFLOAD_UNSUPPORTED


class OutOfMemoryError(HybridoptError, MemoryError):
    """The host or the device lacks memory."""


class OutOfHostMemoryError(OutOfMemoryError):
    status = c.OFFLOAD_OUT_OF_HOST_MEMORY


class OutOfDeviceMemoryError(OutOfMemoryError):
    status = c.OFFLOAD_OUT_OF_DEVICE_MEMORY


class DeviceFailedError(HybridoptError):
    """The device has reported an error, perhaps one of earlier work."""

    status = c.OFFLOAD_DEVICE_FAILED


class CommFailedError(HybridoptError):
    """Another rank failed or vanished."""

    status = c.OFFLOAD_COMM_FAILED


class CheckpointError(HybridoptError):
    """A checkpoint could not be written or read."""


class IoFailedError(CheckpointError, OSError):
    """The text names the file and the system's error."""

    status = c.OFFLOAD_IO_FAILED


class CheckpointCorruptError(CheckpointError):
    """The bytes on disk differ from those that were written."""

    status = c.OFFLOAD_CHECKPOINT_CORRUPT


class CheckpointMismatchError(CheckpointError):
    """The checkpoint is intact, but belongs to another model."""

    status = c.OFFLOAD_CHECKPOINT_MISMATCH


class TimedOutError(HybridoptError, TimeoutError):
    """The wait timed out. The work goes on: wait again."""

    status = c.OFFLOAD_TIMED_OUT


class PoisonedError(HybridoptError):
    """Earlier queued work of this optimizer failed."""

    status = c.OFFLOAD_POISONED


class InternalError(HybridoptError):
    """The library has a bug. Please report the text."""

    status = c.OFFLOAD_INTERNAL


BY_STATUS: dict[int, type[HybridoptError]] = {
    error.status: error
    for error in (
        InvalidArgumentError,
        InvalidStateError,
        UnsupportedError,
        OutOfHostMemoryError,
        OutOfDeviceMemoryError,
        DeviceFailedError,
        CommFailedError,
        IoFailedError,
        CheckpointCorruptError,
        CheckpointMismatchError,
        TimedOutError,
        PoisonedError,
        InternalError,
    )
}


def error_of(status: int, text: str) -> HybridoptError:
    """The exception for a status. For a status that this release does not know it is a HybridoptError."""
    error = BY_STATUS.get(status, HybridoptError)(text)
    error.status = status
    return error
