"""Gradients that leave during backward, and phases, with params on a GPU: memory is counted by
torch's allocator, bits are compared with a CPU optimizer that moves nothing."""

import copy
import gc

import pytest
import torch
from torch import nn

import hybridopt
from hybridopt import abi
from hybridopt.state.state_memory import StateMemory
from models import bits, set_gradients

ALL = ("params", "grads", "states")
every_fraction = pytest.mark.parametrize("fraction", [1.0, 0.4, 0.0])
every_dtype = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])


def pair(dtype, fraction, **options):
    """The same params and optimizer on the CPU and on the GPU."""
    on_cpu = [nn.Parameter(torch.randn(size).to(dtype)) for size in ((300, 500), (3,), (7, 9))]
    on_gpu = [nn.Parameter(param.detach().cuda()) for param in on_cpu]
    arguments = {"lr": 1e-2, "max_grad_norm": 1.0}
    cpu = hybridopt.AdamW(on_cpu, **arguments)
    gpu = hybridopt.AdamW(on_gpu, offload_fraction=fraction, **arguments, **options)
    return on_cpu, cpu, on_gpu, gpu


def set_both(on_cpu, on_gpu, seed):
    set_gradients(on_cpu, seed)
    for param, other in zip(on_cpu, on_gpu):
        other.grad = param.grad.cuda()


def step_both(on_cpu, cpu, on_gpu, gpu, seed):
    set_both(on_cpu, on_gpu, seed)
    cpu.step(), gpu.step()


def same(on_cpu, cpu, on_gpu, gpu):
    torch.cuda.synchronize()
    for param, other in zip(on_cpu, on_gpu):
        assert bits([param]) == bits([other.cpu()])
        state, others = cpu.state[param], gpu.state[other]
        assert state.keys() == others.keys()
        for key in state:
            assert bits([state[key].reshape(-1)]) == bits([others[key].cpu().reshape(-1)])
    return True


@every_fraction
@every_dtype
def test_everything_leaves_the_gpu_and_comes_back(fraction, dtype):
    both = on_cpu, cpu, on_gpu, gpu = pair(dtype, fraction, movable=ALL)
    for seed in range(3):
        step_both(*both, seed)
    for cycle in range(2):
        set_both(on_cpu, on_gpu, 10 + cycle)
        gradients = bits([param.grad for param in on_cpu])
        held = torch.cuda.memory_allocated()
        with gpu.offloaded():
            sizes = sum(param.numel() * param.element_size() for param in on_cpu)
            assert torch.cuda.memory_allocated() <= held - 2 * sizes
            assert gpu.stats().device_bytes == 0
            if fraction < 1.0:
                with pytest.raises(abi.InvalidStateError, match="states are offloaded and cannot"):
                    gpu.state_dict()
        assert bits([param.grad.cpu() for param in on_gpu]) == gradients
        cpu.step(), gpu.step()
        assert same(*both)


@every_fraction
def test_offloaded_gradients_are_stepped_where_they_are(fraction):
    both = on_cpu, cpu, on_gpu, gpu = pair(torch.bfloat16, fraction, movable=ALL)
    for seed in range(3):
        set_both(on_cpu, on_gpu, seed)
        gpu.offload(grads=True)
        assert all(param.grad is None for param in on_gpu)
        cpu.step(), gpu.step()
    assert same(*both)


@every_fraction
def test_weights_written_before_a_phase_are_the_next_steps(fraction):
    both = on_cpu, cpu, on_gpu, gpu = pair(torch.bfloat16, fraction, movable=ALL)
    step_both(*both, 0)
    with torch.no_grad():
        on_cpu[0].fill_(0.5), on_gpu[0].fill_(0.5)
    with gpu.offloaded(grads=False):
        pass
    with torch.no_grad():
        on_cpu[1].fill_(-2), on_gpu[1].fill_(-2)
    step_both(*both, 1)
    assert same(*both)


@every_fraction
@every_dtype
def test_states_may_leave_after_the_model_has(fraction, dtype):
    """NeMo-RL moves its model to the host by torch, then the states, and both back in the same order."""
    both = on_cpu, cpu, on_gpu, gpu = pair(dtype, fraction, movable=ALL)
    for seed in range(3):
        step_both(*both, seed)
        for param in on_gpu:
            param.data, param.grad = param.data.cpu(), None
        gpu.offload(states=True)
        for param in on_gpu:
            param.data = param.data.cuda()
        gpu.reload(states=True)
    assert same(*both)


