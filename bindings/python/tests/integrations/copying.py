"""Makes `tensor.to(device)` copy on the CPU too, as it does between a GPU and the host. Not a test itself."""

import torch
from torch.overrides import TorchFunctionMode


class Copying(TorchFunctionMode):
    """Every tensor that is moved to a device gets other memory. `copies` counts the moves."""

    def __init__(self):
        super().__init__()
        self.copies = 0

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if function is torch.Tensor.to:
            self.copies += 1
            kwargs["copy"] = True
        return function(*args, **kwargs)
