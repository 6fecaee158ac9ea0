"""How much memory a GPU has, and whether torch has run out of it."""

from __future__ import annotations

import torch


class DeviceMemory:
    def __init__(self, device: torch.device) -> None:
        self._device = device

    def total_bytes(self) -> int:
        return torch.cuda.mem_get_info(self._device)[1]

    def left_bytes(self) -> int:
        """What nobody needs, at the time when torch's allocator has held the most so far: memory that it
        has given back since is counted as needed."""
        free = torch.cuda.mem_get_info(self._device)[0]
        most = torch.cuda.max_memory_reserved(self._device)
        return max(0, free - (most - torch.cuda.memory_reserved(self._device)))

    def out_of_memory_count(self) -> int:
        """How often an allocation of torch's has failed so far."""
        return int(torch.cuda.memory_stats_as_nested_dict(self._device).get("num_ooms", 0))
