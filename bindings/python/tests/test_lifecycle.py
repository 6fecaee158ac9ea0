"""Gradients that leave during the backward pass, and phases that need the device's memory. The tests run on the CPU,
where freed memory shows in the storages. They compare every bit with a training that moves nothing."""

import contextlib
import copy
import gc
import json
import sys
import time
import warnings
import weakref

import matplotlib.image
import models
import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import hybridopt
import hybridopt.steps.timeline_plot
from hybridopt import abi
from hybridopt.engine import making
from hybridopt.params.kept_addresses import KeptAddresses
from hybridopt.params.released_storages import bytes_of

ALL = ("params", "grads", "states")


def adamw(module, **options):
    options = {"lr": 0.05, "weight_decay": 0.1, "threads": 1, **options}
    return hybridopt.AdamW(module.parameters(), **options)


def backward(module, seed, scale=1.0):
    generator = torch.Generator().manual_seed(seed)
    dtype = next(module.parameters()).dtype
    inputs = torch.randn(8, 10, generator=generator).to(dtype)
    (module(inputs).float().square().sum() * scale).backward()


def trained(module, optimizer, micro_batches=1, steps=4):
    results = []
    for step in range(steps):
        for micro_batch in range(micro_batches):
            backward(module, 10 * step + micro_batch)
        optimizer.step()
        optimizer.zero_grad()
        results.append(optimizer.last_step().grad_norm.hex())
    return results


def pair(dtype=torch.float32, **options):
    module = models.perceptron(dtype)
    other = copy.deepcopy(module)
    return module, adamw(module, **options), other, adamw(other, **options)


# ----------------------------------------------------------------------------------- gradients --


def keep_every_second(monkeypatch):
    """Makes the package believe that the device reads every second gradient, which hooks then leave there."""
    monkeypatch.setattr(
        abi.Optimizer, "grads_to_keep", lambda self, count: bytes(id % 2 for id in range(count))
    )


@pytest.fixture(params=["all leave", "some stay"])
def some_stay(request, monkeypatch):
    if request.param == "some stay":
        keep_every_second(monkeypatch)


def test_hooks_say_that_clip_grad_norm_will_find_nothing():
    with pytest.warns(UserWarning, match=r"clip_grad_norm_\(\) does not find them.* max_grad_norm=") as told:
        adamw(models.perceptron()).hook_gradients()
    assert [each.filename for each in told] == [__file__]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        adamw(models.perceptron(), max_grad_norm=None).hook_gradients()
        copy.deepcopy(adamw(models.perceptron(), max_grad_norm=1.0)).hook_gradients()
        optimizer = adamw(models.perceptron())
        optimizer.max_grad_norm = 1.0
        optimizer.hook_gradients()


def test_max_grad_norm_can_be_read_and_changed():
    module = models.perceptron()
    other = copy.deepcopy(module)
    clipping, changed = adamw(module, max_grad_norm=0.5), adamw(other)
    assert clipping.max_grad_norm == 0.5 and changed.max_grad_norm is None
    changed.max_grad_norm = 0.5
    assert trained(module, clipping) == trained(other, changed)
    assert models.bits(module.parameters()) == models.bits(other.parameters())
    assert clipping.last_step().grad_clip < 1.0
    clipping.max_grad_norm = None
    trained(module, clipping)
    assert clipping.last_step().grad_clip == 1.0
    with pytest.raises(ValueError, match="Invalid max_grad_norm: -1, expected a finite number above 0"):
        changed.max_grad_norm = -1
    assert changed.max_grad_norm == 0.5


