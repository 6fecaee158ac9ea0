"""Activations that are put aside: losses and gradients have the bits of training without a stash. On the library's
host device, and on a stash that copies as late as it may (lazy_stash.py)."""

import contextlib
import copy
import functools
import gc
import io
import pickle
import sys
import weakref

import pytest
import torch
from lazy_stash import LazyStash
from models import Attention, Block, are_hooks_on_saved_tensors_in_force, bits
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts
from torch.utils.flop_counter import FlopCounterMode

import hybridopt
from hybridopt.stash import activation_stash
from hybridopt.stash.blocks import Transfers
from hybridopt.stash.forward_pass import ForwardPass
from hybridopt.stash.saved import Guard

EVERYTHING = {"fraction": 1.0, "keep_last": 0, "window_bytes": 0}


@pytest.fixture(params=["library", "lazy"])
def both(request, monkeypatch):
    if request.param == "lazy":
        monkeypatch.setattr(activation_stash, "Stash", LazyStash)


@pytest.fixture
def lazy(monkeypatch):
    monkeypatch.setattr(activation_stash, "Stash", LazyStash)


def stash_of(**options):
    return hybridopt.ActivationStash(**{"budget": 8 << 20, "min_bytes": 1, "slab_bytes": 4096, **options})


class Model(nn.Module):
    """Layers of several sizes, one of which is called twice, tied weights, dropout, and an expanded mask."""

    def __init__(self, width=16):
        super().__init__()
        self.embedding = nn.Embedding(40, width)
        self.blocks = nn.ModuleList()
        for hidden in (64, 24, 128, 32):
            self.blocks += [Attention(width, 2), Block(width, hidden)]
        self.head = nn.Linear(width, 40, bias=False)
        self.head.weight = self.embedding.weight

    def layer(self, index, x):
        return self.blocks[index](x)

    def forward(self, tokens):
        x = self.embedding(tokens)
        mask = (tokens > 3)[..., None].expand(-1, -1, x.shape[-1])
        x = functional.dropout(x * mask, 0.1)
        for index in range(len(self.blocks)):
            x = self.layer(index, x)
        x = self.layer(1, functional.gelu(x)).masked_fill(~mask, 0.5)
        return functional.cross_entropy(self.head(x).flatten(0, 1).float(), tokens.flatten())


