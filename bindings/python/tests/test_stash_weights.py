"""Weights that are put aside layer by layer: losses, gradients and params have the bits of training without a stash.
On the library's host device, and on a stash that copies as late as it may (lazy_stash.py)."""

import contextlib
import copy
import gc
import io
import itertools
import threading
import weakref

import pytest
import torch
from lazy_stash import LazyStash
from models import Attention, Block, are_hooks_on_saved_tensors_in_force, bits, cut_off, drawn_seeds, watch_params
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import hybridopt
from hybridopt import abi
from hybridopt.stash import activation_stash
from hybridopt.stash.weights import Weight

AWAY = "while it is on the host, where wrap.weights=True. has put it"


@pytest.fixture(params=["library", "lazy"], autouse=True)
def both(request, monkeypatch):
    if request.param == "lazy":
        monkeypatch.setattr(activation_stash, "Stash", LazyStash)


def stash_of(**options):
    return hybridopt.ActivationStash(**{"budget": 8 << 20, "min_bytes": 1, "slab_bytes": 4096, **options})


class Model(nn.Module):
    """Layers of several sizes between an embedding and a head that stay."""

    checkpoints = None

    def __init__(self, width=16):
        super().__init__()
        self.embedding = nn.Embedding(40, width)
        self.blocks = nn.ModuleList()
        for hidden in (64, 24, 128):
            self.blocks += [Attention(width, 2), Block(width, hidden)]
        self.head = nn.Linear(width, 40, bias=False)

    def layers(self, x):
        for block in self.blocks:
            x = block(x)
        return x

    def forward(self, tokens):
        x = functional.dropout(self.embedding(tokens), 0.1)
        if self.checkpoints is None:
            x = self.layers(x)
        else:
            x = checkpoint(self.layers, x, use_reentrant=self.checkpoints)
        return functional.cross_entropy(self.head(x).flatten(0, 1).float(), tokens.flatten())


def tokens_of(seed):
    return torch.randint(40, (2, 12), generator=torch.Generator().manual_seed(seed))


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def adamw(model):
    return hybridopt.AdamW(model.named_parameters(), lr=1e-2, max_grad_norm=1.0)


def passes(module, width):
    """The bits of the losses of three passes, and of the gradients at the end."""
    results = []
    for seed in range(3):
        torch.manual_seed(seed)
        loss = module(torch.randn(4, width)).square().sum()
        loss.backward()
        results.append(loss.detach())
    return bits([*results, *(p.grad for p in module.parameters())])


def train(model, wrapping=None, make_optimizer=sgd, steps=4, micro_batches=2, called=None):
    """The bits of all losses and gradients, and of the params at the end."""
    optimizer = make_optimizer(model)
    results = []
    for step in range(steps):
        for micro_batch in range(micro_batches):
            torch.manual_seed(10 * step + micro_batch)
            loss = (called or model)(tokens_of(10 * step + micro_batch))
            loss.backward()
            results.append(loss.detach())
        results += [p.grad.clone() for p in model.parameters() if p.grad is not None]
        optimizer.step()
        optimizer.zero_grad()
    if isinstance(optimizer, hybridopt.AdamW):
        optimizer.synchronize()
    if wrapping is not None:
        wrapping.bring_back()
    return bits([*results, *model.parameters()])


def pair(dtype=torch.float32):
    model = Model().to(dtype)
    return model, copy.deepcopy(model)


def weight_bytes(modules):
    return sum(p.nbytes for module in modules for p in module.parameters())


# -------------------------------------------------------------------------------------- bits --


