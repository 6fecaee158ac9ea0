"""Uses of params and gradients that have been offloaded raise an error that says so."""

import copy
import gc
import io
import pickle
import signal

import pytest
import ranks
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import hybridopt
from hybridopt import abi
from hybridopt.engine import moves
from hybridopt.engine.engine import Engine
from hybridopt.optimizers.checkpoints import Transfer
from hybridopt.params import released_storages
from hybridopt.steps.queued import Steps
from models import bits, cut_off, drawn_seeds, perceptron, run, set_gradients, state_bits

OFFLOADED = (
    r"parameter '{}' is used by '{}' while its content is on the host, where optimizer.offload\(params=True\) has put it; "
    r"call optimizer.reload\(params=True\) before, or use it after the block of `with optimizer.offloaded\(\):`"
)
ALL = ("params", "grads", "states")


def made(**options):
    torch.manual_seed(0)
    model = perceptron()
    return model, hybridopt.AdamW(model.named_parameters(), **options)


def stepped():
    model, optimizer = made(movable=ALL)
    run(optimizer, list(model.parameters()), [1])
    return model, optimizer


# ------------------------------------------------------------------------------- offloaded params --


@pytest.mark.parametrize("overlaps", [False, True])
def test_a_forward_pass_names_the_param_and_reload(overlaps):
    model, optimizer = stepped()
    if overlaps:
        optimizer.overlap(model)
    x = torch.ones(2, 10)
    expected = model(x)
    with optimizer.offloaded():
        for _ in range(2):
            with pytest.raises(abi.InvalidStateError, match=OFFLOADED.format("0.weight", "linear")):
                model(x)
    assert torch.equal(model(x), expected)
    optimizer.offload(params=True)
    with pytest.raises(abi.InvalidStateError, match=OFFLOADED.format("0.weight", "linear")):
        model(x)
    optimizer.reload(params=True)
    assert torch.equal(model(x), expected)


@pytest.mark.parametrize(
    ("use", "operation"),
    [
        (lambda param: param + 1, "add"),
        (lambda param: param.sum(), "sum"),
        (lambda param: param.clone(), "clone"),
        (lambda param: param.to(torch.float64), "to"),
        (lambda param: param.zero_(), "zero_"),
        (lambda param: nn.init.ones_(param), "ones_|fill_"),
        (lambda param: torch._foreach_mul_([param], 2.0), "_foreach_mul_"),
        (lambda param: param[0], "__getitem__"),
        (lambda param: copy.deepcopy(param), "deepcopy"),
        (lambda param: pickle.dumps(param), "pickle"),
        (lambda param: nn.Parameter(param), "detach"),
        (lambda param: param.numpy(force=True), "numpy"),
        (lambda param: param.tolist(), "tolist"),
    ],
)
def test_operations_that_would_touch_no_memory_are_refused(use, operation):
    model, optimizer = stepped()
    before = bits(model.parameters())
    with optimizer.offloaded(), torch.no_grad():
        with pytest.raises(abi.InvalidStateError, match=OFFLOADED.format("2.bias", "(" + operation + ")")):
            use(model[2].bias)
    assert bits(model.parameters()) == before
    assert type(model[2].bias) is nn.Parameter
    with torch.no_grad():
        use(model[2].bias)


@pytest.mark.parametrize(
    ("view", "kind"),
    [
        (lambda model: model[2].bias.detach(), torch.Tensor),
        (lambda model: model[2].bias.data, torch.Tensor),
        (lambda model: model[2].bias.detach().data.detach(), torch.Tensor),
        (lambda model: model.state_dict()["2.bias"], torch.Tensor),
        (lambda model: model[2].state_dict(keep_vars=True)["bias"], nn.Parameter),
    ],
)
def test_what_the_program_takes_of_them_meanwhile_is_refused_as_they_are(view, kind):
    model, optimizer = stepped()
    before = bits(model.parameters())
    with optimizer.offloaded():
        taken = view(model)
        assert taken.shape == (3,) and taken.data_ptr() == 0 and taken.untyped_storage().nbytes() == 0
        for use, operation in (
            (torch.sum, "sum"),
            (lambda each: each.numpy(force=True), "numpy"),
            (pickle.dumps, "pickle"),
            (lambda each: torch.ones(3).copy_(each), "copy_"),
        ):
            with pytest.raises(abi.InvalidStateError, match=OFFLOADED.format("2.bias", operation)):
                use(taken)
        with pytest.raises(abi.InvalidStateError, match=OFFLOADED.format("0.weight", "pickle")):
            torch.save(model.state_dict(), io.BytesIO())
    assert type(taken) is kind and torch.equal(taken, model[2].bias)
    assert bits(model.parameters()) == before


def test_an_assignment_to_data_in_a_phase_is_refused():
    """reload() would undo the assignment."""
    model, optimizer = stepped()
    before = bits(model.parameters())
    with optimizer.offloaded():
        with pytest.raises(abi.InvalidStateError, match=OFFLOADED.format("0.weight", "data")):
            model[0].weight.data = torch.ones(model[0].weight.shape)
    assert bits(model.parameters()) == before


