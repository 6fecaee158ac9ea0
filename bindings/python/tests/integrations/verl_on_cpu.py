"""Makes verl's engine for FSDP2 run on the CPU: other memory of the host stands for the GPU. Not a test itself."""

import contextlib
import importlib.machinery
import sys
from unittest import mock

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from copying import Copying

EAGER = {"attn_implementation": "eager"}  # flash attention needs a GPU


class Phases(Copying):
    """Other memory of the host stands for the GPU."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        args = tuple("cpu" if isinstance(arg, str) and arg == "gpu" else arg for arg in args)
        return super().__torch_function__(function, types, args, kwargs)


def save_model(folder, vocab_size=64):
    torch.manual_seed(3)
    config = LlamaConfig(
        vocab_size=vocab_size, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    return str(folder)


def leave_out(*names):
    """Replaces modules that verl and SkyRL import but nobody uses here."""
    for name in names:
        spec = importlib.machinery.ModuleSpec(name, None)
        sys.modules.setdefault(name, mock.MagicMock(__spec__=spec, __path__=[], __version__="2.0"))


@contextlib.contextmanager
def without_gpu():
    """verl asks its platform object for the GPU, and its engine moves tensors to a device of that name and back."""
    leave_out("datasets", "pandas")
    from verl.plugin.platform import platform_manager
    from verl.plugin.platform.platform_cuda import PlatformCUDA

    class Host(PlatformCUDA):
        device_name = "cpu"
        device_module = mock.MagicMock(
            **{
                "mem_get_info.return_value": (1, 1),
                "memory_allocated.return_value": 0,
                "memory_reserved.return_value": 0,
                "max_memory_allocated.return_value": 0,
                "max_memory_reserved.return_value": 0,
            }
        )

        def current_device(self):
            return "cpu"

    platform_manager.set_platform(Host())
    from verl.workers.engine import base
    from verl.workers.engine.fsdp import transformer_impl

    with (
        mock.patch.object(base, "get_device_name", lambda: "gpu"),
        mock.patch.object(transformer_impl, "get_device_name", lambda: "gpu"),
    ):
        yield


def configs(folder, is_offloading, options):
    """The configurations of the model, the engine, its optimizer and its checkpoints."""
    from verl.trainer.config import CheckpointConfig
    from verl.workers.config import FSDPEngineConfig, FSDPOptimizerConfig, HFModelConfig

    contents = ["model", "optimizer", "extra"]
    return (
        HFModelConfig(path=folder, load_tokenizer=False, use_remove_padding=False, override_config=EAGER),
        FSDPEngineConfig(
            strategy="fsdp2",
            param_offload=is_offloading,
            optimizer_offload=is_offloading,
            model_dtype="bf16",
            use_torch_compile=False,
        ),
        FSDPOptimizerConfig(
            optimizer_impl="hybridopt",
            optimizer="AdamW",
            lr=1e-2,
            clip_grad=0.5,
            total_training_steps=20,
            lr_warmup_steps=2,
            lr_scheduler_type="cosine",
            override_optimizer_config=options,
        ),
        CheckpointConfig(save_contents=contents, load_contents=contents),
    )
