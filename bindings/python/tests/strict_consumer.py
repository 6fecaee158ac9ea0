"""A user's program under `mypy --strict`. The type checker checks it (style.python); nothing runs it."""

import pathlib

import torch
from hybridopt import SGD, Adagrad, Adam, AdamW, Lion, Muon, OffloadOptimizer, Plan, Signum, TensorShard
from hybridopt import Stats as Totals
from hybridopt import StepResult, abi, muon_groups
from hybridopt.abi import Context, HybridoptError, Optimizer, checkpoint_inspect


def make(model: torch.nn.Module) -> list[OffloadOptimizer]:
    return [
        AdamW(model.named_parameters(), lr=3e-4, max_grad_norm=1.0, movable=("params", "states")),
        Adam(model.parameters(), state_dtype=torch.bfloat16),
        SGD(model.parameters(), lr=0.1, offload_fraction="auto", device_budget_bytes=1 << 30),
        Lion(model.parameters(), betas=(0.9, 0.99), fused=True),
        Signum(model.parameters(), momentum=0.95),
        Adagrad(model.parameters(), threads=1),
        Muon(muon_groups(model, adamw={"lr": 3e-4}), lr=0.02, adjust_lr_fn="original", update_rms=None, max_grad_norm=1.0),
    ]


def train(model: torch.nn.Module, optimizer: OffloadOptimizer) -> float:
    with optimizer.hook_gradients(accumulate=False):
        loss: torch.Tensor = model(torch.ones(3))
        loss.backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    with optimizer.offloaded(params=False):
        pass
    optimizer.save_checkpoint(pathlib.Path("saved"), wait=False).wait()
    optimizer.load_checkpoint("saved", verify=False)
    last: StepResult = optimizer.last_step()
    totals: Totals = optimizer.stats()
    plan: Plan = optimizer.plan()
    return last.grad_norm + totals.total_seconds + plan.host_bytes


def shard() -> TensorShard:
    return TensorShard((4, 4), (((0, 0), (2, 4)),))


def without_torch() -> int:
    try:
        with Context(threads=1) as context:
            optimizer: Optimizer = abi.Optimizer(context, algorithm=abi.OFFLOAD_ADAMW)
            plan: abi.offload_plan_t = optimizer.plan()
            print(plan.fits, abi.build_info(), checkpoint_inspect("saved"))
    except HybridoptError as error:
        print(error)
    return abi.OFFLOAD_OK