def train(model, forward, passes=4, backward=torch.Tensor.backward, each_pass=contextlib.nullcontext):
    """Trains for some iterations and returns the losses and gradients."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    results = []
    for seed in range(passes):
        torch.manual_seed(seed)
        tokens = torch.randint(40, (2, 12))
        with each_pass():
            loss = forward(tokens)
        backward(loss)
        results += [loss.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]
        optimizer.step()
        optimizer.zero_grad()
    return bits(results)


def is_empty(stash):
    stats = stash.stats()
    return stats.host_bytes == 0 and not stash._blocks


# -------------------------------------------------------------------------------------- bits --


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"fraction": 0.5},
        {"fraction": 1.0},
        EVERYTHING,
        {"fraction": 1.0, "window_bytes": 1 << 20},
        {"fraction": 0.0},
        {"min_bytes": 2000},
        {"budget": 3 * 4096},
    ],
    ids=str,
)
def test_losses_and_gradients_keep_their_bits(options, both):
    model = Model().to(torch.float32 if len(options) > 1 else torch.bfloat16)
    other = copy.deepcopy(model)
    stash = stash_of(**options)
    assert train(model, model, each_pass=lambda: stash) == train(other, other)
    stats = stash.stats()
    choice = stash.choice()
    assert stats.pushed_bytes > 0 and stats.twice > 0  # the measuring pass puts everything aside
    assert is_empty(stash)
    assert choice.chosen_bytes + choice.kept_bytes == choice.eligible_bytes
    if "fraction" in options:  # without a fraction, the choice depends on the current speed of this machine
        assert choice.chosen_bytes <= options["fraction"] * choice.eligible_bytes
        assert (choice.chosen_bytes > 0) == (options["fraction"] > 0.0)
    assert (stats.refused_bytes > 0) == ("budget" in options)


@pytest.mark.parametrize("options", [{}, EVERYTHING, {"fraction": 1.0}], ids=str)
@pytest.mark.parametrize("is_inside", [False, True])
def test_wrapped_layers_keep_their_bits(options, is_inside, both):
    model = Model()
    other = copy.deepcopy(model)
    stash = stash_of(model=model, **options)
    wrapping = stash.wrap(model.blocks[2:5])
    each_pass = (lambda: stash) if is_inside else contextlib.nullcontext
    assert train(model, model, each_pass=each_pass) == train(other, other)
    assert stash.choice() is not None and stash.stats().pushed_bytes > 0
    assert stash.stats().saved < 4 * 40  # the tensors of three layers
    wrapping.remove()
    saved = stash.stats().saved
    train(model, model, passes=1)
    assert stash.stats().saved == saved


def test_backward_may_be_inside_of_the_with_statement(both):
    model = Model()
    other = copy.deepcopy(model)
    stash = stash_of(**EVERYTHING)

    def forward(tokens):
        with stash:
            loss = model(tokens)
            loss.backward()
        return loss

    expected = train(other, other)
    assert train(model, forward, backward=lambda loss: None) == expected
    assert stash.choice().chosen_bytes > 0 and is_empty(stash)


def test_several_passes_before_their_backward_passes(both):
    """1F1B: backward passes come in the order of the forward passes, with other forward passes in between."""
    model = Model()
    other = copy.deepcopy(model)
    stash = stash_of(**EVERYTHING)

    def scheduled(module, each_pass):
        losses = []
        for step in "FFFBFBBFBFFBBFFBB":
            if step == "F":
                torch.manual_seed(len(losses))
                with each_pass():
                    losses.append(module(torch.randint(40, (2, 12))))
            else:
                losses.pop(0).backward()
        return bits(p.grad for p in module.parameters())

    assert scheduled(model, lambda: stash) == scheduled(other, contextlib.nullcontext)
    assert is_empty(stash)


def test_each_program_has_a_choice_of_its_own(both):
    model = Model()
    other = copy.deepcopy(model)
    stash = stash_of(**EVERYTHING)

    def halves(module, first, second):
        results = []
        for seed in range(4):
            torch.manual_seed(seed)
            with first():
                x = module.embedding(torch.randint(40, (2, 12)))
                x = module.blocks[1](module.blocks[0](x))
            with second():
                y = module.blocks[2](x).square().mean()
            y.backward()
            results += [y.detach()]
        return bits([*results, *(p.grad for p in module.parameters() if p.grad is not None)])

    expected = halves(other, contextlib.nullcontext, contextlib.nullcontext)
    assert halves(model, lambda: stash("first"), lambda: stash("second")) == expected
    assert len(stash.choice("first").goes) > len(stash.choice("second").goes) > 0
    assert stash.choice() is None and is_empty(stash)


@pytest.mark.parametrize(
    "options",
    [{}, {"fraction": 0.5}, EVERYTHING, {"fraction": 1.0, "window_bytes": 1 << 14}, {"budget": 6 * 4096}],
    ids=str,
)
def test_a_pass_has_no_more_on_the_device_than_it_says(options, both, monkeypatch):
    """The bytes on the device are counted block by block after each save and each use."""
    looks = {"forward": 0, "backward": 0}
    save, use = ForwardPass.save, ForwardPass.use

    def on_device(self):
        blocks = [block() for block in self._blocks]
        there = sum(b.bytes for b in blocks if b is not None and (b.storage is not None or b.buffer is not None))
        assert there == self._on_device.bytes()
        return there

    def saving(self, block, *names):
        save(self, block, *names)
        assert on_device(self) <= self._forward_limit_bytes()
        looks["forward"] += 1

    def using(self, block):
        use(self, block)
        on_device(self)
        looks["backward"] += 1

    monkeypatch.setattr(ForwardPass, "save", saving)
    monkeypatch.setattr(ForwardPass, "use", using)
    model = nn.Sequential(Block(16, 64), Attention(16, 2), Block(16, 24))
    stash = stash_of(**options)
    for _ in range(4):
        with stash:
            loss = model(torch.randn(2, 6, 16)).sum()
        loss.backward()
    assert looks["forward"] > 40 and looks["backward"] > 40 and is_empty(stash)


# ------------------------------------------------------------------------------ tensors come back --


class Save(torch.autograd.Function):
    """Appends to `found` what comes back for the saved tensors."""

    @staticmethod
    def forward(context, x, tensors, found):
        context.save_for_backward(*tensors)
        context.found = found
        return x.clone()

    @staticmethod
    def backward(context, gradient):
        context.found += context.saved_tensors
        return gradient, None, None


def come_back(stash, tensors):
    found = []
    x = torch.ones(3, requires_grad=True)
    with stash:
        y = Save.apply(x, tensors, found)
    y.sum().backward()
    assert len(found) == len(tensors)
    return found


def layouts():
    base = torch.randn(6, 4, 10)
    return [
        base,
        base.t() if base.dim() == 2 else base.transpose(0, 2),
        base.permute(1, 2, 0),
        base[:, 1:3],
        base[::2, :, ::3],
        base[2:, 1, 5:],
        torch.randn(5, 1).expand(5, 300),
        torch.randn(1, 1).expand(50, 50),
        torch.randn(40).as_strided((10, 8), (2, 1)),  # which overlaps itself
        torch.randn(2, 3, 4, 4).contiguous(memory_format=torch.channels_last),
        torch.randn(33)[1:],  # less aligned than torch aligns memory
        torch.randn(9, 9).bfloat16().t(),
        torch.randn(16).half(),
        torch.arange(70).reshape(7, 10).T,
        torch.randn(40) > 0,
        torch.randn(12, dtype=torch.complex64),
        torch.randn(12, dtype=torch.complex64).conj(),
        torch.randn(20, dtype=torch.float64)[3],
        torch.empty(0, 4),
        torch.randint(255, (64,), dtype=torch.uint8).view(torch.float8_e5m2),
    ]


def test_views_come_back_as_they_were(both):
    tensors = layouts()
    expected = [tensor.clone() for tensor in tensors]
    stash = stash_of(**EVERYTHING)
    for _ in range(3):
        found = come_back(stash, tensors)
        for one, two, bits_before in zip(found, tensors, expected):
            assert (one.shape, one.dtype) == (two.shape, two.dtype)
            assert one.stride() == two.stride()
            assert (one.data_ptr() - two.data_ptr()) % 64 == 0
            assert one.is_conj() == two.is_conj()
            assert bits([one.resolve_conj()]) == bits([bits_before.resolve_conj()])
    assert stash.stats().pushed_bytes > 0 and is_empty(stash)


def test_what_is_saved_twice_goes_once(both):
    x = torch.randn(8, 16)
    stash = stash_of(**EVERYTHING)
    # Four views of the same memory, and a copy.
    come_back(stash, [x, x.T, x.view(4, 32), x.detach(), x.clone()])
    stats = stash.stats()
    assert (stats.saved, stats.twice, stats.pushed_bytes) == (5, 3, 2 * 512)

    found, leaf, stash = [], torch.ones(3, requires_grad=True), stash_of(**EVERYTHING)
    with stash:
        unused = Save.apply(leaf, [x], [])
        x.add_(1)  # x now counts as another tensor
        Save.apply(leaf, [x], found).sum().backward()
    assert stash.stats().pushed_bytes == 2 * 512 and bits(found) == bits([x])
    with pytest.raises(RuntimeError, match="was changed in place"):
        unused.sum().backward()


def test_views_between_each_others_elements_go_together(both):
    qkv = torch.randn(2, 6, 3, 2, 4)
    stash = stash_of(**EVERYTHING)
    come_back(stash, list(qkv.permute(2, 0, 3, 1, 4)))
    assert stash.stats().pushed_bytes == qkv.nbytes
    assert stash.stats().twice == 2


def test_memory_that_is_used_again_is_not_taken_for_what_was_there_before(both):
    """One tensor is freed, and another one of the same shape and version gets its address."""
    stash = stash_of(**EVERYTHING)
    results, memory = [], bytearray(256)
    x = torch.ones(3, requires_grad=True)
    with stash:
        for value in range(6):
            saved = torch.frombuffer(memory, dtype=torch.float32)
            saved.data.fill_(value)  # `data` has its own version counter
            assert saved._version == 0
            x = Save.apply(x, [saved], results)
            del saved
    x.sum().backward()
    assert [float(each[0]) for each in results] == [5.0, 4.0, 3.0, 2.0, 1.0, 0.0]


def test_params_small_tensors_and_results_of_leaves_stay(both):
    weight = nn.Parameter(torch.randn(64, 64))
    leaf = torch.randn(64, 64, requires_grad=True)
    frozen = nn.Parameter(torch.randn(64, 64), requires_grad=False)
    stash = stash_of(min_bytes=1024, **EVERYTHING)
    come_back(stash, [weight, weight.T, weight[:32], leaf, leaf.T, frozen, frozen.T, torch.randn(255)])
    assert stash.stats().pushed_bytes == 0
    come_back(stash, [torch.randn(256)])
    assert stash.stats().pushed_bytes == 1024


def test_a_second_backward_pass_and_gradients_of_gradients(both):
    model, stash = Model(), stash_of(**EVERYTHING)
    params = list(model.parameters())

    def twice(each_pass):
        torch.manual_seed(1)
        with each_pass():
            loss = model(torch.randint(40, (2, 12)))
        results = list(torch.autograd.grad(loss, params, retain_graph=True))
        results += torch.autograd.grad(loss, params)
        x = torch.randn(4, 16, requires_grad=True)
        with each_pass():
            y = torch.tanh(model.blocks[1](x)).square().sum()
        first = torch.autograd.grad(y, x, create_graph=True)
        results += [*first, *torch.autograd.grad(first[0].square().sum(), x)]
        return bits(results)

    expected = twice(contextlib.nullcontext)
    for _ in range(3):
        assert twice(lambda: stash) == expected
    assert is_empty(stash)


# ------------------------------------------------------------------- where others' implementations broke --



def test_a_measured_pass_whose_save_is_cut_off_can_be_begun_again(monkeypatch):
    model = nn.Sequential(*(nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(3)))
    model.x = torch.linspace(-1, 1, 64).reshape(4, 16)
    other = copy.deepcopy(model)
    stash = stash_of(fraction=1.0)
    wrapping = stash.wrap(list(model))
    loss = model(model.x).square().sum()
    push, pushed = Transfers.push, []

    def cut_off(transfers, block):
        pushed.append(block.place)
        if len(pushed) == 3:
            raise KeyboardInterrupt
        return push(transfers, block)

    loss.backward()
    with monkeypatch.context() as patched:
        patched.setattr(Transfers, "push", cut_off)
        stash.only()  # the next pass is measured
        kept = model[0](model.x)
        with pytest.raises(KeyboardInterrupt):
            model[1](kept)
    kept.sum().backward()
    model.zero_grad()
    results = [squares(model).detach() for _ in range(3)]
    assert bits(results) == bits([squares(other).detach() for _ in range(3)])
    assert bits(param.grad for param in model.parameters()) == bits(param.grad for param in other.parameters())
    wrapping.remove()


@pytest.mark.parametrize("outer", [None, "outer"])
@pytest.mark.parametrize("key", [None, "key"])
@pytest.mark.parametrize("function", ["_leave_statement", "_exit"])
def test_a_with_statement_whose_end_is_cut_off_has_ended(function, key, outer):
    """Ctrl-C comes before the first line of a function that the statement calls at its end."""
    model = nn.Sequential(*(nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(3)))
    model.x = torch.linspace(-1, 1, 64).reshape(4, 16)
    expected = bits([squares(model)])
    stash = stash_of(fraction=1.0)
    context = stash if key is None else stash(key)

    def cut_off(frame, event, _):
        if event == "call" and frame.f_code.co_name == function:
            sys.settrace(before)
            raise KeyboardInterrupt

    before = sys.gettrace()
    with contextlib.nullcontext() if outer is None else stash(outer):
        with pytest.raises(KeyboardInterrupt):
            with context:
                loss = model(model.x).square().sum()
                sys.settrace(cut_off)
        assert len(stash._thread.statements) == (outer is not None)
        assert are_hooks_on_saved_tensors_in_force() == (outer is not None)
        loss.backward()
        assert bits([loss]) == expected
    for _ in range(2):
        assert bits([squares(model, lambda: context)]) == expected
        assert not stash._thread.statements and not are_hooks_on_saved_tensors_in_force()


def test_the_end_of_a_with_statement_by_other_ways():
    model = nn.Sequential(nn.Linear(16, 16), nn.Tanh())
    model.x = torch.linspace(-1, 1, 64).reshape(4, 16)
    stash = stash_of(fraction=1.0)
    for context in (stash, stash("key")):
        with contextlib.ExitStack() as contexts:
            contexts.enter_context(context)
            loss = squares(model)
            assert are_hooks_on_saved_tensors_in_force()
        assert not are_hooks_on_saved_tensors_in_force()
        context.__enter__()
        assert bits([squares(model)]) == bits([loss])
        context.__exit__(None, None, None)
        assert not are_hooks_on_saved_tensors_in_force() and not stash._thread.statements
    gone = weakref.ref(stash)
    del stash, context
    gc.collect()
    assert gone() is None


def squares(model, begin=contextlib.nullcontext):
    """A forward and a backward pass."""
    with begin():
        loss = model(model.x).square().sum()
    loss.backward()
    return loss


def trained(model, pack=None, unpack=None, passes=3, **options):
    """Trains a copy of the model, with a stash or with other hooks."""
    model = copy.deepcopy(model)
    if pack is not None:
        return train(model, model, passes, each_pass=lambda: saved_tensors_hooks(pack, unpack))
    stash = stash_of(**{**EVERYTHING, **options})
    return train(model, model, passes, each_pass=lambda: stash)


def plain(model, passes=3):
    model = copy.deepcopy(model)
    return train(model, model, passes)


def goes_wrong(naive, expected):
    """True if the naive implementation has another result or raises an error."""
    try:
        return naive() != expected
    except (RuntimeError, IndexError):
        return True


def overwrite(storage):
    """Overwrites the memory as its next user would."""
    torch.empty(0, dtype=torch.uint8).set_(storage).fill_(0xFF)


def test_memory_that_is_let_go_before_its_copy_has_ended(lazy, monkeypatch):
    """If memory is freed or reused too early, results become NaN or wrong."""
    model = Model()
    assert trained(model) == plain(model)
    graves = []

    def release(self, block):  # as without a wait
        graves.append(block.storage)
        overwrite(block.storage)
        block.storage = None

    monkeypatch.setattr(Transfers, "release", release)
    assert goes_wrong(lambda: trained(model), plain(model))


def test_memory_that_is_read_before_its_copy_has_ended(lazy, monkeypatch):
    model = Model()
    assert trained(model, window_bytes=None) == plain(model)
    monkeypatch.setattr(LazyStash, "pop", lambda self, ticket, stream=0, flags=0: None)
    assert goes_wrong(lambda: trained(model, window_bytes=None), plain(model))


def test_transposes_of_one_storage(both):
    """An implementation that looked for duplicates by storage: a transpose came back as the original tensor, and
    gradients were wrong without an error."""
    x = torch.randn(8, 8, requires_grad=True)

    def gradient(each_pass):
        with each_pass:
            y = torch.tanh(x)
            z = (y.T @ (2 * y)).square().sum() + (y * y.T).sum()
        return bits(torch.autograd.grad(z, x))

    by_storage = {}

    def pack(tensor):
        return by_storage.setdefault(tensor.untyped_storage().data_ptr(), tensor.detach())

    expected = gradient(contextlib.nullcontext())
    stash = stash_of(**EVERYTHING)
    assert gradient(stash) == expected and stash.stats().twice > 0
    assert gradient(saved_tensors_hooks(pack, lambda tensor: tensor)) != expected


def test_tensors_with_holes(both):
    """An implementation that copied as many consecutive values as the tensor has elements."""
    model = Model()

    def pack(tensor):
        count = tensor.numel()
        flat = tensor.as_strided((count,), (1,)) if storage_has(tensor, count) else tensor
        return flat.clone(), tensor.shape

    def storage_has(tensor, count):
        return (tensor.storage_offset() + count) * tensor.element_size() <= tensor.untyped_storage().nbytes()

    assert trained(model) == plain(model)
    assert goes_wrong(lambda: trained(model, pack, lambda saved: saved[0].view(saved[1])), plain(model))


class Fails(nn.Module):
    def __init__(self, layers):
        super().__init__()
        self.layers = layers
        self.fails = True

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        if self.fails:
            raise RuntimeError("out of something")
        return x


@pytest.mark.parametrize("wraps", [False, True])
def test_an_exception_leaves_nothing_behind(wraps, both):
    """An implementation that leaked gigabytes: after an exception, what had been put aside before it waited forever
    for its backward pass."""
    model = Fails(nn.Sequential(*(Block(16, 32) for _ in range(3))))
    naive = copy.deepcopy(model)
    stash = stash_of(**EVERYTHING)
    if wraps:
        stash.wrap([model])
    each_pass = contextlib.nullcontext if wraps else (lambda: stash)
    waiting = []
    for _ in range(3):
        with pytest.raises(RuntimeError, match="out of something"), each_pass():
            model(torch.randn(4, 16))
        with pytest.raises(RuntimeError, match="out of something"), saved_tensors_hooks(
            lambda tensor: waiting.append(tensor) or len(waiting) - 1, lambda index: waiting[index]
        ):
            naive(torch.randn(4, 16))
        gc.collect()  # pytest's traceback is a reference cycle
        assert stash.stats().pushed_bytes > 0 and is_empty(stash)
    assert len(waiting) > 30
    model.fails = False
    with each_pass():
        y = model(torch.randn(4, 16)).sum()
    y.backward()
    assert is_empty(stash)
    saved = stash.stats().saved
    torch.tanh(torch.randn(4, 16, requires_grad=True))  # works without the hooks, which are gone
    assert stash.stats().saved == saved


def test_early_returns_and_no_grad_leave_nothing_behind(both):
    model, stash = Model(), stash_of(**EVERYTHING)
    tokens = torch.randint(40, (2, 12))

    def early():
        with stash:
            loss = model(tokens)
            return float(loss.detach())

    for _ in range(3):
        early()
        assert is_empty(stash)
    saved = stash.stats().saved
    for mode in (torch.no_grad, torch.inference_mode):
        with mode(), stash:
            model(tokens)
    assert stash.stats().saved == saved
    assert stash.choice() is None  # without a backward pass no lifetimes are known
    loss = early_graph = None
    with stash:
        loss = model(tokens)
        early_graph = model(tokens)  # no backward pass uses it
    loss.backward()
    assert stash.stats().host_bytes > 0
    del early_graph
    assert is_empty(stash)


def test_buffers_for_layers_of_different_sizes(lazy, monkeypatch):
    """An implementation with two alternating buffers, which is right only if layers are equally large and each
    buffer is used up before the next layer but one arrives."""
    model = Model()
    assert trained(model, window_bytes=1 << 16) == plain(model)
    buffers, turn = [torch.empty(1 << 20, dtype=torch.uint8) for _ in range(2)], [0]

    def prefetch(self, block):
        turn[0] += 1
        block.buffer = buffers[turn[0] % 2]
        self.handle.prefetch(block.ticket, block.buffer.data_ptr() + block.padding, block.bytes, 0)

    monkeypatch.setattr(Transfers, "prefetch", prefetch)
    assert goes_wrong(lambda: trained(model, window_bytes=1 << 16), plain(model))


def test_layers_that_are_called_twice_or_not_at_all(both):
    """An implementation that took the index of a layer for the index of what it has saved."""
    by_layer = {}
    layer_now = [None]

    class Odd(Model):
        calls = 0

        def layer(self, index, x):
            self.calls += 1
            if (self.calls + index) % 5 == 0:
                return x
            layer_now[0] = index
            return super().layer(len(self.blocks) - 1 - index, super().layer(index, x))

    counts = {}

    def pack(tensor):
        key = (layer_now[0], tensor.shape)
        counts[key] = counts.get(key, 0) + 1
        by_layer[key] = tensor.detach()
        return key

    model = Odd()
    assert trained(model) == plain(model)
    assert trained(model, fraction=0.5, window_bytes=1 << 14) == plain(model)
    assert goes_wrong(lambda: trained(model, pack, by_layer.get), plain(model))


def test_a_tensor_that_was_changed_in_place_is_refused(lazy, monkeypatch):
    model = nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 16))

    def run(each_pass, change):
        x = torch.ones(4, 16)
        with each_pass:
            y = model[1](model[0](x))
            loss = model[2](y).sum()
            with torch.no_grad():
                change(y)
        return bits(torch.autograd.grad(loss, model[0].weight))

    for options in (EVERYTHING, {**EVERYTHING, "min_bytes": 4096}):  # also for tensors that stay
        stash = stash_of(model=model, **options)
        with pytest.raises(RuntimeError, match=r"float32 tensor of shape \(4, 16\) made by TanhBackward0 that "
                           r"module '[12]' saved was changed in place .*version 1, expected version 0"):  # fmt: skip
            run(stash, lambda y: y.zero_())
    expected = run(contextlib.nullcontext(), lambda y: None)
    assert run(stash_of(**EVERYTHING), lambda y: None) == expected
    monkeypatch.setattr(Guard, "check", lambda self: None)
    assert run(stash_of(**{**EVERYTHING, "window_bytes": None}), lambda y: y.zero_()) != expected


def test_a_change_after_the_memory_was_let_go_is_refused_too(both):
    x = torch.randn(32, requires_grad=True)
    stash = stash_of(**EVERYTHING)
    with stash:
        y = x * 1
        z = (y * y).sum()
    y.detach().add_(1)  # torch's version counter belongs to y
    with pytest.raises(RuntimeError, match="made by MulBackward0 was changed in place"):
        z.backward()


def test_params_that_were_changed_before_backward_are_refused(both):
    layer = nn.Linear(4, 4)
    stash = stash_of(**EVERYTHING)
    with stash:
        y = layer(layer(torch.ones(2, 4))).sum()
    with torch.no_grad():
        layer.weight.add_(1)
    with pytest.raises(RuntimeError, match=r"the float32 tensor of shape \(4, 4\).* was changed in place"):
        y.backward()


def test_capture_is_refused(monkeypatch):
    model, stash = Model(), stash_of()
    wrapped = stash_of()
    wrapped.wrap(model.blocks)
    with monkeypatch.context() as capture:
        for function in ("is_initialized", "is_current_stream_capturing"):
            capture.setattr(torch.cuda, function, lambda: True)
        with pytest.raises(RuntimeError, match="an activation stash runs on the host and cannot be captured"):
            stash.__enter__()
        with pytest.raises(RuntimeError, match="an activation stash runs on the host and cannot be captured"):
            model(torch.randint(40, (2, 12)))
    assert stash.stats().saved == wrapped.stats().saved == 0
    with stash:
        model(torch.randint(40, (2, 12))).backward()


class Captured(TorchDispatchMode):
    """Stands for a CUDA graph: its replay repeats torch's operations on the same memory, and nothing else."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        if function.overloadpacket not in (torch.ops.aten.detach, torch.ops.aten.t):  # these launch nothing on a GPU
            self.calls.append((function, args, kwargs or {}, result))
        return result

    def replay(self):
        with torch.no_grad():
            for function, args, kwargs, result in self.calls:
                result.data.copy_(function(*args, **kwargs))