def test_a_phase_reads_no_state(monkeypatch):
    """A copy of the state that lies partly on the host takes longer to make than a phase."""
    both = on_cpu, cpu, on_gpu, gpu = pair(torch.bfloat16, 0.4, movable=ALL)
    step_both(*both, 0)
    assert same(*both)  # this reads `state`
    monkeypatch.setattr(StateMemory, "show", lambda *given: pytest.fail("state was read"))
    for seed in (1, 2):
        with gpu.offloaded():
            pass
        step_both(*both, seed)
    monkeypatch.undo()
    assert same(*both)


def model(dtype):
    return nn.Sequential(nn.Linear(64, 256), nn.Tanh(), nn.Linear(256, 64)).to("cuda", dtype)


@every_fraction
@pytest.mark.parametrize(
    "dtype, micro_batches", [(torch.float32, 1), (torch.float32, 3), (torch.bfloat16, 1), (torch.bfloat16, 3)]
)
@pytest.mark.parametrize("accumulate", [False, True])
def test_hooked_gradients_step_to_the_same_bits(fraction, dtype, micro_batches, accumulate):
    if accumulate and dtype == torch.bfloat16 and micro_batches > 1:
        return  # the hooks add in fp32, but autograd adds in bf16
    module = model(dtype)
    other = copy.deepcopy(module)
    options = {"lr": 1e-2, "max_grad_norm": 0.5, "offload_fraction": fraction}
    hooked = hybridopt.AdamW(module.parameters(), **options)
    plain = hybridopt.AdamW(other.parameters(), **options)
    hooked.hook_gradients(accumulate, micro_batches=1 if accumulate else micro_batches)
    for step in range(12):
        for micro_batch in range(micro_batches):
            inputs = torch.randn(32, 64, device="cuda").to(dtype)
            for each in (module, other):
                each(inputs).float().square().mean().backward()
        assert all(param.grad is None for param in module.parameters())
        hooked.step(), plain.step()
        hooked.zero_grad(), plain.zero_grad()
    torch.cuda.synchronize()
    for param, expected in zip(module.parameters(), other.parameters()):
        assert bits([param.cpu()]) == bits([expected.cpu()])
    assert hooked.last_step().grad_norm == plain.last_step().grad_norm


LAYOUTS = {"fp32": {}, "small": {"master_layout": "split", "state_dtype": torch.bfloat16}}


@every_fraction
@pytest.mark.parametrize("overlaps", [False, True])
@pytest.mark.parametrize("accumulate", [False, True])
def test_gradients_in_a_buffer_of_the_program_may_be_cleared_after_the_pass(fraction, overlaps, accumulate):
    """Clears the buffer when hooks have taken the gradients that are cut from it, while copies still run."""
    found = []
    for hooked in (False, True):
        torch.manual_seed(0)
        module = nn.Sequential(*(nn.Linear(2048, 2048, bias=False) for _ in range(4))).to("cuda", torch.bfloat16)
        optimizer = hybridopt.AdamW(module.named_parameters(), lr=1e-3, max_grad_norm=None, offload_fraction=fraction)
        if hooked:
            optimizer.hook_gradients(accumulate=accumulate)
            if overlaps:
                optimizer.overlap(module)
        buffer = torch.zeros(4, 2048, 2048, dtype=torch.bfloat16, device="cuda")
        for seed in range(4):
            for layer, gradient in zip(module, buffer):
                layer.weight.grad = gradient
            module(torch.full((8, 2048), 1.0 + seed, dtype=torch.bfloat16, device="cuda")).square().mean().backward()
            if hooked:
                buffer.zero_()
            optimizer.step()
            buffer.zero_()
        optimizer.synchronize()
        found.append(bits([param.detach().cpu() for param in module.parameters()]))
    assert found[0] == found[1]


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("fraction", [1.0, 0.4])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_early_updates_step_to_the_same_bits(layout, fraction, overlap):
    """Some steps clip, one is skipped, and the learning rate changes. Between a backward pass and its step, params
    are written and state is read."""
    module = model(torch.bfloat16)
    other = copy.deepcopy(module)
    options = {"lr": 1e-2, "offload_fraction": fraction, "max_grad_norm": 1e9, **LAYOUTS[layout]}
    early = hybridopt.AdamW(
        module.parameters(), early_update_bytes=1 << 22, overlap=module if overlap else None, **options
    )
    plain = hybridopt.AdamW(other.parameters(), **options)
    both = ((module, early), (other, plain))
    early.hook_gradients()
    for step in range(40):
        inputs = torch.randn(32, 64, device="cuda").to(torch.bfloat16)
        for each, optimizer in both:
            optimizer.max_grad_norm = 1e-3 if step in (9, 10, 30) else 1e9
            loss = each(inputs).float().square().mean()
            (loss * float("inf") if step == 20 else loss).backward()
        early._engine.wait()  # the workers have at least begun
        for each, optimizer in both:
            if step == 15:
                optimizer.param_groups[0]["lr"] = 1e-3
            if step == 25:
                with torch.no_grad():
                    next(each.parameters()).mul_(0.5)
        if step == 35:
            for param, expected in zip(module.parameters(), other.parameters()):
                for key, value in plain.state[expected].items():
                    assert torch.equal(early.state[param][key].cpu(), value.cpu()), key
        early.step(), plain.step()
        early.zero_grad(), plain.zero_grad()
    early.synchronize()
    torch.cuda.synchronize()
    for param, expected in zip(module.parameters(), other.parameters()):
        assert bits([param.cpu()]) == bits([expected.cpu()])
    assert early.stats().early_elements > 0
    assert early.stats().undone_elements > 0
    assert early.last_step().grad_norm == plain.last_step().grad_norm


