"""Adds what FSDP2 lacks on the CPU in older versions of torch, where it was written for GPUs only. Not a test
itself."""

import contextlib

import torch


def complete_fsdp2():
    """Streams of the CPU get events, which are complete at once. Gradients are divided before gloo adds them up,
    since it cannot average. Params that are gathered again for the backward pass do not count as changed for
    autograd, as on a GPU."""
    if hasattr(torch.cpu.Stream, "record_event"):
        return
    from torch.distributed.fsdp._fully_shard import _fsdp_collectives

    def divide_factors(shards, replicas, dtype):
        return shards.size() * (replicas.size() if replicas else 1), None

    copy_out = torch.ops.fsdp.split_with_sizes_copy

    def copy_out_unseen(*args, out, **kwargs):
        with contextlib.ExitStack() as unseen:
            for tensor in out:
                unseen.enter_context(torch.autograd._unsafe_preserve_version_counter(tensor))
            copy_out(*args, out=out, **kwargs)

    torch.cpu.Stream.record_event = lambda self, event=None: event or torch.cpu.Event()
    torch.cpu.Stream.wait_event = lambda self, event: None
    _fsdp_collectives._get_gradient_divide_factors = divide_factors
    torch.ops.fsdp.split_with_sizes_copy = copy_out_unseen