@pytest.mark.parametrize("error", [KeyboardInterrupt, MemoryError])
@pytest.mark.parametrize("where", ["queued", "waited", "noted", "copied", "released"])
@pytest.mark.parametrize("storage", [1, 3])
def test_an_offload_that_is_cut_off_loses_nothing(where, storage, error, monkeypatch):
    """Wherever an exception interrupts offload(), using a param without memory raises an error, and reload() brings
    everything back."""
    (model, optimizer), (other, plain) = stepped(), stepped()
    calls = []

    def cut_off(call):
        def cut(*given, **named):
            calls.append(call)
            if len(calls) == (storage if where in ("copied", "released") else 1):
                raise error
            return call(*given, **named)

        return cut

    place, name = {
        "queued": (abi.Optimizer, "offload_params"),
        "waited": (Engine, "wait"),
        "noted": (moves, "note_offloaded"),
        "copied": (released_storages.ReleasedStorage, "__init__"),
        "released": (released_storages.ReleasedStorage, "release"),
    }[where]
    monkeypatch.setattr(place, name, cut_off(getattr(place, name)))
    with pytest.raises(error):
        optimizer.offload(params=True)
    monkeypatch.undo()
    if where in ("copied", "released"):
        for param in model.parameters():
            with pytest.raises(abi.InvalidStateError, match="while its content is on the host"):
                param.sum()
        with pytest.raises(abi.InvalidStateError, match="while its content is on the host"):
            pickle.dumps(model.state_dict())
    optimizer.reload(params=True)
    assert bits(model.parameters()) == bits(other.parameters())
    with optimizer.offloaded(grads=False, states=False):
        pass
    for each, trained in ((optimizer, model), (plain, other)):
        run(each, list(trained.parameters()), [2])
    assert bits(model.parameters()) == bits(other.parameters())
    assert {type(param) for param in model.parameters()} == {nn.Parameter}


@pytest.mark.parametrize("failing", ["storage", "copy"])
def test_a_reload_without_memory_leaves_them_where_they_are(failing, monkeypatch):
    model, optimizer = stepped()
    before = bits(model.parameters())
    optimizer.offload(params=True)

    def fail(*_, **__):
        raise torch.OutOfMemoryError("out of memory")

    with monkeypatch.context() as patched:
        if failing == "storage":
            patched.setattr(released_storages.ReleasedStorage, "restore", fail)
        else:
            patched.setattr(type(optimizer._engine.handle), "reload_params", fail)
        with pytest.raises(torch.OutOfMemoryError):
            optimizer.reload(params=True)
    with pytest.raises(abi.InvalidStateError, match=OFFLOADED.format("0.weight", "linear")):
        model(torch.ones(2, 10))
    optimizer.reload(params=True)
    assert bits(model.parameters()) == before
    run(optimizer, list(model.parameters()), [2])


