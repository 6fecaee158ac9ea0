"""Params on a GPU. Not part of ctest, which runs where there is none:

    python -m pytest bindings/python/tests/cuda
"""

import copy
import functools
import gc
import hashlib

import pytest
import torch
from torch import nn
from torch.nn import Parameter

import hybridopt
from hybridopt.changes import wire_forms
from hybridopt.changes.part import Part
from models import PAIRS, WITH_TORCH, bits, clone, run, set_gradients

FRACTIONS = [1.0, 0.4, 0.0]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
every_optimizer = pytest.mark.parametrize("name", PAIRS)
every_fraction = pytest.mark.parametrize("fraction", FRACTIONS)


def test_there_is_a_gpu():
    assert torch.cuda.is_available()


def pair(dtype, sizes=((70, 50), (3,), (2, 3, 4), (0, 2))):
    """Makes the same params on the CPU and on the GPU."""
    on_cpu = [Parameter(torch.randn(size).to(dtype)) for size in sizes]
    return on_cpu, [Parameter(param.detach().cuda()) for param in on_cpu]


def set_both(on_cpu, on_gpu, seed):
    set_gradients(on_cpu, seed)
    for param, other in zip(on_cpu, on_gpu):
        other.grad = None if param.grad is None else param.grad.cuda()


def on_host(tensors):
    return bits([tensor.detach().cpu() for tensor in tensors])


def state_on_host(optimizer):
    return {
        (index, key): on_host([value])
        for index, entry in optimizer.state_dict()["state"].items()
        for key, value in entry.items()
    }


@every_optimizer
@every_fraction
@pytest.mark.parametrize("dtype", DTYPES)
def test_same_bits_as_on_the_cpu(name, fraction, dtype):
    ours, _, arguments = PAIRS[name]
    on_cpu, on_gpu = pair(dtype)
    cpu = ours(on_cpu, max_grad_norm=5.0, **arguments)
    gpu = ours(on_gpu, max_grad_norm=5.0, offload_fraction=fraction, **arguments)
    for seed in range(12):  # more steps than can be queued
        set_both(on_cpu, on_gpu, seed)
        if seed % 3 == 1:
            on_cpu[1].grad = on_gpu[1].grad = None
        cpu.step()
        gpu.step()
    assert on_host(on_gpu) == bits(on_cpu)
    assert state_on_host(gpu) == state_on_host(cpu)
    assert gpu.last_step().grad_norm == cpu.last_step().grad_norm


# ---------------------------------------------------------------------------------- state layouts --


def same_everywhere(on_cpu, cpu, on_gpu, gpu):
    assert on_host(on_gpu) == bits(on_cpu)
    assert state_on_host(gpu) == state_on_host(cpu)
    for param, other in zip(on_cpu, on_gpu):
        assert on_host([gpu.master_of(other)]) == bits([cpu.master_of(param)])


@every_optimizer
@every_fraction
@pytest.mark.parametrize("layout", ["fp32", "split"])
@pytest.mark.parametrize("moments", [torch.float32, torch.bfloat16])
def test_state_layouts_have_the_bits_of_the_cpu(name, fraction, layout, moments):
    ours, _, arguments = PAIRS[name]
    on_cpu, on_gpu = pair(torch.bfloat16)
    options = {"master_layout": layout, "state_dtype": moments, "max_grad_norm": 5.0, **arguments}
    cpu, gpu = ours(on_cpu, **options), ours(on_gpu, offload_fraction=fraction, **options)
    for seed in range(5):
        set_both(on_cpu, on_gpu, seed)
        if seed == 2:
            on_cpu[1].grad = on_gpu[1].grad = None
        cpu.step()
        gpu.step()
    same_everywhere(on_cpu, cpu, on_gpu, gpu)
    plan = gpu.plan()
    in_halves = "master_low" in plan.state_bytes.device
    assert in_halves == (layout == "split" and fraction < 1.0)
    for kind, of_layout in (("master_param", "fp32"), ("master_low", "split")):
        assert (kind in plan.state_bytes.host) == (fraction > 0.0 and layout == of_layout)


