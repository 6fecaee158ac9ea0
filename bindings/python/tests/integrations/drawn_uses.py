"""Uses of a model's weights that callbacks of frameworks make, drawn at random. Not a test itself."""

import copy
import random

import torch

from models import bits


def averaged(uses, model):
    if uses.average is None:
        uses.average = torch.optim.swa_utils.AveragedModel(model, use_buffers=True)
    uses.average.update_parameters(model)
    return list(uses.average.module.parameters())


def averaged_by_hand(uses, model):
    params = list(model.parameters())
    uses.means = uses.means or [param.detach().clone() for param in params]
    torch._foreach_lerp_(uses.means, params, 0.2)
    return uses.means


def exchanged(uses, model):
    """Exchanges the weights for others and back, as an evaluation with an average does."""
    kept = [param.data.clone() for param in model.parameters()]
    for param in model.parameters():
        param.data.mul_(0.9)
    found = [param.detach().clone() for param in model.parameters()]
    for param, before in zip(model.parameters(), kept):
        param.data.copy_(before)
    return found


def clipped(uses, model):
    with torch.no_grad():
        for param in model.parameters():
            param.clamp_(-0.3, 0.3)
    return []


def with_weight(model):
    return next(module for module in model.modules() if "weight" in module._parameters)


USES = [
    averaged,
    averaged_by_hand,
    exchanged,
    clipped,
    lambda uses, model: [param.norm() for param in model.parameters()],
    lambda uses, model: torch._foreach_norm(list(model.parameters())),
    lambda uses, model: [grad.norm() for grad in (p.grad for p in model.parameters()) if grad is not None],
    lambda uses, model: list(copy.deepcopy(list(model.parameters())[1:3])),
    lambda uses, model: list(with_weight(model).state_dict().values()),
    lambda uses, model: [torch.nn.utils.parameters_to_vector(model.parameters())],
]  # fmt: skip


class DrawnUses:
    """At each call, draws uses from a seed, makes them, and keeps their results."""

    def __init__(self, seed):
        self.rng = random.Random(seed)
        self.average = self.means = None
        self.found = []
        self.under_way = 0  # how often a step was under way

    def draw(self, model, optimizer):
        engine = optimizer._engine
        self.under_way += engine is not None and bool(engine.under_way)
        for _ in range(self.rng.choice([0, 0, 1, 2])):
            self.found.append(bits(self.rng.choice(USES)(self, model)))