@pytest.mark.usefixtures("some_stay")
@pytest.mark.parametrize("accumulate", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("max_grad_norm", [None, 0.5])
def test_hooked_gradients_step_to_the_same_bits(accumulate, dtype, max_grad_norm):
    module, optimizer, other, plain = pair(dtype, max_grad_norm=max_grad_norm)
    optimizer.hook_gradients(accumulate=accumulate)
    assert trained(module, optimizer) == trained(other, plain)
    assert models.bits(module.parameters()) == models.bits(other.parameters())
    assert models.state_bits(optimizer) == models.state_bits(plain)


def in_micro_batches(module, optimizer, micro_batches, told, steps=4):
    """Like trained(), but the last micro-batch is announced."""
    results = []
    for step in range(steps):
        for micro_batch in range(micro_batches - 1):
            backward(module, 10 * step + micro_batch)
        with optimizer.last_micro_batch() if told else contextlib.nullcontext():
            backward(module, 10 * step + micro_batches - 1)
        if optimizer._hooks is not None:
            assert all(param.grad is None for param in module.parameters())
        optimizer.step()
        optimizer.zero_grad()
        results.append(optimizer.last_step().grad_norm.hex())
    return results


@pytest.mark.usefixtures("some_stay")
@pytest.mark.parametrize("told", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("max_grad_norm", [None, 0.5])
def test_micro_batches_add_up_in_autograds_own_way(dtype, max_grad_norm, told):
    module, optimizer, other, plain = pair(dtype, max_grad_norm=max_grad_norm)
    with optimizer.hook_gradients(micro_batches=None if told else 3):
        results = in_micro_batches(module, optimizer, 3, told)
        assert results == in_micro_batches(other, plain, 3, told)
        assert models.bits(module.parameters()) == models.bits(other.parameters())
    # Without hooks the training continues as usual.
    assert trained(module, optimizer, 2) == trained(other, plain, 2)
    assert models.bits(module.parameters()) == models.bits(other.parameters())
    assert models.state_bits(optimizer) == models.state_bits(plain)


def test_a_step_with_fewer_micro_batches_is_told_its_last():
    module, optimizer, other, plain = pair(torch.bfloat16, max_grad_norm=0.5)
    optimizer.hook_gradients(micro_batches=4)
    for micro_batches, told in ((4, False), (2, True), (4, False), (3, True)):
        results = in_micro_batches(module, optimizer, micro_batches, told, 1)
        assert results == in_micro_batches(other, plain, micro_batches, told, 1)
    # No hook was called, so the step uses the gradients where they are.
    trained(module, optimizer, 2), trained(other, plain, 2)
    assert models.bits(module.parameters()) == models.bits(other.parameters())


def test_fp32_micro_batches_add_up_on_the_host_as_torch_adds_them():
    module, optimizer, other, plain = pair(max_grad_norm=0.5)
    with optimizer.hook_gradients(accumulate=True):
        assert trained(module, optimizer, 3) == trained(other, plain, 3)
        assert models.bits(module.parameters()) == models.bits(other.parameters())


def test_a_param_without_part_in_the_last_micro_batch_is_stepped_where_its_gradient_is():
    module, optimizer, other, plain = pair(torch.bfloat16, max_grad_norm=0.5)
    optimizer.hook_gradients(micro_batches=None)
    for step in range(3):
        for each, its in ((module, optimizer), (other, plain)):
            backward(each, step)
            with its.last_micro_batch():
                each[2](torch.ones(1, 20, dtype=torch.bfloat16)).sum().backward()
        assert [param.grad is None for param in module.parameters()] == [False, False, True, True]
        optimizer.step(), plain.step()
        optimizer.zero_grad(), plain.zero_grad()
    assert models.bits(module.parameters()) == models.bits(other.parameters())
    assert optimizer.last_step().grad_norm == plain.last_step().grad_norm


def test_gradients_are_handed_over_together(monkeypatch):
    count = 600
    module = nn.ParameterList([nn.Parameter(torch.ones(3)) for _ in range(count)])
    optimizer = hybridopt.SGD(module.parameters(), lr=1.0, threads=1)
    optimizer.hook_gradients()
    calls = []
    for name in ("bind", "offload_grads", "wait"):
        function = getattr(abi.Optimizer, name)

        def call(self, *args, _name=name, _function=function, **options):
            calls.append((_name, len(options["params"]) if "params" in options else 0))
            return _function(self, *args, **options)

        monkeypatch.setattr(abi.Optimizer, name, call)
    for per_call, expected in ((256, [256, 256, 88]), (1000, [600])):
        monkeypatch.setattr(hybridopt.hiding.gradient_hooks, "SEND_AT_PARAMS", per_call)
        torch.stack([param.sum() for param in module]).sum().backward()
        optimizer.zero_grad()
        moved = [params for name, params in calls if name == "offload_grads" and params > 0]
        assert moved == [*expected, count]  # the last call drops them
        assert [name for name, _ in calls].count("bind") == len(expected)
        # The optimizer polls instead of waiting: once before each call but the first.
        assert [name for name, _ in calls].count("wait") <= 2 * len(expected)
        calls.clear()
    monkeypatch.setattr(hybridopt.hiding.gradient_hooks, "SEND_AT_BYTES", 12 * 200)
    torch.stack([param.sum() for param in module]).sum().backward()
    assert [params for name, params in calls if name == "offload_grads"] == [200, 200, 200]
    optimizer.step()
    assert all(param.tolist() == [0.0] * 3 for param in module)


class Failing(torch.autograd.Function):
    @staticmethod
    def forward(ctx, value):
        return value.clone()

    @staticmethod
    def backward(ctx, grad):
        raise RuntimeError("planted")


def test_a_backward_pass_that_fails_can_be_made_again():
    module, optimizer, other, plain = pair(torch.bfloat16, max_grad_norm=0.5)
    optimizer.hook_gradients()
    for step in range(3):
        hidden = Failing.apply(module[1](module[0](torch.ones(1, 10, dtype=torch.bfloat16))))
        with pytest.raises(RuntimeError, match="planted"):
            module[2](hidden).sum().backward()
        assert optimizer.stats().grads_bytes.host == 0
        dropped = weakref.ref(module[2].weight.grad)
        optimizer.zero_grad()
        assert dropped() is None
        backward(module, step), backward(other, step)
        assert all(param.grad is None for param in module.parameters())
        optimizer.step(), plain.step()
        plain.zero_grad()
    assert models.bits(module.parameters()) == models.bits(other.parameters())


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointed_activations(reentrant):
    module, optimizer, other, plain = pair(max_grad_norm=0.5)
    optimizer.hook_gradients(micro_batches=2)
    for step in range(6):
        for each, its in ((module, optimizer), (other, plain)):
            inputs = torch.full((2, 10), 0.1 * step, requires_grad=True)
            hidden = checkpoint(each[:2], inputs, use_reentrant=reentrant)
            checkpoint(each[2], hidden, use_reentrant=reentrant).square().sum().backward()
        if step % 2 == 1:
            assert all(param.grad is None for param in module.parameters())
            optimizer.step(), plain.step()
            optimizer.zero_grad(), plain.zero_grad()
    assert models.bits(module.parameters()) == models.bits(other.parameters())


@pytest.mark.usefixtures("some_stay")
def test_who_replaces_a_gradient_in_backward_is_believed():
    module, optimizer, other, plain = pair()
    optimizer.hook_gradients()

    def clamp(param):
        param.grad = param.grad.clamp(-1, 1)

    for each in (module, other):
        each[0].weight.register_post_accumulate_grad_hook(clamp)
    assert trained(module, optimizer) == trained(other, plain)
    assert models.bits(module.parameters()) == models.bits(other.parameters())


def test_low_precision_micro_batches_add_up_in_fp32():
    module = models.perceptron(torch.bfloat16)
    exact = copy.deepcopy(module).float()
    optimizer = adamw(module)
    optimizer.hook_gradients(accumulate=True)
    sums = [torch.zeros_like(param, dtype=torch.float32) for param in module.parameters()]
    for seed in range(5):
        for param, total in zip(module.parameters(), sums):
            noise = torch.randn(param.shape, generator=torch.Generator().manual_seed(seed))
            param.grad = noise.bfloat16()
            total += param.grad.float()
        send_by_hand(optimizer)
    optimizer.step()
    expected = adamw(exact)
    for param, total in zip(exact.parameters(), sums):
        param.grad = total
    expected.step()
    for param, own in zip(module.parameters(), exact.parameters()):
        assert models.bits([optimizer.state[param]["master_param"]]) == models.bits([own])


def send_by_hand(optimizer):
    """Calls the hook as autograd does when a gradient is ready."""
    for group in optimizer.param_groups:
        for param in group["params"]:
            optimizer._hooks._ready(param)


def test_gradients_are_gone_after_backward_and_dropped_by_zero_grad():
    module = models.perceptron()
    optimizer = adamw(module)
    optimizer.hook_gradients()
    sizes = sum(4 * param.numel() for param in module.parameters())
    backward(module, 0)
    assert all(param.grad is None for param in module.parameters())
    assert optimizer.stats().grads_bytes.host == sizes
    assert optimizer.stats().grads_bytes.device == 0
    optimizer.zero_grad()
    assert optimizer.stats().grads_bytes.host == 0
    before = models.bits(module.parameters())
    optimizer.step()
    assert models.bits(module.parameters()) == before
    assert len(optimizer.state) == 0


@pytest.mark.usefixtures("some_stay")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("taken_by", ["hooks", "hooks of sums", "offload"])
def test_zeros_of_zero_grad_are_there_as_in_torch(taken_by, dtype):
    """A step over zeros moves params by their momentum. A pass in which a param has no part leaves its zeros, and they are
    stepped, whether its gradient was used by a step or dropped."""
    module, optimizer, other, plain = pair(dtype, movable=ALL)
    if taken_by != "offload":
        optimizer.hook_gradients(accumulate=taken_by == "hooks of sums")
    for seed in range(6):
        for model, each in ((module, optimizer), (other, plain)):
            for param in model[2].parameters():
                param.requires_grad_(seed not in (2, 4))
            backward(model, seed)
            if each is optimizer and taken_by == "offload":
                optimizer.offload(grads=True)
            if seed != 3:
                each.step()
            each.zero_grad(set_to_none=False)
            assert all(param.grad is not None and not param.grad.any() for param in model.parameters())
        assert models.bits(module.parameters()) == models.bits(other.parameters())
    for each in (optimizer, plain):
        each.step()
        each.zero_grad()
        each.zero_grad(set_to_none=False)
    assert all(param.grad is None for param in module.parameters())
    assert models.bits(module.parameters()) == models.bits(other.parameters())


def test_gradients_that_stay_go_where_they_are_sent(monkeypatch):
    """reload() brings back the gradients that stayed and those that left; offload() moves all of them."""
    keep_every_second(monkeypatch)
    module, optimizer, other, plain = pair(movable=ALL)
    optimizer.hook_gradients()
    backward(module, 0), backward(other, 0)
    sizes = [4 * param.numel() for param in module.parameters()]
    assert optimizer.stats().grads_bytes.host == sum(sizes[0::2])
    optimizer.offload(grads=True)
    assert optimizer.stats().grads_bytes.host == sum(sizes)
    optimizer.reload(grads=True)
    assert optimizer.stats().grads_bytes.host == 0
    expected = models.bits(param.grad for param in other.parameters())
    assert models.bits(param.grad for param in module.parameters()) == expected
    optimizer.zero_grad()
    backward(module, 0)
    optimizer.reload(grads=True)
    assert models.bits(param.grad for param in module.parameters()) == expected
    optimizer.step(), plain.step()
    assert models.bits(module.parameters()) == models.bits(other.parameters())


def test_gradients_that_stay_live_until_the_step_and_are_dropped_by_zero_grad(monkeypatch):
    keep_every_second(monkeypatch)
    module = models.perceptron()
    optimizer = adamw(module)
    optimizer.hook_gradients()
    kept = []
    for param in list(module.parameters())[1::2]:
        param.register_post_accumulate_grad_hook(lambda param: kept.append(weakref.ref(param.grad)))
    for use_up in (optimizer.zero_grad, optimizer.step):
        kept.clear()
        backward(module, 0)
        assert all(param.grad is None for param in module.parameters())
        assert len(kept) == 2 and all(ref() is not None for ref in kept)
        before = models.bits(module.parameters())
        use_up()
        assert (models.bits(module.parameters()) == before) == (use_up == optimizer.zero_grad)
        gc.collect()
        assert all(ref() is None for ref in kept)
    backward(module, 1)
    module[0].bias.grad = torch.zeros_like(module[0].bias)
    with pytest.raises(
        abi.InvalidStateError,
        match=r"the gradient of parameter 'param_groups.0.1' has been taken off it .* now; drop both with zero_grad\(\)",
    ):
        optimizer.step()


@pytest.mark.parametrize("of_fsdp2", [True, False])
def test_gradients_of_one_storage_stay_or_leave_together(of_fsdp2, monkeypatch):
    """If one gradient of FSDP2's stayed, it would keep the memory of all of them. Others leave: they may be of a buffer that the
    program writes."""
    keep_every_second(monkeypatch)
    params = [nn.Parameter(torch.zeros(6)) for _ in range(24)]
    optimizer = hybridopt.SGD(params, lr=1.0, max_grad_norm=None, threads=1)
    optimizer.hook_gradients()
    for slot in optimizer._ready_engine().slots:
        slot.is_plain = not of_fsdp2
    for begin in range(0, 24, 3):
        together = torch.full((18,), float(begin)).split(6)
        for param, grad in zip(params[begin : begin + 3], together):
            param.grad = grad
    send_by_hand(optimizer)
    kept = {slot.id for slot in optimizer._engine.bound.kept}
    groups = [kept & set(range(begin, begin + 3)) for begin in range(0, 24, 3)]
    if of_fsdp2:
        assert {len(group) for group in groups} == {0, 3} and 3 <= sum(map(bool, groups)) <= 5
    else:
        assert not kept
    optimizer.step()
    assert [param.tolist() for param in params] == [[-float(id - id % 3)] * 6 for id in range(24)]


def test_a_step_whose_wait_is_interrupted_has_used_up_what_hooks_have_taken(monkeypatch):
    keep_every_second(monkeypatch)
    module, optimizer, other, plain = pair()
    optimizer.hook_gradients()
    trained(module, optimizer), trained(other, plain)
    backward(module, 7), backward(other, 7)
    held = weakref.ref(next(iter(optimizer._engine.bound.kept.values())))

    def interrupted(self, ticket=0, timeout_ns=-1):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(abi.Optimizer, "wait", interrupted)
        optimizer.step()
    assert held() is not None  # the library may still be reading it
    plain.step()
    optimizer._engine.settle()
    gc.collect()
    assert held() is None and optimizer.stats().grads_bytes.device == 0
    assert models.bits(module.parameters()) == models.bits(other.parameters())
    before = models.bits(module.parameters())
    optimizer.step()  # without a gradient
    assert models.bits(module.parameters()) == before


def test_a_kept_gradient_is_refused_beside_another_one(monkeypatch):
    keep_every_second(monkeypatch)
    module = models.perceptron()
    optimizer = adamw(module, movable=("grads", "accumulate"))
    optimizer.hook_gradients().remove()
    hooks = optimizer.hook_gradients()
    backward(module, 0)
    hooks.remove()
    with optimizer.hook_gradients(accumulate=True), pytest.raises(
        abi.InvalidStateError, match="the gradient of parameter .* has been taken already"
    ):
        backward(module, 1)
    module.zero_grad()
    backward(module, 1)
    with pytest.raises(abi.InvalidStateError, match="the gradient of parameter .* has been taken off it .* another one now"):
        optimizer.offload(grads=True)
    assert optimizer.stats().grads_bytes.host == sum(4 * p.numel() for p in list(module.parameters())[0::2])


@pytest.mark.parametrize("options", [{"free_all": True}, {"accumulate": True}])
def test_who_wants_the_memory_keeps_no_gradient(monkeypatch, options):
    keep_every_second(monkeypatch)
    module = models.perceptron()
    optimizer = adamw(module)
    optimizer.hook_gradients(**options)
    backward(module, 0)
    assert optimizer.stats().grads_bytes.host == 4 * sum(param.numel() for param in module.parameters())


def test_hooks_come_to_params_that_are_added():
    module, optimizer, other, plain = pair()
    optimizer.hook_gradients()
    trained(module, optimizer), trained(other, plain)
    for each, its_module in ((optimizer, module), (plain, other)):
        torch.manual_seed(3)
        its_module.append(nn.Linear(3, 2))
        each.add_param_group({"params": its_module[-1].parameters(), "lr": 0.1})
    trained(module, optimizer), trained(other, plain)
    backward(module, 0)
    assert all(param.grad is None for param in module.parameters())
    assert models.bits(module.parameters()) == models.bits(other.parameters())


@pytest.mark.parametrize("accumulate", [True, False])
def test_many_gradients_wait_for_the_oldest(monkeypatch, accumulate):
    monkeypatch.setattr(hybridopt.hiding.gradient_hooks, "SEND_AT_PARAMS", 1)
    module = nn.ParameterList([nn.Parameter(torch.ones(3)) for _ in range(400)])
    optimizer = hybridopt.SGD(module.parameters(), lr=1.0, threads=1)
    optimizer.hook_gradients(accumulate, micro_batches=1 if accumulate else 2)
    for _ in range(2):
        torch.stack([param.sum() for param in module]).sum().backward()
    assert len(optimizer._hooks._in_flight) <= (4 if accumulate else 64)
    optimizer.step()
    assert all(param.tolist() == [-1.0] * 3 for param in module)


@pytest.mark.usefixtures("some_stay")
def test_a_second_backward_that_nobody_told_of_is_refused():
    module, optimizer, other, plain = pair(max_grad_norm=0.5)
    hooks = optimizer.hook_gradients()
    backward(module, 0)
    with pytest.raises(
        abi.InvalidStateError,
        match=r"the gradient of parameter '.*' has been taken already, .*hook_gradients\(micro_batches=n\), "
        r".*optimizer.last_micro_batch\(\):`; hook_gradients\(accumulate=True\) adds them up on the host",
    ):
        backward(module, 1)
    with pytest.raises(abi.InvalidStateError, match="gradients are hooked already; call remove"):
        optimizer.hook_gradients()
    optimizer.zero_grad()
    trained(module, optimizer), trained(other, plain)
    assert models.bits(module.parameters()) == models.bits(other.parameters())
    hooks.remove()
    backward(module, 2)
    assert all(param.grad is not None for param in module.parameters())


@pytest.mark.parametrize("micro_batches", [0, -1, 2.0, True, "2"])
def test_micro_batches_that_cannot_be_meant_are_refused(micro_batches):
    optimizer = adamw(models.perceptron())
    with pytest.raises(ValueError, match="Invalid micro_batches: .*, expected the number of backward passes"):
        optimizer.hook_gradients(micro_batches=micro_batches)
    with pytest.raises(ValueError, match="accumulate=True .* leave micro_batches out"):
        optimizer.hook_gradients(accumulate=True, micro_batches=2)
    with optimizer.last_micro_batch():  # without hooks
        assert optimizer.step() is None
    optimizer.hook_gradients()


def test_hooks_end_with_their_optimizer():
    module = models.perceptron()
    optimizer = adamw(module)
    optimizer.hook_gradients()
    backward(module, 0)
    optimizer.step()
    del optimizer
    gc.collect()
    backward(module, 0)
    assert all(param.grad is not None for param in module.parameters())
    closed = adamw(module)
    closed.hook_gradients()
    closed.close()
    backward(module, 0)
    assert all(param.grad is not None for param in module.parameters())


def test_gradients_on_the_host_are_not_lost_with_the_param_groups():
    module = models.perceptron()
    optimizer = adamw(module)
    optimizer.hook_gradients()
    backward(module, 0)
    with pytest.raises(abi.InvalidStateError, match="gradients have been taken off their params and would be lost"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(1))]})
    assert len(optimizer.param_groups) == 1
    with pytest.raises(abi.InvalidStateError, match="gradients have been taken off their params and would be lost"):
        optimizer.close()
    optimizer.step()
    optimizer.close()