@every_optimizer
@pytest.mark.parametrize("layout", ["fp32", "split"])
@pytest.mark.parametrize("moments", [torch.float32, torch.bfloat16])
def test_the_fraction_changes_between_any_two_steps(name, layout, moments):
    ours, _, arguments = PAIRS[name]
    on_cpu, on_gpu = pair(torch.bfloat16)
    options = {"master_layout": layout, "state_dtype": moments, "max_grad_norm": 5.0, **arguments}
    cpu, gpu = ours(on_cpu, **options), ours(on_gpu, offload_fraction=0.5, **options)
    for seed, fraction in enumerate([0.25, 1.0, 0.0, 0.9, 0.1, 1.0]):
        set_both(on_cpu, on_gpu, seed)
        cpu.step()
        gpu.step()
        gpu.set_offload_fraction(fraction)
        assert gpu.plan().offload_fraction == fraction
        same_everywhere(on_cpu, cpu, on_gpu, gpu)
    for param in on_gpu:
        for key, tensor in gpu.state[param].items():
            assert key == "step" or tensor.device.type == "cpu"


def trained(moments, offload_fraction, changes=None, overlapped=False, steps=200, **options):
    """A hash of params and moments of a small model after training on the GPU. `changes` says after which steps
    the fraction changes, and to what."""
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(64, 1024), nn.GELU(), nn.Linear(1024, 1024), nn.Tanh(), nn.Linear(1024, 8))
    model = model.to("cuda", torch.bfloat16)
    optimizer = hybridopt.AdamW(
        model.parameters(), lr=1e-3, offload_fraction=offload_fraction, max_grad_norm=1.0,
        state_dtype=moments, overlap=model if overlapped else None, **options,
    )  # fmt: skip
    data = torch.randn(steps, 16, 64, generator=torch.Generator().manual_seed(2))
    for step in range(steps):
        inputs = data[step].to("cuda", torch.bfloat16)
        optimizer.zero_grad()
        loss = (model(inputs) - inputs[:, :8]).float().square().mean()
        (loss * (torch.inf if step == 77 else 1.0)).backward()
        optimizer.step()
        if step in (changes or {}):
            optimizer.set_offload_fraction(changes[step])
    optimizer.synchronize()
    digest = hashlib.sha256()
    for param in model.parameters():
        for tensor in (param, optimizer.state[param]["exp_avg"], optimizer.state[param]["exp_avg_sq"]):
            digest.update(tensor.detach().cpu().contiguous().view(torch.uint8).numpy())
    return digest.hexdigest()


@pytest.fixture
def deterministic(monkeypatch):
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture(scope="module")
def trained_on_the_gpu_alone():
    return functools.lru_cache(lambda moments, layout: trained(moments, 0.0, master_layout=layout))


@pytest.mark.parametrize("moments", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("layout", ["fp32", "split"])
@pytest.mark.parametrize("executors", ["auto", "cpu", "streamed"])
@pytest.mark.parametrize("where", ["host", "half", "changes", "host, overlapped", "changes, overlapped"])
def test_200_steps_end_with_the_same_bits(
    deterministic, trained_on_the_gpu_alone, where, executors, layout, moments
):
    random = torch.Generator().manual_seed(3)
    changes = {step: float(torch.rand((), generator=random)) for step in range(0, 200, 3)}
    there = trained(
        moments, 1.0 if "host" in where else 0.5, changes if "changes" in where else {}, "overlapped" in where,
        master_layout=layout, host_executors=executors,
    )  # fmt: skip
    assert there == trained_on_the_gpu_alone(moments, layout)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="it needs a GPU, which copies pinned memory")
