#!/usr/bin/env python3
"""Trains the same thing with AdamW moments stored in fp32, in bf16 and in 8 bits, and compares losses:
once a byte-level language model as examples/train_lm has it, once a problem whose gradients have
rare huge outliers. docs/NUMERICS.md has the figures and what was decided.

    .venv/bin/python bench/eight_bit_moments.py                       both, 3 seeds
    .venv/bin/python bench/eight_bit_moments.py --problem spiky --seeds 10

Everything but the stored form of moments is fp32 and the same in all runs of a seed: first weights,
text, gradients' noise. The `nudged` run is fp32 with gradients that are off by one part in a million:
what it differs by, a loss differs by for no reason.
"""

from __future__ import annotations

import argparse
import json
import math
import pathlib
import statistics
import sysconfig
from typing import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional

# ---------------------------------------------------------------------------------- stored moments --


def stochastic_bf16(x: Tensor, noise: torch.Generator) -> Tensor:
    """Up with the probability that the 16 discarded bits say, as docs/NUMERICS.md has it."""
    random = torch.randint(0, 1 << 16, x.shape, generator=noise, dtype=torch.int32)
    return ((x.view(torch.int32) + random) & -65536).view(torch.float32)


def decades(negative: bool) -> Tensor:
    """The 256 numbers of an 8-bit float whose exponent grows by one decade for each leading zero bit
    and leaves the rest of the bits to the fraction (Dettmers et al., "8-bit Optimizers via Block-wise
    Quantization", 2022). Without a sign the fraction has one bit more."""
    bits = 7 if negative else 8
    numbers = [0.0, 1.0]
    for zeros in range(bits):
        steps = 2 ** (bits - 1 - zeros)
        width = 0.9 / steps
        numbers += [10.0**-zeros * (0.1 + width * (step + 0.5)) for step in range(steps)]
    if negative:
        numbers += [-number for number in numbers if 0 < number < 1]
    numbers.sort()
    if len(numbers) > 256:
        del numbers[-2]  # the one next to 1
    return torch.tensor(numbers)


def logarithms() -> Tensor:
    """256 numbers from 2^-25.5 to 1, each 7.2 % above the one before. There is no 0: a second moment
    that is stored as 0 makes the next step as long as eps allows."""
    return 2.0 ** ((torch.arange(256) - 255) / 10.0)


def linear(negative: bool) -> Tensor:
    return torch.arange(-127, 128) / 127.0 if negative else torch.arange(256) / 255.0


def squares() -> Tensor:
    """Linear for the root: what a second moment is used for."""
    return (torch.arange(256) / 255.0) ** 2


class Blockwise:
    """Each block of elements is divided by its largest magnitude, which is kept in fp32; what is left
    is stored as the number of an entry of a code book, the nearest or at random one of both sides."""

    def __init__(self, book: Tensor, block: int, at_random: bool) -> None:
        self.book, self.block, self.at_random = book.float(), block, at_random
        self.middles = (self.book[1:] + self.book[:-1]) / 2

    def __call__(self, x: Tensor, noise: torch.Generator) -> Tensor:
        flat = functional.pad(x.flatten(), (0, -x.numel() % self.block)).view(-1, self.block)
        scale = flat.abs().amax(1, keepdim=True)
        part = flat / scale.clamp(min=1e-38)
        if self.at_random:
            above = torch.bucketize(part, self.book).clamp(1, len(self.book) - 1)
            low, high = self.book[above - 1], self.book[above]
            up = torch.rand(part.shape, generator=noise) * (high - low) < part - low
            stored = torch.where(up, high, low)
        else:
            stored = self.book[torch.bucketize(part, self.middles)]
        return (stored * scale).flatten()[: x.numel()].view_as(x)


Store = Callable[[Tensor, torch.Generator], Tensor]


def exact(x: Tensor, noise: torch.Generator) -> Tensor:
    return x


def eight_bits(first: Tensor, second: Tensor, block: int, at_random: bool = False) -> tuple:
    return Blockwise(first, block, at_random), Blockwise(second, block, at_random)


# Name: how exp_avg and exp_avg_sq are stored.
FORMS: dict[str, tuple[Store, Store]] = {
    "fp32": (exact, exact),
    "fp32, nudged": (exact, exact),
    "bf16, at random": (stochastic_bf16, stochastic_bf16),
    "8 bits, decades, 2048": eight_bits(decades(True), decades(False), 2048),
    "8 bits, decades, 256": eight_bits(decades(True), decades(False), 256),
    "8 bits, decades, 128, at random": eight_bits(decades(True), decades(False), 128, True),
    "8 bits, linear, 128": eight_bits(linear(True), linear(False), 128),
    "8 bits, linear and squares, 128": eight_bits(linear(True), squares(), 128),
    "8 bits, decades and log, 128, at random": eight_bits(decades(True), logarithms(), 128, True),
    "exp_avg in 8 bits, decades, 128, at random": (Blockwise(decades(True), 128, True), exact),
    "exp_avg_sq in 8 bits, log, 128, at random": (exact, Blockwise(logarithms(), 128, True)),
}


