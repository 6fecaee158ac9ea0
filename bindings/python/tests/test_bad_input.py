"""Errors are Python exceptions that say what to do, and change nothing. Input that only looks wrong works."""

import math
import copy
import functools
import gc
import os
import pickle
import re

import numpy
import pytest
import torch
from torch import nn
from torch.nn import Parameter

import hybridopt
from hybridopt import abi
from hybridopt.base.checks import kind_of
from hybridopt.settings.options import DEFAULT_OPTIONS, ROWS
from models import PAIRS, VALUES, bits, clone, perceptron, run, set_gradients, state_bits, told


def stepped(param, **kwargs):
    optimizer = hybridopt.AdamW([("weight", param)], **kwargs)
    run(optimizer, [param], [1])
    return optimizer


# ------------------------------------------------------------------------- params that change --


def test_a_param_of_another_dtype_is_refused():
    model = nn.Linear(3, 2)
    optimizer = hybridopt.AdamW(model.named_parameters())
    run(optimizer, list(model.parameters()), [1])
    model.half()
    set_gradients(model.parameters(), 2)
    before = bits(model.parameters())
    with pytest.raises(
        abi.InvalidStateError,
        match="'weight' has dtype torch.float16, but .* it had dtype torch.float32; make a new optim",
    ):
        optimizer.step()
    assert bits(model.parameters()) == before
    model.float()
    set_gradients(model.parameters(), 2)
    optimizer.step()


@pytest.mark.parametrize("replacement", [torch.zeros(5), torch.zeros(4)[:3]])
def test_a_param_of_another_shape_is_refused(replacement):
    param = Parameter(torch.ones(4))
    optimizer = stepped(param)
    param.grad = None
    param.data = replacement
    param.grad = torch.ones_like(replacement)
    with pytest.raises(abi.InvalidStateError, match=r"'weight' has shape .*, but .* \(4,\)"):
        optimizer.step()
    assert torch.equal(param, replacement)


@pytest.mark.parametrize(
    "call",
    [
        lambda optimizer, param: optimizer.step(lambda: pytest.fail("the closure has been called")),
        lambda optimizer, param: optimizer.offload(params=True),
        lambda optimizer, param: optimizer.reload(params=True),
        lambda optimizer, param: optimizer.save_checkpoint("/nowhere"),
        lambda optimizer, param: optimizer.load_checkpoint("/nowhere"),
        lambda optimizer, param: optimizer.master_of(param),
    ],
    ids=["step", "offload", "reload", "save", "load", "master_of"],
)
def test_a_graph_capture_is_refused_before_anything_happens(call, monkeypatch):
    param = Parameter(torch.ones(4))
    optimizer = stepped(param)
    before = bits([param]), state_bits(optimizer)
    with monkeypatch.context() as capture:
        for function in ("is_initialized", "is_current_stream_capturing"):
            capture.setattr(torch.cuda, function, lambda: True)
        for name in vars(abi.Optimizer):  # and no function of the library is called
            if not name.startswith("_"):
                capture.setattr(abi.Optimizer, name, None)
        with pytest.raises(RuntimeError, match="cannot be captured into a CUDA graph; call it outs"):
            call(optimizer, param)
    assert (bits([param]), state_bits(optimizer)) == before


def test_a_param_cut_short_in_place_is_refused():
    param = Parameter(torch.ones(4))
    optimizer = stepped(param)
    param.grad = None
    param.data = param.data[:2]
    param.grad = torch.ones(2)
    with pytest.raises(abi.InvalidStateError, match=r"'weight' has shape \(2,\), but"):
        optimizer.step()


def test_a_param_with_other_strides_is_refused():
    param = Parameter(torch.ones(2, 3))
    optimizer = stepped(param)
    param.data = torch.ones(3, 2).T
    with pytest.raises(abi.InvalidStateError, match=r"'weight' has strides \(1, 2\), but"):
        run(optimizer, [param], [2])


def test_a_param_with_other_strides_in_the_same_memory_is_refused():
    param = Parameter(torch.randn(8, 8))
    optimizer = stepped(param)
    param.data = param.data.T
    before = bits([param])
    with pytest.raises(abi.InvalidStateError, match=r"'weight' has strides \(1, 8\), but"):
        run(optimizer, [param], [2])
    assert bits([param]) == before
    param.data = param.data.T
    optimizer.step()


def test_a_param_of_another_dtype_in_the_same_memory_is_refused():
    param = Parameter(torch.ones(8, dtype=torch.bfloat16))
    optimizer = stepped(param)
    param.grad = None
    param.data = param.data.view(torch.float16)
    with pytest.raises(abi.InvalidStateError, match="'weight' has dtype torch.float16, but"):
        run(optimizer, [param], [2])


def test_a_param_with_gaps_of_another_shape_is_refused():
    """Such a param is stepped in a copy, which would accept any shape that can be broadcast."""
    param = Parameter(torch.ones(4, 2)[:, 0])
    optimizer = stepped(param)
    param.grad = None
    param.data = torch.ones(1)
    with pytest.raises(abi.InvalidStateError, match=r"'weight' has shape \(1,\), but .* \(4,\)"):
        run(optimizer, [param], [2])


def test_strides_of_one_element_may_be_any():
    param = Parameter(torch.ones(4, 1))
    optimizer = stepped(param)
    param.data = param.data.as_strided((4, 1), (1, 7))
    run(optimizer, [param], [2])
    assert optimizer.state[param]["step"] == 2


def test_a_param_whose_storage_is_gone_is_refused_until_it_is_back():
    param = Parameter(torch.ones(4))
    optimizer = stepped(param)
    kept = param.detach().clone()
    param.untyped_storage().resize_(0)
    param.grad = torch.ones(4)
    with pytest.raises(abi.InvalidStateError, match="'weight' has no memory.*bring it back before"):
        optimizer.step()
    param.untyped_storage().resize_(16)
    with torch.no_grad():
        param.copy_(kept)
    optimizer.step()
    assert optimizer.state[param]["step"] == 2


def test_a_param_may_move():
    param, twin = Parameter(torch.ones(4)), Parameter(torch.ones(4))
    optimizer, other = stepped(param), stepped(twin)
    for seed in (2, 3):
        param.data = param.data.clone()
        run(optimizer, [param], [seed])
        run(other, [twin], [seed])
    assert bits([param]) == bits([twin])
    assert state_bits(optimizer) == state_bits(other)


def test_params_live_as_long_as_their_optimizer():
    model = perceptron()
    optimizer = hybridopt.AdamW(model.parameters())
    set_gradients(model.parameters(), 1)
    del model
    gc.collect()
    for _ in range(3):
        optimizer.step()
    assert optimizer.stats().steps_applied == 3


