"""Runs a function of a test in several processes that form a group. Not a test itself."""

import contextlib
import multiprocessing
import os
import tempfile
import traceback

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

# One process imports what the ranks need and is forked for every rank. It has no threads, which a fork would lose. Each
# module that is missing here costs a rank up to a second.
multiprocessing.set_forkserver_preload(
    [
        "pytest",
        "torch.distributed.checkpoint.state_dict",
        "torch.distributed.fsdp",
        "torch.distributed.tensor.parallel",
        "torch._dynamo",
        "hybridopt.optimizers.optimizer",
        "models",
    ]
)


def distributed(whole, mesh, placements):
    """As distribute_tensor() of a tensor that all ranks have, but without a message, for which a rank would wait."""
    from torch.distributed.tensor import DTensor

    from hybridopt.params.sharding import part_of

    part = part_of(whole, mesh, placements)
    return DTensor.from_local(part, mesh, placements, run_check=False, shape=whole.shape, stride=whole.stride())


cuts_unevenly_beside_tensor_parallelism = pytest.mark.skipif(
    torch.__version__.startswith("2.6."), reason="fully_shard() of torch 2.6 refuses that"
)


def complete_fsdp2():
    """Adds what FSDP2 lacks on the CPU in older versions of torch, where it was written for GPUs only. Streams of
    the CPU get events, which are complete at once. Gradients are divided before gloo adds them up, since it cannot
    average. Params that are gathered again for the backward pass do not count as changed for autograd, as on a GPU."""
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


def run(function, world, *arguments, backend="gloo"):
    """Calls function(rank, world, *arguments) in each of `world` processes. An exception in one of them is raised
    here, with its traceback as text. Returns the results by rank, with None for a rank that ended without a result."""
    with tempfile.TemporaryDirectory() as folder:
        mp.start_processes(
            _rank,
            (world, folder, backend, dict(os.environ), function, arguments),
            nprocs=world,
            start_method="forkserver",
        )
        results = [os.path.join(folder, f"result{rank}") for rank in range(world)]
        return [torch.load(path) if os.path.exists(path) else None for path in results]


def _rank(rank, world, folder, backend, environment, function, arguments):
    torch.set_num_threads(1)
    complete_fsdp2()
    os.environ.update(environment)  # what a test has set since the forked process was started
    os.environ.update(LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(world))
    if backend == "nccl":
        torch.cuda.set_device(rank)
    dist.init_process_group(
        backend, init_method=f"file://{folder}/rendezvous", rank=rank, world_size=world
    )
    try:
        result = function(rank, world, *arguments)
    except BaseException:
        # The others may wait for this rank for ever; start_processes ends them.
        raise RuntimeError(traceback.format_exc()) from None
    torch.save(result, os.path.join(folder, f"result{rank}"))
    dist.barrier()
    dist.destroy_process_group()
