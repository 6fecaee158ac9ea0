"""How AdamW's state may be stored in few bytes: the codes that bench/few_bytes.py compares, and the update that reads
and writes them. Plain torch, elementwise, so that torch.compile makes one kernel of each.

Arrays have the shape [runs, groups, elements of a group]: the runs of a batch differ by their seed alone. A step
decodes both moments, computes in fp32, changes the param by the moments as computed, and encodes them again.

exp_avg_sq, as a logarithm. Numbers lie on one lattice for all groups, 2^(n / K - 126) with K codes an octave. A number
between two neighbours of the lattice becomes one of both at random, so that the mean is exact, or the nearer one. Then
the group's scale is one byte: the smallest power of two that no number of the group exceeds. Code 255 is that power,
and each code below is one place lower on the lattice, down to code 1. What lies lower becomes code 1 (it saturates).
Code 0 is the number 0, and no other number becomes it. A scale of 0 belongs to a group that is all 0: one that has
never had a gradient. A scale that moves moves no number: the lattice stays, so nothing is encoded anew.

exp_avg, as its ratio to the root of the exp_avg_sq that has just been stored. By Cauchy and Schwarz
|exp_avg| / sqrt(exp_avg_sq) <= (1 - beta1) / sqrt((1 - beta2) (1 - beta1^2 / beta2)), and the bound of the code is
half a code of exp_avg_sq wider, as that may have been rounded down. Code c from -127 to 127 is sign(c) (c / 127)^2
times the bound (root companding), or c / 127 times the bound (linear). A ratio beyond the bound becomes the bound. The
bound depends on betas: a step decodes by the bound of the step before and encodes by its own.

Masters of 24 bits lose the lower 8 bits of their fp32 number: up with the probability that these say.

Random bits are those of docs/NUMERICS.md: a hash of (seed, step, element).
"""

from __future__ import annotations

import dataclasses
import math
from typing import Protocol

import torch
from torch import Tensor

GOLDEN = 0x9E3779B97F4A7C15
GRAINS = 65536.0  # units of a probability
NEAREST = GRAINS / 2  # with this draw, random rounding is rounding to nearest


# ---------------------------------------------------------------------------------- random bits --


def mix(x: int) -> int:
    """The finalizer of SplitMix64."""
    x &= (1 << 64) - 1
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & ((1 << 64) - 1)
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & ((1 << 64) - 1)
    return x ^ (x >> 31)


def step_key(seed: int, step: int) -> list[int]:
    """Both halves of the key of a step, as signed 32-bit numbers."""
    key = mix(mix(seed + GOLDEN) + step * GOLDEN)
    return [half - (half >> 31 << 32) for half in (key & 0xFFFFFFFF, key >> 32)]


def shifted(x: Tensor, bits: int) -> Tensor:
    """x >> bits, with x as an unsigned 32-bit number."""
    return (x >> bits) & ((1 << (32 - bits)) - 1)


@dataclasses.dataclass
class Draws:
    """Random numbers for each element: 16 bits for each moment, 8 for the master, as docs/NUMERICS.md defines them."""

    first: Tensor
    second: Tensor
    master: Tensor


def draw(like: Tensor, keys: Tensor) -> Draws:
    groups, elements = like.shape[1:]
    index = torch.arange(groups * elements, dtype=torch.int32, device=like.device).view(1, groups, elements)
    low, high = keys[:, 0].view(-1, 1, 1), keys[:, 1].view(-1, 1, 1)
    count = index + low
    x = count * 0x07BE90C7 + shifted(count, 16) * 0x3D73EB59
    x = x ^ high
    x = x ^ shifted(x, 13)
    x = x * 0x45AA351B
    x = x ^ shifted(x, 16)
    return Draws(x & 0xFFFF, shifted(x, 16), shifted(x * 0x6F4A955D, 24))


