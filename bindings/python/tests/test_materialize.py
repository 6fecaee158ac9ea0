"""State before the first step: materialize(), and torch's own helpers that make state."""

import copy

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    _init_optim_state,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.nn import Parameter

import hybridopt
from hybridopt import abi
from models import PAIRS, bits, clone, perceptron, run, set_gradients, state_bits

# PAIRS, and optimizers whose bits would change if a step count were wrong by one.
ALL = {
    **{name: (ours, arguments) for name, (ours, _, arguments) in PAIRS.items()},
    "SGD dampened": (hybridopt.SGD, {"lr": 0.1, "momentum": 0.9, "dampening": 0.5}),
    "Lion bf16": (hybridopt.Lion, {"lr": 1e-3, "state_dtype": "bf16"}),
    "AdamW split": (hybridopt.AdamW, {"lr": 1e-2, "state_dtype": "bf16", "master_layout": "split"}),
    "Adagrad initial": (hybridopt.Adagrad, {"lr": 0.1, "initial_accumulator_value": 0.25}),
}
every_optimizer = pytest.mark.parametrize("name", ALL)


def made(name):
    """An optimizer over params in every dtype, one of them frozen and one without elements."""
    torch.manual_seed(3)
    tensors = [torch.randn(40, 30).bfloat16(), torch.randn(7), torch.randn(5).half(), torch.randn(0, 2)]
    params = [Parameter(tensor) for tensor in tensors]
    frozen = Parameter(torch.ones(3), requires_grad=False)
    ours, arguments = ALL[name]
    return ours([*params, frozen], **arguments), params


@every_optimizer
def test_state_is_there_before_the_first_step_and_changes_no_bit(name):
    (optimizer, params), (plain, own) = made(name), made(name)
    optimizer.materialize()
    assert optimizer.stats().steps_applied == 0 and bits(params) == bits(own)
    keys = {index: list(entry) for index, entry in optimizer.state_dict()["state"].items()}
    for param, entry in optimizer.state.items():
        first = 0.25 if "initial" in name else 0.0
        for key, value in entry.items():
            assert value.shape == (() if key == "step" else (*param.shape, 2) if key == "master_low" else param.shape)
            if key == "master_param":
                assert torch.equal(value, param.float())
            else:
                assert torch.all(value == (first if key == "sum" else 0.0)), key
        if param.requires_grad:  # Adagrad has state of frozen params too, as torch's has
            assert bits([optimizer.master_of(param)]) == bits([param.float()])
    optimizer.materialize()
    for seed in (1, 2):
        run(optimizer, params, [seed])
        run(plain, own, [seed])
        assert {index: list(entry) for index, entry in plain.state_dict()["state"].items()} == keys
        assert (bits(params), state_bits(optimizer)) == (bits(own), state_bits(plain))


@every_optimizer
def test_it_survives_another_engine_and_copies(name):
    (plain, own), results = made(name), []
    optimizers = [made(name), made(name)]
    for optimizer, _ in optimizers:
        optimizer.materialize()
        assert optimizer.state is not None
    copied = copy.deepcopy(optimizers[1][0])
    optimizers[1] = copied, copied.param_groups[0]["params"][:4]
    for optimizer, params in [*optimizers, (plain, own)]:
        optimizer.add_param_group({"params": [Parameter(torch.ones(3))]})
        params = [*params, *optimizer.param_groups[1]["params"]]
        run(optimizer, params, [1, 2])
        results.append((bits(params), state_bits(optimizer)))
    assert results[0] == results[2] and results[1] == results[2]


@every_optimizer
@pytest.mark.parametrize("how", ["copy_", "assign", "load_state_dict", "entries"])
def test_what_is_loaded_into_it_is_stepped(name, how):
    """Trainers for reinforcement learning do this: they find `state` filled and load into it."""
    trained, own = made(name)
    run(trained, own, [1, 2, 3])
    saved = copy.deepcopy(trained.state_dict())
    optimizer, params = made(name)
    with torch.no_grad():
        for param, other in zip(params, own):
            param.copy_(other)
    optimizer.materialize()
    if how == "load_state_dict":
        optimizer.load_state_dict(saved)
    else:
        everything = optimizer.param_groups[0]["params"]
        for index, entry in saved["state"].items():
            target = optimizer.state[everything[index]]
            if how == "entries":
                optimizer.state[everything[index]] = entry
                continue
            for key, value in entry.items():
                if how == "copy_":
                    target[key].copy_(value)
                else:
                    target[key] = value
    run(optimizer, params, [4])
    run(trained, own, [4])
    is_counted = any("step" in entry for entry in saved["state"].values())
    # The hidden step count of the other optimizers decides how bf16 moments are rounded and whether a step is dampened.
    if is_counted or "bf16" not in name and "dampened" not in name:
        assert (bits(params), state_bits(optimizer)) == (bits(own), state_bits(trained))


