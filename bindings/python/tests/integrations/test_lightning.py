"""Lightning: configure_optimizers() returns the optimizer; its Trainer, checkpoints and command line."""

import importlib
import logging
import os
import warnings

import lightning
import pytest
import models
import ranks
import torch
from drawn_uses import DrawnUses
from lightning.pytorch.callbacks import (
    Callback,
    EMAWeightAveraging,
    ModelCheckpoint,
    ModelPruning,
    StochasticWeightAveraging,
)
from lightning.pytorch.cli import LightningCLI
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, TensorDataset

import hybridopt
from hybridopt.integrations.lightning import OffloadCallback
from models import bits

PUBLIC = {
    "lightning": ["OffloadCallback"],
    "megatron": ["HybridAdam", "HybridAdamW", "HybridDeviceOptimizer", "HybridSGD", "install"],
    "torchtitan": ["OffloadOptimizersContainer"],
    "transformers": ["OffloadCallback", "install"],
}


@pytest.mark.parametrize("framework", PUBLIC)
def test_integrations_list_their_own_names_alone(framework):
    module = importlib.import_module(f"hybridopt.integrations.{framework}")
    assert dir(module) == PUBLIC[framework] and all(hasattr(module, name) for name in PUBLIC[framework])



class Module(lightning.LightningModule):
    def __init__(self, cls, options):
        super().__init__()
        torch.manual_seed(1)
        self.layers = nn.Sequential(nn.Linear(16, 24), nn.Tanh(), nn.Linear(24, 4)).bfloat16()
        self.cls, self.options = cls, options

    def forward(self, x):
        return self.layers(x)

    def training_step(self, batch, _):
        return self(batch[0]).float().square().mean()

    def configure_optimizers(self):
        optimizer = self.cls(self.named_parameters(), lr=1e-2, **self.options)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 2)]


def data():
    x = torch.randn(32, 16, generator=torch.Generator().manual_seed(2)).bfloat16()
    return DataLoader(TensorDataset(x), batch_size=8)


def trainer_of(folder, callbacks=(), epochs=2, **options):
    return lightning.Trainer(
        default_root_dir=str(folder),
        accelerator="cpu",
        max_epochs=epochs,
        callbacks=list(callbacks),
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **{"enable_checkpointing": False, **options},
    )


def fit(folder, callbacks=(), cls=hybridopt.AdamW, options=None, ckpt_path=None, **arguments):
    module = Module(cls, options or {})
    trainer_of(folder, callbacks, **arguments).fit(module, data(), ckpt_path=ckpt_path)
    return module


def test_trains_as_the_plain_loop(tmp_path):
    module = Module(hybridopt.AdamW, {})
    (optimizer,), (schedule,) = module.configure_optimizers()
    for _ in range(2):
        for (x,) in data():
            optimizer.zero_grad()
            module(x).float().square().mean().backward()
            optimizer.step()
        schedule.step()
    assert bits(fit(tmp_path).parameters()) == bits(module.parameters())


@pytest.mark.parametrize("accumulate", [1, 2])
def test_overlap_gives_the_same_bits(tmp_path, accumulate):
    options = {"max_grad_norm": 0.1}
    plain = fit(tmp_path, options=options, accumulate_grad_batches=accumulate)
    callback = OffloadCallback(overlap=True)
    overlapped = fit(tmp_path, [callback], options=options, accumulate_grad_batches=accumulate)
    assert bits(overlapped.parameters()) == bits(plain.parameters())
    assert bits(plain.parameters()) != bits(Module(hybridopt.AdamW, {}).parameters())


class Validated(Module):
    def validation_step(self, batch, _):
        self.log("seen", self(batch[0]).float().square().mean())

    def val_dataloader(self):
        return data()


def fitted(folder, callbacks, overlap):
    """Returns the weights, and the last values that validation has logged."""
    module = Validated(hybridopt.AdamW, {"max_grad_norm": 0.1})
    callbacks = [*callbacks, OffloadCallback(overlap=overlap)]
    trainer = trainer_of(folder, callbacks, epochs=4, val_check_interval=2)
    trainer.fit(module, data())
    assert trainer.optimizers[0].last_step().step > 0
    return bits(module.parameters()), trainer.callback_metrics["seen"].item()


CALLBACKS = {
    "EMA": lambda: EMAWeightAveraging(decay=0.7),
    "SWA": lambda: StochasticWeightAveraging(swa_lrs=1e-2, swa_epoch_start=1),
    "pruning": lambda: ModelPruning("l1_unstructured", amount=0.2, make_pruning_permanent=True, verbose=0),
}


@pytest.mark.parametrize("name", CALLBACKS)
def test_callbacks_that_read_and_write_weights(tmp_path, name):
    overlapped = fitted(tmp_path, [CALLBACKS[name]()], True)
    assert overlapped == fitted(tmp_path, [CALLBACKS[name]()], False)
    assert overlapped != fitted(tmp_path, [], False)


class Drawn(Callback):
    """Uses weights wherever Lightning calls callbacks between steps."""

    def __init__(self, seed):
        self.uses = DrawnUses(seed)

    def _draw(self, trainer, pl_module, *_):
        self.uses.draw(pl_module, trainer.optimizers[0])

    on_train_batch_start = on_train_batch_end = _draw
    on_train_epoch_start = on_train_epoch_end = on_validation_start = on_validation_end = _draw


class Hooked(Validated):
    """A module whose gradients leave in the backward pass."""

    def configure_optimizers(self):
        (optimizer,), schedules = super().configure_optimizers()
        optimizer.hook_gradients()
        return [optimizer], schedules


