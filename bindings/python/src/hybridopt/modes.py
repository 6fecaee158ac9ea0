"""Calls that come out the same in whatever mode they are made."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")


def in_no_mode(function: Callable[Parameters, Result]) -> Callable[Parameters, Result]:
    """Runs a function without autograd; outside of inference mode, whose tensors count no versions and
    can never again be written outside of it; and not as a part of what torch.compile compiles."""

    @functools.wraps(function)
    def call(*args: Parameters.args, **kwargs: Parameters.kwargs) -> Result:
        with torch.inference_mode(False), torch.no_grad():
            return function(*args, **kwargs)

    return torch._disable_dynamo(call)
