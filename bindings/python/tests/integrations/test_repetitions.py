"""Trainings of each framework, one after the other in one process. Each leaves nothing behind, and tensors and
threads do not accumulate."""

from unittest import mock

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

import hybridopt
import ranks
from models import Block
from remains import assert_that_nothing_piles_up


class Failing(Exception):
    pass


@pytest.mark.parametrize("is_failing", [False, True])
@pytest.mark.parametrize("is_overlapping", [False, True])
def test_lightning(tmp_path, is_overlapping, is_failing):
    from hybridopt.integrations.lightning import OffloadCallback
    from test_lightning import Module, data, trainer_of

    class Hooked(Module):
        def on_train_start(self):
            self.optimizers().optimizer.hook_gradients()

        def training_step(self, batch, index):
            if is_failing and index == 3:
                raise Failing
            return super().training_step(batch, index)

    def train():
        module = Hooked(hybridopt.AdamW, {"max_grad_norm": 0.1})
        # Lightning gives its callbacks a bound method of the module, which they keep.
        trainer = trainer_of(tmp_path, [OffloadCallback(overlap=is_overlapping)])
        try:
            trainer.fit(module, data())
        except Failing:
            assert is_failing
        return module, *trainer.optimizers

    assert_that_nothing_piles_up(train)


@pytest.mark.parametrize("is_failing", [False, True])
@pytest.mark.parametrize("is_overlapping", [False, True])
def test_transformers(tmp_path, is_overlapping, is_failing):
    from hybridopt.integrations.transformers import OffloadCallback
    from test_transformers import trainer_of

    callback = OffloadCallback(overlap=is_overlapping)  # the program keeps it

    def train():
        trainer = trainer_of(tmp_path, hybridopt.AdamW, {"max_grad_norm": 0.1}, [callback])
        if is_failing:

            def fail(*_):
                if trainer.state.global_step == 3:
                    raise Failing

            trainer.model.model.layers[1].register_forward_hook(fail)
        try:
            trainer.train()
        except Failing:
            assert is_failing
        return trainer.model, trainer.optimizer.optimizer

    assert_that_nothing_piles_up(train)


def test_accelerate():
    from test_accelerate import accelerator, model_of
    from test_accelerate import train as trained

    def train():
        with accelerator() as prepare:
            model = model_of(torch.bfloat16)
            optimizer = hybridopt.AdamW(model.named_parameters(), lr=1e-2, max_grad_norm=0.5, overlap=model)
            optimizer.hook_gradients()
            trained(prepare, *prepare.prepare(model, optimizer), 3, torch.bfloat16)
            prepare.free_memory()
        return model, optimizer

    assert_that_nothing_piles_up(train)


def torchtitan(rank, world):
    from test_torchtitan import config_of, model_of
    from test_torchtitan import train as trained

    def train():
        model = model_of()
        fully_shard(model[0])
        fully_shard(model)
        optimizers = config_of(offload={"max_grad_norm": 0.5}, overlap=True).build(model_parts=[model])
        trained(model, optimizers, range(3))
        return model, *optimizers

    assert_that_nothing_piles_up(train)


def test_torchtitan():
    ranks.run(torchtitan, 2)


def megatron(rank, world):
    from cpu_as_gpu import cpu_as_gpu
    from hybridopt.integrations.megatron import install
    from megatron.core import parallel_state
    from test_megatron import inner, made
    from test_megatron import train as trained

    def train():
        model, optimizer = made()
        trained(model, optimizer, range(3))
        return model, inner(optimizer)

    parallel_state.initialize_model_parallel()
    with cpu_as_gpu(), mock.patch.object(parallel_state, "initialize_model_parallel"):
        install()
        assert_that_nothing_piles_up(train)


def test_megatron():
    ranks.run(megatron, 1)


def fsdp2(rank, world, is_asleep):
    """As in verl: the optimizer by its class path, FSDP2, and phases in between."""
    from test_verl import config_of, sleep
    from verl.workers.config.optimizer import build_optimizer

    def train():
        torch.manual_seed(0)
        model = nn.Sequential(*(Block(8, 16) for _ in range(2)))
        for index in range(2):
            fully_shard(model[index])
        fully_shard(model)
        optimizer = build_optimizer(model.parameters(), config_of(max_grad_norm=0.5))
        optimizer.overlap(model)
        for _ in range(3):
            model(torch.randn(4, 8)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            if is_asleep:
                sleep(model, optimizer)
        return model, optimizer

    assert_that_nothing_piles_up(train)


@pytest.mark.parametrize("is_asleep", [False, True])
def test_verl(is_asleep):
    ranks.run(fsdp2, 2, is_asleep)
