"""SkyRL's strategy for FSDP2 with the two lines of docs/FRAMEWORKS.md, on the CPU over gloo: model, optimizer, phases
and checkpoints are its own. The test computes the loss by itself."""

import contextlib
import os
from unittest import mock

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import hybridopt
import ranks
from copying import Copying
from models import bits
from skyrl_on_cpu import importable, patched


class Phases(Copying):
    """Other memory of the host stands for the GPU."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if kwargs.get("device") == "cuda":
            kwargs["device"] = "cpu"
        if function is torch.Tensor.cuda:
            return args[0]
        return super().__torch_function__(function, types, args, kwargs)


@contextlib.contextmanager
def without_gpu():
    """Replaces the functions of the GPU that SkyRL calls."""
    with importable():
        from skyrl.backends.skyrl_train.distributed import fsdp_utils
    make_mesh = fsdp_utils.init_device_mesh
    os.environ.pop("LOCAL_RANK")  # from which SkyRL takes the number of the GPU
    with (
        mock.patch.object(fsdp_utils, "init_device_mesh", lambda device, **kwargs: make_mesh("cpu", **kwargs)),
        mock.patch.multiple(
            torch.cuda, current_device=lambda: "cpu", synchronize=lambda: None, empty_cache=lambda: None
        ),
    ):
        yield


def made(is_offloading, options):
    with importable():
        from skyrl.train.config import FSDPConfig, ModelConfig, OptimizerConfig

        module = patched(options)
    strategy = module.FSDPStrategy(
        FSDPConfig(cpu_offload=False),
        OptimizerConfig(
            lr=1e-2, max_grad_norm=0.5, offload_after_step=is_offloading, num_warmup_steps=2, scheduler="cosine"
        ),
        ModelConfig(),
        num_training_steps=20,
    )
    strategy.setup_distributed()
    torch.manual_seed(3)
    config = LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4
    )
    config._attn_implementation = "eager"
    model, optimizer, scheduler = strategy.prepare((LlamaForCausalLM(config), None, None))
    assert type(optimizer) is hybridopt.AdamW
    return strategy, model, optimizer, scheduler


def addresses(optimizer):
    return [
        (key, value.data_ptr()) for entry in optimizer.state.values() for key, value in entry.items()
    ]


def train(made, seeds, phases=None):
    """Makes steps as a worker does; with `phases`, model and optimizer leave the GPU after each step."""
    strategy, model, optimizer, scheduler = made
    norms = []
    for seed in seeds:
        if phases is not None:
            strategy.backload_to_gpu(model, optimizer)
        tokens = torch.randint(0, 64, (4, 12), generator=torch.Generator().manual_seed(seed))
        loss = model(input_ids=tokens, labels=tokens).loss
        strategy.backward(loss, model, optimizer)
        norms.append(float(strategy.optimizer_step(optimizer, model, scheduler)))
        if phases is not None:
            places, copies = addresses(optimizer), phases.copies
            strategy.offload_to_cpu(model, optimizer)
            assert phases.copies > copies
            assert addresses(optimizer) == places  # the state's addresses are unchanged: nothing is stored twice
    return norms


def found(made):
    _, model, optimizer, _ = made
    entries = list(optimizer.state.values())
    names = ("exp_avg", "exp_avg_sq")
    return (
        bits(param.full_tensor() for param in model.parameters()),
        bits(entry[name].full_tensor() for entry in entries for name in names),
        [int(entry["step"]) for entry in entries],
    )


def working(rank, world, folder, is_offloading, options):
    with without_gpu(), Phases() as phases:
        worker = made(is_offloading, options)
        phases = phases if is_offloading else None
        norms = train(worker, range(3), phases)
        assert max(norms) > 0.5  # clipped
        strategy, model, optimizer, scheduler = worker
        strategy.save_checkpoint(model, folder, rank, optimizer, scheduler)
        train(worker, range(3, 5), phases)
        return norms, found(worker)


def going_on(rank, world, folder, is_offloading, options):
    with without_gpu(), Phases() as phases:
        worker = made(is_offloading, options)
        strategy, model, optimizer, scheduler = worker
        strategy.load_checkpoint(model, folder, optimizer, scheduler)
        train(worker, range(3, 5), phases if is_offloading else None)
        return found(worker)


@pytest.mark.parametrize("options", [{}, {"offload_fraction": 0.5, "state_dtype": "bf16"}])
def test_phases_and_checkpoints_of_the_strategy_keep_every_bit(tmp_path, options):
    folders = [str(tmp_path / name) for name in ("staying", "moving")]
    staying = ranks.run(working, 2, folders[0], False, options)
    moving = ranks.run(working, 2, folders[1], True, options)
    assert moving == staying
    assert ranks.run(going_on, 2, folders[1], True, options) == [result for _, result in staying]
