"""How much memory a GPU has, and whether torch has run out of it."""

from __future__ import annotations

import torch


class DeviceMemory:
    def __init__(self, device: torch.device) -> None:
        self._device = device

    def total_bytes(self) -> int:
        return torch.cuda.mem_get_info(self._device)[1]

    def left_bytes(self) -> int:
        """The bytes that were free when torch's allocator held the most so far. Memory that the allocator has
        released since counts as needed."""
        free = torch.cuda.mem_get_info(self._device)[0]
        most = torch.cuda.max_memory_reserved(self._device)
        return max(0, free - (most - torch.cuda.memory_reserved(self._device)))

    def out_of_memory_count(self) -> int:
        """How often an allocation of torch's has failed so far."""
        return int(torch.cuda.memory_stats_as_nested_dict(self._device).get("num_ooms", 0))
