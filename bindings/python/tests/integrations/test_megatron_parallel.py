"""Megatron-LM with install(), where several ranks share a model: tensor and pipeline parallelism, overlapped gathers
and reductions, and the checkpoints of Megatron-FSDP. All of it runs over gloo; Megatron uses the CPU as if it were a
GPU (cpu_as_gpu.py)."""

from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from test_megatron import made_like_megatron, states, train
from torch import nn

import ranks
from cpu_as_gpu import cpu_as_gpu
from hybridopt.integrations import megatron
from models import bits, set_gradients, state_bits

DTYPES = {"bf16": True, "params_dtype": torch.bfloat16}


class Perceptron(nn.Module):
    """Two layers of Megatron, which tensor parallelism shards. With pipeline parallelism each stage has one of them."""

    def __init__(self, config, stages):
        from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear

        super().__init__()
        shared = {"config": config, "init_method": nn.init.xavier_normal_, "bias": True, "skip_bias_add": False}
        if 0 in stages:
            self.up = ColumnParallelLinear(16, 24, gather_output=False, **shared)
        if 1 in stages:
            self.down = RowParallelLinear(24, 8, input_is_parallel=True, **shared)

    def forward(self, x):
        for layer in self.children():
            x, _ = layer(x)
        return x

    def sharded_state_dict(self):
        from megatron.core import parallel_state

        group = parallel_state.get_data_parallel_group(with_context_parallel=True)
        metadata = {"dp_cp_group": group}
        parts = [layer.sharded_state_dict(f"{name}.", metadata=metadata) for name, layer in self.named_children()]
        return {key: value for part in parts for key, value in part.items()}


def made(tensor=1, pipeline=1, overlap=False, clip_grad=0.2):
    from megatron.core import parallel_state
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.transformer import TransformerConfig

    parallel_state.initialize_model_parallel(tensor, pipeline)
    stages = {parallel_state.get_pipeline_model_parallel_rank()} if pipeline > 1 else {0, 1}
    config = TransformerConfig(
        num_layers=2,
        hidden_size=8,
        num_attention_heads=2,
        use_cpu_initialization=True,
        tensor_model_parallel_size=tensor,
        pipeline_model_parallel_size=pipeline,
        pipeline_dtype=torch.bfloat16,
        **DTYPES,
    )
    torch.manual_seed(1)
    module = Perceptron(config, stages).bfloat16()
    model = DistributedDataParallel(
        config,
        DistributedDataParallelConfig(
            use_distributed_optimizer=True,
            grad_reduce_in_fp32=True,
            overlap_grad_reduce=overlap,
            overlap_param_gather=overlap,
            bucket_size=200 if overlap else None,
        ),
        module,
    )
    config = OptimizerConfig(
        optimizer="adam",
        lr=1e-2,
        clip_grad=clip_grad,
        use_distributed_optimizer=True,
        use_precision_aware_optimizer=True,
        optimizer_cpu_offload=True,
        optimizer_offload_fraction=1.0,
        overlap_param_gather=overlap,
        **DTYPES,
    )
    return model, get_megatron_optimizer(config, [model])


def sharded(model, optimizer, sharding, is_loading):
    params = model.module.sharded_state_dict()
    metadata = {"distrib_optim_sharding_type": sharding}
    state = optimizer.sharded_state_dict(dict(params), is_loading=is_loading, metadata=metadata)
    return {"model": params, "optimizer": state}


def step_stage(model, optimizer, seeds):
    """Like train(), but each stage has a batch of its own."""
    norms = []
    for seed in seeds:
        model.zero_grad_buffer()
        optimizer.zero_grad()
        for layer in model.module.children():
            generator = torch.Generator().manual_seed(seed)
            x = torch.randn(4, layer.weight.shape[1], generator=generator).bfloat16()
            layer(x)[0].float().square().mean().backward()
        model.finish_grad_sync()
        norms.append(optimizer.step()[1])
    return norms


def stepping(pipeline):
    return step_stage if pipeline > 1 else train


