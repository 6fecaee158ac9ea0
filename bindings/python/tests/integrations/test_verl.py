"""verl's own helpers, and NeMo-RL's way to find a class: the optimizer comes from a configuration, and goes
through phases in which model and optimizer are moved away and back."""

import copy
from unittest import mock

import hydra.utils
import pytest
import torch
from torch import nn
from verl.utils import fsdp_utils
from verl.workers.config.optimizer import FSDPOptimizerConfig, build_optimizer

import hybridopt
import ranks
from copying import Copying
from models import PAIRS, bits, perceptron, set_gradients, state_bits


def config_of(name="AdamW", **options):
    return FSDPOptimizerConfig(
        optimizer_impl="hybridopt", optimizer=name, lr=1e-2, override_optimizer_config=options
    )


@pytest.mark.parametrize("name", ["AdamW", "Adam", "SGD", "Lion", "Signum", "Adagrad"])
def test_the_class_is_found_by_its_path(name):
    optimizer = build_optimizer(perceptron().parameters(), config_of(name, state_dtype="bf16", threads=1))
    assert type(optimizer) is getattr(hybridopt, name) is hydra.utils.get_class(f"hybridopt.{name}")
    assert optimizer._options["state_dtype"] == torch.bfloat16
    assert optimizer.param_groups[0]["lr"] == 1e-2
    with pytest.raises(TypeError, match="unexpected keyword argument 'offload_fractions'"):
        build_optimizer(perceptron().parameters(), config_of(name, offload_fractions=1.0))


def sleep(model, optimizer, meanwhile=lambda: None):
    """Runs verl's helpers, which use the CPU as their GPU here. Returns how many tensors they have moved."""
    with Copying() as mode, mock.patch.object(fsdp_utils, "get_device_id", lambda: "cpu"):
        fsdp_utils.offload_fsdp_model_to_cpu(model, empty_cache=False)
        fsdp_utils.offload_fsdp_optimizer(optimizer)
        meanwhile()
        fsdp_utils.load_fsdp_model_to_gpu(model)
        fsdp_utils.load_fsdp_optimizer(optimizer, "cpu")
    return mode.copies


def addresses(optimizer):
    return [
        (key, value.data_ptr())
        for entry in optimizer.state.values()
        for key, value in entry.items()
    ]


def step(model, optimizer, seed):
    set_gradients(model.parameters(), seed)
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.parametrize("name", list(PAIRS))
@pytest.mark.parametrize("options", [{}, {"offload_fraction": 0.5}, {"state_dtype": "bf16"}])
def test_sleep_and_wake_keep_every_bit_and_no_copy(name, options):
    cls, _, arguments = PAIRS[name]
    plain = perceptron(torch.bfloat16)
    model = copy.deepcopy(plain)
    plain_optimizer, optimizer = (cls(m.parameters(), **arguments, **options) for m in (plain, model))
    for seed in range(4):
        step(plain, plain_optimizer, seed)
        step(model, optimizer, seed)
        before = addresses(optimizer)
        assert sleep(model, optimizer) > 0
        assert addresses(optimizer) == before  # the state's addresses are unchanged: nothing is stored twice
    assert bits(model.parameters()) == bits(plain.parameters())
    assert state_bits(optimizer) == state_bits(plain_optimizer)


def test_weights_that_come_from_outside_are_taken():
    model = perceptron(torch.bfloat16)
    optimizer = hybridopt.AdamW(model.parameters(), lr=1e-3)
    step(model, optimizer, 0)
    sleep(model, optimizer, lambda: [param.data.fill_(2.0) for param in model.parameters()])
    step(model, optimizer, 1)
    for param in model.parameters():
        assert ((optimizer.master_of(param) - 2.0).abs() < 0.02).all()
        assert (optimizer.master_of(param) != 2.0).all()


def fsdp2(rank, world, steps, is_sleeping):
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(16, 24), nn.Linear(24, 3)).bfloat16()
    fully_shard(model[0])
    fully_shard(model)
    optimizer = build_optimizer(model.parameters(), config_of(max_grad_norm=0.5))
    for seed in range(steps):
        x = torch.randn(8, 16, generator=torch.Generator().manual_seed(seed)).bfloat16()
        model(x).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        if is_sleeping:
            assert sleep(model, optimizer) > 0
    entries = optimizer.state.values()
    state = [entry[key].full_tensor() for entry in entries for key in ("exp_avg", "exp_avg_sq", "master_param")]
    return bits(param.full_tensor() for param in model.parameters()), bits(state)


def test_fsdp2_sleeps_and_wakes_with_the_same_bits():
    assert ranks.run(fsdp2, 2, 3, True) == ranks.run(fsdp2, 2, 3, False)
