"""Muon with params on a GPU. Bits are the same wherever the state is and whatever hides the step; and the params are near
those of torch.optim.Muon on the same GPU."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional

import hybridopt
from models import Block, bits

SMALL = {"master_layout": "split", "state_dtype": torch.bfloat16}


@pytest.fixture(autouse=True)
def same_gradients(monkeypatch):
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


class Model(nn.Module):
    def __init__(self, width=320):
        super().__init__()
        self.embedding = nn.Embedding(300, width)
        self.blocks = nn.ModuleList(Block(width, 4 * width) for _ in range(3))
        self.head = nn.Linear(width, 300)

    def forward(self, tokens):
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def tokens_of(seed):
    generator = torch.Generator("cuda").manual_seed(seed)
    return torch.randint(300, (8, 32), generator=generator, device="cuda")


def loss_of(model, seed):
    tokens = tokens_of(seed)
    return functional.cross_entropy(model(tokens).flatten(0, 1).float(), tokens.flatten())


def made(dtype=torch.bfloat16, overlapped=False, **options):
    torch.manual_seed(0)
    model = Model().to("cuda", dtype)
    groups = hybridopt.muon_groups(model, adamw={"lr": 1e-3})
    optimizer = hybridopt.Muon(
        groups, lr=0.01, max_grad_norm=1.0, overlap=model if overlapped else None, **options
    )
    return model, optimizer


def train(model, optimizer, steps, change=None):
    for step in steps:
        loss = loss_of(model, step) * (torch.inf if step == 3 else 1.0)
        with optimizer.last_micro_batch():
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if change is not None:
            change(optimizer, step)


def bits_of(model, optimizer):
    optimizer.synchronize()
    tensors = list(model.parameters())
    for param in model.parameters():
        tensors.append(optimizer.master_of(param))
        state = optimizer.state[param]
        tensors += [state[key] for key in ("momentum_buffer", "exp_avg", "exp_avg_sq") if key in state]
    return bits([tensor.detach().cpu() for tensor in tensors])


def trained(hooked=False, change=None, **options):
    model, optimizer = made(**options)
    if hooked:
        optimizer.hook_gradients(micro_batches=None)
    train(model, optimizer, range(6), change)
    return bits_of(model, optimizer)


@pytest.mark.parametrize("layout", [{}, SMALL, {"master_layout": "split24"}])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_nothing_changes_a_bit(dtype, layout):
    plain = trained(dtype=dtype, offload_fraction=0.0, **layout)
    for fraction in (0.3, 1.0):
        for overlapped in (False, True):
            for hooked in (False, True):
                got = trained(hooked, dtype=dtype, offload_fraction=fraction, overlapped=overlapped, **layout)
                assert got == plain, (fraction, overlapped, hooked)

    def move(optimizer, step):
        optimizer.set_offload_fraction((0.2, 1.0, 0.0, 0.7, 0.4, 0.9)[step])

    assert trained(change=move, dtype=dtype, offload_fraction=0.5, **layout) == plain


def test_state_on_disk_changes_no_bit(tmp_path):
    plain = trained(offload_fraction=0.0)
    for offloaded, on_disk in ((1.0, 1.0), (0.7, 0.4)):
        for overlapped in (False, True):
            for hooked in (False, True):
                options = {"offload_fraction": offloaded, "disk_fraction": on_disk, "disk_paths": tmp_path}
                assert trained(hooked, overlapped=overlapped, **options) == plain, (on_disk, overlapped, hooked)

    def move(optimizer, step):
        optimizer.set_offload_fraction(1.0, disk_fraction=(0.2, 1.0, 0.0, 0.7, 0.4, 0.9)[step])

    assert trained(change=move, offload_fraction=1.0, disk_paths=tmp_path) == plain


def test_phases_and_a_checkpoint_change_no_bit(tmp_path):
    plain = trained(offload_fraction=0.0)
    model, optimizer = made(offload_fraction=1.0, movable=("params", "grads", "states"))
    train(model, optimizer, range(2))
    with optimizer.offloaded():
        pass
    optimizer.save_checkpoint(tmp_path / "saved")
    train(model, optimizer, range(2, 4))
    optimizer.synchronize()
    weights = copy.deepcopy(model.state_dict())
    optimizer.save_checkpoint(tmp_path / "later")
    optimizer.close()
    other, resumed = made(offload_fraction=0.25)
    other.load_state_dict(weights)
    resumed.load_checkpoint(tmp_path / "later")
    train(other, resumed, range(4, 6))
    assert bits_of(other, resumed) == plain


def test_only_the_gpu_updates():
    model, optimizer = made(offload_fraction=1.0)
    train(model, optimizer, range(2))
    last = optimizer.last_step()
    assert last.cpu_elements == 0 and last.streamed_elements == sum(p.numel() for p in model.parameters())
    model, optimizer = made(offload_fraction=1.0, host_executors="cpu")
    with pytest.raises(ValueError, match="host_executors='cpu' with Muon on a GPU: only the GPU updates its matrices"):
        train(model, optimizer, range(1))
    model, optimizer = made(offload_fraction=1.0, early_update_bytes=1 << 20)
    with pytest.warns(UserWarning, match="early_update_bytes=1048576 has no effect: only the GPU updates matrices"):
        optimizer.hook_gradients(micro_batches=None)
        train(model, optimizer, range(1))


@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="this torch has no Muon")
def test_params_are_near_those_of_torchs_muon():
    """Both multiply in bf16 with cuBLAS, in other orders."""
    model, optimizer = made(dtype=torch.float32, offload_fraction=1.0)
    names = {name for name, _ in hybridopt.muon_groups(model)[0]["params"]}
    ours = {name: param for name, param in model.named_parameters() if name in names}
    start = {name: param.detach().clone() for name, param in ours.items()}
    theirs = {name: nn.Parameter(param.detach().clone()) for name, param in ours.items()}
    torchs = torch.optim.Muon(theirs.values(), lr=0.01)
    for step in range(8):
        loss_of(model, step).backward()
        norm = torch.nn.utils.get_total_norm([param.grad for param in model.parameters()])
        for name, param in ours.items():
            theirs[name].grad = param.grad * min(1.0, 1.0 / (norm.item() + 1e-6))
        optimizer.step()
        optimizer.zero_grad()
        torchs.step()
    optimizer.synchronize()
    for name, param in ours.items():
        moved = (theirs[name] - start[name]).norm()
        assert moved > 0 and (param - theirs[name]).norm() < 0.03 * moved, name
