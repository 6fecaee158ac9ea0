"""Any use of a param outside of its module, while a step still writes the param, waits for the step. Results, and
the bits of the training, are those of steps that wait."""

import concurrent.futures
import contextlib
import copy
import ctypes
import gc
import io
import multiprocessing
import pickle
import random
import warnings

import models
import pytest
import ranks
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import hybridopt
from hybridopt import abi

WIDTH = 6


def model(dtype=torch.float32):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), *(models.Block(WIDTH, 8) for _ in range(3))).to(dtype)


def pair(dtype=torch.float32, **options):
    options = {"lr": 0.05, "threads": 1, "max_grad_norm": 0.3, **options}
    module, other = model(dtype), model(dtype)
    optimizer = hybridopt.AdamW(module.named_parameters(), overlap=module, **options)
    return module, optimizer, other, hybridopt.AdamW(other.named_parameters(), **options)


def data(seed):
    return torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(seed))


def output_of(module, seed):
    return module(data(seed).to(module[0].bias.dtype))


def step(module, optimizer, seed):
    output_of(module, seed).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def pending(optimizer):
    """The names of params that nobody has waited for."""
    engine = optimizer._engine
    return {slot.name for slot in engine.slots if engine.under_way and engine.under_way.is_pending(slot)}


def both_after(count, **options):
    """A model with a step under way, and a model that has completed the same steps."""
    module, optimizer, other, plain = pair(**options)
    for seed in range(count):
        step(module, optimizer, seed)
        step(other, plain, seed)
    assert pending(optimizer) == set(dict(module.named_parameters()))
    return module, optimizer, other, plain


def go_on_and_compare(module, optimizer, other, plain):
    for seed in range(10, 13):
        step(module, optimizer, seed)
        step(other, plain, seed)
    optimizer.synchronize()
    assert models.bits(module.parameters()) == models.bits(other.parameters())
    assert models.state_bits(optimizer) == models.state_bits(plain)
    assert all(type(param) is nn.Parameter for param in module.parameters())


def comparable(result):
    """The result of a use in a form that can be compared with ==."""
    if isinstance(result, torch.Tensor):
        return models.bits([result])
    if isinstance(result, nn.Module):
        return comparable(list(result.state_dict().values()))
    if isinstance(result, (list, tuple)):
        return [comparable(each) for each in result]
    return result


# --------------------------------------------------------------------------------------- one param --


class Twice(torch.autograd.Function):
    @staticmethod
    def forward(context, x):
        return x * 2

    @staticmethod
    def backward(context, grad):
        return grad * 2


def written(w, write):
    with torch.no_grad():
        write(w)
    return w.detach().clone()


def assigned(tensor, w):
    tensor[1:] = w
    return tensor


def saved(value):
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file)


def replaced(w):
    w.data = w.data.clone() * 2
    return w.detach().clone()


def in_a_thread(w):
    with concurrent.futures.ThreadPoolExecutor(1) as thread:
        return thread.submit(lambda: w.detach().clone()).result()


def in_inference_mode(w):
    with torch.inference_mode():
        return (w * 2).tolist()


def moved_to_shared_memory(w):
    pickled = multiprocessing.reduction.ForkingPickler.dumps(w)
    assert w.is_shared()  # as with any param that torch sends to a process, without a copy
    return pickle.loads(pickled).detach().clone()


class Own(nn.Parameter):
    """A param whose class handles torch's functions itself."""

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        with torch._C.DisableTorchFunctionSubclass():
            return function(*args, **(kwargs or {}))