def test_a_captured_stash_would_put_the_activations_of_the_capture_aside(both, monkeypatch):
    """The host queues the copies, but a replay does not run on the host."""
    weight = torch.randn(8, 8, requires_grad=True)
    inputs = [torch.randn(4, 8) for _ in range(2)]

    def forward(x):
        return torch.tanh(torch.tanh(x @ weight) @ weight).sum()

    def replayed(each_pass):
        x, graph = inputs[0].clone(), Captured()
        with each_pass, graph:
            loss = forward(x)
        x.data.copy_(inputs[1])
        graph.replay()
        return bits(torch.autograd.grad(loss, weight))

    expected = bits(torch.autograd.grad(forward(inputs[1]), weight))
    assert replayed(contextlib.nullcontext()) == expected
    monkeypatch.setattr(activation_stash, "refuse_capture", lambda _: None)
    assert replayed(stash_of(**EVERYTHING)) != expected


def test_pipelines_with_interleaving(both):
    """An implementation with one stack for all micro-batches: last in, first out."""
    chunks = [nn.Sequential(Block(16, 24), Block(16, 40)), nn.Sequential(Block(16, 32))]
    order = [("F", 0, 0), ("F", 0, 1), ("F", 1, 0), ("F", 1, 1), ("B", 1, 0), ("F", 0, 2), ("B", 0, 0)]
    order += [("F", 1, 2), ("B", 1, 1), ("B", 0, 1), ("B", 1, 2), ("B", 0, 2)]

    def run(hooks_of):
        modules = copy.deepcopy(chunks)
        edges = {}
        for kind, chunk, batch in 3 * order:
            if kind == "F":
                seed = torch.Generator().manual_seed(batch)
                x = torch.randn(3, 5, 16, generator=seed) if chunk == 0 else edges[0, batch][1].detach()
                with hooks_of(chunk):
                    x.requires_grad_()
                    edges[chunk, batch] = (x, modules[chunk](x))
                continue
            x, y = edges[chunk, batch]
            y.backward(y.detach() if chunk == 1 else edges[1, batch][0].grad)
        return bits(p.grad for module in modules for p in module.parameters())

    expected = run(lambda chunk: contextlib.nullcontext())
    for options in (EVERYTHING, {"fraction": 0.5}):
        stash = stash_of(**options)
        assert run(lambda chunk: stash(f"chunk {chunk}")) == expected
        assert stash.choice("chunk 0") is not None and stash.choice("chunk 1") is not None
        assert is_empty(stash)
    stack = []
    naive = functools.partial(run, lambda chunk: saved_tensors_hooks(stack.append, lambda _: stack.pop()))
    assert goes_wrong(naive, expected)


