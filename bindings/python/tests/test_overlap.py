"""Steps that run while the program continues. On the CPU, in check mode, where it is an error to use a param for
which its module has not waited. Losses and every bit are compared with a training whose steps wait. test_traps.py
tests what such uses do without check mode."""

import copy
import gc
import io
import signal
import warnings
import weakref

import models
import pytest
import ranks
import scripts
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import hybridopt
from hybridopt import abi
from hybridopt.sync.masters import Masters


@pytest.fixture(autouse=True)
def check_mode(monkeypatch):
    monkeypatch.setenv("HYBRIDOPT_CHECK_OVERLAP", "1")


class Model(nn.Module):
    """Blocks between an embedding and a head that share a weight, one block checkpointed; a module that is used
    twice; and a list of params and a module that is never called, both used by their parent module."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(11, 6)
        self.blocks = nn.ModuleList(models.Block(6, 8) for _ in range(3))
        self.scales = nn.ParameterList([nn.Parameter(torch.ones(6)), nn.Parameter(torch.zeros(6))])
        self.uncalled = nn.Linear(6, 6)
        self.attention = nn.MultiheadAttention(6, 2, batch_first=True)
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens):
        x = self.embedding(tokens)
        x = self.blocks[0](x)
        x = checkpoint(self.blocks[1], x, use_reentrant=False)
        x = checkpoint(self.blocks[2], x, use_reentrant=True) if self.training else self.blocks[2](x)
        x = self.blocks[0](x) * self.scales[0] + self.scales[1]
        x = functional.linear(x, self.uncalled.weight, self.uncalled.bias)
        return self.head(x + self.attention(x, x, x, need_weights=False)[0])


def model(dtype=torch.float32):
    torch.manual_seed(0)
    return Model().to(dtype)


def tokens(seed):
    return torch.randint(11, (4, 5), generator=torch.Generator().manual_seed(seed))


def loss_of(module, seed):
    batch = tokens(seed)
    return functional.cross_entropy(module(batch).flatten(0, 1).float(), batch.flatten())


def adamw(module, **options):
    return hybridopt.AdamW(module.named_parameters(), **{"lr": 0.05, "threads": 1, **options})


def overlapping(module, **options):
    return adamw(module, overlap=module, **options)


def train(module, optimizer, steps=4, micro_batches=1, first=0):
    """Makes some steps and returns the losses. The learning rate changes, and every third step is skipped."""
    losses = []
    for step in range(first, first + steps):
        for micro_batch in range(micro_batches):
            loss = loss_of(module, 10 * step + micro_batch)
            (loss * (torch.inf if step % 3 == 2 else 1.0)).backward()
            losses.append(loss.item())
        optimizer.param_groups[0]["lr"] *= 0.9
        optimizer.step()
        optimizer.zero_grad()
    return losses


def under_way(optimizer):
    return bool(optimizer._engine.under_way)


def same(module, optimizer, other, plain):
    optimizer.synchronize()
    assert models.bits(module.parameters()) == models.bits(other.parameters())
    assert models.state_bits(optimizer) == models.state_bits(plain)
    results = [result.grad_norm.hex() for result in optimizer.step_results()]
    assert results == [result.grad_norm.hex() for result in plain.step_results()]
    return True


def pair(dtype=torch.float32, **options):
    module = model(dtype)
    other = copy.deepcopy(module)
    return module, overlapping(module, **options), other, adamw(other, **options)


# --------------------------------------------------------------------------------- the same bits --


@pytest.mark.parametrize("micro_batches", [1, 3])
@pytest.mark.parametrize("max_grad_norm", [None, 0.3])
@pytest.mark.parametrize(
    "dtype, options, watched",
    [
        (torch.float32, {}, False),
        (torch.bfloat16, {}, False),
        (torch.bfloat16, {"master_layout": "split", "state_dtype": torch.bfloat16}, False),
        (torch.bfloat16, {}, True),
    ],
)
def test_losses_and_bits_are_those_of_steps_that_wait(
    dtype, options, watched, max_grad_norm, micro_batches, monkeypatch
):
    models.watch_params(monkeypatch, watched)
    both = module, optimizer, other, plain = pair(dtype, max_grad_norm=max_grad_norm, **options)
    losses = train(module, optimizer, 7, micro_batches)
    assert under_way(optimizer)
    assert losses == train(other, plain, 7, micro_batches)
    assert same(*both)
    assert sum(result.skipped for result in optimizer.step_results()) == 2


def scaled(module, optimizer, scaler, steps=6):
    seen = []
    for step in range(steps):
        for micro_batch in range(2):
            loss = loss_of(module, 10 * step + micro_batch)
            scaler.scale(loss * (torch.inf if step == 2 else 1.0)).backward()
            seen.append(loss.item())
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        seen.append(scaler.get_scale())
    return seen


@pytest.mark.parametrize("hooked", [False, True])
def test_a_grad_scaler_sees_the_same(hooked):
    both = module, optimizer, other, plain = pair(max_grad_norm=0.3)
    scalers = [torch.amp.GradScaler("cpu", init_scale=128.0, growth_interval=2) for _ in range(2)]
    if hooked:
        optimizer.hook_gradients(grad_scaler=scalers[0], micro_batches=2)
        plain.hook_gradients(grad_scaler=scalers[1], micro_batches=2)
    assert scaled(module, optimizer, scalers[0]) == scaled(other, plain, scalers[1])
    assert same(*both)


def test_hooked_gradients_need_no_wait():
    both = module, optimizer, other, plain = pair(max_grad_norm=0.3)
    for each in (optimizer, plain):
        each.hook_gradients(micro_batches=2)
    losses = train(module, optimizer, 5, 2)
    assert under_way(optimizer)
    assert losses == train(other, plain, 5, 2)
    assert same(*both)


def test_params_with_gaps_and_params_without_gradients(monkeypatch):
    models.watch_params(monkeypatch)
    module, other = model(torch.bfloat16), model(torch.bfloat16)
    for each in (module, other):
        norm = each.blocks[1].norm
        norm.weight = nn.Parameter(torch.ones(12, dtype=torch.bfloat16)[::2])
        each.blocks[2].norm.weight.requires_grad_(False)
    optimizer, plain = overlapping(module), adamw(other)
    assert train(module, optimizer, 5) == train(other, plain, 5)
    assert same(module, optimizer, other, plain)
    assert optimizer._engine.in_sync.written() == []  # the library's own writes do not count as writes of others


class WithALayerLeftOut(nn.Module):
    def __init__(self):
        super().__init__()
        self.used, self.left_out = nn.Linear(8, 8), nn.Linear(4096, 1024)

    def forward(self, x):
        return self.used(x)


@pytest.mark.parametrize("freed", [True, False])
def test_params_without_gradients_may_be_written_and_freed_at_once(monkeypatch, freed):
    """The library compares them with their masters before a step. No trap tells it of their uses, so step() returns
    when it has read them."""
    module = WithALayerLeftOut().bfloat16()
    optimizer = overlapping(module)
    refreshed, refresh = [], Masters.refresh

    def noted(*arguments):
        refreshed.append(refresh(*arguments))
        return refreshed[-1]

    monkeypatch.setattr(Masters, "refresh", noted)
    for seed in range(3):
        refreshed.clear()
        x = torch.randn(2, 8, generator=torch.Generator().manual_seed(seed), dtype=torch.bfloat16)
        module(x).float().square().mean().backward()
        optimizer.step()
        optimizer._engine.handle.wait(*refreshed, timeout_ns=0)  # else TimedOutError
        weight = module.left_out.weight
        if freed:
            weight.data = weight.data.clone()
        optimizer.zero_grad()
    optimizer.synchronize()
    assert not optimizer._engine.masters.has_low_bits(next(s for s in optimizer._engine.slots if s.param is weight))


def test_each_of_two_optimizers_is_waited_for():
    def halves(module, **options):
        params = list(module.named_parameters())
        return [hybridopt.SGD(half, lr=0.1, **options) for half in (params[::2], params[1::2])]

    module, other = model(), model()
    both, plain = halves(module, overlap=module), halves(other)
    for seed in range(4):
        losses = []
        for each, optimizers in ((module, both), (other, plain)):
            loss = loss_of(each, seed)
            loss.backward()
            losses.append(loss.item())
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        assert losses[0] == losses[1]
        assert all(under_way(optimizer) for optimizer in both)
    for optimizer in both:
        optimizer.synchronize()
    assert models.bits(module.parameters()) == models.bits(other.parameters())


# ------------------------------------------------------------------------------------ who waits --


def pending(optimizer):
    """The names of params that nothing has waited for."""
    engine = optimizer._engine
    return {slot.name for slot in engine.slots if engine.under_way and engine.under_way.is_pending(slot)}


def test_modules_wait_for_their_own_params_in_the_order_of_the_first_forward_pass():
    module = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 3))
    params = dict(reversed(list(module.named_parameters())))
    optimizer = hybridopt.SGD(params.items(), lr=0.1, overlap=module, threads=1)
    module(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    order = sorted(optimizer._engine.slots, key=lambda slot: slot.chunk_order)
    assert [slot.name for slot in order] == [name for name, _ in module.named_parameters()]
    assert pending(optimizer) == set(params)
    x = module[0](torch.ones(1, 3))
    assert pending(optimizer) == {"1.weight", "1.bias", "2.weight", "2.bias"}
    x = module[1](x)
    assert pending(optimizer) == {"2.weight", "2.bias"}
    module[2](x)
    assert not under_way(optimizer)


def test_what_no_module_uses_by_itself_is_waited_for_by_the_one_above():
    module = model()
    optimizer = overlapping(module)
    train(module, optimizer, 1)
    seen = []
    module.embedding.register_forward_hook(lambda *_: seen.append(pending(optimizer)))
    loss_of(module, 0)
    waited = set(dict(module.named_parameters())).difference(seen[0])
    own = {f"attention.{name}" for name, _ in module.attention.named_parameters()}
    assert waited == {"embedding.weight", "scales.0", "scales.1", "uncalled.weight", "uncalled.bias"}
    assert own < seen[0]


def test_nothing_is_waited_for_that_is_not_in_the_data():
    module = model()
    optimizer = overlapping(module)
    train(module, optimizer, 1)
    optimizer.zero_grad()
    module.zero_grad()
    module.train()
    optimizer.param_groups[0]["lr"] = 0.01
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 0.5)
    with pytest.warns(UserWarning):  # there was no step() since the scheduler was made
        scheduler.step()
    optimizer.stats(), optimizer.plan(), optimizer.memory_timeline(), [*module.named_parameters()]
    assert len(pending(optimizer)) == len(list(module.parameters()))


def moved(module, optimizer, path):
    module.to(torch.float64)
    module.to(torch.float32)


def loaded(module, optimizer, path):
    module.load_state_dict({name: value.clone() for name, value in module.state_dict().items()})


def checkpointed(module, optimizer, path):
    optimizer.save_checkpoint(path / "saved")
    optimizer.load_checkpoint(path / "saved")


def offloaded(module, optimizer, path):
    with optimizer.offloaded(grads=False):
        pass


def group_added(module, optimizer, path):
    module.other = nn.Linear(2, 2)
    optimizer.add_param_group({"params": list(module.other.named_parameters()), "lr": 0.1})
    optimizer.step()  # without a gradient
    optimizer.save_checkpoint(path / "saved")


@pytest.mark.filterwarnings("ignore:overlap.. has no effect while params lie in shared memory")
@pytest.mark.parametrize(
    "use",
    [
        lambda module, optimizer, path: optimizer.synchronize(),
        lambda module, optimizer, path: module.state_dict(),
        lambda module, optimizer, path: module.blocks[1].norm.state_dict(),
        loaded,
        moved,
        lambda module, optimizer, path: module.share_memory(),
        lambda module, optimizer, path: optimizer.state_dict(),
        lambda module, optimizer, path: list(optimizer.state.items()),
        lambda module, optimizer, path: copy.deepcopy(optimizer),
        lambda module, optimizer, path: optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict())),
        lambda module, optimizer, path: optimizer.last_step(),
        lambda module, optimizer, path: optimizer.master_of(module.head.weight),
        lambda module, optimizer, path: optimizer.refresh_masters(),
        lambda module, optimizer, path: optimizer.set_offload_fraction(0.5),
        lambda module, optimizer, path: optimizer.zero_grad(set_to_none=False),
        lambda module, optimizer, path: module.zero_grad(set_to_none=False),
        lambda module, optimizer, path: optimizer.hook_gradients().remove(),
        lambda module, optimizer, path: module.eval()(tokens(0)),
        lambda module, optimizer, path: optimizer.step(),  # without a gradient
        checkpointed,
        offloaded,
    ],
)
def test_who_reads_or_writes_params_waits(use, tmp_path):
    both = module, optimizer, other, plain = pair(movable=("params", "grads", "states"), max_grad_norm=None)
    losses = train(module, optimizer, 2)
    assert under_way(optimizer)
    with torch.no_grad():
        use(module, optimizer, tmp_path)
    module.train()
    assert not under_way(optimizer)
    assert losses + train(module, optimizer, 3, first=2) == train(other, plain, 5)
    assert models.bits(module.state_dict().values()) == models.bits(other.state_dict().values())


def test_params_that_are_added_are_waited_for():
    module, other = (nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 3)) for _ in range(2))
    other.load_state_dict(module.state_dict())
    optimizer, plain = overlapping(module), adamw(other)
    for seed in range(5):
        for each, its_optimizer in ((module, optimizer), (other, plain)):
            if seed == 2:
                torch.manual_seed(1)
                each.append(nn.Linear(3, 3))
                its_optimizer.add_param_group({"params": list(each[2].named_parameters("2"))})
            each(torch.ones(1, 3)).square().sum().backward()
            its_optimizer.step()
            its_optimizer.zero_grad()
    assert pending(optimizer) == set(dict(module.named_parameters()))
    assert same(module, optimizer, other, plain)


def test_a_module_that_is_evaluated_waits_for_what_its_shorter_ways_use():
    class Shorter(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(3, 3)

        def forward(self, x):
            return self.inner(x) if self.training else functional.linear(x, self.inner.weight)

    module = nn.Sequential(Shorter(), nn.Linear(3, 3))
    optimizer = overlapping(module)
    module(torch.ones(2, 3)).sum().backward()
    optimizer.step()
    with torch.no_grad():
        module.eval()[0](torch.ones(2, 3))
    assert pending(optimizer) == {"1.weight", "1.bias"}


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.parametrize("how", ["whole", "blocks", "blocks in place", "not told"])
def test_compiled_models(how):
    torch._dynamo.reset()
    module, other = model(), model()
    called, given = module, module
    if how == "whole":
        called = given = torch.compile(module, backend="eager")
    elif how == "blocks":
        module.blocks = nn.ModuleList(torch.compile(b, backend="eager") for b in module.blocks)
    elif how == "blocks in place":
        for block in module.blocks:
            block.compile(backend="eager", fullgraph=True)
    else:
        called = torch.compile(module, backend="eager")
    optimizer = hybridopt.AdamW(module.named_parameters(), lr=0.05, threads=1, overlap=given)
    plain = adamw(other)
    assert train(called, optimizer, 4) == train(other, plain, 4)
    assert under_way(optimizer)
    assert same(module, optimizer, other, plain)


# ------------------------------------------------------------------------------------- gradients --


def test_gradients_that_are_written_while_a_step_reads_them_are_told():
    module = nn.Linear(3, 3)
    optimizer = hybridopt.SGD(module.named_parameters(), lr=0.1, overlap=module)
    module(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    module.bias.grad.mul_(2)
    with pytest.raises(
        abi.InvalidStateError, match="the gradient of parameter 'bias' was written in place while a step"
    ):
        module(torch.ones(1, 3))
    assert not under_way(optimizer)


def test_gradients_live_until_their_params_have_been_waited_for():
    module = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    optimizer = hybridopt.SGD(module.named_parameters(), lr=0.1, overlap=module)
    module(torch.ones(1, 3)).sum().backward()
    gradients = [weakref.ref(each.weight.grad.untyped_storage()) for each in module]
    optimizer.step()
    optimizer.zero_grad()
    assert all(gradient() is not None for gradient in gradients)
    x = module[0](torch.ones(1, 3))
    assert [gradient() is not None for gradient in gradients] == [False, True]
    module[1](x)
    assert all(gradient() is None for gradient in gradients)


@pytest.mark.parametrize("watched", [True, False])
def test_params_that_others_write_in_the_forward_pass_are_noticed(watched, monkeypatch):
    models.watch_params(monkeypatch, watched)

    def clamp(module, _):
        with torch.no_grad():
            module.weight.clamp_(-0.1, 0.1)

    both = module, optimizer, other, plain = pair(torch.bfloat16)
    for each in (module, other):
        each.embedding.register_forward_pre_hook(clamp, prepend=True)
    optimizer._overlap.remove()
    optimizer.overlap(module)  # overlap() puts its hooks before existing ones
    assert train(module, optimizer, 5) == train(other, plain, 5)
    assert same(*both)


# ---------------------------------------------------------------------------------- what is refused --


def test_what_is_refused():
    module = nn.Linear(2, 2)
    optimizer = hybridopt.SGD(module.named_parameters(), lr=0.1)
    optimizer.overlap(module)
    with pytest.raises(abi.InvalidStateError, match="steps overlap already; call remove"):
        optimizer.overlap(module)
    of_constructor = hybridopt.SGD(module.named_parameters(), lr=0.1, overlap=module)
    with pytest.raises(abi.InvalidStateError, match="overlap= of the constructor .* leave this call or that argument out"):
        of_constructor.overlap(module)
    with pytest.raises(TypeError, match="overlap is a list, expected the torch.nn.Module"):
        hybridopt.SGD(module.parameters(), lr=0.1, overlap=[module])
    module.weight._fsdp_flattened = True
    with pytest.raises(ValueError, match=r"overlap\(\) with parameter 'weight', which FullySharded"):
        hybridopt.SGD(module.named_parameters(), lr=0.1).overlap(module)
    with pytest.raises(ValueError, match="overlap with parameter 'weight', which FullySharded"):
        hybridopt.SGD(module.named_parameters(), lr=0.1, overlap=module)


def test_a_module_may_have_all_params_below_in_modules_that_are_not_called():
    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.scales = nn.ParameterList([nn.Parameter(torch.ones(3))])

        def forward(self, x):
            return x * self.scales[0]

    module = Scaled()
    optimizer = hybridopt.SGD(module.named_parameters(), lr=0.1, overlap=module)
    module(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    assert pending(optimizer) == {"scales.0"}
    assert module(torch.ones(1, 3)).tolist() == [[0.8999999761581421] * 3]


def test_without_a_forward_pass_steps_wait_and_say_so_once():
    module = nn.Linear(2, 2)
    optimizer = hybridopt.SGD(module.named_parameters(), lr=0.1, overlap=module)
    with pytest.warns(UserWarning, match=r"overlap\(\) has seen no forward pass of its model") as told:
        models.run(optimizer, list(module.parameters()), [0])
    assert [each.filename for each in told] == [models.__file__]
    models.run(optimizer, list(module.parameters()), [1])
    assert not under_way(optimizer)


# ------------------------------------------------------------------------------------ copies, ends --


@pytest.mark.parametrize("with_gaps", [False, True])
def test_steps_wait_while_other_processes_may_have_the_memory_of_params(with_gaps):
    made = []
    for overlaps in (True, False):
        torch.manual_seed(0)
        module = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        if with_gaps:
            module[0].weight.data = torch.randn(4, 8)[:, ::2]
        optimizer = hybridopt.AdamW(module.named_parameters(), lr=0.1, overlap=module if overlaps else None)
        for number in range(4):
            if number == 2:
                module[0].share_memory()
            with warnings.catch_warnings(record=True) as told:
                warnings.simplefilter("always")
                module(torch.ones(2, 4)).square().sum().backward()
                optimizer.step()
            assert bool(optimizer._engine.under_way) == (overlaps and number < 2)
            assert [str(each.message)[:43] for each in told] == ["overlap() has no effect while params lie in"] * (
                overlaps and number == 2
            )
            assert {each.filename for each in told} <= {__file__}
            optimizer.zero_grad()
        made.append(models.bits(module.parameters()))
    assert made[0] == made[1]


def test_copies_of_the_model_have_nothing_to_wait_for():
    module = model()
    optimizer = overlapping(module)
    train(module, optimizer, 1)
    optimizer.synchronize()
    written = io.BytesIO()
    torch.save(module, written)
    written.seek(0)
    copies = [copy.deepcopy(module), torch.load(written, weights_only=False)]
    assert models.bits(copies[0].parameters()) == models.bits(module.parameters())
    loss_of(module, 0).backward()
    optimizer.step()
    for each in copies:
        loss_of(each, 0).backward()
        each.zero_grad(set_to_none=False)
        each.state_dict()
        each.to(torch.float64)
        assert each.embedding.weight.dtype == torch.float64
        assert len(pending(optimizer)) == len(list(module.parameters()))
    assert module.embedding.weight.dtype == torch.float32
    alone = copy.deepcopy(optimizer)
    assert alone._overlap is None


def test_remove_and_close_end_it():
    both = module, optimizer, other, plain = pair()
    losses = train(module, optimizer, 2)
    overlap = optimizer._overlap
    overlap.remove()
    assert not under_way(optimizer)
    assert "_apply" not in vars(module.head) and not module.head._forward_pre_hooks
    losses += train(module, optimizer, 1, first=2)
    assert not under_way(optimizer)
    optimizer.overlap(module)
    assert losses + train(module, optimizer, 2, first=3) == train(other, plain, 5)
    assert same(*both)
    train(module, optimizer, 1)
    optimizer.close()
    loss_of(module, 0).backward()


def test_the_end_of_the_optimizer_waits_for_its_step(monkeypatch):
    module, optimizer, other, plain = pair()
    train(module, optimizer, 2)
    state = optimizer.state_dict()  # its views keep the library's optimizer alive
    train(module, optimizer, 1, first=2)
    train(module, optimizer, 1, first=3)
    handle, drained = optimizer._engine.handle, []
    drain = handle.drain
    monkeypatch.setattr(handle, "drain", lambda: (drain(), drained.append(True)))
    del optimizer
    gc.collect()
    assert drained
    train(other, plain, 4)
    assert models.bits(module.parameters()) == models.bits(other.parameters())
    assert state
    loss_of(module, 0).backward()


@pytest.mark.parametrize("how", ["pass", "raise KeyboardInterrupt", "sys.exit(0)", "del module"])
def test_a_process_may_end_while_a_step_is_under_way(how):
    program = """
