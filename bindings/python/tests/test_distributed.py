"""Optimizers on several ranks: DTensor, FSDP2, replicas, torch's distributed checkpoints. The ranks are real
processes over gloo. Sharded results are compared, bit for bit, with an unsharded optimizer that gets the same
gradients."""

import copy
import itertools
import os

import models
import pytest
import ranks
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import hybridopt
from hybridopt import abi
from hybridopt.params import sharding
from hybridopt.ranks.process_group import ProcessGroupComm


def model(seed=0):
    """A model with dimensions that 2 and 4 do not divide: some shards are uneven, and some are empty."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(10, 7), nn.Tanh(), nn.Linear(7, 3))


def batch(seed):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(6, 10, generator=generator), torch.randn(6, 3, generator=generator)


def full(tensor):
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def optimizer_for(module, **options):
    options = {"lr": 0.05, "weight_decay": 0.1, **options}
    return hybridopt.AdamW(module.named_parameters(), threads=1, **options)


def backward(module, seed):
    inputs, targets = batch(seed)
    loss = nn.functional.mse_loss(module(inputs), targets)
    loss.backward()
    return float(loss.detach())


def train(module, optimizer, seeds, follower=None):
    """Makes some steps and returns their losses. The follower's model gets the same gradients, unsharded."""
    losses = []
    for seed in seeds:
        losses.append(backward(module, seed))
        if follower is not None:
            for own, param in zip(follower.param_groups[0]["params"], module.parameters()):
                own.grad = full(param.grad).detach().clone()
            follower.step()
        optimizer.step()
        optimizer.zero_grad()
    return losses


def assert_same_bits(module, optimizer, plain, follower):
    for param, own in zip(module.parameters(), plain.parameters()):
        assert models.bits([full(param)]) == models.bits([own])
        state, expected = optimizer.state[param], follower.state[own]
        assert set(state) == set(expected) == {"step", "exp_avg", "exp_avg_sq"}
        for key in ("exp_avg", "exp_avg_sq"):
            assert isinstance(state[key], DTensor)
            assert state[key].placements == param.placements
            assert models.bits([full(state[key])]) == models.bits([expected[key]])
        assert float(state["step"]) == float(expected["step"])


def sharded_training(rank, world, policy):
    plain = model()
    module = fully_shard(copy.deepcopy(plain), offload_policy=policy)
    sizes = [param._local_tensor.numel() for param in module.parameters()]
    optimizer = optimizer_for(module)
    follower = optimizer_for(plain)
    torchs = fully_shard(model(), offload_policy=policy)
    torchs_optimizer = torch.optim.AdamW(torchs.parameters(), lr=0.05, weight_decay=0.1)
    losses = train(module, optimizer, range(5), follower)
    assert losses == pytest.approx(train(torchs, torchs_optimizer, range(5)), rel=1e-5)
    assert_same_bits(module, optimizer, plain, follower)
    return sizes, losses


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("policy", [None, CPUOffloadPolicy(pin_memory=False)])
def test_fsdp2_steps_as_one_process_would(world, policy):
    results = ranks.run(sharded_training, world, policy)
    assert all(losses == results[0][1] for _, losses in results)
    if world == 4:
        assert any(0 in sizes for sizes, _ in results)


def low_precision_moments(rank, world):
    """The random rounding of bf16 moments depends on the element's position in the global tensor."""
    plain = model()
    module = fully_shard(copy.deepcopy(plain))
    optimizer = optimizer_for(module, state_dtype=torch.bfloat16)
    follower = optimizer_for(plain, state_dtype=torch.bfloat16)
    train(module, optimizer, range(3), follower)
    assert all(entry["exp_avg"].dtype == torch.bfloat16 for entry in optimizer.state.values())
    assert_same_bits(module, optimizer, plain, follower)


def test_randomly_rounded_moments_do_not_depend_on_the_sharding():
    ranks.run(low_precision_moments, 4)


def split_masters(rank, world):
    """FSDP2's local shards in bf16 on the CPU are the upper halves of their masters."""
    made = []
    for layout in ("split", "fp32"):
        module = fully_shard(model().bfloat16())
        optimizer = optimizer_for(module, master_layout=layout)
        for seed in range(4):
            inputs, targets = (tensor.bfloat16() for tensor in batch(seed))
            nn.functional.mse_loss(module(inputs), targets).backward()
            optimizer.step()
            optimizer.zero_grad()
        made.append((module, optimizer))
    (split, optimizer), (whole, expected) = made
    for param, own in zip(split.parameters(), whole.parameters()):
        assert optimizer.state[param]["master_low"].placements == param.placements
        masters = optimizer.master_of(param), expected.master_of(own)
        assert models.bits([full(masters[0])]) == models.bits([full(masters[1])])
    state, optimizer_state = get_state_dict(split, optimizer)
    module = fully_shard(model(seed=9).bfloat16())
    again = optimizer_for(module)
    set_state_dict(module, again, model_state_dict=state, optim_state_dict=optimizer_state)
    for param, own in zip(module.parameters(), whole.parameters()):
        masters = again.master_of(param), expected.master_of(own)
        assert models.bits([full(masters[0])]) == models.bits([full(masters[1])])


def test_split_masters_of_fsdp2_are_the_fp32_masters():
    ranks.run(split_masters, 2)


def low_precision_backward(module, seed):
    inputs, targets = (tensor.bfloat16() for tensor in batch(seed))
    nn.functional.mse_loss(module(inputs), targets).backward()


def state_bits(module, optimizer):
    """All bits of params, masters and moments, by name."""
    return {
        (name, key): models.bits([full(tensor)])
        for name, param in module.named_parameters()
        for key, tensor in (
            ("param", param.detach()),
            ("master", optimizer.master_of(param)),
            *((key, optimizer.state[param][key]) for key in ("step", "exp_avg", "exp_avg_sq")),
        )
    }