def test_params_that_overlap_are_refused():
    memory = torch.ones(10)
    params = [Parameter(memory[:6]), Parameter(memory[4:])]
    optimizer = hybridopt.AdamW([("left", params[0]), ("right", params[1])])
    with pytest.raises(abi.InvalidArgumentError, match="right.*left"):
        run(optimizer, params, [1])
    assert torch.equal(memory, torch.ones(10))


TWICE = "'{}' is twice in param group {}{}, and would be updated twice in each step; name it once"


@pytest.mark.parametrize("trained", [True, False])
def test_a_param_twice_in_a_group_is_refused_at_once(trained):
    param = Parameter(torch.ones(2), requires_grad=trained)
    for names, text in (
        (("weight", "weight"), TWICE.format("weight", 0, "")),
        (("weight", "tied"), TWICE.format("tied", 0, ", before as 'weight'")),
    ):
        named = [(name, param) for name in names]
        with pytest.warns(UserWarning, match="duplicate parameters"), pytest.raises(ValueError, match=text):
            hybridopt.AdamW(named)
        optimizer = hybridopt.AdamW([("other", Parameter(torch.ones(2)))])
        text = text.replace("group 0", "group 1")
        with pytest.warns(UserWarning, match="duplicate parameters"), pytest.raises(ValueError, match=text):
            optimizer.add_param_group({"params": named})
        assert len(optimizer.param_groups) == 1


def test_a_param_put_twice_into_a_group_later_is_refused():
    param = Parameter(torch.ones(2))
    optimizer = hybridopt.AdamW([("weight", param)])
    run(optimizer, [param], [1])
    before = bits([param])
    optimizer.param_groups[0]["params"].append(param)
    optimizer.param_groups[0]["param_names"].append("weight")
    with pytest.raises(ValueError, match=TWICE.format("weight", 0, "")):
        run(optimizer, [param], [2])
    assert bits([param]) == before


@pytest.mark.parametrize("groups", [1, 2])
def test_equal_names_are_told_apart_and_the_user_is_told(groups):
    """Two models in one optimizer have the same names. torch steps them too, so they are not refused."""
    params = [Parameter(torch.ones(2)) for _ in range(5)]
    names = ["weight", "weight", "weight", "bias", "bias"]
    named = list(zip(names, params))
    optimizer = hybridopt.AdamW([{"params": named[:2]}, {"params": named[2:]}] if groups == 2 else named)
    text = (
        r"several parameters have the same name \('weight', 'weight', 'bias'\); the name of each but the first gets a ' "
        r"at its end.*Give names of their own: \(f'critic.{name}', param\)"
    )
    with pytest.warns(UserWarning, match=text) as warned:
        run(optimizer, params, [1])
    assert [each.filename for each in warned] == [run.__code__.co_filename]
    assert [slot.name for slot in optimizer._engine.slots] == ["weight", "weight'", "weight''", "bias", "bias'"]
    run(optimizer, params, [2])


SWITCHES = {
    "accumulate": lambda optimizer, value: optimizer.hook_gradients(value),
    "free_all": lambda optimizer, value: optimizer.hook_gradients(free_all=value),
    "params": lambda optimizer, value: optimizer.offload(params=value),
    "grads": lambda optimizer, value: optimizer.reload(grads=value),
    "states": lambda optimizer, value: optimizer.offloaded(states=value).__enter__(),
    "masters_only": lambda optimizer, value: optimizer.save_checkpoint("/nowhere", masters_only=value),
    "wait": lambda optimizer, value: optimizer.save_checkpoint("/nowhere", wait=value),
    "fresh_moments": lambda optimizer, value: optimizer.load_checkpoint("/nowhere", fresh_moments=value),
    "keep_steps": lambda optimizer, value: optimizer.load_checkpoint("/nowhere", keep_steps=value),
    "verify": lambda optimizer, value: optimizer.load_checkpoint("/nowhere", verify=value),
}


@pytest.mark.parametrize("value", ["x", "False", None, 2, ("weight",)], ids=repr)
@pytest.mark.parametrize("switch", SWITCHES)
def test_a_switch_that_is_neither_true_nor_false_is_refused(switch, value):
    param = Parameter(torch.ones(2))
    optimizer = hybridopt.AdamW([("weight", param)], movable=("params", "grads", "states"))
    run(optimizer, [param], [1])
    with pytest.raises(ValueError, match=rf"^Invalid {switch}: {re.escape(repr(value))}, expected True or False$"):
        SWITCHES[switch](optimizer, value)
    assert param.numel() == 2 and optimizer._hooks is None
    run(optimizer, [param], [2])
    assert optimizer.stats().steps_applied == 2


# ---------------------------------------------------------------------------------- devices --


def test_params_on_several_devices_are_refused():
    params = [Parameter(torch.ones(2)), Parameter(torch.ones(2, device="meta"))]
    optimizer = hybridopt.AdamW([("here", params[0]), ("there", params[1])])
    params[0].grad = torch.ones(2)
    with pytest.raises(ValueError, match="'here' on cpu, 'there' on meta.*one optimizer for each"):
        optimizer.step()


def test_a_device_that_is_not_supported_is_refused():
    param = Parameter(torch.ones(2, device="meta"))
    optimizer = hybridopt.AdamW([param])
    param.grad = torch.ones(2, device="meta")
    with pytest.raises(ValueError, match="on meta, expected cpu or cuda; move the model there"):
        optimizer.step()


# -------------------------------------------------------------------------------- gradients --


@pytest.mark.parametrize(
    "arrange",
    [
        lambda grad: grad.T.contiguous().T,
        lambda grad: torch.stack([grad, grad], -1)[..., 0],
        lambda grad: grad[:1].expand(4, 3),
    ],
    ids=["transposed", "strided", "expanded"],
)
def test_gradients_in_any_memory_order(arrange):
    start = torch.randn(4, 3)
    params, twins = [Parameter(start.clone())], [Parameter(start.clone())]
    optimizer, other = hybridopt.AdamW(params), hybridopt.AdamW(twins)
    for _ in range(3):
        grad = arrange(torch.randn(4, 3))
        params[0].grad, twins[0].grad = grad, grad.contiguous()
        optimizer.step()
        other.step()
        assert params[0].grad is grad
    assert bits(params) == bits(twins)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_params_in_any_memory_order(dtype):
    image = torch.randn(4, 3, 5, 5).to(dtype)
    orders = [
        image.clone(),
        image.clone(memory_format=torch.channels_last),
        image.permute(3, 1, 0, 2).contiguous().permute(2, 1, 3, 0),
        torch.stack([image, image], -1)[..., 0],
    ]
    results = []
    for data in orders:
        param = Parameter(data)
        assert param.stride() == data.stride()
        optimizer = hybridopt.AdamW([param], lr=0.1)
        for seed in range(3):
            set_gradients([param], seed)
            param.grad = param.grad.to(memory_format=torch.channels_last)
            optimizer.step()
        results.append((bits([param]), bits(optimizer.state[param].values())))
    assert all(result == results[0] for result in results)