def test_gradients_are_gone_from_the_gpu_after_backward():
    layers = nn.Sequential(*(nn.Linear(2048, 2048, bias=False) for _ in range(8))).cuda()
    one = 4 * 2048 * 2048
    optimizer = hybridopt.SGD(layers.parameters(), lr=1e-3)
    optimizer.hook_gradients(free_all=True)
    layers(torch.randn(1, 2048, device="cuda")).sum().backward()
    optimizer.step()
    torch.cuda.synchronize()
    held = torch.cuda.memory_allocated()
    layers(torch.randn(1, 2048, device="cuda")).sum().backward()
    optimizer._engine.handle.wait()
    optimizer._hooks._let_go(optimizer._engine)
    assert torch.cuda.memory_allocated() < held + one
    assert optimizer.stats().grads_bytes.host == 8 * one


@every_fraction
def test_helpers_that_bring_state_to_the_gpu_leave_it_where_it_is(fraction):
    """As RL trainers do around a rollout phase."""
    param = nn.Parameter(torch.randn(1 << 22, device="cuda", dtype=torch.bfloat16))
    optimizer = hybridopt.AdamW([param], offload_fraction=fraction)
    param.grad = torch.ones_like(param)
    optimizer.step()
    before = {key: bits([value.cpu()]) for key, value in optimizer.state[param].items()}
    torch.cuda.synchronize()
    held = torch.cuda.memory_allocated()
    for device in ("cuda", "cpu", "cuda"):
        for entry in optimizer.state.values():
            for key, value in entry.items():
                entry[key] = value.to(device, non_blocking=True)
        del value
        gc.collect()
        assert torch.cuda.memory_allocated() == held
    assert {key: bits([value.cpu()]) for key, value in optimizer.state[param].items()} == before


def addresses(params):
    return [param.data_ptr() for param in params]


def free_bytes():
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    return torch.cuda.mem_get_info()[0]


def large(dtype=torch.bfloat16):
    """A model with params of 64 MiB and more, and smaller ones."""
    layers = (nn.Linear(4096, 8192), nn.Tanh(), nn.Linear(8192, 4096, bias=False), nn.LayerNorm(4096))
    return nn.Sequential(*layers).to("cuda", dtype)


def captured(module, inputs):
    """A graph that computes with the params of a module, and what it writes to."""

    def compute():
        return [module(inputs), *(2 * param for param in module.parameters())]

    with torch.no_grad():
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            compute()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            written = compute()
    return graph, written


@every_fraction
@every_dtype
def test_a_captured_graph_computes_with_params_that_have_been_away(fraction, dtype):
    module = large(dtype)
    params = list(module.parameters())
    count = sum(param.numel() * param.element_size() for param in params)
    options = {"lr": 1e-2, "offload_fraction": fraction, "movable": ALL}
    optimizer = hybridopt.AdamW(module.named_parameters(), keep_addresses=True, **options)
    optimizer.materialize()
    kept = addresses(params)
    inputs = torch.randn(64, 4096, device="cuda").to(dtype)
    graph, written = captured(module, inputs)
    other = copy.deepcopy(module)
    plain = hybridopt.AdamW(other.parameters(), **options)
    for cycle in range(3):
        for param, same_param in zip(params, other.parameters()):
            param.grad = torch.randn_like(param)
            same_param.grad = param.grad.clone()
        optimizer.step(), plain.step()
        optimizer.zero_grad(), plain.zero_grad()
        free = free_bytes()
        optimizer.offload(params=True)
        assert free_bytes() >= free + count - (8 << 20)  # the driver may have taken some for itself
        assert torch.cuda.memory_allocated() >= count  # torch counts the addresses
        with pytest.raises(abi.InvalidStateError, match="'0.weight' is used by .* while its content is on the host"):
            module(inputs)
        rollout = torch.empty(count, dtype=torch.uint8, device="cuda").fill_(255)
        del rollout
        optimizer.reload(params=True)
        assert addresses(params) == kept
        graph.replay()
        torch.cuda.synchronize()
        with torch.no_grad():
            for param, same_param, doubled in zip(params, other.parameters(), written[1:]):
                assert torch.equal(param, same_param)
                assert torch.equal(doubled, 2 * same_param)
            torch.testing.assert_close(written[0], other(inputs), rtol=2e-2, atol=2e-2)


