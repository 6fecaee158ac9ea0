#!/usr/bin/env python3
"""What a step of Muon takes on the CPU: hybridopt, torch.optim.Muon, whose products are of bf16 as ours are, and the same
formulas in fp32. For each shape all contenders step a matrix of their own with the same gradients, in turns. Each figure
is the least of the rounds, so other programs disturb it little; CPU seconds are those of all threads of a step.

    HYBRIDOPT_LIBRARY=build/release/libhybridopt.so PYTHONPATH=bindings/python/src python3 bench/muon_cpu.py
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import time
from collections.abc import Callable

# OpenMP threads that spin after their work would take CPU time from the contender that runs next.
os.environ["OMP_WAIT_POLICY"] = "passive"

import torch

import hybridopt

MUON = {"lr": 0.02, "momentum": 0.95, "weight_decay": 0.1}
COEFFICIENTS = (3.4445, -4.775, 2.0315)


class InFp32:
    """Muon with products of fp32, as short as torch can be asked for it."""

    def __init__(self, param: torch.nn.Parameter) -> None:
        self.param, self.momentum = param, torch.zeros_like(param)

    @torch.no_grad()
    def step(self) -> None:
        self.momentum.lerp_(self.param.grad, 1 - MUON["momentum"])
        x = self.param.grad.lerp(self.momentum, MUON["momentum"])
        tall = x.shape[0] > x.shape[1]
        x = x.T if tall else x
        x = x / x.norm().clamp(min=1e-7)
        a, b, c = COEFFICIENTS
        for _ in range(5):
            gram = x @ x.T
            x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
        scale = max(1, self.param.shape[0] / self.param.shape[1]) ** 0.5
        self.param.mul_(1 - MUON["lr"] * MUON["weight_decay"]).sub_(x.T if tall else x, alpha=MUON["lr"] * scale)


def contenders(threads: int) -> dict[str, Callable[[torch.nn.Parameter], object]]:
    made: dict[str, Callable[[torch.nn.Parameter], object]] = {
        "hybridopt": lambda param: hybridopt.Muon([param], threads=threads, **MUON),
        "torch, products of fp32": InFp32,
    }
    if hasattr(torch.optim, "Muon"):
        made["torch.optim.Muon"] = lambda param: torch.optim.Muon([param], **MUON)
    return made


def measure(rows: int, cols: int, threads: int, rounds: int) -> dict[str, dict[str, float]]:
    """Seconds, and CPU seconds, of a step of each contender."""
    generator = torch.Generator().manual_seed(1)
    start = torch.randn(rows, cols, generator=generator) / 50
    gradient = torch.randn(rows, cols, generator=generator) / 100
    optimizers = {}
    for name, make in contenders(threads).items():
        param = torch.nn.Parameter(start.clone())
        param.grad = gradient.clone()
        optimizers[name] = make(param)
        optimizers[name].step()  # takes memory
    least: dict[str, dict[str, float]] = {name: {"seconds": float("inf"), "cpu_seconds": float("inf")} for name in optimizers}
    for _ in range(rounds):
        for name, optimizer in optimizers.items():
            begin, begin_cpu = time.perf_counter(), time.process_time()
            optimizer.step()
            taken = {"seconds": time.perf_counter() - begin, "cpu_seconds": time.process_time() - begin_cpu}
            least[name] = {key: min(least[name][key], value) for key, value in taken.items()}
    return least


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", default=["1024x1024", "2048x512"], help="rows x columns (default: %(default)s)")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", action="store_true", help="prints one JSON object instead of a table")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    results = {}
    for shape in arguments.shapes:
        rows, cols = map(int, shape.split("x"))
        results[shape] = measure(rows, cols, arguments.threads, arguments.rounds)
    if arguments.json:
        machine = {"cpu": platform.processor() or platform.machine(), "torch": torch.__version__}
        print(json.dumps({"threads": arguments.threads, **machine, "results": results}))
        return
    print("| matrix | contender | ms | CPU ms | hybridopt takes, of its time | of its CPU time |\n|---|---|---|---|---|---|")
    for shape, result in results.items():
        ours = result["hybridopt"]
        for name, row in result.items():
            ratios = " | ".join(f"{ours[key] / row[key]:.2f}" for key in row)
            times = " | ".join(f"{1e3 * seconds:.1f}" for seconds in row.values())
            print(f"| {shape} | {name} | {times} | {ratios} |")


if __name__ == "__main__":
    main()