def put_behind_grad(param, grad):
    param.grad = torch.ones_like(param)
    param.grad.data = grad


def put_beside_grad(param, grad):
    param.decoupled_grad = grad


@pytest.mark.parametrize("put", [put_behind_grad, put_beside_grad])
def test_a_gradient_of_another_shape_is_refused(put):
    """In one dimension the strides are equal for every length."""
    params = [Parameter(torch.ones(1 << 20)), Parameter(torch.ones(1 << 20))]
    optimizer = hybridopt.AdamW([("left", params[0]), ("right", params[1])])
    run(optimizer, params, [1])
    before = bits([param[:100] for param in params])
    put(params[1], torch.ones(3))
    with pytest.raises(
        abi.InvalidStateError,
        match=r"gradient of parameter 'right' has shape \(3,\), expected \(1048576,\); set it to None",
    ):
        optimizer.step()
    assert bits([param[:100] for param in params]) == before
    put(params[1], torch.ones(1 << 20))
    optimizer.step()
    assert optimizer.state[params[1]]["step"] == 2


def test_a_gradient_on_another_device_is_refused():
    param = Parameter(torch.ones(4))
    optimizer = stepped(param)
    param.decoupled_grad = torch.ones(4, device="meta")
    with pytest.raises(abi.InvalidStateError, match="'weight' is on meta, expected cpu; set it to"):
        optimizer.step()


def test_a_gradient_whose_storage_is_gone_is_refused():
    param = Parameter(torch.ones(4))
    optimizer = stepped(param)
    param.grad.untyped_storage().resize_(0)
    with pytest.raises(abi.InvalidStateError, match="gradient of parameter 'weight' has no memory"):
        optimizer.step()
    assert optimizer.state[param]["step"] == 1
    run(optimizer, [param], [2])
    assert optimizer.state[param]["step"] == 2


@pytest.mark.parametrize("value", [torch.inf, -torch.inf, torch.nan])
def test_a_step_with_a_gradient_that_is_not_finite_changes_no_bit(value):
    params = [Parameter(torch.randn(5)), Parameter(torch.randn(3).bfloat16())]
    optimizer = hybridopt.AdamW(params)
    run(optimizer, params, [1])
    before = bits(params), state_bits(optimizer)
    set_gradients(params, 2)
    params[1].grad[1] = value
    optimizer.step()
    assert (bits(params), state_bits(optimizer)) == before
    assert optimizer.last_step().skipped and optimizer.stats().steps_skipped == 1
    run(optimizer, params, [3])
    assert optimizer.state[params[0]]["step"] == 2 and not optimizer.last_step().skipped


# -------------------------------------------------------------------------- hyperparameters --


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"lr": -1.0}, "^param group 0: lr is -1, expected a number"),
        ({"lr": float("nan")}, "^param group 0: lr is nan"),
        ({"betas": (1.0, 0.9)}, r"^param group 0: betas\[0\] is 1, expected 0 <= betas\[0\] < 1"),
        ({"eps": -1e-8}, "^param group 0: eps is -1e-08"),
        ({"weight_decay": float("inf")}, "^param group 0: weight_decay is inf"),
        ({"lr": None}, "^param group 0 has lr=None, expected a number"),
        ({"eps": "small"}, "^param group 0 has eps='small', expected a number"),
        ({"betas": 0.9}, r"^param group 0 has betas=0.9, expected two numbers"),
        ({"betas": (0.9,)}, r"^param group 0 has betas=\(0.9,\), expected two numbers"),
    ],
)
def test_a_hyperparameter_that_cannot_be_is_refused_and_can_be_put_right(change, text):
    params = [Parameter(torch.ones(3))]
    twins = clone(params)
    optimizer, other = hybridopt.AdamW(params), hybridopt.AdamW(twins)
    run(optimizer, params, [1])
    run(other, twins, [1])
    good = {key: optimizer.param_groups[0][key] for key in change}
    optimizer.param_groups[0].update(change)
    before = bits(params)
    with pytest.raises(ValueError, match=text):
        run(optimizer, params, [2])
    assert bits(params) == before
    optimizer.param_groups[0].update(good)
    run(optimizer, params, [2])
    run(other, twins, [2])
    assert bits(params) == bits(twins)


@pytest.mark.parametrize("name", ["AdamW", "Adam", "SGD", "Lion", "Signum", "Adagrad"])
def test_a_scheduler_may_end_a_rounding_error_below_zero(name):
    param = Parameter(torch.ones(4))
    optimizer = getattr(hybridopt, name)([param], lr=1e-3)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, end_factor=0.0, total_iters=10)
    rates = []
    for seed in range(12):
        before = bits([param])
        run(optimizer, [param], [seed])
        rates.append(optimizer.param_groups[0]["lr"])
        scheduler.step()
    assert -1e-12 < min(rates) < 0.0
    assert bits([param]) == before


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"offload_fraction": 1.5}, ValueError, "Invalid offload_fraction: 1.5, expected 0.0"),
        ({"offload_fraction": "some"}, ValueError, "Invalid offload_fraction: 'some'"),
        (
            {"offload_fraction": "auto", "device_budget_bytes": -1},
            ValueError,
            "device_budget_bytes=-1, expected how many bytes .*, or None for what the device has left",
        ),
        ({"device_headroom": 0.2}, ValueError, "device_headroom=0.2 is for offload_fraction='auto' without"),
        (
            {"offload_fraction": "auto", "device_budget_bytes": 9, "device_headroom": 0.2},
            ValueError,
            "got offload_fraction='auto' and device_budget_bytes=9; leave device_headroom out",
        ),
        (
            {"offload_fraction": "auto", "device_headroom": 1.0},
            ValueError,
            "Invalid device_headroom: 1.0, expected the share of the device",
        ),
        ({"device_budget_bytes": 10}, ValueError, "set offload_fraction='auto'"),
        (
            {"host_executors": "gpu"},
            ValueError,
            "Invalid host_executors: 'gpu', expected 'auto', 'cpu' or 'streamed'",
        ),
        (
            {"early_update_bytes": -1},
            ValueError,
            "Invalid early_update_bytes: -1, expected a number of bytes, or 0 for no early updates",
        ),
        (
            {"early_update_bytes": 1e9},
            ValueError,
            "Invalid early_update_bytes: 1000000000.0, expected a number of bytes",
        ),
        (
            {"save_buffer_bytes": "all"},
            ValueError,
            "Invalid save_buffer_bytes: 'all', expected a number of bytes, 0 for no buffer, or 'auto'",
        ),
        ({"save_buffer_bytes": (1 << 64) - 1}, ValueError, "Invalid save_buffer_bytes: 18446744073709551615, expected"),
        ({"save_buffer_bytes": True}, ValueError, "Invalid save_buffer_bytes: True, expected a number of bytes"),
        ({"master_layout": "half"}, ValueError, "Invalid master_layout: 'half', expected 'fp32', 'split' or 's"),
        ({"numa_policy": "far"}, ValueError, "Invalid numa_policy: 'far', expected 'near' or 'interleaved'"),
        ({"max_grad_norm": 0}, ValueError, "Invalid max_grad_norm: 0, expected a finite number above 0"),
        ({"max_grad_norm": math.inf}, ValueError, "Invalid max_grad_norm: inf, expected a finite number"),
        ({"max_grad_norm": math.nan}, ValueError, "Invalid max_grad_norm: nan, expected a finite number"),
        ({"max_norm": 1}, TypeError, "unexpected keyword argument 'max_norm', expected .*threads"),
        ({"fraction": 1.0}, TypeError, "argument 'fraction', expected .*; did you mean 'offload_fraction'"),
        ({"offload_fracton": 1.0}, TypeError, "argument 'offload_fracton', .*; did you mean 'offload_fraction'"),
        ({"device_fraction": 0.0}, TypeError, "'device_fraction', .*: write offload_fraction, which is 1 - device_frac"),
    ],
)
def test_options_that_cannot_be_are_refused(options, error, text):
    for name in ("AdamW", "Adam", "SGD", "Lion", "Signum", "Adagrad"):
        with pytest.raises(error, match=text):
            getattr(hybridopt, name)([Parameter(torch.ones(1))], **options)