def save(rank, world, folder, sharding, tensor, pipeline):
    from megatron.core import dist_checkpointing

    megatron.install()
    with cpu_as_gpu():
        model, optimizer = made(tensor, pipeline)
        norms = stepping(pipeline)(model, optimizer, range(3))
        assert max(norms) > 0.2  # clipped
        dist_checkpointing.save(sharded(model, optimizer, sharding, False), folder)
        saved = states(optimizer)
        stepping(pipeline)(model, optimizer, range(3, 5))
        return saved, states(optimizer), bits(model.module.parameters())


def load(rank, world, folder, sharding, tensor, pipeline):
    from megatron.core import dist_checkpointing

    megatron.install()
    with cpu_as_gpu():
        model, optimizer = made(tensor, pipeline)
        for param in model.module.parameters():
            param.data.zero_()
        loaded = dist_checkpointing.load(sharded(model, optimizer, sharding, True), folder)
        model.module.load_state_dict(loaded["model"])
        optimizer.load_state_dict(loaded["optimizer"])
        at_once = states(optimizer)
        stepping(pipeline)(model, optimizer, range(3, 5))
        return at_once, states(optimizer), bits(model.module.parameters())


@pytest.mark.parametrize("sharding", ["fully_reshardable", "dp_reshardable"])
@pytest.mark.parametrize("tensor, pipeline", [(2, 1), (1, 2)])
def test_model_parallel_checkpoints_go_on_with_the_same_bits(tmp_path, sharding, tensor, pipeline):
    arguments = (str(tmp_path), sharding, tensor, pipeline)
    expected = ranks.run(save, 2, *arguments)
    assert expected[0][2] != expected[1][2]
    assert ranks.run(load, 2, *arguments) == expected


def restored(rank, world, folder, tensor):
    """The params and the state that this rank loads, by name: the position in the whole tensor, and the values."""
    from megatron.core import dist_checkpointing

    megatron.install()
    with cpu_as_gpu():
        model, optimizer = made(tensor)
        loaded = dist_checkpointing.load(sharded(model, optimizer, "fully_reshardable", True), folder)
        model.module.load_state_dict(loaded["model"])
        optimizer.load_state_dict(loaded["optimizer"])
        written = sharded(model, optimizer, "fully_reshardable", False)
        parts = [*written["optimizer"]["param_state"].values(), written["model"]]
        return [
            (value.key, value.global_offset, value.data.float())
            for part in parts
            for value in part.values()
            if getattr(value, "data", None) is not None
        ]


def test_checkpoints_go_from_two_tensor_parallel_ranks_to_one(tmp_path):
    ranks.run(save, 2, str(tmp_path), "fully_reshardable", 2, 1)
    parts = ranks.run(restored, 2, str(tmp_path), 2)
    (alone,) = ranks.run(restored, 1, str(tmp_path), 1)
    assert len(alone) == len(parts[0]) == 16  # for each of four params: three tensors of state, and the param
    for key, offset, tensor in alone:
        assert not any(offset) and tensor.any()
        for part in parts:
            ((begin, piece),) = [(begin, piece) for other, begin, piece in part if other == key]
            places = tuple(slice(first, first + size) for first, size in zip(begin, piece.shape))
            assert torch.equal(tensor[places], piece), key


def train_without_clipping(rank, world, overlap):
    megatron.install()
    with cpu_as_gpu():
        model, optimizer = made(overlap=overlap, clip_grad=0.0)
        assert (len(model.buffers[0].buckets) > 1) == overlap
        train(model, optimizer, range(4))
        if overlap:  # as before an evaluation or a checkpoint, because nothing has waited for the last gather
            model.disable_forward_pre_hook(param_sync=True)
        return bits(model.module.parameters())


def test_megatrons_own_overlap_changes_no_bit():
    """Gradients are reduced bucket by bucket during the backward pass, and params are gathered during the next
    forward pass. (The buckets decide which rank has which shard, and so the order in which the norm adds squares.)"""
    plain = ranks.run(train_without_clipping, 2, False)
    assert plain[0] == plain[1]
    assert ranks.run(train_without_clipping, 2, True) == plain


