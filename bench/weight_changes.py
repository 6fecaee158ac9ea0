#!/usr/bin/env python3
"""What weight_changes() costs: the seconds of a take, and those of a step with and without track_changes.

    HYBRIDOPT_LIBRARY=build/release/libhybridopt.so PYTHONPATH=bindings/python/src \\
        python3 bench/weight_changes.py                                  # 2.67 G params in bf16, state on the GPU
    ... python3 bench/weight_changes.py --fractions 0 0.5 1 --lr 1e-6    # and with state on the host
    ... python3 bench/weight_changes.py --layers 1 --width 64 --device cpu   # shows that it runs

Weights are those of a transformer's layers, drawn with a deviation of 0.02, and gradients are random, the same in every
step. The learning rate decides how many bf16 numbers a step changes; the table has the share. Steps with and without
track_changes take turns. A take is made after each step and acknowledged after it; `library` is the part of it that the library's own call takes, and `to the GPU` a take
that leaves indices and values there. Medians; the first take, which has all params whole, and the first steps are left
out.
"""

from __future__ import annotations

import argparse
import statistics
import time

import torch

import hybridopt
from hybridopt import abi


def seconds_of(call) -> float:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    begin = time.perf_counter()
    call()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - begin


def model(layers: int, width: int, device: str) -> list[torch.nn.Parameter]:
    shapes = [(3 * width, width), (width, width), (4 * width, width), (width, 4 * width)]
    weights = (torch.randn(shape, device=device, dtype=torch.bfloat16) for _ in range(layers) for shape in shapes)
    params = [torch.nn.Parameter(weight * 0.02) for weight in weights]
    for param in params:
        param.grad = torch.randn_like(param)
    return params


def copy_of(param: torch.nn.Parameter) -> torch.nn.Parameter:
    """The same weights in other memory, with the same gradient."""
    copy = torch.nn.Parameter(param.detach().clone())
    copy.grad = param.grad
    return copy


def step(optimizer) -> None:
    optimizer.step()
    optimizer.synchronize()


def steps_of(plain, tracking, count: int) -> tuple[float, float, float]:
    """Seconds of a step without and with track_changes, and the ratio. Both make the same steps in turns."""
    for optimizer in (plain, tracking):
        step(optimizer)
    pairs = [[seconds_of(lambda: step(each)) for each in (plain, tracking)] for _ in range(count)]
    return *map(statistics.median, zip(*pairs)), statistics.median(noted / alone for alone, noted in pairs)


class LibraryTime:
    """The seconds that the library's own calls take in a take of changes."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._call = abi.Optimizer.changes

    def __enter__(self) -> LibraryTime:
        def timed(handle, *args, **options):
            begin = time.perf_counter()
            taken = self._call(handle, *args, **options)
            self.seconds += time.perf_counter() - begin
            return taken

        abi.Optimizer.changes = timed
        return self

    def __exit__(self, *_) -> None:
        abi.Optimizer.changes = self._call


def takes_of(optimizer, count: int, **options) -> tuple[float, float, float]:
    """Seconds of a take, those of the library in it, and the share of elements that it has."""
    optimizer.weight_changes(**options).acknowledge()
    takes, library, shares = [], [], []
    for _ in range(count + 1):
        step(optimizer)
        patches = []
        with LibraryTime() as inside:
            takes.append(seconds_of(lambda: patches.append(optimizer.weight_changes(**options))))
        library.append(inside.seconds)
        elements = sum(torch.Size(change.shape).numel() for _, change in patches[0])
        shares.append(sum(change.values.numel() for _, change in patches[0]) / elements)
        patches[0].acknowledge()
    return statistics.median(takes[1:]), statistics.median(library[1:]), statistics.median(shares[1:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=34)
    parser.add_argument("--width", type=int, default=2560)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--lr", type=float, default=1e-6)
    parser.add_argument("--steps", type=int, default=7)
    parser.add_argument("--fractions", type=float, nargs="+", default=[0.0], help="shares of the state on the host")
    parser.add_argument("--state", choices=["fp32", "small"], default="fp32")
    options = parser.parse_args()
    small = {"master_layout": "split", "state_dtype": torch.bfloat16} if options.state == "small" else {}
    params = model(options.layers, options.width, options.device)
    others = [copy_of(param) for param in params]
    print(f"{sum(param.numel() for param in params) / 1e9:.3f} G params, {options.state} state, medians of {options.steps}")
    on_gpu = options.device != "cpu"
    print("on the host   step ms   with track_changes   ratio   take ms   library ms   to the GPU ms   changed %")
    for fraction in options.fractions:
        plain, tracking = (
            hybridopt.AdamW(each, lr=options.lr, offload_fraction=fraction, track_changes=tracked, **small)
            for each, tracked in ((params, False), (others, True))
        )
        alone, noted, ratio = steps_of(plain, tracking, options.steps)
        plain.close()
        take, library, share = takes_of(tracking, options.steps)
        to_gpu = takes_of(tracking, options.steps, on_device=True)[0] if on_gpu else float("nan")
        tracking.close()
        print(
            f"{fraction:11.2f} {alone * 1e3:9.2f} {noted * 1e3:20.2f} {ratio:7.3f} "
            f"{take * 1e3:9.2f} {library * 1e3:12.2f} {to_gpu * 1e3:15.2f} {share * 100:11.2f}",
            flush=True,
        )


if __name__ == "__main__":
    main()