@pytest.mark.parametrize("option", ["offload_fraction", "state_dtype", "save_buffer_bytes", "max_grad_norm", "threads"])
def test_an_array_in_place_of_one_value_is_refused(option):
    for value in (numpy.array([0.5, 0.5]), torch.tensor([0.5, 0.5])):
        with pytest.raises(ValueError, match=rf"^Invalid {option}: {re.escape(repr(value))}, expected"):
            hybridopt.AdamW([Parameter(torch.ones(1))], **{option: value})


@pytest.mark.parametrize("option", ["offload_fraction", "max_grad_norm", "comm_timeout_seconds"])
def test_numbers_of_numpy_are_numbers(option, recwarn):
    for kind in (numpy.float16, numpy.float32, numpy.float64):
        hybridopt.AdamW([Parameter(torch.ones(1))], **{option: kind(0.5)})
    assert not recwarn.list


def test_a_model_in_place_of_its_params_is_refused():
    for name in ("AdamW", "Adam", "SGD", "Lion", "Signum", "Adagrad", "Muon"):
        with pytest.raises(TypeError, match=r"params is a Linear, expected its .*; pass model.named_parameters\(\)"):
            getattr(hybridopt, name)(nn.Linear(2, 2))
    hybridopt.AdamW(nn.ParameterList([torch.ones(1)]))


@pytest.mark.parametrize(
    ("option", "value"), [("offload_fraction", 0.5), ("max_grad_norm", 10**400), ("threads", "2" * 5000)]
)
def test_options_of_the_whole_optimizer_are_refused_in_a_group(option, value):
    params = [Parameter(torch.ones(1)), Parameter(torch.ones(1))]
    text = f"param group 1 has {option}={told(value)}, an option of the whole optimizer, .* two optimizers"
    groups = [{"params": params[:1]}, {"params": params[1:], option: value}]
    with pytest.raises(ValueError, match=text):
        hybridopt.AdamW(groups)
    optimizer = hybridopt.AdamW(params[:1])
    with pytest.raises(ValueError, match=text):
        optimizer.add_param_group(groups[1])
    assert len(optimizer.param_groups) == 1


WAYS_OUT = {
    "disk_fraction": r"call optimizer.set_offload_fraction\(\)",
    "max_grad_norm": "assign optimizer.max_grad_norm",
    "offload_fraction": r"call optimizer.set_offload_fraction\(\)",
    "overlap": r"call optimizer.overlap\(\)",
}


@pytest.mark.parametrize("option", hybridopt.settings.options.DEFAULT_OPTIONS)
def test_options_of_the_whole_optimizer_are_refused_when_a_group_has_got_them(option):
    params = [Parameter(torch.ones(3)), Parameter(torch.ones(3))]
    optimizer = hybridopt.AdamW([{"params": params[:1]}, {"params": params[1:]}])
    run(optimizer, params, [1])
    optimizer.param_groups[1][option] = 0.5
    before = bits(params), state_bits(optimizer)
    way_out = WAYS_OUT.get(option, "give it to the constructor")
    text = f"param group 1 has {option}=0.5, .* no effect in a group; {way_out}, .* delete the group's '{option}'"
    for call in (optimizer.step, lambda: optimizer.save_checkpoint("/nowhere"), optimizer.hook_gradients):
        with pytest.raises(ValueError, match=text):
            call()
    assert (bits(params), state_bits(optimizer)) == before
    del optimizer.param_groups[1][option]
    run(optimizer, params, [2])
    assert optimizer.stats().steps_applied == 2


def test_nothing_to_plan_for():
    optimizer = hybridopt.AdamW([Parameter(torch.ones(1), requires_grad=False)])
    with pytest.raises(abi.InvalidStateError, match="no parameter requires a gradient"):
        optimizer.plan()
    with pytest.raises(abi.InvalidStateError, match="no step yet"):
        optimizer.last_step()


# --------------------------------------------------------------------------- close and fork --


def test_use_after_close():
    param = Parameter(torch.ones(3))
    optimizer = stepped(param)
    optimizer.close()
    optimizer.close()
    assert len(optimizer.state) == 0
    with pytest.raises(abi.InvalidStateError, match=CLOSED):
        optimizer.step()
    hybridopt.AdamW([param]).step()