def test_torch_copies_state_with_one_call_where_it_crosses_a_gib_or_is_larger():
    params = [Parameter(torch.randn(n << 20, device="cuda").bfloat16()) for n in (96, 96, 96, 300, 3)]
    optimizer = hybridopt.AdamW(params, offload_fraction=1.0)
    for param in params:
        param.grad = torch.randn_like(param)
    optimizer.step()
    for fraction in (1.0, 0.7, 1.0):
        optimizer.set_offload_fraction(fraction)
        optimizer.synchronize()
        for view in (view for param in params for key, view in optimizer.state[param].items() if key != "step"):
            kept = view.cpu().clone()
            for copied in (view.to("cuda"), view.to("cuda", non_blocking=True), torch.empty_like(kept).cuda().copy_(view)):
                assert torch.equal(copied.cpu(), kept)
            for non_blocking in (False, True):
                view.zero_()
                view.copy_(copied, non_blocking=non_blocking)
                torch.cuda.synchronize()
                assert torch.equal(view.cpu(), kept)
    optimizer.close()


def test_a_fraction_that_does_not_fit_changes_nothing():
    params = [Parameter(torch.ones(64 << 20, device="cuda"))]
    optimizer = hybridopt.AdamW(params, offload_fraction=1.0)
    run_on_gpu(optimizer, params, [1])
    free, _ = torch.cuda.mem_get_info()
    ballast = torch.empty(free - (128 << 20), dtype=torch.uint8, device="cuda")
    with pytest.raises(hybridopt.abi.OutOfDeviceMemoryError, match="raise offload_fraction"):
        optimizer.set_offload_fraction(0.0)
    assert optimizer.plan().offload_fraction == 1.0
    del ballast
    torch.cuda.empty_cache()
    optimizer.set_offload_fraction(0.0)
    assert optimizer.stats().state_bytes.host == 0
    optimizer.close()


@every_fraction
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_masters_follow_what_others_write_and_keep_the_bits_of_the_rest(fraction, dtype):
    on_cpu, on_gpu = pair(dtype)
    cpu, gpu = (hybridopt.AdamW(on_cpu, lr=1e-2), hybridopt.AdamW(on_gpu, lr=1e-2, offload_fraction=fraction))
    for seed in range(6):
        set_both(on_cpu, on_gpu, seed)
        with torch.no_grad():
            for params in (on_cpu, on_gpu):
                if seed == 2:  # the same weights again
                    params[0].copy_(params[0].clone())
                    params[2].data = params[2].data.clone()
                if seed == 3:
                    params[0][:35].fill_(0.25)
                if seed == 4:
                    params[2].data = params[2].data * 2
        cpu.step(), gpu.step()
        same_everywhere(on_cpu, cpu, on_gpu, gpu)


@every_fraction
def test_split_masters_follow_what_others_write(fraction):
    on_cpu, on_gpu = pair(torch.bfloat16)
    both = [(on_cpu, hybridopt.AdamW(on_cpu, lr=1e-2, master_layout="split"))]
    gpu = hybridopt.AdamW(on_gpu, lr=1e-2, master_layout="split", offload_fraction=fraction)
    both.append((on_gpu, gpu))
    for seed in range(6):
        set_both(on_cpu, on_gpu, seed)
        for params, optimizer in both:
            optimizer.step()
            with torch.no_grad():
                if seed == 1:
                    params[0][:40].fill_(0.25)
                if seed == 2:
                    params[0].data = params[0].data * 2  # never 0, where a lower half below it would be a NaN
                if seed == 3:
                    optimizer.state[params[0]]["master_low"].fill_(77)
                if seed == 4:
                    params[0].fill_(0.5)
                    optimizer.refresh_masters()
                    assert not optimizer.state[params[0]]["master_low"].any()
                    assert (optimizer.master_of(params[0]) == 0.5).all()
    same_everywhere(*both[0], *both[1])


