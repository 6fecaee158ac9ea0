"""Program: the passes that run under one key. The first passes are measured; later passes follow the choice made
from them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ..base.units import readable
from .choice import Choice
from .forward_pass import ForwardPass

# The number of measured passes. The first one puts all aside, and its times are those of kernels that run for the first
# time; the second one already follows a choice. The pass between them is not measured: the host has just waited for the
# times of the first one, so the device has no queued work when this pass begins, and the host's speed would decide its
# time.
MEASURED_PASSES = 2


class Program:
    """Forward passes that save the same tensors in the same order."""

    def __init__(self) -> None:
        self.choice: Choice | None = None
        self.measuring: ForwardPass | None = None
        self.measured = 0
        self.has_waited = False  # the host has waited for the device since the last pass began
        self._most_saved = -1  # the most tensors of one pass with gradients
        self._last_length = -1

    def note_length(self, length: int) -> None:
        """Notes the number of saved tensors of a pass. After two passes with the same other number the program has
        changed."""
        if torch.is_grad_enabled():
            self._most_saved = max(self._most_saved, length)
        if self.choice is not None and length not in (0, len(self.choice.goes)):
            if length == self._last_length:
                self.choice, self.measuring, self.measured = None, None, 0
            self._last_length = length

    @property
    def saves_nothing(self) -> bool:
        """Whether there have been passes with gradients, and none has saved anything that may go."""
        return self._most_saved == 0

    @property
    def is_to_be_measured(self) -> bool:
        """Whether the next pass is to be measured."""
        return self.measured < MEASURED_PASSES and self.measuring is None and not self.has_waited

    def settle(self, choose: Callable[[Any, float], Choice]) -> None:
        """When the backward pass over the measured pass has ended: makes a choice. choose() gets the ranges of that
        pass and the seconds of its forward pass."""
        measuring = self.measuring
        if measuring is None or measuring.is_open:
            return
        if not measuring.is_over and not measuring.was_used_whole:
            return
        if self.choice is not None and not measuring.has_ended_on_device:
            return  # the present choice is used until then
        self.measuring = None
        if not measuring.was_used or not measuring.is_measured_whole:
            return  # a pass without gradients, or one that an exception has cut off
        ranges, forward_seconds = measuring.measured()
        self.has_waited = self.measured == 0
        self.measured += 1
        self.choice = choose(ranges, forward_seconds)

    def told(self, min_bytes: int) -> str:
        """The choice, as text for repr()."""
        if self.choice is not None:
            of = f"{len(self.choice.order)} of {len(self.choice.goes)} tensors go"
            return f"{of}, {readable(self.choice.chosen_bytes)} of {readable(self.choice.eligible_bytes)}"
        if self.saves_nothing:
            return f"nothing goes: no tensor of at least {readable(min_bytes)} was saved that may go"
        return "none before a forward and a backward pass have been measured"