CLOSED = "^this AdamW is closed; make a new one$"
WITH_CLOSED = {
    "add_param_group": lambda optimizer: optimizer.add_param_group({"params": [Parameter(torch.ones(3))]}),
    "hook_gradients": lambda optimizer: optimizer.hook_gradients(),
    "last_micro_batch": lambda optimizer: optimizer.last_micro_batch(),
    "load_checkpoint": lambda optimizer: optimizer.load_checkpoint("/nowhere"),
    "load_state_dict": lambda optimizer: optimizer.load_state_dict(hybridopt.AdamW([torch.ones(3)]).state_dict()),
    "mark_weights_changed": lambda optimizer: optimizer.mark_weights_changed(),
    "master_of": lambda optimizer: optimizer.master_of(optimizer.param_groups[0]["params"][0]),
    "materialize": lambda optimizer: optimizer.materialize(),
    "max_grad_norm": lambda optimizer: setattr(optimizer, "max_grad_norm", 1.0),
    "offload": lambda optimizer: optimizer.offload(states=True),
    "offloaded": lambda optimizer: optimizer.offloaded().__enter__(),
    "overlap": lambda optimizer: optimizer.overlap(torch.nn.Linear(2, 2)),
    "plan": lambda optimizer: optimizer.plan(),
    "refresh_masters": lambda optimizer: optimizer.refresh_masters(),
    "reload": lambda optimizer: optimizer.reload(states=True),
    "save_checkpoint": lambda optimizer: optimizer.save_checkpoint("/nowhere"),
    "set_offload_fraction": lambda optimizer: optimizer.set_offload_fraction(0.5),
    "state_dict": lambda optimizer: optimizer.state_dict(),
    "step": lambda optimizer: optimizer.step(lambda: pytest.fail("the closure has run")),
    "synchronize": lambda optimizer: optimizer.synchronize(),
    "trace": lambda optimizer: optimizer.trace("/nowhere"),
    "weight_changes": lambda optimizer: optimizer.weight_changes(),
    "zero_grad": lambda optimizer: optimizer.zero_grad(),
    "copy.deepcopy": copy.deepcopy,
    "pickle.dumps": pickle.dumps,
}
# What tells of the past, and torch's own registrations.
AFTER_CLOSE = {
    "close", "last_step", "memory_timeline", "plot_timeline", "profile_hook_step", "state", "stats", "step_results",
    *(name for name in dir(torch.optim.Optimizer) if name.startswith("register_")),
}  # fmt: skip


def test_each_public_name_is_known_to_be_refused_or_answered_after_close():
    public = {name for name in dir(hybridopt.AdamW) if not name.startswith("_")}
    hooks = {name for name in public if "Hook" in name or name.startswith("Optimizer")}
    assert public - hooks == AFTER_CLOSE | {name for name in WITH_CLOSED if "." not in name}


@pytest.mark.parametrize("name", WITH_CLOSED)
@pytest.mark.parametrize("has_stepped", [True, False])
def test_a_closed_optimizer_refuses_with_one_text(name, has_stepped):
    param = Parameter(torch.ones(3))
    optimizer = hybridopt.AdamW([param], movable=("states",), track_changes=True)
    if has_stepped:
        run(optimizer, [param], [1])
    optimizer.close()
    before = bits([param]), repr(optimizer), param.grad
    with pytest.raises(abi.InvalidStateError, match=CLOSED):
        WITH_CLOSED[name](optimizer)
    assert (bits([param]), repr(optimizer), param.grad) == before and len(optimizer.param_groups) == 1


def test_a_closed_optimizer_tells_of_its_past(tmp_path):
    param = Parameter(torch.ones(3))
    optimizer = stepped(param)
    told = optimizer.stats().steps_applied, repr(optimizer.last_step()), len(optimizer.memory_timeline())
    optimizer.close()
    assert (optimizer.stats().steps_applied, repr(optimizer.last_step()), len(optimizer.memory_timeline())) == told
    assert len(optimizer.step_results()) == 1 and optimizer.state == {}


def in_child(function):
    """Runs a function in a forked child; its exit status, 99 for an exception."""
    child = os.fork()
    if child == 0:
        status = 99
        try:
            status = function()
        finally:
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def test_a_forked_child_cannot_step_its_parents_optimizer():
    param, twin = Parameter(torch.ones(3)), Parameter(torch.ones(3))
    optimizer, other = stepped(param), stepped(twin)

    def child():
        try:
            run(optimizer, [param], [2])
        except abi.InvalidStateError as error:
            return 0 if "fork" in str(error) else 1
        return 2

    assert in_child(child) == 0
    run(optimizer, [param], [2])
    run(other, [twin], [2])
    assert bits([param]) == bits([twin])


def test_a_forked_child_can_make_its_own():
    parents = stepped(Parameter(torch.ones(3)), threads=1)  # has a context, which could be shared

    def child():
        param = Parameter(torch.ones(3))
        run(hybridopt.AdamW([param], threads=1), [param], [1, 2])
        return 0

    assert in_child(child) == 0
    assert parents.stats().steps_applied == 1


class Samples(torch.utils.data.Dataset):
    def __init__(self, optimizer):
        self.optimizer = optimizer  # as in a careless training script

    def __len__(self):
        return 8

    def __getitem__(self, index):
        gc.collect()
        return torch.tensor(float(index))


def test_data_loader_workers_disturb_nothing():
    param, twin = Parameter(torch.ones(3)), Parameter(torch.ones(3))
    optimizer, other = stepped(param), stepped(twin)
    loader = torch.utils.data.DataLoader(
        Samples(optimizer), num_workers=2, multiprocessing_context="fork"
    )
    for _ in range(2):
        for seed, sample in enumerate(loader):
            assert sample.item() == seed
            run(optimizer, [param], [seed])
            run(other, [twin], [seed])
    assert bits([param]) == bits([twin])
    assert state_bits(optimizer) == state_bits(other)


# --------------------------------------------------------------------- dtypes, switches, dicts --


UNSUPPORTED_DTYPE = "'weight' is torch.float64, expected torch.float32, torch.bfloat16 or torch.float16"


@pytest.mark.parametrize("call", [lambda o: o.step(), lambda o: o.plan(), lambda o: o.hook_gradients()])
def test_a_model_cast_to_another_dtype_before_its_first_step_is_refused(call):
    model = nn.Linear(3, 2)
    optimizer = hybridopt.AdamW(model.named_parameters())
    model.double()
    set_gradients(model.parameters(), 1)
    with pytest.raises(TypeError, match=UNSUPPORTED_DTYPE):
        call(optimizer)
    model.float()
    set_gradients(model.parameters(), 1)
    call(optimizer)


def test_a_param_unfrozen_in_another_dtype_is_refused_and_the_others_go_on():
    weight, bias = Parameter(torch.ones(3)), Parameter(torch.ones(2))
    weight.requires_grad_(False)
    optimizer = hybridopt.AdamW([("weight", weight), ("bias", bias)])
    run(optimizer, [bias], [1])
    before = bits([bias]), state_bits(optimizer)
    weight.data = weight.data.double()
    weight.requires_grad_()
    bias.grad = torch.ones(2)
    with pytest.raises(TypeError, match=UNSUPPORTED_DTYPE):
        optimizer.step()
    assert (bits([bias]), state_bits(optimizer)) == before
    weight.requires_grad_(False)
    optimizer.step()
    assert optimizer.state[bias]["step"] == 2 and optimizer.stats().steps_applied == 2


