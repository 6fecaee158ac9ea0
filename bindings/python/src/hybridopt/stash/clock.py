"""Clocks that tell when work on the computing device happens."""

from __future__ import annotations

import time
from typing import Any, Protocol

import torch


class Clock(Protocol):
    def now(self) -> Any:
        """A point in the work of the current stream."""

    def has_passed(self, point: Any) -> bool:
        """Whether the device has come to a point."""

    def seconds(self, begin: Any, end: Any) -> float:
        """The seconds from one point to another; waits until both have passed."""


class HostClock:
    """For the CPU, where work is done when its call returns."""

    def now(self) -> float:
        return time.perf_counter()

    def has_passed(self, point: float) -> bool:
        return True

    def seconds(self, begin: float, end: float) -> float:
        return end - begin


class DeviceClock:
    """For a GPU, which does work long after the host has queued it: events tell when."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def now(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event

    def has_passed(self, point: torch.cuda.Event) -> bool:
        return point.query()

    def seconds(self, begin: torch.cuda.Event, end: torch.cuda.Event) -> float:
        end.synchronize()
        return begin.elapsed_time(end) / 1e3


def clock_of(device: torch.device) -> Clock:
    return DeviceClock(device) if device.type == "cuda" else HostClock()
