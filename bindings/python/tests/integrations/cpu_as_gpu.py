"""Makes Megatron-LM run on the CPU. Megatron names the device "cuda", and recognises params by the tensor type that
they have there. Not a test itself."""

import contextlib
from unittest import mock

import numpy
import torch
from torch.overrides import TorchFunctionMode


class CpuAsGpu(TorchFunctionMode):
    """Calls of torch that name the device "cuda" use the CPU, and tensors report that they are on "cuda"."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if str(kwargs.get("device", "")).startswith("cuda"):
            kwargs["device"] = "cpu"
        if function is torch.Tensor.cuda:
            return args[0]
        result = function(*args, **kwargs)
        if function is torch.Tensor.type and len(args) == 1 and not kwargs:
            return result.replace("torch.", "torch.cuda.")
        return result


@contextlib.contextmanager
def cpu_as_gpu():
    with (
        mock.patch("torch.cuda.current_device", lambda: torch.device("cpu")),
        # As with TransformerEngine, which Megatron's users have. Without it, an optimizer that has not been stepped
        # cannot load a checkpoint in Megatron.
        mock.patch("megatron.core.optimizer.distrib_optimizer.HAVE_APEX_OR_TE", True),
        mock.patch("megatron.core.optimizer.optimizer_config.is_te_min_version", lambda *_: False),
        # Up to version 0.15 Megatron uses a name of a numpy function that numpy 2 has removed.
        mock.patch("numpy.product", numpy.prod, create=True),
        mock.patch("torch.cuda.synchronize", lambda *_: None),
        mock.patch("torch.cuda.empty_cache", lambda *_: None),
        CpuAsGpu(),
    ):
        yield