class Adamw:
    """exp_avg and exp_avg_sq are stored at the end of a step; the step itself uses them as they are."""

    def __init__(self, groups: list[dict], form: str, seed: int) -> None:
        self.groups, self.steps = groups, 0
        self.nudged = form.endswith("nudged")
        self.store_first, self.store_second = FORMS[form]
        self.noise = torch.Generator().manual_seed(seed)
        self.moments = {p: (torch.zeros_like(p), torch.zeros_like(p)) for p in self.params()}

    def params(self) -> list[Tensor]:
        return [param for group in self.groups for param in group["params"]]

    @torch.no_grad()
    def step(self, rate: float, grads: dict[Tensor, Tensor]) -> None:
        self.steps += 1
        for group in self.groups:
            beta1, beta2 = group["betas"]
            lr = rate * group["lr"]
            for param in group["params"]:
                grad = grads[param]
                if self.nudged:
                    grad = grad * (1 + 1e-6 * torch.randn(grad.shape, generator=self.noise))
                first, second = self.moments[param]
                first = torch.lerp(first, grad, 1 - beta1)
                second = torch.lerp(second, grad * grad, 1 - beta2)
                root = (second / (1 - beta2**self.steps)).sqrt_().add_(1e-8)
                param.mul_(1 - lr * group["decay"])
                param.addcdiv_(first, root, value=-lr / (1 - beta1**self.steps))
                stored = self.store_first(first, self.noise), self.store_second(second, self.noise)
                self.moments[param] = stored


# ---------------------------------------------------------------------------------- language model --

WIDTH, LAYERS, HEADS, CONTEXT, BATCH = 256, 2, 4, 64, 16
NGRAMS, ROWS, HISTORY = (2, 3, 4, 6), 4096, 8
TEXT_BYTES = 8 << 20


def read_text() -> tuple[Tensor, Tensor]:
    """Python's standard library: what is trained on, and every 16th block of it, which is not."""
    text = bytearray()
    for file in sorted(pathlib.Path(sysconfig.get_paths()["stdlib"]).rglob("*.py")):
        if "site-packages" not in file.parts:
            text += file.read_bytes()
    bytes_of_text = torch.frombuffer(text[:TEXT_BYTES], dtype=torch.uint8).long()
    blocks = bytes_of_text.split(1 << 16)
    train = torch.cat([block for i, block in enumerate(blocks) if i % 16 != 8])
    return train, torch.cat(blocks[8::16])


def windows(text: Tensor, starts: Tensor) -> Tensor:
    return text[starts[:, None] + torch.arange(HISTORY + CONTEXT + 1)]


def norm(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)