def test_hooks_take_no_memory(both):
    """Taking pinned memory inside of a hook may wait for all streams of the device, so that ranks wait for each
    other. So all of it is taken when the stash is made, and what does not fit stays on the device."""
    model = Model()
    stash = stash_of(**{**EVERYTHING, "budget": 4 * 4096})
    before = stash.stats().slabs_bytes
    assert train(copy.deepcopy(model), model, 0, each_pass=lambda: stash) == []
    assert train(other := copy.deepcopy(model), other, 3, each_pass=lambda: stash) == plain(model)
    stats = stash.stats()
    assert stats.slabs_bytes == before and stats.host_bytes_max <= 4 * 4096
    assert stats.refused_bytes > stats.pushed_bytes > 0
    taken = []
    trained(model, lambda tensor: taken.append(tensor.nbytes) or tensor.clone(), lambda tensor: tensor, passes=1)
    assert sum(taken) > 4 * 4096


# --------------------------------------------------------------------------------- recomputation --


class Checkpointed(Model):
    how = {}

    def layer(self, index, x):
        if index % 3 == 0:
            return super().layer(index, x)
        return checkpoint(functools.partial(super().layer, index), x, **self.how)


def caching(*_):
    def policy(context, function, *args, **kwargs):
        is_cached = function is torch.ops.aten.addmm.default
        return CheckpointPolicy.MUST_SAVE if is_cached else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)