@pytest.mark.parametrize("seed", models.drawn_seeds(6))
def test_drawn_callbacks_get_what_they_get_without_overlap(tmp_path, seed):
    seen = []
    for overlap in (True, False):
        drawn = Drawn(seed)
        module = (Hooked if seed % 3 == 0 else Validated)(hybridopt.AdamW, {"max_grad_norm": 0.1})
        trainer = trainer_of(tmp_path, [drawn, OffloadCallback(overlap=overlap)], epochs=3, val_check_interval=2)
        trainer.fit(module, data())
        assert (drawn.uses.under_way > 0) == overlap
        seen.append((drawn.uses.found, bits(module.parameters())))
    assert seen[0] == seen[1]


def test_checkpoints_go_on_with_the_same_bits(tmp_path):
    options = {"state_dtype": "bf16"}
    whole = fit(tmp_path, options=options)
    saving = [ModelCheckpoint(dirpath=tmp_path, filename="first"), OffloadCallback(overlap=True)]
    fit(tmp_path, saving, options=options, epochs=1, enable_checkpointing=True)
    resumed = fit(tmp_path, options=options, ckpt_path=str(tmp_path / "first.ckpt"))
    assert bits(resumed.parameters()) == bits(whole.parameters())


class Distributed(Validated):
    def configure_model(self):
        if self.device_mesh is not None:
            fully_shard(self.layers, mesh=self.device_mesh["data_parallel"])


def sharded(one_file):
    return ModelParallelStrategy(
        data_parallel_size=2, tensor_parallel_size=1, save_distributed_checkpoint=not one_file
    )


STRATEGIES = {
    "ddp": DDPStrategy,
    "fsdp2": lambda: sharded(one_file=True),
    "fsdp2, a file of each rank": lambda: sharded(one_file=False),
}


def fitted_twice(rank, world, folder, strategy):
    """Returns the results of two epochs, and the results of loading a checkpoint into a model with other weights and
    training the second epoch."""
    warnings.simplefilter("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world), GROUP_RANK="0", TORCHELASTIC_RUN_ID="run")
    os.environ.update(MASTER_ADDR="", MASTER_PORT="0")  # torchrun sets more variables; the process group exists already
    fitted = []
    for resumes in (False, True):
        module = Distributed(hybridopt.AdamW, {"max_grad_norm": 0.1})
        saving = ModelCheckpoint(dirpath=f"{folder}/{resumes}", filename="{epoch}", save_top_k=-1)
        callbacks = [saving, OffloadCallback(overlap=True)]
        if resumes:
            nn.init.zeros_(module.layers[0].weight)
        trainer = trainer_of(
            folder, callbacks, strategy=STRATEGIES[strategy](), devices=world, enable_checkpointing=True
        )
        trainer.fit(module, data(), ckpt_path=f"{folder}/False/epoch=0.ckpt" if resumes else None)
        fitted.append(bits(getattr(param, "full_tensor", lambda: param)() for param in module.parameters()))
    return fitted


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_checkpoints_of_two_ranks_go_on_with_the_same_bits(tmp_path, strategy):
    (whole, resumed), others = ranks.run(fitted_twice, 2, str(tmp_path), strategy)
    assert resumed == whole and others == [whole, whole]
    assert (tmp_path / "False" / "epoch=0.ckpt").is_dir() == ("file of each" in strategy)


def test_clipping_twice_is_refused(tmp_path):
    with pytest.raises(ValueError, match="clipped twice; leave gradient_clip_val out"):
        fit(tmp_path, [OffloadCallback()], options={"max_grad_norm": 1.0}, gradient_clip_val=1.0)


def test_another_optimizer_is_refused(tmp_path):
    with pytest.raises(TypeError, match="is an AdamW, expected one of hybridopt"):
        fit(tmp_path, [OffloadCallback()], cls=torch.optim.AdamW)


class Failing(Module):
    def training_step(self, batch, index):
        if index == 2:
            raise RuntimeError("no more data")
        return super().training_step(batch, index)


def test_overlap_ends_when_training_fails(tmp_path):
    module = Failing(hybridopt.AdamW, {})
    trainer = trainer_of(tmp_path, [OffloadCallback(overlap=True)])
    with pytest.raises(RuntimeError, match="no more data"):
        trainer.fit(module, data())
    assert trainer.optimizers[0]._overlap is None


class Plain(Module):
    """A module whose optimizer comes from the command line."""

    def __init__(self):
        super().__init__(None, None)

    configure_optimizers = lightning.LightningModule.configure_optimizers


def test_the_command_line_takes_the_class_by_its_path(tmp_path):
    arguments = {"default_root_dir": str(tmp_path), "accelerator": "cpu", "max_epochs": 1, "logger": False}
    cli = LightningCLI(
        Plain,
        args=[
            "--optimizer=hybridopt.AdamW",
            "--optimizer.lr=0.01",
            "--optimizer.offload_fraction=1.0",
            "--optimizer.state_dtype=bf16",
            "--optimizer.max_grad_norm=0.5",
        ],
        trainer_defaults={**arguments, "enable_progress_bar": False, "enable_checkpointing": False},
        run=False,
    )
    cli.trainer.fit(cli.model, data())
    (optimizer,) = cli.trainer.optimizers
    assert type(optimizer) is hybridopt.AdamW
    assert optimizer.max_grad_norm == 0.5
    assert {entry["exp_avg"].dtype for entry in optimizer.state.values()} == {torch.bfloat16}


def test_a_switch_that_is_neither_true_nor_false_is_refused():
    with pytest.raises(ValueError, match="^Invalid overlap: 'no', expected True or False$"):
        OffloadCallback(overlap="no")