def go_on(module, optimizer, seeds):
    for seed in seeds:
        low_precision_backward(module, seed)
        optimizer.step()
        optimizer.zero_grad()


def split_masters_through_torchs_state_dicts(rank, world, whole, from_rank_0):
    """State is exported by torch.distributed.checkpoint's functions and imported again, whole or in shards."""
    options = StateDictOptions(full_state_dict=whole, cpu_offload=whole and not from_rank_0)
    moments = torch.bfloat16
    sharded = fully_shard(model().bfloat16())
    optimizer = optimizer_for(sharded, master_layout="split", state_dtype=moments)
    go_on(sharded, optimizer, range(3))
    weights = get_model_state_dict(sharded, options=StateDictOptions(full_state_dict=True))
    exported = copy.deepcopy(get_optimizer_state_dict(sharded, optimizer, options=options))
    if exported:  # torch gives state dicts that it has brought to the CPU to rank 0 only
        lows = {name: entry["master_low"] for name, entry in exported["state"].items()}
        assert {low.dtype for low in lows.values()} == {torch.uint8}
        assert any(isinstance(low, DTensor) for low in lows.values()) != whole
        assert any(bool(full(low).any()) for low in lows.values())
    before = state_bits(sharded, optimizer)
    go_on(sharded, optimizer, range(3, 5))
    expected = state_bits(sharded, optimizer)
    if options.cpu_offload:
        everything = [exported, weights]
        dist.broadcast_object_list(everything, src=0)
        exported, weights = everything
    if from_rank_0:
        exported = exported if rank == 0 else {}

    reading = StateDictOptions(full_state_dict=whole, broadcast_from_rank0=from_rank_0)
    for layout in ("split",) if from_rank_0 else ("split", "fp32"):
        for shards in (True, False) if whole and not from_rank_0 else (True,):
            module = model(seed=9).bfloat16()
            module = fully_shard(module) if shards else module
            again = optimizer_for(module, master_layout=layout, state_dtype=moments)
            loaded = StateDictOptions(full_state_dict=True)
            if layout == "split":
                again.materialize()  # instead of torch's step with gradients of zero
                assert {float(entry["step"]) for entry in again.state.values()} == {0.0}
            set_model_state_dict(module, copy.deepcopy(weights) if weights else {}, options=loaded)
            set_optimizer_state_dict(module, again, copy.deepcopy(exported), options=reading)
            assert state_bits(module, again) == before, (layout, shards)
            go_on(module, again, range(3, 5))
            if shards:  # without shards the backward pass adds in another order
                assert state_bits(module, again) == expected, layout
            if layout == "split":
                continue
            back = fully_shard(model(seed=9).bfloat16())
            split = optimizer_for(back, master_layout="split", state_dtype=moments)
            set_model_state_dict(back, get_model_state_dict(module, options=loaded), options=loaded)
            given = copy.deepcopy(get_optimizer_state_dict(module, again, options=loaded))
            assert all("master_param" in entry for entry in given["state"].values())
            set_optimizer_state_dict(back, split, given, options=loaded)
            assert state_bits(back, split) == state_bits(module, again)

    module = fully_shard(model().bfloat16())
    torchs = torch.optim.AdamW(module.named_parameters())
    set_optimizer_state_dict(module, torchs, copy.deepcopy(exported), options=reading)
    for name, param in module.named_parameters():
        for key in ("exp_avg", "exp_avg_sq"):
            assert models.bits([full(torchs.state[param][key])]) == before[name, key]
    low_precision_backward(module, 3)
    torchs.step()


@pytest.mark.parametrize(("whole", "from_rank_0"), [(True, False), (True, True), (False, False)])
def test_split_masters_go_through_torchs_state_dicts(whole, from_rank_0):
    ranks.run(split_masters_through_torchs_state_dicts, 2, whole, from_rank_0)


def clipped_training(rank, world, mesh_shape):
    names = ("replicas", "shards")[-len(mesh_shape) :]
    mesh = init_device_mesh("cpu", mesh_shape, mesh_dim_names=names)
    plain = model()
    module = fully_shard(copy.deepcopy(plain), mesh=mesh)
    optimizer = optimizer_for(module, max_grad_norm=0.3)
    norms = []
    for seed in range(3):
        backward(module, seed)
        grads = torch.cat([full(param.grad).double().flatten() for param in module.parameters()])
        before = [full(param).double() for param in module.parameters()]
        optimizer.step()
        result = optimizer.last_step()
        assert result.grad_norm == pytest.approx(float(grads.norm()), rel=1e-12)
        assert result.grad_clip == pytest.approx(0.3 / (float(grads.norm()) + 1e-6), rel=1e-6)
        after = [full(param).double() for param in module.parameters()]
        assert models.bits(before) != models.bits(after)
        norms.append((result.grad_norm.hex(), result.grad_clip.hex()))
        optimizer.zero_grad()
    return norms


@pytest.mark.parametrize("mesh_shape", [(2,), (2, 2)])
def test_ranks_clip_by_the_norm_of_the_whole(mesh_shape):
    world = mesh_shape[0] * mesh_shape[-1] if len(mesh_shape) > 1 else mesh_shape[0]
    norms = ranks.run(clipped_training, world, mesh_shape)
    assert all(norm == norms[0] for norm in norms)


def one_rank_has_an_infinity(rank, world):
    module = fully_shard(model())
    optimizer = optimizer_for(module)
    train(module, optimizer, [0])
    before = [full(param).clone() for param in module.parameters()]
    backward(module, 1)
    weight = next(module.parameters())
    if rank == 1:
        weight.grad._local_tensor.view(-1)[0] = float("inf")
    optimizer.step()
    assert optimizer.last_step().skipped
    assert models.bits(before) == models.bits([full(param) for param in module.parameters()])
    assert float(optimizer.state[weight]["step"]) == 1
    return None


