"""torchtitan's containers of optimizers and schedules, over FSDP2 on two ranks, and their checkpoints."""

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torchtitan.components.optimizer import (
    LRSchedulersContainer,
    OptimizersContainer,
    ParamGroupConfig,
    default_adamw,
)

import hybridopt
import ranks
from hybridopt.integrations.torchtitan import OffloadOptimizersContainer
from models import bits


def model_of(dtype=torch.bfloat16):
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(16, 24), nn.Tanh(), nn.Linear(24, 8), nn.Linear(8, 3)).to(dtype)


def config_of(**options):
    groups = [
        ParamGroupConfig(
            pattern=r"\.bias$", optimizer_name="AdamW", optimizer_kwargs={"lr": 1e-2, "weight_decay": 0.0}
        ),
        *default_adamw(lr=1e-2).param_groups,
    ]
    return OffloadOptimizersContainer.Config(param_groups=groups, **options)


def train(model, optimizers, seeds, schedulers=None):
    for seed in seeds:
        optimizers.zero_grad()
        x = torch.randn(8, 16, generator=torch.Generator().manual_seed(seed)).bfloat16()
        model(x).float().square().mean().backward()
        optimizers.step()
        if schedulers is not None:
            schedulers.step()


def test_options_reach_the_optimizers():
    config = config_of(
        offload={"state_dtype": "bf16", "threads": 1},
        optimizer_factory_kwargs_by_name={"AdamW": {"threads": 2}},
    )
    container = config.build(model_parts=[model_of()])
    assert type(container) is OffloadOptimizersContainer
    (optimizer,) = container
    assert type(optimizer) is hybridopt.AdamW
    assert optimizer._options["state_dtype"] == torch.bfloat16
    assert optimizer._options["threads"] == 2
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.0, 0.1]
    assert optimizer.param_groups[0]["param_names"] == ["0.bias", "2.bias", "3.bias"]
    # torchtitan's own container still makes torch's optimizers.
    theirs = OptimizersContainer.Config(param_groups=config.param_groups, implementation="for-loop")
    assert type(*theirs.build(model_parts=[model_of()])) is torch.optim.AdamW


def test_trains_as_torchs():
    """With fp32 params, whose last bits differ from those of torch's steps."""
    ours, torchs = (model_of(torch.float32) for _ in range(2))
    start = [param.detach().clone() for param in ours.parameters()]
    plain = OptimizersContainer.Config(param_groups=config_of().param_groups, implementation="for-loop")
    for model, config in ((ours, config_of()), (torchs, plain)):
        optimizers = config.build(model_parts=[model])
        schedule = LRSchedulersContainer.Config(warmup_steps=2)
        schedulers = schedule.build(optimizers=optimizers, training_steps=8)
        for seed in range(8):
            optimizers.zero_grad()
            x = torch.randn(8, 16, generator=torch.Generator().manual_seed(seed))
            model(x).square().mean().backward()
            optimizers.step()
            schedulers.step()
    for one, other, begin in zip(ours.parameters(), torchs.parameters(), start):
        assert (one - other).norm() < 1e-4 * (other - begin).norm()


def test_overlap_gives_the_same_bits():
    made = []
    for overlap in (False, True):
        model = model_of()
        optimizers = config_of(overlap=overlap).build(model_parts=[model])
        assert (optimizers.optimizers[0]._overlap is not None) == overlap
        train(model, optimizers, range(4))
        made.append(bits(model.state_dict().values()))
    assert made[0] == made[1]


def muon_config(**options):
    """Muon for the matrices of two layers, AdamW for the rest: two optimizers."""
    groups = [ParamGroupConfig(pattern=r"^[02]\.weight$", optimizer_name="Muon", optimizer_kwargs={"lr": 0.02, "weight_decay": 0.0})]
    return OffloadOptimizersContainer.Config(param_groups=[*groups, *default_adamw(lr=1e-2).param_groups], **options)


def test_muon_updates_the_matrices_that_its_pattern_names():
    made, followers = model_of(), model_of()
    optimizers = muon_config(offload={"threads": 1}).build(model_parts=[made])
    assert [type(each).__name__ for each in optimizers] == ["ShardedMuon", "AdamW"]
    matrices = [followers[0].weight, followers[2].weight]
    others = [param for param in followers.parameters() if all(param is not matrix for matrix in matrices)]
    plain = [hybridopt.Muon(matrices, lr=0.02, weight_decay=0.0, threads=1), hybridopt.AdamW(others, lr=1e-2, weight_decay=0.1, betas=(0.9, 0.95), threads=1)]
    for seed in range(3):
        train(made, optimizers, [seed])
        for each in plain:
            each.zero_grad()
        x = torch.randn(8, 16, generator=torch.Generator().manual_seed(seed)).bfloat16()
        followers(x).float().square().mean().backward()
        for each in plain:
            each.step()
    assert bits(made.parameters()) == bits(followers.parameters())


@pytest.mark.parametrize(
    "options, message",
    [
        ({"implementation": "fused_opt_states_bf16"}, "set offload={'state_dtype': 'bfloat16'}"),
        ({"param_groups": [ParamGroupConfig(pattern=".*", optimizer_name="DistMuon")]}, "DistMuon is none of"),
    ],
)
def test_what_does_not_fit_is_refused(options, message):
    config = OffloadOptimizersContainer.Config(**{"param_groups": config_of().param_groups, **options})
    with pytest.raises((ValueError, NotImplementedError), match=message):
        config.build(model_parts=[model_of()])


def two_ranks(rank, world, folder, steps, action, config=config_of):
    """Trains, and before or after the training loads or saves what torchtitan's checkpointer does."""
    from torch.distributed.fsdp import fully_shard

    model = model_of()
    fully_shard(model[0])
    fully_shard(model)
    optimizers = config(offload={"max_grad_norm": 0.5}).build(model_parts=[model])
    schedulers = LRSchedulersContainer.Config(warmup_steps=2).build(optimizers=optimizers, training_steps=8)
    if action == "load":
        states = {"model": model.state_dict(), "optimizer": optimizers, "lr_scheduler": schedulers}
        dcp.load(states, checkpoint_id=folder)
        model.load_state_dict(states["model"])
    train(model, optimizers, steps, schedulers)
    if action == "save":
        states = {"model": model.state_dict(), "optimizer": optimizers, "lr_scheduler": schedulers}
        dcp.save(states, checkpoint_id=folder)
    return bits(param.full_tensor() for param in model.parameters())


@pytest.mark.parametrize("config", [config_of, muon_config])
def test_checkpoints_over_fsdp2_go_on_with_the_same_bits(config, tmp_path):
    whole = ranks.run(two_ranks, 2, "", range(5), "", config)
    ranks.run(two_ranks, 2, str(tmp_path), range(3), "save", config)
    resumed = ranks.run(two_ranks, 2, str(tmp_path), range(3, 5), "load", config)
    assert resumed == whole
    assert whole[0] != ranks.run(two_ranks, 2, "", range(3), "", config)[0]