def scaled_training(module, optimizer, scaler, steps=6, overflow_at=2):
    """Makes steps of two micro-batches; one micro-batch of one step has an infinity. Returns the bits and the scale
    after each step."""
    seen = []
    for step in range(steps):
        for micro_batch in range(2):
            scale = float(scaler.scale(torch.ones(())))
            backward(module, 10 * step + micro_batch, torch.inf if step == overflow_at else scale)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        seen.append((scaler.get_scale(), models.bits(module.parameters())))
    return seen


def scaler_of():
    return torch.amp.GradScaler("cpu", init_scale=128.0, growth_interval=2)


@pytest.mark.usefixtures("some_stay")
def test_grad_scaler_is_told_what_a_step_with_hooks_has_found():
    module, optimizer, other, plain = pair(max_grad_norm=0.5)
    scaler = scaler_of()
    optimizer.hook_gradients(grad_scaler=scaler, micro_batches=2)
    seen = scaled_training(module, optimizer, scaler)
    assert seen == scaled_training(other, plain, scaler_of())
    assert [scale for scale, _ in seen] == [128.0, 256.0, 128.0, 128.0, 256.0, 256.0]
    assert seen[2][1] == seen[1][1] != seen[3][1]
    assert optimizer.stats().steps_skipped == 1
    assert models.state_bits(optimizer) == models.state_bits(plain)