def test_an_infinity_on_one_rank_skips_the_step_on_all():
    ranks.run(one_rank_has_an_infinity, 2)


def save_on(rank, world, folder):
    plain = model()
    module = fully_shard(copy.deepcopy(plain))
    optimizer, follower = optimizer_for(module), optimizer_for(plain)
    train(module, optimizer, range(3), follower)
    state, optimizer_state = get_state_dict(module, optimizer)
    dcp.save({"model": state, "optimizer": optimizer_state}, checkpoint_id=folder)
    train(module, optimizer, range(3, 6), follower)
    return {
        "params": [full(param).detach().clone() for param in module.parameters()],
        "state": models.state_bits(follower),
    }


def load_on(rank, world, folder):
    module = fully_shard(model(seed=9))  # other weights, to be replaced
    optimizer = optimizer_for(module, lr=0.7)
    state, optimizer_state = get_state_dict(module, optimizer)
    content = {"model": state, "optimizer": optimizer_state}
    dcp.load(content, checkpoint_id=folder)
    set_state_dict(
        module,
        optimizer,
        model_state_dict=content["model"],
        optim_state_dict=content["optimizer"],
    )
    assert optimizer.param_groups[0]["lr"] == 0.05
    return continued(module, optimizer)


def continued(module, optimizer):
    """Makes three more steps with the gradients of four ranks; those of the whole batch are the same."""
    train(module, optimizer, range(3, 6))
    unsharded = {
        (index, key): models.bits([full(value).reshape(-1)])
        for index, entry in optimizer.state_dict()["state"].items()
        for key, value in entry.items()
    }
    return {
        "params": [full(param).detach().clone() for param in module.parameters()],
        "state": unsharded,
    }


def test_torchs_distributed_checkpoint_goes_from_four_ranks_to_two(tmp_path):
    saved = ranks.run(save_on, 4, str(tmp_path))[0]
    for loaded in ranks.run(load_on, 2, str(tmp_path)):
        assert models.bits(loaded["params"]) == models.bits(saved["params"])
        assert loaded["state"] == saved["state"]


def save_here_on(rank, world, folder):
    plain = model()
    module = fully_shard(copy.deepcopy(plain))
    optimizer, follower = optimizer_for(module), optimizer_for(plain)
    train(module, optimizer, range(3), follower)
    optimizer.save_checkpoint(f"{folder}/step3", progress=False)
    train(module, optimizer, range(3, 6), follower)
    return {
        "params": [full(param).detach().clone() for param in module.parameters()],
        "state": models.state_bits(follower),
    }


def load_here_on(rank, world, folder):
    module = fully_shard(model(seed=9))
    optimizer = optimizer_for(module)
    optimizer.load_checkpoint(f"{folder}/step3", progress=False)
    return continued(module, optimizer)


def test_the_librarys_checkpoint_goes_from_four_ranks_to_two(tmp_path):
    saved = ranks.run(save_here_on, 4, str(tmp_path))[0]
    for loaded in ranks.run(load_here_on, 2, str(tmp_path)):
        assert models.bits(loaded["params"]) == models.bits(saved["params"])
        assert loaded["state"] == saved["state"]


def placed_params(rank, world):
    """Compares the shards of params with the part that torch gives this rank of a tensor of indices."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    choices = [Replicate(), Shard(0), Shard(1)]
    for shape in [(7, 3), (5, 9), (1, 2)]:
        whole = torch.arange(shape[0] * shape[1]).view(shape)
        for placements in itertools.product(choices, repeat=2):
            param = distribute_tensor(whole, mesh, placements)
            assert_elements(param, whole)
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(8, 12), nn.Linear(12, 4))
    parallelize_module(module, mesh["tensor"], {"0": ColwiseParallel(), "1": RowwiseParallel()})
    fully_shard(module, mesh=mesh["data"])
    strided = 0
    for name, param in module.named_parameters():
        strided += "Strided" in repr(param.placements)
        whole = torch.arange(param.numel()).view(param.shape)
        assert_elements(distribute_tensor(whole, mesh, param.placements), whole)
        assert sharding.shard_of(param, name).boxes
    assert strided > 0
    train_two_dimensions(module, mesh)


def assert_elements(param, whole):
    shard = sharding.shard_of(param, "param")
    listed = []
    for offsets, extents in shard.boxes:
        box = whole[tuple(slice(o, o + e) for o, e in zip(offsets, extents))]
        listed += box.flatten().tolist()
    assert listed == param._local_tensor.flatten().tolist(), param.placements
    counted = torch.tensor(0 if shard.replica else len(listed))
    dist.all_reduce(counted)
    assert int(counted) == whole.numel()  # each element is counted by exactly one rank


def train_two_dimensions(module, mesh):
    """The norm counts each element once, for any mesh dimensions over which a param is replicated."""
    optimizer = optimizer_for(module, max_grad_norm=1.0)
    for param in module.parameters():
        noise = torch.randn(param.shape, generator=torch.Generator().manual_seed(param.numel()))
        param.grad = distribute_tensor(noise, param.device_mesh, param.placements)
    grads = torch.cat([full(param.grad).double().flatten() for param in module.parameters()])
    optimizer.step()
    assert optimizer.last_step().grad_norm == pytest.approx(float(grads.norm()), rel=1e-12)


def test_shards_are_what_torch_gives_each_rank():
    ranks.run(placed_params, 4)


def columns_of_a_tensor(rank, world):
    """The part that older versions of torch give a rank may be a view with gaps."""
    mesh = init_device_mesh("cpu", (2,))
    whole, grad = torch.arange(12.0).view(3, 4), torch.arange(12.0).view(3, 4).cos()
    columns = slice(2 * rank, 2 * rank + 2)

    def param_of(tensor):
        return nn.Parameter(DTensor.from_local(tensor, mesh, [Shard(1)], run_check=False))

    weight, plain = param_of(whole.clone()[:, columns]), nn.Parameter(whole.clone())
    assert not weight._local_tensor.is_contiguous()
    for optimizer, param in ((optimizer_of([weight]), weight), (optimizer_of([plain]), plain)):
        param.grad = param_of(grad.clone()[:, columns]).detach() if param is weight else grad.clone()
        optimizer.step()
    assert models.bits([full(weight)]) == models.bits([plain])
    turned = param_of(whole.clone()[:, columns].t().contiguous().t())
    with pytest.raises(ValueError, match="its local tensor has the strides .*, expected a contiguous one"):
        optimizer_of([turned]).step()


def optimizer_of(params):
    return hybridopt.AdamW(params, lr=0.05, threads=1)


def test_local_tensors_may_have_gaps():
    ranks.run(columns_of_a_tensor, 2)


class Block(nn.Module):
    """`up` and `down` are sharded by tensor parallelism. The params outside of its plan have dimensions that 2 does
    not divide."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(10, 7)
        self.norm = nn.LayerNorm(7)
        self.up, self.down = nn.Linear(7, 12), nn.Linear(12, 3)

    def forward(self, inputs):
        hidden = self.norm(self.inner(inputs))
        return self.down(torch.tanh(self.up(hidden)))