@every_fraction
@pytest.mark.parametrize("layout", ["fp32", "split"])
@pytest.mark.parametrize("through", ["state_dict", "checkpoint"])
def test_split_masters_go_between_devices_and_layouts(fraction, layout, through, tmp_path):
    on_cpu, on_gpu = pair(torch.bfloat16)
    gpu = hybridopt.AdamW(on_gpu, lr=1e-2, master_layout="split", offload_fraction=fraction)
    run_on_gpu(gpu, on_gpu, range(5))
    cpu = hybridopt.AdamW(on_cpu, lr=1e-2, master_layout=layout)
    back_params = [Parameter(torch.zeros_like(param)) for param in on_gpu]
    back = hybridopt.AdamW(
        back_params, lr=1e-2, master_layout="split", offload_fraction=1.0 - fraction
    )
    for source, source_params, target, target_params in (
        (gpu, on_gpu, cpu, on_cpu),
        (cpu, on_cpu, back, back_params),
    ):
        if through == "checkpoint":
            path = tmp_path / str(len(list(tmp_path.iterdir())))
            source.save_checkpoint(path)
            target.load_checkpoint(path)
        else:
            target.load_state_dict(copy.deepcopy(source.state_dict()))
            with torch.no_grad():
                for param, other in zip(source_params, target_params):
                    other.copy_(param)
    for seed in (5, 6):
        for params, optimizer in ((on_gpu, gpu), (back_params, back)):
            run_on_gpu(optimizer, params, [seed])
    for param, other in zip(on_gpu, back_params):
        assert on_host([gpu.master_of(param)]) == on_host([back.master_of(other)])
    assert state_on_host(gpu) == state_on_host(back)


@every_fraction
def test_gradients_may_go_at_once_and_the_next_forward_sees_new_params(fraction):
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(512, 512), nn.Tanh(), nn.Linear(512, 512)).cuda().bfloat16()
    twin = copy.deepcopy(model)
    data = torch.randn(64, 512, device="cuda", dtype=torch.bfloat16)
    losses = []
    for each, waits in ((model, False), (twin, True)):
        optimizer = hybridopt.AdamW(each.parameters(), lr=1e-2, offload_fraction=fraction)
        for _ in range(20):
            loss = (each(data) - 1).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            junk = [torch.full((512, 512), torch.nan, device="cuda") for _ in range(4)]
            del junk
            losses.append(loss)
            if waits:
                torch.cuda.synchronize()
    assert on_host(model.parameters()) == on_host(twin.parameters())
    assert losses[19] < losses[0] / 2


def test_on_a_stream_of_ones_own():
    on_cpu, on_gpu = pair(torch.bfloat16)
    cpu, gpu = hybridopt.AdamW(on_cpu), hybridopt.AdamW(on_gpu, offload_fraction=0.5)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for seed in range(5):
            set_both(on_cpu, on_gpu, seed)
            cpu.step()
            gpu.step()
    torch.cuda.current_stream().wait_stream(stream)
    assert on_host(on_gpu) == bits(on_cpu)


@pytest.mark.parametrize("name", WITH_TORCH)
@every_fraction
def test_state_dict_goes_to_torch_and_back(name, fraction):
    ours_class, torchs_class, arguments = PAIRS[name]
    _, params = pair(torch.float32, ((70, 50), (3,)))
    ours = ours_class(params, offload_fraction=fraction, **arguments)
    run_on_gpu(ours, params, [1, 2, 3])
    torchs = torchs_class(clone(params), **arguments)
    torchs.load_state_dict(ours.state_dict())
    assert state_on_host(torchs) == state_on_host(ours)
    back_params = clone(params)
    back = ours_class(back_params, offload_fraction=fraction, **arguments)
    back.load_state_dict(copy.deepcopy(torchs.state_dict()))
    run_on_gpu(ours, params, [4, 5])
    run_on_gpu(back, back_params, [4, 5])
    assert on_host(back_params) == on_host(params)
    assert state_on_host(back) == state_on_host(ours)


def run_on_gpu(optimizer, params, seeds):
    for seed in seeds:
        generator = torch.Generator().manual_seed(seed)
        for param in params:
            param.grad = torch.randn(param.shape, generator=generator).to(param.dtype).cuda()
        optimizer.step()