def of_shards(rank, world):
    torch.manual_seed(0)
    model = nn.Sequential(fully_shard(nn.Linear(10, 8)), fully_shard(nn.Linear(8, 4)))
    optimizer = hybridopt.AdamW(model.named_parameters(), movable=ALL)
    model(torch.ones(2, 10)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    expected = model(torch.ones(2, 10)).detach()
    with optimizer.offloaded():
        taken = model.state_dict()["0.weight"]
        for use, operation in (
            (lambda: model(torch.ones(2, 10)), "all_gather"),
            (lambda: model[0].unshard(), "all_gather"),
            (lambda: model[0].weight.sum(), "sum"),
            (lambda: model[0].weight.to_local(), "view_as"),
            (lambda: model[0].weight.full_tensor(), "(view_as|all_gather_into_tensor)"),
            (lambda: taken.sum(), "sum"),
            (lambda: taken.to_local().sum(), "(view_as|sum)"),
            (lambda: torch.save(model.state_dict(), io.BytesIO()), "pickle"),
        ):
            with pytest.raises(abi.InvalidStateError, match=OFFLOADED.format("0.weight", operation)):
                use()
    assert torch.equal(taken.full_tensor(), model.state_dict()["0.weight"].full_tensor())
    assert torch.equal(model(torch.ones(2, 10)), expected)


def test_shards_of_fsdp2_are_refused_too():
    ranks.run(of_shards, world=2)


def test_what_reads_no_element_works_meanwhile():
    model, optimizer = stepped()
    param = model[0].weight
    with optimizer.offloaded():
        assert (param.shape, param.dtype, param.device.type, param.requires_grad) == ((20, 10), torch.float32, "cpu", True)
        assert param.untyped_storage().nbytes() == 0 and param.data_ptr() == param.detach().data_ptr() == 0
        assert isinstance(param, nn.Parameter) and param.is_leaf and param.grad is None
        assert [name for name, _ in model.named_parameters()] == list(model.state_dict())
        assert sum(each.numel() for each in model.parameters()) == 283
        model.zero_grad()
        model.requires_grad_(True)
        assert repr(model).startswith("Sequential")


def test_saves_steps_and_state_go_on_meanwhile(tmp_path):
    (model, optimizer), (other, plain) = stepped(), stepped()
    set_gradients(model.parameters(), 2)
    set_gradients(other.parameters(), 2)
    plain.save_checkpoint(tmp_path / "plain")
    optimizer.offload(params=True, grads=True, states=True)
    optimizer.save_checkpoint(tmp_path / "offloaded")
    assert optimizer.plan().param_count == 4 and optimizer.stats().params_bytes.host > 0
    optimizer.refresh_masters()
    assert optimizer.state_dict().keys() == {"state", "param_groups"} and len(repr(optimizer)) > 100
    optimizer.reload(params=True, grads=True, states=True)
    for each in (optimizer, plain):
        each.step()
    assert (bits(model.parameters()), state_bits(optimizer)) == (bits(other.parameters()), state_bits(plain))
    for name in ("plain", "offloaded"):
        loaded, into = stepped()
        into.load_checkpoint(tmp_path / name)
        run(into, list(loaded.parameters()), [2])
        assert bits(loaded.parameters()) == bits(other.parameters())


# ---------------------------------------------------------------------------- gradients of hooks --

CLIPPED = (
    r"clip_grad_norm_\(\) and its like find no gradients after the backward pass, since hook_gradients\(\) or offload\(grads=True\) has taken them"
    r".*leave the call out: {}, and optimizer.last_step\(\).grad_norm tells the norm after it"
)
STEP_CLIPS, ASSIGN = "the step clips to 0.5", "assign optimizer.max_grad_norm, by which the step clips"


def backward(model, seed=1):
    torch.manual_seed(seed)
    model(torch.randn(4, 10)).square().sum().backward()


CLIPPERS = {
    "norm": lambda params: nn.utils.clip_grad_norm_(params, 0.5),
    "value": lambda params: nn.utils.clip_grad_value_(params, 0.5),
    "list": lambda params: nn.utils.clip_grad_norm_(list(params), 0.5, foreach=False),
    "first": lambda params: nn.utils.clip_grad_norm_(next(params), 0.5),
    "last": lambda params: nn.utils.clip_grad_norm_(list(params)[-1:], 0.5),
    "after a look": lambda params: nn.utils.clip_grad_norm_([each for each in params if each.grad is None], 0.5),
}


@pytest.mark.parametrize("norm", [0.5, None])
@pytest.mark.parametrize("clip", CLIPPERS.values(), ids=CLIPPERS)
def test_clipping_after_hooks_is_refused_and_the_step_goes_on(clip, norm):
    (model, optimizer), (other, plain) = made(max_grad_norm=norm), made(max_grad_norm=norm)
    optimizer.hook_gradients()
    for seed in (1, 2):
        backward(model, seed)
        backward(other, seed)
        with pytest.raises(abi.InvalidStateError, match=CLIPPED.format(ASSIGN if norm is None else STEP_CLIPS)):
            clip(model.parameters())
        for each in (optimizer, plain):
            each.step()
            each.zero_grad()
        assert optimizer.last_step().grad_norm == plain.last_step().grad_norm > 0.0
    assert bits(model.parameters()) == bits(other.parameters())
    assert {type(param) for param in model.parameters()} == {nn.Parameter}


@pytest.mark.parametrize("taken_by", ["offload", "hooks that are removed"])
def test_clipping_what_is_on_the_host_is_refused_and_the_step_goes_on(taken_by):
    (model, optimizer), (other, plain) = (made(max_grad_norm=0.5, movable=ALL) for _ in range(2))
    for seed in (1, 2):
        if taken_by == "offload":
            backward(model, seed)
            optimizer.offload(grads=True)
        else:
            hooks = optimizer.hook_gradients()
            backward(model, seed)
            hooks.remove()
        backward(other, seed)
        with pytest.raises(abi.InvalidStateError, match=CLIPPED.format(STEP_CLIPS)):
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        if taken_by == "offload" and seed == 2:
            optimizer.reload(grads=True)
            norms = [nn.utils.clip_grad_norm_(each.parameters(), 1e9) for each in (model, other)]
            assert torch.equal(*norms) and norms[0] > 0.5
        for each in (optimizer, plain):
            each.step()
            each.zero_grad()
        assert optimizer.last_step().grad_norm == plain.last_step().grad_norm > 0.5
    assert bits(model.parameters()) == bits(other.parameters())
    assert {type(param) for param in model.parameters()} == {nn.Parameter}


ANOTHER_HAS_TAKEN = (
    r"^the gradient of parameter '0.weight' has been taken by hook_gradients\(\) or offload\(grads=True\) of another "
    r"optimizer, so that this step would leave the parameter out; call zero_grad\(\) and close\(\) of that one, and repeat "
    r"the backward pass. If the program has no such optimizer any more, a reference cycle still holds it, which "
    r"gc.collect\(\) ends, or the traceback of an exception$"
)


@pytest.mark.parametrize("taken_by, is_hooked", [("offload", False), ("hooks", False), ("hooks", True)])
def test_a_step_is_refused_if_another_optimizer_has_taken_its_gradients(taken_by, is_hooked):
    (model, optimizer), (other, _) = made(movable=ALL), made()
    run(optimizer, list(model.parameters()), [1])
    other.load_state_dict(model.state_dict())
    if taken_by == "hooks":
        optimizer.hook_gradients()
    newer, plain = (hybridopt.SGD(each.named_parameters(), lr=0.1, max_grad_norm=None) for each in (model, other))
    if is_hooked:
        newer.hook_gradients()
    backward(model, 2)
    if taken_by == "offload":
        optimizer.offload(grads=True)
    before = bits(model.parameters())
    with pytest.raises(abi.InvalidStateError, match=ANOTHER_HAS_TAKEN):
        newer.step()
    assert bits(model.parameters()) == before
    optimizer.zero_grad()
    optimizer.close()
    for module, steps in ((model, newer), (other, plain)):
        backward(module, 2)
        steps.step()
    assert bits(model.parameters()) == bits(other.parameters()) != before


def test_an_optimizer_of_other_params_does_not_mind_what_one_has_taken():
    (model, optimizer), (other, plain) = made(max_grad_norm=None), made()
    optimizer.hook_gradients()
    for each in (model, other):
        backward(each, 1)
    plain.step()
    optimizer.step()
    assert bits(model.parameters()) == bits(other.parameters())


WRITTEN = (
    r"the gradient of parameter '2' was written in place after hook_gradients\(\) had taken it and before its step had read "
    r"it, .*; zero_grad\(\) drops the gradients of this step"
)


class Weights(nn.Module):
    """Five weights whose gradients are a number, large enough for a copy to take a while."""

    def __init__(self, **options):
        super().__init__()
        self.weights = nn.ParameterList(nn.Parameter(torch.zeros(300_000)) for _ in range(5))
        names = map(str, range(5))
        self.optimizer = hybridopt.SGD(zip(names, self.weights), lr=1.0, momentum=0.5, threads=1, max_grad_norm=None)
        if options.pop("overlaps", False):
            self.optimizer.overlap(self)
        if options:
            self.optimizer.hook_gradients(**options)

    def forward(self, gradient):
        return sum((weight * gradient).sum() for weight in self.weights)


@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize("overlaps", [False, True])
def test_gradients_in_a_buffer_of_the_program_may_be_cleared_after_the_pass(overlaps, accumulate):
    """Clears the buffer when hooks have taken the gradients that are cut from it, while copies may still run."""
    found = []
    for options in ({}, {"overlaps": overlaps, "accumulate": accumulate}):
        module = Weights(**options)
        buffer = torch.zeros(5, 300_000)
        for seed in range(3):
            for pass_ in range(2 if accumulate else 1):
                for weight, gradient in zip(module.weights, buffer):
                    weight.grad = gradient
                module(1.0 + seed + pass_).backward()
                if options:
                    assert all(weight.grad is None for weight in module.weights)
                    if accumulate:
                        buffer.zero_()
            module.optimizer.step()
            buffer.zero_()
        module.optimizer.synchronize()
        found.append(bits(module.weights))
    assert found[0] == found[1]


@pytest.mark.parametrize("when", ["before the step", "during the step", "during it, behind zero_grad", "before a later pass"])
def test_a_write_of_a_gradient_that_hooks_have_taken_is_refused(when):
    (module, other), held = (Weights(overlaps=True, accumulate=when == "before a later pass") for _ in range(2)), []
    for each in (module, other):
        each.weights[2].register_post_accumulate_grad_hook(lambda weight: held.append(weight.grad))
        each.optimizer._hooks._param_hooks.remove()  # so that the hooks come in the order of this test
        each.optimizer._hooks.attach(each.optimizer._ready_engine())
    module(1.0).backward()
    is_under_way = when.startswith("during")
    if is_under_way:
        module.optimizer.step()
    if when == "during it, behind zero_grad":
        module.optimizer.zero_grad()
    held.pop().zero_()
    if when == "before a later pass":
        module(1.0).backward()
    text = "the gradient of parameter '2' was written in place while a step read it" if is_under_way else WRITTEN
    with pytest.raises(abi.InvalidStateError, match=text):
        module.optimizer.synchronize() if is_under_way else module.optimizer.step()
    if is_under_way:
        return
    module.optimizer.zero_grad()
    held.clear()
    for each in (module, other):
        each(2.0).backward()
        each.optimizer.synchronize()
        held.pop().zero_()  # has been copied
        each.optimizer.step()
        each(3.0).backward()
        held.pop()
        each.optimizer.step()
        each.optimizer.synchronize()
    assert bits(module.weights) == bits(other.weights)
    assert all(torch.equal(weight, torch.full_like(weight, -6.0)) for weight in module.weights)


def cleared_on_rank(rank, world, algorithm):
    """The shards' gradients are cut from a buffer of the program's, which it clears after the pass."""
    found = []
    for hooked in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(*(fully_shard(nn.Linear(500, 500, bias=False)) for _ in range(4)))
        optimizer = getattr(hybridopt, algorithm)(
            model.named_parameters(), lr=0.1, momentum=0.5, threads=1, max_grad_norm=None
        )
        if hooked:
            optimizer.hook_gradients()
        buffer = torch.zeros(4, 500 // world, 500)
        for seed in range(2):
            for param, part in zip(model.parameters(), buffer):
                param.grad = DTensor.from_local(part, param.device_mesh, param.placements, run_check=False)
            model(torch.full((2, 500), 1.0 + seed)).square().mean().backward()
            if hooked:
                buffer.zero_()
            optimizer.step()
            buffer.zero_()
        found.append(bits([param.to_local() for param in model.parameters()]))
    assert found[0] == found[1]


@pytest.mark.parametrize("algorithm", ["SGD", "ShardedMuon"])
def test_shards_in_a_buffer_of_the_program_may_be_cleared_too(algorithm):
    ranks.run(cleared_on_rank, 2, algorithm)


def test_hooks_that_are_removed_tell_of_a_write_of_what_they_have_taken():
    module, held = Weights(overlaps=True), []
    module.weights[2].register_post_accumulate_grad_hook(lambda weight: held.append(weight.grad))
    hooks = module.optimizer.hook_gradients()
    module(1.0).backward()
    held.pop().zero_()
    with pytest.raises(abi.InvalidStateError, match=WRITTEN):
        hooks.remove()
    module.optimizer.zero_grad()
    module(1.0).backward()
    module.optimizer.step()  # the hooks are gone
    assert held.pop() is module.weights[2].grad


@pytest.mark.parametrize("wait", ["reload", "offload"])
def test_what_hooks_have_taken_may_be_written_when_its_copies_are_done(wait):
    module, held = Weights(), []
    optimizer = hybridopt.SGD(module.weights, lr=1.0, threads=1, max_grad_norm=None, movable=("grads",))
    module.weights[2].register_post_accumulate_grad_hook(lambda weight: held.append(weight.grad))
    optimizer.hook_gradients()
    module(1.0).backward()
    getattr(optimizer, wait)(grads=True)
    held.pop().zero_()
    optimizer.step()
    assert all(torch.equal(weight, torch.full_like(weight, -1.0)) for weight in module.weights)


@pytest.mark.filterwarnings("ignore:grad and param do not obey the gradient layout contract")
@pytest.mark.parametrize("is_strided", [False, True])
def test_a_hook_that_comes_later_may_still_change_a_gradient(is_strided):
    """Until the hooks send it; also if it has to be rearranged for the library."""
    weight = nn.Parameter(torch.zeros(6, 4))
    optimizer = hybridopt.SGD([weight], lr=1.0, threads=1, max_grad_norm=None)
    optimizer.hook_gradients()

    def triple(weight):
        weight.grad.mul_(3)

    weight.register_post_accumulate_grad_hook(triple)
    weight.grad = torch.zeros(4, 6).t() if is_strided else torch.zeros(6, 4)
    weight.sum().backward()
    optimizer.step()
    assert torch.equal(weight, torch.full_like(weight, -3.0))


def test_zeros_do_not_come_back_for_a_param_that_is_frozen():
    module = Weights(micro_batches=1)
    optimizer = module.optimizer
    for _ in range(2):
        module(1.0).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
    frozen = module.weights[0]
    frozen.requires_grad_(False)
    frozen.grad = None
    before = bits(module.weights)
    module(1.0).backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=False)
    module(1.0).backward()
    optimizer.step()
    assert frozen.grad is None and all(not weight.grad.any() for weight in list(module.weights)[1:] if weight.grad is not None)
    assert bits([frozen]) == before[:1] and bits(module.weights)[1] != before[1]


def test_who_clips_without_hooks_or_before_the_last_pass_does_so():
    model, optimizer = made(max_grad_norm=None)
    hooks = optimizer.hook_gradients(micro_batches=2)
    backward(model)
    assert nn.utils.clip_grad_norm_(model.parameters(), 0.5) > 0.0  # the gradients of the first of two micro-batches
    backward(model)
    optimizer.step()
    hooks.remove()
    backward(model)
    assert nn.utils.clip_grad_norm_(model.parameters(), 0.5) > 0.0
    optimizer.step()


def test_who_clips_after_the_end_of_the_optimizer_does_so():
    model, optimizer = made(max_grad_norm=1.0)
    optimizer.hook_gradients()
    backward(model)
    del optimizer
    gc.collect()
    backward(model)
    assert nn.utils.clip_grad_norm_(model.parameters(), 0.5) > 0.0


@pytest.mark.parametrize("accumulate", [False, True])
def test_forward_passes_before_the_step_compile_a_model_once_more(accumulate):
    (model, optimizer), (other, plain) = made(max_grad_norm=1.0), made(max_grad_norm=1.0)
    optimizer.hook_gradients(accumulate)
    plain.hook_gradients(accumulate)
    graphs = []
    compiled = torch.compile(model, fullgraph=True, backend=lambda graph, _: graphs.append(graph) or graph)
    for seed in range(4):
        for each in (compiled, other):
            backward(each, seed)
            assert each(torch.randn(4, 10)).isfinite().all()
            if accumulate:
                backward(each, seed)
        with pytest.raises(abi.InvalidStateError, match=CLIPPED.format("the step clips to 1.0")):
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        plain.step()
    assert len(graphs) <= 2  # torch 2.6 does so not even once
    assert bits(model.parameters()) == bits(other.parameters())


def test_others_may_look_at_gradients_and_params():
    model, optimizer = made(max_grad_norm=1.0)
    optimizer.hook_gradients()
    backward(model)
    x = torch.ones(1, 10)
    assert torch.equal(model(x), model(x)) and model.state_dict()["0.weight"].sum() != 0
    for param in model.parameters():
        assert torch.equal(nn.Parameter(param), param) and torch.equal(copy.deepcopy(param), param)
    assert all(param.grad is None for param in model.parameters())
    model.zero_grad()
    optimizer.step()
    assert optimizer.stats().steps_applied == 1
    backward(model)
    optimizer.zero_grad()
    optimizer.step()
    assert optimizer.stats().steps_applied == 1


def on_shards(rank, world):
    torch.manual_seed(0)
    model = fully_shard(nn.Sequential(nn.Linear(10, 8), nn.Tanh(), nn.Linear(8, 4)))
    optimizer = hybridopt.AdamW(model.named_parameters(), max_grad_norm=0.5, threads=1)
    optimizer.hook_gradients()
    for seed in (1, 2):
        backward(model, seed)
        with pytest.raises(abi.InvalidStateError, match=CLIPPED.format(STEP_CLIPS)):
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
    return optimizer.last_step().grad_norm


def test_beside_weights_that_are_on_the_host_it_is_refused_too():
    model = nn.Sequential(*(nn.Linear(10, 10) for _ in range(6)))
    stash = hybridopt.ActivationStash(1 << 22, min_bytes=1, device="cpu")
    wrapping = stash.wrap(list(model), weights=True)
    optimizer = hybridopt.AdamW(model.named_parameters(), max_grad_norm=0.5, threads=1)
    optimizer.hook_gradients()
    for seed in range(4):
        backward(model, seed)
        with pytest.raises(abi.InvalidStateError, match=CLIPPED.format(STEP_CLIPS)):
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
    wrapping.remove()


def test_under_fsdp2_it_is_refused_too():
    norms = ranks.run(on_shards, 2)
    assert norms[0] == norms[1] > 0.0


# ------------------------------------------------------------------------------------------ cut off --


def with_gradients():
    model, optimizer = made(movable=ALL, max_grad_norm=0.5)
    run(optimizer, list(model.parameters()), [1])
    set_gradients(model.parameters(), 2)
    return model, optimizer


def everything(model, optimizer):
    assert {type(param) for param in model.parameters()} == {nn.Parameter}
    return bits(model.parameters()), state_bits(optimizer)


def clip_without_effect(model):
    """Without effect on the numbers, where it is not refused."""
    try:
        assert nn.utils.clip_grad_norm_(model.parameters(), 1e9) > 1
    except abi.InvalidStateError as error:
        assert "leave the call out" in str(error)


# What a call that was cut off followed, and the call.
MOVES = {
    "offload grads": (lambda optimizer: None, lambda optimizer: optimizer.offload(grads=True)),
    "reload grads": (lambda optimizer: optimizer.offload(grads=True), lambda optimizer: optimizer.reload(grads=True)),
    "offload all": (lambda optimizer: None, lambda optimizer: optimizer.offload(True, True, True)),
    "reload all": (lambda optimizer: optimizer.offload(True, True, True), lambda optimizer: optimizer.reload(True, True, True)),
    "zero_grad": (lambda optimizer: optimizer.offload(grads=True), lambda optimizer: optimizer.zero_grad()),
}


def begin_again(model, optimizer):
    optimizer.reload(True, True, True)
    optimizer.zero_grad()
    set_gradients(model.parameters(), 2)


def reload_gradients(model, optimizer):
    optimizer.reload(grads=True)
    other, _ = with_gradients()
    assert bits(param.grad for param in model.parameters()) == bits(param.grad for param in other.parameters())


# What a program does after it has caught the exception, before the step.
WAYS_ON = {
    "nothing": lambda model, optimizer: None,
    "clip": lambda model, optimizer: clip_without_effect(model),
    "offload again": lambda model, optimizer: optimizer.offload(grads=True),
    "reload": reload_gradients,
    "begin again": begin_again,
    "reload all": lambda model, optimizer: optimizer.reload(True, True, True),
    "a phase": lambda model, optimizer: (optimizer.offload(True, True, True), optimizer.reload(True, True, True)),
}


@pytest.mark.parametrize(
    ("move", "way_on"),
    [(move, way_on) for move in ("offload grads", "reload grads") for way_on in WAYS_ON]
    + [(move, way_on) for move in ("offload all", "reload all") for way_on in ("begin again", "reload all", "a phase")]
    + [("zero_grad", "begin again")],
)
def test_a_move_that_is_cut_off_anywhere_is_undone_or_finished(move, way_on):
    """All gradients are on their params then, or all are off them, and the run goes on to the same bits."""
    before, call = MOVES[move]
    other, plain = with_gradients()
    plain.step()
    expected = everything(other, plain)
    first = drawn_seeds(1)[0] % 11
    for line in range(1 + first, 1 << 20, 11):
        model, optimizer = with_gradients()
        before(optimizer)
        if not cut_off(lambda: call(optimizer), line):
            assert line > 90
            return
        WAYS_ON[way_on](model, optimizer)
        optimizer.step()
        assert everything(model, optimizer) == expected, line


@pytest.mark.parametrize("overlaps", [True, False], ids=["overlap", "waits"])
@pytest.mark.parametrize("hooks", [True, False], ids=["hooks", "plain"])
def test_a_step_that_is_cut_off_anywhere_is_made_or_not(overlaps, hooks):
    """`state` tells the same step counts as the library has, and the run goes on from there."""

    def trained(steps):
        model, optimizer = made(movable=("grads",), max_grad_norm=0.5)
        for _ in range(steps):
            optimizer.zero_grad()
            one_backward(model)
            optimizer.step()
        return model, optimizer

    expected = {steps + 1: everything(*trained(steps + 1)) for steps in (2, 3)}
    for line in range(1 + drawn_seeds(1)[0] % 13, 1 << 20, 13):
        model, optimizer = made(movable=("grads",), max_grad_norm=0.5)
        if hooks:
            optimizer.hook_gradients()
        if overlaps:
            optimizer.overlap(model)
        for _ in range(2):
            optimizer.zero_grad()
            one_backward(model)
            optimizer.step()
        optimizer.zero_grad()
        one_backward(model)
        if not cut_off(optimizer.step, line):
            assert line > 90
            return
        optimizer.synchronize()
        optimizer.zero_grad()
        optimizer._engine.wait()
        made_steps = {optimizer._engine._stored_count(slot) for slot in optimizer._engine.slots}
        assert made_steps in ({2}, {3})
        assert [result.step for result in optimizer.step_results()] == list(range(1, 1 + max(made_steps))), line
        one_backward(model)
        optimizer.step()
        optimizer.synchronize()
        assert everything(model, optimizer) == expected[made_steps.pop() + 1], line


def refused_save(optimizer, folder):
    with pytest.raises(hybridopt.abi.HybridoptError, match="exists"):
        optimizer.save_checkpoint(folder, progress=False)


def interrupted(call):
    with pytest.raises(KeyboardInterrupt):
        call()


def interrupted_step(optimizer, folder):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Steps, "result", lambda *_: signal.raise_signal(signal.SIGINT))
        interrupted(optimizer.step)