@pytest.mark.parametrize("activations", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_losses_gradients_and_params_keep_their_bits(activations, dtype):
    model, other = pair(dtype)
    stash = stash_of(fraction=1.0, keep_last=0)
    wrapping = stash.wrap(model.blocks, weights=True, activations=activations)
    assert train(model, wrapping) == train(other)
    stats = stash.stats()
    assert stats.pushed_bytes >= 4 * weight_bytes(model.blocks)  # once a step
    assert (stats.saved > 0) == activations
    assert stats.weights_host_bytes == stats.weights_away_bytes == stats.host_bytes == 0


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"overlap": True},
        {"master_layout": "split", "state_dtype": torch.bfloat16},
        {"watched": True},
        {"hooks": {}},
        {"hooks": {"micro_batches": 2}, "master_layout": "split", "overlap": True},
        {"hooks": {"accumulate": True}},
    ],
    ids=str,
)
def test_beside_the_librarys_optimizers(options, monkeypatch):
    monkeypatch.setenv("HYBRIDOPT_CHECK_OVERLAP", "1")
    watch_params(monkeypatch, options.get("watched", False))
    model, other = pair(torch.bfloat16)
    stash = stash_of(fraction=1.0, keep_last=0)
    wrapping = stash.wrap(model.blocks, weights=True)

    hooks = options.get("hooks")
    micro_batches = 1 if hooks == {} else 2

    def make(module):
        own = {key: value for key, value in options.items() if key not in ("hooks", "watched")}
        if "overlap" in own:
            own["overlap"] = module
        optimizer = hybridopt.AdamW(module.named_parameters(), lr=1e-2, max_grad_norm=1.0, **own)
        if hooks is not None:
            optimizer.hook_gradients(**hooks)
        return optimizer

    found = train(model, wrapping, make, micro_batches=micro_batches)
    assert found == train(other, None, make, micro_batches=micro_batches)
    assert stash.stats().pushed_bytes > 4 * weight_bytes(model.blocks)


def test_gradients_that_leave_where_all_layers_are_on_the_device():
    """The params have moved, and none is on the host when gradients leave."""
    model = nn.Sequential(*(Block(16, 32) for _ in range(3)))
    other = copy.deepcopy(model)
    stash_of().wrap(list(model), weights=True)

    def run(module):
        optimizer = hybridopt.AdamW(module.named_parameters(), lr=1e-2, max_grad_norm=None)
        optimizer.hook_gradients()
        for seed in range(4):
            torch.manual_seed(seed)
            module(torch.randn(4, 16)).square().sum().backward()
            with torch.no_grad():
                module(torch.randn(4, 16))
            optimizer.step()
        return bits(module.state_dict().values())

    assert run(model) == run(other)


def test_three_layers_are_on_the_device_at_most():
    """This holds after the first pass, when the order of layers is known. A step needs all layers."""
    model, _ = pair()
    stash = stash_of()
    stash.wrap(model.blocks, weights=True, activations=False)
    sizes = [weight_bytes([block]) for block in model.blocks]
    total, most = sum(sizes), max(sum(three) for three in itertools.combinations(sizes, 3))
    seen = []
    for block in model.blocks:
        block.register_forward_hook(lambda *_: seen.append(total - stash.stats().weights_away_bytes))
        block.norm.weight.register_hook(lambda _: seen.append(total - stash.stats().weights_away_bytes))
    for seed in range(3):
        model(tokens_of(seed)).backward()
        here = seen[6:] if seed == 0 else seen
        assert len(here) >= 6 and max(here) <= most
        seen.clear()
    pushed = stash.stats().pushed_bytes
    assert pushed == total  # nothing is copied again, since nothing has changed
    with torch.no_grad():
        for seed in range(2):
            model(tokens_of(seed))
            assert total - stash.stats().weights_away_bytes <= most
    assert stash.stats().pushed_bytes == pushed


def test_what_a_step_has_changed_goes_down_once_and_frozen_weights_never_again():
    """The next forward pass uses what the step has brought to the device, so nothing else is copied to it."""
    model, other = pair()
    for module in (model, other):
        for block in (module.blocks[0], module.blocks[3]):
            block.requires_grad_(False)
        module.blocks[4].qkv.weight.requires_grad_(False)  # as in training with adapters
    stash = stash_of()
    wrapping = stash.wrap(model.blocks, weights=True, activations=False)
    frozen = sum(p.nbytes for p in model.blocks.parameters() if not p.requires_grad)
    trained = weight_bytes(model.blocks) - frozen
    assert train(model, wrapping, adamw) == train(other, None, adamw)
    assert stash.stats().pushed_bytes == frozen + 4 * trained
    assert not any(p.grad is not None for p in model.parameters() if not p.requires_grad)


def test_weights_come_from_the_step_itself():
    model, _ = pair()
    stash = stash_of()
    stash.wrap(model.blocks, weights=True, activations=False)
    optimizer = adamw(model)
    for seed in range(3):
        model(tokens_of(seed)).backward()
        optimizer.step()
        assert stash.stats().weights_away_bytes == stash.stats().weights_host_bytes == 0
        before = stash.stats().returned_bytes
        with torch.no_grad():
            model.blocks[0](torch.randn(1, 3, 16))
        assert stash.stats().returned_bytes == before
        optimizer.zero_grad()


# ------------------------------------------------------------------------------ ways of training --