class Model(nn.Module):
    """examples/train_lm/byte_model.h: a transformer, and tables of the hashes of the last bytes."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)

        def weight(rows: int, columns: int, deviation: float) -> nn.Parameter:
            return nn.Parameter(deviation * torch.randn(rows, columns, generator=generator))

        scale = WIDTH**-0.5
        self.tables = nn.ParameterList([weight(256, WIDTH, 0.5), weight(CONTEXT, WIDTH, 0.1)])
        self.tables.extend([weight(ROWS, WIDTH, 0.0) for _ in NGRAMS])
        self.blocks = nn.ModuleList()
        for _ in range(LAYERS):
            block = nn.Module()
            block.qkv = nn.ParameterList([weight(WIDTH, WIDTH, scale) for _ in range(3)])
            block.out, block.up = weight(WIDTH, WIDTH, 0.0), weight(4 * WIDTH, WIDTH, scale)
            block.down = weight(WIDTH, 4 * WIDTH, 0.0)
            self.blocks.append(block)
        self.head = weight(256, WIDTH, 0.0)

    def forward(self, batch: Tensor) -> Tensor:
        count = batch.shape[0]
        x = self.tables[0][batch[:, HISTORY:-1]] + self.tables[1]
        for table, length in zip(self.tables[2:], NGRAMS):
            key = torch.zeros(count, CONTEXT, dtype=torch.long)
            for back in range(length):
                byte = batch[:, HISTORY - back : HISTORY - back + CONTEXT]
                key = (key * 0x5DEECE66D + byte + 1) & 0xFFFFFFFFFFFF
            x = x + table[(key >> 24) % ROWS]
        for block in self.blocks:
            y = norm(x)
            q, k, v = ((y @ w.T).view(count, CONTEXT, HEADS, -1).transpose(1, 2) for w in block.qkv)
            mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
            x = x + mixed.transpose(1, 2).reshape(count, CONTEXT, WIDTH) @ block.out.T
            x = x + functional.relu(norm(x) @ block.up.T).square() @ block.down.T
        logits = norm(x) @ self.head.T
        return functional.cross_entropy(logits.flatten(0, 1), batch[:, HISTORY + 1 :].flatten())


def train_language_model(form: str, seed: int, steps: int, text: tuple[Tensor, Tensor]) -> float:
    """The loss of the text held out, in bits a byte."""
    train, held_out = text
    model = Model(seed)
    tables = list(model.tables)
    in_tables = {id(table) for table in tables}
    others = [param for param in model.parameters() if id(param) not in in_tables]
    optimizer = Adamw(
        [
            {"params": others, "lr": 1e-3, "betas": (0.9, 0.98), "decay": 0.1},
            {"params": tables, "lr": 3e-2, "betas": (0.9, 0.98), "decay": 0.0},
        ],
        form,
        seed,
    )
    places = torch.Generator().manual_seed(seed)
    length = HISTORY + CONTEXT + 1
    for step in range(steps):
        loss = model(windows(train, torch.randint(len(train) - length, (BATCH,), generator=places)))
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        rate = min(1.0, (step + 1) / 40) * min(1.0, (1 - step / steps) / 0.7)
        optimizer.step(rate, {param: param.grad for param in optimizer.params()})
        model.zero_grad()
    parts = 16 * BATCH
    starts = torch.arange(parts) * ((len(held_out) - length) // parts)
    with torch.no_grad():
        losses = [model(windows(held_out, part)).item() for part in starts.split(BATCH)]
    return statistics.mean(losses) / math.log(2)


# ------------------------------------------------------------------------------------ rare outliers --

SPIKY_PARAMS = 1 << 15


def train_spiky(form: str, seed: int, steps: int) -> float:
    """A quadratic bowl whose curvatures span four decades. Gradients have noise as large as the typical
    gradient, and one in a thousand is a thousand times too large: where it falls it makes the largest
    number of its block, so that the others of the block get few bits. The mean loss of the last
    tenth of the steps, while the learning rate falls."""
    generator = torch.Generator().manual_seed(seed)
    curvature = 10.0 ** (4 * torch.rand(SPIKY_PARAMS, generator=generator) - 4)
    param = torch.randn(SPIKY_PARAMS, generator=generator)
    optimizer = Adamw(
        [{"params": [param], "lr": 1e-2, "betas": (0.9, 0.999), "decay": 0.0}], form, seed
    )
    losses = []
    for step in range(steps):
        noise = torch.randn(SPIKY_PARAMS, generator=generator)
        spikes = torch.rand(SPIKY_PARAMS, generator=generator) < 1e-3
        grad = curvature * (param + noise)
        grad = torch.where(spikes, 1000 * grad, grad)
        optimizer.step(min(1.0, 2 * (1 - step / steps)), {param: grad})
        if step >= steps - steps // 10:
            losses.append((curvature * param.square()).sum().item() / curvature.sum().item())
    return statistics.mean(losses)


# ------------------------------------------------------------------------------------------ figures --


def compare(name: str, seeds: int, train: Callable[[str, int], float], forms: list[str]) -> dict:
    losses: dict[str, list[float]] = {form: [] for form in forms}
    for seed in range(1, seeds + 1):
        for form in forms:
            losses[form].append(train(form, seed))
            print(f"  {name}, seed {seed}, {form}: {losses[form][-1]:.6f}", flush=True)
    print(f"\n{name}: loss, and how far it is from that of fp32, in % (mean, worst of {seeds} seeds)")
    figures = {}
    for form in forms:
        off = [100 * (a / b - 1) for a, b in zip(losses[form], losses["fp32"])]
        mean, worst = statistics.mean(off), max(off, key=abs)
        figures[form] = {"loss": losses[form], "off_percent": off}
        print(f"  {form:42s} {statistics.mean(losses[form]):9.5f} {mean:+9.3f} {worst:+9.3f}")
    print(flush=True)
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description="8-bit moments against fp32 and bf16 ones.")
    parser.add_argument("--problem", choices=("language", "spiky", "both"), default="both")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=200, help="of the language model")
    parser.add_argument("--spiky-steps", type=int, default=3000)
    parser.add_argument("--forms", nargs="*", default=list(FORMS), help="fp32 is always there")
    parser.add_argument("--json", type=pathlib.Path)
    options = parser.parse_args()
    forms = ["fp32"] + [form for form in FORMS if form in options.forms and form != "fp32"]
    figures = {}
    if options.problem != "language":
        figures["spiky"] = compare(
            "spiky", options.seeds, lambda f, s: train_spiky(f, s, options.spiky_steps), forms
        )
    if options.problem != "spiky":
        text = read_text()
        figures["language"] = compare(
            "language",
            options.seeds,
            lambda form, seed: train_language_model(form, seed, options.steps, text),
            forms,
        )
    if options.json:
        options.json.write_text(json.dumps(figures, indent=1))


if __name__ == "__main__":
    main()