def interrupted_load(optimizer, folder):
    optimizer.save_checkpoint(folder / "whole", progress=False)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Transfer, "wait", lambda _: signal.raise_signal(signal.SIGINT))
        interrupted(lambda: optimizer.load_checkpoint(folder / "whole", progress=False))


@pytest.mark.parametrize("cut_short", [refused_save, interrupted_step, interrupted_load])
def test_nothing_is_under_way_when_an_exception_comes(cut_short, tmp_path):
    """Code that catches it may write params, and free their memory: after these calls they have no trap."""
    params = [torch.nn.Parameter(torch.ones(4_000_000, dtype=torch.bfloat16)) for _ in range(2)]
    optimizer = hybridopt.AdamW(params, lr=0.1, threads=1)
    optimizer.materialize()
    params[0].grad = torch.ones_like(params[0])
    cut_short(optimizer, tmp_path)
    optimizer._engine.handle.drain(timeout_ns=0)  # else TimedOutError


@pytest.mark.parametrize("call", ["last_step", "synchronize"])
def test_a_report_that_is_cut_off_anywhere_loses_no_step(call):
    for line in range(1 + drawn_seeds(1)[0] % 3, 1 << 20, 3):
        model, optimizer = made()
        optimizer.overlap(model)
        for _ in range(2):
            one_backward(model)
            optimizer.step()
            optimizer.zero_grad()
        if not cut_off(getattr(optimizer, call), line):
            assert line > 90
            return
        assert [result.step for result in optimizer.step_results()] == [1, 2], line


