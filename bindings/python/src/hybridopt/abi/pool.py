"""Memory that keeps addresses, of the ABI, as an object."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterator

from . import generated as c
from .handles import Context, Handle


class Pool(Handle):
    """Blocks of device memory whose addresses stay while their memory is given away. Blocks outlive the pool."""

    _destroyer = "offload_pool_destroy"

    def __init__(self, context: Context) -> None:
        handle = c.offload_pool_t()
        self.retold = context.retold
        self._call("offload_pool_create", context.value, handle)
        self.context = context
        super().__init__(handle.value or 0, context)

    def alloc(self, bytes: int) -> int:
        data = ctypes.c_void_p()
        self._call("offload_pool_alloc", self.value, bytes, data)
        return data.value or 0

    def free(self, data: int) -> None:
        self._call("offload_pool_free", data)

    def release_memory(self) -> None:
        """Waits for the device, and gives up the memory behind all blocks. Their content is lost."""
        self._call("offload_pool_release_memory", self.value)

    def take_memory(self) -> None:
        """Takes memory behind all blocks again, or behind none."""
        self._call("offload_pool_take_memory", self.value)

    @contextlib.contextmanager
    def entered(self) -> Iterator[None]:
        """Inside of this context offload_pool_torch_alloc of this thread allocates from the pool."""
        self._call("offload_pool_enter", self.value)
        try:
            yield
        finally:
            self._call("offload_pool_enter", None)