@pytest.mark.parametrize("wraps", [False, True])
@pytest.mark.parametrize("is_inside", [False, True], ids=["backward outside", "backward inside"])
@pytest.mark.parametrize(
    "how",
    [
        {"use_reentrant": False},
        {"use_reentrant": True},
        {"use_reentrant": False, "context_fn": caching},
    ],
    ids=["not reentrant", "reentrant", "selective"],
)
def test_checkpoints(how, is_inside, wraps, lazy):
    """What a selective policy caches does not pass through the hooks, and so it stays; the inputs of checkpoints go."""
    model = Checkpointed()
    model.how = how
    other = copy.deepcopy(model)
    stash = stash_of(**EVERYTHING)
    if wraps:
        stash.wrap(model.blocks)
    each_pass = contextlib.nullcontext if wraps and not is_inside else (lambda: stash)

    def forward(tokens):
        with each_pass():
            loss = model(tokens)
            if is_inside:
                loss.backward()
        return loss

    backward = (lambda loss: None) if is_inside else torch.Tensor.backward
    assert train(model, forward, backward=backward) == train(other, other)
    assert stash.stats().pushed_bytes > 0 and is_empty(stash)
    whole = stash_of(**EVERYTHING)
    train(plain_model := Model(), plain_model, each_pass=lambda: whole)
    assert stash.stats().pushed_bytes < whole.stats().pushed_bytes