READS = {
    "an operator": lambda w: w + 1,
    "an operator of torch.ops": lambda w: torch.ops.aten.mul.Tensor(w, 2),
    "data": lambda w: w.data.clone(),
    "detach": lambda w: w.detach().clone(),
    "view": lambda w: w.view(-1).clone(),
    "an index": lambda w: w[1:3].clone(),
    "comparison": lambda w: (w > 0).tolist(),
    "bool": lambda w: bool((w == w).all()),
    "item": lambda w: w.max().item(),
    "tolist": lambda w: w.tolist(),
    "repr": lambda w: repr(w),
    "iteration": lambda w: [row.clone() for row in w],
    "numpy": lambda w: w.detach().float().numpy().tolist(),
    "dlpack": lambda w: torch.from_dlpack(w.detach()).clone(),
    "data_ptr": lambda w: ctypes.string_at(w.data_ptr(), w.nbytes),
    "storage": lambda w: list(w.untyped_storage()),
    "an assigned part": lambda w: assigned(torch.zeros(9, WIDTH, dtype=w.dtype), w),
    "out=": lambda w: torch.add(w.detach(), 1, out=torch.zeros(8, WIDTH, dtype=w.dtype)),
    "a list": lambda w: torch.cat([w, torch.ones(1, WIDTH), w]),
    "einsum": lambda w: torch.einsum("ij,ij->i", w, w),
    "foreach": lambda w: torch._foreach_lerp([torch.zeros_like(w)], [w], 0.5),
    "another module's function": lambda w: functional.linear(torch.ones(WIDTH, dtype=w.dtype), w),
    "autograd.Function": Twice.apply,
    "checkpoint": lambda w: checkpoint(lambda x: x * 2, w, use_reentrant=False),
    "vmap": lambda w: torch.func.vmap(lambda row: row.sum())(w),
    "deepcopy": copy.deepcopy,
    "copy": copy.copy,
    "pickle": lambda w: pickle.loads(pickle.dumps(w)),
    "torch.save": lambda w: saved([w])[0],
    "to": lambda w: w.to(torch.float64),
    "shared memory": moved_to_shared_memory,
    "a thread": in_a_thread,
    "inference mode": in_inference_mode,
    "written in place": lambda w: written(w, lambda w: w.mul_(2)),
    "written by index": lambda w: written(w, lambda w: w.__setitem__(0, 1.0)),
    "data written": lambda w: written(w, lambda w: w.data.mul_(2)),
    "written by foreach": lambda w: written(w, lambda w: torch._foreach_mul_([w], 2.0)),
    "data replaced": replaced,
    "initialized": lambda w: written(w, nn.init.zeros_),
}


@pytest.mark.filterwarnings("ignore:overlap.. has no effect while params lie in shared memory")
@pytest.mark.parametrize("use", READS)
def test_a_use_of_a_param_waits_for_it(use):
    both = module, optimizer, other, _ = both_after(2)
    result = READS[use](module[2].up.weight)
    assert not pending(optimizer)
    assert comparable(result) == comparable(READS[use](other[2].up.weight))
    if isinstance(result, torch.Tensor):
        assert type(result) in (torch.Tensor, nn.Parameter)
    go_on_and_compare(*both)


# -------------------------------------------------------------------------------- several params --


def averaged(module):
    average = torch.optim.swa_utils.AveragedModel(module, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9))
    average.update_parameters(module)
    average.update_parameters(module)
    return average.module


def averaged_by_hand(module):
    average = [torch.zeros_like(param) for param in module.parameters()]
    for mean, param in zip(average, module.parameters()):
        mean.mul_(0.9).add_(param, alpha=0.1)
    return average


def swapped(module):
    """As callbacks do that evaluate an average: the weights are exchanged, used, and exchanged back."""
    average = [torch.full_like(param, 0.1) for param in module.parameters()]
    outputs = []
    for _ in range(2):
        for param, mean in zip(module.parameters(), average):
            kept = param.data.clone()
            param.data.copy_(mean)
            mean.copy_(kept)
        outputs.append(output_of(module, 3))
    return outputs


def evaluated(module):
    module.eval()
    with torch.no_grad():
        output = output_of(module, 3)
    module.train()
    return output


def functionally_called(module):
    params = {name: param * 2 for name, param in module.named_parameters()}
    return torch.func.functional_call(module, params, (data(3).to(module[0].bias.dtype),))


