"""Warnings about steps that are skipped because of Inf or NaN."""

import copy
import math
import re
import warnings

import pytest
import ranks
import torch
import torch.distributed as dist
from torch.nn import Parameter

import hybridopt
from hybridopt.steps.skips import MOST_NAMES
from models import bits, perceptron, run, set_gradients, state_bits

SKIPPED = "a step was skipped, and no parameter has changed, because of Inf or NaN in "
GONE = "a gradient that is gone: hook_gradients() or overlap() has taken it, leave them out to see the parameter's name"


def warned(call):
    """The warnings of a call, and the files that they point to."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        call()
    return [(str(each.message), each.filename) for each in caught]


def made(names, **options):
    params = [Parameter(torch.randn(3, 2)) for _ in names]
    return hybridopt.AdamW(list(zip(names, params)), **options), params


def step_with(optimizer, params, values):
    """Makes a step whose gradients contain these values."""
    set_gradients(params, 1)
    for param, value in zip(params, values):
        if value is not None:
            param.grad[1, 1] = value
    return warned(optimizer.step)


@pytest.mark.parametrize("clips", [{}, {"max_grad_norm": 1.0}], ids=str)
@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
def test_a_skipped_step_names_the_params(value, clips):
    optimizer, params = made("abcdef", **clips)
    ((text, file),) = step_with(optimizer, params, [None, value, None, value])
    assert text.startswith(f"{SKIPPED}the gradients of 'b', 'd'. The next warning comes after 2 skipped steps; stats()")
    assert file == __file__
    optimizer, params = made("abcdef", **clips)
    ((text, _),) = step_with(optimizer, params, [value] * 6)
    assert MOST_NAMES == 3 and f"{SKIPPED}the gradients of 'a', 'b', 'c' and 3 other parameters. The" in text


def test_it_warns_of_every_power_of_two_and_counts_all():
    optimizer, params = made("ab")
    told = {}
    for count in range(1, 18):
        found = step_with(optimizer, params, [math.nan])
        if found:
            told[count] = found[0][0]
        assert step_with(optimizer, params, []) == []  # a step in between that is not skipped
        assert optimizer.stats().steps_skipped == count
    assert list(told) == [1, 2, 4, 8, 16]
    assert "of 'a'. 8 steps have been skipped so far. The next warning comes after 16 skipped" in told[8]
    optimizer.add_param_group({"params": [("c", Parameter(torch.ones(2)))]})  # another engine continues the count
    assert step_with(optimizer, params, [math.nan]) == []
    assert optimizer.stats().steps_skipped == 18


def test_a_warning_that_is_an_error_leaves_everything_usable():
    (optimizer, params), (plain, own) = made("ab"), made("ab")
    for param, other in zip(params, own):
        param.data.copy_(other)
    set_gradients(params, 1)
    params[0].grad[0, 0] = math.inf
    with warnings.catch_warnings(), pytest.raises(UserWarning, match=re.escape(SKIPPED)):
        warnings.simplefilter("error")
        optimizer.step()
    assert optimizer.last_step().skipped
    for each, those in ((optimizer, params), (plain, own)):
        run(each, those, [2, 3])
    assert (bits(params), state_bits(optimizer)) == (bits(own), state_bits(plain))


def test_gradients_in_16_bits_and_without_elements():
    tensors = [torch.full((4,), 6e4).half(), torch.ones(3).bfloat16(), torch.ones(0, 2), torch.ones(2)]
    params = [Parameter(tensor) for tensor in tensors]
    optimizer = hybridopt.AdamW(list(zip("abcd", params)))
    for param in params:
        param.grad = torch.ones_like(param)
    params[0].grad[:2] = torch.tensor([6e4, -6e4])  # their difference is larger than the largest fp16 number
    params[1].grad[2] = math.nan
    ((text, _),) = warned(optimizer.step)
    assert f"{SKIPPED}the gradients of 'b'. The" in text


def backward(model, poisoned):
    loss = model(torch.randn(4, 10)).square().sum()
    if poisoned:
        loss = loss * math.inf
    loss.backward()


@pytest.mark.parametrize("hooked", [True, False])
def test_a_step_that_overlaps_is_told_before_the_next(hooked):
    model = perceptron()
    optimizer = hybridopt.AdamW(model.named_parameters(), max_grad_norm=None, overlap=model)
    if hooked:
        optimizer.hook_gradients()
    for poisoned in (False, True):
        backward(model, poisoned)
        assert warned(optimizer.step) == []
        optimizer.zero_grad()
    backward(model, False)
    ((text, file),) = warned(optimizer.step)
    named = "the gradients of '0.weight', '0.bias', '2.weight' and 1 other parameter."
    assert SKIPPED + (f"{GONE}." if hooked else named) in text and file == __file__
    assert optimizer.stats().steps_skipped == 1


def test_the_last_step_is_told_by_synchronize():
    model = perceptron()
    optimizer = hybridopt.AdamW(model.named_parameters(), overlap=model)
    for poisoned in (False, True):
        backward(model, poisoned)
        optimizer.step()
    ((text, _),) = warned(optimizer.synchronize)
    assert "the gradients of '0.weight', '0.bias'" in text


def test_gradients_that_hooks_have_taken_cannot_be_named():
    model = perceptron()
    optimizer = hybridopt.AdamW(model.named_parameters(), max_grad_norm=1.0)
    optimizer.hook_gradients()
    backward(model, True)
    ((text, _),) = warned(optimizer.step)
    assert text.startswith(f"{SKIPPED}{GONE}. The next")


@pytest.mark.parametrize("hooked", [True, False])
def test_a_grad_scaler_looks_for_its_scale_without_a_warning(hooked):
    model = perceptron()
    optimizer = hybridopt.AdamW(model.named_parameters(), max_grad_norm=1.0)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    if hooked:
        optimizer.hook_gradients(grad_scaler=scaler)
    for poisoned in (False, True, False, True):
        loss = model(torch.randn(4, 10)).square().sum() * (math.inf if poisoned else 1.0)
        scaler.scale(loss).backward()
        assert warned(lambda: scaler.step(optimizer)) == []
        scaler.update()
        optimizer.zero_grad()
    assert scaler.get_scale() == 1.0
    assert (optimizer.stats().steps_applied, optimizer.stats().steps_skipped) == (2, 2)


def on_one_of_two_ranks(rank, world):
    param = Parameter(torch.ones(4))
    optimizer = hybridopt.AdamW([(f"of_{rank}", param)], process_group=dist.group.WORLD, threads=1)
    param.grad = torch.full((4,), math.nan if rank == 0 else 1.0)
    ((text, _),) = warned(optimizer.step)
    assert optimizer.last_step().skipped
    return text


def test_a_rank_names_its_own_params_and_says_that_it_was_another_ranks():
    texts = ranks.run(on_one_of_two_ranks, 2)
    assert texts[0].startswith(f"{SKIPPED}the gradients of 'of_0'. The next")
    assert texts[1].startswith(f"{SKIPPED}a gradient of another rank. The next")


def test_copies_count_for_themselves():
    optimizer, params = made("a")
    assert len(step_with(optimizer, params, [math.nan])) == 1
    other = copy.deepcopy(optimizer)
    assert len(step_with(other, other.param_groups[0]["params"], [math.nan])) == 1
