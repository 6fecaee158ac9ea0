"""The comm table over a process group: real processes, gloo, the library's own thread."""

import ctypes
import datetime
import gc
import os
import struct
import subprocess
import sys

import pytest
import ranks
import torch
import torch.distributed as dist

from hybridopt import abi
from hybridopt.ranks.process_group import ProcessGroupComm
from remains import threads

SECOND_NS = 1_000_000_000


def doubles(values):
    return (ctypes.c_double * len(values))(*values)


def bits(values):
    return struct.pack(f"{len(values)}d", *values)


def terms(rank):
    """Doubles whose sum depends on the order of the additions."""
    return [(1e16, 1.0, -1e16, 1.0)[rank], 0.1 * (rank + 1), -0.0]


def sums_and_maxima(rank, world):
    table = ProcessGroupComm(timeout_seconds=30).table
    assert (table.rank, table.world) == (rank, world)
    own = doubles(terms(rank))
    assert table.sum(None, own, 3, 30 * SECOND_NS) == abi.OFFLOAD_OK
    largest = (ctypes.c_int32 * 3)(rank, -rank, 7)
    assert table.max(None, largest, 3, 30 * SECOND_NS) == abi.OFFLOAD_OK
    assert table.barrier(None, 30 * SECOND_NS) == abi.OFFLOAD_OK
    backwards = ProcessGroupComm(range(world)[::-1], timeout_seconds=30)
    assert backwards.rank == backwards.group.rank() == rank
    return bits(own), list(largest)


@pytest.mark.parametrize("world", [1, 2, 4])
def test_sums_are_those_of_rank_order_on_every_rank(world):
    expected = terms(0)
    for rank in range(1, world):
        expected = [a + b for a, b in zip(expected, terms(rank))]
    for got, largest in ranks.run(sums_and_maxima, world):
        assert got == bits(expected)
        assert largest == [world - 1, 0, 7]