def used_by_a_compiled_function(module, use):
    torch._dynamo.reset()
    sums = torch.compile(lambda params: [use(param) * 2 for param in params], backend="eager")
    return [total for _ in range(2) for total in sums(list(module.parameters()))]


def clipped(module):
    with torch.no_grad():
        for param in module.parameters():
            param.clamp_(-0.2, 0.2)
    return []


def written_and_others_read(module):
    module[2].up.weight.data.mul_(0.5)
    return [param.norm() for param in module.parameters()]


USES = {
    "AveragedModel": averaged,
    "an average by hand": averaged_by_hand,
    "weights exchanged for an average": swapped,
    "a copy of the model": copy.deepcopy,
    "a copy of a submodule": lambda module: copy.deepcopy(module[2].up),
    "state_dict": lambda module: list(module.state_dict().values()),
    "state_dict of a submodule": lambda module: list(module[2].up.state_dict().values()),
    "parameters_to_vector": lambda module: nn.utils.parameters_to_vector(module.parameters()),
    "norms of weights": lambda module: [param.norm().item() for param in module.parameters()],
    "norms by foreach": lambda module: torch._foreach_norm(list(module.parameters())),
    "norm of a list": lambda module: nn.utils.get_total_norm(list(module.parameters())),
    "pickled": lambda module: pickle.loads(pickle.dumps(module)),
    "saved": lambda module: saved(list(module.parameters())),
    "weights that are clipped": clipped,
    "data written, and others read": written_and_others_read,
    "evaluation": evaluated,
    "functional_call": functionally_called,
    "a compiled function": lambda module: used_by_a_compiled_function(module, torch.sum),
    "a compiled function that detaches": lambda module: used_by_a_compiled_function(module, lambda param: param.detach().sum()),
    "gradients of weights": lambda module: torch.autograd.grad(module[1].up.weight.square().sum(), module[1].up.weight),
    "another module's param": lambda module: functional.linear(output_of(module, 3), module[1].up.weight),
}  # fmt: skip