@pytest.mark.parametrize("switch", ["amsgrad", "capturable", "differentiable"])
def test_a_switch_set_after_construction_is_refused(switch):
    param = Parameter(torch.ones(3))
    optimizer = stepped(param)
    optimizer.param_groups[0][switch] = True
    before = bits([param]), state_bits(optimizer)
    param.grad = torch.ones(3)
    with pytest.raises(RuntimeError, match=rf"does not support {switch}=True \(param group 0\)"):
        optimizer.step()
    assert (bits([param]), state_bits(optimizer)) == before
    optimizer.param_groups[0][switch] = False
    optimizer.step()
    assert optimizer.state[param]["step"] == 2


FOREIGN = {
    ("SGD", "AdamW"): "param group 0 .* lacks betas, eps, expected lr, betas, eps, weight_decay; load "
    "a state_dict of hybridopt.AdamW or torch.optim.AdamW",
    ("SGD", "Adagrad"): "param group 0 .* lacks lr_decay, eps, initial_accumulator_value",
    ("SGD", "Lion"): "param group 0 .* lacks betas, expected lr, betas, weight_decay; load a state_dict "
    "of hybridopt.Lion",
    ("AdamW", "SGD"): "param group 0 .* lacks momentum, dampening",
    ("AdamW", "Lion"): "the state of parameter 0 .* has exp_avg_sq, expected exp_avg; load a state_dict "
    "of hybridopt.Lion",
    ("AdamW", "Adagrad"): "param group 0 .* lacks lr_decay",
    ("Lion", "Adam"): "param group 0 .* lacks eps",
    ("Adagrad", "AdamW"): "param group 0 .* lacks betas",
    ("Adagrad", "SGD"): "param group 0 .* lacks momentum",
}


@pytest.mark.parametrize(("saved", "loads"), FOREIGN, ids=[" into ".join(pair) for pair in FOREIGN])
def test_a_state_dict_of_another_optimizer_is_refused(saved, loads):
    optimizers = []
    for name in (saved, loads):
        param = Parameter(torch.ones(3))
        cls, _, arguments = PAIRS[name]
        optimizers.append((cls([param], **arguments), param))
        run(optimizers[-1][0], [param], [1, 2])
    foreign = optimizers[0][0].state_dict()
    optimizer, param = optimizers[1]
    groups = copy.deepcopy(optimizer.state_dict()["param_groups"])
    before = bits([param]), state_bits(optimizer)
    with pytest.raises(ValueError, match=FOREIGN[saved, loads]):
        optimizer.load_state_dict(foreign)
    assert (bits([param]), state_bits(optimizer)) == before
    assert optimizer.state_dict()["param_groups"] == groups
    run(optimizer, [param], [3])
    assert optimizer.stats().steps_applied == 3


@pytest.mark.parametrize(
    ("entry", "text"),
    [
        ({"step": torch.tensor(2.0), "exp_avg": torch.ones(3)}, "is not whole and lacks exp_avg_sq"),
        ({"step": torch.tensor(2.0)}, "is not whole and lacks exp_avg, exp_avg_sq"),
        ({"momentum_buffer": torch.ones(3)}, "has momentum_buffer and lacks exp_avg, exp_avg_sq"),
    ],
)
def test_a_state_dict_that_lacks_a_moment_changes_nothing(entry, text):
    param = Parameter(torch.ones(3))
    optimizer = stepped(param)
    before = state_bits(optimizer)
    loaded = {"state": {0: entry}, "param_groups": optimizer.state_dict()["param_groups"]}
    with pytest.raises(ValueError, match=f"the state of parameter 0 .* {text}, expected exp_avg, exp_"):
        optimizer.load_state_dict(loaded)
    assert state_bits(optimizer) == before


def test_a_group_that_lacks_a_hyperparameter_is_refused():
    param = Parameter(torch.ones(3))
    optimizer = stepped(param)
    loaded = copy.deepcopy(optimizer.state_dict())
    del loaded["param_groups"][0]["weight_decay"]
    with pytest.raises(ValueError, match="param group 0 of the loaded state_dict lacks weight_decay"):
        optimizer.load_state_dict(loaded)
    run(optimizer, [param], [2])
    assert optimizer.state[param]["step"] == 2


def test_lion_takes_the_switches_of_the_others():
    param = Parameter(torch.ones(3))
    for switches in ({"foreach": True}, {"fused": True}, {"foreach": False, "fused": False}):
        optimizer = hybridopt.Lion([param], **switches)
        assert switches.items() <= optimizer.param_groups[0].items()
        run(optimizer, [param], [1])
    with pytest.raises(RuntimeError, match="`fused` and `foreach` cannot be `True` together"):
        hybridopt.Lion([param], foreach=True, fused=True)
    with pytest.raises(RuntimeError, match="hybridopt.Lion does not support differentiable=True"):
        hybridopt.Lion([param], differentiable=True)


# --------------------------------------------------------------------------------------- options --


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"offload_fraction": None}, "Invalid offload_fraction: None, expected 0.0 .* or 'auto'"),
        ({"offload_fraction": float("nan")}, "Invalid offload_fraction: nan, expected"),
        ({"offload_fraction": "half"}, "Invalid offload_fraction: 'half', expected"),
        ({"threads": -1}, "Invalid threads: -1, expected a whole number up to 1024, or 0"),
        ({"threads": "4"}, "Invalid threads: '4', expected a whole number"),
        ({"threads": 1.5}, "Invalid threads: 1.5, expected a whole number"),
        ({"movable": "everything"}, "Invalid movable: 'everything', expected some of params, grads"),
        ({"movable": ["params", 3]}, "Invalid movable: 3, expected some of params, grads"),
        ({"movable": True}, "Invalid movable: True, expected some of params, grads"),
        ({"movable": ["params", []]}, r"Invalid movable: \[\], expected some of params, grads"),
        ({"threads": 1025}, "Invalid threads: 1025, expected a whole number up to 1024, or 0"),
        ({"master_layout": ["split"]}, r"Invalid master_layout: \['split'\], expected 'fp32', 'split' or 'split24'"),
        ({"host_executors": None}, "Invalid host_executors: None, expected 'auto', 'cpu' or 'streamed'"),
        ({"state_dtype": torch.float16}, "Invalid state_dtype: torch.float16, expected torch.float32 or"),
        ({"pin": 1}, "Invalid pin: 1, expected True or False"),
        ({"pin": "no"}, "Invalid pin: 'no', expected True or False"),
        ({"numa_nodes": 0}, "Invalid numa_nodes: 0, expected numbers of NUMA nodes from 0 to 63"),
        ({"numa_nodes": [64]}, r"Invalid numa_nodes: \[64\], expected numbers of NUMA nodes from 0 to 63"),
        ({"local_rank": 2, "local_world": 2}, "Invalid local_rank=2 with local_world=2, expected 0 <= loc"),
        ({"local_rank": 0}, "Invalid local_rank=0 with local_world=None, expected 0 <= local_rank"),
        ({"local_rank": 0, "local_world": 1 << 17}, "local_world=131072, expected .* local_world <= 65536"),
        ({"comm_timeout_seconds": 0}, "Invalid comm_timeout_seconds: 0, expected a number of seconds above 0"),
        ({"comm_timeout_seconds": math.inf}, "Invalid comm_timeout_seconds: inf, expected a number of sec"),
    ],
)
def test_options_that_cannot_be_meant_are_refused_at_once(options, text):
    with pytest.raises(ValueError, match=text):
        hybridopt.AdamW([Parameter(torch.ones(2))], **options)


