"""Small models, and functions that tests use on them."""

import copy
import ctypes
import gc
import linecache
import math
import os
import re
import sys
import weakref

import torch
from torch import nn
from torch.nn import functional

import hybridopt
from hybridopt.sync import in_sync

# Every optimizer of the package, torch's optimizer of the same name (None: torch has none), and arguments for both.
PAIRS = {
    "AdamW": (hybridopt.AdamW, torch.optim.AdamW, {"lr": 1e-2}),
    "Adam": (hybridopt.Adam, torch.optim.Adam, {"lr": 1e-2, "weight_decay": 0.01}),
    "SGD": (hybridopt.SGD, torch.optim.SGD, {"lr": 1e-2, "momentum": 0.9, "weight_decay": 0.01}),
    "SGD plain": (hybridopt.SGD, torch.optim.SGD, {"lr": 1e-2}),
    "Lion": (hybridopt.Lion, None, {"lr": 1e-3, "weight_decay": 0.01}),
    "Signum": (hybridopt.Signum, None, {"lr": 1e-3, "weight_decay": 0.01}),
    "Adagrad": (hybridopt.Adagrad, torch.optim.Adagrad, {"lr": 1e-2, "weight_decay": 0.01}),
}
WITH_TORCH = {name: pair for name, pair in PAIRS.items() if pair[1] is not None}


# Values of many types, by their repr(). An argument must accept each value or raise an error that says what it expects.
VALUES = {
    repr(value): value
    for value in (
        *("", "1", "cuda:99", b"x", True, False, None, math.nan, math.inf, -1, 0, 1, 2.5, 10**23, 10**400, 1j),
        *([], (), {}, [1.5], ["x"], [[]], range(0), torch.tensor(1.0), torch.tensor([0, 1]), torch.float16, len),
    )
}


def told(value):
    """A regular expression for a value as errors show it."""
    text = repr(value)
    return re.escape(text if len(text) <= 100 else f"{text[:80]}... ({len(text)} characters)")


def drawn_seeds(count):
    """The seeds of a test that draws at random; they are in the test's name. Each HYBRIDOPT_TEST_SEED gives other
    seeds, and a long run has more of them."""
    first = 1_000_000 * int(os.environ.get("HYBRIDOPT_TEST_SEED", "0"))
    scaled = round(count * float(os.environ.get("HYBRIDOPT_TEST_SCALE", "1")))
    return range(first, first + max(1, scaled))


def watch_params(monkeypatch, watched=True):
    """If `watched` is True, optimizers that are made from now on watch params on the CPU as they watch those on a
    GPU. Otherwise their steps follow params on the CPU."""
    if watched:
        monkeypatch.setattr(in_sync, "is_away", lambda device: True)


PACKAGE = os.path.dirname(hybridopt.__file__) + os.sep


def cut_off(call, line):
    """Calls a function, and raises KeyboardInterrupt before the given one of all lines of the package that it runs.
    Returns whether that ended the call; False if it runs fewer lines."""
    passed = 0

    def at_line(frame, event, _):
        nonlocal passed
        if event == "line" and may_end_at(frame):
            passed += 1
            if passed == line:
                raise KeyboardInterrupt
        return at_line

    before = sys.gettrace()
    gc.disable()
    sys.settrace(lambda frame, *_: at_line if frame.f_code.co_filename.startswith(PACKAGE) else None)
    try:
        call()
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(before)
        gc.enable()
    return False


def may_end_at(frame):
    """Whether an exception at this line ends the call: one in a destructor is lost. A `with` line comes again before the
    end of its block is called, where Python itself handles no signal; nor does it at a `try:`, which may lie outside of
    the block around it."""
    if linecache.getline(frame.f_code.co_filename, frame.f_lineno).lstrip().startswith(("with", "try:")):
        return False
    destroying = (weakref.finalize.__call__.__code__, "__del__")
    while frame is not None and frame.f_code not in destroying and frame.f_code.co_name not in destroying:
        frame = frame.f_back
    return frame is None


class Block(nn.Module):
    def __init__(self, width, hidden):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, hidden), nn.Linear(hidden, width)

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Attention(nn.Module):
    """Queries, keys and values are views with gaps into one matrix. With dropout, the scores and their softmax are
    saved too."""

    def __init__(self, width, heads, dropout=None):
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.norm, self.qkv, self.out = nn.LayerNorm(width), nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x):
        batch, length, width = x.shape
        qkv = self.qkv(self.norm(x)).view(batch, length, 3, self.heads, width // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        if self.dropout is None:
            mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        else:
            scores = (q @ k.transpose(-1, -2)) / (width // self.heads) ** 0.5
            mixed = functional.dropout(scores.softmax(-1), self.dropout) @ v
        return x + self.out(mixed.transpose(1, 2).reshape(batch, length, width))


def perceptron(dtype=torch.float32):
    return nn.Sequential(nn.Linear(10, 20), nn.Tanh(), nn.Linear(20, 3)).to(dtype)


def set_gradients(params, seed, scale=1.0):
    """Sets gradients that depend on the seed only."""
    generator = torch.Generator().manual_seed(seed)
    for param in params:
        noise = torch.randn(param.shape, generator=generator)
        param.grad = (noise * scale).to(param.dtype)


def run(optimizer, params, seeds):
    for seed in seeds:
        set_gradients(params, seed)
        optimizer.step()


def bits(tensors):
    """All bits of the tensors, to be compared with ==."""
    return [_content(tensor.detach().reshape(-1).contiguous().view(torch.uint8).cpu()) for tensor in tensors]


def _content(on_host):
    return ctypes.string_at(on_host.data_ptr(), on_host.numel())


def state_bits(optimizer):
    """All bits of the state, in the order of params."""
    entries = optimizer.state_dict()["state"]
    return {
        (index, key): bits([value])
        for index, entry in entries.items()
        for key, value in entry.items()
    }


def clone(params):
    return [copy.deepcopy(param) for param in params]


def are_hooks_on_saved_tensors_in_force():
    result = torch.ones(2, requires_grad=True).square()
    saved = result.grad_fn._raw_saved_self  # must not outlive the result
    try:
        saved.register_hooks(lambda tensor: tensor, lambda tensor: tensor)
    except RuntimeError as error:
        assert "hooks have already been set" in str(error)
        return True
    return False
