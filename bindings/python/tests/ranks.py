"""Runs a function of a test in several processes that form a group. Not a test itself."""

import multiprocessing
import os
import tempfile
import traceback

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from older_torch import complete_fsdp2

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