def goes_up(part: Tensor, whole: Tensor | float, random: Tensor | None) -> Tensor:
    """True with the probability part / whole; without random bits, true if that is above a half. Half a grain is
    added, so that probabilities which differ from 0 or 1 only by a rounding error act as 0 or 1."""
    grains = NEAREST if random is None else random.float() + 0.5
    return part * GRAINS > grains * whole


# -------------------------------------------------------------------------------------- moments --


class Moments(Protocol):
    """A way to store both moments. Without random bits they are rounded to nearest."""

    group: int

    def new(self, shape: torch.Size, device: torch.device) -> list[Tensor]: ...
    def decode(self, stored: list[Tensor], bound: Tensor) -> tuple[Tensor, Tensor]: ...
    def encode(self, first: Tensor, second: Tensor, bound: Tensor, draws: Draws | None) -> list[Tensor]: ...


class Fp32:
    group = 128

    def new(self, shape: torch.Size, device: torch.device) -> list[Tensor]:
        return [torch.zeros(shape, device=device) for _ in range(2)]

    def decode(self, stored: list[Tensor], bound: Tensor) -> tuple[Tensor, Tensor]:
        return stored[0], stored[1]

    def encode(self, first: Tensor, second: Tensor, bound: Tensor, draws: Draws | None) -> list[Tensor]:
        return [first, second]


class Bf16:
    group = 128

    def new(self, shape: torch.Size, device: torch.device) -> list[Tensor]:
        return [torch.zeros(shape, device=device, dtype=torch.bfloat16) for _ in range(2)]

    def decode(self, stored: list[Tensor], bound: Tensor) -> tuple[Tensor, Tensor]:
        return stored[0].float(), stored[1].float()

    def encode(self, first: Tensor, second: Tensor, bound: Tensor, draws: Draws | None) -> list[Tensor]:
        if draws is None:
            return [first.bfloat16(), second.bfloat16()]
        pairs = ((first, draws.first), (second, draws.second))
        return [((x.view(torch.int32) + bits) & -65536).view(torch.float32).bfloat16() for x, bits in pairs]


FP32, BF16 = Fp32(), Bf16()


