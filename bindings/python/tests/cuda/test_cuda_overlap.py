"""Steps that overlap with the forward pass, with params on a GPU. Losses and bits are those of steps that wait. The
tests use check mode, where it is an error to use a param for which its module has not waited."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import hybridopt
from models import Block, bits

every_fraction = pytest.mark.parametrize("fraction", [1.0, 0.4, 0.0])


@pytest.fixture(autouse=True)
def check_mode(monkeypatch):
    monkeypatch.setenv("HYBRIDOPT_CHECK_OVERLAP", "1")
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


class Model(nn.Module):
    """A model so wide that a step takes longer than the host needs to queue a forward pass."""

    def __init__(self, width=512):
        super().__init__()
        self.embedding = nn.Embedding(300, width)
        self.blocks = nn.ModuleList(Block(width, 4 * width) for _ in range(6))
        self.head = nn.Linear(width, 300, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens):
        x = self.embedding(tokens)
        for index, block in enumerate(self.blocks):
            x = checkpoint(block, x, use_reentrant=False) if index % 2 and self.training else block(x)
        return self.head(x)


def models_of(dtype):
    torch.manual_seed(0)
    module = Model().to("cuda", dtype)
    return module, copy.deepcopy(module)


def train(module, optimizer, steps, micro_batches=2):
    losses = []
    for step in range(steps):
        for micro_batch in range(micro_batches):
            generator = torch.Generator("cuda").manual_seed(10 * step + micro_batch)
            tokens = torch.randint(300, (8, 32), generator=generator, device="cuda")
            loss = functional.cross_entropy(module(tokens).flatten(0, 1).float(), tokens.flatten())
            (loss * (torch.inf if step == 3 else 1.0)).backward()
            losses.append(loss.detach())
        optimizer.step()
        optimizer.zero_grad()
        # Memory that is freed and allocated again here must not be that of gradients which a step still reads.
        torch.full((1 << 22,), torch.nan, device="cuda")
    return torch.stack(losses)


def same(module, optimizer, other, plain):
    optimizer.synchronize()
    torch.cuda.synchronize()
    pairs = list(zip(module.parameters(), other.parameters()))
    assert all(bits([one.cpu()]) == bits([two.cpu()]) for one, two in pairs)
    for one, two in pairs:
        state, others = optimizer.state[one], plain.state[two]
        assert all(bits([state[key].cpu()]) == bits([others[key].cpu()]) for key in others)
    results, others = optimizer.step_results(), plain.step_results()
    norms = [repr(result.grad_norm) for result in results]  # that of the skipped step is NaN
    assert norms == [repr(result.grad_norm) for result in others]
    assert sum(result.skipped for result in results) == 1
    return True


@every_fraction
@pytest.mark.parametrize("hooked", [False, True])
@pytest.mark.parametrize(
    "dtype, options",
    [
        (torch.float32, {}),
        (torch.bfloat16, {}),
        (torch.bfloat16, {"master_layout": "split", "state_dtype": torch.bfloat16}),
    ],
)
def test_losses_and_bits_are_those_of_steps_that_wait(dtype, options, fraction, hooked):
    module, other = models_of(dtype)
    options = {"lr": 1e-2, "max_grad_norm": 0.1, "offload_fraction": fraction, **options}
    optimizer = hybridopt.AdamW(module.named_parameters(), overlap=module, **options)
    plain = hybridopt.AdamW(other.named_parameters(), **options)
    if hooked:
        optimizer.hook_gradients(micro_batches=2), plain.hook_gradients(micro_batches=2)
    losses = train(module, optimizer, 8)
    assert optimizer._engine.under_way
    assert bits([losses.cpu()]) == bits([train(other, plain, 8).cpu()])
    assert same(module, optimizer, other, plain)


@every_fraction
def test_who_reads_params_waits(fraction):
    module, other = models_of(torch.bfloat16)
    options = {"lr": 1e-2, "offload_fraction": fraction, "max_grad_norm": 0.1}
    optimizer = hybridopt.AdamW(module.named_parameters(), overlap=module, **options)
    plain = hybridopt.AdamW(other.named_parameters(), **options)
    train(module, optimizer, 4)
    with pytest.warns(UserWarning, match="'blocks.5.up.weight' is used by 'clone' while a step still writes it"):
        last = module.blocks[5].up.weight.clone()
    assert not optimizer._engine.under_way
    read = {name: value.cpu() for name, value in module.state_dict().items()}
    train(other, plain, 4)
    assert bits(read.values()) == bits(value.cpu() for value in other.state_dict().values())
    assert bits([last.cpu()]) == bits([other.blocks[5].up.weight.cpu()])
    train(module, optimizer, 1), train(other, plain, 1)
    with torch.cuda.stream(torch.cuda.Stream()), torch.no_grad():
        tokens = torch.zeros(1, 4, dtype=torch.long, device="cuda")
        torch.cuda.current_stream().synchronize()
        shown = module.eval()(tokens).cpu()
    assert bits([shown]) == bits([other.eval()(tokens).detach().cpu()])
    assert same(module, optimizer, other, plain)


@every_fraction
@pytest.mark.parametrize("trains_on, reads_on", [(None, None), (None, "side"), ("side", None), ("side", "other")])
def test_averages_of_weights_on_any_stream(monkeypatch, trains_on, reads_on, fraction):
    """Only the waits under test order the two streams."""
    monkeypatch.setenv("HYBRIDOPT_CHECK_OVERLAP", "0")
    streams = {None: torch.cuda.default_stream(), "side": torch.cuda.Stream(), "other": torch.cuda.Stream()}
    found = []
    for overlap in (True, False):
        module, _ = models_of(torch.bfloat16)
        options = {"lr": 1e-2, "offload_fraction": fraction, "overlap": module if overlap else None}
        optimizer = hybridopt.AdamW(module.named_parameters(), **options)
        average = [param.detach().clone() for param in module.parameters()]
        torch.cuda.synchronize()
        losses = []
        for step in range(4):
            with torch.cuda.stream(streams[trains_on]):
                losses.append(train(module, optimizer, 1, 1))
            with torch.cuda.stream(streams[reads_on]), torch.no_grad():
                torch._foreach_lerp_(average, list(module.parameters()), 0.3)
                streams[reads_on].synchronize()  # waits before params are written again
        torch.cuda.synchronize()
        optimizer.synchronize()
        found.append(bits(tensor.cpu() for tensor in (*losses, *average, *module.parameters())))
    assert found[0] == found[1]


def test_gradients_on_another_stream_are_not_used_again_too_early():
    """The gradients belong to the stream of the backward pass, and are freed on another stream."""
    module, other = models_of(torch.float32)
    optimizer = hybridopt.AdamW(module.named_parameters(), lr=1e-2, overlap=module)
    plain = hybridopt.AdamW(other.named_parameters(), lr=1e-2)
    side = torch.cuda.Stream()
    for step in range(6):
        for each, its_optimizer in ((module, optimizer), (other, plain)):
            stream = side if step % 2 else torch.cuda.default_stream()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                tokens = torch.full((8, 32), step, device="cuda")
                each(tokens).float().square().mean().backward()
                its_optimizer.step()
                its_optimizer.zero_grad()
                torch.full((1 << 22,), torch.nan, device="cuda")
            torch.cuda.current_stream().wait_stream(stream)
    optimizer.synchronize()
    torch.cuda.synchronize()
    assert bits(p.cpu() for p in module.parameters()) == bits(p.cpu() for p in other.parameters())