# For each option: the entries of VALUES that it accepts, and the other options that it needs.
OPTIONS = {
    "offload_fraction": ({"0", "1"}, {}),
    "device_budget_bytes": ({"0", "1", "None"}, {"offload_fraction": "auto"}),
    "device_headroom": ({"0", "None"}, {"offload_fraction": "auto"}),
    "state_dtype": (set(), {}),
    "master_layout": (set(), {}),
    "host_executors": (set(), {}),
    "early_update_bytes": ({"0", "1"}, {}),
    "save_buffer_bytes": ({"0", "1"}, {}),
    "disk_fraction": ({"0", "1"}, {"disk_paths": "."}),
    "disk_paths": ({"'1'", "['x']"}, {"disk_fraction": 1}),
    "disk_ring_bytes": ({"0", "1"}, {"disk_fraction": 1, "disk_paths": "."}),
    "threads": ({"0", "1"}, {}),
    "numa_policy": (set(), {}),
    "local_rank": ({"0", "1"}, {"local_world": 2}),
    "local_world": ({"1"}, {"local_rank": 0}),
    "numa_nodes": ({"None"}, {}),
    "pin": ({"True", "False"}, {}),
    "max_grad_norm": ({"1", "2.5", repr(10**23), "None"}, {}),
    "movable": ({"[]", "()", "{}", "range(0, 0)"}, {}),
    "overlap": ({"None"}, {}),
    "process_group": ({"None"}, {}),
    "replica_group": ({"None"}, {}),
    "comm_timeout_seconds": ({"1", "2.5"}, {}),
    "track_changes": ({"True", "False"}, {}),
    "keep_addresses": ({"True", "False"}, {"movable": "params"}),
}


def one_param(**options):
    return hybridopt.AdamW([("weight", Parameter(torch.ones(2)))], **options)


@pytest.mark.parametrize("option", hybridopt.settings.options.DEFAULT_OPTIONS)
def test_every_option_takes_a_value_or_tells_what_it_expects(option):
    taken, beside = OPTIONS[option]
    for name, value in VALUES.items():
        if name in taken:
            one_param(**beside, **{option: value})
            continue
        shown = {"movable": ".*", "overlap": kind_of(value)}.get(option, told(value))
        with pytest.raises((ValueError, TypeError), match=f"{option}(=|: | is ){shown}.*, expected"):
            one_param(**beside, **{option: value})


CALLS = {
    "movable": lambda optimizer, value: one_param(movable=value),
    "max_grad_norm": lambda optimizer, value: setattr(optimizer, "max_grad_norm", value),
    "offload_fraction": lambda optimizer, value: optimizer.set_offload_fraction(value),
    "disk_fraction": lambda optimizer, value: optimizer.set_offload_fraction(1.0, disk_fraction=value),
    "micro_batches": lambda optimizer, value: optimizer.hook_gradients(micro_batches=value).remove(),
    "grad_scaler": lambda optimizer, value: optimizer.hook_gradients(grad_scaler=value).remove(),
    "overlap": lambda optimizer, value: optimizer.overlap(value),
    "master_of": lambda optimizer, value: optimizer.master_of(value),
    "progress": lambda optimizer, value: optimizer.load_checkpoint("/nowhere", progress=value),
}
WHAT_CALLS_TAKE = {
    "movable": OPTIONS["movable"][0],
    "max_grad_norm": OPTIONS["max_grad_norm"][0],
    "offload_fraction": {"0", "1"},
    "disk_fraction": {"0", "None"},  # without disk_paths
    "micro_batches": {"1", repr(10**23), repr(10**400), "None"},
    "grad_scaler": {"None"},
    "progress": {"True", "False", "None", repr(len)},
}


@pytest.mark.parametrize("call", CALLS)
def test_every_call_takes_a_value_or_tells_what_it_expects(call):
    optimizer = stepped(Parameter(torch.ones(2)), max_grad_norm=None)
    for name, value in VALUES.items():
        if name in WHAT_CALLS_TAKE.get(call, ()):
            if call != "progress":
                CALLS[call](optimizer, value)
            continue
        with pytest.raises((ValueError, TypeError), match=f"{call}.*, expected"):
            CALLS[call](optimizer, value)


@pytest.mark.parametrize(
    ("movable", "word"),
    [("x", "'x'"), (b"grads", "b'grads'"), (torch.tensor(1.0), r"tensor\(1.\)"), ({"params": 1, 2: 3}, "2"), ((), None)],
)
def test_movable_tells_the_word_that_it_does_not_know(movable, word):
    if word is None:
        assert one_param(movable=movable)._options["movable"] == ()
        return
    with pytest.raises(ValueError, match=f"^Invalid movable: {word}, expected some of params, grads, states, accumulate$"):
        one_param(movable=movable)


def test_movable_may_be_any_words():
    for movable in (["grads", "params"], {"grads": 1, "params": 2}, iter(("grads", "params"))):
        assert one_param(movable=movable)._options["movable"] == ("grads", "params")


@pytest.mark.parametrize("value", [True, "1"])
def test_what_is_no_number_is_refused_by_the_setters(value):
    param = Parameter(torch.ones(2))
    optimizer = stepped(param, max_grad_norm=2.0)
    with pytest.raises(ValueError, match=f"Invalid max_grad_norm: {value!r}, expected a finite number"):
        optimizer.max_grad_norm = value
    with pytest.raises(ValueError, match=f"Invalid offload_fraction: {value!r}, expected 0.0"):
        optimizer.set_offload_fraction(value)
    assert optimizer.max_grad_norm == 2.0 and optimizer.plan().offload_fraction == 1.0


