"""Params that are used while they are on the host."""

import copy
import pickle

import pytest
import torch
from torch import nn

import hybridopt
from hybridopt import abi
from models import bits, perceptron, run, set_gradients, state_bits

REFUSED = (
    r"parameter '{}' is used by '{}' while its content is on the host, where optimizer.offload\(params=True\) has put it; "
    r"call optimizer.reload\(params=True\) before, or use it after the block of `with optimizer.offloaded\(\):`"
)
ALL = ("params", "grads", "states")


def made(**options):
    torch.manual_seed(0)
    model = perceptron()
    optimizer = hybridopt.AdamW(model.named_parameters(), movable=ALL, **options)
    run(optimizer, list(model.parameters()), [1])
    return model, optimizer


@pytest.mark.parametrize("overlaps", [False, True])
def test_a_forward_pass_names_the_param_and_reload(overlaps):
    model, optimizer = made()
    if overlaps:
        optimizer.overlap(model)
    x = torch.ones(2, 10)
    expected = model(x)
    with optimizer.offloaded():
        for _ in range(2):
            with pytest.raises(abi.InvalidStateError, match=REFUSED.format("0.weight", "linear")):
                model(x)
    assert torch.equal(model(x), expected)
    optimizer.offload(params=True)
    with pytest.raises(abi.InvalidStateError, match=REFUSED.format("0.weight", "linear")):
        model(x)
    optimizer.reload(params=True)
    assert torch.equal(model(x), expected)


@pytest.mark.parametrize(
    ("use", "operation"),
    [
        (lambda param: param + 1, "add"),
        (lambda param: param.sum(), "sum"),
        (lambda param: param.clone(), "clone"),
        (lambda param: param.to(torch.float64), "to"),
        (lambda param: param.zero_(), "zero_"),
        (lambda param: nn.init.ones_(param), "ones_|fill_"),
        (lambda param: torch._foreach_mul_([param], 2.0), "_foreach_mul_"),
        (lambda param: param[0], "__getitem__"),
        (lambda param: copy.deepcopy(param), "deepcopy"),
        (lambda param: pickle.dumps(param), "pickle"),
        (lambda param: param.numpy(force=True), "numpy"),
        (lambda param: param.tolist(), "tolist"),
    ],
)
def test_operations_that_would_touch_no_memory_are_refused(use, operation):
    model, optimizer = made()
    before = bits(model.parameters())
    with optimizer.offloaded(), torch.no_grad():
        with pytest.raises(abi.InvalidStateError, match=REFUSED.format("2.bias", "(" + operation + ")")):
            use(model[2].bias)
    assert bits(model.parameters()) == before
    assert type(model[2].bias) is nn.Parameter
    with torch.no_grad():
        use(model[2].bias)


def test_what_reads_no_element_works_meanwhile():
    model, optimizer = made()
    param = model[0].weight
    with optimizer.offloaded():
        assert (param.shape, param.dtype, param.device.type, param.requires_grad) == ((20, 10), torch.float32, "cpu", True)
        assert param.untyped_storage().nbytes() == 0 and param.data_ptr() == param.detach().data_ptr() == 0
        assert isinstance(param, nn.Parameter) and param.is_leaf and param.grad is None
        assert [name for name, _ in model.named_parameters()] == list(model.state_dict())
        assert sum(each.numel() for each in model.parameters()) == 283
        model.zero_grad()
        model.requires_grad_(True)
        assert repr(model).startswith("Sequential")


def test_saves_steps_and_state_go_on_meanwhile(tmp_path):
    (model, optimizer), (other, plain) = made(), made()
    set_gradients(model.parameters(), 2)
    set_gradients(other.parameters(), 2)
    plain.save_checkpoint(tmp_path / "plain")
    optimizer.offload(params=True, grads=True, states=True)
    optimizer.save_checkpoint(tmp_path / "offloaded")
    assert optimizer.plan().param_count == 4 and optimizer.stats().params_on_host_bytes > 0
    optimizer.refresh_masters()
    assert optimizer.state_dict().keys() == {"state", "param_groups"} and len(repr(optimizer)) > 100
    optimizer.reload(params=True, grads=True, states=True)
    for each in (optimizer, plain):
        each.step()
    assert (bits(model.parameters()), state_bits(optimizer)) == (bits(other.parameters()), state_bits(plain))
    for name in ("plain", "offloaded"):
        loaded, into = made()
        into.load_checkpoint(tmp_path / name)
        run(into, list(loaded.parameters()), [2])
        assert bits(loaded.parameters()) == bits(other.parameters())
