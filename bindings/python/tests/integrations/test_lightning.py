"""Lightning: configure_optimizers() returns the optimizer; its Trainer, checkpoints and command line."""

import lightning
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.cli import LightningCLI
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import hybridopt
from hybridopt.integrations.lightning import OffloadCallback
from models import bits


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


def test_checkpoints_go_on_with_the_same_bits(tmp_path):
    options = {"state_dtype": "bf16"}
    whole = fit(tmp_path, options=options)
    saving = [ModelCheckpoint(dirpath=tmp_path, filename="first"), OffloadCallback(overlap=True)]
    fit(tmp_path, saving, options=options, epochs=1, enable_checkpointing=True)
    resumed = fit(tmp_path, options=options, ckpt_path=str(tmp_path / "first.ckpt"))
    assert bits(resumed.parameters()) == bits(whole.parameters())


def test_clipping_twice_is_refused(tmp_path):
    with pytest.raises(ValueError, match="clipped twice; leave gradient_clip_val out"):
        fit(tmp_path, [OffloadCallback()], options={"max_grad_norm": 1.0}, gradient_clip_val=1.0)


def test_another_optimizer_is_refused(tmp_path):
    with pytest.raises(TypeError, match="is a AdamW, expected one of hybridopt"):
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
    """Its optimizer comes from the command line."""

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