@every_fraction
def test_state_is_a_view_and_may_be_written(fraction):
    on_cpu, on_gpu = pair(torch.bfloat16)
    cpu, gpu = hybridopt.AdamW(on_cpu), hybridopt.AdamW(on_gpu, offload_fraction=fraction)
    for seed in range(3):
        set_both(on_cpu, on_gpu, seed)
        cpu.step()
        gpu.step()
        for params, optimizer in ((on_cpu, cpu), (on_gpu, gpu)):
            optimizer.state[params[0]]["exp_avg"].mul_(0.5)
            optimizer.state[params[1]]["exp_avg_sq"] = torch.ones(3)
    assert on_host(on_gpu) == bits(on_cpu)
    assert state_on_host(gpu) == state_on_host(cpu)


@every_fraction
@pytest.mark.parametrize("dtype", DTYPES)
def test_weights_from_outside_are_not_reverted(fraction, dtype):
    on_cpu, on_gpu = pair(dtype)
    cpu, gpu = hybridopt.AdamW(on_cpu), hybridopt.AdamW(on_gpu, offload_fraction=fraction)
    for seed in range(4):
        set_both(on_cpu, on_gpu, seed)
        cpu.step()
        gpu.step()
        with torch.no_grad():
            for param, other in zip(on_cpu, on_gpu):
                if seed == 1:
                    param[:1].fill_(0.25)
                    other[:1].fill_(0.25)
                if seed == 2:
                    param.data, other.data = param.data + 1, other.data + 1
    assert on_host(on_gpu) == bits(on_cpu)
    assert state_on_host(gpu) == state_on_host(cpu)


@every_fraction
def test_groups_added_after_steps(fraction):
    on_cpu, on_gpu = pair(torch.bfloat16)
    cpu = hybridopt.AdamW(on_cpu[:1], max_grad_norm=1.0)
    gpu = hybridopt.AdamW(on_gpu[:1], max_grad_norm=1.0, offload_fraction=fraction)
    for seed in range(5):
        if seed == 2:
            cpu.add_param_group({"params": on_cpu[1:], "lr": 0.1})
            gpu.add_param_group({"params": on_gpu[1:], "lr": 0.1})
        set_both(on_cpu, on_gpu, seed)
        cpu.step()
        gpu.step()
    assert on_host(on_gpu) == bits(on_cpu)
    assert state_on_host(gpu) == state_on_host(cpu)


@every_fraction
def test_copies(fraction):
    _, params = pair(torch.bfloat16)
    optimizer = hybridopt.AdamW(params, offload_fraction=fraction)
    run_on_gpu(optimizer, params, [1, 2])
    other, other_params = copy.deepcopy((optimizer, params))
    run_on_gpu(optimizer, params, [3])
    run_on_gpu(other, other_params, [3])
    assert on_host(params) == on_host(other_params)
    assert state_on_host(other) == state_on_host(optimizer)


@every_fraction
def test_checkpoints_go_between_devices(fraction, tmp_path):
    on_cpu, on_gpu = pair(torch.bfloat16)
    gpu = hybridopt.AdamW(on_gpu, offload_fraction=fraction)
    run_on_gpu(gpu, on_gpu, [1, 2])
    gpu.save_checkpoint(tmp_path / "saved")
    cpu = hybridopt.AdamW(on_cpu)
    cpu.load_checkpoint(tmp_path / "saved")
    assert on_host(on_gpu) == bits(on_cpu)
    assert state_on_host(gpu) == state_on_host(cpu)
    run_on_gpu(gpu, on_gpu, [3])
    gpu.load_checkpoint(tmp_path / "saved")
    assert on_host(on_gpu) == bits(on_cpu)
    assert state_on_host(gpu) == state_on_host(cpu)


