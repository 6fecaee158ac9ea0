"""Makes functions independent of torch's modes."""

from __future__ import annotations

import functools
from collections.abc import Callable
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
