"""Addresses that params keep while their memory is given away, as CUDA graphs need. The storages of params lie in a pool
of the library, which gives up the memory behind all of them and takes memory there again. To torch they are ordinary
storages, whose memory comes from an allocator of its own (torch.cuda.MemPool)."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from .. import abi
from .registered import Slot
from .released_storages import KeptStorage, bytes_of, slots_by_storage


@functools.cache
def _allocator() -> Any:
    """Lives as long as the process: torch frees memory by it at any time, after the optimizer's end too."""
    functions = ("offload_pool_torch_alloc", "offload_pool_torch_free")
    return torch.cuda.memory.CUDAPluggableAllocator(abi.library_path(), *functions)


class KeptAddresses:
    """The addresses of one optimizer's params on one device. What is in them outlives this object."""

    def __init__(self, context: abi.Context, device: torch.device) -> None:
        self.device = device
        self._pool = abi.Pool(context)
        with torch.cuda.device(device):
            self._torch_pool = torch.cuda.MemPool(_allocator().allocator())
        # By storage: where it lies. The weak reference keeps another storage from being taken for this one.
        self._inside: dict[int, tuple[StorageWeakRef, int]] = {}

    def move_in(self, tensors: Iterable[Tensor]) -> bool:
        """Moves the storages of these tensors into the pool, unless they are there. Views follow. Returns whether an
        address has changed."""
        self._inside = {key: (ref, at) for key, (ref, at) in self._inside.items() if not ref.expired()}
        storages = {storage._cdata: storage for tensor in tensors for storage in [tensor.untyped_storage()]}
        outside = [each for each in storages.values() if each.nbytes() > 0 and not self._is_inside(each)]
        if not outside:
            return False
        self._synchronize()  # any stream may use the old memory
        for storage in outside:
            self._move_in(storage)
        self._synchronize()
        return True

    def storages(self, slots: list[Slot]) -> Iterator[KeptStorage]:
        """All storages in the pool, each made when it is asked for: those of params, and others that were of params
        before and lose their content as well."""
        by_storage = slots_by_storage(slots)
        for key, (ref, _) in self._inside.items():
            storage = torch.UntypedStorage._new_with_weak_ptr(ref.cdata)
            if storage is not None:
                yield KeptStorage(storage, by_storage.get(key, []))

    def release(self) -> None:
        """Waits for the device, and gives up the memory. From now on the device must not use the addresses."""
        self._pool.release_memory()

    def take(self) -> None:
        """Takes the memory again, without its content. If that fails, it can be called again."""
        try:
            self._pool.take_memory()
        except abi.OutOfDeviceMemoryError:
            torch.cuda.empty_cache()  # as torch's allocator does before it gives up
            self._pool.take_memory()

    def _is_inside(self, storage: torch.UntypedStorage) -> bool:
        return storage._cdata in self._inside and self._inside[storage._cdata][1] == storage.data_ptr()

    def _move_in(self, storage: torch.UntypedStorage) -> None:
        count = storage.nbytes()
        content = bytes_of(storage).clone()
        try:
            storage.resize_(0)
            self._take_inside(storage, count)
            self._inside[storage._cdata] = (StorageWeakRef(storage), storage.data_ptr())
        finally:
            if storage.nbytes() == 0:  # it stays outside
                storage.resize_(count)
            bytes_of(storage).copy_(content)

    def _take_inside(self, storage: torch.UntypedStorage, count: int) -> None:
        with torch.cuda.device(self.device), torch.cuda.use_mem_pool(self._torch_pool), self._pool.entered():
            storage.resize_(count)

    def _synchronize(self) -> None:
        torch.cuda.synchronize(self.device)