class Mine(hybridopt.AdamW):
    """What users derive."""


@pytest.mark.parametrize("name", sorted(ROWS))
@pytest.mark.parametrize("kind", [hybridopt.AdamW, hybridopt.SGD, Mine])
def test_an_option_that_is_assigned_is_refused_or_takes_effect(kind, name):
    optimizer = kind([Parameter(torch.ones(2))], lr=0.1)
    if name == "max_grad_norm":
        optimizer.max_grad_norm = 2.0
        assert optimizer._options["max_grad_norm"] == 2.0
        return
    way_out = WAYS_OUT.get(name, "give it to the constructor")
    before = dict(vars(optimizer))
    with pytest.raises(AttributeError, match=rf"^{kind.__name__}\.{name} = .* would have no effect.*; {way_out}$"):
        setattr(optimizer, name, DEFAULT_OPTIONS[name])
    assert vars(optimizer) == before


def test_other_attributes_may_be_assigned():
    param = Parameter(torch.ones(2))
    optimizer = Mine([param], lr=1.0)
    overlap = optimizer.overlap
    optimizer.overlap = functools.wraps(overlap)(lambda model: overlap(model))  # a wrapper
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5)  # wraps step()
    optimizer.some_name, optimizer._step_count, optimizer._step_supports_amp_scaling = 1, 5, False
    run(optimizer, [param], [1])
    scheduler.step()
    copied = pickle.loads(pickle.dumps(Mine([Parameter(torch.ones(2))], threads=1)))
    assert (optimizer.some_name, optimizer._step_count, optimizer._step_supports_amp_scaling) == (1, 5, False)
    assert optimizer.last_step().step == 1 and copied._options["threads"] == 1


class WithPin(hybridopt.AdamW):
    """A class that gives a name of an option a meaning of its own."""

    @property
    def pin(self):
        return self._pin

    @pin.setter
    def pin(self, pin):
        self._pin = pin


def test_a_property_of_a_subclass_may_have_the_name_of_an_option():
    optimizer = WithPin([Parameter(torch.ones(2))])
    optimizer.pin = "mine"
    assert optimizer.pin == "mine"


@pytest.mark.parametrize("option", ["process_group", "replica_group"])
@pytest.mark.parametrize("value", [True, 0, "world", torch.distributed.GroupMember.NON_GROUP_MEMBER], ids=str)
def test_what_is_no_process_group_is_refused(option, value):
    with pytest.raises(TypeError, match=f"Invalid {option}: .*, expected a torch.distributed.ProcessGroup that"):
        hybridopt.AdamW([Parameter(torch.ones(2))], **{option: value})


@pytest.mark.parametrize("movable", ["params", ["params"], iter(["params"])])
def test_what_may_move_is_a_word_or_some(movable):
    param = Parameter(torch.ones(2))
    optimizer = stepped(param, movable=movable)
    optimizer.hook_gradients()
    optimizer.offload(params=True)
    assert param.untyped_storage().nbytes() == 0
    optimizer.reload(params=True)


@pytest.fixture
def one_rank(tmp_path):
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1
    )
    yield
    gc.collect()
    torch.distributed.destroy_process_group()


HELD = "of parameter '{}' is held by a wrapper that averages gradients .*; or it is held by the graph .*del loss"


def test_hooks_are_refused_where_a_wrapper_or_a_graph_holds_accumulators(one_rank):
    elsewhere = nn.parallel.DistributedDataParallel(nn.Linear(3, 2))
    model = nn.Linear(3, 2)
    model(torch.ones(1, 3)).sum().backward()
    hybridopt.AdamW(model.parameters(), max_grad_norm=None).hook_gradients().remove()
    loss = model(torch.ones(1, 3)).sum()
    with pytest.raises(abi.InvalidStateError, match=HELD.format("param_groups.0.0")):
        hybridopt.AdamW(model.parameters(), max_grad_norm=None).hook_gradients()
    del loss
    optimizer = hybridopt.AdamW(model.named_parameters(), max_grad_norm=None)
    hooks = optimizer.hook_gradients()
    with pytest.raises(abi.InvalidStateError, match=HELD.format("module.weight")):
        optimizer.add_param_group({"params": elsewhere.named_parameters()})
    assert len(optimizer.param_groups) == 1
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    hooks.remove()

    kept = [param.expand_as(param).grad_fn.next_functions[0][0] for param in model.parameters()]
    kept[0].register_hook(lambda *_: None)  # as the wrappers of Megatron-LM, apex and DeepSpeed do
    with pytest.raises(abi.InvalidStateError, match=HELD.format("weight")):
        optimizer.hook_gradients()


@pytest.mark.parametrize("frozen", [True, False])
@pytest.mark.parametrize(
    "arguments", [{}, {"static_graph": True}, {"gradient_as_bucket_view": True}], ids=str
)
def test_hooks_under_distributed_data_parallel_are_refused(one_rank, frozen, arguments):
    other = hybridopt.AdamW(nn.Linear(3, 2).parameters())
    module = nn.Linear(3, 2)
    module.weight.requires_grad_(not frozen)
    model = nn.parallel.DistributedDataParallel(module, **arguments)
    optimizer = hybridopt.AdamW(model.parameters())
    for _ in range(2):
        with pytest.raises(abi.InvalidStateError, match=HELD.format(f"param_groups.0.{int(frozen)}")):
            optimizer.hook_gradients()
        model(torch.ones(1, 3)).sum().backward()
        optimizer.step()  # continues without hooks
    assert optimizer.stats().steps_applied == 2
    other.hook_gradients()


# ------------------------------------------------------------------------------- text with NUL --


def test_paths_with_nul_are_refused_and_not_cut_there(tmp_path):
    params = [Parameter(torch.ones(3))]
    optimizer = hybridopt.AdamW(params)
    run(optimizer, params, [1])
    path = str(tmp_path / "step\x00100")
    uses = {
        "path": (optimizer.save_checkpoint, optimizer.load_checkpoint, abi.checkpoint_inspect, abi.checkpoint_verify),
        "directory": (abi.checkpoint_newest,),
    }
    for name, functions in uses.items():
        for function in functions:
            with pytest.raises(ValueError, match=f"{name} is .*step.*100', expected text without NUL characters"):
                function(path)
    assert list(tmp_path.iterdir()) == []


def test_names_of_params_with_nul_are_refused():
    params = [Parameter(torch.ones(3)), Parameter(torch.ones(3))]
    optimizer = hybridopt.AdamW(zip(("a\0b", "a\0c"), params))
    with pytest.raises(ValueError, match="a parameter's name is .*, expected text without NUL characters"):
        run(optimizer, params, [1])
    assert bits(params) == bits([torch.ones(3), torch.ones(3)])