import sys, torch, hybridopt
from torch import nn
module = nn.Sequential(nn.Linear(1000, 1000), nn.Linear(1000, 1000))
optimizer = hybridopt.AdamW(module.parameters(), overlap=module)
for _ in range(3):
    module(torch.ones(2, 1000)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
print("under way:", bool(optimizer._engine.under_way))
"""
    server = scripts.Scripts()
    try:
        ended = server.run(program + how)
    finally:
        server.close()
    assert ended.stdout == "under way: True\n", ended.stderr
    if how == "raise KeyboardInterrupt":
        assert ended.returncode == -signal.SIGINT
        assert ended.stderr.endswith("KeyboardInterrupt\n")
    else:
        assert (ended.returncode, ended.stderr) == (0, "")


def test_ctrl_c_in_a_wait_leaves_the_step_to_be_waited_for(monkeypatch):
    both = module, optimizer, other, plain = pair()
    losses = train(module, optimizer, 2)
    handle = optimizer._engine.handle
    wait = handle.wait

    def interrupted(*arguments, **options):
        monkeypatch.setattr(handle, "wait", wait)
        raise KeyboardInterrupt

    monkeypatch.setattr(handle, "wait", interrupted)
    with pytest.raises(KeyboardInterrupt):
        loss_of(module, 0)
    assert len(pending(optimizer)) == len(list(module.parameters()))
    assert losses + train(module, optimizer, 3, first=2) == train(other, plain, 5)
    assert same(*both)


def test_an_exception_in_the_backward_pass_leaves_nothing_half_done():
    class Failing(torch.autograd.Function):
        @staticmethod
        def forward(context, x):
            return x.clone()

        @staticmethod
        def backward(context, grad):
            raise ZeroDivisionError

    both = module, optimizer, other, plain = pair()
    losses = train(module, optimizer, 2)
    with pytest.raises(ZeroDivisionError):
        Failing.apply(loss_of(module, 0)).backward()
    optimizer.zero_grad()
    assert losses + train(module, optimizer, 3, first=2) == train(other, plain, 5)
    assert same(*both)


# ------------------------------------------------------------------------------------------- ranks --


def silent_rank(rank, world):
    """Rank 1 does not make the second step."""
    module = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    options = {"process_group": dist.group.WORLD, "replica_group": dist.group.WORLD}
    nn.init.ones_(module[0].weight), nn.init.ones_(module[1].weight)
    for bias in (module[0].bias, module[1].bias):
        nn.init.zeros_(bias)
    optimizer = hybridopt.SGD(
        module.named_parameters(), lr=0.1, overlap=module, threads=1, comm_timeout_seconds=3.0, **options
    )
    before = [param.data_ptr() for param in module.parameters()]
    for step in range(2):
        module(torch.ones(1, 3)).sum().backward()
        if step == 1 and rank == 1:
            return None
        optimizer.step()
        optimizer.zero_grad()
    with pytest.raises(abi.CommFailedError, match="rank 0 of 2"):
        module(torch.ones(1, 3))
    assert not under_way(optimizer)
    assert len(optimizer.step_results()) == 1  # only the first step has a result
    module(torch.ones(1, 3)).sum().backward()  # params are unchanged
    assert before == [param.data_ptr() for param in module.parameters()]
    with pytest.raises(abi.PoisonedError, match="earlier queued work failed"):
        optimizer.step()
    return None


def test_a_failed_step_is_told_to_the_next_who_waits():
    ranks.run(silent_rank, 2)


def sharded(rank, world, prefetch):
    """Compares losses and bits with those of FSDP2 whose steps wait."""
    torch.manual_seed(0)
    seen = []
    whole = nn.Sequential(nn.Linear(5, 5), *(models.Block(5, 8) for _ in range(3)), nn.Linear(5, 3))
    for overlap in (True, False):
        module = copy.deepcopy(whole)
        for block in module[1:4]:
            fully_shard(block)
        fully_shard(module)
        for block, following in zip(module[1:3], module[2:4]):
            if prefetch:
                block.set_modules_to_forward_prefetch([following])
        optimizer = hybridopt.AdamW(
            module.named_parameters(), lr=0.05, max_grad_norm=0.1, threads=1,
            overlap=module if overlap else None,
        )  # fmt: skip
        losses = []
        for step in range(5):
            for micro_batch in range(2):
                generator = torch.Generator().manual_seed(100 * step + 10 * micro_batch + rank)
                loss = module(torch.randn(4, 5, generator=generator)).square().mean()
                (loss * (torch.inf if step == 2 and rank == 1 else 1.0)).backward()
                losses.append(loss.item())
            optimizer.step()
            optimizer.zero_grad()
            assert under_way(optimizer) == overlap
        if overlap:
            with pytest.warns(UserWarning, match="parameter '2.up.weight' is used by 'view_as' while a step"):
                module[2].up.weight.to_local().sum()
            order = sorted(optimizer._engine.slots, key=lambda slot: slot.chunk_order)
            assert [slot.name.split(".")[0] for slot in order[:4]] == ["0", "0", "4", "4"]
        optimizer.synchronize()
        assert sum(result.skipped for result in optimizer.step_results()) == 1
        shards = [param.to_local() for param in module.parameters()]
        seen.append((losses, models.bits(shards), optimizer.last_step().grad_norm.hex()))
    assert seen[0] == seen[1]


@pytest.mark.parametrize("prefetch", [False, True])
def test_fsdp2_waits_before_it_gathers(prefetch):
    ranks.run(sharded, 2, prefetch)
