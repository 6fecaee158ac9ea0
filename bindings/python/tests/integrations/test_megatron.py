"""Megatron-LM with install(): its DistributedOptimizer over two ranks, its checkpoints, its flags. Megatron uses the
CPU as if it were a GPU (cpu_as_gpu.py)."""

import copy
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import nn

import hybridopt
import ranks
from hybridopt.integrations import megatron
from models import PAIRS, bits, clone, perceptron, set_gradients, state_bits, watch_params

megatron.install()

ADAMW = {"cpu_optimizer_cls": torch.optim.AdamW, "gpu_optimizer_cls": torch.optim.AdamW}


def made_like_megatron(params, **arguments):
    """Megatron makes an optimizer, and then another one from the param groups of the first."""
    from megatron.core.optimizer.cpu_offloading import HybridDeviceOptimizer

    whole = {**ADAMW, "offload_fraction": 1.0, "param_update_in_fp32": True, **arguments}
    first = HybridDeviceOptimizer(params, **whole)
    return HybridDeviceOptimizer(params=first.param_groups, **first.defaults)


# ------------------------------------------------------------------------------- in one process --


@pytest.mark.parametrize("name", ["AdamW", "Adam", "SGD", "SGD plain"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_it_is_the_optimizer_of_that_name(name, dtype):
    ours, theirs, arguments = PAIRS[name]
    params = list(perceptron(dtype).parameters())
    others = clone(params)
    halves = [{"params": params[:2], "wd_mult": 0.0, "lr": 3e-3}, {"params": params[2:], "wd_mult": 1.0}]
    other_halves = [{"params": others[:2], "lr": 3e-3}, {"params": others[2:]}]
    one = made_like_megatron(halves, cpu_optimizer_cls=theirs, bias_correction=True, **arguments)
    other = ours(other_halves, **arguments)
    assert isinstance(one, theirs)
    for seed in range(5):
        for optimizer, stepped in ((one, params), (other, others)):
            set_gradients(stepped, seed)
            optimizer.step()
    assert bits(params) == bits(others)
    assert [group["wd_mult"] for group in one.param_groups] == [0.0, 1.0]
    assert not {"offload_fraction", "cpu_optimizer_cls"} & one.param_groups[0].keys()


def test_the_first_params_are_offloaded_first():
    """The device share begins with the param that is registered first."""
    model = perceptron()
    optimizer = made_like_megatron(model.named_parameters(), offload_fraction=0.5)
    set_gradients(model.parameters(), 0)
    optimizer.step()
    names = [name for name, _ in model.named_parameters()]
    assert [slot.name for slot in optimizer._engine.slots] == names[::-1]
    assert optimizer._options["offload_fraction"] == 0.5


class Pictures(nn.Module):
    """A small network for images, with params of one, two and four dimensions."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 6, 5), nn.Conv2d(6, 16, 5)
        self.hidden, self.last = nn.Linear(400, 32), nn.Linear(32, 10)

    def forward(self, x):
        for layer in (self.first, self.second):
            x = nn.functional.max_pool2d(layer(x).relu(), 2)
        return self.last(self.hidden(x.flatten(1)).relu())


@pytest.mark.parametrize("steps", [1, 10])
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("fraction", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("name", ["Adam", "SGD plain"])
@pytest.mark.parametrize("grouped", [False, True])
def test_a_network_trains_to_the_same_bits(grouped, name, fraction, overlap, steps):
    """The gradients accumulate over the steps, because nothing sets them to zero."""
    ours, theirs, arguments = PAIRS[name]
    torch.manual_seed(42)
    model = Pictures()
    other = copy.deepcopy(model)

    def groups_of(module):
        params = list(module.parameters())
        halves = [{"params": params[:4], "wd_mult": 1.0}, {"params": params[4:], "wd_mult": 0.0}]
        return halves if grouped else params

    one = made_like_megatron(
        groups_of(model),
        cpu_optimizer_cls=theirs,
        gpu_optimizer_cls=theirs,
        offload_fraction=fraction,
        overlap_cpu_optimizer_d2h_h2d=overlap,
        **arguments,
    )
    two = ours(groups_of(other), **arguments)
    assert len(one.state_dict()["state"]) == 0
    for step in range(steps):
        x = torch.randn(1, 3, 32, 32, generator=torch.Generator().manual_seed(step))
        for module, optimizer in ((model, one), (other, two)):
            module(x).sum().backward()
            optimizer.step()
    assert bits(model.parameters()) == bits(other.parameters())
    assert name != "Adam" or len(one.state_dict()["state"]) == 8


def test_a_dummy_step_shows_state_and_steps_nothing():
    model = perceptron(torch.bfloat16)
    start = bits(model.parameters())
    optimizer = made_like_megatron(model.parameters())
    assert len(optimizer.state) == 0
    optimizer.dummy_step()
    assert bits(model.parameters()) == start
    assert list(optimizer.state) == list(model.parameters())
    for param, entry in optimizer.state.items():
        assert set(entry) == {"step", "exp_avg", "exp_avg_sq", "master_param"}
        assert int(entry["step"]) == 0 and not entry["exp_avg"].any() and not entry["exp_avg_sq"].any()
        assert torch.equal(entry["master_param"], param.float())


def test_a_missing_gradient_steps_nothing():
    """Such a param is not stepped with the gradient of the step before."""
    model = perceptron(torch.bfloat16)
    params = list(model.parameters())
    optimizer = made_like_megatron(params)
    set_gradients(params, 0)
    optimizer.step()
    before = state_bits(optimizer)
    optimizer.zero_grad()
    params[0].grad = torch.ones_like(params[0])
    optimizer.step()
    after = state_bits(optimizer)
    assert {place for place, _ in before if before[place, "step"] != after[place, "step"]} == {0}
    assert [key for key in before if key[0] != 0 and before[key] != after[key]] == []


def test_params_in_fp32_show_themselves_as_masters():
    model = nn.Sequential(nn.Linear(4, 4).bfloat16(), nn.Linear(4, 4))
    low, full = model[0].weight, model[1].weight
    optimizer = made_like_megatron(model.parameters())
    set_gradients(model.parameters(), 0)
    optimizer.step()
    assert optimizer.state[full]["master_param"].data_ptr() == full.data_ptr()
    assert optimizer.state[low]["master_param"].dtype == torch.float32
    assert set(optimizer.param_to_fp32_param) == set(model[0].parameters())

    optimizer.state[full]["master_param"] = full.detach().clone()  # as if a checkpoint were loaded
    assert optimizer.state[full]["master_param"].data_ptr() == full.data_ptr()
    full.data = full.detach() + 1.0
    assert torch.equal(optimizer.state[full]["master_param"], full)
    set_gradients(model.parameters(), 1)
    optimizer.step()
    assert torch.equal(optimizer.state[full]["master_param"], full)
    plain = made_like_megatron(model.parameters(), param_update_in_fp32=False)
    set_gradients(model.parameters(), 2)
    plain.step()
    assert "master_param" not in plain.state[full]


def test_megatron_says_that_weights_have_been_loaded(monkeypatch):
    """Writes a few elements in a way that cannot be noticed: torch does not count writes to .data, and the elements
    lie between the bytes that are compared."""
    param = nn.Parameter(torch.ones(4096).bfloat16())
    watch_params(monkeypatch)
    optimizer = made_like_megatron([param])
    set_gradients([param], 0)
    optimizer.step()
    written = torch.arange(100, 4096, 580)
    param.data[written] = 8.0
    optimizer.update_fp32_param_by_new_param()
    assert (optimizer.master_of(param)[written] == 8.0).all()


def test_state_of_megatrons_own_optimizer_loads():
    """The param groups of Megatron's optimizer hold the arguments of the constructor."""
    params = list(perceptron(torch.bfloat16).parameters())
    optimizer = made_like_megatron(params)
    set_gradients(params, 0)
    optimizer.step()
    state = copy.deepcopy(optimizer.state_dict())
    for group in state["param_groups"]:
        group.update(offload_fraction=1.0, param_update_in_fp32=True, **ADAMW)
    others = clone(params)
    other = made_like_megatron(others)
    other.load_state_dict(state)
    assert state_bits(other) == state_bits(optimizer)
    for which, stepped in ((optimizer, params), (other, others)):
        set_gradients(stepped, 1)
        which.step()
    assert bits(others) == bits(params)
    assert isinstance(copy.deepcopy(other), type(other))


@pytest.mark.parametrize(
    "arguments, message",
    [
        ({"cpu_optimizer_cls": torch.optim.RMSprop}, "RMSprop.*expected torch.optim.AdamW, Adam or SGD"),
        ({"cpu_optimizer_cls": None}, "cpu_optimizer_cls=None, expected torch.optim.AdamW"),
        ({"bias_correction": False}, "bias_correction=False, expected True"),
        ({"momentum": 0.9}, "'momentum', which torch.optim.AdamW does not have"),
        ({"offload_fraction": 1.5}, "Invalid offload_fraction: 1.5"),
        ({"lr": -1.0}, "Invalid learning rate: -1.0"),
    ],
)
def test_arguments_that_cannot_be_meant_are_refused(arguments, message):
    with pytest.raises((ValueError, TypeError), match=message):
        made_like_megatron(perceptron().parameters(), **arguments)


# --------------------------------------------------------------------------------------- flags --


def config_of(**fields):
    defaults = {
        "optimizer_cpu_offload": True,
        "optimizer_offload_fraction": 1.0,
        "overlap_cpu_optimizer_d2h_h2d": True,
        "use_precision_aware_optimizer": True,
        "use_distributed_optimizer": True,
        "use_torch_optimizer_for_cpu_offload": False,
        "overlap_param_gather": False,
        "overlap_param_gather_with_optimizer_step": False,
        "optimizer": "adam",
        "bf16": True,
        "fp16": False,
        **{f"{name}_dtype": torch.float32 for name in ("main_params", "main_grads", "exp_avg", "exp_avg_sq")},
    }
    return SimpleNamespace(**{**defaults, **fields})


@pytest.mark.parametrize(
    "fields, message",
    [
        ({"optimizer_cpu_offload": False}, "--optimizer-offload-fraction is given without"),
        (
            {"optimizer_cpu_offload": False, "optimizer_offload_fraction": 0.0},
            "--overlap-cpu-optimizer-d2h-h2d is given without",
        ),
        (
            {
                "optimizer_cpu_offload": False,
                "optimizer_offload_fraction": 0.0,
                "overlap_cpu_optimizer_d2h_h2d": False,
                "use_torch_optimizer_for_cpu_offload": True,
            },
            "--use-torch-optimizer-for-cpu-offload is given without --optimizer-cpu-offload; add that",
        ),
        ({"optimizer": "muon"}, "--optimizer is muon, expected adam or sgd"),
        (
            {"overlap_param_gather_with_optimizer_step": True},
            "--overlap-param-gather-with-optimizer-step is given without --overlap-param-gather; add that",
        ),
        (
            {"overlap_param_gather": True, "use_distributed_optimizer": False},
            "--overlap-param-gather is given without --use-distributed-optimizer; add that",
        ),
        ({"use_precision_aware_optimizer": False}, "add --use-precision-aware-optimizer and"),
        ({"main_params_dtype": torch.float16}, "--main-params-dtype is torch.float16, expected fp32"),
        ({"exp_avg_dtype": torch.bfloat16}, "expected fp32 for both or bf16 for both"),
        ({"exp_avg_dtype": torch.uint8, "exp_avg_sq_dtype": torch.uint8}, "expected fp32 for both or"),
    ],
)
def test_contradictory_flags_are_refused(fields, message):
    def never(*_):
        raise AssertionError("made")

    with pytest.raises(ValueError, match=message):
        megatron.checking(never)(config_of(**fields))


def test_flags_that_fit_are_taken():
    bf16 = {"exp_avg_dtype": torch.bfloat16, "exp_avg_sq_dtype": torch.bfloat16}

    def make(_):
        return made_like_megatron(perceptron().parameters(), pin_cpu_grads=False)

    optimizer = megatron.checking(make)(config_of(**bf16))
    assert optimizer._options["state_dtype"] == torch.bfloat16
    assert optimizer._options["pin"] is False
    off = {"optimizer_cpu_offload": False, "optimizer_offload_fraction": 0.0, "bf16": False}
    assert megatron.checking(lambda _: 1)(config_of(overlap_cpu_optimizer_d2h_h2d=False, **off)) == 1
    try:
        megatron.install(state_dtype="fp32", threads=1)
        assert made_like_megatron(perceptron().parameters())._options["threads"] == 1
        with pytest.raises(ValueError, match="install\\(\\) was given state_dtype=torch.float32; leave one out"):
            megatron.checking(make)(config_of(**bf16))
    finally:
        megatron.install()


def test_what_megatron_decides_is_refused_in_install():
    with pytest.raises(TypeError, match="'max_grad_norm': Megatron clips by itself: set --clip-grad"):
        megatron.install(max_grad_norm=1.0)
    with pytest.raises(TypeError, match="unexpected keyword argument 'thread', expected some of state_dtype"):
        megatron.install(thread=1)
    with pytest.raises(RuntimeError, match="megatron-core .* has no megatron.core.optimizer.Gone"):
        megatron.found("megatron.core.optimizer", "Gone")


# -------------------------------------------------------------------------- DistributedOptimizer --


def made():
    """Makes a model in Megatron's DistributedDataParallel, and Megatron's optimizer for it."""
    from megatron.core import parallel_state
    from megatron.core.distributed import (
        DistributedDataParallel,
        DistributedDataParallelConfig,
    )
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.transformer import TransformerConfig

    parallel_state.initialize_model_parallel()
    torch.manual_seed(1)
    module = nn.Sequential(nn.Linear(16, 24), nn.Linear(24, 8)).bfloat16()
    dtypes = {"bf16": True, "params_dtype": torch.bfloat16}
    model = DistributedDataParallel(
        TransformerConfig(num_layers=1, hidden_size=8, num_attention_heads=1, **dtypes),
        DistributedDataParallelConfig(use_distributed_optimizer=True, grad_reduce_in_fp32=True),
        module,
    )
    config = OptimizerConfig(
        optimizer="adam",
        lr=1e-2,
        clip_grad=0.2,
        use_distributed_optimizer=True,
        use_precision_aware_optimizer=True,
        optimizer_cpu_offload=True,
        optimizer_offload_fraction=1.0,
        overlap_cpu_optimizer_d2h_h2d=True,
        **dtypes,
    )
    return model, get_megatron_optimizer(config, [model])


def train(model, optimizer, seeds):
    """All ranks have the same batch, so that results do not depend on the number of ranks."""
    norms = []
    for seed in seeds:
        model.zero_grad_buffer()
        optimizer.zero_grad()
        x = torch.randn(4, 16, generator=torch.Generator().manual_seed(seed)).bfloat16()
        model(x).float().square().mean().backward()
        model.finish_grad_sync()
        norms.append(optimizer.step()[1])
    return norms


def inner(optimizer):
    return optimizer.chained_optimizers[0].optimizer


def states(optimizer):
    state = inner(optimizer).state
    params = [param for group in inner(optimizer).param_groups for param in group["params"]]
    names = ("step", "exp_avg", "exp_avg_sq", "master_param")
    return [bits(state[param][name] for name in names) for param in params]


def sharded(model, optimizer, sharding, is_loading):
    from megatron.core.dist_checkpointing import ShardedTensor

    replica = (0, 0, dist.get_rank())
    params = {
        name: ShardedTensor.from_rank_offsets(name, param, replica_id=replica)
        for name, param in model.module.named_parameters()
    }
    metadata = {"distrib_optim_sharding_type": sharding}
    state = optimizer.sharded_state_dict(params, is_loading=is_loading, metadata=metadata)
    return {"model": params, "optimizer": state}


def save(rank, world, folder, shardings):
    from cpu_as_gpu import cpu_as_gpu
    from megatron.core import dist_checkpointing

    megatron.install()
    with cpu_as_gpu():
        model, optimizer = made()
        assert isinstance(inner(optimizer), hybridopt.AdamW)
        norms = train(model, optimizer, range(3))
        assert max(norms) > 0.2  # clipped
        for sharding in shardings:
            dist_checkpointing.save(sharded(model, optimizer, sharding, False), f"{folder}/{sharding}")
        saved = states(optimizer)
        assert len(inner(optimizer).memory_timeline()) == 6  # one engine made all samples
        train(model, optimizer, range(3, 5))
        return saved, states(optimizer), bits(model.module.parameters())


def load(rank, world, folder, sharding):
    from cpu_as_gpu import cpu_as_gpu
    from megatron.core import dist_checkpointing

    megatron.install()
    with cpu_as_gpu():
        model, optimizer = made()
        for param in model.module.parameters():
            param.data.zero_()
        loaded = dist_checkpointing.load(sharded(model, optimizer, sharding, True), f"{folder}/{sharding}")
        for name, param in model.module.named_parameters():
            param.data.copy_(loaded["model"][name])
        optimizer.load_state_dict(loaded["optimizer"])
        engine = inner(optimizer)._engine
        at_once = states(optimizer)
        train(model, optimizer, range(3, 5))
        assert inner(optimizer)._engine is engine  # its memory was allocated only once
        return at_once, states(optimizer), bits(model.module.parameters())


def shardings():
    """The checkpoint formats without Megatron-FSDP that this version of Megatron writes."""
    from megatron.core import __version__

    # Version 0.15 fails on torch's step counts in dp_reshardable; 0.16 cannot read fully_sharded_model_space any more.
    last = "fully_sharded_model_space" if __version__.startswith("0.15.") else "dp_reshardable"
    return ("dp_zero_gather_scatter", "fully_reshardable", last)


SHARDINGS = shardings()


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("megatron")
    for sharding in SHARDINGS:
        (folder / sharding).mkdir()
    return folder, ranks.run(save, 2, str(folder), SHARDINGS)


@pytest.mark.parametrize("sharding", SHARDINGS)
def test_checkpoints_go_on_with_the_same_bits(saved, sharding):
    folder, expected = saved
    assert expected[0][2] == expected[1][2]
    assert ranks.run(load, 2, str(folder), sharding) == expected
    (alone,) = ranks.run(load, 1, str(folder), sharding)
    assert alone[2] == expected[0][2]


def loading_weights(rank, world):
    from cpu_as_gpu import cpu_as_gpu

    megatron.install()
    with cpu_as_gpu():
        model, optimizer = made()
        train(model, optimizer, range(2))
        with torch.no_grad():
            for param in model.module.parameters():
                param.fill_(0.5)
        optimizer.reload_model_params()
        train(model, optimizer, range(1))
        return [param.detach().float() for param in model.module.parameters()]


def test_weights_that_are_loaded_become_masters():
    for params in ranks.run(loading_weights, 2):
        for param in params:
            assert ((param - 0.5).abs() < 0.05).all() and (param != 0.5).any()
