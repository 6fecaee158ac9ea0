#!/usr/bin/env python3
"""Shows a byte-level GPT in PyTorch that is trained with its AdamW state in host memory.

    scripts/demo_python               builds the library and runs this
    scripts/demo_python --compare     beside torch.optim.AdamW, with a picture of both losses (matplotlib)
    scripts/demo_python --preset 14g  14 G params on one GPU of 139 GiB with 128 GiB of host memory; small on a CPU
    scripts/demo_python --preset 20g  20 G params there, with masters of 24 bits and part of the state on the GPU

Takes a minute on a GPU, ten minutes on two CPUs, and with --quick half a minute there. Expect a line with the
loss for each tenth of the steps, what a step took in the library, and a validation loss.

The text is that of this machine's Python standard library, or --data's. On a GPU where there is
one, else on the CPU. (1), (2), (3) and (4) mark what other training programs need too.
"""

import argparse
import contextlib
import copy
import dataclasses
import importlib.util
import math
import os
import pathlib
import statistics
import sys
import sysconfig
import time

import torch
from torch import Tensor, nn
from torch.nn import functional

import hybridopt  # (1)

TEXT_BYTES = 8 << 20
VALIDATION_PART = 20  # the last 1/20 of the text
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
# Two million params on a CPU, GPT-2 small's 85 million on a GPU.
SIZES = {
    "cpu": {"steps": 300, "batch": 16, "context": 128, "layers": 4, "width": 192, "heads": 6,
            "lr": 1e-3},
    "cuda": {"steps": 200, "batch": 32, "context": 512, "layers": 12, "width": 768, "heads": 12,
             "lr": 3e-4},
}  # fmt: skip
# One H200 whose host has 128 GiB: state and gradients take 105 GiB there (hybridopt plan 14.06B --small-state
# --hook-gradients), or 106 GiB of 20.39 G params with 72 % of their state, the stash 8 GiB. docs/PYTORCH.md adds
# everything up.
SMALL_PRESET = {"steps": 6, "batch": 8, "context": 64, "layers": 3, "width": 64, "heads": 4,
                "lr": 1e-3, "stash_budget": 2 / 1024}  # fmt: skip
PRESETS = {
    "14g": {
        "cuda": {"steps": 10, "batch": 4, "context": 2048, "layers": 31, "width": 6144, "heads": 48,
                 "lr": 1e-4, "stash_budget": 8.0},
        "cpu": SMALL_PRESET,
    },
    "20g": {
        "cuda": {"steps": 10, "batch": 4, "context": 2048, "layers": 45, "width": 6144, "heads": 48,
                 "lr": 1e-4, "stash_budget": 8.0},
        "cpu": SMALL_PRESET,
    },
}  # fmt: skip
PRESET_FLAGS = {
    "dtype": "bfloat16",
    "state_dtype": "bfloat16",
    "overlap": True,
    "stash": True,
    "memory_plot": pathlib.Path("memory.png"),
}
FLAGS_OF_PRESET = {
    "14g": {**PRESET_FLAGS, "master_layout": "split"},
    "20g": {**PRESET_FLAGS, "master_layout": "split24", "offload_fraction": 0.72},
}
GIB = 1 << 30
WHAT = {
    "steps": "optimizer steps",
    "batch": "sequences a step",
    "context": "bytes a sequence",
    "layers": "blocks of the model",
    "width": "of the model",
    "heads": "of each block",
    "lr": "learning rate, at first",
}