@pytest.mark.parametrize("hooked", [True, False])
def test_a_grad_scaler_that_cannot_be_told_is_refused_before_the_step(hooked):
    module = models.perceptron()
    optimizer = adamw(module, movable=ALL)
    if hooked:
        optimizer.hook_gradients()
    scaler = scaler_of()
    before = models.bits(module.parameters())
    backward(module, 0, float(scaler.scale(torch.ones(()))))
    if not hooked:
        optimizer.offload(grads=True)
    with pytest.raises(
        abi.InvalidStateError,
        match=r"GradScaler cannot look for Inf .* hook_gradients\(grad_scaler=...\), or call reload",
    ):
        scaler.step(optimizer)
    assert models.bits(module.parameters()) == before
    with pytest.raises(TypeError, match="grad_scaler is a float, expected the torch.amp.GradScaler"):
        adamw(module).hook_gradients(grad_scaler=128.0)


@pytest.mark.usefixtures("some_stay")
def test_unscaling_gradients_that_hooks_have_taken_is_refused():
    module = models.perceptron()
    optimizer = adamw(module)
    scaler = scaler_of()
    optimizer.hook_gradients(grad_scaler=scaler)
    before = models.bits(module.parameters())
    backward(module, 0, float(scaler.scale(torch.ones(()))))
    scaler.unscale_(optimizer)
    with pytest.raises(abi.InvalidStateError, match=r"leave unscale_\(\) out.*clip by max_grad_norm"):
        scaler.step(optimizer)
    assert models.bits(module.parameters()) == before


def test_gradients_that_were_unscaled_and_then_offloaded_are_stepped():
    module, optimizer, other, plain = pair(movable=ALL)
    for each, its_optimizer in ((module, optimizer), (other, plain)):
        scaler = scaler_of()
        backward(each, 0, float(scaler.scale(torch.ones(()))))
        scaler.unscale_(its_optimizer)
        if its_optimizer is optimizer:
            optimizer.offload(grads=True)
        scaler.step(its_optimizer)
        scaler.update()
    assert models.bits(module.parameters()) == models.bits(other.parameters())


def test_a_step_that_another_rank_has_skipped_uses_up_gradients_on_the_host():
    module = models.perceptron()
    optimizer = adamw(module)
    optimizer.hook_gradients(grad_scaler=scaler_of())
    backward(module, 0)
    optimizer.found_inf, optimizer.grad_scale = torch.ones(()), torch.ones(())
    optimizer.step()
    assert optimizer.stats().grads_bytes.host == 0


def test_params_that_are_unfrozen_under_hooks_are_hooked_too():
    module, optimizer, other, plain = pair()
    for each in (module, other):
        each[0].requires_grad_(False)
    optimizer.hook_gradients(accumulate=True)
    trained(module, optimizer), trained(other, plain)
    for each in (module, other):
        each[0].requires_grad_(True)
    for _ in range(2):
        trained(module, optimizer, 2), trained(other, plain, 2)
        backward(module, 0)
        assert all(param.grad is None for param in module.parameters())
        optimizer.zero_grad()
    assert models.bits(module.parameters()) == models.bits(other.parameters())
    assert models.state_bits(optimizer) == models.state_bits(plain)


def test_params_that_are_unfrozen_in_the_middle_of_a_step_are_refused_until_it_is_over():
    module, optimizer, other, plain = pair()
    for each in (module, other):
        each[0].requires_grad_(False)
    optimizer.hook_gradients(accumulate=True)
    backward(module, 0), backward(other, 0)
    module[0].requires_grad_(True)
    backward(module, 1), backward(other, 1)
    before = models.bits(module.parameters())
    with pytest.raises(
        abi.InvalidStateError,
        match=r"'param_groups.0.0' has been added or unfrozen, but gradients have been taken off their params and would "
        r"be lost; step\(\) without that first, or drop the gradients with zero_grad\(\)",
    ):
        optimizer.step()
    assert models.bits(module.parameters()) == before
    module[0].requires_grad_(False)  # the first solution
    for param in module[0].parameters():
        param.grad = None
    optimizer.step(), plain.step()
    assert models.bits(module.parameters()) == models.bits(other.parameters())
    backward(module, 2)
    module[0].requires_grad_(True)
    optimizer.zero_grad()  # the second solution
    backward(module, 3)
    optimizer.step()
    assert len(optimizer.state) == 4


def test_a_first_momentum_under_hooks_gets_its_buffers():
    module = models.perceptron()
    other = copy.deepcopy(module)
    optimizer, plain = (hybridopt.SGD(each.parameters(), lr=0.1) for each in (module, other))
    optimizer.hook_gradients()
    for momentum in (0.0, 0.9):
        for each in (optimizer, plain):
            each.param_groups[0]["momentum"] = momentum
        trained(module, optimizer), trained(other, plain)
    assert models.bits(module.parameters()) == models.bits(other.parameters())
    assert len(optimizer.state) == 4


# -------------------------------------------------------------------------------------- phases --