def test_what_selective_checkpoints_cache_is_not_freed_by_force(both):
    """The cache holds the memory of tensors that hooks have saved too, and no hook sees the cache. An implementation
    that frees the storage of what it has put aside (an in-place operation that its other holders do not notice)
    destroys the cache."""
    layer = nn.Linear(8, 8)

    def both_of(x):
        y = layer(x)
        return y, torch.tanh(y)

    def gradient(each_pass, after_forward=lambda: None):
        x = torch.linspace(-1, 1, 32).reshape(4, 8).requires_grad_()
        with each_pass:
            y, z = checkpoint(both_of, x, use_reentrant=False, context_fn=caching)
            loss = (y * y).sum() + z.sum()
        after_forward()
        return bits(torch.autograd.grad(loss, [x, layer.weight]))

    expected = gradient(contextlib.nullcontext())
    stash = stash_of(**EVERYTHING)
    assert gradient(stash) == expected and stash.stats().pushed_bytes > 0 and is_empty(stash)
    storages = []

    def pack(tensor):
        storages.append(tensor.untyped_storage())
        return tensor.clone()

    def free_by_force():
        for storage in storages:
            overwrite(storage)

    naive = saved_tensors_hooks(pack, lambda tensor: tensor)
    assert goes_wrong(lambda: gradient(naive, free_by_force), expected)


