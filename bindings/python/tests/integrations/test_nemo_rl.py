"""NeMo-RL's own policy workers for FSDP2, on the CPU over gloo: model, loss, training, phases, the weights for the
rollout and checkpoints are theirs. The newer worker makes and trains its model with nemo_automodel, no release of which
fits: its phases run here around the older one's training."""

import argparse
import contextlib
import gc
import itertools
import pathlib
import sys
from unittest import mock

import pytest
import torch
import yaml

import hybridopt
import ranks
from copying import Copying
from models import bits
from nemo_rl_on_cpu import batch_of, block, configuration, is_given, loss_function, made, worker_module
from verl_on_cpu import save_model

pytestmark = pytest.mark.skipif(
    not is_given(),
    reason="PyPI has only NeMo-RL's name: give scripts/test_frameworks a checkout of its sources by NEMO_RL_CHECKOUT",
)

IMPLEMENTATIONS = {
    "dtensor_policy_worker": "DTensorPolicyWorkerImpl",
    "dtensor_policy_worker_v2": "DTensorPolicyWorkerV2Impl",
}


def is_cuda(argument):
    return isinstance(argument, (str, torch.device)) and str(argument).startswith("cuda")


class Phases(Copying):
    """Other memory of the host stands for the GPU."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = {key: "cpu" if is_cuda(value) else value for key, value in (kwargs or {}).items()}
        if function is torch.empty:
            kwargs.pop("pin_memory", None)
        if function is torch.Tensor.cuda:
            return args[0]
        args = tuple("cpu" if is_cuda(arg) else arg for arg in args)
        return super().__torch_function__(function, types, args, kwargs)


@contextlib.contextmanager
def without_gpu():
    """Replaces the functions of the GPU that NeMo-RL calls."""
    make_mesh, autocast = torch.distributed.device_mesh.init_device_mesh, torch.autocast
    names = ("synchronize", "empty_cache", "get_device_name", "nvtx", "set_device")
    ignored = {name: mock.MagicMock() for name in names}
    with (
        mock.patch(
            "torch.distributed.device_mesh.init_device_mesh",
            lambda _, *args, **kwargs: make_mesh("cpu", *args, **kwargs),
        ),
        mock.patch("torch.autocast", lambda device_type, **kwargs: autocast("cpu", **kwargs)),
        mock.patch.multiple(torch.cuda, mem_get_info=lambda: (1, 1), **ignored),
        mock.patch("torch.distributed.init_process_group", lambda *_, **__: None),  # it is there
        Phases() as phases,
    ):
        yield phases


def workers(folder, moving, options, saved=None):
    """What trains, and what has the phases, which share everything."""
    older = worker_module("dtensor_policy_worker").DTensorPolicyWorkerImpl
    optimizer = yaml.safe_load(block("yaml"))["policy"]["optimizer"]
    optimizer["kwargs"].update(lr=1e-2, betas=[0.9, 0.999], eps=1e-8, **options)
    config = {**configuration(folder, optimizer, 8, 2), "max_grad_norm": 0.5}
    trains = made(older, config, has_reference=True, **(saved or {}))
    assert type(trains.optimizer) is hybridopt.AdamW
    name = IMPLEMENTATIONS[moving]
    moves = object.__new__(getattr(worker_module(moving, "movable" not in options), name))
    moves.__dict__ = trains.__dict__
    return trains, moves


def addresses(optimizer):
    return [(key, value.data_ptr()) for entry in optimizer.state.values() for key, value in entry.items()]


def calls_of(optimizer):
    """Notes how the optimizer is called to move content."""
    calls = mock.MagicMock()
    for name in ("offload", "reload"):
        calls.attach_mock(mock.MagicMock(wraps=getattr(optimizer, name)), name)
        setattr(optimizer, name, getattr(calls, name))
    return calls


def iterate(trains, moves, phases, rank, seeds):
    """Iterations of GRPO: log probabilities, a step, and new weights for the rollout. Returns what each gives."""
    weights_of = sys.modules[type(trains).__module__].dtensor_params_generator
    results = []
    for seed in seeds:
        tokens = torch.randint(0, 64, (4, 12), generator=torch.Generator().manual_seed(2 * seed + rank))
        batch = batch_of(tokens)
        if phases:
            moves.prepare_for_lp_inference()
        logprobs = [trains.get_logprobs(batch)["logprobs"]]
        with trains.use_reference_model():
            logprobs.append(trains.get_logprobs(batch)["logprobs"])
        if phases:
            moves.prepare_for_training()
        norm = float(trains.train(batch, loss_function())["grad_norm"])
        if phases:
            places, copies = addresses(trains.optimizer), phases.copies
            moves.offload_before_refit()
        weights = [weight for _, weight in weights_of(trains.model, torch.bfloat16)]
        if phases:
            moves.offload_after_refit()
            assert phases.copies > copies
            assert addresses(trains.optimizer) == places  # nothing is stored twice
        results.append((norm, bits(logprobs), bits(weights)))
    return results


def found(worker):
    entries = list(worker.optimizer.state.values())
    return (
        bits(param.full_tensor() for param in worker.model.parameters()),
        bits(entry[name].full_tensor() for entry in entries for name in ("exp_avg", "exp_avg_sq")),
        [int(entry["step"]) for entry in entries],
        worker.scheduler.last_epoch,
    )


def worked(rank, folder, saved, options, moving):
    """Five iterations, and a checkpoint after three of them. `moving` names the worker that has the phases."""
    with without_gpu() as phases:
        trains, moves = workers(folder, moving or "dtensor_policy_worker", options)
        phases = phases if moving else None
        calls = calls_of(trains.optimizer)
        results = iterate(trains, moves, phases, rank, range(3))
        if phases:
            moves.prepare_for_training()  # as GRPO does before it saves
        trains.save_checkpoint(**saved)
        results += iterate(trains, moves, phases, rank, range(3, 5))
        if phases and "movable" not in options:
            iteration = ["offload", "reload", "offload", "offload"]
            assert [name for name, _, _ in calls.mock_calls] == iteration * 3 + ["reload"] + iteration * 2
        return results, found(trains)


def working(rank, world, folder, options):
    for name in IMPLEMENTATIONS:
        worker_module(name)
    gc.freeze()  # the workers collect garbage several times in each phase
    paths = {key: f"{folder}/{key}" for key in ("weights_path", "optimizer_path")}
    results = [worked(rank, folder, paths, options, moving) for moving in (None, *IMPLEMENTATIONS)]
    with without_gpu() as phases:
        trains, moves = workers(folder, "dtensor_policy_worker_v2", options, paths)
        return results, (iterate(trains, moves, phases, rank, range(3, 5)), found(trains))


@pytest.mark.parametrize("options", [{}, {"state_dtype": "bf16"}, {"movable": []}])
def test_phases_and_checkpoints_of_the_workers_keep_every_bit(tmp_path, options):
    """With the lines of the docs; with movable=[] the workers are as they are."""
    for (staying, *moving), continued in ranks.run(working, 2, save_model(tmp_path), options):  # of each rank
        assert moving == [staying] * 2
        results, state = staying
        assert continued == (results[3:], state)
        assert max(norm for norm, _, _ in results) > 0.5  # clipped
        weights = [each for _, _, each in results]
        assert all(before != after for before, after in itertools.pairwise(weights))


def measured(rank, world, folder):
    """The hashes of params that bench/rl_phases.py finds with phases and without, for each worker of NeMo-RL."""
    sys.path.append(str(pathlib.Path(__file__).parents[4] / "bench"))
    with without_gpu():
        import rl_phases

        hashes = {}
        for name, (maker, _) in rl_phases.CONTENDERS.items():
            for phases in (True, False) if maker == "nemo_rl" else ():
                options = argparse.Namespace(model=folder, iterations=3, batch=4, context=12, phases=phases)
                hashes.setdefault(name, []).append(rl_phases.run(options, name)["hash"])
        return hashes


def test_the_bench_finds_the_same_bits(tmp_path):
    (hashes,) = ranks.run(measured, 1, save_model(tmp_path, vocab_size=1000))
    assert len(hashes) == 5 and all(moving == staying for moving, staying in hashes.values())
    assert len({moving for moving, _ in hashes.values()}) > 1  # a hash tells one training from another
