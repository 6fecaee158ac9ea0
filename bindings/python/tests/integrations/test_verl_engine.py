"""verl's engine for FSDP2 as its workers use it, on the CPU over gloo. Model, optimizer, schedule and checkpoints
are verl's; the test itself computes the loss."""

import pytest
import torch

import hybridopt
import ranks
from models import bits
from verl_on_cpu import Phases, configs, save_model, without_gpu


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory):
    return save_model(tmp_path_factory.mktemp("model"))


def made(folder, is_offloading, options):
    from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead

    engine = FSDPEngineWithLMHead(*configs(folder, is_offloading, options))
    engine.initialize()
    assert type(engine.optimizer) is hybridopt.AdamW
    return engine


def train(engine, seeds):
    norms = []
    for seed in seeds:
        with engine.train_mode():
            tokens = torch.randint(0, 64, (4, 12), generator=torch.Generator().manual_seed(seed))
            engine.optimizer_zero_grad()
            engine.module(input_ids=tokens, labels=tokens).loss.backward()
            norms.append(engine.optimizer_step())
            engine.lr_scheduler_step()
    return norms


def found(engine):
    state = engine.optimizer.state
    names = ("exp_avg", "exp_avg_sq", "master_param")
    params = [param for param in engine.module.parameters() if param in state]
    return (
        bits(param.full_tensor() for param in engine.module.parameters()),
        bits(state[param][name].full_tensor() for param in params for name in names),
        [int(state[param]["step"]) for param in params],
    )


def working(rank, world, model_folder, folder, is_offloading, options):
    with without_gpu(), Phases() as phases:
        engine = made(model_folder, is_offloading, options)
        norms = train(engine, range(3))
        assert max(norms) > 0.5  # clipped
        engine.save_checkpoint(folder)
        train(engine, range(3, 5))
        if is_offloading:
            assert phases.copies > 0
            places = [value.data_ptr() for entry in engine.optimizer.state.values() for value in entry.values()]
            engine.to("gpu"), engine.to("cpu")
            now = [value.data_ptr() for entry in engine.optimizer.state.values() for value in entry.values()]
            assert now == places  # the state's addresses are unchanged: nothing is stored twice
        return norms, found(engine)


def going_on(rank, world, model_folder, folder, is_offloading, options):
    with without_gpu(), Phases():
        engine = made(model_folder, is_offloading, options)
        engine.load_checkpoint(folder, del_local_after_load=False)
        train(engine, range(3, 5))
        return found(engine)


@pytest.mark.parametrize("options", [{}, {"state_dtype": "bf16"}])
def test_phases_and_checkpoints_of_the_engine_keep_every_bit(model_folder, tmp_path, options):
    """Model and optimizer go to the GPU for each step, and back to the host for the rollout."""
    folders = [str(tmp_path / name) for name in ("staying", "moving")]
    staying = ranks.run(working, 2, model_folder, folders[0], False, options)
    moving = ranks.run(working, 2, model_folder, folders[1], True, options)
    assert moving == staying
    assert ranks.run(going_on, 2, model_folder, folders[1], True, options) == [result for _, result in staying]