def block(seed=0):
    torch.manual_seed(seed)
    return Block()


def in_two_dimensions(module, mesh, fsdp=True):
    plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    parallelize_module(module, mesh["tp"], plan)
    return fully_shard(module, mesh=mesh["dp"]) if fsdp else module


def norm_of(params):
    """The norm of the gradients of all params in float64; the params are whole here."""
    return float(torch.cat([full(param.grad).double().flatten() for param in params]).norm())


def tensor_parallel_training(rank, world, fsdp, folder):
    """Params outside of the plan are on parts of the mesh or on no mesh, and every rank of the tensor dimension
    holds them."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    plain = block()
    module = in_two_dimensions(copy.deepcopy(plain), mesh, fsdp)
    meshes = {tuple(getattr(p, "device_mesh", DeviceMesh("cpu", [rank])).mesh.flatten().tolist()) for p in module.parameters()}
    assert len(meshes) == 2
    group = None if fsdp else mesh["tp"].get_group()
    optimizer, follower = optimizer_for(module, process_group=group), optimizer_for(plain)
    train(module, optimizer, range(3), follower)
    for param, own in zip(module.parameters(), plain.parameters()):
        assert models.bits([full(param)]) == models.bits([own])
    clipped = optimizer_for(module, max_grad_norm=0.1, process_group=group)
    backward(module, 7)
    clipped.step()
    assert clipped.last_step().grad_norm == pytest.approx(norm_of(module.parameters()), rel=1e-12)
    optimizer.zero_grad()
    optimizer.save_checkpoint(f"{folder}/{'dp' if fsdp else rank // 2}", progress=False)
    return {
        "params": [full(param).detach().clone() for param in module.parameters()],
        "state": models.state_bits(follower),
    }


def load_block(rank, world, path):
    module = block(seed=9)
    optimizer = optimizer_for(module)
    optimizer.load_checkpoint(path, progress=False)
    return {
        "params": [param.detach().clone() for param in module.parameters()],
        "state": models.state_bits(optimizer),
    }


@pytest.mark.parametrize("fsdp", [True, False])
def test_tensor_parallel_params_and_those_outside_of_the_plan_are_counted_once(fsdp, tmp_path):
    saved = ranks.run(tensor_parallel_training, 4, fsdp, str(tmp_path))[0]
    (loaded,) = ranks.run(load_block, 1, str(tmp_path / ("dp" if fsdp else "0")))
    assert models.bits(loaded["params"]) == models.bits(saved["params"])
    assert loaded["state"] == saved["state"]


def different_tensors_of_one_name(rank, world):
    """Each rank of the tensor dimension has an expert of its own, sharded along the other dimension."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    module = in_two_dimensions(block(), mesh)
    expert = nn.Parameter(
        distribute_tensor(torch.full((5, 2), float(rank % 2)), mesh["dp"], [Shard(0)])
    )
    named = [*module.named_parameters(), ("expert", expert)]
    with pytest.raises(
        ValueError,
        match="param expert: ranks 0 and 1 hold different tensors of this name, .*; broadcast the model",
    ):
        hybridopt.AdamW(named, process_group=dist.group.WORLD, threads=1).step()
    named[-1] = (f"expert{rank % 2}", expert)
    optimizer = hybridopt.AdamW(named, lr=0.1, max_grad_norm=1.0, threads=1)
    backward(module, 0)
    expert.grad = distribute_tensor(torch.ones(5, 2), mesh["dp"], [Shard(0)])
    optimizer.step()
    expected = norm_of(module.parameters()) ** 2 + 2 * 10
    assert optimizer.last_step().grad_norm ** 2 == pytest.approx(expected, rel=1e-12)


def test_experts_are_no_replicas():
    ranks.run(different_tensors_of_one_name, 4)


