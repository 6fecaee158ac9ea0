"""The phases of workers for Megatron-LM in verl and SkyRL, with their own helpers: model, gradients and optimizer
leave the GPU before a rollout and come back for training. On the CPU, which Megatron uses as if it were a GPU
(cpu_as_gpu.py)."""

import contextlib
import importlib
from unittest import mock

import pytest
import torch
from test_megatron import inner, made, states, train

import ranks
from copying import Copying
from cpu_as_gpu import cpu_as_gpu
from hybridopt.integrations import megatron
from models import bits
from skyrl_on_cpu import importable

HELPERS = {
    "verl": "verl.utils.megatron_utils",
    "SkyRL": "skyrl.backends.skyrl_train.distributed.megatron.megatron_utils",
}


class Phases(Copying):
    """Other memory of the host stands for the GPU; none of it is pinned."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = {name: value for name, value in (kwargs or {}).items() if name != "pin_memory"}
        if function is torch.Tensor.pin_memory:
            return args[0]
        if function is torch.Tensor.cpu:
            return args[0].clone()
        return super().__torch_function__(function, types, args, kwargs)


@contextlib.contextmanager
def helpers_of(name):
    """The helpers, which use the CPU as their GPU."""
    with cpu_as_gpu(), Phases(), contextlib.ExitStack() as patches:
        with importable():
            helpers = importlib.import_module(HELPERS[name])
        if name == "verl":
            patches.enter_context(mock.patch.object(helpers, "get_device_id", lambda: "cpu"))
            patches.enter_context(mock.patch.object(helpers, "get_torch_device", mock.MagicMock))
        yield helpers


def addresses(optimizer):
    return [value.data_ptr() for entry in inner(optimizer).state.values() for value in entry.values()]


def sleep(helpers, model, optimizer, meanwhile=lambda: None):
    places = addresses(optimizer)
    helpers.offload_megatron_model_to_cpu([model])
    helpers.offload_megatron_optimizer(optimizer)
    assert all(buffer.param_data.untyped_storage().nbytes() == 0 for buffer in model.buffers)
    helpers.load_megatron_model_to_gpu([model])
    meanwhile()
    helpers.load_megatron_optimizer(optimizer)
    assert addresses(optimizer) == places  # the state's addresses are unchanged: nothing is stored twice


def training(rank, world, name, is_sleeping):
    megatron.install()
    with helpers_of(name) as helpers:
        model, optimizer = made()
        for seed in range(4):
            train(model, optimizer, [seed])
            if is_sleeping:
                sleep(helpers, model, optimizer)
        return states(optimizer), bits(model.module.parameters())


@pytest.mark.parametrize("name", HELPERS)
def test_workers_sleep_and_wake_with_the_same_bits(name):
    assert ranks.run(training, 2, name, True) == ranks.run(training, 2, name, False)


def writing(rank, world, name):
    megatron.install()
    with helpers_of(name) as helpers:
        model, optimizer = made()
        train(model, optimizer, [0])
        with torch.no_grad():
            sleep(helpers, model, optimizer, lambda: [param.fill_(0.5) for param in model.module.parameters()])
        train(model, optimizer, [1])
        return [param.detach().float() for param in model.module.parameters()]


@pytest.mark.parametrize("name", HELPERS)
def test_weights_that_are_written_meanwhile_become_masters(name):
    for params in ranks.run(writing, 2, name):
        for param in params:
            assert ((param - 0.5).abs() < 0.05).all() and (param != 0.5).any()