# ------------------------------------------------------------------------------------ compilation --


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
@pytest.mark.parametrize("how", ["model", "layer.compile()", "wrap layer.compile()",
                                 "wrap compile(layer)", "wrap inside"])  # fmt: skip
def test_compiled_regions(how, lazy):
    """What a compiled region saves is put aside like everything else."""
    torch._dynamo.reset()
    model = nn.Sequential(Block(16, 64), Block(16, 24))
    other = copy.deepcopy(model)
    stash = stash_of(model=model, **EVERYTHING)
    called, compiled = model, other
    if how in ("model", "wrap inside"):
        called, compiled = torch.compile(model, backend="aot_eager"), torch.compile(other, backend="aot_eager")
    for layers in (model, other):
        for index in range(2):
            if "layer.compile()" in how:
                layers[index].compile(backend="aot_eager")
            elif "compile(layer)" in how:
                layers[index] = torch.compile(layers[index], backend="aot_eager")
    if "wrap" in how:
        stash.wrap(list(model))

    def run(module, each_pass):
        results = []
        for seed in range(3):
            torch.manual_seed(seed)
            with each_pass():
                loss = module(torch.randn(4, 16)).square().sum()
            loss.backward()
            results += [loss.detach(), *(p.grad for p in module.parameters())]
        return bits(results)

    each_pass = contextlib.nullcontext if "wrap" in how else (lambda: stash)
    assert run(called, each_pass) == run(compiled, contextlib.nullcontext)
    assert stash.stats().pushed_bytes > 0 and is_empty(stash)


# --------------------------------------------------------------------------------- odds and ends --


def test_a_copy_back_that_nobody_needs_keeps_its_memory_until_it_has_ended(lazy, monkeypatch):
    """Two branches, of which the backward pass uses one. The copies of the other branch are under way when its graph
    is freed."""
    buffers, drops = {}, []
    prefetch, drop = Transfers.prefetch, LazyStash.drop

    def noting(self, block):
        prefetch(self, block)
        buffers[block.ticket] = StorageWeakRef(block.buffer.untyped_storage())

    def checking(self, ticket, stream=0):
        drops.append(ticket in buffers)
        assert ticket not in buffers or not buffers[ticket].expired()
        drop(self, ticket, stream)

    monkeypatch.setattr(Transfers, "prefetch", noting)
    monkeypatch.setattr(LazyStash, "drop", checking)
    stash = stash_of(keep_last=0, fraction=1.0, window_bytes=1 << 20)
    model = Block(16, 32)
    for seed in range(4):
        torch.manual_seed(seed)
        with stash:
            unused = model(torch.randn(4, 16)).sum()
            used = model(torch.randn(4, 16)).sum()
        stash._previous().release_all()
        used.backward()
        del unused
        assert is_empty(stash)
    assert any(drops)