def pipeline_stages(rank, world, sharded, folder):
    """Two stages of the same shape, made from the same seed: neither their names nor their bits differ."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
    stage, group = rank // 2, mesh["dp"].get_group()
    module = nn.Sequential(nn.LayerNorm(5), nn.Linear(5, 5))
    with torch.no_grad():
        nn.init.ones_(module[1].weight), nn.init.zeros_(module[1].bias)
    if sharded:
        fully_shard(module, mesh=mesh["dp"])

    def set_grads():
        for i, param in enumerate(module.parameters()):
            grad = torch.full(param.shape, 1.0 + i + 10 * stage)
            param.grad = distribute_tensor(grad, param.device_mesh, param.placements) if sharded else grad

    def step(params, **options):
        set_grads()
        optimizer = hybridopt.AdamW(
            params, lr=0.1, max_grad_norm=1.0, threads=1, process_group=dist.group.WORLD, **options
        )
        optimizer.step()
        return optimizer

    sizes = [param.numel() for param in module.parameters()]
    expected = sum(n * (1 + i + 10 * s) ** 2 for s in range(2) for i, n in enumerate(sizes)) ** 0.5
    with pytest.raises(
        ValueError,
        match="param param_groups.0.0: ranks 0 and . each have a tensor of this name, and no device mesh "
        "says whether it is the same one; .*replica_group=.*name them apart",
    ):
        step(module.parameters())
    unnamed = step(module.parameters(), replica_group=group)
    assert unnamed.last_step().grad_norm == pytest.approx(expected, rel=1e-12)
    with pytest.raises(
        abi.InvalidStateError,
        match="'param_groups.0.0' is the name of different tensors on ranks 0 and 2, .* name them apart",
    ):
        unnamed.save_checkpoint(f"{folder}/unnamed", progress=False)
    named = [(f"stage{stage}.{name}", param) for name, param in module.named_parameters()]
    optimizer = step(named, **({} if sharded else {"replica_group": group}))
    assert optimizer.last_step().grad_norm == pytest.approx(expected, rel=1e-12)
    optimizer.save_checkpoint(f"{folder}/named", progress=False)
    assert not os.path.exists(f"{folder}/unnamed")


@pytest.mark.parametrize("sharded", [True, False])
def test_pipeline_stages_are_no_replicas(sharded, tmp_path):
    ranks.run(pipeline_stages, 4, sharded, str(tmp_path))
    tensors = abi.checkpoint_inspect(tmp_path / "named")[1]
    assert {tensor.name.split(".")[0] for tensor in tensors} == {"stage0", "stage1"}


def three_dimensions(rank, world):
    """Two stages of a pipeline, each sharded unevenly along two dimensions."""
    mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("pp", "dp", "tp"))
    stage = mesh.get_local_rank("pp")
    module = in_two_dimensions(block(seed=stage), mesh)
    named = [(f"stage{stage}.{name}", param) for name, param in module.named_parameters()]
    optimizer = hybridopt.AdamW(
        named, lr=0.1, max_grad_norm=0.1, process_group=dist.group.WORLD, threads=1
    )
    norms = []
    for seed in range(2):
        backward(module, 10 * seed + stage)
        square = torch.tensor(norm_of(module.parameters()) ** 2, dtype=torch.float64)
        dist.all_reduce(square, group=mesh["pp"].get_group())
        expected = float(square.sqrt())
        optimizer.step()
        optimizer.zero_grad()
        result = optimizer.last_step()
        assert result.grad_norm == pytest.approx(expected, rel=1e-12)
        assert result.grad_clip == pytest.approx(0.1 / (expected + 1e-6), rel=1e-6)
        norms.append((result.grad_norm.hex(), result.grad_clip.hex()))
    return norms, sum(param._local_tensor.numel() for param in module.parameters())


def test_stages_in_uneven_shards_clip_by_the_norm_of_all():
    norms, sizes = zip(*ranks.run(three_dimensions, 8))
    assert all(norm == norms[0] for norm in norms)
    assert len(set(sizes)) > 1


def a_part_of_the_mesh(rank, world):
    """A pipeline stage knows only its own norm; a replica needs no other one."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
    module = fully_shard(model(), mesh=mesh["dp"])
    backward(module, 0)
    optimizer_for(module).step()
    with pytest.raises(
        ValueError,
        match=r"max_grad_norm: the parameters are on the ranks \[., .\] of a device mesh of \[0, 1, 2, 3\]"
        r".* process_group=.*",
    ):
        optimizer_for(module, max_grad_norm=1.0).step()
    pipeline = mesh["pp"].get_group()
    with pytest.raises(ValueError, match=r"'0.weight' is on the ranks .*, but process_group has .* all that"):
        optimizer_for(module, process_group=pipeline).step()
    with pytest.raises(ValueError, match="replica_group without process_group: .* as process_group too"):
        optimizer_for(module, replica_group=pipeline)
    optimizer = optimizer_for(module, max_grad_norm=1.0, process_group=mesh["dp"].get_group())
    optimizer.step()
    assert optimizer.last_step().grad_norm == pytest.approx(norm_of(module.parameters()), rel=1e-12)


def test_clipping_a_part_of_a_mesh_asks_for_the_ranks():
    ranks.run(a_part_of_the_mesh, 4)