def positive(text: str) -> int:
    if text.isdecimal() and int(text) > 0:
        return int(text)
    raise argparse.ArgumentTypeError(f"got {text!r}, expected a whole number above 0")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Trains a byte-level GPT, optimizer offloaded.")
    parser.add_argument("--data", type=pathlib.Path, help="a text, or a folder of them")
    small, large = SIZES["cpu"], SIZES["cuda"]
    for name, what in WHAT.items():
        text = f"{what}; {small[name]} on a CPU, {large[name]} on a GPU"
        parser.add_argument(f"--{name}", type=float if name == "lr" else positive, help=text)
    parser.add_argument("--micro-batches", type=positive, default=1, help="batches a step, one after the other")
    parser.add_argument("--dtype", choices=DTYPES, help="of params; on a GPU bfloat16")
    parser.add_argument("--offload-fraction", type=float, default=1.0)
    parser.add_argument(
        "--master-layout", choices=("fp32", "split", "split24"), default="fp32", help="of bf16 params' masters"
    )
    parser.add_argument("--state-dtype", choices=DTYPES, default="float32", help="of moments")
    parser.add_argument("--max-grad-norm", type=float, default=1.0)
    parser.add_argument("--overlap", action="store_true", help="gradients leave during backward")
    parser.add_argument("--stash", action="store_true", help="activations wait on the host for the backward pass")
    parser.add_argument("--stash-budget", type=float, help="GiB of the host for them; 8 on a GPU")
    parser.add_argument("--preset", choices=PRESETS, help="sizes and options; what else is given counts first")
    parser.add_argument("--compare", action="store_true", help="train with torch.optim.AdamW too")
    parser.add_argument("--plot", type=pathlib.Path, default=pathlib.Path("losses.png"))
    parser.add_argument("--timeline", type=pathlib.Path, help="a picture of memory and lanes")
    parser.add_argument("--memory-plot", type=pathlib.Path, help="a picture of memory around each pass")
    parser.add_argument("--check", action="store_true", help="follow the steps in float64")
    parser.add_argument("--quick", action="store_true", help="20 small steps, checked")
    kind = "cuda" if torch.cuda.is_available() else "cpu"
    preset = parser.parse_known_args()[0].preset
    if preset is not None:
        parser.set_defaults(**FLAGS_OF_PRESET[preset])
    options = parser.parse_args()
    sizes = {"stash_budget": {"cuda": 8.0, "cpu": 1 / 16}[kind], **SIZES[kind]}
    if options.preset is not None:
        sizes = PRESETS[options.preset][kind]
    if options.quick:
        sizes = {**SIZES["cpu"], "steps": 20, "batch": 8, "context": 64, "layers": 2, "width": 64,
                 "heads": 4, "stash_budget": 1 / 16}
        options.check = not options.overlap
    for name, size in sizes.items():
        if getattr(options, name) is None:
            setattr(options, name, size)
    if options.width % options.heads != 0:
        parser.error(f"--width is {options.width}, expected a multiple of --heads, which is {options.heads}")
    pictures = {"--timeline": options.timeline, "--memory-plot": options.memory_plot}
    if options.compare:
        pictures["--compare"] = options.plot
    for flag, path in pictures.items():
        if path is not None:
            refuse_picture(flag, path)
    if options.check and options.overlap:
        parser.error("--check looks at gradients that --overlap has taken away; give one of them")
    return options


def refuse_picture(flag: str, path: pathlib.Path) -> None:
    """Says before the training what would keep the picture from being drawn behind it."""
    if importlib.util.find_spec("matplotlib") is None:
        raise SystemExit(f"{flag} draws a picture, which needs matplotlib: pip install matplotlib")
    if not os.access(path.parent, os.W_OK | os.X_OK) or path.is_dir():
        raise SystemExit(f"{flag}: got {str(path)!r}, expected a file in a folder that can be written to")


# ------------------------------------------------------------------------------------------ text --


def read_text(path: pathlib.Path | None, context: int) -> Tensor:
    """Bytes of text, the same at each run on one machine."""
    root = path or pathlib.Path(sysconfig.get_paths()["stdlib"])
    files = [root] if root.is_file() else sorted(root.glob("*.txt")) + sorted(root.rglob("*.py"))
    text = bytearray()
    for file in files:
        if "site-packages" in file.parts or not file.is_file():
            continue
        text += file.read_bytes()
        if len(text) >= TEXT_BYTES:
            break
    least = VALIDATION_PART * (context + 2)  # a sequence, and what follows it, of the validation's part
    if len(text) < least:
        raise SystemExit(f"--data: found {len(text)} bytes of text in '{root}', expected at least {least}")
    return torch.frombuffer(text[:TEXT_BYTES], dtype=torch.uint8).long()


def sample(text: Tensor, batch: int, context: int, generator: torch.Generator) -> tuple:
    """Sequences from random places, and what follows each byte."""
    starts = torch.randint(len(text) - context, (batch, 1), generator=generator)
    places = starts + torch.arange(context + 1)
    sequences = text[places]
    return sequences[:, :-1], sequences[:, 1:]


