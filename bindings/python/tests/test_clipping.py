"""Who clips gradients that hooks have taken off their params is told, instead of a norm of 0.0."""

import pytest
import ranks
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

import hybridopt
from hybridopt import abi
from models import bits, perceptron

REFUSED = (
    r"clip_grad_norm_\(\) and its like find no gradients after the backward pass, since hook_gradients\(\) has taken them"
    r".*leave the call out: {}, and optimizer.last_step\(\).grad_norm tells the norm after it"
)
STEP_CLIPS, ASSIGN = "the step clips to 0.5", "assign optimizer.max_grad_norm, by which the step clips"


def made(**options):
    torch.manual_seed(0)
    model = perceptron()
    optimizer = hybridopt.AdamW(model.named_parameters(), **options)
    return model, optimizer


def backward(model, seed=1):
    torch.manual_seed(seed)
    model(torch.randn(4, 10)).square().sum().backward()


CLIPPERS = {
    "norm": lambda params: nn.utils.clip_grad_norm_(params, 0.5),
    "value": lambda params: nn.utils.clip_grad_value_(params, 0.5),
    "list": lambda params: nn.utils.clip_grad_norm_(list(params), 0.5, foreach=False),
}


@pytest.mark.parametrize("norm", [0.5, None])
@pytest.mark.parametrize("clip", CLIPPERS.values(), ids=CLIPPERS)
def test_clipping_after_hooks_is_refused_and_the_step_goes_on(clip, norm):
    (model, optimizer), (other, plain) = made(max_grad_norm=norm), made(max_grad_norm=norm)
    optimizer.hook_gradients()
    for seed in (1, 2):
        backward(model, seed)
        backward(other, seed)
        with pytest.raises(abi.InvalidStateError, match=REFUSED.format(ASSIGN if norm is None else STEP_CLIPS)):
            clip(model.parameters())
        for each in (optimizer, plain):
            each.step()
            each.zero_grad()
        assert optimizer.last_step().grad_norm == plain.last_step().grad_norm > 0.0
    assert bits(model.parameters()) == bits(other.parameters())
    assert {type(param) for param in model.parameters()} == {nn.Parameter}


def test_who_clips_without_hooks_or_before_the_last_pass_does_so():
    model, optimizer = made(max_grad_norm=None)
    hooks = optimizer.hook_gradients(micro_batches=2)
    backward(model)
    assert nn.utils.clip_grad_norm_(model.parameters(), 0.5) > 0.0  # these are gradients of half of a step
    backward(model)
    optimizer.step()
    hooks.remove()
    backward(model)
    assert nn.utils.clip_grad_norm_(model.parameters(), 0.5) > 0.0
    optimizer.step()


def test_others_may_look_at_gradients_and_params():
    model, optimizer = made(max_grad_norm=1.0)
    optimizer.hook_gradients()
    backward(model)
    x = torch.ones(1, 10)
    assert torch.equal(model(x), model(x)) and model.state_dict()["0.weight"].sum() != 0
    assert all(param.grad is None for param in model.parameters())
    model.zero_grad()
    optimizer.step()
    assert optimizer.stats().steps_applied == 1
    backward(model)
    optimizer.zero_grad()
    optimizer.step()
    assert optimizer.stats().steps_applied == 1


def on_shards(rank, world):
    torch.manual_seed(0)
    model = fully_shard(nn.Sequential(nn.Linear(10, 8), nn.Tanh(), nn.Linear(8, 4)))
    optimizer = hybridopt.AdamW(model.named_parameters(), max_grad_norm=0.5, threads=1)
    optimizer.hook_gradients()
    for seed in (1, 2):
        backward(model, seed)
        with pytest.raises(abi.InvalidStateError, match=REFUSED.format(STEP_CLIPS)):
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
    return optimizer.last_step().grad_norm


def test_under_fsdp2_it_is_refused_too():
    norms = ranks.run(on_shards, 2)
    assert norms[0] == norms[1] > 0.0