def test_params_whose_memory_somebody_else_has_come_back_later():
    module = large()
    optimizer = hybridopt.AdamW(module.parameters(), movable="params", keep_addresses=True)
    optimizer.materialize()
    kept, before = addresses(module.parameters()), bits([param.cpu() for param in module.parameters()])
    optimizer.offload(params=True)
    somebody = torch.empty(free_bytes() - (64 << 20), dtype=torch.uint8, device="cuda")
    for _ in range(2):
        with pytest.raises(abi.OutOfDeviceMemoryError, match="asked for .* bytes of device memory for a pool.* are free"):
            optimizer.reload(params=True)
        with pytest.raises(abi.InvalidStateError, match="while its content is on the host"):
            module[0].weight.sum()
    del somebody  # torch still has it in its cache
    optimizer.reload(params=True)
    assert addresses(module.parameters()) == kept
    assert bits([param.cpu() for param in module.parameters()]) == before


@pytest.mark.parametrize("how", ["close", "del"])
def test_kept_addresses_outlive_their_optimizer(how):
    gc.collect()
    free = free_bytes()
    module = large()
    count = sum(param.numel() * param.element_size() for param in module.parameters())
    optimizer = hybridopt.AdamW(module.parameters(), movable="params", keep_addresses=True)
    optimizer.materialize()
    with optimizer.offloaded(grads=False, states=False):
        pass
    kept, before = addresses(module.parameters()), bits([param.cpu() for param in module.parameters()])
    if how == "close":
        optimizer.close()
    del optimizer
    gc.collect()
    torch.cuda.empty_cache()
    assert addresses(module.parameters()) == kept
    assert bits([param.cpu() for param in module.parameters()]) == before
    held = free_bytes()
    del module
    gc.collect()
    assert free_bytes() >= held + count
    assert free_bytes() >= free - (64 << 20)  # the driver and torch may have taken some for themselves
    after = nn.Parameter(torch.ones(1 << 20, device="cuda"))  # another optimizer begins from nothing
    optimizer = hybridopt.SGD([after], lr=1.0, movable="params", keep_addresses=True)
    optimizer.materialize()
    with optimizer.offloaded(grads=False, states=False):
        pass
    assert after.sum().item() == 1 << 20


def test_two_optimizers_give_away_only_their_own_params():
    first, second = nn.Parameter(torch.ones(1000, device="cuda")), nn.Parameter(torch.ones(3, 500, device="cuda"))
    optimizers = [hybridopt.SGD([p], lr=1.0, movable="params", keep_addresses=True) for p in (first, second)]
    for optimizer in optimizers:
        optimizer.materialize()
    with optimizers[0].offloaded(grads=False, states=False):
        second.data.mul_(2)
        assert second.sum().item() == 3000
    assert first.sum().item() == 1000


@pytest.mark.parametrize("keep_addresses", [False, True])
def test_copies_of_params_are_not_disturbed(keep_addresses):
    """The params are in one buffer, with other data between them."""
    buffer = torch.arange(20, dtype=torch.float32, device="cuda")
    params = [nn.Parameter(buffer[2:7]), nn.Parameter(buffer[9:15])]
    on_cpu = [nn.Parameter(param.detach().cpu()) for param in params]
    optimizer = hybridopt.SGD(params, lr=1.0, movable=["params"], keep_addresses=keep_addresses)
    for param in params:
        param.grad = torch.ones_like(param)
    optimizer.step()
    before = buffer.tolist()
    with optimizer.offloaded(grads=False, states=False):
        assert buffer.untyped_storage().nbytes() == (80 if keep_addresses else 0)
    assert buffer.tolist() == before
    assert params[0].tolist() == [value - 1 for value in on_cpu[0].tolist()]