def test_auto_takes_what_is_left_and_gives_it_back():
    torch.cuda.reset_peak_memory_stats()  # discards the peak of earlier tests
    param = Parameter(torch.randn(1 << 24).cuda())
    twin = Parameter(param.detach().cpu())
    optimizer = hybridopt.AdamW([param], offload_fraction="auto", device_headroom=0.25)
    plain = hybridopt.AdamW([twin])

    def step(seed):
        set_both([twin], [param], seed)
        plain.step(), optimizer.step()
        assert on_host([param]) == on_host([twin])

    step(1)
    assert optimizer.stats().state_bytes.device == 0
    step(2)
    assert optimizer.plan().offload_fraction == 0.0 and "headroom" in optimizer.plan().reason
    assert optimizer.stats().state_bytes.device == 2 * 4 * param.numel()
    free, total = torch.cuda.mem_get_info()
    assert free >= 0.25 * total
    step(3)
    with pytest.raises(torch.OutOfMemoryError):
        torch.empty(2 * total, dtype=torch.uint8, device="cuda")
    optimizer.zero_grad()
    assert optimizer.stats().state_bytes.device == 0
    assert "ran out of device memory" in optimizer.plan().reason
    assert torch.cuda.mem_get_info()[0] >= free + 2 * 4 * param.numel()
    step(4)


