"""Runs functions with the modes of torch and Python switched off, and returns torch's current stream."""

from __future__ import annotations

import contextlib
import functools
import gc
from collections.abc import Callable, Iterator
from typing import ParamSpec, TypeVar

import torch

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")


def in_no_mode(function: Callable[Parameters, Result]) -> Callable[Parameters, Result]:
    """Runs a function without autograd, outside of inference mode and outside of torch.compile. Tensors made
    in inference mode have no version and could not be written outside of it later."""

    @functools.wraps(function)
    def call(*args: Parameters.args, **kwargs: Parameters.kwargs) -> Result:
        with torch.inference_mode(False), torch.no_grad():
            return function(*args, **kwargs)

    return torch._disable_dynamo(call)


@contextlib.contextmanager
def without_collection() -> Iterator[None]:
    """Puts off Python's garbage collection, for code that makes objects for each param: the collection would go
    through all of these objects again and again, and find no garbage."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def is_in_backward() -> bool:
    """Whether this thread runs a backward pass."""
    return torch._C._current_graph_task_id() != -1


def refuse_capture(what: str = "what the optimizer does") -> None:
    """Raises while a CUDA graph is captured. To be called before any call asks the device something: such a question
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
