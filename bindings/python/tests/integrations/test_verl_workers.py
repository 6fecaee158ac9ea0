"""verl's workers as its trainers use them: processes of Ray, each with an engine for FSDP2, and one controller that
calls them. On the CPU over gloo; model, loss, optimizer, schedule, phases and checkpoints are verl's."""

import functools
import os
import pathlib
import sys
import tempfile
from unittest import mock

import pytest
import torch

from models import bits
from verl_on_cpu import Phases, configs, leave_out, save_model, without_gpu

leave_out("datasets", "pandas", "fastapi", "uvicorn", "starlette", "starlette.requests", "starlette.responses")

import ray  # noqa: E402
from tensordict import TensorDict  # noqa: E402
from verl.single_controller.base.decorator import Dispatch, register  # noqa: E402
from verl.single_controller.ray import (  # noqa: E402
    RayClassWithInitArgs,
    RayResourcePool,
    RayWorkerGroup,
)
from verl.utils import tensordict_utils  # noqa: E402
from verl.workers.config import TrainingWorkerConfig  # noqa: E402
from verl.workers.engine_workers import TrainingWorker  # noqa: E402
from verl.workers.utils.losses import sft_loss  # noqa: E402


class Worker(TrainingWorker):
    """verl's worker, in a process where other memory of the host stands for the GPU."""

    def __init__(self, folder, meeting, is_offloading, options):
        autocast = functools.partial(torch.autocast, "cpu")
        on_host = mock.patch("torch.autocast", lambda device_type, **options: autocast(**options))
        self.entered = [without_gpu(), Phases(), on_host]
        for context in self.entered:
            context.__enter__()
        rank, world = (int(os.environ[name]) for name in ("RANK", "WORLD_SIZE"))
        torch.distributed.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=world)
        model, engine, optimizer, checkpoint = configs(folder, is_offloading, options)
        engine.use_dynamic_bsz, engine.micro_batch_size_per_gpu = False, 2
        config = TrainingWorkerConfig(
            model_type="language_model",
            model_config=model,
            engine_config=engine,
            optimizer_config=optimizer,
            checkpoint_config=checkpoint,
        )
        with mock.patch("verl.workers.engine.base.get_device_name", lambda: "cuda"):  # to find the engine
            super().__init__(config)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def places(self):
        """The addresses of the state, and how many tensors have been moved."""
        entries = self.engine.optimizer.state.values()
        return [value.data_ptr() for entry in entries for value in entry.values()], self.entered[1].copies

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def found(self):
        entries = list(self.engine.optimizer.state.values())
        names = ("exp_avg", "exp_avg_sq", "master_param")
        return (
            bits(param.full_tensor() for param in self.engine.module.parameters()),
            bits(entry[name].full_tensor() for entry in entries for name in names),
            [int(entry["step"]) for entry in entries],
        )


@pytest.fixture(scope="module")
def cluster():
    os.environ["RAY_raylet_start_wait_time_s"] = "600"  # a busy machine may need long
    paths = os.pathsep.join([str(pathlib.Path(__file__).parent), *filter(None, sys.path)])
    ray.init(
        num_cpus=4,
        include_dashboard=False,
        _node_ip_address="127.0.0.1",
        runtime_env={"env_vars": {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}},
    )
    yield
    ray.shutdown()


def group_of(folder, *arguments):
    meeting = tempfile.mktemp(dir=folder)
    arguments = (str(folder), meeting, *arguments)
    pool = RayResourcePool([2], use_gpu=False, max_colocate_count=1)
    group = RayWorkerGroup(pool, RayClassWithInitArgs(ray.remote(Worker), *arguments), device_name="cpu")
    group.reset()
    group.set_loss_fn(functools.partial(sft_loss, config=None))
    return group


def batch_of(seed):
    """Sequences of several lengths; the loss covers all tokens but the first of each."""
    generator = torch.Generator().manual_seed(seed)
    lengths = [12, 7, 9, 12, 5, 8, 12, 10]
    sequences = [torch.randint(0, 64, (length,), generator=generator) for length in lengths]
    jagged = functools.partial(torch.nested.as_nested_tensor, layout=torch.jagged)
    return tensordict_utils.get_tensordict(
        {
            "input_ids": jagged(sequences),
            "position_ids": jagged([torch.arange(length) for length in lengths]),
            "loss_mask": jagged([(torch.arange(length) > 0).long() for length in lengths]),
        },
        {"temperature": 1.0, "update_lr_scheduler": True, "global_token_num": lengths},
    )


def train(group, seeds):
    norms = []
    for seed in seeds:
        metrics = tensordict_utils.get(group.train_batch(batch_of(seed)).get(), "metrics")
        norms.append(metrics["grad_norm"])
    return norms


def end(group):
    found = group.found()
    for worker in group.workers:
        ray.kill(worker)
    return found


def test_workers_sleep_wake_and_resume_with_the_same_bits(cluster, tmp_path):
    model, options = save_model(tmp_path), {"offload_fraction": 0.5, "state_dtype": "bf16"}
    staying = group_of(model, False, options)
    norms = train(staying, range(5))
    assert max(norms) > 0.5  # clipped
    expected = end(staying)

    moving = group_of(model, True, options)  # everything leaves the GPU after each step
    assert train(moving, range(3)) == norms[:3]
    before = moving.places()
    moving.to("device"), moving.to("cpu")  # as around a rollout
    for (places, copies), (places_before, copies_before) in zip(moving.places(), before):
        assert copies > copies_before > 0
        assert places == places_before  # the state's addresses are unchanged: nothing is stored twice
    moving.save_checkpoint(str(tmp_path / "saved"))
    assert train(moving, range(3, 5)) == norms[3:]
    assert moving.found() == expected

    moving.reset()  # a new model and a new optimizer
    moving.load_checkpoint(str(tmp_path / "saved"), del_local_after_load=False)
    assert train(moving, range(3, 5)) == norms[3:]
    assert end(moving) == expected