def storages(module):
    return sum(param.untyped_storage().nbytes() for param in module.parameters())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_everything_goes_and_comes_back_bit_for_bit(dtype):
    module, optimizer, other, plain = pair(dtype, movable=ALL)
    for _ in range(2):
        trained(module, optimizer, steps=2), trained(other, plain, steps=2)
        backward(module, 5), backward(other, 5)
        held = storages(module)
        before = models.bits(module.parameters())
        gradients = models.bits([param.grad for param in module.parameters()])
        with optimizer.offloaded():
            assert storages(module) == 0
            assert all(param.grad is None for param in module.parameters())
            assert optimizer.stats().params_bytes.host == held
            assert optimizer.stats().params_bytes.device == 0
        assert models.bits(module.parameters()) == before
        assert models.bits([param.grad for param in module.parameters()]) == gradients
        optimizer.step(), plain.step()
        assert models.bits(module.parameters()) == models.bits(other.parameters())
    assert models.state_bits(optimizer) == models.state_bits(plain)


def test_states_leave_without_a_look_at_params(monkeypatch):
    """A program may have moved its params to another device by torch before."""
    module, optimizer, other, plain = pair(movable=("states",))
    for seed in range(2):
        for each, own in ((module, optimizer), (other, plain)):
            backward(each, seed)
            own.step()
        with monkeypatch.context() as patch:
            patch.setattr(type(optimizer._engine.bound), "bind_params", lambda bound: pytest.fail("params were bound"))
            optimizer.offload(states=True)
        optimizer.reload(states=True)
    assert models.bits(module.parameters()) == models.bits(other.parameters())


@pytest.mark.parametrize("states", [True, False])
def test_a_step_over_offloaded_params_names_the_way_out(states):
    module, optimizer, other, plain = pair(movable=ALL)
    for each in (module, other):
        trained(each, optimizer if each is module else plain, steps=1)
        backward(each, 5)
    text = (
        r"'param_groups.0.0' has its content on the host, .* call optimizer.reload\(params=True\) before step\(\), or step\(\) after "
        r"the block of `with optimizer.offloaded\(\):`"
    )
    with optimizer.offloaded(states=states):
        with pytest.raises(abi.InvalidStateError, match=text):
            optimizer.step()
    optimizer.step(), plain.step()
    assert models.bits(module.parameters()) == models.bits(other.parameters())
    assert models.state_bits(optimizer) == models.state_bits(plain)


def test_a_new_optimizer_names_params_that_another_one_has_put_on_the_host():
    module, optimizer, _, _ = pair(movable=ALL)
    trained(module, optimizer, steps=1)
    second = hybridopt.AdamW(module.named_parameters())
    for param in module.parameters():
        param.grad = torch.zeros(param.shape)
    with optimizer.offloaded(grads=False, states=False):
        with pytest.raises(abi.InvalidStateError, match=r"'0.weight' has its content on the host, .*reload\(params=True\)"):
            second.step()
    second.step()


def test_params_whose_optimizer_has_ended_while_they_were_away_can_be_given_new_content():
    module, optimizer, other, plain = pair(movable=ALL)
    trained(module, optimizer, steps=1), trained(other, plain, steps=1)
    saved = copy.deepcopy(other.state_dict())
    name, first = next(module.named_parameters())
    optimizer.offload(params=True)
    view = first.detach()
    with pytest.raises(abi.InvalidStateError, match=r"call optimizer.reload\(params=True\) before"):
        first.data = torch.zeros_like(first)
    del optimizer
    gc.collect()
    lost = (
        r"has lost its content: the optimizer whose offload\(params=True\) had put it on the host has ended without "
        r"reload\(params=True\); give it new content with module.load_state_dict\(state, assign=True\) or param.data = tensor$"
    )
    for used, by in ((first, "sum"), (view, "sum")):
        with pytest.raises(abi.InvalidStateError, match=f"^parameter .*, which is used by '{by}', {lost}"):
            used.sum()
    with pytest.raises(RuntimeError, match=r"used by 'copy_', has lost its content"):
        module.load_state_dict(saved)
    second = hybridopt.AdamW(module.parameters())  # looks at params in its first step
    for param in module.parameters():
        param.grad = torch.zeros(param.shape)
    with pytest.raises(abi.InvalidStateError, match=f"^parameter '.*' {lost}"):
        second.step()
    with pytest.raises(abi.InvalidStateError, match=f"used by 'data', {lost}"):
        first.data = next(param for param in module.parameters() if param is not first)
    first.data = saved[name].clone()
    assert models.bits([first]) == models.bits([saved[name]])
    module.load_state_dict(saved, assign=True)
    assert models.bits(module.parameters()) == models.bits(other.parameters())


def test_offloaded_gradients_are_stepped_where_they_are():
    module, optimizer, other, plain = pair(movable=ALL, max_grad_norm=0.1)
    backward(module, 0), backward(other, 0)
    optimizer.offload(grads=True)
    assert all(param.grad is None for param in module.parameters())
    optimizer.step(), plain.step()
    assert models.bits(module.parameters()) == models.bits(other.parameters())


def test_params_in_one_buffer_come_back_with_what_lies_between_them():
    buffer = torch.arange(20, dtype=torch.float32)
    params = [nn.Parameter(buffer[2:7]), nn.Parameter(buffer[9:15])]
    optimizer = hybridopt.SGD(params, lr=1.0, movable=["params"], threads=1)
    for param in params:
        param.grad = torch.ones_like(param)
    optimizer.step()
    before = buffer.tolist()
    optimizer.offload(params=True)
    assert buffer.untyped_storage().nbytes() == 0
    optimizer.reload(params=True)
    assert buffer.tolist() == before
    optimizer.step()
    assert params[1].tolist() == [value - 2 for value in range(9, 15)]


def test_moving_twice_is_moving_once():
    module, optimizer, other, plain = pair(movable=ALL)
    backward(module, 0), backward(other, 0)
    for _ in range(2):
        optimizer.offload(params=True, states=True)
    for _ in range(2):
        optimizer.reload(params=True, states=True)
    optimizer.step(), plain.step()
    assert models.bits(module.parameters()) == models.bits(other.parameters())


def test_weights_loaded_before_and_after_a_phase_are_the_next_steps():
    module, optimizer, other, plain = pair(torch.bfloat16, movable=ALL)
    trained(module, optimizer), trained(other, plain)
    loaded = models.perceptron(torch.bfloat16).state_dict()
    for each in (module, other):
        each.load_state_dict({name: value + 1 for name, value in loaded.items()})
    with optimizer.offloaded(grads=False):
        pass
    with torch.no_grad():
        module[0].bias.fill_(3), other[0].bias.fill_(3)
    assert trained(module, optimizer) == trained(other, plain)
    assert models.bits(module.parameters()) == models.bits(other.parameters())


def test_what_is_out_cannot_be_stepped():
    module = models.perceptron()
    optimizer = adamw(module, movable=ALL)
    backward(module, 0)
    optimizer.offload(params=True)
    with pytest.raises(abi.InvalidStateError, match=r"has its content on the host, .* call optimizer.reload\(params=True\)"):
        optimizer.step()
    with pytest.raises(abi.InvalidStateError, match="params or states are offloaded; call reload"):
        optimizer.close()
    optimizer.reload(params=True)
    optimizer.offload(states=True)
    with pytest.raises(abi.InvalidStateError, match=r"call reload\(states=True\) first"):
        optimizer.step()
    optimizer.reload(states=True)
    optimizer.step()


def test_a_second_gradient_beside_one_on_the_host_is_refused():
    module = models.perceptron()
    optimizer = adamw(module, movable=ALL)
    backward(module, 0)
    optimizer.offload(grads=True)
    backward(module, 1)
    taken = (
        r"^the gradient of parameter 'param_groups.0.0' has been taken off it by hook_gradients\(\) or offload\(grads=True\), and there "
        r"is another one now; drop both with zero_grad\(\), or drop the one that is with the parameter by setting its grad "
        "to None$"
    )
    for call in (optimizer.step, lambda: optimizer.reload(grads=True), lambda: optimizer.offload(grads=True)):
        with pytest.raises(abi.InvalidStateError, match=taken):
            call()
    for param in module.parameters():
        param.grad = None
    optimizer.step()
    assert optimizer.stats().steps_applied == 1


