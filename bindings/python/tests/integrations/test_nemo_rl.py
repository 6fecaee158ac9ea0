"""NeMo-RL's own policy workers for FSDP2, on the CPU over gloo: model, loss, training, phases, the weights for the
rollout and checkpoints are theirs."""

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
from torch.distributed.tensor import DTensor

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

# The newer worker makes its model on one rank only here: on several, nemo_automodel fills it on a GPU.
RANKS = {"dtensor_policy_worker": 2, "dtensor_policy_worker_v2": 1}
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
        if function is torch._C._nn._parse_to and type(args[0]) is int:  # of module.to(number of the GPU)
            args = ("cpu", *args[1:])
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
            lambda device_type, *args, **kwargs: make_mesh("cpu", *args, **kwargs),
        ),
        mock.patch("torch.autocast", lambda device_type, **kwargs: autocast("cpu", **kwargs)),
        mock.patch.multiple(torch.cuda, mem_get_info=lambda: (1, 1), current_device=lambda: 0, **ignored),
        mock.patch("torch.distributed.init_process_group", lambda *_, **__: None),  # it is there
        Phases() as phases,
    ):
        yield phases


def worker_of(folder, module, options, saved=None):
    optimizer = yaml.safe_load(block("yaml"))["policy"]["optimizer"]
    optimizer["kwargs"].update(lr=1e-2, betas=[0.9, 0.999], eps=1e-8, **options)
    config = {**configuration(folder, optimizer, 4 * RANKS[module], 2), "max_grad_norm": 0.5}
    classes = worker_module(module, is_changed="movable" not in options)
    worker = made(getattr(classes, IMPLEMENTATIONS[module]), config, has_reference=True, **(saved or {}))
    assert type(worker.optimizer) is hybridopt.AdamW
    return worker


def addresses(optimizer):
    return [(key, value.data_ptr()) for entry in optimizer.state.values() for key, value in entry.items()]


def calls_of(optimizer):
    """Notes how the optimizer is called to move content."""
    calls = mock.MagicMock()
    for name in ("offload", "reload"):
        calls.attach_mock(mock.MagicMock(wraps=getattr(optimizer, name)), name)
        setattr(optimizer, name, getattr(calls, name))
    return calls


def iterate(worker, phases, rank, seeds):
    """Iterations of GRPO: log probabilities, a step, and new weights for the rollout. Returns what each gives."""
    weights_of = sys.modules[type(worker).__module__].dtensor_params_generator
    results = []
    for seed in seeds:
        tokens = torch.randint(0, 64, (4, 12), generator=torch.Generator().manual_seed(2 * seed + rank))
        batch = batch_of(tokens)
        if phases:
            worker.prepare_for_lp_inference()
        logprobs = worker.get_logprobs(batch)["logprobs"]
        with worker.use_reference_model():
            reference = worker.get_logprobs(batch)["logprobs"]
        if phases:
            worker.prepare_for_training()
        norm = float(worker.train(batch, loss_function())["grad_norm"])
        if phases:
            places, copies = addresses(worker.optimizer), phases.copies
            worker.offload_before_refit()
        weights = [weight for _, weight in weights_of(worker.model, torch.bfloat16)]
        if phases:
            worker.offload_after_refit()
            assert phases.copies > copies
            assert addresses(worker.optimizer) == places  # nothing is stored twice
        results.append((norm, bits([logprobs]), bits(weights), bits([reference])))
    return results


def whole(tensor):
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def found(worker):
    entries = list(worker.optimizer.state.values())
    return (
        bits(whole(param) for param in worker.model.parameters()),
        bits(whole(entry[name]) for entry in entries for name in ("exp_avg", "exp_avg_sq")),
        [int(entry["step"]) for entry in entries],
        worker.scheduler.last_epoch,
    )


def worked(rank, folder, saved, module, options, is_moving):
    """Five iterations, and a checkpoint after three of them."""
    with without_gpu() as phases:
        worker = worker_of(folder, module, options)
        phases = phases if is_moving else None
        calls = calls_of(worker.optimizer)
        results = iterate(worker, phases, rank, range(3))
        if phases:
            worker.prepare_for_training()  # as GRPO does before it saves
        newer = {"checkpointing_cfg": {"enabled": True}} if module.endswith("v2") else {}
        worker.save_checkpoint(**saved, **newer)
        results += iterate(worker, phases, rank, range(3, 5))
        if phases and "movable" not in options:
            iteration = ["offload", "reload", "offload", "offload"]
            assert [name for name, _, _ in calls.mock_calls] == iteration * 3 + ["reload"] + iteration * 2
        return results, found(worker)


def working(rank, world, folder, module, options):
    worker_module(module)
    gc.freeze()  # the workers collect garbage several times in each phase
    paths = {key: f"{folder}/{key}" for key in ("weights_path", "optimizer_path")}
    results = [worked(rank, folder, paths, module, options, is_moving) for is_moving in (False, True)]
    with without_gpu() as phases:
        worker = worker_of(folder, module, options, paths)
        return *results, (iterate(worker, phases, rank, range(3, 5)), found(worker))


@pytest.mark.parametrize("module", IMPLEMENTATIONS)
@pytest.mark.parametrize("options", [{"state_dtype": "bf16"}, {"movable": []}])
def test_phases_and_checkpoints_of_the_workers_keep_every_bit(tmp_path, module, options):
    """With the lines of the docs; with movable=[] the workers are as they are."""
    for staying, moving, continued in ranks.run(working, RANKS[module], save_model(tmp_path), module, options):
        assert moving == staying
        results, state = staying
        # The newer worker takes what it has loaded for its reference model.
        assert [each[:3] for each in continued[0]] == [each[:3] for each in results[3:]]
        assert continued[1] == state
        norms, _, weights, _ = zip(*results)
        assert max(norms) > 0.5  # clipped
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