def fsdp1(rank, world, originals):
    """FSDP1 does not say which parts of params a rank has, so calls that need to know them are refused."""
    torch.manual_seed(0)
    wrapped = FullyShardedDataParallel(
        model(), use_orig_params=originals, device_id=torch.device("cpu")
    )
    for option in ({"max_grad_norm": 1.0}, {"process_group": dist.group.WORLD}):
        text = f"{[*option][0]} with parameter .*FSDP1.* by torch.distributed.fsdp.fully_shard, or leave"
        with pytest.raises(ValueError, match=text):
            hybridopt.AdamW(wrapped.parameters(), **option)
    optimizer = optimizer_for(wrapped)
    twin = FullyShardedDataParallel(
        model(), use_orig_params=originals, device_id=torch.device("cpu")
    )
    twin_optimizer = torch.optim.AdamW(twin.parameters(), lr=0.05, weight_decay=0.1)
    for seed in range(3):
        for module, each in ((wrapped, optimizer), (twin, twin_optimizer)):
            backward(module, seed)
            module.clip_grad_norm_(0.1)
            each.step()
            each.zero_grad()
    for param, own in zip(wrapped.parameters(), twin.parameters()):
        torch.testing.assert_close(param, own, rtol=1e-5, atol=1e-6)
    states = [
        FullyShardedDataParallel.optim_state_dict(*pair)["state"]
        for pair in ((wrapped, optimizer), (twin, twin_optimizer))
    ]
    for name, entry in states[1].items():
        torch.testing.assert_close(states[0][name]["exp_avg"], entry["exp_avg"], rtol=1e-4, atol=1e-7)
    with pytest.raises(ValueError, match=r"hook_gradients\(\) with parameter .*FSDP1.* by .*fully_shard, or"):
        optimizer.hook_gradients()
    for call in (optimizer.save_checkpoint, optimizer.load_checkpoint):
        with pytest.raises(ValueError, match=f"{call.__name__}.* with parameter .*FSDP1"):
            call("nowhere", progress=False)


@pytest.mark.parametrize("originals", [False, True])
def test_fsdp1_steps_and_clips_by_itself_alone(originals):
    ranks.run(fsdp1, 2, originals)


def replicated_training(rank, world):
    """As under DistributedDataParallel: all ranks hold the whole of every param."""
    module, plain = model(), model()
    everyone = {"process_group": dist.group.WORLD, "replica_group": dist.group.WORLD}
    optimizer = optimizer_for(module, max_grad_norm=0.3, **everyone)
    follower = optimizer_for(plain, max_grad_norm=0.3)
    train(module, optimizer, range(3), follower)
    assert models.bits(module.parameters()) == models.bits(plain.parameters())
    assert optimizer.last_step().grad_norm == follower.last_step().grad_norm
    copied = copy.deepcopy(optimizer)  # without its group, which belongs to the process
    assert copied.state_dict()["state"].keys() == optimizer.state_dict()["state"].keys()

    other = optimizer_for(model(seed=rank), **everyone)
    for param in other.param_groups[0]["params"]:
        param.grad = torch.ones_like(param)
    with pytest.raises(ValueError, match="param 0.weight: ranks 0 and 1 hold different tensors"):
        other.step()


def test_replicas_are_counted_once():
    ranks.run(replicated_training, 2)


def a_rank_without_gradients(rank, world):
    weight = nn.Parameter(torch.ones(4))
    bias = nn.Parameter(torch.full((2,), float(rank)))
    bias.offload_shard = sharding.TensorShard((4,), (((2 * rank,), (2,)),))
    optimizer = hybridopt.SGD(
        [("weight", weight), ("bias", bias)],
        lr=1.0,
        process_group=dist.group.WORLD,
        replica_group=dist.group.WORLD,
        threads=1,
    )
    if rank == 0:
        bias.grad = torch.tensor([3.0, 4.0])
    optimizer.step()
    assert optimizer.last_step().grad_norm == 5.0
    return weight.tolist(), bias.tolist()


def test_a_rank_without_gradients_steps_with_the_others():
    results = ranks.run(a_rank_without_gradients, 2)
    assert results == [([1.0] * 4, [-3.0, -4.0]), ([1.0] * 4, [1.0, 1.0])]


def a_wider_gradient_on_one_rank(rank, world):
    """Each rank has a tensor of its own in bf16. The gradients of one tensor become fp32 one step later than those
    of the other."""
    weight = nn.Parameter(torch.ones(50).bfloat16())
    weight.offload_shard = sharding.TensorShard((100,), (((50 * rank,), (50,)),))
    optimizer = hybridopt.AdamW([("weight", weight)], lr=0.1, process_group=dist.group.WORLD, threads=1)
    twin = nn.Parameter(torch.ones(50).bfloat16())
    alone = hybridopt.AdamW([("weight", twin)], lr=0.1, threads=1)
    for step, grad in enumerate(torch.randn(5, 50)):
        dtype = torch.float32 if step >= 2 + rank else torch.bfloat16
        weight.decoupled_grad = twin.decoupled_grad = grad.to(dtype)
        optimizer.step(), alone.step()
    assert models.state_bits(optimizer) == models.state_bits(alone)
    assert optimizer.last_step().grad_norm > alone.last_step().grad_norm


def test_a_gradient_that_gets_wider_on_one_rank_first_holds_nobody_up():
    ranks.run(a_wider_gradient_on_one_rank, 2)


