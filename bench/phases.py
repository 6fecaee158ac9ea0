#!/usr/bin/env python3
"""How fast state leaves a GPU for a rollout and comes back, by how much of it is on the host.

    HYBRIDOPT_LIBRARY=build/release/libhybridopt.so PYTHONPATH=bindings/python/src \\
        python3 bench/phases.py                                   # 2.04 G params: 25 GB of state
    ... python3 bench/phases.py --layers 1 --width 64 --device cpu   # shows that it runs

Layers of a transformer in bf16 with fp32 state. Each phase is optimizer.offload(states=True) and, after
torch.cuda.empty_cache(), reload(states=True): device memory is freed and taken in them. GB/s count the state of the
device's share, 12 bytes a parameter. The first phase after the steps is left out: it touches memory for the first time.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time

import torch

import hybridopt

BYTES = 12  # bytes of fp32 state for each parameter


def seconds_of(call) -> float:
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin


def model(layers: int, width: int, device: str) -> list[torch.nn.Parameter]:
    shapes = [(3 * width, width), (width, width), (4 * width, width), (width, 4 * width)]
    weights = (torch.randn(shape, device=device, dtype=torch.bfloat16) for _ in range(layers) for shape in shapes)
    return [torch.nn.Parameter(weight * 0.02) for weight in weights]


def measure(params: list[torch.nn.Parameter], fraction: float, phases: int) -> tuple[float, float, float]:
    """The bytes of state on the device, the seconds to take it away, and the seconds to bring it back."""
    optimizer = hybridopt.AdamW(params, lr=1e-4, offload_fraction=fraction, movable=("params", "grads", "states"))
    for _ in range(2):
        for param in params:
            param.grad = torch.randn_like(param)
        optimizer.step()
    optimizer.synchronize()
    for param in params:
        param.grad = None
    times = []
    for _ in range(phases + 1):
        away = seconds_of(lambda: optimizer.offload(states=True))
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        times.append((away, seconds_of(lambda: optimizer.reload(states=True))))
    away, back = (statistics.median(column) for column in zip(*times[1:], strict=True))
    return BYTES * (1 - fraction) * sum(param.numel() for param in params), away, back


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=26)
    parser.add_argument("--width", type=int, default=2560)
    parser.add_argument("--fractions", type=float, nargs="+", default=[0.0, 0.25, 0.5, 0.75], help="on the host")
    parser.add_argument("--phases", type=int, default=3, help="of which the median counts")
    parser.add_argument("--device", default="cuda")
    options = parser.parse_args()
    print("| on the host | GB on the device | away, s | back, s | away, GB/s | back, GB/s |")
    print("|---|---|---|---|---|---|")
    for fraction in options.fractions:
        params = model(options.layers, options.width, options.device)
        moved, away, back = measure(params, fraction, options.phases)
        print(
            f"| {fraction:.2f} | {moved / 1e9:.2f} | {away:.3f} | {back:.3f} | {moved / away / 1e9:.1f} | "
            f"{moved / back / 1e9:.1f} |",
            flush=True,
        )
        del params
        gc.collect()


if __name__ == "__main__":
    main()