def test_a_momentum_that_is_written_before_the_first_step_counts():
    params, twins = [Parameter(torch.ones(4))], [Parameter(torch.ones(4))]
    arguments = {"lr": 0.1, "momentum": 0.5}
    optimizer, torchs = hybridopt.SGD(params, **arguments), torch.optim.SGD(twins, **arguments)
    optimizer.materialize()
    optimizer.state[params[0]]["momentum_buffer"].fill_(3.0)
    torchs.state[twins[0]]["momentum_buffer"] = torch.full((4,), 3.0)
    for each, own in ((optimizer, params), (torchs, twins)):
        set_gradients(own, 1)
        each.step()
    assert bits(params) == bits(twins)


@pytest.mark.parametrize("materialized", [True, False])
@every_optimizer
def test_torchs_own_way_to_fill_state_works(name, materialized):
    """torch's own way: without state, it makes a step with gradients of zero and a learning rate of 0."""
    model = perceptron(torch.bfloat16)
    ours, arguments = ALL[name]
    with torch.no_grad():
        model[0].bias.fill_(-0.0)
    optimizer = ours(model.named_parameters(), **arguments)
    before = bits(model.parameters())
    if materialized:
        optimizer.materialize()
    _init_optim_state(optimizer)
    assert bits(model.parameters()) == before
    assert all(group["lr"] == arguments["lr"] for group in optimizer.param_groups)
    counts = {float(entry["step"]) for entry in optimizer.state.values() if "step" in entry}
    has_state_anyway = "Adagrad" in name
    assert counts <= {0.0 if materialized or has_state_anyway else 1.0}
    exported = get_optimizer_state_dict(model, optimizer)
    again = ours(model.named_parameters(), **arguments)
    set_optimizer_state_dict(model, again, exported)
    assert state_bits(again) == state_bits(optimizer)


def test_hooks_overlap_offload_and_checkpoints_go_on_from_it(tmp_path):
    results = []
    for materialized in (True, False):
        torch.manual_seed(0)
        model = perceptron()
        optimizer = hybridopt.AdamW(
            model.named_parameters(), movable=("params", "grads", "states"), max_grad_norm=1.0, overlap=model
        )
        if materialized:
            optimizer.materialize()
            optimizer.save_checkpoint(tmp_path / "before")
            with optimizer.offloaded():
                pass
        optimizer.hook_gradients()
        for seed in range(3):
            torch.manual_seed(seed)
            model(torch.randn(5, 10)).square().sum().backward()
            optimizer.step()
        optimizer.synchronize()
        results.append((bits(model.parameters()), state_bits(optimizer)))
    assert results[0] == results[1]
    again = perceptron()
    loaded = hybridopt.AdamW(again.named_parameters())
    loaded.materialize()
    loaded.load_checkpoint(tmp_path / "before")
    assert {float(entry["step"]) for entry in loaded.state.values()} == {0.0}


def test_errors():
    optimizer = hybridopt.AdamW([Parameter(torch.ones(2), requires_grad=False)])
    with pytest.raises(abi.InvalidStateError, match="no parameter requires a gradient; there is nothing to"):
        optimizer.materialize()
    optimizer = hybridopt.AdamW([Parameter(torch.ones(2))])
    optimizer.close()
    with pytest.raises(abi.InvalidStateError, match="this AdamW is closed; make a new one"):
        optimizer.materialize()
    with pytest.raises(TypeError, match="'x' is torch.float64, expected torch.float32, torch.bfloat16 or"):
        param = Parameter(torch.ones(2))
        optimizer = hybridopt.AdamW([("x", param)])
        param.data = param.data.double()
        optimizer.materialize()


def test_params_without_elements_and_plain_modules():
    model = nn.Linear(3, 2)
    optimizer = hybridopt.AdamW(model.parameters())
    optimizer.materialize()
    run(optimizer, clone(model.parameters()), [1])  # gradients of other params: no param is stepped
    assert optimizer.stats().steps_applied == 0
