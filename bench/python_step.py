#!/usr/bin/env python3
"""What step() of the Python package costs beyond the library's own work, over many small params: wall
time, the library's time for the same step, the CPU time of the calling thread (which is little disturbed
by other programs, and in which waiting for the library does not count), and torch's fused step. All
contenders step their own copy of the same params, in turns, and each figure is the median of the rounds.
--first measures the first step instead, from the constructor on, and the step after add_param_group().

    HYBRIDOPT_LIBRARY=build/release/libhybridopt.so PYTHONPATH=bindings/python/src \\
        python3 bench/python_step.py --params 10000 --elements 1024
"""

from __future__ import annotations

import argparse
import cProfile
import json
import os
import platform
import pstats
import statistics
import time
from collections.abc import Callable

# OpenMP threads that spin after their work would take CPU time from the contender that runs next.
os.environ["OMP_WAIT_POLICY"] = "passive"

import torch

import hybridopt

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


def make_params(count: int, elements: int, dtype: torch.dtype) -> list[torch.nn.Parameter]:
    generator = torch.Generator().manual_seed(1)
    params = []
    for _ in range(count):
        values = torch.empty(elements).normal_(std=0.02, generator=generator)
        param = torch.nn.Parameter(values.to(dtype))
        param.grad = torch.empty(elements).normal_(std=0.01, generator=generator).to(dtype)
        params.append(param)
    return params


def make_gradients_anew(params: list[torch.nn.Parameter]) -> None:
    """Replaces the gradients as zero_grad() and a backward pass do: by other tensors at other addresses."""
    made = [torch.empty_like(param).copy_(param.grad) for param in params]
    for param, grad in zip(params, made):
        param.grad = grad


class Contender:
    def __init__(self, name: str, optimizer: torch.optim.Optimizer, params: list) -> None:
        self.name = name
        self.optimizer = optimizer
        self.params = params
        self.wall_ms: list[float] = []
        self.library_ms: list[float] = []
        self.caller_ms: list[float] = []

    def step(self, anew: bool) -> None:
        if anew:
            make_gradients_anew(self.params)
        begin, begin_caller = time.perf_counter(), time.thread_time()
        self.optimizer.step()
        self.caller_ms.append(1e3 * (time.thread_time() - begin_caller))
        self.wall_ms.append(1e3 * (time.perf_counter() - begin))
        if isinstance(self.optimizer, hybridopt.OffloadOptimizer):
            self.library_ms.append(1e3 * self.optimizer.last_step().total_seconds)

    def row(self, count: int) -> dict[str, float | str]:
        row: dict[str, float | str] = {"name": self.name, "ms": statistics.median(self.wall_ms)}
        if self.library_ms:
            row["library_ms"] = statistics.median(self.library_ms)
            beyond = [wall - own for wall, own in zip(self.wall_ms, self.library_ms)]
            row["beyond_us_a_param"] = 1e3 * statistics.median(beyond) / count
            row["caller_us_a_param"] = 1e3 * statistics.median(self.caller_ms) / count
        return row


def measure(arguments: argparse.Namespace, anew: bool, look: bool = False) -> list[dict[str, float | str]]:
    dtype = DTYPES[arguments.dtype]
    made: dict[str, Callable[[list], torch.optim.Optimizer]] = {
        "hybridopt": lambda params: hybridopt.AdamW(params, lr=1e-4),
        "torch fused": lambda params: torch.optim.AdamW(params, lr=1e-4, fused=True),
    }
    contenders = []
    for name, make in made.items():
        params = make_params(arguments.params, arguments.elements, dtype)
        contenders.append(Contender(name, make(params), params))
    for contender in contenders:  # the first steps allocate memory
        contender.step(anew)
        if look:
            list(contender.optimizer.state.values())
        contender.step(anew)
        for times in (contender.wall_ms, contender.library_ms, contender.caller_ms):
            times.clear()
    for round in range(arguments.rounds):
        for index in range(len(contenders)):
            contenders[(round + index) % len(contenders)].step(anew)
    return [contender.row(arguments.params) for contender in contenders]