MODES = ("all leave", "some stay", "micro-batches", "accumulate")


def with_hooks(mode, monkeypatch, hooks=True):
    model, optimizer = made(max_grad_norm=0.5)
    if mode == "some stay":
        monkeypatch.setattr(abi.Optimizer, "grads_to_keep", lambda _, count: bytes(each % 2 for each in range(count)))
    if hooks:
        optimizer.hook_gradients(accumulate=mode == "accumulate", micro_batches=2 if mode == "micro-batches" else 1)
    iteration(model, optimizer, mode)
    return model, optimizer


def one_backward(model):
    model(torch.linspace(-1, 1, 80).reshape(8, 10)).square().sum().backward()


def iteration(model, optimizer, mode):
    optimizer.zero_grad()
    for _ in range(2 if mode in ("micro-batches", "accumulate") else 1):
        one_backward(model)
    optimizer.step()


AFTER_BACKWARD = {
    "zero_grad": lambda model, optimizer: None,
    "step": lambda model, optimizer: optimizer.step(),
    "backward": lambda model, optimizer: one_backward(model),
    "clip": lambda model, optimizer: clip_without_effect(model),
    "close": lambda model, optimizer: optimizer.close(),
}


@pytest.mark.parametrize("after", AFTER_BACKWARD)
@pytest.mark.parametrize("mode", MODES)
def test_a_backward_pass_that_is_cut_off_anywhere_can_be_begun_again(mode, after, monkeypatch):
    """Whatever the program tries first, it is told of zero_grad(), after which the run goes on to the same bits."""
    other, plain = with_hooks(mode, monkeypatch, hooks=mode == "accumulate")
    iteration(other, plain, mode)
    expected = everything(other, plain)
    for line in range(1 + drawn_seeds(1)[0] % 41, 1 << 20, 41):
        model, optimizer = with_hooks(mode, monkeypatch)
        optimizer.zero_grad()
        if mode in ("micro-batches", "accumulate"):
            one_backward(model)
        if not cut_off(lambda: one_backward(model), line):
            assert line > 200
            return
        try:
            AFTER_BACKWARD[after](model, optimizer)
            if after in ("step", "backward", "close"):
                continue
        except abi.InvalidStateError as error:
            assert "zero_grad()" in str(error), line
        iteration(model, optimizer, mode)
        assert everything(model, optimizer) == expected, line


