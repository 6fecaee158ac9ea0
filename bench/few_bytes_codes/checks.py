"""Checks, on any device, that the codes are as forms.py describes them. Each check yields sentences about what is
wrong; bench/few_bytes.py --check runs them all."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from few_bytes_codes.forms import (
    FORMS, FP32, THREE_BYTES, Bf16, Coefficients, Draws, Form, Moments, RatioLog, SoftsignRoot, draw, new_state,
    ratio_bound, shortened, step_key, update,
)  # fmt: skip
from torch import Tensor

BETAS = (0.9, 0.95)


def samples(moments: Moments, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Moments over 40 octaves, ratios up to the bound, and the bound. Every tenth element and the whole last group
    have never had a gradient."""
    generator = torch.Generator().manual_seed(1)
    form = Form(0, moments)
    bound = ratio_bound(*BETAS, form)
    shape = torch.Size((1, 64, moments.group))
    moments.new(shape, device)  # the lattice on this device
    octaves = 40 * torch.rand(64, generator=generator) - 40
    second = 2.0 ** octaves.view(1, -1, 1) * torch.rand(shape, generator=generator)
    second *= (torch.arange(second.numel()).view(shape) % 10 != 3) & (torch.arange(64).view(1, -1, 1) < 63)
    first = second.sqrt() * (2 * torch.rand(shape, generator=generator) - 1) * (bound * 0.9)
    return first.to(device), second.to(device), torch.tensor(bound, device=device)


def draws_of(like: Tensor, step: int) -> Draws:
    return draw(like, torch.tensor([step_key(7, step)], dtype=torch.int32, device=like.device))


def decoded_once(
    moments: Moments, first: Tensor, second: Tensor, bound: Tensor, draws: Draws | None
) -> tuple[Tensor, Tensor]:
    return moments.decode(moments.encode(first, second, bound, draws), bound)


# --------------------------------------------------------------------------------------- checks --


def bounded_errors(moments: RatioLog, device: torch.device) -> Iterator[str]:
    """The error of exp_avg_sq is at most one place of the lattice, within the range; that of exp_avg is at most one
    code of its ratio."""
    first, second, bound = samples(moments, device)
    code = 2 ** (1 / moments.octave) - 1
    for draws, part in ((draws_of(second, 1), 1.0), (None, 0.5)):
        found_first, found_second = decoded_once(moments, first, second, bound, draws)
        largest = second.amax(2, keepdim=True)
        lowest = largest * 2 ** (-254 / moments.octave) if moments.grouped else torch.full_like(second, 2.0**-45)
        inside = (second > lowest * (1 + code)) & (second < (largest * 2 if moments.grouped else 1))
        error = ((found_second - second) / second)[inside].abs().max()
        if not error <= part * code * (1 + 1e-5):
            yield f"exp_avg_sq is off by {error:.3g}, more than {part * code:.3g}"
        root = found_second.sqrt()
        ratio = first / root
        size = (ratio / bound).abs()
        width = 1 / 127 if moments.linear else (2 * size.sqrt() + 1 / 127) / 127
        off = ((found_first / root - ratio).abs() / (part * width * bound))[inside & (size <= 1)].max()
        if not off <= 1.001:
            yield f"exp_avg is off by {off:.3f} of the width of its code"


def zeros_stay(moments: RatioLog, device: torch.device) -> Iterator[str]:
    first, second, bound = samples(moments, device)
    stored = moments.encode(first, second, bound, draws_of(second, 2))
    if not torch.equal(stored[1] == 0, second == 0):
        yield "code 0 is not the number 0 and that alone"
    if moments.grouped and not torch.equal(stored[2][..., 0] == 0, (second == 0).all(2)):
        yield "a scale of 0 is not the group without gradients and that alone"
    fresh = moments.new(second.shape, device)
    if any(each.any() for each in moments.decode(fresh, bound)):
        yield "new state is not 0"


def unbiased(moments: Moments, device: torch.device) -> Iterator[str]:
    """The mean error over many draws and all numbers, each relative to its size, is less than five standard errors."""
    first, second, bound = samples(moments, device)
    inside = (second > second.amax(2, keepdim=True) * 2.0**-15) & (second > 2.0**-44)
    count = 64
    for name, x, index in (("exp_avg", first, 0), ("exp_avg_sq", second, 1)):
        total, squares = torch.zeros_like(x, dtype=torch.float64), torch.zeros_like(x, dtype=torch.float64)
        for step in range(count):
            off = decoded_once(moments, first, second, bound, draws_of(x, step))[index].double() - x
            total += off
            squares += off * off
        size = x.abs()[inside].double()
        standard_error = (squares[inside] / size.square()).sum().sqrt()
        errors = (total[inside] / size).sum() / standard_error
        if not errors.abs() < 5:
            yield f"the mean of {name} is off by {errors:.1f} standard errors"


def monotone(moments: Moments, device: torch.device) -> Iterator[str]:
    """With rounding to nearest, a larger number never has a smaller code among the same neighbours."""
    bound = torch.tensor(ratio_bound(*BETAS, Form(0, moments)), device=device)
    x = torch.linspace(-1, 1, 1 << 14, device=device)
    whole = torch.ones(len(x), moments.group, device=device)
    for name, column in (("exp_avg", 0), ("exp_avg_sq", 1)):
        first, second = whole.clone()[None], whole.clone()[None]
        if column:
            second[0, :, 0] = 2 ** (10 * x - 10)
        else:
            first[0, :, 0] = x * x * x
        found = decoded_once(moments, first, second, bound, None)[column][0, :, 0]
        if (found.diff() < 0).any():
            yield f"{name} is not monotone"