@pytest.mark.parametrize("reentrant", [False, True])
def test_recomputation(reentrant):
    """Megatron does not allow recomputation together with offloaded weights."""
    model, other = pair()
    model.checkpoints = other.checkpoints = reentrant
    stash = stash_of(fraction=1.0, keep_last=0)
    wrapping = stash.wrap(model.blocks, weights=True)
    for module in (model, other):
        module.embedding.weight.requires_grad_(True)
    assert train(model, wrapping) == train(other)
    assert stash.stats().pushed_bytes >= 4 * weight_bytes(model.blocks)


def test_a_checkpoint_inside_of_a_layer():
    class Inside(nn.Module):
        def __init__(self, block):
            super().__init__()
            self.block = block

        def forward(self, x):
            return self.block(x) + checkpoint(self.block, x, use_reentrant=False)

    model, other = pair()
    for module in (model, other):
        module.blocks = nn.ModuleList(map(Inside, module.blocks))
    wrapping = stash_of().wrap(model.blocks, weights=True)
    assert train(model, wrapping) == train(other)


def test_several_passes_before_their_backward_passes():
    """1F1B, which Megatron does not allow together with offloaded weights."""
    model, other = pair()
    stash = stash_of(fraction=1.0, keep_last=0)
    wrapping = stash.wrap(model.blocks, weights=True)

    def scheduled(module):
        losses, shown = [], []
        for step in "FFFBFBBFBFFBBFFBB":
            if step == "F":
                torch.manual_seed(len(shown))
                losses.append(module(tokens_of(len(shown))))
                shown.append(losses[-1].detach())
            else:
                losses.pop(0).backward()
        return bits([*shown, *(p.grad for p in module.parameters())])

    assert scheduled(model) == scheduled(other)
    assert stash.stats().weights_away_bytes > 0
    wrapping.remove()
    assert stash.stats().host_bytes == 0