@pytest.mark.parametrize("watched", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("use", USES)
def test_uses_of_several_params_get_what_the_step_has_written(use, dtype, watched, monkeypatch):
    models.watch_params(monkeypatch, watched)
    both = module, optimizer, other, _ = both_after(2, dtype=dtype)
    result = USES[use](module)
    assert not pending(optimizer)
    assert comparable(result) == comparable(USES[use](other))
    go_on_and_compare(*both)


def test_what_reads_no_element_does_not_wait():
    module, optimizer, _, _ = both_after(2)
    params = list(module.parameters())
    for param in params:
        assert isinstance(param, nn.Parameter) and isinstance(param, torch.Tensor)
        assert type(param).__name__ == "Parameter" and type(param).__module__ == nn.Parameter.__module__
        assert (param.shape, param.size(), param.ndim, param.stride()) and param.is_contiguous()
        assert param.grad is None and param.requires_grad and param.is_leaf and param.grad_fn is None
        assert (param.device.type, param.dtype, param.layout) == ("cpu", torch.float32, torch.strided)
        assert param.numel() * param.element_size() == param.nbytes
        assert param.register_hook(lambda grad: None).remove() is None
        assert {param: 1}[param] == 1 and param in {param}
        param.grad, param.requires_grad, param.of_a_program = torch.zeros(param.shape), True, 1
        param.grad = None
    module.requires_grad_(True), module.zero_grad(), module.train(), module.eval()
    module.register_parameter("again", module[0].bias)
    del module.again
    torch.nn.utils.clip_grad_norm_(params, 1.0)
    other = nn.Linear(WIDTH, WIDTH)
    other.bias = module[0].bias
    torch.optim.SGD(params, lr=0.1)
    torch.utils.weak.WeakIdKeyDictionary({param: 1 for param in params})
    assert pending(optimizer) == set(dict(module.named_parameters()))


def test_what_is_made_of_a_param_has_no_trap():
    module, _, other, _ = both_after(2)
    made = type(module[0].weight)(torch.ones(2), requires_grad=False)
    assert type(made) is nn.Parameter and not made.requires_grad
    again, expected = nn.Parameter(module[0].weight, False), nn.Parameter(other[0].weight, False)
    assert type(again) is nn.Parameter and not again.requires_grad and again is not module[0].weight
    assert again.data_ptr() == module[0].weight.data_ptr()
    assert models.bits([again]) == models.bits([expected])
    assert module[0].weight.requires_grad


class Own(nn.Parameter):
    """A param whose class handles torch's functions itself."""

    seen: list[str] = []

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        cls.seen.append(function.__name__)
        with torch._C.DisableTorchFunctionSubclass():
            return function(*args, **(kwargs or {}))


def test_a_class_that_handles_functions_of_torch_itself_does_so():
    module, optimizer, other, plain = pair()
    for each in (module, other):
        each[0].bias.__class__ = Own
    for seed in range(2):
        step(module, optimizer, seed)
        step(other, plain, seed)
    assert "0.bias" in pending(optimizer)
    Own.seen.clear()
    assert module[0].bias.norm().item() == other[0].bias.norm().item()
    assert Own.seen.count("norm") == 2
    assert not pending(optimizer) and type(module[0].bias) is Own


def test_a_param_in_no_module_is_waited_for_where_it_is_used():
    def train(overlap):
        module, scale = model(), nn.Parameter(torch.ones(WIDTH))
        optimizer = hybridopt.AdamW(
            [*module.parameters(), scale], lr=0.05, threads=1, overlap=module if overlap else None
        )
        losses = []
        for seed in range(5):
            loss = (module(data(seed) * scale) * scale).square().mean()
            loss.backward()
            losses.append(loss.item())
            optimizer.step()
            optimizer.zero_grad()
        assert bool(optimizer._engine.under_way) == overlap
        return losses, models.bits([*module.parameters(), scale])

    assert train(True) == train(False)


def test_two_optimizers_may_step_the_same_params():
    module, other = model(), model()

    def optimizers(each, overlap):
        params = list(each.named_parameters())
        return [
            hybridopt.SGD(params, lr=0.1, momentum=0.9, threads=1, overlap=overlap),
            hybridopt.AdamW(params[::2], lr=0.05, threads=1, overlap=overlap),
        ]

    both, plain = optimizers(module, module), optimizers(other, None)
    for seed in range(4):
        for each, its in ((module, both), (other, plain)):
            output_of(each, seed).square().mean().backward()
            for optimizer in its:
                optimizer.step()
            its[0].zero_grad()
    assert pending(both[1])
    assert models.bits(module.parameters()) == models.bits(other.parameters())
    assert not pending(both[0]) and not pending(both[1])


def test_a_step_is_waited_for_where_an_optimizer_that_has_ended_had_taken_gradients():
    module = model()
    ended = hybridopt.AdamW(module.named_parameters(), max_grad_norm=1.0)
    ended.hook_gradients()
    output_of(module, 0).square().mean().backward()
    del ended
    gc.collect()
    optimizer = hybridopt.AdamW(module.named_parameters(), overlap=module)
    output_of(module, 1).square().mean().backward()
    optimizer.step()
    assert pending(optimizer)
    module[2].up.weight.sum()
    assert not pending(optimizer)
    assert all(type(param) is nn.Parameter for param in module.parameters())


# ------------------------------------------------------------------------------------- how it ends --


def test_a_step_that_fails_is_told_where_a_param_is_used(monkeypatch):
    module, optimizer, _, _ = both_after(2)

    def fail(*_, **__):
        raise abi.PoisonedError("no more memory")

    monkeypatch.setattr(optimizer._engine.handle, "wait", fail)
    with pytest.raises(abi.PoisonedError, match="no more memory"):
        module[1].up.weight.sum()
    assert not pending(optimizer)
    assert all(type(param) is nn.Parameter for param in module.parameters())


def test_ctrl_c_in_a_wait_leaves_the_param_to_be_waited_for(monkeypatch):
    both = module, optimizer, other, _ = both_after(2)
    handle = optimizer._engine.handle
    wait = handle.wait

    def interrupted(*_, **__):
        monkeypatch.setattr(handle, "wait", wait)
        raise KeyboardInterrupt

    monkeypatch.setattr(handle, "wait", interrupted)
    with pytest.raises(KeyboardInterrupt):
        module[1].up.weight.sum()
    assert "1.up.weight" in pending(optimizer)
    assert module[1].up.weight.sum() == other[1].up.weight.sum()
    assert not pending(optimizer)
    go_on_and_compare(*both)


@pytest.mark.parametrize("how", ["dropped", "closed", "overlap removed"])
def test_the_end_of_the_optimizer_gives_params_their_class_back(how):
    module, optimizer, other, _ = both_after(2)
    assert type(module[0].weight) is not nn.Parameter
    if how == "dropped":
        del optimizer
        gc.collect()
    elif how == "closed":
        optimizer.close()
    else:
        optimizer._overlap.remove()
    assert all(type(param) is nn.Parameter for param in module.parameters())
    assert models.bits(module.parameters()) == models.bits(other.parameters())


def test_gradients_that_were_written_are_told_where_a_param_is_used():
    module, optimizer, _, _ = pair()
    for seed in range(2):
        output_of(module, seed).square().mean().backward()
        optimizer.step()
    module[1].up.weight.grad.mul_(2)
    with pytest.raises(abi.InvalidStateError, match="the gradient of parameter '1.up.weight' was written in place"):
        module[1].up.weight.sum()
    assert type(module[1].up.weight) is nn.Parameter


def test_threads_may_use_params_at_once():
    both = module, optimizer, other, _ = both_after(2)
    with concurrent.futures.ThreadPoolExecutor(4) as threads:
        for seed in range(20, 30):
            reads = [threads.submit(lambda: [p.detach().clone() for p in module.parameters()]) for _ in range(4)]
            expected = models.bits(other.parameters())
            assert all(models.bits(read.result()) == expected for read in reads)
            step(*both[:2], seed), step(*both[2:], seed)
    go_on_and_compare(*both)


def test_a_forked_process_has_what_the_step_has_written():
    both = module, optimizer, other, _ = both_after(2)
    forked = multiprocessing.get_context("fork")
    receiving, sending = forked.Pipe(duplex=False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # about a fork in a process with threads
        child = forked.Process(target=lambda: sending.send(models.bits(module.parameters())))
        child.start()
    assert receiving.poll(60)
    assert receiving.recv() == models.bits(other.parameters())
    child.join()
    assert child.exitcode == 0
    go_on_and_compare(*both)


def test_a_gradient_of_what_no_trap_has_seen_is_refused():
    module, optimizer, _, _ = both_after(2)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        twice = torch.jit.trace(lambda x: x * 2, (torch.ones(3),))
    output = twice(module[1].norm.weight)
    assert "1.norm.weight" in pending(optimizer)
    with pytest.raises(abi.InvalidStateError, match=r"parameter '1.norm.weight' has got a gradient, but nobody has"):
        output.sum().backward()
    assert not pending(optimizer)


# ---------------------------------------------------------------------------------------- check mode --


@pytest.mark.parametrize(
    "use, told",
    [
        (lambda module: module[0].weight.sum(), "'0.weight' is used by 'sum'"),
        (lambda module: module[1].norm.bias.data, "'1.norm.bias' is used by 'data'"),
        (lambda module: copy.deepcopy(module[0].weight), "'0.weight' is used by 'deepcopy'"),
        (lambda module: nn.utils.parameters_to_vector(module.parameters()), "'0.weight' is used by 'view'"),
        (lambda module: torch._foreach_norm([*module[2].parameters()]), "'2.norm.weight' is used by '_foreach_norm'"),
    ],
)
def test_check_mode_tells_of_uses_that_wait_and_where_they_are(monkeypatch, use, told):
    monkeypatch.setenv("HYBRIDOPT_CHECK_OVERLAP", "1")
    both = module, _, other, _ = both_after(2)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        result = use(module)
    assert str(seen[0].message).startswith(f"parameter {told} while a step still writes it, so that this use waits")
    assert {warning.filename for warning in seen} == {__file__}
    assert comparable(result) == comparable(use(other))
    go_on_and_compare(*both)


def test_without_check_mode_nothing_is_told(monkeypatch, recwarn):
    monkeypatch.setenv("HYBRIDOPT_CHECK_OVERLAP", "0")
    module, _, _, _ = both_after(2)
    module[0].weight.sum()
    assert not recwarn


# ------------------------------------------------------------------------------------ drawn programs --


class Average:
    """An average of the weights that a program updates after its steps."""

    def __init__(self, module):
        self.mean = [param.detach().clone() for param in module.parameters()]

    def update(self, module):
        torch._foreach_lerp_(self.mean, list(module.parameters()), 0.3)
        return self.mean

    def load(self, module):
        with torch.no_grad():
            for param, mean in zip(module.parameters(), self.mean):
                param.copy_(mean)
        return self.mean


def reloaded(module):
    module.load_state_dict({name: value * 0.5 for name, value in module.state_dict().items()})
    return module


def drawn_use(rng, module, optimizer, average):
    """Draws one of the uses that programs and callbacks make of params between two steps."""
    kind = rng.choice(["param", "param", "model", "model", "average", "optimizer", "thread"])
    if kind == "param":
        return READS[rng.choice(sorted(READS))](module[rng.randint(1, 3)].up.weight)
    if kind == "model":
        return USES[rng.choice(sorted(name for name in USES if "compiled" not in name))](module)
    if kind == "average":
        return rng.choice([average.update, average.update, average.load, reloaded])(module)
    if kind == "thread":
        return in_a_thread(module[0].weight)
    return rng.choice(
        [
            lambda: list(optimizer.state[module[0].weight].values()),
            lambda: optimizer.synchronize(),
            lambda: optimizer.zero_grad(set_to_none=False),
            lambda: [result.grad_norm.hex() for result in optimizer.step_results()],
            lambda: optimizer.master_of(module[1].norm.weight).clone(),
        ]
    )()


def run_drawn_program(seed, overlaps, monkeypatch):
    """Returns the losses, the results of the uses, and the weights and the state at the end; and how many steps were
    under way."""
    rng = random.Random(seed)
    models.watch_params(monkeypatch, rng.choice([True, False]))  # the same for both runs of a seed
    micro_batches = rng.choice([1, 1, 2, 3])
    module = model(rng.choice([torch.float32, torch.bfloat16]))
    optimizer = hybridopt.AdamW(
        module.named_parameters(),
        lr=0.05,
        threads=1,
        max_grad_norm=rng.choice([None, 0.1, 1.0]),
        master_layout=rng.choice(["fp32", "split"]),
        overlap=module if overlaps else None,
    )
    if rng.random() < 0.5:
        optimizer.hook_gradients(micro_batches=micro_batches)
    average, found, under_way = Average(module), [], 0
    steps = rng.randint(3, 8)
    for each in range(steps):
        for micro_batch in range(micro_batches):
            loss = output_of(module, 10 * each + micro_batch).float().square().mean()
            (loss * (torch.inf if rng.random() < 0.1 else 1.0)).backward()
            found.append(loss.item())
            if rng.random() < 0.2:
                found.append(comparable(drawn_use(rng, module, optimizer, average)))
        optimizer.step()
        under_way += bool(pending(optimizer))
        if rng.random() < 0.8:
            optimizer.zero_grad()
        # Writes after the last step are not in the masters yet, unless that step was skipped.
        for _ in range(rng.choice([0, 1, 1, 2, 4]) if each < steps - 1 else 0):
            found.append(comparable(drawn_use(rng, module, optimizer, average)))
        optimizer.zero_grad()
    optimizer.synchronize()
    return [*found, models.bits(module.parameters()), models.state_bits(optimizer)], under_way


@pytest.mark.parametrize("seed", models.drawn_seeds(25))
def test_a_drawn_program_gets_what_it_gets_from_steps_that_wait(seed, monkeypatch):
    found, under_way = run_drawn_program(seed, True, monkeypatch)
    expected, none = run_drawn_program(seed, False, monkeypatch)
    assert under_way > 0 and none == 0
    assert found == expected


# ---------------------------------------------------------------------------------------------- ranks --

SHARDED_USES = {
    "to_local": lambda module: module[2].up.weight.to_local().clone(),
    "full_tensor": lambda module: module[2].up.weight.full_tensor(),
    "redistribute": lambda module: module[2].up.weight.redistribute(placements=[Replicate()]).to_local(),
    "an operator": lambda module: (module[2].up.weight * 2).full_tensor(),
    "norm": lambda module: module[2].up.weight.norm().full_tensor(),
    "foreach": lambda module: [norm.full_tensor() for norm in torch._foreach_norm(list(module.parameters()))],
    "local tensor": lambda module: module[2].up.weight._local_tensor.clone(),
    "deepcopy": lambda module: copy.deepcopy(module[2].up.weight).full_tensor(),
    "data": lambda module: module[2].up.weight.data.full_tensor(),
    "written in place": lambda module: written(module[2].up.weight, lambda w: w.mul_(2)).full_tensor(),
    "all_reduce": lambda module: reduced(module[2].up.weight.to_local()),
    "state_dict": lambda module: [value.full_tensor() for value in get_model_state_dict(module).values()],
    "evaluation": lambda module: evaluated(module),
}


def reduced(tensor):
    tensor = tensor.detach().clone()
    dist.all_reduce(tensor)
    return tensor


def trained_when_sharded(rank, use, overlap):
    """The result of a use, and the weights at the end, of a model that is evaluated before overlap(). The evaluation
    gathers the root module."""
    module = model()
    for block in module[1:]:
        fully_shard(block)
    fully_shard(module)
    optimizer = hybridopt.AdamW(module.named_parameters(), lr=0.05, max_grad_norm=0.1, threads=1)
    evaluated(module)
    if overlap:
        optimizer.overlap(module)
    found = []
    for seed in range(5):
        step(module, optimizer, 10 * seed + rank)
        if seed % 2:
            assert bool(pending(optimizer)) == overlap
            found.append(comparable(use(module)))
            assert not pending(optimizer)
    optimizer.synchronize()
    params = list(module.parameters())
    assert all(type(param) is DTensor and type(param._local_tensor) is torch.Tensor for param in params)
    return found, models.bits(param.to_local() for param in params)


def used_when_sharded(rank, world):
    for name, use in SHARDED_USES.items():
        assert trained_when_sharded(rank, use, True) == trained_when_sharded(rank, use, False), name


def test_uses_of_sharded_params_wait():
    ranks.run(used_when_sharded, 2)


def collectives(rank, world):
    """Calls functions of torch.distributed with the param itself."""
    module, optimizer, other, plain = both_after(2)
    for collective in (dist.broadcast, dist.all_reduce):
        results = []
        for each in (module, other):
            with torch.no_grad():
                collective(each[2].up.weight, 0) if collective is dist.broadcast else collective(each[2].up.weight)
            results.append(models.bits([each[2].up.weight]))
        assert results[0] == results[1] and not pending(optimizer)
        step(module, optimizer, 5), step(other, plain, 5)
    gathered = [[torch.zeros(8, WIDTH) for _ in range(world)] for _ in range(2)]
    for each, into in zip((module, other), gathered):
        dist.all_gather(into, each[2].up.weight)
    assert models.bits(gathered[0]) == models.bits(gathered[1])
    go_on_and_compare(module, optimizer, other, plain)


def test_collectives_wait():
    ranks.run(collectives, 2)