def every_code(moments: Moments, device: torch.device) -> list[Tensor]:
    """Every code of each moment with every scale, but only groups that encode can make: the largest exp_avg_sq of a
    group lies in the octave below its scale."""
    group = moments.group
    if isinstance(moments, Bf16):
        bits = torch.arange(1 << 15, dtype=torch.int32, device=device)[:0x7F80].view(1, -1, group)
        numbers = (bits << 16).view(torch.float32).bfloat16()
        return [-numbers, numbers]
    rows = 255 * (-(-255 // (group - 1)))
    first = torch.arange(rows * group, device=device).view(1, rows, group) % 255 - 127
    second = torch.arange(rows * group, device=device).view(1, rows, group) * 7 % 256
    second[..., 0] = 255
    scales = (torch.arange(rows, device=device) % 255 + 1).view(1, rows, 1)
    if isinstance(moments, SoftsignRoot):
        first[..., 0] = 127
        powers = (2.0 ** (scales % 40 - 24) * 1.37).half()
        return [first.to(torch.int8), second.to(torch.uint8), powers, powers]
    assert isinstance(moments, RatioLog)
    if moments.grouped:
        second[..., 0] = 255 - torch.arange(rows, device=device) // 255 % moments.octave
        second = torch.minimum(second, second[..., :1])
        second = torch.where(second - 1 + (scales - 1) * moments.octave - 254 < 0, 0, second)
        second = torch.where(second - 1 + (scales - 1) * moments.octave - 254 > 254 * moments.octave - 1, 0, second)
        scales = torch.where((second > 255 - moments.octave).any(2, keepdim=True), scales, 0)
        second = torch.where(scales > 0, second, 0)
    first = torch.where(second > 0, first, 0)
    codes = [first.to(torch.int8), second.to(torch.uint8)]
    return [*codes, scales.to(torch.uint8)] if moments.grouped else codes


def comes_back(moments: Moments, device: torch.device) -> Iterator[str]:
    """With rounding to nearest, encode(decode(code)) == code for every code and scale, so a checkpoint may hold fp32
    numbers. With random rounding a ratio becomes another code for about one draw in 2^16, because fp32 rounding
    makes its quotient inexact."""
    moments.new(torch.Size((1, 1, moments.group)), device)  # the lattice on this device
    bound = torch.tensor(ratio_bound(*BETAS, Form(0, moments)), device=device)
    stored = every_code(moments, device)
    again = moments.encode(*moments.decode(stored, bound), bound, None)
    if not all(torch.equal(a, b) for a, b in zip(stored, again, strict=True)):
        yield "encode(decode(code)) is not code for every code and scale"


def short_masters(device: torch.device) -> Iterator[str]:
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(1, 512, 128, generator=generator).to(device)
    count = 64
    mean = torch.zeros_like(x, dtype=torch.float64)
    for step in range(count):
        short = shortened(x, draws_of(x, step).master)
        if (short.view(torch.int32) & 255).any() or ((short - x).abs() > x.abs() * 2.0**-15).any():
            yield "a master of 24 bits has more bits, or is off by more than its last one"
        mean += short.double() / count
    off = (mean - x).mean() / (x.abs().double() * 2.0**-16 / math.sqrt(12 * count)).mean() * math.sqrt(x.numel())
    if not off.abs() < 5:
        yield f"the mean of masters is off by {off:.1f} standard errors"
    if not torch.equal(shortened(short, torch.zeros_like(x, dtype=torch.int32)), short):
        yield "a master of 24 bits does not come back"


def compiled_agrees(form: Form, device: torch.device) -> Iterator[str]:
    """The update compiled by torch.compile, compared with the eager one: all but a few codes agree; a fused
    multiplication and addition rounds only once."""
    states = []
    for run in (update, torch.compile(update, dynamic=False)):
        generator = torch.Generator().manual_seed(5)
        master = torch.randn(2, 4096, generator=generator).to(device)
        state = new_state(form, master)
        param = torch.zeros_like(state.master, dtype=torch.bfloat16)
        for step in range(1, 4):
            grad = torch.randn(param.shape, generator=generator).to(device)
            row = torch.tensor(Coefficients(1e-3, *BETAS, step).row(form, BETAS), device=device)
            keys = torch.tensor([step_key(seed, step) for seed in (1, 2)], dtype=torch.int32, device=device)
            run(form, state.master, state.moments, param, grad, torch.ones(2, device=device), row, keys)
        states.append([param, *form.moments.decode(state.moments, row[8])])
    for name, one, other in zip(("param", "exp_avg", "exp_avg_sq"), *states, strict=True):
        close = torch.isclose(one.float(), other.float(), rtol=1e-5, atol=1e-8).float().mean()
        if not close > 0.99:
            yield f"{name} of the compiled update agrees in {100 * close:.2f} % of the elements"


def check_codes(device: torch.device, compiled: bool) -> bool:
    good, seen = True, {id(FP32)}
    for name, form in FORMS.items():
        moments, wrong = form.moments, []
        if id(moments) in seen:
            continue
        seen.add(id(moments))
        if type(moments) is RatioLog:
            wrong += [*bounded_errors(moments, device), *zeros_stay(moments, device)]
        if not isinstance(moments, SoftsignRoot) and getattr(moments, "exact", "number") == "number":
            wrong += unbiased(moments, device)
        wrong += monotone(moments, device)
        if type(moments) in (Bf16, RatioLog, SoftsignRoot):  # the other forms consist of these
            wrong += comes_back(moments, device)
        if compiled and name == THREE_BYTES:  # only one form, because each takes seconds to compile
            wrong += compiled_agrees(form, device)
        print(f"{name}: {'; '.join(wrong) or 'good'}", flush=True)
        good &= not wrong
    wrong = list(short_masters(device))
    print(f"masters of 24 bits: {'; '.join(wrong) or 'good'}", flush=True)
    return good and not wrong
