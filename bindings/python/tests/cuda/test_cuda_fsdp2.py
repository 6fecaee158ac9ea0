"""FSDP2 on two GPUs, with steps that overlap with the forward pass: losses and bits are compared with steps that
wait."""

import copy
import itertools
import os

import pytest
import torch
from torch import nn

import hybridopt
import models
import ranks

SMALL = {"master_layout": "split", "state_dtype": torch.bfloat16}


def adamw(module, **options):
    return hybridopt.AdamW(module.named_parameters(), lr=1e-2, **options)


def sharded_muon(module, **options):
    return hybridopt.ShardedMuon(hybridopt.muon_groups(module, adamw={"lr": 1e-2}), lr=1e-2, **options)


def trained(whole, rank, overlapped, hooked, options, make=adamw):
    """Makes six steps, of which one is skipped. Returns the losses, this rank's params, and the norms."""
    from torch.distributed.fsdp import fully_shard

    module = copy.deepcopy(whole)
    for block in module[1:5]:
        fully_shard(block)
    fully_shard(module)
    optimizer = make(module, max_grad_norm=0.1, overlap=module if overlapped else None, **options)
    if hooked:
        optimizer.hook_gradients(micro_batches=2)
    losses = []
    for step in range(6):
        for micro_batch in range(2):
            seed = 100 * step + 10 * micro_batch + rank
            x = torch.randn(32, 512, generator=torch.Generator().manual_seed(seed))
            module.set_is_last_backward(micro_batch == 1)
            loss = module(x.to("cuda", torch.bfloat16)).float().square().mean()
            (loss * (torch.inf if step == 3 and rank == 1 else 1.0)).backward()
            losses.append(loss.detach())
        optimizer.step()
        optimizer.zero_grad()
    optimizer.synchronize()
    shards = [param.to_local().cpu() for param in module.parameters()]
    norms = [repr(result.grad_norm) for result in optimizer.step_results()]
    assert sum(result.skipped for result in optimizer.step_results()) == 1
    return models.bits([torch.stack(losses).cpu(), *shards]), norms


def whole_model():
    os.environ["HYBRIDOPT_CHECK_OVERLAP"] = "1"
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
    torch.use_deterministic_algorithms(True)
    torch.manual_seed(0)
    whole = nn.Sequential(nn.Linear(512, 512), *(models.Block(512, 2048) for _ in range(4)), nn.Linear(512, 8))
    return whole.to("cuda", torch.bfloat16)


def on_rank(rank, world):
    whole = whole_model()
    for layout in ({}, SMALL):
        expected = trained(whole, rank, False, False, {"offload_fraction": 0.0, **layout})
        for fraction, overlapped, hooked in itertools.product((1.0, 0.4, 0.0), (True, False), (False, True)):
            options = {"offload_fraction": fraction, **layout}
            assert trained(whole, rank, overlapped, hooked, options) == expected, (options, overlapped, hooked)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="it needs two GPUs")
def test_losses_and_bits_are_those_of_steps_that_wait():
    ranks.run(on_rank, 2, backend="nccl")


def muon_on_rank(rank, world):
    """Matrices go to their homes and come back over NCCL, in step() or beside the passes of the model."""
    whole = whole_model()
    expected = trained(whole, rank, False, False, {"offload_fraction": 0.0, **SMALL}, sharded_muon)
    for fraction, overlapped, hooked in itertools.product((1.0, 0.4), (True, False), (False, True)):
        given = {"offload_fraction": fraction, **SMALL}
        assert trained(whole, rank, overlapped, hooked, given, sharded_muon) == expected, (given, overlapped, hooked)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="it needs two GPUs")
def test_matrices_that_ranks_share_have_the_bits_of_steps_that_wait():
    ranks.run(muon_on_rank, 2, backend="nccl")