class OnTheCpu(KeptAddresses):
    """Memory of the CPU stands for the pool. When it is given up, its content is lost."""

    has_room = True

    def __init__(self, context, device):
        self.device = device
        self._inside = {}

    def release(self):
        for ref, _ in self._inside.values():
            if not ref.expired():
                bytes_of(torch.UntypedStorage._new_with_weak_ptr(ref.cdata)).fill_(255)

    def take(self):
        if not self.has_room:
            raise abi.OutOfDeviceMemoryError("there is no room")

    def _take_inside(self, storage, count):
        storage.resize_(count)

    def _synchronize(self):
        pass


@pytest.fixture
def on_the_cpu(monkeypatch):
    monkeypatch.setattr(making, "KeptAddresses", OnTheCpu)
    monkeypatch.setattr(making, "_check_device", lambda options, device: None)


def addresses(params):
    return [param.data_ptr() for param in params]


def test_params_come_back_at_their_addresses(on_the_cpu, monkeypatch):
    """With views, a tied param, and other content in the same memory."""
    module, optimizer, other, plain = pair(movable=ALL, keep_addresses=True)
    buffer = torch.arange(12, dtype=torch.float32)
    params = [nn.Parameter(buffer[2:5]), nn.Parameter(buffer[7:11])]
    shared = hybridopt.SGD(params, lr=1.0, movable="params", keep_addresses=True, threads=1)
    shared.materialize(), optimizer.materialize()
    kept = addresses([*module.parameters(), buffer, *params])
    view = next(module.parameters())[1:]
    for step in range(3):
        for each in (module, other):
            backward(each, step)
        for param in params:
            param.grad = torch.ones_like(param)
        for each in (optimizer, plain, shared):
            each.step(), each.zero_grad()
        expected = [value - (step + 1 if 2 <= value < 5 or 7 <= value < 11 else 0) for value in range(12)]
        shared.offload(params=True)
        with optimizer.offloaded():
            assert buffer.untyped_storage().nbytes() == 48 and buffer.isnan().all()
            with pytest.raises(abi.InvalidStateError, match="while its content is on the host"):
                module(torch.ones(2, 10))
        with monkeypatch.context() as patched:
            patched.setattr(OnTheCpu, "has_room", False)
            with pytest.raises(abi.OutOfDeviceMemoryError):
                shared.reload(params=True)
        with pytest.raises(abi.InvalidStateError, match="while its content is on the host"):
            params[0].sum()
        shared.reload(params=True)
        assert buffer.tolist() == expected
        assert addresses([*module.parameters(), buffer, *params]) == kept
        assert models.bits(module.parameters()) == models.bits(other.parameters())
        assert torch.equal(view, next(module.parameters())[1:])


def test_addresses_stay_when_params_come_and_go(on_the_cpu):
    params = [nn.Parameter(torch.full((5,), float(index))) for index in range(4)]
    optimizer = hybridopt.SGD(params[:2], lr=1.0, movable="params", keep_addresses=True, threads=1)
    optimizer.materialize()
    kept = addresses(params[:2])
    optimizer.add_param_group({"params": params[2:]})
    optimizer.materialize()
    assert addresses(params[:2]) == kept
    optimizer.param_groups[0]["params"] = params[1:2]  # params[0] leaves, and stays in the pool
    params[1].data = torch.full((5,), 10.0)
    kept = addresses(params)
    with optimizer.offloaded(grads=False, states=False):
        assert params[0].isnan().all()
    assert [param.tolist() for param in params] == [[value] * 5 for value in (0.0, 10.0, 2.0, 3.0)]
    assert addresses([params[0], *params[2:]]) == [kept[0], *kept[2:]]
    kept = addresses(params)  # params[1], which the program has replaced, keeps an address from now on
    with optimizer.offloaded(grads=False, states=False):
        pass
    assert addresses(params) == kept


@pytest.mark.parametrize("error", [KeyboardInterrupt, torch.OutOfMemoryError])
def test_a_move_to_kept_addresses_that_fails_loses_nothing(error, on_the_cpu, monkeypatch):
    module, optimizer, other, plain = pair(movable=ALL, keep_addresses=True)
    for each in (module, other):
        backward(each, 0)
    calls = []

    def fail(self, storage, count):
        calls.append(count)
        if len(calls) == 2:
            raise error
        storage.resize_(count)

    with monkeypatch.context() as patched:
        patched.setattr(OnTheCpu, "_take_inside", fail)
        with pytest.raises(error):
            optimizer.step()
    assert models.bits(module.parameters()) == models.bits(other.parameters())
    optimizer.step(), plain.step()
    with optimizer.offloaded():
        pass
    assert models.bits(module.parameters()) == models.bits(other.parameters())


def test_addresses_are_kept_where_params_move_and_on_a_gpu():
    with pytest.raises(ValueError, match=r"keep_addresses=True with movable=\('states',\): .*leave keep_addresses out"):
        adamw(models.perceptron(), keep_addresses=True, movable="states")
    optimizer = adamw(models.perceptron(), keep_addresses=True, movable="params")
    with pytest.raises(ValueError, match="keep_addresses=True with parameters on the CPU: .* move the model to the GPU"):
        optimizer.materialize()


def test_what_has_no_room_is_refused_with_the_option_to_set():
    module = models.perceptron()
    optimizer = adamw(module, movable=["grads"])
    with pytest.raises(abi.InvalidStateError, match=r"no room on the host for params; .*movable="):
        optimizer.offload(params=True)
    with pytest.raises(ValueError, match="Invalid movable: 'weights', expected some of params"):
        adamw(module, movable=["weights"])
    with pytest.raises(abi.InvalidStateError, match="nothing to move"):
        hybridopt.SGD([torch.ones(1)], lr=1.0, movable=["params"]).offload(params=True)


def test_decoupled_gradients_are_used_and_cleared():
    module, optimizer, other, plain = pair(torch.bfloat16, movable=["grads"])
    for param in module.parameters():
        param.decoupled_grad = None
    with optimizer.hook_gradients():  # hooks use .grad only
        backward(module, 0)
    for seed in range(3):
        models.set_gradients(other.parameters(), seed)
        for param, its in zip(module.parameters(), other.parameters()):
            param.decoupled_grad = its.grad.clone()
            param.grad = torch.full_like(param, float("nan"))  # never read
        if seed == 1:
            optimizer.offload(grads=True)
            assert all(param.decoupled_grad is None for param in module.parameters())
            optimizer.reload(grads=True)
        optimizer.step(), plain.step()
        assert models.bits(module.parameters()) == models.bits(other.parameters())
    optimizer.zero_grad()
    assert all(param.decoupled_grad is None for param in module.parameters())
    before = models.bits(module.parameters())
    optimizer.step()
    assert models.bits(module.parameters()) == before


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_resumed_run_does_not_round_decoupled_gradients(tmp_path, dtype):
    """The state exists before the first gradient shows the dtype of gradients."""

    def train(optimizer, param, seeds):
        for seed in seeds:
            generator = torch.Generator().manual_seed(seed)
            param.decoupled_grad = torch.randn(50, generator=generator).to(dtype)
            optimizer.step()

    def made(options={}):
        param = torch.nn.Parameter(torch.ones(50, dtype=torch.bfloat16))
        other = torch.nn.Parameter(torch.ones(5, dtype=torch.bfloat16))
        named = [("weight", param), ("other", other)]
        return param, hybridopt.AdamW(named, lr=0.05, threads=1, **options)

    param, optimizer = made()
    train(optimizer, param, [0, 1])
    optimizer.save_checkpoint(tmp_path / "there")
    train(optimizer, param, [2, 3])
    resumed, again = made({"movable": ["grads"]})
    again.load_checkpoint(tmp_path / "there")
    train(again, resumed, [2, 3])
    states = [each.state[each.param_groups[0]["params"][0]] for each in (optimizer, again)]
    assert models.bits(states[0].values()) == models.bits(states[1].values())
    assert models.bits([param]) == models.bits([resumed])
    # Room for gradients of a dtype stays once they have been seen, even if there are no gradients when state moves to
    # new memory.
    del resumed.decoupled_grad
    again.add_param_group({"params": [("new", torch.nn.Parameter(torch.ones(3)))]})
    again.offload()
    assert again._engine.slots[0].grad_dtype == torch.float32