class RatioLog:
    """exp_avg as a ratio and exp_avg_sq as a logarithm, as described at the top of this file. Without groups the
    lowest code is `lowest`, a power of two, and everything above the 255th code saturates too. `exact` says whose
    mean random rounding preserves: that of the number, of its logarithm, or of one divided by its root, which is
    what the update uses."""

    def __init__(
        self, octave: int, group: int | None = 128, linear: bool = False, lowest: int = -45, exact: str = "number"
    ) -> None:
        self.octave, self.grouped, self.linear, self.exact = octave, group is not None, linear, exact
        self.group = group or 128
        self.base = (lowest + 126) * octave  # without groups, the lattice number of code 1
        numbers = [2.0 ** (n / octave - 126) for n in range(254 * octave)]
        self.on_host = torch.tensor([*numbers, math.inf])
        self.on_device: dict[torch.device, Tensor] = {}

    def new(self, shape: torch.Size, device: torch.device) -> list[Tensor]:
        self.on_device[device] = self.on_host.to(device)
        codes = [torch.zeros(shape, device=device, dtype=kind) for kind in (torch.int8, torch.uint8)]
        scales = torch.zeros((*shape[:2], 1), device=device, dtype=torch.uint8)
        return [*codes, scales] if self.grouped else codes

    def bases(self, stored: list[Tensor]) -> Tensor | int:
        return (stored[2].int() - 1) * self.octave - 254 if self.grouped else self.base

    def numbers(self, codes: Tensor, bases: Tensor | int, lattice: Tensor) -> Tensor:
        number = (codes - 1 + bases).clamp(0, 254 * self.octave - 1)
        return torch.where(codes > 0, lattice[number], 0.0)

    def decode(self, stored: list[Tensor], bound: Tensor) -> tuple[Tensor, Tensor]:
        lattice = self.on_device[stored[0].device]
        second = self.numbers(stored[1].int(), self.bases(stored), lattice)
        code = stored[0].float()
        ratio = code / 127 if self.linear else code * code.abs() / 16129
        return ratio * bound * second.sqrt(), second

    def encode(self, first: Tensor, second: Tensor, bound: Tensor, draws: Draws | None) -> list[Tensor]:
        lattice = self.on_device[first.device]
        number = self.lattice_number(second, lattice, draws.second if draws else None)
        scales = []
        bases: Tensor | int = self.base
        if self.grouped:
            largest = number.amax(2, keepdim=True)
            scale = torch.where(largest < 0, 0, (largest + self.octave - 1) // self.octave + 1)
            bases = (scale - 1) * self.octave - 254
            scales = [scale.to(torch.uint8)]
        code = torch.where(number < 0, 0, (number - bases + 1).clamp(1, 255))
        root = self.numbers(code, bases, lattice).sqrt()
        ratio = self.ratio_code(first, root, bound, draws.first if draws else None)
        return [ratio, code.to(torch.uint8), *scales]

    def lattice_number(self, x: Tensor, lattice: Tensor, random: Tensor | None) -> Tensor:
        """The number of x on the lattice, -1 for 0. The logarithm gives only a first guess, which is corrected with
        the lattice, because devices compute different logarithms."""
        last = 254 * self.octave - 1
        positive = x.clamp(2.0**-126, torch.finfo(torch.float32).max)
        guess = ((positive.log2() + 126) * self.octave).int().clamp(0, last)
        guess = (guess - (lattice[guess] > positive).int()).clamp(min=0)
        guess = (guess + (lattice[guess + 1] <= positive).int()).clamp(max=last)
        low, high = lattice[guess], lattice[guess + 1]
        if self.exact == "inverse root":
            up = goes_up(low.rsqrt() - positive.rsqrt(), low.rsqrt() - high.rsqrt(), random)
        elif self.exact == "logarithm":
            up = goes_up((positive / low).log2() * self.octave, 1.0, random)
        else:
            up = goes_up(positive - low, high - low, random)
        return torch.where(x > 0, (guess + up.int()).clamp(max=last), -1)

    def ratio_code(self, first: Tensor, root: Tensor, bound: Tensor, random: Tensor | None) -> Tensor:
        ratio = torch.where(root > 0, first / root, 0.0) / bound
        size = ratio.abs().clamp(max=1.0)
        place = size * 127 if self.linear else (size * 16129).sqrt()
        whole = place.floor().clamp(max=126)
        if self.linear:
            up = goes_up(place - whole, 1.0, random)
        else:
            up = goes_up(size * 16129 - whole * whole, 2 * whole + 1, random)
        return ((whole + up.float()) * ratio.sign()).to(torch.int8)


class RatioBf16(RatioLog):
    """exp_avg as a ratio, exp_avg_sq in bf16, rounded at random."""

    def new(self, shape: torch.Size, device: torch.device) -> list[Tensor]:
        return [torch.zeros(shape, device=device, dtype=kind) for kind in (torch.int8, torch.bfloat16)]

    def decode(self, stored: list[Tensor], bound: Tensor) -> tuple[Tensor, Tensor]:
        second = stored[1].float()
        code = stored[0].float()
        return code * code.abs() / 16129 * bound * second.sqrt(), second

    def encode(self, first: Tensor, second: Tensor, bound: Tensor, draws: Draws | None) -> list[Tensor]:
        stored = BF16.encode(first, second, bound, draws)[1]
        ratio = self.ratio_code(first, stored.float().sqrt(), bound, draws.first if draws else None)
        return [ratio, stored]


class Bf16Log(RatioLog):
    """exp_avg in bf16, exp_avg_sq as a logarithm."""

    def new(self, shape: torch.Size, device: torch.device) -> list[Tensor]:
        codes, scales = super().new(shape, device)[1:]
        return [torch.zeros(shape, device=device, dtype=torch.bfloat16), codes, scales]

    def decode(self, stored: list[Tensor], bound: Tensor) -> tuple[Tensor, Tensor]:
        lattice = self.on_device[stored[0].device]
        return stored[0].float(), self.numbers(stored[1].int(), self.bases(stored), lattice)

    def encode(self, first: Tensor, second: Tensor, bound: Tensor, draws: Draws | None) -> list[Tensor]:
        return [BF16.encode(first, second, bound, draws)[0], *super().encode(first, second, bound, draws)[1:]]


class SoftsignRoot:
    """The codes of FlashOptim. Both moments are divided by the largest of 32, which is kept in fp16. exp_avg is
    stored in int8 after 2x / (1 + |x|), the root of exp_avg_sq in uint8; both are rounded to nearest. Small numbers
    become a root of 0. This is the reference, known to be bad if there are outliers."""

    group = 32

    def new(self, shape: torch.Size, device: torch.device) -> list[Tensor]:
        codes = [torch.zeros(shape, device=device, dtype=kind) for kind in (torch.int8, torch.uint8)]
        return codes + [torch.zeros((*shape[:2], 1), device=device, dtype=torch.float16) for _ in range(2)]

    def decode(self, stored: list[Tensor], bound: Tensor) -> tuple[Tensor, Tensor]:
        part = stored[0].float() / 127
        root = stored[1].float() / 255 * stored[3].float()
        return part / (2 - part.abs()) * stored[2].float(), root * root

    def encode(self, first: Tensor, second: Tensor, bound: Tensor, draws: Draws | None) -> list[Tensor]:
        root = second.sqrt()
        scales = [x.amax(2, keepdim=True).to(torch.float16) for x in (first.abs(), root)]
        parts = [torch.where(s > 0, x / s.float(), 0.0) for x, s in zip((first, root), scales, strict=True)]
        x = parts[0].clamp(-1, 1)
        code = (2 * x / (1 + x.abs()) * 127).round()
        return [code.to(torch.int8), (parts[1].clamp(max=1) * 255).round().to(torch.uint8), *scales]


# ---------------------------------------------------------------------------------------- forms --


@dataclasses.dataclass(frozen=True)
class Form:
    bytes: float  # of the state of an element: moments and master
    moments: Moments
    short_masters: bool = False
    nudge: int = 0  # if not 0, gradients are off by one part in a million; each number has other random bits
    misread: bool = False  # after a change of betas, ratios are decoded with the new bound


TEN = RatioLog(10)
FORMS: dict[str, Form] = {
    "fp32": Form(12, FP32),
    "fp32, nudged": Form(12, FP32, nudge=1),
    "fp32, nudged again": Form(12, FP32, nudge=2),
    "bf16": Form(6, BF16),
    "bf16, 24": Form(5, BF16, True),
    "ratio, log 10 of 128": Form(4 + 1 / 128, TEN),
    "ratio, log 10 of 128, 24": Form(3 + 1 / 128, TEN, True),
    "ratio, log 8 of 128, 24": Form(3 + 1 / 128, RatioLog(8), True),
    "ratio, log 12 of 128, 24": Form(3 + 1 / 128, RatioLog(12), True),
    "ratio, log 10 of 32, 24": Form(3 + 1 / 32, RatioLog(10, 32), True),
    "ratio, log 16 of 32, 24": Form(3 + 1 / 32, RatioLog(16, 32), True),
    "ratio, log 5 fixed, 24": Form(3, RatioLog(5, None), True),
    "linear ratio, log 10 of 128, 24": Form(3 + 1 / 128, RatioLog(10, linear=True), True),
    "ratio, log 10 of 128, 24, misread": Form(3 + 1 / 128, TEN, True, misread=True),
    "ratio, log 10 of 128 by logarithm, 24": Form(3 + 1 / 128, RatioLog(10, exact="logarithm"), True),
    "ratio, log 10 of 128 by inverse root, 24": Form(3 + 1 / 128, RatioLog(10, exact="inverse root"), True),
    "ratio, bf16, 24": Form(4, RatioBf16(128), True),
    "bf16, log 10 of 128, 24": Form(4 + 1 / 128, Bf16Log(10), True),
    "softsign, root of 32": Form(4 + 1 / 8, SoftsignRoot()),
}
THREE_BYTES = "ratio, log 10 of 128, 24"


def ratio_bound(beta1: float, beta2: float, form: Form) -> float:
    """The largest possible ratio of exp_avg to the root of exp_avg_sq, plus half a code."""
    bound = (1 - beta1) / math.sqrt((1 - beta2) * (1 - beta1 * beta1 / beta2))
    return bound * 2 ** (0.5 / form.moments.octave) if isinstance(form.moments, RatioLog) else bound


# --------------------------------------------------------------------------------------- update --


@dataclasses.dataclass
class Coefficients:
    """The coefficients of one step, computed in double."""

    lr: float
    beta1: float
    beta2: float
    step: int
    decay: float = 0.0
    eps: float = 1e-8

    def row(self, form: Form, before: tuple[float, float]) -> list[float]:
        """The row that `update` reads. `before` has the betas of the previous step."""
        now = ratio_bound(self.beta1, self.beta2, form)
        return [
            1 - self.beta1,
            self.beta2,
            1 - self.beta2,
            self.lr / (1 - self.beta1**self.step),
            1 / math.sqrt(1 - self.beta2**self.step),
            self.eps,
            self.lr * self.decay,
            now if form.misread else ratio_bound(*before, form),
            now,
            1e-6 if form.nudge else 0.0,
        ]


@dataclasses.dataclass
class State:
    """Arrays of the shape [runs, groups, elements of a group]. Codes are stored as codes; a 24-bit master is stored
    in fp32."""

    master: Tensor
    moments: list[Tensor]


def new_state(form: Form, master: Tensor) -> State:
    """`master` has the shape [runs, elements], with a multiple of 128 elements."""
    grouped = master.view(len(master), -1, form.moments.group)
    return State(grouped, form.moments.new(grouped.shape, master.device))


def shortened(master: Tensor, random: Tensor) -> Tensor:
    return ((master.view(torch.int32) + random) & -256).view(torch.float32)


def update(
    form: Form, master: Tensor, moments: list[Tensor], param: Tensor, grad: Tensor, factor: Tensor, row: Tensor,
    keys: Tensor,
) -> None:  # fmt: skip
    """Makes a step in place. `factor`, by which gradients are clipped, has one number for each run; `row` comes from
    Coefficients and is on the device."""
    draws = draw(master, keys)
    grad = grad.float() * factor.view(-1, 1, 1)
    # Converts a draw of 16 bits to a number with mean 0 and deviation 1.
    grad = grad * (1 + row[9] * ((draws.second.float() - 32767.5) * (math.sqrt(12) / 65536)))
    first, second = form.moments.decode(moments, row[7])
    first = first + (grad - first) * row[0]
    second = second * row[1] + grad * grad * row[2]
    change = first * row[3] / (second.sqrt() * row[4] + row[5])
    new = master - (change + master * row[6])
    if form.short_masters:
        new = shortened(new, draws.master)
    stored = form.moments.encode(first, second, row[8], draws)
    master.copy_(new)
    param.copy_(new)
    for old, now in zip(moments, stored, strict=True):
        old.copy_(now)


def ends(form: Form, moments: list[Tensor]) -> list[float]:
    """Fractions of the elements that have had a gradient: those with exp_avg at an end of its code, with exp_avg_sq
    at the lowest code, and, without groups, at the highest. They count codes, so they include numbers that really
    have these values."""
    if type(form.moments) is not RatioLog:
        return []
    alive = (moments[1] > 0).sum().clamp(min=1)
    places = [moments[0].abs() == 127, moments[1] == 1]
    if not form.moments.grouped:
        places.append(moments[1] == 255)
    return [float(place.sum() / alive) for place in places]