def test_copies_and_pickles_of_a_wrapped_model_do_without(both):
    model = Model()
    stash = stash_of(model=model, **EVERYTHING)
    stash.wrap(model.blocks)
    train(other := copy.deepcopy(model), other, passes=1)
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    train(other := torch.load(buffer, weights_only=False), other, passes=1)
    train(other := pickle.loads(pickle.dumps(model)), other, passes=1)
    assert stash.stats().saved == 0
    train(model, model, passes=1)
    assert stash.stats().saved > 0


def test_a_stash_that_nobody_holds_goes(both):
    """Its hooks on a model do not keep a stash alive; a graph that needs the stash does."""
    model = Model()
    stash = stash_of(model=model, **EVERYTHING)
    stash.wrap(model.blocks)
    loss = model(torch.randint(40, (2, 12)))
    gone = weakref.ref(stash)
    del stash
    loss.backward()
    del loss
    gc.collect()
    assert gone() is None
    train(model, model, passes=1)


def test_a_model_that_nobody_holds_goes(both):
    model = Model()
    stash = stash_of(model=model, **EVERYTHING)
    wrapping = stash.wrap(model.blocks)
    train(model, model, passes=2)
    gone = [weakref.ref(module) for module in model.modules()]
    del model
    gc.collect()
    assert not any(module() for module in gone)
    train(other := Model(), other, each_pass=lambda: stash)
    wrapping.remove()
    assert is_empty(stash)


def test_a_program_that_changes_is_measured_again(both):
    model = Model()
    other = copy.deepcopy(model)
    stash = stash_of(**{**EVERYTHING, "fraction": 0.5})
    assert train(model, model, each_pass=lambda: stash) == train(other, other)
    before = stash.choice()
    del model.blocks[3:], other.blocks[3:]
    assert train(model, model, 6, each_pass=lambda: stash) == train(other, other, 6)
    after = stash.choice()
    assert len(after.goes) < len(before.goes) and is_empty(stash)


class LateClock:
    """The clock of a device that has reached no point until the test says so."""

    def __init__(self):
        self.has_come = False
        self.points = 0
        self.waits = 0  # waits for a point that the device has not reached

    def now(self):
        self.points += 1
        return float(self.points)

    def has_passed(self, point):
        return self.has_come

    def seconds(self, begin, end):
        self.waits += not self.has_come
        return end - begin


def test_only_the_first_times_are_waited_for_and_no_pass_is_measured_behind_that_wait():
    """A device that waits for its host computes at the speed of the host. A measurement of that would mislead the
    choice."""
    model, stash = Model(), stash_of(**EVERYTHING)
    stash._clock = clock = LateClock()
    train(model, model, 1, each_pass=lambda: stash)
    first, points = stash.choice(), clock.points
    assert first is not None and clock.waits > 0 and points > 0
    train(model, model, 1, each_pass=lambda: stash)
    assert clock.points == points  # the pass is not measured
    waits = clock.waits
    train(model, model, 3, each_pass=lambda: stash)
    assert clock.points > points and clock.waits == waits
    assert stash.choice() is first
    clock.has_come = True
    assert stash.choice() is not first
    points = clock.points
    train(model, model, 2, each_pass=lambda: stash)
    assert clock.points == points  # two measurements are enough


def test_what_somebody_holds_is_not_put_aside_again(both):
    """Putting it aside would free no memory."""
    model, stash = Model(), stash_of(**EVERYTHING)
    held = []
    for _ in range(3):
        x = torch.randn(2, 12, 16)
        with stash:
            for layer in model.blocks[:4]:
                held.append(x)
                x = layer(x)
        x.sum().backward()
    inputs = sum(each.nbytes for each in held[:4])
    assert stash.choice().eligible_bytes - stash.choice().chosen_bytes >= inputs


def test_autocast(both):
    model = Model()
    other = copy.deepcopy(model)
    stash = stash_of(**EVERYTHING)

    @contextlib.contextmanager
    def both_of_them():
        with torch.autocast("cpu", torch.bfloat16), stash:
            yield

    expected = train(other, other, each_pass=lambda: torch.autocast("cpu", torch.bfloat16))
    assert train(model, model, each_pass=both_of_them) == expected and is_empty(stash)


def test_other_modes_of_torch_do_not_matter(both):
    model = Model()
    other = copy.deepcopy(model)
    stash = stash_of(**EVERYTHING)
    before = torch.get_default_dtype()

    def forward(tokens):
        torch.set_default_dtype(torch.float64)
        try:
            with torch.device("meta"), FlopCounterMode(display=False):
                return model(tokens)
        finally:
            torch.set_default_dtype(before)

    assert train(model, forward, each_pass=lambda: stash) == train(other, other) and is_empty(stash)


def test_beside_an_optimizer_that_steps_beside_the_forward_pass(both):
    model = Model()
    other = copy.deepcopy(model)

    def run(module, each_pass):
        optimizer = hybridopt.AdamW(module.named_parameters(), lr=1e-3, overlap=module)
        losses = []
        for seed in range(4):
            torch.manual_seed(seed)
            with each_pass():
                loss = module(torch.randint(40, (2, 12)))
            loss.backward()
            losses.append(loss.detach())
            optimizer.step()
            optimizer.zero_grad()
        optimizer.synchronize()
        return bits([*losses, *module.parameters()])

    stash = stash_of(**EVERYTHING)
    assert run(model, lambda: stash) == run(other, contextlib.nullcontext)
    assert is_empty(stash)