class Fp32Gradient(torch.autograd.Function):
    """The sum of a param times the tensor that its gradient shall be."""

    @staticmethod
    def forward(context, param, grad):
        context.save_for_backward(grad)
        return (param * grad).sum()

    @staticmethod
    def backward(context, _):
        return context.saved_tensors[0], None


tells_grad_dtype = pytest.mark.skipif(
    not hasattr(torch.Tensor, "grad_dtype"), reason="this torch has no Tensor.grad_dtype"
)


@tells_grad_dtype
@pytest.mark.parametrize("declared", ["before", "between", "any"])
def test_hooks_do_not_round_gradients_that_autograd_makes_in_fp32(declared):
    params = [torch.nn.Parameter(torch.ones(50, dtype=torch.bfloat16)) for _ in range(4)]
    optimizers = [hybridopt.AdamW(each, lr=0.05, threads=1) for each in (params[:2], params[2:])]
    if declared != "between":
        for param in params:
            param.grad_dtype = None if declared == "any" else torch.float32
    optimizers[0].hook_gradients(accumulate=False)
    for step, grad in enumerate(torch.randn(4, 50)):
        for optimizer in optimizers:
            optimizer.zero_grad()
        for param in params if declared == "between" and step == 2 else ():
            param.grad_dtype = torch.float32
        for pair, optimizer in zip((params[:2], params[2:]), optimizers):
            sum(Fp32Gradient.apply(param, grad) for param in pair).backward()
            optimizer.step()
    masters = [[opt.state[p]["master_param"] for p in opt.param_groups[0]["params"]] for opt in optimizers]
    assert models.bits(masters[0]) == models.bits(masters[1])


@tells_grad_dtype
def test_gradients_that_get_wider_in_the_middle_of_a_step_are_refused_under_hooks():
    params = [torch.nn.Parameter(torch.ones(50, dtype=torch.bfloat16)) for _ in range(2)]
    optimizer = hybridopt.AdamW([("left", params[0]), ("right", params[1])], lr=0.05, threads=1)
    optimizer.hook_gradients()
    grad = torch.randn(50)
    Fp32Gradient.apply(params[0], grad).backward()
    params[1].grad_dtype = torch.float32
    with pytest.raises(
        abi.InvalidStateError,
        match=r"'right' is torch.float32 and would be rounded to torch.bfloat16, .* set grad_dtype of "
        r"the parameter between step\(\) and the next backward pass, or drop .* zero_grad",
    ):
        Fp32Gradient.apply(params[1], grad).backward()
    optimizer.zero_grad()
    for param in params:
        Fp32Gradient.apply(param, grad).backward()
    optimizer.step()
    assert torch.equal(optimizer.state[params[1]]["exp_avg"], torch.zeros(50).lerp(grad, 0.1))
    assert optimizer._engine.slots[1].grad_dtype == torch.float32


# ------------------------------------------------------------------------------------ timeline --


def test_the_timeline_says_who_held_what():
    module = models.perceptron()
    optimizer = adamw(module, movable=ALL)
    assert optimizer.memory_timeline() == []
    backward(module, 0)
    optimizer.step()
    with optimizer.offloaded():
        pass
    samples = optimizer.memory_timeline()
    _, stepped, out, back = samples
    assert [sample.label for sample in samples] == ["gradients", "step", "offload", "reload"]
    held = sum(4 * param.numel() for param in module.parameters())
    assert stepped.params_bytes.device == out.params_bytes.host == held
    assert stepped.params_bytes.host == out.params_bytes.device == 0
    assert out.grads_bytes.host == back.grads_bytes.device == held
    assert out.grads_bytes.device == back.grads_bytes.host == 0
    assert stepped.state_bytes.host == 2 * held
    assert stepped.seconds <= out.seconds <= back.seconds


def test_what_was_done_is_told_of_whatever_moves_the_state(tmp_path):
    module = models.perceptron()
    *first, last = list(module.named_parameters())
    frozen = torch.nn.Parameter(torch.ones(4), requires_grad=False)
    optimizer = hybridopt.AdamW([*first, ("frozen", frozen)], movable=ALL, threads=1)
    with pytest.raises(abi.InvalidStateError, match="no step yet; call step"):
        optimizer.last_step()

    def stepped(expected):
        for param in (param for group in optimizer.param_groups for param in group["params"]):
            if param.requires_grad:
                (param.sum() * 2.0).backward()
        optimizer.step()
        optimizer.zero_grad()
        assert optimizer.last_step().step == expected
        assert optimizer.stats().steps_applied == expected
        results = optimizer.step_results()
        assert [result.step for result in results] == list(range(1, expected + 1))
        assert optimizer.stats().total_seconds == pytest.approx(
            sum(result.total_seconds for result in results)
        )
        samples = optimizer.memory_timeline()
        assert [sample.label for sample in samples].count("step") == expected
        assert all(one.seconds <= two.seconds for one, two in zip(samples, samples[1:]))

    stepped(1)
    with optimizer.offloaded(params=False, grads=False):
        pass
    offloaded_bytes = optimizer.stats().offloaded_bytes
    optimizer.add_param_group({"params": [last]})
    stepped(2)
    frozen.requires_grad_()
    stepped(3)
    assert optimizer.last_step().step == 3  # even if the engine has not stepped
    optimizer.hook_gradients()
    assert optimizer.last_step().step == 3 and optimizer.stats().steps_applied == 3
    stepped(4)
    assert optimizer.stats().offloaded_bytes >= offloaded_bytes
    optimizer.save_checkpoint(tmp_path / "saved")
    stepped(5)
    optimizer.load_checkpoint(tmp_path / "saved")
    copied = copy.deepcopy(optimizer)
    assert copied.step_results() == [] and copied.stats().steps_applied == 0
    last[1].grad = torch.full_like(last[1], float("inf"))
    optimizer.step()
    assert optimizer.last_step().skipped
    last[1].grad = None
    optimizer.add_param_group({"params": [("new", torch.nn.Parameter(torch.ones(2)))]})
    optimizer.plan(), optimizer.save_checkpoint(tmp_path / "again")  # with a new engine
    assert optimizer.last_step().skipped and optimizer.stats().steps_skipped == 1
    optimizer.close()
    assert optimizer.stats().steps_applied == 5 and optimizer.stats().host_bytes == 0


def test_the_timeline_is_a_picture(tmp_path):
    module = models.perceptron()
    optimizer = adamw(module, movable=ALL)
    with pytest.raises(RuntimeError, match=r"nothing to plot yet; call step\(\) first"):
        optimizer.plot_timeline(tmp_path / "timeline.png")
    assert optimizer.step_results() == []
    trained(module, optimizer)
    backward(module, 0)
    with optimizer.offloaded():
        time.sleep(0.1)
    assert [result.step for result in optimizer.step_results()] == [1, 2, 3, 4]
    optimizer.plot_timeline(tmp_path / "timeline.png")
    pixels = matplotlib.image.imread(tmp_path / "timeline.png")
    assert pixels.shape[:2] == (960, 1200)
    for color in hybridopt.steps.timeline_plot.COLORS:  # each kind of memory is visible
        rgb = torch.tensor([int(color[i : i + 2], 16) / 255 for i in (1, 3, 5)])
        near = (torch.from_numpy(pixels[..., :3]) - rgb).abs().amax(-1) < 0.01
        assert int(near.sum()) > 2000, color  # more pixels than the legends have


