"""verl's engine for FSDP2 as its workers have it, on the CPU over gloo: model, optimizer, schedule and checkpoints
are its own. The test computes the loss by itself."""

import contextlib
import sys
from unittest import mock

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import hybridopt
import ranks
from copying import Copying
from models import bits


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory):
    torch.manual_seed(3)
    config = LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4
    )
    folder = tmp_path_factory.mktemp("model")
    LlamaForCausalLM(config).save_pretrained(folder)
    return str(folder)


EAGER = {"attn_implementation": "eager"}  # flash attention needs a GPU


class Phases(Copying):
    """The GPU is other memory of the host."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        args = tuple("cpu" if isinstance(arg, str) and arg == "gpu" else arg for arg in args)
        return super().__torch_function__(function, types, args, kwargs)


@contextlib.contextmanager
def without_gpu():
    """verl asks its platform for the GPU, and its engine goes to a device of that name and back."""
    # Its data sets are imported beside the engine and not used here.
    for name in ("datasets", "pandas"):
        sys.modules.setdefault(name, mock.MagicMock(__spec__=None))
    from verl.plugin.platform import platform_manager
    from verl.plugin.platform.platform_cuda import PlatformCUDA

    class Host(PlatformCUDA):
        device_name = "cpu"
        device_module = mock.MagicMock(
            **{
                "mem_get_info.return_value": (1, 1),
                "memory_allocated.return_value": 0,
                "memory_reserved.return_value": 0,
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


def made(folder, is_offloading, options):
    from verl.trainer.config import CheckpointConfig
    from verl.workers.config import FSDPEngineConfig, FSDPOptimizerConfig, HFModelConfig
    from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead

    engine = FSDPEngineWithLMHead(
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
        CheckpointConfig(save_contents=["model", "optimizer", "extra"], load_contents=["model", "optimizer", "extra"]),
    )
    engine.initialize()
    assert type(engine.optimizer) is hybridopt.AdamW
    return engine


def train(engine, seeds):
    norms = []
    for seed in seeds:
        with engine.train_mode():
            tokens = torch.randint(0, 64, (4, 12), generator=torch.Generator().manual_seed(seed))
            engine.optimizer_zero_grad()
            engine.module(input_ids=tokens, labels=tokens).loss.backward()
            norms.append(engine.optimizer_step())
            engine.lr_scheduler_step()
    return norms


def found(engine):
    state = engine.optimizer.state
    names = ("exp_avg", "exp_avg_sq", "master_param")
    params = [param for param in engine.module.parameters() if param in state]
    return (
        bits(param.full_tensor() for param in engine.module.parameters()),
        bits(state[param][name].full_tensor() for param in params for name in names),
        [int(state[param]["step"]) for param in params],
    )


def working(rank, world, model_folder, folder, is_offloading, options):
    with without_gpu(), Phases() as phases:
        engine = made(model_folder, is_offloading, options)
        norms = train(engine, range(3))
        assert max(norms) > 0.5  # clipped
        engine.save_checkpoint(folder)
        train(engine, range(3, 5))
        if is_offloading:
            assert phases.copies > 0
            places = [value.data_ptr() for entry in engine.optimizer.state.values() for value in entry.values()]
            engine.to("gpu"), engine.to("cpu")
            now = [value.data_ptr() for entry in engine.optimizer.state.values() for value in entry.values()]
            assert now == places  # state lies where it lay: nothing is kept twice
        return norms, found(engine)


def going_on(rank, world, model_folder, folder, is_offloading, options):
    with without_gpu(), Phases():
        engine = made(model_folder, is_offloading, options)
        engine.load_checkpoint(folder, del_local_after_load=False)
        train(engine, range(3, 5))
        return found(engine)


@pytest.mark.parametrize("options", [{}, {"state_dtype": "bf16"}])
def test_phases_and_checkpoints_of_the_engine_keep_every_bit(model_folder, tmp_path, options):
    """Model and optimizer go to the GPU for each step, and back to the host for the rollout."""
    folders = [str(tmp_path / name) for name in ("staying", "moving")]
    staying = ranks.run(working, 2, model_folder, folders[0], False, options)
    moving = ranks.run(working, 2, model_folder, folders[1], True, options)
    assert moving == staying
    assert ranks.run(going_on, 2, model_folder, folders[1], True, options) == [result for _, result in staying]
