"""Statuses of the ABI as exceptions. The text is that of offload_last_error()."""

from __future__ import annotations

from . import generated as c


class HybridoptError(RuntimeError):
    """A call of the library failed. `status` is the ABI's number for why."""

    status: int = c.OFFLOAD_INTERNAL


class InvalidArgumentError(HybridoptError, ValueError):
    """A parameter is wrong; nothing happened."""

    status = c.OFFLOAD_INVALID_ARGUMENT


class InvalidStateError(HybridoptError):
    """Not now, or not on this object; nothing happened."""

    status = c.OFFLOAD_INVALID_STATE


class UnsupportedError(HybridoptError, NotImplementedError):
    """This build, device or release cannot; nothing happened."""

    status = c.OFFLOAD_UNSUPPORTED


class OutOfMemoryError(HybridoptError, MemoryError):
    """Memory of the host or of the device is short."""


class OutOfHostMemoryError(OutOfMemoryError):
    status = c.OFFLOAD_OUT_OF_HOST_MEMORY


class OutOfDeviceMemoryError(OutOfMemoryError):
    status = c.OFFLOAD_OUT_OF_DEVICE_MEMORY


class DeviceFailedError(HybridoptError):
    """The device reported an error, perhaps of earlier work."""

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
    """The bytes on disk are not what was written."""

    status = c.OFFLOAD_CHECKPOINT_CORRUPT


class CheckpointMismatchError(CheckpointError):
    """A good checkpoint, but of another model."""

    status = c.OFFLOAD_CHECKPOINT_MISMATCH


class TimedOutError(HybridoptError, TimeoutError):
    """The work goes on; wait again."""

    status = c.OFFLOAD_TIMED_OUT


class PoisonedError(HybridoptError):
    """Earlier queued work of this optimizer failed."""

    status = c.OFFLOAD_POISONED


class InternalError(HybridoptError):
    """A bug of the library; please report the text."""

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
    """The exception for a status; one that this release does not know is a HybridoptError."""
    error = BY_STATUS.get(status, HybridoptError)(text)
    error.status = status
    return error
