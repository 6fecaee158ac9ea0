#!/usr/bin/env python3
"""Shows Megatron-LM: one call before its optimizer is made, and the flags of its CPU offload mean this package.

    torchrun --nproc-per-node 2 examples/07_megatron.py

Needs a GPU for each rank and megatron-core (pip install --no-deps megatron-core==0.16.1), and takes less than a minute
there. Expect losses that are lower at the end, and a line which says that Megatron's optimizer holds one of this package. A training program of Megatron-LM's needs step (1) alone:
its flags are those of step (2), such as --optimizer-cpu-offload (docs/FRAMEWORKS.md has all).
"""

import os

import torch
import torch.distributed as dist
from torch import nn

import hybridopt
from hybridopt.integrations import megatron

megatron.install()  # (1) before the optimizer is made

STEPS = 20


def make() -> tuple[nn.Module, object]:
    """A model in Megatron's DistributedDataParallel, and Megatron's optimizer of it."""
    from megatron.core import parallel_state
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.transformer import TransformerConfig

    parallel_state.initialize_model_parallel()
    torch.manual_seed(1)
    module = nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 1)).to(torch.cuda.current_device()).bfloat16()
    dtypes = {"bf16": True, "params_dtype": torch.bfloat16}
    model = DistributedDataParallel(
        TransformerConfig(num_layers=1, hidden_size=8, num_attention_heads=1, **dtypes),
        DistributedDataParallelConfig(use_distributed_optimizer=True, grad_reduce_in_fp32=True),
        module,
    )
    config = OptimizerConfig(  # (2)
        optimizer="adam",
        lr=1e-2,
        clip_grad=1.0,
        use_distributed_optimizer=True,
        use_precision_aware_optimizer=True,
        optimizer_cpu_offload=True,
        optimizer_offload_fraction=1.0,
        overlap_cpu_optimizer_d2h_h2d=True,
        **dtypes,
    )
    return model, get_megatron_optimizer(config, [model])


def train(model: nn.Module, optimizer) -> list[float]:
    losses = []
    for step in range(STEPS):
        generator = torch.Generator().manual_seed(step * dist.get_world_size() + dist.get_rank())
        x = torch.randn(32, 8, generator=generator).to(torch.cuda.current_device())
        model.zero_grad_buffer()
        optimizer.zero_grad()
        loss = (model(x.bfloat16()).float() - x.sum(1, keepdim=True)).square().mean()
        loss.backward()
        model.finish_grad_sync()
        optimizer.step()
        losses.append(loss.item())
        if dist.get_rank() == 0 and step % 5 == 4:
            print(f"step {step + 1:2}  loss {losses[-1]:.4f}", flush=True)
    return losses


def run() -> list[float]:
    model, optimizer = make()
    losses = train(model, optimizer)
    inner = optimizer.chained_optimizers[0].optimizer
    assert isinstance(inner, hybridopt.AdamW)
    if dist.get_rank() == 0:
        print(f"Megatron's optimizer holds one of hybridopt's, with {inner.stats().state_bytes.host} bytes on the host")
    return losses


def main() -> None:
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl")
    run()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
