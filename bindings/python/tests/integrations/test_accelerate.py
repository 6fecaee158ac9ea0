"""accelerate: prepare() wraps the optimizer, in one process and over FSDP2 on two ranks."""

import contextlib
import os

import pytest
import torch
from accelerate import Accelerator, DistributedType
from accelerate.state import AcceleratorState, GradientState, PartialState
from torch import nn
from torch.distributed.tensor import DTensor

import hybridopt
import ranks
from models import bits


def model_of(dtype):
    torch.manual_seed(1)
    layers = (nn.Linear(16, 24), nn.Linear(24, 24), nn.Linear(24, 4))
    return nn.Sequential(*layers).to(dtype)


def batches(steps, dtype):
    generator = torch.Generator().manual_seed(2)
    return [torch.randn(8, 16, generator=generator).to(dtype) for _ in range(steps)]


@contextlib.contextmanager
def accelerator(**options):
    """accelerate keeps state for the whole process, which is reset here."""
    yield Accelerator(cpu=True, **options)
    for state in (AcceleratorState, GradientState, PartialState):
        state._reset_state()


def train(accelerator, model, optimizer, steps, dtype, begin=0):
    for x in batches(begin + steps, dtype)[begin:]:
        with accelerator.accumulate(model):
            accelerator.backward(model(x).float().square().mean())
            optimizer.step()
            optimizer.zero_grad()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_prepared_it_gives_the_bits_of_the_plain_optimizer(dtype, tmp_path):
    plain = model_of(dtype)
    optimizer = hybridopt.AdamW(plain.named_parameters(), lr=1e-2, max_grad_norm=0.5)
    for x in batches(4, dtype):
        plain(x).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    with accelerator() as prepare:
        model = model_of(dtype)
        ours = hybridopt.AdamW(model.named_parameters(), lr=1e-2, max_grad_norm=0.5)
        model, ours = prepare.prepare(model, ours)
        train(prepare, model, ours, 2, dtype)
        prepare.save_state(str(tmp_path))
        train(prepare, model, ours, 2, dtype, begin=2)
        assert bits(model.parameters()) == bits(plain.parameters())

        other = model_of(dtype)
        theirs = hybridopt.AdamW(other.named_parameters(), lr=1e-2, max_grad_norm=0.5)
        prepare._models.clear(), prepare._optimizers.clear()
        other, theirs = prepare.prepare(other, theirs)
        prepare.load_state(str(tmp_path))
        train(prepare, other, theirs, 2, dtype, begin=2)
        assert bits(other.parameters()) == bits(plain.parameters())


def fsdp2(rank, world, folder, dtype):
    from accelerate import FullyShardedDataParallelPlugin

    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world), MASTER_ADDR="localhost", MASTER_PORT="0")
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2, auto_wrap_policy="transformer_based_wrap", transformer_cls_names_to_wrap=["Linear"]
    )
    with accelerator() as prepare:
        # accelerate uses FSDP2 only if there are several GPUs, although its code for FSDP2 works on CPUs too.
        prepare.state.__dict__.update(distributed_type=DistributedType.FSDP, fsdp_plugin=plugin)
        model = model_of(dtype)
        optimizer = hybridopt.AdamW(model.named_parameters(), lr=1e-2, max_grad_norm=0.5)
        model, optimizer = prepare.prepare(model, optimizer)
        assert all(isinstance(param, DTensor) for param in model.parameters())
        train(prepare, model, optimizer, 3, dtype)
        optimizer.optimizer.save_checkpoint(os.path.join(folder, "saved"), progress=False)
        train(prepare, model, optimizer, 1, dtype, begin=3)
        whole = [param.full_tensor() for param in model.parameters()]
        return bits(whole), optimizer.optimizer.last_step().grad_norm


@pytest.mark.parametrize("dtype", [torch.float32])
def test_fsdp2_gives_the_numbers_of_one_process(dtype, tmp_path):
    two = ranks.run(fsdp2, 2, str(tmp_path), dtype)
    assert two[0] == two[1]
    model = model_of(dtype)
    optimizer = hybridopt.AdamW(model.named_parameters(), lr=1e-2, max_grad_norm=0.5)
    optimizer.load_checkpoint(tmp_path / "saved")
    model(batches(4, dtype)[3]).square().mean().backward()
    optimizer.step()
    assert bits(model.parameters()) == two[0][0]