def measure_first(arguments: argparse.Namespace) -> list[dict[str, float | str]]:
    """Milliseconds until a new optimizer has made its first step, and of the step after a param was added."""
    made = {
        "hybridopt": lambda params: hybridopt.AdamW(params, lr=1e-4),
        "torch fused": lambda params: torch.optim.AdamW(params, lr=1e-4, fused=True),
    }
    params = make_params(arguments.params + 1, arguments.elements, DTYPES[arguments.dtype])
    rows: list[dict[str, float | str]] = []
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in made}
    for round in range(arguments.rounds + 1):  # the first round imports modules
        for name in sorted(made, reverse=round % 2 == 0):
            begin = time.perf_counter()
            optimizer = made[name](params[:-1])
            optimizer.step()
            first = time.perf_counter()
            optimizer.add_param_group({"params": params[-1:]})
            optimizer.step()
            times[name].append((first - begin, time.perf_counter() - first))
            del optimizer
    for name, all_times in times.items():
        first_ms, added_ms = (1e3 * statistics.median(each) for each in zip(*all_times[1:]))
        rows.append({"name": name, "first_ms": first_ms, "added_ms": added_ms})
    return rows


def profile(arguments: argparse.Namespace) -> None:
    """Prints where the calling thread spends the time of a step before which nothing has changed. That includes
    waiting for the library."""
    params = make_params(arguments.params, arguments.elements, DTYPES[arguments.dtype])
    optimizer = hybridopt.AdamW(params, lr=1e-4)
    for _ in range(3):
        optimizer.step()
    profiler = cProfile.Profile()
    profiler.enable()
    for _ in range(arguments.rounds):
        optimizer.step()
    profiler.disable()
    own = {where: times[2] for where, times in pstats.Stats(profiler).stats.items()}
    print(f"{arguments.params} params, {arguments.rounds} steps: us a param in each function itself")
    for (file, _, name), seconds in sorted(own.items(), key=lambda item: -item[1])[:10]:
        where = name if file == "~" else f"{os.path.basename(file)}, {name}"
        print(f"{1e6 * seconds / arguments.rounds / arguments.params:6.2f}  {where}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--params", type=int, default=10_000)
    parser.add_argument("--elements", type=int, default=1024, help="of each param")
    parser.add_argument("--dtype", choices=DTYPES, default="bf16")
    parser.add_argument("--rounds", type=int, default=21)
    parser.add_argument("--json", action="store_true", help="one JSON object instead of tables")
    parser.add_argument("--first", action="store_true", help="instead: the first step of an optimizer")
    parser.add_argument("--profile", action="store_true", help="instead: where the time goes, by function")
    arguments = parser.parse_args()
    if arguments.profile:
        profile(arguments)
        return
    results = {"first steps": measure_first(arguments)} if arguments.first else {
        "nothing has changed": measure(arguments, anew=False),
        "and state has been looked at": measure(arguments, anew=False, look=True),
        "gradients made anew": measure(arguments, anew=True),
    }
    if arguments.json:
        print(json.dumps({"arguments": vars(arguments), "torch": torch.__version__, **results}))
        return
    print(
        f"{arguments.params} params of {arguments.elements} elements, {arguments.dtype}, torch "
        f"{torch.__version__} with {torch.get_num_threads()} threads, {platform.machine()}"
    )
    if arguments.first:
        print(f"\n{'':32} {'constructor and first step, ms':>30} {'step after add_param_group, ms':>31}")
        for row in results["first steps"]:
            print(f"{row['name']:32} {row['first_ms']:30.1f} {row['added_ms']:31.1f}")
        return
    for title, rows in results.items():
        print(
            f"\n{title:32} {'step ms':>9} {'library ms':>11} {'beyond it, us a param':>23} "
            f"{'CPU of the caller, us a param':>31}"
        )
        for row in rows:
            own = f"{row['library_ms']:11.2f}" if "library_ms" in row else " " * 11
            beyond = f"{row['beyond_us_a_param']:23.2f}" if "library_ms" in row else ""
            caller = f"{row['caller_us_a_param']:31.2f}" if "library_ms" in row else ""
            print(f"{row['name']:32} {row['ms']:9.2f} {own} {beyond} {caller}")


if __name__ == "__main__":
    main()