# ------------------------------------------------------------------------------ traps of two kinds --


@pytest.mark.parametrize("taken_by", ["hooks", "offload"])
def test_offloaded_params_whose_gradients_are_taken_are_told_of_both(taken_by):
    """A forward pass names reload, and clipping is refused before, in and after the phase."""
    model, optimizer = made(movable=ALL, max_grad_norm=0.5)
    if taken_by == "hooks":
        optimizer.hook_gradients()
    model(torch.ones(2, 10)).sum().backward()
    if taken_by == "offload":
        optimizer.offload(grads=True)
    refused = r"torch.nn.utils.clip_grad_norm_\(\) and its like find no gradients"
    for _ in range(2):
        with pytest.raises(abi.InvalidStateError, match=refused):
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.offload(params=True)
        with pytest.raises(abi.InvalidStateError, match=OFFLOADED.format("0.weight", "linear")):
            model(torch.ones(2, 10))
        with pytest.raises(abi.InvalidStateError, match=refused):
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.reload(params=True)
        model(torch.ones(2, 10))
        copy.deepcopy(model)
    with pytest.raises(abi.InvalidStateError, match=refused):
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    assert {type(param) for param in model.parameters()} == {nn.Parameter}


def test_gradients_that_stay_on_the_device_are_not_found_either(monkeypatch):
    """A reload of params, which takes other traps back, is no reload of gradients."""
    monkeypatch.setattr(abi.Optimizer, "grads_to_keep", lambda _, count: bytes([1] * count))
    model, optimizer = made(movable=ALL, max_grad_norm=0.5)
    optimizer.hook_gradients()
    model(torch.ones(2, 10)).sum().backward()
    with optimizer.offloaded(grads=False):
        pass
    with pytest.raises(abi.InvalidStateError, match="find no gradients"):
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()


def test_sums_that_cannot_come_back_leave_all_as_it_was(monkeypatch):
    """Sums of bf16 gradients are in fp32, and have no place in a gradient of bf16."""
    torch.manual_seed(0)
    model = perceptron(torch.bfloat16)
    optimizer = hybridopt.AdamW(model.named_parameters(), movable=ALL, max_grad_norm=0.5)
    optimizer.hook_gradients(accumulate=True)
    for _ in range(2):
        model(torch.ones(2, 10, dtype=torch.bfloat16)).sum().backward()
    for _ in range(2):
        with pytest.raises(abi.HybridoptError, match="accumulated in fp32, which its own dtype cannot hold; let the step read it"):
            optimizer.reload(grads=True)
        assert all(param.grad is None for param in model.parameters())
    optimizer.step()
    assert optimizer.stats().steps_applied == 1