# ----------------------------------------------------------------------------------------- model --


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        qkv = self.qkv(self.norm1(x)).view(batch, length, 3, self.heads, width // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        attended = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(functional.gelu(self.up(self.norm2(x))))


class Gpt(nn.Module):
    def __init__(self, options: argparse.Namespace) -> None:
        super().__init__()
        self.bytes = nn.Embedding(256, options.width)
        self.places = nn.Embedding(options.context, options.width)
        self.blocks = nn.Sequential(
            *(Block(options.width, options.heads) for _ in range(options.layers))
        )
        self.norm = nn.LayerNorm(options.width)
        self.head = nn.Linear(options.width, 256)

    def forward(self, x: Tensor) -> Tensor:
        places = torch.arange(x.shape[1], device=x.device)
        return self.head(self.norm(self.blocks(self.bytes(x) + self.places(places))))


def make_model(options: argparse.Namespace, device: torch.device, dtype: torch.dtype) -> Gpt:
    """Makes the params where and as they stay: the host has no room for a large model beside its state."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with device:
            return Gpt(options)
    finally:
        torch.set_default_dtype(before)


def loss_of(model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
    return functional.cross_entropy(model(inputs).float().flatten(0, 1), targets.flatten())


# ----------------------------------------------------------------------------------------- check --


class Float64Adamw:
    """The same steps in float64, with the gradients that the model under test gets."""

    def __init__(self, params: list[Tensor], group: dict, max_grad_norm: float) -> None:
        self.start = [param.detach().double().cpu() for param in params]
        self.params = [param.clone() for param in self.start]
        self.moments = [(torch.zeros_like(p), torch.zeros_like(p)) for p in self.params]
        self.group, self.max_grad_norm, self.steps = group, max_grad_norm, 0
        self.rounding = 0.0  # squares of what rounding params to fp32 may add up to

    def step(self, grads: list[Tensor]) -> None:
        lr, (beta1, beta2) = self.group["lr"], self.group["betas"]
        grads = [grad.detach().double().cpu() for grad in grads]
        norm = math.sqrt(sum(float(grad.square().sum()) for grad in grads))
        clip = min(1.0, self.max_grad_norm / (norm + 1e-6))
        self.steps += 1
        for param, grad, (first, second) in zip(self.params, grads, self.moments):
            grad = grad * clip
            param.mul_(1 - lr * self.group["weight_decay"])
            first.mul_(beta1).add_(grad, alpha=1 - beta1)
            second.mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
            root = (second / (1 - beta2**self.steps)).sqrt() + self.group["eps"]
            param.sub_(lr / (1 - beta1**self.steps) * first / root)
            self.rounding += float(param.square().sum()) * 2.0**-48

    def distance(self, masters: list[Tensor]) -> tuple[float, float]:
        """How far masters are from here, as a part of the way from the start; and how far rounding
        alone may have brought them, and 1e-6 more."""
        pairs = [(m.double().cpu(), p) for m, p in zip(masters, self.params)]
        off = math.sqrt(sum(float((m - p).square().sum()) for m, p in pairs))
        way = math.sqrt(sum(float((p - s).square().sum()) for p, s in zip(self.params, self.start)))
        return off / way, math.sqrt(self.rounding) / way + 1e-6


def masters_of(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """What the optimizer really updates: fp32 masters, or the params themselves."""
    params = optimizer.param_groups[0]["params"]
    if isinstance(optimizer, hybridopt.OffloadOptimizer):
        return [optimizer.master_of(param) for param in params]
    return [param.detach() for param in params]


# ---------------------------------------------------------------------------------------- memory --


@dataclasses.dataclass
class Sample:
    """What is in use, in bytes: on the device, at most there since the last sample, and on the host."""

    seconds: float
    label: str
    device: int
    device_peak: int
    state: int
    gradients: int
    stash: int


class Memory:
    """The memory of a training around each of its passes. On a GPU the device's is that of torch's allocator
    and the library. On a CPU it is what would be on a device: params, gradients, and activations that stay."""

    def __init__(
        self, model: nn.Module, optimizer: hybridopt.AdamW, stash: hybridopt.ActivationStash | None
    ) -> None:
        self.params = list(model.parameters())
        self.params_bytes = sum(param.nbytes for param in self.params)
        self.optimizer, self.stash = optimizer, stash
        self.samples: list[Sample] = []
        self._begun = time.perf_counter()
        self._stayed_before = 0

    def sample(self, label: str) -> None:
        stats = self.optimizer.stats()
        put_aside = 0 if self.stash is None else self.stash.stats().host_bytes
        device, peak = self._device_bytes(label, stats)
        self.samples.append(
            Sample(time.perf_counter() - self._begun, label, device, peak, stats.state_bytes.host,
                   stats.grads_bytes.host, put_aside)
        )  # fmt: skip

    def _device_bytes(self, label: str, stats: hybridopt.Stats) -> tuple[int, int]:
        if self.params[0].device.type == "cuda":
            both = torch.cuda.memory_allocated(), torch.cuda.max_memory_allocated()
            torch.cuda.reset_peak_memory_stats()
            return both[0] + stats.device_bytes, both[1] + stats.device_bytes
        held = self.params_bytes + sum(p.grad.nbytes for p in self.params if p.grad is not None)
        if self.stash is not None and label == "forward":
            stash = self.stash.stats()
            stayed = stash.saved_bytes - stash.twice_bytes - stash.pushed_bytes
            held += stayed - self._stayed_before
            self._stayed_before = stayed
        return held, held

    def all_on_the_device(self) -> int:
        """What the same training would have there at least, with the same state: activations are gone before
        the last gradients are made."""
        stats = self.optimizer.stats()
        state = stats.state_bytes.host + stats.state_bytes.device
        return self.params_bytes + state + max(self.params_bytes, self.activations())

    def activations(self) -> int:
        choice = None if self.stash is None else self.stash.choice()
        return 0 if choice is None else choice.eligible_bytes

    def say(self) -> None:
        print("memory in MiB, after each pass of the first two iterations and of the last one")
        print(f"  {'':10}{'device':>10}{'its peak':>10}  |{'state':>10}{'gradients':>10}{'stash':>10} on the host")
        for each in [*self.samples[:6], *self.samples[6:][-3:]]:
            numbers = (each.device, each.device_peak, each.state, each.gradients, each.stash)
            device, peak, *host = (f"{number / (1 << 20):10.1f}" for number in numbers)
            print(f"  {each.label:10}{device}{peak}  |{''.join(host)}")
        peak = max(each.device_peak for each in self.samples) / (1 << 20)
        activations = self.activations() / (1 << 20)
        print(
            f"peak on the device {peak:.1f} MiB; all of it there would take {self.all_on_the_device() / (1 << 20):.1f} "
            f"MiB at least: params, state, and the larger of gradients and {activations:.1f} MiB of activations"
        )

    def plot(self, path: pathlib.Path) -> None:
        from matplotlib.figure import Figure

        figure = Figure(figsize=(9, 6), layout="constrained")
        device, host = figure.subplots(2, 1, sharex=True)
        seconds = [each.seconds for each in self.samples]
        unit, name = (GIB, "GiB") if self.params_bytes > GIB else (1 << 20, "MiB")

        def numbers(field: str) -> list[float]:
            return [getattr(each, field) / unit for each in self.samples]

        device.plot(seconds, numbers("device"), label="in use")
        device.plot(seconds, numbers("device_peak"), ":", label="peak since the last sample")
        device.axhline(self.all_on_the_device() / unit, color="#ee6677", linestyle="--",
                       label="all on the device, at least")  # fmt: skip
        parts = ("state", "gradients", "stash")
        host.stackplot(seconds, *map(numbers, parts), labels=parts, step="post")
        for axes, where in ((device, "device"), (host, "host")):
            axes.set_title(f"On the {where}", loc="left")
            axes.set(ylabel=name, ylim=(0, None))
            axes.legend(frameon=False, loc="upper left", bbox_to_anchor=(1, 1))
        host.set_xlabel("seconds")
        figure.savefig(path, dpi=120)
        print(f"memory plotted in {path}")


# ----------------------------------------------------------------------------------------- train --


@dataclasses.dataclass
class Run:
    """What training has given, and how long its steps took: all of them, and the optimizer's part."""

    losses: list[float] = dataclasses.field(default_factory=list)
    step_seconds: list[float] = dataclasses.field(default_factory=list)
    optimizer_seconds: list[float] = dataclasses.field(default_factory=list)
    distance: tuple[float, float] | None = None  # from float64


def train(
    name: str, model: nn.Module, optimizer: torch.optim.Optimizer, text: Tensor, options, memory=None
):
    """Trains, and says how it went."""
    stash = contextlib.nullcontext() if memory is None or memory.stash is None else memory.stash
    sample_memory = (lambda label: None) if memory is None else memory.sample
    clip_here = not isinstance(optimizer, hybridopt.OffloadOptimizer)
    params = list(model.parameters())
    generator = torch.Generator().manual_seed(1)  # the same sequences for everyone
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, options.steps)
    follower = None
    if options.check:
        follower = Float64Adamw(params, optimizer.param_groups[0], options.max_grad_norm)
    run = Run()
    for step in range(options.steps):
        begin = time.perf_counter()
        losses = []
        for micro_batch in range(options.micro_batches):
            inputs, targets = sample(text, options.batch, options.context, generator)
            inputs, targets = inputs.to(params[0].device), targets.to(params[0].device)
            with stash:  # (4) around the forward pass, where activations are to leave
                loss = loss_of(model, inputs, targets) / options.micro_batches
            if micro_batch == options.micro_batches - 1:
                sample_memory("forward")
            loss.backward()
            losses.append(loss.detach())
        sample_memory("backward")
        seconds = time.perf_counter() - begin
        if follower is not None:
            follower.step([param.grad for param in params])
        begin = time.perf_counter()
        if clip_here:
            nn.utils.clip_grad_norm_(params, options.max_grad_norm)
        stepped = time.perf_counter()
        optimizer.step()  # (3)
        run.optimizer_seconds.append(time.perf_counter() - stepped)
        optimizer.zero_grad()
        sample_memory("step")
        run.losses.append(sum(loss.item() for loss in losses))  # waits for the GPU
        run.step_seconds.append(seconds + time.perf_counter() - begin)
        schedule.step()
        if step % max(1, options.steps // 10) == 0 or step == options.steps - 1:
            print(f"  {name}: step {step + 1}, loss {run.losses[-1]:.4f}")
    if follower is not None:
        run.distance = follower.distance(masters_of(optimizer))
    return run


def say_speed(name: str, run: Run, options: argparse.Namespace) -> None:
    """Without the first step, which makes what the others use."""
    first, later = run.step_seconds[0], run.step_seconds[1:]
    if not later:
        return
    tokens_per_second = options.micro_batches * options.batch * options.context * len(later) / sum(later)
    print(
        f"  {name}: {tokens_per_second:.0f} tokens/s; a step takes {ms(later)} ms (median), the first "
        f"took {first * 1e3:.1f} ms"
    )


def say_lanes(run: Run, optimizer: hybridopt.AdamW) -> None:
    """Where the time of a step goes. Lanes run at the same time; their sum is no sum."""
    results = [result for result in optimizer.step_results()[1:] if not result.skipped]
    if not results:
        return
    later, first = run.optimizer_seconds[1:], run.optimizer_seconds[0]
    print(
        f"optimizer.step() takes {ms(later)} ms, on a GPU with the wait for the backward pass; the "
        f"first, which makes the state, {first * 1e3:.1f} ms. In the library:"
    )
    for name in ("total", "norm", "grads_down", "update", "params_up", "device_update", "stall"):
        lane = [getattr(result, f"{name}_seconds") for result in results]
        print(f"  {name.replace('_', ' '):14}{ms(lane):>8} ms")


def ms(seconds: list[float]) -> str:
    return f"{statistics.median(seconds) * 1e3:.1f}"


def say_memory(optimizer: hybridopt.AdamW, device: torch.device) -> None:
    """Where the bytes are; beside them what torch would hold on the device."""
    stats = optimizer.stats()
    mib = 1 / (1 << 20)
    state = (stats.state_bytes.host + stats.state_bytes.device) * mib
    saved = stats.state_bytes.host * mib
    if device.type == "cuda":
        own = (stats.device_bytes - stats.state_bytes.device) * mib
        print(f"memory saved on the GPU: {saved:.1f} of {state:.1f} MiB of state")
        print(f"the library's own there beside state: {own:.1f} MiB")
        print(f"peak of torch's own: {torch.cuda.max_memory_allocated(device) * mib:.1f} MiB")
    else:
        print(f"memory: {state:.1f} MiB of state in host memory, which a GPU need not hold")


@torch.no_grad()
def validation_loss(model: nn.Module, text: Tensor, options: argparse.Namespace) -> float:
    device = next(model.parameters()).device
    generator = torch.Generator().manual_seed(2)
    batches = [sample(text, options.batch, options.context, generator) for _ in range(8)]
    losses = [loss_of(model, x.to(device), y.to(device)).item() for x, y in batches]
    return sum(losses) / len(losses)


def plot_losses(losses: dict[str, list[float]], path: pathlib.Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.subplots()
    styles = iter(("-", "--"))
    for name, values in losses.items():
        axes.plot(range(1, len(values) + 1), values, next(styles), label=name, linewidth=1.2)
    axes.set(xlabel="step", ylabel="loss, nats a byte", title="Byte-level GPT")
    axes.legend(frameon=False)
    figure.savefig(path, dpi=120)
    print(f"losses plotted in {path}")


def refuse_too_large(optimizer: hybridopt.AdamW, options: argparse.Namespace) -> None:
    """Adds up what the host will hold, before any of it is taken."""
    plan = optimizer.plan()
    stash = options.stash_budget * GIB if options.stash else 0
    needed, available = ((size / (1 << 20)) for size in (plan.host_bytes + stash, plan.host_available_bytes))
    text = (
        f"the host will hold {needed:.1f} MiB of state, gradients that leave and the stash; {available:.1f} MiB are "
        "available"
    )
    if needed > available:
        raise SystemExit(f"{text}; choose a smaller model, --stash-budget or --offload-fraction")
    print(text)


def make_stash(options: argparse.Namespace, device: torch.device) -> hybridopt.ActivationStash:
    sizes = {} if device.type == "cuda" else {"min_bytes": 4096, "slab_bytes": 4096}
    return hybridopt.ActivationStash(int(options.stash_budget * GIB), device=device, **sizes)


def main() -> int:
    options = parse()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    default = torch.bfloat16 if device.type == "cuda" else torch.float32
    dtype = DTYPES[options.dtype] if options.dtype else default
    text = read_text(options.data, options.context)
    cut = len(text) - len(text) // VALIDATION_PART
    torch.manual_seed(0)
    model = make_model(options, device, dtype)
    other = copy.deepcopy(model) if options.compare else None
    count = sum(param.numel() for param in model.parameters())
    print(f"{count} params in {dtype} on {device}, {len(text)} bytes of text")

    arguments = {"lr": options.lr, "betas": (0.9, 0.95), "weight_decay": 0.1}
    optimizer = hybridopt.AdamW(  # (2)
        model.parameters(),
        **arguments,
        offload_fraction=options.offload_fraction,
        master_layout=options.master_layout,
        state_dtype=DTYPES[options.state_dtype],
        max_grad_norm=options.max_grad_norm,
        movable=("grads",) if options.overlap else (),
    )
    memory = None
    if options.stash or options.memory_plot is not None:
        refuse_too_large(optimizer, options)
        memory = Memory(model, optimizer, make_stash(options, device) if options.stash else None)
    if options.overlap:
        optimizer.hook_gradients(micro_batches=options.micro_batches)
    runs = {"hybridopt": train("hybridopt", model, optimizer, text[:cut], options, memory)}
    say_speed("hybridopt", runs["hybridopt"], options)
    say_lanes(runs["hybridopt"], optimizer)
    say_memory(optimizer, device)
    if memory is not None:
        memory.say()
    if options.memory_plot is not None:
        memory.plot(options.memory_plot)
    print(f"validation loss {validation_loss(model, text[cut:], options):.4f}")
    if options.timeline:
        optimizer.plot_timeline(options.timeline)
    if other is not None:
        torchs = torch.optim.AdamW(other.parameters(), **arguments)
        runs["torch"] = train("torch", other, torchs, text[:cut], options)
        say_speed("torch", runs["torch"], options)
        plot_losses({name: run.losses for name, run in runs.items()}, options.plot)
    return say_distances(runs)


def say_distances(runs: dict[str, Run]) -> int:
    """How far off float64 everyone is, where that was asked; the exit status."""
    for name, run in runs.items():
        if run.distance is None:
            return 0
        distance, allowed = run.distance
        print(f"{name}: params are {distance:.1e} of their way off a training in float64, fp32 may be {allowed:.1e}")
    distance, allowed = runs["hybridopt"].distance
    good = distance <= allowed
    print(f"as exact as fp32 can be: {'yes' if good else 'NO'}")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
