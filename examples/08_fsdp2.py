#!/usr/bin/env python3
"""Shows FSDP2: a model that `fully_shard` spreads over ranks, with its optimizer state offloaded, which is saved
halfway and goes on in a new model.

    torchrun --nproc-per-node 2 examples/08_fsdp2.py

Takes half a minute on two CPUs, most of it for the start of torch. Expect losses, lower at the end, and "same bits:
yes": the new model has the params of the one that was not interrupted. Each rank uses a GPU where there is one for
each, with NCCL between them; else they use the CPU, with gloo.
"""

import os
import shutil
import tempfile

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import hybridopt

STEPS = 20
WIDTH = 64


def make(device: torch.device) -> tuple[nn.Module, hybridopt.AdamW]:
    """The model is sharded first: the optimizer then has the shards of this rank."""
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(8, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 1))
    model.to(device)
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer)
    fully_shard(model)
    # The step clips by the norm over all ranks; clip_grad_norm_ is not needed.
    optimizer = hybridopt.AdamW(model.named_parameters(), lr=1e-2, offload_fraction=1.0, max_grad_norm=1.0)
    return model, optimizer


def train(model: nn.Module, optimizer: hybridopt.AdamW, steps: range, device: torch.device) -> None:
    for step in steps:
        generator = torch.Generator().manual_seed(step * dist.get_world_size() + dist.get_rank())
        x = torch.randn(32, 8, generator=generator).to(device)
        loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if dist.get_rank() == 0 and step % 5 == 4:
            print(f"step {step + 1:2}  loss {loss.item():.4f}", flush=True)


def shards(model: nn.Module) -> list[torch.Tensor]:
    return [param.to_local() if isinstance(param, DTensor) else param for param in model.parameters()]


def main() -> None:
    if "LOCAL_WORLD_SIZE" not in os.environ:
        raise SystemExit("start this program with torchrun, which starts a process for each rank: "
                         "torchrun --nproc-per-node 2 examples/08_fsdp2.py")  # fmt: skip
    on_gpus = torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"])
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpus else torch.device("cpu")
    if on_gpus:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if on_gpus else "gloo")

    # All ranks save to and load from the same path.
    folder = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(folder)
    path = f"{folder[0]}/half"

    model, optimizer = make(device)
    train(model, optimizer, range(STEPS // 2), device)
    optimizer.save_checkpoint(path)
    train(model, optimizer, range(STEPS // 2, STEPS), device)

    again, resumed = make(device)
    resumed.load_checkpoint(path)  # masters, moments and step counts, and with the masters the params
    train(again, resumed, range(STEPS // 2, STEPS), device)
    same = all(torch.equal(one, other) for one, other in zip(shards(model), shards(again), strict=True))
    everywhere = torch.tensor(int(same), device=device)
    dist.all_reduce(everywhere, dist.ReduceOp.MIN)

    bytes_here = optimizer.stats().state_bytes
    if dist.get_rank() == 0:
        print(f"state of rank 0: {bytes_here.host} bytes on the host, {bytes_here.device} on the device")
        print(f"same bits: {'yes' if everywhere.item() else 'NO'}")
        shutil.rmtree(folder[0])
    dist.destroy_process_group()
    if not everywhere.item():
        raise SystemExit(1)


if __name__ == "__main__":
    main()
