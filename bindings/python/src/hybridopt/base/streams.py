"""The stream of a device that the library's work starts behind."""

from __future__ import annotations

import torch


def refuse_capture(what: str = "what the optimizer does") -> None:
    """Raises while a CUDA graph is captured. Callers ask this before anything asks the device: that
    would end the capture with an error about something else."""
    if torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            f"{what} runs on the host and cannot be captured into a CUDA graph; call it outside of "
            "torch.cuda.graph()"
        )


def current_stream(device: torch.device) -> int:
    """The stream on which gradients and params are ready."""
    if device.type == "cuda":
        refuse_capture()
        return torch.cuda.current_stream(device).cuda_stream
    return 0