def test_auto_takes_no_more_than_is_left():
    torch.cuda.reset_peak_memory_stats()  # discards the peak of earlier tests
    param = Parameter(torch.randn(1 << 24).cuda())
    optimizer = hybridopt.AdamW([param], offload_fraction="auto", device_headroom=0.0)
    param.grad = torch.ones_like(param)
    torch.cuda.empty_cache()
    optimizer.step()
    needed = 2 * 4 * param.numel()
    filling = torch.empty(torch.cuda.mem_get_info()[0] - needed // 2, dtype=torch.uint8, device="cuda")
    optimizer.step()
    assert 0 < optimizer.stats().state_bytes.device <= needed // 2
    assert 0.5 <= optimizer.plan().offload_fraction < 1.0
    del filling
    torch.cuda.empty_cache()


def test_auto_keeps_to_the_budget():
    params = [Parameter(torch.randn(1 << 20, device="cuda")) for _ in range(8)]
    budget = 40 << 20
    optimizer = hybridopt.AdamW(params, offload_fraction="auto", device_budget_bytes=budget)
    run_on_gpu(optimizer, params, [1])
    plan = optimizer.plan()
    assert 0.9 * budget < plan.device_bytes <= budget
    assert 0 < plan.offload_fraction < 1
    # A ring of an eighth of the budget would take memory away from state.
    assert plan.device_ring_bytes <= budget // 8


def test_grad_scaler():
    model = nn.Linear(8, 4).cuda()
    twin = copy.deepcopy(model)
    optimizer = hybridopt.AdamW(model.parameters(), offload_fraction=0.5)
    other = hybridopt.AdamW(twin.parameters(), offload_fraction=0.5)
    scaler = torch.amp.GradScaler("cuda", init_scale=2.0**10, growth_interval=100)
    for step in range(4):
        data = torch.randn(16, 8, device="cuda")
        optimizer.zero_grad()
        scaler.scale(model(data).square().mean()).backward()
        for param, copied in zip(model.parameters(), twin.parameters()):
            copied.grad = param.grad / scaler.get_scale()
        if step == 2:
            model.weight.grad[0, 0] = torch.inf
        else:
            other.step()
        scaler.step(optimizer)
        scaler.update()
    assert scaler.get_scale() == 2.0**9
    assert on_host(model.parameters()) == on_host(twin.parameters())
    assert optimizer.stats().steps_applied == 3


def test_a_graph_capture_is_refused():
    param = Parameter(torch.ones(3, device="cuda"))
    optimizer = hybridopt.AdamW([param])
    run_on_gpu(optimizer, [param], [1])
    before = on_host([param])
    calls = [optimizer.step, optimizer.offload, optimizer.reload]
    for call in [*calls, lambda: optimizer.master_of(param)]:
        with pytest.raises(RuntimeError, match="cannot be captured into a CUDA graph"):
            with torch.cuda.graph(torch.cuda.CUDAGraph()):
                param.detach().clone()  # torch warns of an empty graph
                call()
    assert on_host([param]) == before
    run_on_gpu(optimizer, [param], [2])
    assert on_host([param]) != before


def test_params_on_two_kinds_of_device_are_refused():
    params = [Parameter(torch.ones(2)), Parameter(torch.ones(2, device="cuda"))]
    optimizer = hybridopt.AdamW([("here", params[0]), ("there", params[1])])
    params[0].grad, params[1].grad = torch.ones(2), torch.ones(2, device="cuda")
    with pytest.raises(ValueError, match="'here' on cpu, 'there' on cuda:0"):
        optimizer.step()


def test_a_model_moved_after_steps_is_refused():
    model = nn.Linear(3, 2)
    optimizer = hybridopt.AdamW(model.named_parameters())
    run(optimizer, list(model.parameters()), [1])
    model.cuda()
    set_gradients([], 0)
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    with pytest.raises(RuntimeError, match="'weight' is on cuda:0, but its state was made when it was on cpu;"):
        optimizer.step()


def test_a_model_may_move_before_its_first_step():
    model = nn.Linear(3, 2)
    optimizer = hybridopt.AdamW(model.parameters(), offload_fraction=0.5)
    model.cuda()
    run_on_gpu(optimizer, list(model.parameters()), [1])
    assert optimizer.stats().steps_applied == 1


def test_memory_comes_back():
    """Needs a GPU that nothing else uses, because the driver does not say which process took memory."""
    gc.collect()
    torch.cuda.synchronize()
    free, _ = torch.cuda.mem_get_info()
    param = Parameter(torch.ones(16 << 20, device="cuda"))
    optimizer = hybridopt.AdamW([param], offload_fraction=0.0)
    run_on_gpu(optimizer, [param], [1])
    assert optimizer.stats().device_bytes > 128 << 20
    optimizer.close()
    param.grad = None
    del optimizer, param
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.synchronize()
    assert torch.cuda.mem_get_info()[0] > free - (32 << 20)


def changed(on_device, steps=2):
    """Params after some steps, and their patch. "second" comes whole, and "first" has changes."""
    torch.manual_seed(0)
    named = {"first": Parameter(torch.randn(300, 70, device="cuda").bfloat16()), "second": Parameter(torch.ones(5).cuda())}
    optimizer = hybridopt.AdamW(named.items(), lr=1e-5, track_changes=True, offload_fraction=0.5)
    optimizer.weight_changes(on_device=on_device).acknowledge()
    for seed in range(steps):
        run_on_gpu(optimizer, list(named.values()), [seed])
    return named, optimizer.weight_changes(on_device=on_device, dense_above=0.5)


def test_a_patch_on_the_device_has_the_same():
    params, there = changed(True)
    _, here = changed(False)
    assert there["second"].dense and not there["first"].dense
    assert there["first"].indices.device.type == there["first"].values.device.type == "cuda"
    assert here["first"].indices.device.type == here["first"].values.device.type == "cpu"
    for name, change in there:
        on_host = change.on_host()
        assert on_host.hash == here[name].hash and bits([on_host.values]) == bits([here[name].values.cpu()])
        assert change.dense or torch.equal(on_host.indices, here[name].indices)
    torch.manual_seed(0)
    follower = {"first": torch.randn(300, 70, device="cuda").bfloat16(), "second": torch.ones(5).cuda()}
    hybridopt.apply_changes(follower, there)
    assert on_host_bits(follower) == on_host_bits(params)


def on_host_bits(named):
    return on_host(named.values())


@pytest.mark.parametrize("on_device", [False, True])
def test_forms_of_a_patch_of_which_some_is_on_the_gpu(on_device):
    _, patch = changed(on_device)
    for sent in wire_forms.vllm_patches(patch):
        assert sent.indices.device == sent.values.device
    flushed = [dict(flush) for flush in wire_forms.verl_flushes(patch)]
    assert sum(flush["__values__"].numel() for flush in flushed) == sum(change.values.numel() for _, change in patch)
    part = Part((2, 4), (((1, 0), (1, 4)),))
    assert part.in_tensor(torch.tensor([0, 3], device="cuda")).tolist() == [4, 7]
    on_gpu = wire_forms.verl_flushes(patch, device="cuda")
    assert {tensor.device.type for flush in on_gpu for _, tensor in flush} == {"cuda"}
