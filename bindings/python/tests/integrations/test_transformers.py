"""transformers' Trainer with the optimizer and the callback: losses and weights are those of torch's optimizer, no
matter what is offloaded, overlapped, saved and resumed."""

import pytest
import torch
from torch.utils.data import Dataset
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments

import hybridopt
import models
from drawn_uses import DrawnUses
from hybridopt.integrations import transformers
from hybridopt.integrations.transformers import OffloadCallback
from models import bits


class Tokens(Dataset):
    def __len__(self):
        return 64

    def __getitem__(self, index):
        tokens = torch.randint(0, 64, (12,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": tokens, "labels": tokens}


def llama(dtype=torch.float32):
    torch.manual_seed(3)
    config = LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4
    )
    return LlamaForCausalLM(config).to(dtype)


def trainer_of(folder, cls, kwargs, callbacks=(), dtype=torch.float32, steps=6, **arguments):
    defaults = {"max_grad_norm": 0.0, "save_strategy": "no", "lr_scheduler_type": "cosine"}
    args = TrainingArguments(
        output_dir=str(folder),
        max_steps=steps,
        per_device_train_batch_size=4,
        learning_rate=1e-2,
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
        logging_steps=1,
        seed=7,
        **{**defaults, **arguments},
    )
    return Trainer(
        model=llama(dtype),
        args=args,
        train_dataset=Tokens(),
        eval_dataset=Tokens(),
        optimizer_cls_and_kwargs=None if cls is None else (cls, {"lr": 1e-2, **kwargs}),
        callbacks=list(callbacks),
    )


def weights(trainer):
    return bits(trainer.model.parameters())


def test_trains_as_with_torchs_optimizer(tmp_path):
    """In fp32 on the CPU the updates differ from torch's in the last bits, by far less than their size."""
    ours = trainer_of(tmp_path, hybridopt.AdamW, {}, [OffloadCallback()], weight_decay=0.1)
    torchs = trainer_of(tmp_path, torch.optim.AdamW, {}, weight_decay=0.1)
    start = [param.detach().clone() for param in torchs.model.parameters()]
    ours.train(), torchs.train()
    assert isinstance(ours.optimizer.optimizer, hybridopt.AdamW)
    assert [group["weight_decay"] for group in ours.optimizer.param_groups] == [0.1, 0.0]
    for one, other, begin in zip(ours.model.parameters(), torchs.model.parameters(), start):
        assert (other - begin).norm() > 0
        assert (one - other).norm() < 1e-4 * (other - begin).norm()


def test_clips_inside_of_the_step(tmp_path):
    """Trainer's clipping before the step multiplies gradients by nearly the same factor."""
    inside = trainer_of(tmp_path, hybridopt.SGD, {"max_grad_norm": 0.1}, [OffloadCallback()])
    before = trainer_of(tmp_path, hybridopt.SGD, {}, [OffloadCallback()], max_grad_norm=0.1)
    start = [param.detach().clone() for param in before.model.parameters()]
    inside.train(), before.train()
    assert inside.optimizer.optimizer.last_step().grad_clip < 0.5
    assert before.optimizer.optimizer.last_step().grad_clip == 1.0
    for one, other, begin in zip(inside.model.parameters(), before.model.parameters(), start):
        assert (one - other).norm() < 1e-4 * (other - begin).norm()


def test_clipping_twice_is_refused(tmp_path):
    trainer = trainer_of(
        tmp_path, hybridopt.AdamW, {"max_grad_norm": 1.0}, [OffloadCallback()], max_grad_norm=1.0
    )
    with pytest.raises(ValueError, match="clipped twice; set TrainingArguments\\(max_grad_norm=0.0\\)"):
        trainer.train()


def test_another_optimizer_is_refused(tmp_path):
    trainer = trainer_of(tmp_path, torch.optim.AdamW, {}, [OffloadCallback()])
    with pytest.raises(TypeError, match="is an AcceleratedOptimizer, expected one of hybridopt"):
        trainer.train()


def test_overlap_gives_the_same_bits(tmp_path):
    made = []
    for overlap in (False, True):
        trainer = trainer_of(
            tmp_path,
            hybridopt.AdamW,
            {"max_grad_norm": 0.5},
            [OffloadCallback(overlap=overlap)],
            dtype=torch.bfloat16,
            gradient_accumulation_steps=2,
        )
        trainer.train()
        made.append((weights(trainer), [entry.get("loss") for entry in trainer.state.log_history]))
    assert made[0] == made[1]


class Drawn(TrainerCallback):
    """Uses weights wherever Trainer calls callbacks between steps."""

    def __init__(self, seed):
        self.uses = DrawnUses(seed)

    def _draw(self, args, state, control, model, optimizer, **_):
        self.uses.draw(model, optimizer.optimizer)

    on_step_begin = on_step_end = on_evaluate = on_log = on_epoch_begin = _draw


@pytest.mark.parametrize("seed", models.drawn_seeds(4))
def test_drawn_callbacks_get_what_they_get_without_overlap(tmp_path, seed):
    """Trainer also evaluates in the middle of the training."""
    made = []
    for overlap in (False, True):
        drawn = Drawn(seed)
        trainer = trainer_of(
            tmp_path,
            hybridopt.AdamW,
            {"max_grad_norm": 0.5},
            [drawn, OffloadCallback(overlap=overlap)],
            dtype=torch.bfloat16,
            eval_strategy="steps",
            eval_steps=2,
            gradient_accumulation_steps=1 + seed % 2,
        )
        trainer.train()
        assert (drawn.uses.under_way > 0) == overlap
        losses = [entry.get("loss", entry.get("eval_loss")) for entry in trainer.state.log_history]
        made.append((drawn.uses.found, weights(trainer), losses))
    assert made[0] == made[1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_resumes_with_the_same_bits(tmp_path, dtype):
    options = {"max_grad_norm": 0.5}
    arguments = {"save_strategy": "steps", "save_steps": 3, "dtype": dtype}
    whole = trainer_of(tmp_path, hybridopt.AdamW, options, [OffloadCallback(overlap=True)], **arguments)
    whole.train()
    resumed = trainer_of(tmp_path / "b", hybridopt.AdamW, options, [OffloadCallback()], **arguments)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
    assert weights(resumed) == weights(whole)


def test_checkpoints_of_the_library_have_the_models_names(tmp_path):
    """Trainer's files optimizer.pt and scheduler.pt do not exist: all state comes from the library's checkpoint."""

    def trainer(folder, **options):
        arguments = {"save_strategy": "steps", "save_steps": 3, "lr_scheduler_type": "constant"}
        kwargs = {"state_dtype": "bf16"}
        callbacks = [OffloadCallback(**options)]
        return trainer_of(folder, hybridopt.AdamW, kwargs, callbacks, dtype=torch.bfloat16, **arguments)

    whole = trainer(tmp_path, save_checkpoint=True)
    whole.train()
    folder = tmp_path / "checkpoint-3"
    _, params = hybridopt.abi.checkpoint_inspect(folder / "hybridopt")
    names = {name for name, _ in llama().named_parameters()}
    assert {param.name for param in params} == names

    (folder / "optimizer.pt").unlink()
    without = trainer(tmp_path / "without")
    without.train(resume_from_checkpoint=str(folder))
    assert weights(without) != weights(whole)
    again = trainer(tmp_path / "again", load_from=folder / "hybridopt")
    again.train(resume_from_checkpoint=str(folder))
    assert weights(again) == weights(whole)


def test_train_may_be_called_again(tmp_path):
    trainer = trainer_of(tmp_path, hybridopt.AdamW, {}, [OffloadCallback(overlap=True)])
    trainer.train()
    trainer.callback_handler.callbacks[-1].on_train_begin(
        trainer.args, trainer.state, trainer.control, optimizer=trainer.optimizer, model=trainer.model
    )  # and raises after that
    trainer.train()


# ----------------------------------------------------------------------------------- install() --


@pytest.fixture
def installed(monkeypatch):
    """Calls install() as a process does first, and undoes it at the end."""
    name = "get_optimizer_cls_and_kwargs"
    monkeypatch.setattr(Trainer, name, staticmethod(getattr(Trainer, name)))
    monkeypatch.setattr(transformers, "installed_options", None)
    transformers.install(state_dtype="bf16")


@pytest.mark.parametrize(
    "optim, cls", [("adamw_torch", "AdamW"), ("adamw_torch_fused", "AdamW"), ("sgd", "SGD"), ("adagrad", "Adagrad")]
)
def test_a_trainer_that_others_make_steps_here(tmp_path, installed, optim, cls):
    """LLaMA-Factory, ms-swift and axolotl make a Trainer like this, from arguments only."""
    args = {"dtype": torch.bfloat16, "weight_decay": 0.1, "max_grad_norm": 0.1}
    one = trainer_of(tmp_path, None, None, optim=optim, adam_beta2=0.9, **args)
    one.train()
    inner = one.optimizer.optimizer
    assert type(inner) is getattr(hybridopt, cls)
    assert inner._options["state_dtype"] == torch.bfloat16
    kwargs = {"state_dtype": "bf16", **({"betas": (0.9, 0.9)} if cls == "AdamW" else {})}
    other = trainer_of(tmp_path, type(inner), kwargs, **args)
    other.train()
    assert weights(one) == weights(other)


def test_the_last_install_holds_and_an_optimizer_that_is_not_here_is_refused(tmp_path, installed):
    transformers.install(master_layout="split")
    args = trainer_of(tmp_path, None, None).args
    cls, kwargs = Trainer.get_optimizer_cls_and_kwargs(args)
    assert cls is hybridopt.AdamW and kwargs["master_layout"] == "split" and "state_dtype" not in kwargs
    args.optim = "adafactor"
    with pytest.raises(ValueError, match="--optim is adafactor, expected adamw_torch, adamw_torch_fused, sgd or"):
        Trainer.get_optimizer_cls_and_kwargs(args)


def test_what_trainer_decides_is_refused_in_install():
    with pytest.raises(TypeError, match="'max_grad_norm': Trainer clips by itself: set max_grad_norm in its"):
        transformers.install(max_grad_norm=1.0)
    with pytest.raises(TypeError, match=r"'overlap': give the Trainer OffloadCallback\(overlap=True\)"):
        transformers.install(overlap=None)
    with pytest.raises(TypeError, match="unexpected keyword argument 'thread', expected some of offload_fraction"):
        transformers.install(thread=1)


@pytest.mark.parametrize("switch", ["overlap", "save_checkpoint"])
def test_a_switch_that_is_neither_true_nor_false_is_refused(switch):
    with pytest.raises(ValueError, match=f"^Invalid {switch}: 'no', expected True or False$"):
        OffloadCallback(**{switch: "no"})