def a_param_unfrozen_on_one_rank(rank, world):
    module = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    for param in module.parameters():
        nn.init.ones_(param)
    module[0].requires_grad_(False)
    everyone = {"process_group": dist.group.WORLD, "replica_group": dist.group.WORLD}
    optimizer = optimizer_for(module, **everyone)
    module(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    before = models.bits(module.parameters())
    if rank == 1:
        module[0].requires_grad_(True)
    module(torch.ones(1, 2)).sum().backward()
    doings = ["in step()", "registering parameters, as before a first step and when some have been added"]
    with pytest.raises(abi.CommFailedError) as caught:
        optimizer.step()
    assert f"rank {1 - rank} is {doings[1 - rank]}" in str(caught.value), caught.value
    assert f"while rank {rank} is {doings[rank]}" in str(caught.value)
    assert "change what is trained before the same step" in str(caught.value)
    assert models.bits(module.parameters()) == before
    with pytest.raises(abi.HybridoptError):
        optimizer.step()


def test_ranks_that_train_different_params_hear_of_it():
    ranks.run(a_param_unfrozen_on_one_rank, 2)


def part_of_the_ranks(rank, world):
    """Ranks 1 and 3 train; the other ranks do not take part."""
    few = DeviceMesh("cpu", [1, 3])
    pairs = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pair", "place"))
    group = dist.new_group([1, 3])
    if rank in (0, 2):
        with pytest.raises(ValueError, match=r"rank . is not among the ranks \[1, 3\]"):
            ProcessGroupComm([1, 3])
        return None
    weight = nn.Parameter(distribute_tensor(torch.ones(5, 2), few, [Shard(0)]))
    weight.grad = distribute_tensor(torch.ones(5, 2), few, [Shard(0)])
    norms = []
    for process_group in (None, group):
        optimizer = hybridopt.SGD([weight], lr=1.0, process_group=process_group, threads=1)
        optimizer.step()
        norms.append(optimizer.last_step().grad_norm ** 2)
    elsewhere = DTensor.from_local(torch.ones(1, 2), pairs["place"], [Shard(0)], run_check=False)
    params = [("weight", weight), ("other", nn.Parameter(elsewhere))]
    with pytest.raises(ValueError, match=r"'weight' on ranks \[1, 3\], 'other' on ranks \[.*process_group"):
        hybridopt.SGD(params, lr=1.0).step()
    return norms


def test_some_of_the_ranks_are_enough():
    _, one, _, three = ranks.run(part_of_the_ranks, 4)
    assert one == three == pytest.approx([10.0, 10.0])


def a_rank_dies(rank, world, folder):
    module = fully_shard(model())
    optimizer = optimizer_for(module, max_grad_norm=0.3)
    train(module, optimizer, [0])
    backward(module, 1)
    dist.barrier()
    if rank == 1:
        os._exit(0)
    params = [param._local_tensor for param in module.parameters()]
    before = models.bits(params)
    with pytest.raises(abi.CommFailedError, match="rank 0 of 2: comm.sum"):
        optimizer.step()
    assert models.bits(params) == before
    weight = next(module.parameters())
    assert float(optimizer.state[weight]["step"]) == 1  # state can still be looked at
    with pytest.raises(abi.PoisonedError):
        optimizer.step()
    optimizer.close()
    torch.save("seen", f"{folder}/result")
    os._exit(0)


def test_a_rank_that_dies_fails_the_step_of_the_others(tmp_path):
    ranks.run(a_rank_dies, 2, str(tmp_path))
    assert torch.load(tmp_path / "result") == "seen"


def made_after_an_evaluation(rank, world, is_root_alone):
    module = model()
    if not is_root_alone:
        fully_shard(module[0])
    fully_shard(module)
    with torch.no_grad():
        module(batch(0)[0])
    names = [name for name, _ in module.named_parameters()]
    whole = names if is_root_alone else names[2:]
    assert [name for name, param in module.named_parameters() if not isinstance(param, DTensor)] == whole
    text = rf"'{whole[0]}' is the whole one that FSDP2 has gathered.*model.reshard\(\)"
    with pytest.raises(abi.InvalidStateError, match=text):
        optimizer_for(module)
    params = dict(module.named_parameters())
    module.reshard()
    optimizer, before = optimizer_for(module), [full(param) for param in module.parameters()]
    with pytest.raises(abi.InvalidStateError, match=text):
        optimizer.add_param_group({"params": [(whole[0], params[whole[0]])]})
    backward(module, 1)
    optimizer.step()
    assert all(not torch.equal(full(param), old) for param, old in zip(module.parameters(), before))


@pytest.mark.parametrize("is_root_alone", [False, True])
def test_whole_params_of_fsdp2_are_refused_with_the_way_out(is_root_alone):
    ranks.run(made_after_an_evaluation, 2, is_root_alone)


def wrong_gradients(rank, world):
    mesh = init_device_mesh("cpu", (2,))
    weight = nn.Parameter(distribute_tensor(torch.ones(5, 2), mesh, [Shard(0)]))
    optimizer = hybridopt.SGD([("weight", weight)], lr=1.0, threads=1)
    weight.grad = distribute_tensor(torch.ones(5, 2), mesh, [Shard(0)])
    optimizer.step()
    # Autograd does not know this gradient, as in frameworks that keep their own gradients.
    weight.decoupled_grad = distribute_tensor(torch.ones(5, 2), mesh, [Replicate()])
    with pytest.raises(ValueError, match="gradient of parameter 'weight' has the placements"):
        optimizer.step()


def test_gradients_of_other_placements_are_refused():
    ranks.run(wrong_gradients, 2)


def moving(rank, world):
    """Hooks take gradients during the backward pass, and a phase comes between two steps, over FSDP2's params."""
    module, other = fully_shard(model()), fully_shard(model())
    optimizer = optimizer_for(module, movable=("params", "grads", "states"), max_grad_norm=0.3)
    plain = optimizer_for(other, max_grad_norm=0.3)
    # FSDP2 reduces either the gradients of each pass or only the sum of both passes.
    for synced, options in ((True, {"micro_batches": 2}), (False, {})):
        with optimizer.hook_gradients(**options):
            for step in range(2):
                for micro_batch in range(2):
                    for each in (module, other):
                        each.set_requires_gradient_sync(synced or micro_batch == 1)
                        each.set_is_last_backward(micro_batch == 1)
                        backward(each, 2 * step + micro_batch)
                assert all(param.grad is None for param in module.parameters())
                optimizer.step(), plain.step()
                assert optimizer.last_step().grad_norm == plain.last_step().grad_norm
                optimizer.zero_grad(), plain.zero_grad()
    backward(module, 7), backward(other, 7)
    with optimizer.offloaded():
        for param in module.parameters():
            assert param._local_tensor.untyped_storage().nbytes() == 0
    assert all(isinstance(param.grad, DTensor) for param in module.parameters() if param.numel())
    optimizer.step(), plain.step()
    assert optimizer.last_step().grad_norm == plain.last_step().grad_norm
    for param, expected in zip(module.parameters(), other.parameters()):
        assert models.bits([full(param)]) == models.bits([full(expected)])


def test_gradients_and_params_of_fsdp2_go_and_come_back():
    ranks.run(moving, 2)


# ------------------------------------------------------------------------------------ weight changes


def sharded_in(mesh_shape):
    """A model over a mesh: FSDP2 alone, with replicas, or with tensor parallelism along either dimension."""
    module = model().bfloat16()
    if mesh_shape == "replicas":
        mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard"))
        return fully_shard(module, mesh=mesh)
    if mesh_shape == "1d":
        return fully_shard(module, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    mesh = init_device_mesh("cpu", mesh_shape, mesh_dim_names=("data", "tensor"))
    plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
    parallelize_module(module, mesh["tensor"], plan)
    return fully_shard(module, mesh=mesh["data"])


def publications(rank, world, mesh_shape, to, folder):
    """A follower of whole tensors gets what is gathered, a follower of shards what each rank has."""
    module = sharded_in(mesh_shape)
    optimizer = optimizer_for(module, lr=1e-4, track_changes=True)
    whole = {name: full(param).detach().clone() for name, param in module.named_parameters()}
    follower = {name: torch.zeros_like(tensor) for name, tensor in whole.items()}
    shards = {name: torch.zeros_like(p._local_tensor) for name, p in module.named_parameters()}
    sparse = 0
    for publication in range(4):
        patch = optimizer.weight_changes(dense_above=1.0)
        hybridopt.apply_changes(shards, patch)
        complete = hybridopt.gather_changes(patch, to)
        assert len(complete) == (len(whole) if rank == to else 0)
        if rank == to:
            path = os.path.join(folder, "patch")
            complete.to_file(path)
            read = hybridopt.WeightPatch.from_file(path)
            assert all(read[name].parts == change.parts for name, change in complete)
            hybridopt.apply_changes(follower, read)
            sparse += sum(change.values.numel() for _, change in complete if not change.dense)
            assert publication > 0 or all(change.dense for _, change in complete)
        complete.acknowledge()
        for name, param in module.named_parameters():
            if rank == to:
                assert complete[name].indices is None or torch.all(complete[name].indices.diff() > 0)
            assert torch.equal(shards[name], param._local_tensor)
            whole[name] = full(param).detach().clone()
            assert rank != to or torch.equal(follower[name], whole[name])
        generator = torch.Generator().manual_seed(publication)
        for param in module.parameters():
            grad = torch.randn(param.shape, generator=generator).bfloat16()
            param.grad = sharding.as_dtensor(sharding.local_part(grad, param), param)
        optimizer.step()
        optimizer.zero_grad()
    return sparse


@pytest.mark.parametrize(
    ("world", "mesh_shape", "to"),
    [
        (2, "1d", 0),
        (2, "1d", 1),
        (4, "1d", 0),
        (2, "replicas", 1),
        pytest.param(2, (1, 2), 0, marks=ranks.cuts_unevenly_beside_tensor_parallelism),
        (2, (2, 1), 0),
        pytest.param(4, (2, 2), 3, marks=ranks.cuts_unevenly_beside_tensor_parallelism),
    ],
)
def test_changes_of_shards_gathered_to_one_rank_are_those_of_the_whole_tensors(world, mesh_shape, to, tmp_path):
    sparse = ranks.run(publications, world, mesh_shape, to, str(tmp_path))
    elements = sum(param.numel() for param in model().parameters())
    assert 0 < sparse[to] < 3 * elements


def gathered_wrongly(rank, world, folder):
    module = fully_shard(model().bfloat16())
    optimizer = optimizer_for(module, track_changes=True)
    groups = [dist.new_group([0]), dist.new_group([1])]
    patch = optimizer.weight_changes()
    for value in (2, -1, True, "0", None):
        with pytest.raises(ValueError, match=r"Invalid to: .*, expected one of the ranks \[0, 1\]"):
            hybridopt.gather_changes(patch, value)
    with pytest.raises(ValueError, match=r"hold \d+ of 70 elements of parameter '0.weight'; give the group of all"):
        hybridopt.gather_changes(patch, rank, groups[rank])
    whole = {name: torch.zeros(full(param).shape).bfloat16() for name, param in module.named_parameters()}
    complete = hybridopt.gather_changes(patch, 1)
    if rank == 1:
        for name, change in complete:
            change.values.view(-1)[0] += 1
            with pytest.raises(ValueError, match=f"with the patch parameter '{name}' has the hash .*: the patch is damaged, or"):
                hybridopt.apply_changes({name: whole[name]}, hybridopt.WeightPatch({name: change}))
            assert not whole[name].any()
        path = os.path.join(folder, "patch")
        complete.to_file(path)
        with open(path, "r+b") as file:
            content = file.read()
            file.seek(0)
            file.write(content.replace(b"[[0, 0]", b"[[9, 9]"))
        with pytest.raises(ValueError, match="is no patch that can be read: its metadata for"):
            hybridopt.WeightPatch.from_file(path)


def test_gathering_refuses_what_cannot_be_put_together(tmp_path):
    ranks.run(gathered_wrongly, 2, str(tmp_path))


def test_gathering_without_ranks_says_what_is_missing():
    optimizer = optimizer_for(model(), track_changes=True)
    with pytest.raises(RuntimeError, match="there is no process group"):
        hybridopt.gather_changes(optimizer.weight_changes())