def steps_of_a_shard(rank, world, elements, options):
    """The params and norms after three steps with this rank's part of one tensor."""
    generator = torch.Generator().manual_seed(7)
    part = slice(elements * rank // world, elements * (rank + 1) // world)
    data = torch.randn(elements, generator=generator)[part].clone()
    comm = ProcessGroupComm(timeout_seconds=60) if world > 1 else None
    norms = []
    with abi.Context(threads=1) as context:
        optimizer = abi.Optimizer(
            context,
            algorithm=abi.OFFLOAD_ADAMW,
            **(comm.options() if comm else {}),
        )
        with optimizer:
            group = optimizer.add_group(lr=0.1, beta1=0.9, beta2=0.99, eps=1e-8)
            offsets = (ctypes.c_int64 * 1)(part.start)
            extents = (ctypes.c_int64 * 1)(data.numel())
            shard = abi.offload_shard_t(
                dimensions=1,
                box_count=1,
                global_shape=(ctypes.c_int64 * 1)(elements),
                box_offsets=offsets,
                box_extents=extents,
            )
            param = abi.offload_param_t(
                group=group, dtype=1, grad_dtype=1, name=b"weight", data=data.data_ptr()
            )
            param.count, param.shard = data.numel(), ctypes.pointer(shard)
            optimizer.add_params([param])
            optimizer.commit()
            for step in range(3):
                grad = torch.randn(elements, generator=generator)[part].clone()
                if step == 1 and rank == world - 1:
                    grad[0] = float("inf")
                binding = abi.offload_binding_t(param=0, grad=grad.data_ptr())
                optimizer.bind(binding, 1)
                ticket = optimizer.step(**options)
                if comm:  # the training makes its own calls at the same time
                    dist.all_reduce(torch.ones(1))
                optimizer.wait(ticket)
                result = optimizer.step_result(ticket)
                norms.append((result.skipped, bits([result.grad_norm, result.grad_clip])))
    return data, norms


def test_ranks_agree_on_norm_clip_and_skip():
    results = ranks.run(steps_of_a_shard, 4, 1003, {"grad_norm_max": 0.5})
    norms = [norms for _, norms in results]
    assert all(norm == norms[0] for norm in norms)
    assert [skipped for skipped, _ in norms[0]] == [0, 1, 0]
    whole, _ = steps_of_a_shard(0, 1, 1003, {"grad_norm_max": 0.5})
    # In shards the blocks of the norm end at other elements, so the last bits of the clip factor may differ.
    gathered = torch.cat([data for data, _ in results])
    torch.testing.assert_close(gathered, whole, rtol=0, atol=1e-6)


def test_shards_step_as_the_whole_without_clipping():
    results = ranks.run(steps_of_a_shard, 2, 1003, {})
    whole, _ = steps_of_a_shard(0, 1, 1003, {})
    assert torch.equal(torch.cat([data for data, _ in results]), whole)


def a_rank_that_does_not_come(rank, world):
    comm = ProcessGroupComm(timeout_seconds=2)
    own = doubles([1.0])
    if rank == 0:
        first = comm.table.sum(None, own, 1, SECOND_NS // 2)
        text = comm.error
        second = comm.table.sum(None, own, 1, SECOND_NS // 2)
        assert comm.error == text and own[0] == 1.0
        dist.barrier()
        return first, second, text
    dist.barrier()
    return None


def test_a_rank_that_does_not_come_is_a_timeout():
    first, second, text = ranks.run(a_rank_that_does_not_come, 2)[0]
    assert (first, second) == (abi.OFFLOAD_TIMED_OUT, abi.OFFLOAD_COMM_FAILED)
    assert "timed out" in text.lower()  # gloo has several such texts


def summed(comm):
    own = doubles([1.0])
    assert comm.table.sum(None, own, 1, 30 * SECOND_NS) == abi.OFFLOAD_OK
    return own[0]


def tables_one_after_the_other(rank, world):
    made = [ProcessGroupComm(timeout_seconds=30)]
    groups = [made[0].group]
    assert summed(made[0]) == world
    for step in range(4):
        if step == 1 + rank:  # ranks close the first table at different times
            made[0] = None
        made.append(ProcessGroupComm(timeout_seconds=30))
        groups.append(made[-1].group)
        assert [summed(comm) for comm in made[1:]] == [world] * (1 + step)
    assert groups[3] is groups[0]
    assert len(set(groups)) == len(groups) - 1
    made.clear()
    before = threads()
    for _ in range(4):
        assert summed(ProcessGroupComm(timeout_seconds=30)) == world
    assert threads() == before


def test_tables_use_the_groups_of_tables_that_have_ended_on_all_ranks():
    ranks.run(tables_one_after_the_other, 2)


def a_table_after_one_that_failed(rank, world):
    comm = ProcessGroupComm(timeout_seconds=2)
    failed = comm.group
    if rank == 0:
        assert comm.table.sum(None, doubles([1.0]), 1, SECOND_NS // 2) == abi.OFFLOAD_TIMED_OUT
    dist.barrier()
    del comm
    for _ in range(2):
        comm = ProcessGroupComm(timeout_seconds=30)
        assert comm.group is not failed and summed(comm) == world
    dist.barrier()


def test_nobody_uses_the_group_of_a_table_that_failed():
    ranks.run(a_table_after_one_that_failed, 2)


def a_rank_that_makes_no_table(rank, world):
    ProcessGroupComm(timeout_seconds=30)
    ProcessGroupComm(timeout_seconds=30)
    if rank == 0:
        with pytest.raises(
            abi.CommFailedError,
            match=r"ranks \[0, 1\] have not all come within 1 seconds to make an optimizer together: .*; all ranks must",
        ):
            ProcessGroupComm(timeout_seconds=1)
    dist.barrier()


def test_a_rank_that_makes_no_table_is_told():
    ranks.run(a_rank_that_makes_no_table, 2)


def groups_that_are_destroyed(rank, world, folder):
    comm = ProcessGroupComm(timeout_seconds=30)
    for number in range(3):
        assert summed(comm) == world
        del comm
        dist.barrier()
        dist.destroy_process_group()
        gc.collect()
        assert threads() == 1
        dist.init_process_group("gloo", init_method=f"file://{folder}/{number}", rank=rank, world_size=world)
        comm = ProcessGroupComm(timeout_seconds=30)


def test_destroying_all_process_groups_ends_those_of_tables(tmp_path):
    ranks.run(groups_that_are_destroyed, 2, str(tmp_path))


def a_rank_that_dies(rank, world, folder):
    comm = ProcessGroupComm(timeout_seconds=60)
    dist.barrier()
    if rank == 1:
        os._exit(0)
    data, grad = torch.ones(8), torch.ones(8)
    with abi.Context(threads=1) as context:
        optimizer = abi.Optimizer(
            context,
            algorithm=abi.OFFLOAD_LION,
            **comm.options(),
        )
        with optimizer:
            group = optimizer.add_group(lr=0.5)
            param = abi.offload_param_t(
                group=group,
                dtype=1,
                grad_dtype=1,
                name=b"weight",
                data=data.data_ptr(),
                grad=grad.data_ptr(),
                count=8,
            )
            optimizer.add_params([param])
            optimizer.commit()
            ticket = optimizer.step(grad_norm_max=1.0)
            try:
                optimizer.wait(ticket)
                text = "no error"
            except abi.CommFailedError as error:
                text = str(error)
    torch.save((text, data, comm.error), os.path.join(folder, "result"))
    os._exit(0)


def test_a_rank_that_dies_fails_the_step_which_changes_nothing(tmp_path):
    ranks.run(a_rank_that_dies, 2, str(tmp_path))
    text, data, cause = torch.load(tmp_path / "result")
    assert "rank 0 of 2: comm.sum returned 31; another rank has failed or is gone" in text
    assert data.tolist() == [1.0] * 8
    assert cause


def gathers(rank, world):
    group = ProcessGroupComm()._gloo
    for _ in range(200):
        gathered = group.all_gather(torch.ones(1, dtype=torch.float64), datetime.timedelta(seconds=30))
        assert all(each._use_count() == 1 for each in gathered)


@pytest.mark.skipif(not hasattr(torch.Tensor, "_use_count"), reason="this torch does not count references")
def test_torch_lets_the_tensors_of_a_call_go_before_the_next_one():
    """If a thread of torch that is late freed them, it would end the process that ends meanwhile by SIGABRT."""
    ranks.run(gathers, 2)


EXIT_PROGRAM = """
import atexit, ctypes, sys, time
import torch, torch.distributed as dist
from hybridopt import abi
from hybridopt.ranks.process_group import ProcessGroupComm
rank = int(sys.argv[1])
dist.init_process_group("gloo", init_method="file://" + sys.argv[2], rank=rank, world_size=2)
comm = ProcessGroupComm(timeout_seconds=30)
data, grad = torch.ones(8), torch.ones(8)
context = abi.Context(threads=1)
optimizer = abi.Optimizer(context, algorithm=abi.OFFLOAD_LION, **comm.options())
group = optimizer.add_group(lr=0.5)
param = abi.offload_param_t(group=group, dtype=1, grad_dtype=1, name=b"weight", count=8)
param.data, param.grad = data.data_ptr(), grad.data_ptr()
optimizer.add_params([param])
optimizer.commit()
atexit.register(lambda: print(data.tolist()))  # runs after what is registered later
comm.finish_at_exit(optimizer)
time.sleep(rank)  # rank 0 is at its end long before the other one answers
optimizer.step(grad_norm_max=1.0)
"""


def test_work_queued_at_exit_ends_before_the_interpreter(tmp_path):
    command = [sys.executable, "-c", EXIT_PROGRAM]
    programs = [
        subprocess.Popen(
            [*command, str(rank), str(tmp_path / "rendezvous")],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    for program in programs:
        output, _ = program.communicate(timeout=120)
        assert (program.returncode, output) == (0, f"{[0.5] * 8}\n")


def test_what_makes_no_table():
    with pytest.raises(RuntimeError, match=r"there is no process group; call .*init_process_group"):
        ProcessGroupComm()
