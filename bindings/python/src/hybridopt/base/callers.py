"""Finds the code that has called the package, so that warnings point to it."""

from __future__ import annotations

import os
import pathlib
import sys

import torch

_FOLDERS = (pathlib.Path(__file__).parents[1], pathlib.Path(torch.__file__).parent)  # this package's and torch's
_BEGINNINGS = tuple(f"{folder}{os.sep}" for folder in _FOLDERS)


def depth_of_caller() -> int:
    """The `stacklevel` of warnings.warn() with which a warning names the code that has called this package, perhaps
    through torch. For use in the call of warnings.warn() itself."""
    depth, frame = 1, sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_BEGINNINGS):
        depth, frame = depth + 1, frame.f_back
    return depth