def test_plots_without_matplotlib_say_what_to_install(monkeypatch, tmp_path):
    module = models.perceptron()
    optimizer = adamw(module)
    trained(module, optimizer)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match=r"pip install 'hybridopt\[plots\]'"):
        optimizer.plot_timeline(tmp_path / "timeline.png")


# ----------------------------------------------------------------------------------------- traces --


def trained_in_trace(path=None, steps=3, **options):
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(40, 30), nn.Linear(30, 3))
    optimizer = hybridopt.AdamW(model.parameters(), lr=1e-2, threads=2, **options)

    def train():
        for _ in range(steps):
            model(torch.randn(4, 40)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()

    if path is None:
        train()
        optimizer.close()
        return [models.bits([param]) for param in model.parameters()], None
    with optimizer.trace(path) as trace:
        train()
    optimizer.close()
    return [models.bits([param]) for param in model.parameters()], trace


def traced_events(path):
    events = json.loads(path.read_text())["traceEvents"]
    rows = {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}
    return [
        (rows[event["tid"]], event["name"], event["args"]["step"])
        for event in events
        if event["ph"] == "X"
    ]


def test_a_trace_has_each_step_and_changes_no_bit(tmp_path):
    path = tmp_path / "step.json"
    traced, trace = trained_in_trace(path)
    assert trace.dropped == 0
    untraced, _ = trained_in_trace()
    assert traced == untraced
    events = traced_events(path)
    assert [step for _, name, step in events if name == "step"] == [1, 2, 3]
    # Updates that are too small to be shared are all done as worker 0.
    assert [event for event in events if event[0].startswith("worker")] == [
        ("worker 0", "update", step) for step in (1, 2, 3)
    ]
    told = json.loads(path.read_text())["otherData"]
    assert (told["library"], told["dropped_events"]) == ("hybridopt", 0)


def test_overlap_and_a_save_are_in_the_picture(tmp_path):
    model = nn.Linear(40, 30)
    optimizer = hybridopt.AdamW(model.parameters(), lr=1e-2, threads=2, overlap=model)
    with optimizer.trace(tmp_path / "step.json"):
        for _ in range(3):
            model(torch.randn(4, 40)).sum().backward()
            optimizer.step()
        optimizer.save_checkpoint(tmp_path / "saved")
    events = traced_events(tmp_path / "step.json")
    assert [step for _, name, step in events if name == "step"] == [1, 2, 3]
    assert [name for row, name, _ in events if row == "save"] == ["save"]
    optimizer.close()


def test_a_small_ring_tells_what_it_dropped(tmp_path):
    model = nn.Linear(4, 3)
    optimizer = hybridopt.AdamW(model.parameters(), threads=1)
    with optimizer.trace(tmp_path / "step.json", ring_bytes=4096) as trace:
        for _ in range(100):
            model(torch.randn(2, 4)).sum().backward()
            optimizer.step()
    assert trace.dropped > 0
    assert len(traced_events(tmp_path / "step.json")) <= 4096 // 40
    optimizer.close()


def test_wrong_uses_are_told(tmp_path):
    model = nn.Linear(4, 3)
    optimizer = hybridopt.AdamW(model.parameters(), threads=1)
    with pytest.raises(ValueError, match="Invalid ring_bytes: 'x', expected bytes"):
        optimizer.trace(tmp_path / "step.json", ring_bytes="x")
    with pytest.raises(abi.HybridoptError, match="ring_bytes is 5, expected 4096 to"):
        with optimizer.trace(tmp_path / "step.json", ring_bytes=5):
            pass
    for path, wrong in {
        tmp_path / "missing" / "step.json": "whose folder is not there; make it first",
        tmp_path: "a directory, expected the name of a file",
    }.items():
        with pytest.raises(abi.InvalidArgumentError, match=f"^path is '{path}', {wrong}, or give trace.. another path$"):
            with optimizer.trace(path):
                pytest.fail("the block has run")
    leaves = tmp_path / "leaves"
    leaves.mkdir()
    with pytest.raises(abi.HybridoptError, match="leaves/step.json'.*No such file.*give trace.. another path"):
        with optimizer.trace(leaves / "step.json"):
            leaves.rmdir()
    # An error of the block is not hidden by one of the trace, and neither ends the next trace.
    leaves.mkdir()
    with pytest.raises(ZeroDivisionError):
        with optimizer.trace(leaves / "step.json"):
            leaves.rmdir()
            1 / 0  # noqa: B018
    with optimizer.trace(tmp_path / "step.json"):
        with pytest.raises(abi.HybridoptError, match="leave its with statement first"):
            with optimizer.trace(tmp_path / "other.json"):
                pass
    assert (tmp_path / "step.json").exists() and not (tmp_path / "other.json").exists()
    with pytest.raises(abi.HybridoptError, match="late.json' ends early.*params were added"):
        with optimizer.trace(tmp_path / "late.json"):
            optimizer.add_param_group({"params": [nn.Parameter(torch.ones(3, requires_grad=True))]})
            model(torch.randn(2, 4)).sum().backward()
            optimizer.step()
    with pytest.raises(abi.HybridoptError, match="late.json' ends early.*was closed"):
        with optimizer.trace(tmp_path / "late.json"):
            optimizer.close()


def test_a_param_whose_memory_torch_cannot_free_is_named_before_anything_moves():
    named = {"a": nn.Parameter(torch.ones(3)), "b": nn.Parameter(torch.ones(4))}
    optimizer = hybridopt.AdamW(named.items(), movable=("params", "grads", "states"))
    models.run(optimizer, list(named.values()), [1])
    array = named["b"].detach().numpy()
    before = models.bits(named.values())
    with pytest.raises(abi.InvalidStateError, match=r"memory of parameter 'b' .* numpy\(\) .* param.data.clone\(\)"):
        optimizer.offload(params=True, states=True)
    assert models.bits(named.values()) == before and models.bits([torch.from_numpy(array)]) == before[1:]
    named["b"].data = named["b"].data.clone()
    with optimizer.offloaded():
        assert named["b"].untyped_storage().nbytes() == 0
    assert models.bits(named.values()) == before


def test_the_end_of_the_optimizer_waits_for_copies_of_its_hooks(monkeypatch):
    """A tensor of `state` that the program keeps also keeps the library's optimizer, which copies gradients."""
    model = nn.Sequential(*(nn.Linear(1024, 1024, bias=False) for _ in range(3)))
    optimizer = hybridopt.SGD(model.parameters(), lr=0.1, momentum=0.9, threads=1, max_grad_norm=None)
    optimizer.hook_gradients()
    optimizer.materialize()
    state, handle = optimizer.state[model[0].weight]["momentum_buffer"], optimizer._engine.handle
    waited = []
    drain = type(handle).drain
    monkeypatch.setattr(type(handle), "drain", lambda self, *rest: (waited.append(bool(in_flight)), drain(self, *rest)))
    model(torch.ones(2, 1024)).square().mean().backward()
    in_flight = optimizer._hooks._in_flight
    kept = [taken.storage for _, sent in in_flight for taken in sent]
    assert kept and all(storage.nbytes() for storage in kept)
    del optimizer
    gc.collect()
    assert waited[-1:] == [True] and not in_flight
    assert state.shape == (1024, 1024)
