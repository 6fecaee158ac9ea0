"""What FSDP2 lacks on the CPU in older versions of torch, for which it was written for GPUs alone. Not
a test itself."""

import torch


def complete_fsdp2():
    """Streams of the CPU give events, which are reached at once, and gradients are divided before gloo
    adds them up: it cannot average."""
    if hasattr(torch.cpu.Stream, "record_event"):
        return
    from torch.distributed.fsdp._fully_shard import _fsdp_collectives

    def divide_factors(shards, replicas, dtype):
        return shards.size() * (replicas.size() if replicas else 1), None

    torch.cpu.Stream.record_event = lambda self, event=None: event or torch.cpu.Event()
    torch.cpu.Stream.wait_event = lambda self, event: None
    _fsdp_collectives._get_gradient_divide_factors = divide_factors