def test_branches_whose_backward_passes_are_between_each_other():
    class Branches(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(Block(16, 8 * n) for n in range(1, 7))

        def forward(self, x):
            first = [layer(x) for layer in self.layers]
            return sum(layer(y * z) for layer, y, z in zip(reversed(self.layers), first, first[1:])).square().mean()

    model = Branches()
    other = copy.deepcopy(model)
    stash_of().wrap(model.layers, weights=True)
    x = torch.randn(4, 16, requires_grad=True)

    def run(module):
        found = torch.autograd.grad(module(x), [x, *module.parameters()], create_graph=True)
        again = torch.autograd.grad(sum(g.square().sum() for g in found), [x], retain_graph=True)
        return bits([*found, *again])

    for _ in range(2):
        assert run(model) == run(other)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
@pytest.mark.parametrize("how", ["layer.compile()", "compile(layer)"])
def test_compiled_layers(how):
    torch._dynamo.reset()
    model = nn.Sequential(Block(16, 64), Block(16, 24), Block(16, 40), Block(16, 32))
    other = copy.deepcopy(model)
    for layers in (model, other):
        for index in range(4):
            if how == "layer.compile()":
                layers[index].compile(backend="aot_eager")
            else:
                layers[index] = torch.compile(layers[index], backend="aot_eager")
    stash = stash_of()
    stash.wrap(list(model), weights=True)

    assert passes(model, 16) == passes(other, 16)
    assert stash.stats().weights_away_bytes > 0


class OfDetached(torch.autograd.Function):
    """Some kernels save a weight's data like this. Autograd does not know that it is a view of the param."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight.detach().t())
        return x @ weight.t()

    @staticmethod
    def backward(ctx, grad):
        x, transposed = ctx.saved_tensors
        return grad @ transposed.t(), grad.t() @ x


class Detached(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(width, width) / width)

    def forward(self, x):
        return OfDetached.apply(x, self.weight)


@pytest.mark.parametrize("replaced", [False, True])
def test_weights_that_are_saved_without_their_params_are_no_activations(replaced):
    model = nn.Sequential(*[Detached(64) for _ in range(4)])
    other = copy.deepcopy(model)
    stash = stash_of(fraction=1.0, keep_last=0)
    wrapping = stash.wrap(list(model), weights=True)

    assert passes(model, 64) == passes(other, 64)
    if replaced:  # memory that no pass has seen
        wrapping.bring_back()
        for module in (model, other):
            for param in module.parameters():
                param.data = 1.5 * param.data
        assert passes(model, 64) == passes(other, 64)
    assert stash.stats().weights_away_bytes > 0


def test_without_room_weights_stay():
    model, other = pair()
    stash = stash_of(budget=3 * 4096)
    wrapping = stash.wrap(model.blocks, weights=True, activations=False)
    assert train(model, wrapping) == train(other)
    assert stash.stats().refused_bytes > 0
    model(tokens_of(0))
    assert 0 < stash.stats().weights_away_bytes <= 3 * 4096


def test_an_exception_leaves_all_in_order():
    model, other = pair()
    stash = stash_of(fraction=1.0, keep_last=0)
    wrapping = stash.wrap(model.blocks, weights=True)
    for module in (model, other):
        hook = module.blocks[3].down.register_forward_pre_hook(lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            module(tokens_of(0))
        hook.remove()
    assert stash.stats().weights_away_bytes > 0
    assert train(model, wrapping) == train(other)


@pytest.mark.parametrize("share", [0.0, 1.0])
@pytest.mark.parametrize("layout", ["fp32", "split"])
def test_hooks_take_over_state_while_weights_are_away(layout, share, tmp_path):
    """State that is loaded between the passes is adopted by the first hook of the backward pass."""
    results = []
    for wrapped in (False, True):
        torch.manual_seed(0)
        model = Model().bfloat16()
        options = {"disk_fraction": share, "disk_paths": tmp_path} if share else {}
        optimizer = hybridopt.AdamW(model.named_parameters(), lr=1e-2, master_layout=layout, **options)
        optimizer.hook_gradients()
        wrapping = stash_of().wrap(model.blocks, weights=True) if wrapped else None
        for step in range(3):
            torch.manual_seed(step)
            loss = model(tokens_of(step))
            optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        if wrapping is not None:
            wrapping.bring_back()
        results.append(bits(model.parameters()))
    assert results[0] == results[1]


def test_param_whose_memory_numpy_shares_is_named():
    model, other = pair()
    wrapping = stash_of().wrap(model.blocks, weights=True)
    weight = model.blocks[0].qkv.weight
    array = weight.detach().numpy()
    text = r"'layer 0.qkv.weight' .* numpy\(\) .* param.data = param.data.clone\(\), or call remove\(\)"
    for _ in range(2):
        with pytest.raises(abi.InvalidStateError, match=text):
            model(tokens_of(0))
    weight.data = weight.data.clone()
    assert train(model, wrapping) == train(other)
    assert not (array == weight.detach().numpy()).all()
    wrapping.remove()
    assert train(model) == train(other)  # numpy() again has no effect


def test_evaluation_between_forward_and_backward():
    model, other = pair()
    stash_of().wrap(model.blocks, weights=True)

    def run(module):
        loss = module(tokens_of(0))
        for mode in (torch.no_grad, torch.inference_mode):
            with mode():
                results = [module.eval()(tokens_of(1)).clone()]
        loss.backward()
        return bits([loss, *results, *(p.grad for p in module.parameters())])

    torch.manual_seed(0)
    expected = run(other)
    torch.manual_seed(0)
    assert run(model) == expected


# ------------------------------------------------------------------------ other uses of params --


def away_param(model):
    model(tokens_of(0))
    return model.blocks[1].up.weight


def test_state_dict_while_weights_are_away():
    model, other = pair()
    stash = stash_of()
    stash.wrap(model.blocks, weights=True)
    away_param(model)
    assert stash.stats().weights_away_bytes > 0
    found, expected = model.state_dict(), other.state_dict()
    assert list(found) == list(expected) and bits(found.values()) == bits(expected.values())
    away_param(model)
    changed = {name: tensor + 1 for name, tensor in expected.items()}
    model.load_state_dict(changed)
    other.load_state_dict(changed)
    assert train(model, None) is not None
    model.load_state_dict(changed)
    torch.manual_seed(3)
    one = model(tokens_of(3))
    torch.manual_seed(3)
    assert bits([one]) == bits([other(tokens_of(3))])


@pytest.mark.parametrize(
    "use",
    [
        lambda model, param: param.clone(),
        lambda model, param: param.data,
        lambda model, param: param.norm(),
        lambda model, param: copy.deepcopy(model),
        lambda model, param: model.to(torch.float64),
        lambda model, param: torch.save(model, io.BytesIO()),
        lambda model, param: param.copy_(torch.ones(64, 16)),
        lambda model, param: functional.linear(torch.ones(2, 16), param),
    ],
)
def test_a_use_elsewhere_is_refused_until_weights_are_brought_back(use):
    model, _ = pair()
    wrapping = stash_of(model=model).wrap(model.blocks, weights=True)
    param = away_param(model)
    with pytest.raises(abi.InvalidStateError, match=r"parameter 'blocks.\d.*' is used by .* " + AWAY):
        use(model, param)
    wrapping.bring_back()
    with torch.no_grad():
        use(model, param)


def test_what_was_written_after_bring_back_counts():
    model, other = pair()
    wrapping = stash_of().wrap(model.blocks, weights=True, activations=False)
    for module in (model, other):
        away_param(module)
        if module is model:
            wrapping.bring_back()
        for block in module.blocks:
            for param in block.parameters():
                param.data.mul_(1.5)  # this does not change the tensor's version
        torch.manual_seed(0)
        module(tokens_of(1)).backward()
    wrapping.bring_back()
    assert bits(p.grad for p in model.parameters()) == bits(p.grad for p in other.parameters())
    assert bits(model.parameters()) == bits(other.parameters())


def test_a_write_in_place_between_two_uses_counts():
    """The weights have a copy on the host and are on the device at this time."""
    model, other = pair()
    stash_of().wrap(model.blocks, weights=True, activations=False)
    for module in (model, other):
        with torch.no_grad():
            module(tokens_of(0))
            module.blocks[5].up.weight.mul_(2)
            module.blocks[5].down.weight = nn.Parameter(module.blocks[5].down.weight * 3)
            for seed in range(2):
                module(tokens_of(seed))
        torch.manual_seed(0)
        module(tokens_of(1)).backward()
    assert bits(p.grad for p in model.parameters()) == bits(p.grad for p in other.parameters())


def test_remove_close_and_the_end_of_a_model():
    model, other = pair()
    stash = stash_of()
    wrapping = stash.wrap(model.blocks, weights=True)
    away_param(model)
    wrapping.remove()
    assert bits(model.parameters()) == bits(other.parameters()) and stash.stats().host_bytes == 0
    stash.wrap(model.blocks, weights=True)
    away_param(model)
    stash.close()
    assert bits(model.parameters()) == bits(other.parameters())
    assert train(model) == train(other)

    model = Model()
    stash = stash_of()
    stash.wrap(model.blocks, weights=True)
    away_param(model)
    gone = weakref.ref(model.blocks[0])
    assert stash.stats().weights_away_bytes > 0
    del model
    gc.collect()
    assert gone() is None and stash.stats().host_bytes == 0


def test_a_stash_lives_as_long_as_the_weights_that_it_has():
    model, other = pair()
    stash_of().wrap(model.blocks, weights=True)
    gc.collect()
    away_param(model)
    assert train(model, None) is not None
    found = model.state_dict()
    train(other)
    assert bits(found.values()) == bits(other.state_dict().values())


# ------------------------------------------------------------------------------- what is refused --


def test_tied_params_are_refused():
    model = Model()
    model.blocks[2].out.weight = model.blocks[0].out.weight
    stash = stash_of(model=model)
    with pytest.raises(ValueError, match=r"tied parameters: 'blocks.0.out.weight' and 'blocks.2.out.weight' share"):
        stash.wrap(model.blocks, weights=True)
    model = Model()
    model.embedding.weight = model.head.weight
    stash = stash_of(model=model)
    with pytest.raises(ValueError, match=r"tied parameters: 'head.weight' and 'embedding.weight' share"):
        stash.wrap([model.head], weights=True)
    stash.wrap(model.blocks, weights=True).remove()
    stash.wrap(model, weights=True)  # the whole model is one layer
    model(tokens_of(0)).backward()


def test_params_that_cannot_leave_are_refused():
    model, stash = Model(), stash_of()
    flat = torch.zeros(2 * 16)
    model.blocks[1].norm.weight = nn.Parameter(flat[:16])
    with pytest.raises(ValueError, match=r"'layer 0.norm.weight', which shares its memory with something outside"):
        stash.wrap([model.blocks[1]], weights=True)
    model.blocks[1].norm.weight = nn.Parameter(torch.from_numpy(flat[:16].clone().numpy()))
    with pytest.raises(ValueError, match=r"'layer 0.norm.weight', whose memory torch cannot free"):
        stash.wrap([model.blocks[1]], weights=True)
    with pytest.raises(ValueError, match=r"'layer 0.weight' on meta, expected cpu, where the stash is"):
        stash.wrap([nn.Linear(3, 3, device="meta")], weights=True)
    with pytest.raises(ValueError, match=r"weights=False and activations=False, expected one of them to be True"):
        stash.wrap([model.blocks[0]], activations=False)
    assert stash.stats().pushed_bytes == 0
    stash.wrap([model.blocks[0]], weights=True)


# ---------------------------------------------------------------------------- that waits are needed --


@pytest.mark.parametrize("what", ["release", "pop", "forget_copy"])
def test_each_wait_is_needed(what, monkeypatch, request):
    """Each case leaves out one thing: the wait for the copy to the host, the wait for the copy back, or the
    discarding of the copy from before the step."""
    if request.node.callspec.params["both"] != "lazy":
        return  # the host device copies at once
    model, other = pair()
    expected = train(other)
    stash = stash_of()
    wrapping = stash.wrap(model.blocks, weights=True, activations=False)
    if what == "release":

        def leave(self):
            self.push()
            if self.ticket and not self.is_away and not self.is_coming:
                torch.empty(0, dtype=torch.uint8).set_(self.storage).fill_(0xFF)  # as the next user of the memory does
                stash._handle.release(self.ticket)
                self._is_leaving = False
                self.storage.resize_(0)

        monkeypatch.setattr(Weight, "leave", leave)
    elif what == "pop":

        def pop(self, ticket, stream=0, flags=0):
            self.tickets[ticket][3] = None

        monkeypatch.setattr(LazyStash, "pop", pop)
    else:
        monkeypatch.setattr(Weight, "forget_copy", Weight.come)
        monkeypatch.setattr(Weight, "_version", lambda _: 0)
    try:
        found = train(model, wrapping)
    except (RuntimeError, AssertionError):
        return
    assert found != expected


# ----------------------------------------------------------------------------- params that change --


def freeze(model, optimizer):
    for index in (1, 2, 4):
        model.blocks[index].requires_grad_(False)


def unfreeze(model, optimizer):
    model.blocks.requires_grad_(True)


def toggle(model, optimizer):
    for param in model.blocks[2].parameters():
        param.requires_grad_(not param.requires_grad)


def replace(model, optimizer):
    """Replaces a layer's param, in the optimizer too."""
    old = model.blocks[3].up.weight
    new = model.blocks[3].up.weight = nn.Parameter(old.detach() * 1.5)
    for group in optimizer.param_groups:
        group["params"] = [new if param is old else param for param in group["params"]]


def add(model, optimizer):
    """Adds a param to a layer, in a group of its own."""
    block = model.blocks[1]
    if hasattr(block, "gain"):
        return
    block.gain = nn.Parameter(torch.full((16,), 0.5, dtype=block.up.weight.dtype))
    forward = block.forward
    block.forward = lambda x: forward(x) * block.gain
    optimizer.add_param_group({"params": [("gain", block.gain)]})


def take_out(model, optimizer):
    """Removes a param from the optimizer; the param still has gradients, and keeps its value."""
    gone = model.blocks[5].down.weight
    for group in optimizer.param_groups:
        kept = [index for index, param in enumerate(group["params"]) if param is not gone]
        for key in ("params", "param_names"):
            group[key] = [group[key][index] for index in kept]


def give_other_memory(model, optimizer):
    model.blocks[0].out.weight.data = model.blocks[0].out.weight.data * 0.5


CHANGES = [freeze, unfreeze, toggle, replace, add, take_out, give_other_memory]


@pytest.mark.parametrize(
    "when, options",
    [
        ("before the forward pass", ()),
        ("before the forward pass", ("overlap", "hooks")),
        ("before the step", ("overlap",)),  # hook_gradients refuses a change at that time
    ],
)
@pytest.mark.parametrize(
    "changes",
    [*([each] for each in CHANGES), [freeze, unfreeze], [toggle, freeze, toggle], CHANGES],
    ids=lambda changes: " ".join(each.__name__ for each in changes),
)
def test_params_that_change_between_steps(changes, options, when):
    """A layer's params are frozen and trained again, replaced, added and left out."""
    model, other = pair(torch.bfloat16)
    for module in (model, other):
        module.blocks[0].norm.weight.requires_grad_(False)  # frozen from the start
    stash = stash_of(fraction=1.0, keep_last=0)
    wrapping = stash.wrap(model.blocks, weights=True)

    def run(module, back):
        optimizer = hybridopt.AdamW(module.named_parameters(), lr=1e-2, max_grad_norm=1.0)
        if "overlap" in options:
            optimizer.overlap(module)
        if "hooks" in options:
            optimizer.hook_gradients()
        results = []
        for step in range(3 * (len(changes) + 1)):
            change = changes[step // 3 - 1] if step % 3 == 0 and step > 0 else None
            if change is not None and when == "before the forward pass":
                back()
                change(module, optimizer)
            torch.manual_seed(step)
            loss = module(tokens_of(step))
            loss.backward()
            results.append(loss.detach())
            if change is not None and when == "before the step":
                back()
                change(module, optimizer)
            optimizer.step()
            optimizer.zero_grad()
        optimizer.synchronize()
        back()
        return bits([*results, *module.parameters()])

    assert run(model, wrapping.bring_back) == run(other, lambda: None)
    assert stash.stats().pushed_bytes > 0


@pytest.mark.parametrize("make", [sgd, adamw])
def test_a_param_that_is_frozen_after_its_gradient_is_stepped_with_it(make):
    """torch's optimizers do the same."""
    model, other = pair()
    wrapping = stash_of().wrap(model.blocks, weights=True)

    def run(module):
        optimizer = make(module)
        for seed in range(3):
            torch.manual_seed(seed)
            module(tokens_of(seed)).backward()
            module.blocks[2].requires_grad_(False)
            optimizer.step()
            optimizer.zero_grad()
            module.blocks[2].requires_grad_(seed == 0)

    run(model), run(other)
    wrapping.bring_back()
    assert bits(model.parameters()) == bits(other.parameters())


def test_another_optimizers_step_refuses_a_wrong_param_in_its_own_words():
    model, _ = pair()
    stash = stash_of()
    stash.wrap(model.blocks, weights=True, activations=False)
    other = hybridopt.AdamW([nn.Parameter(torch.ones(2))])
    other.param_groups[0]["params"].append(("name", nn.Parameter(torch.ones(2))))
    with pytest.raises(TypeError, match="expected a parameter; its name belongs into the group's 'param_names'"):
        other.step()


def test_a_param_that_was_trained_and_is_frozen_comes_up_for_a_step_and_does_not_go_down_again():
    model, _ = pair()
    stash = stash_of()
    stash.wrap(model.blocks, weights=True, activations=False)
    optimizer = adamw(model)

    def step():
        before = stash.stats().pushed_bytes
        model(tokens_of(0)).backward()
        optimizer.step()
        optimizer.zero_grad()
        return stash.stats().pushed_bytes - before

    assert step() == weight_bytes(model.blocks)
    model.blocks[2].requires_grad_(False)
    step()
    assert step() == weight_bytes(model.blocks) - weight_bytes([model.blocks[2]])


@pytest.mark.parametrize("call", ["save_checkpoint", "load_checkpoint", "materialize", "plan", "hook_gradients", "master_of"])
def test_calls_of_an_optimizer_bring_weights_back_that_they_read(call, tmp_path):
    """Weights are on the host after an evaluation, for example, because its layers have left."""
    model, other = pair(torch.bfloat16)
    wrapping = stash_of().wrap(model.blocks, weights=True)
    first = adamw(other)
    first.save_checkpoint(tmp_path / "first", progress=False)

    def run(module):
        optimizer = adamw(module)
        found = None
        for seed in range(2):
            if seed == 0 and call == "save_checkpoint":
                optimizer.materialize()
            with torch.no_grad():
                module(tokens_of(seed))
            if call == "save_checkpoint":
                optimizer.save_checkpoint(tmp_path / f"{id(module)} {seed}", progress=False)
            elif call == "load_checkpoint":
                optimizer.load_checkpoint(tmp_path / "first", progress=False)
            elif call == "master_of":
                found = bits([optimizer.master_of(module.blocks[0].norm.weight)])
            elif seed == 0:
                getattr(optimizer, call)()
            torch.manual_seed(seed)
            module(tokens_of(seed)).backward()
            optimizer.step()
            optimizer.zero_grad()
        return found

    assert run(model) == run(other)
    wrapping.bring_back()
    assert bits(model.parameters()) == bits(other.parameters())


# ------------------------------------------------------------------------------------- beside a phase --


@pytest.mark.parametrize("steps", [True, False], ids=["after a step", "before the step"])
def test_a_forward_pass_over_offloaded_weights_names_reload(steps):
    """The optimizer has put them on the host, and the stash has not: before a step it still has its own copies, too."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(10, 10) for _ in range(5)))
    other = copy.deepcopy(model)
    optimizer = hybridopt.AdamW(model.named_parameters(), movable=("params", "grads", "states"))
    plain = hybridopt.AdamW(other.named_parameters())
    stash = hybridopt.ActivationStash(1 << 20, model=model, min_bytes=1, pin=False)
    wrapping = stash.wrap(list(model[:4]), weights=True)
    x = torch.ones(2, 10)
    for trained, each in ((model, optimizer), (other, plain)):
        for _ in range(2):
            trained(x).sum().backward()
            if steps:
                each.step()
    told = (
        r"^parameter '0.weight' is used by the forward pass of a layer that stash.wrap\(\) has wrapped while its content is "
        r"on the host, where optimizer.offload\(params=True\) has put it; call optimizer.reload\(params=True\) before"
    )
    with optimizer.offloaded(grads=False):
        for _ in range(2):
            with pytest.raises(abi.InvalidStateError, match=told):
                model(x)
        wrapping.bring_back()
        with pytest.raises(abi.InvalidStateError, match="'0.weight' is used by 'sum' while its content is on the host"):
            model[0].weight.sum()
        with pytest.raises(abi.InvalidStateError, match=r"'0.weight' has its content on the host, .*reload\(params=True\) before"):
            optimizer.step()
        assert all(param.untyped_storage().nbytes() == 0 for param in model.parameters())
    for trained, each in ((model, optimizer), (other, plain)):
        each.step()
        trained(x).sum().backward()
        each.step()
    wrapping.remove()
    assert all(map(torch.equal, model.parameters(), other.parameters()))


def test_a_save_that_runs_has_read_weights_before_they_leave(tmp_path):
    """The save is held up until the layers want to leave. fp32 params are saved from where they are."""
    model = nn.Sequential(*(nn.Linear(32, 32) for _ in range(8)))
    optimizer = hybridopt.AdamW(model.named_parameters(), lr=1e-2)
    layers = stash_of().wrap(list(model), weights=True)

    def step():
        model(torch.ones(4, 32)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    layers.bring_back()
    expected = bits(model.parameters())
    may_end = threading.Event()
    save = optimizer.save_checkpoint(tmp_path / "save", wait=False, progress=lambda done, total: may_end.wait(60))
    threading.Timer(0.2, may_end.set).start()
    model(torch.ones(4, 32))
    assert save.done()
    with pytest.raises(abi.InvalidStateError, match=AWAY):  # some have left
        bits(model.parameters())
    save.wait()
    layers.bring_back()
    other = nn.Sequential(*(nn.Linear(32, 32) for _ in range(8)))
    hybridopt.AdamW(other.named_parameters(), lr=1e-2).load_checkpoint(tmp_path / "save")
    assert bits(other.parameters()) == expected


CUT_OFF = {
    "weights": {"weights": True, "activations": False},
    "activations": {},
    "both": {"weights": True},
    "with": None,
}


@pytest.mark.parametrize("wraps", CUT_OFF)
def test_a_pass_that_is_cut_off_anywhere_can_be_begun_again(wraps):
    """The next pass has the bits of a run without a stash, no hook stays, and no host memory is lost."""
    torch.manual_seed(0)
    first = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(4)))
    x = torch.linspace(-1, 1, 16).reshape(2, 8)
    expected = gradients_of(copy.deepcopy(first), x)
    stride = 97
    for line in range(1 + drawn_seeds(1)[0] % stride, 1 << 20, stride):
        model, stash = copy.deepcopy(first), stash_of(fraction=1.0, keep_last=0)
        wrapping = None if wraps == "with" else stash.wrap(list(model), **CUT_OFF[wraps])
        begin = (lambda: stash) if wraps == "with" else contextlib.nullcontext
        assert gradients_of(model, x, begin) == expected

        then = (lambda: None) if wrapping is None else wrapping.bring_back
        if not cut_off(lambda: (gradients_of(model, x, begin), then()), line):
            assert line > 300
            return
        for _ in range(2):
            assert gradients_of(model, x, begin) == expected, line
        saved = stash.stats().saved
        torch.ones(2, requires_grad=True).square()
        assert not are_hooks_on_saved_tensors_in_force(), line
        if wrapping is not None:
            wrapping.remove()
        if stash.stats().host_bytes > 0:  # in reference cycles
            gc.collect()
        stats = stash.stats()
        assert (stats.host_bytes, stats.saved) == (0, saved), line
        assert gradients_of(model, x) == expected, line


def gradients_of(model, x, begin=contextlib.nullcontext):
    model.zero_grad()
    with begin():
        loss = model(x).square().sum()
    loss.backward()
    return bits([loss, *(param.grad for param in model.parameters())])
