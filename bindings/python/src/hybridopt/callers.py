"""Who uses the package, for warnings."""

from __future__ import annotations

import os
import sys

import torch

_PACKAGES = tuple(os.path.dirname(file) + os.sep for file in (__file__, torch.__file__))


def depth_of_caller() -> int:
    """The `stacklevel` of warnings.warn() with which a warning names the code that has called this package, perhaps
    through torch. For use in the call of warnings.warn() itself."""
    depth, frame = 1, sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_PACKAGES):
        depth, frame = depth + 1, frame.f_back
    return depth