# ------------------------------------------------------------------------------- Megatron-FSDP --


def made_over_shards(world):
    """Makes Megatron's DistributedOptimizer as Megatron-FSDP does, which itself needs GPUs: the optimizer has
    DTensors, and state is written by their names."""
    from megatron.core import parallel_state
    from megatron.core.optimizer import OptimizerConfig
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    parallel_state.initialize_model_parallel()
    mesh = init_device_mesh("cpu", (world,))
    torch.manual_seed(1)
    module = nn.Sequential(nn.Linear(16, 5), nn.Linear(5, 3)).bfloat16()
    for layer in module:
        for name, param in list(layer.named_parameters()):
            setattr(layer, name, nn.Parameter(distribute_tensor(param.detach(), mesh, [Shard(0)])))
    chunk = SimpleNamespace(
        ddp_config=SimpleNamespace(use_megatron_fsdp=True),
        config=SimpleNamespace(num_moe_experts=None),
        named_parameters=module.named_parameters,
    )
    config = OptimizerConfig(
        optimizer="adam",
        lr=1e-2,
        use_distributed_optimizer=True,
        use_precision_aware_optimizer=True,
        optimizer_cpu_offload=True,
        optimizer_offload_fraction=1.0,
        **DTYPES,
    )
    inner = made_like_megatron(module.parameters(), lr=1e-2)
    made = DistributedOptimizer(inner, config, None, None, [chunk], None, None, None, 0, 0)
    return module, made


def step_shards(module, optimizer, seeds):
    from torch.distributed.tensor import distribute_tensor

    for seed in seeds:
        for index, param in enumerate(module.parameters()):
            generator = torch.Generator().manual_seed(10 * seed + index)
            whole = torch.randn(param.shape, generator=generator).bfloat16()
            param.grad = distribute_tensor(whole, param.device_mesh, param.placements)
        optimizer.optimizer.step()


def whole_bits(module, optimizer):
    """The whole tensors of params and state."""
    state = optimizer.optimizer.state
    names = ("exp_avg", "exp_avg_sq", "master_param")
    return [
        (int(state[param]["step"]), bits([param.full_tensor(), *(state[param][name].full_tensor() for name in names)]))
        for param in module.parameters()
    ]


FSDP = {"distrib_optim_sharding_type": "fsdp_dtensor"}


def save_shards(rank, world, folder):
    import torch.distributed.checkpoint as dcp

    megatron.install()
    with cpu_as_gpu():
        module, optimizer = made_over_shards(world)
        step_shards(module, optimizer, range(3))
        state = {"model": module.state_dict(), "optimizer": optimizer.sharded_state_dict({}, metadata=FSDP)}
        dcp.save(state, checkpoint_id=folder)
        saved = whole_bits(module, optimizer)
        step_shards(module, optimizer, range(3, 5))
        return saved, whole_bits(module, optimizer)


def load_shards(rank, world, folder):
    import torch.distributed.checkpoint as dcp

    megatron.install()
    with cpu_as_gpu():
        module, optimizer = made_over_shards(world)
        wanted = optimizer.sharded_state_dict({}, is_loading=True, metadata=FSDP)
        state = {"model": module.state_dict(), "optimizer": wanted}
        dcp.load(state, checkpoint_id=folder)
        module.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        loaded = whole_bits(module, optimizer)
        step_shards(module, optimizer, range(3, 5))
        return loaded, whole_bits(module, optimizer)


def test_checkpoints_of_megatron_fsdp_go_on_with_the_same_bits(tmp_path):
    expected = ranks.run(save_shards, 2, str(tmp_path))
    assert expected[0] == expected[1]
    assert ranks.run(load_shards, 2, str(tmp_path)) == expected
    assert ranks.run(load_shards, 1, str(tmp_path)) == expected[:1]
