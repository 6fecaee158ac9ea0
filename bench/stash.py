#!/usr/bin/env python3
"""What an activation stash saves and costs: time of a training iteration and peak memory of a GPT, without a stash,
with one at several fractions, and beside others who put activations aside.

    HYBRIDOPT_LIBRARY=build/release/libhybridopt.so PYTHONPATH=bindings/python/src \\
        python3 bench/stash.py --json stash.json

On one GPU, or with a tiny model on the CPU where there is no GPU, which shows that everything runs and measures
neither memory nor what hides. Contenders take turns, each with a fresh model of the same params. First each of
them trains with deterministic kernels, and losses and gradients are compared bit by bit with those of no stash.
Then the clock runs: the time is that of some iterations with one synchronisation at their end, divided, and the
median of several rounds. Peak memory is that of torch's allocator in these iterations. Who cannot be imported, or
has no place here, is named with the reason and left out; any other failure ends the run.

At the end, the link: how long prefetches take while an optimizer steps whose state streams through the device, and
how long these steps take. In the optimizer's own context the step gives way to prefetches (docs/STASH.md); a stash in
another context is not known to it, which is what there was without that. Where there is no GPU the simulated device
shows that it runs; two of them share no link.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import gc
import importlib.util
import json
import os
import statistics
import time
from collections.abc import Callable
from typing import Any

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # deterministic matrix products

import torch
from iteration import Unavailable, add_model_options, batches, make_model, parse_with_model
from torch import Tensor

import hybridopt
from hybridopt import abi

GIB = 1 << 30


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Measures what an activation stash saves and costs.")
    add_model_options(parser)
    parser.add_argument("--iterations", type=int, default=5, help="that are timed together")
    parser.add_argument("--rounds", type=int, default=3, help="of iterations; the median counts")
    parser.add_argument(
        "--fractions", type=float, nargs="*", default=[0.1, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0],
        help="of the activations' bytes that go, beside what the stash chooses by itself",
    )  # fmt: skip
    parser.add_argument("--budget", type=float, default=32.0, help="GiB of host memory of a stash, on a GPU")
    parser.add_argument("--no-check", action="store_true", help="do not compare bits")
    return parse_with_model(parser, world=1)


# ------------------------------------------------------------------------------------ contenders --


class Contender:
    """The contender without a stash. Subclasses return from around_forward() what the forward pass runs in."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.model = make_model(options)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=True)

    def around_forward(self) -> Any:
        return contextlib.nullcontext()

    def backward(self, batch: Tensor) -> Tensor:
        with self.around_forward():
            loss = self.model(batch)
        loss.backward()
        return loss.detach()

    def step(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()

    def restart(self) -> None:
        """Called when the kernels change."""

    def figures(self) -> dict[str, Any]:
        return {}

    def close(self) -> None:
        pass


class Ours(Contender):
    shared: hybridopt.ActivationStash | None = None  # shared, because pinning its memory takes long

    def __init__(self, options: argparse.Namespace, fraction: float | None, wraps: bool = False) -> None:
        super().__init__(options)
        if Ours.shared is None:
            on_cpu = options.device == "cpu"
            sizes = {"min_bytes": 256, "slab_bytes": 4096} if on_cpu else {}
            budget = 16 << 20 if on_cpu else int(options.budget * GIB)
            Ours.shared = hybridopt.ActivationStash(budget, device=options.device, **sizes)
        self.stash = Ours.shared
        self.stash.fraction = fraction
        self.before = self.stash.stats()
        self.wrapping = self.stash.wrap(self.model.blocks) if wraps else None

    def around_forward(self) -> Any:
        return self.stash if self.wrapping is None else contextlib.nullcontext()

    def restart(self) -> None:
        self.stash.measure_again()
        self.before = self.stash.stats()

    def figures(self) -> dict[str, Any]:
        stats, choice = self.stash.stats(), self.stash.choice()
        counts = {name: getattr(stats, name) - getattr(self.before, name)
                  for name in ("pushed_bytes", "returned_bytes", "refused_bytes", "waited_seconds")}  # fmt: skip
        names = ("eligible_bytes", "chosen_bytes", "kept_bytes", "forward_seconds", "backward_seconds")
        return {
            "stats": {**dataclasses.asdict(stats), **counts},
            "choice": None if choice is None else {name: getattr(choice, name) for name in names},
        }

    def close(self) -> None:
        if self.wrapping is not None:
            self.wrapping.remove()


class SaveOnCpu(Contender):
    def around_forward(self) -> Any:
        return torch.autograd.graph.save_on_cpu(pin_memory=torch.cuda.is_available())


class Torchtune(Contender):
    def __init__(self, options: argparse.Namespace) -> None:
        if importlib.util.find_spec("torchtune") is None:
            raise Unavailable("torchtune is not installed")
        if options.device != "cuda":
            raise Unavailable("it needs a GPU")
        super().__init__(options)

    def around_forward(self) -> Any:
        from torchtune.training import OffloadActivations

        return OffloadActivations()


def contenders(options: argparse.Namespace) -> dict[str, Callable[[], Contender]]:
    """All contenders by name, the yardstick first."""
    found: dict[str, Callable[[], Contender]] = {
        "no stash": lambda: Contender(options),
        "stash": lambda: Ours(options, None),
        "stash, wrapped blocks": lambda: Ours(options, None, wraps=True),
    }
    for fraction in options.fractions:
        found[f"stash, {fraction:.0%}"] = lambda fraction=fraction: Ours(options, fraction)
    found["torch save_on_cpu"] = lambda: SaveOnCpu(options)
    found["torchtune OffloadActivations"] = lambda: Torchtune(options)
    return found


# ------------------------------------------------------------------------------------- measuring --


def synchronize(options: argparse.Namespace) -> None:
    if options.device == "cuda":
        torch.cuda.synchronize()


def digest(tensors: list[Tensor]) -> list[int]:
    """Sums of all bits, weighted by their positions."""
    sums = []
    for tensor in tensors:
        integers = tensor.detach().reshape(-1).view(torch.int16).long()
        places = torch.arange(integers.numel(), device=integers.device) % 65521 + 1
        sums += [int(integers.sum()), int((integers * places).sum())]
    return sums


def bits_of(contender: Contender, options: argparse.Namespace) -> dict[str, Any]:
    """Losses and gradients of three iterations with deterministic kernels, and the peak of the first one."""
    torch.use_deterministic_algorithms(True)
    try:
        bits: list[int] = []
        peak_bytes = None
        if options.device == "cuda":
            torch.cuda.reset_peak_memory_stats()
        for batch in batches(options, 3):
            loss = contender.backward(batch)
            if options.device == "cuda" and peak_bytes is None:
                peak_bytes = torch.cuda.max_memory_allocated()
            gradients = [p.grad for p in contender.model.parameters() if p.grad is not None]
            bits += digest([loss, *gradients])
            contender.step()
        return {"bits": bits, "gpu_first_peak_bytes": peak_bytes}
    finally:
        torch.use_deterministic_algorithms(False)


def measure(contender: Contender, options: argparse.Namespace) -> dict[str, Any]:
    everything = batches(options, options.iterations)
    for batch in [*everything, *everything][:4]:
        contender.backward(batch)
        contender.step()
    rounds = []
    before_bytes = peak_bytes = None
    for _ in range(options.rounds):
        synchronize(options)
        if options.device == "cuda":
            torch.cuda.reset_peak_memory_stats()
            before_bytes = torch.cuda.memory_allocated()
        begin = time.perf_counter()
        for batch in everything:
            contender.backward(batch)
            contender.step()
        synchronize(options)
        rounds.append((time.perf_counter() - begin) / options.iterations)
        if options.device == "cuda":
            peak_bytes = torch.cuda.max_memory_allocated()
    return {
        "seconds": statistics.median(rounds),
        "rounds_seconds": rounds,
        "gpu_peak_bytes": peak_bytes,
        "gpu_before_forward_bytes": before_bytes,
        **contender.figures(),
    }


def run(make: Callable[[], Contender], options: argparse.Namespace) -> dict[str, Any]:
    try:
        contender = make()
    except Unavailable as why:
        return {"left_out": str(why)}
    result: dict[str, Any] = {}
    try:
        if not options.no_check:
            result.update(bits_of(contender, options))
            contender.restart()
        result.update(measure(contender, options))
        contender.close()
    except torch.OutOfMemoryError as error:
        result = {"left_out": f"the GPU is full: {str(error).splitlines()[0]}"}
    del contender
    gc.collect()
    if options.device == "cuda":
        torch.cuda.empty_cache()
    return result


# -------------------------------------------------------------------------------------- the link --


class Prefetches:
    """A stash in a context, with bytes that are fetched again and again."""

    def __init__(self, context: abi.Context, size_bytes: int) -> None:
        self._context, self._bytes = context, size_bytes
        self.stash = abi.Stash(context, budget_bytes=size_bytes)
        self._destination = context.alloc(size_bytes)
        self._stream = context.stream_create()
        self._ticket = self.stash.push(self._destination, size_bytes, self._stream)
        self.stash.wait(self._ticket)

    def seconds(self) -> float:
        """The seconds of one prefetch, until a stream that waits for it continues."""
        begin = time.perf_counter()
        self.stash.prefetch(self._ticket, self._destination, self._bytes, self._stream)
        self.stash.pop(self._ticket, self._stream, abi.OFFLOAD_STASH_KEEP)
        self._context.stream_synchronize(self._stream)
        return time.perf_counter() - begin


def stepping(context: abi.Context, elements: int) -> abi.Optimizer:
    """An optimizer of one bf16 param whose state is on the host and streams through the device."""
    optimizer = abi.Optimizer(context, algorithm=abi.OFFLOAD_ADAMW, host_executors=abi.OFFLOAD_EXECUTORS_STREAMED)
    group = optimizer.add_group(lr=1e-4, beta1=0.9, beta2=0.95, eps=1e-8)
    zeros = torch.zeros(elements, dtype=torch.bfloat16)
    addresses = [context.alloc(2 * elements) for _ in range(2)]
    for address in addresses:
        context.upload(address, zeros.data_ptr(), 2 * elements)
    param = abi.offload_param_t(
        name=b"weight", data=addresses[0], grad=addresses[1],
        dtype=abi.OFFLOAD_BF16, grad_dtype=abi.OFFLOAD_BF16, count=elements, group=group,
    )  # fmt: skip
    optimizer.add_params([param])
    optimizer.commit()
    return optimizer


def measure_link(options: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """The figures of a stash in the optimizer's context, and of a stash in another context."""
    on_gpu = options.device == "cuda"
    kind = {"device_kind": abi.OFFLOAD_DEVICE_CUDA if on_gpu else abi.OFFLOAD_DEVICE_SIM}
    elements, size_bytes = (256 << 20, 64 << 20) if on_gpu else (1 << 20, 4 << 20)
    results = {}
    with abi.Context(**kind) as own, abi.Context(**kind) as other, stepping(own, elements) as optimizer:

        def step_seconds(ticket: int) -> float:
            optimizer.wait(ticket)
            return float(optimizer.step_result(ticket).total_seconds)

        def has_ended(ticket: int) -> bool:
            try:
                optimizer.wait(ticket, timeout_ns=0)
            except abi.TimedOutError:
                return False
            return True

        step_seconds(optimizer.step())
        for name, context in {"in the step's context": own, "in another context": other}.items():
            prefetches = Prefetches(context, size_bytes)
            prefetches.seconds()
            alone = [prefetches.seconds() for _ in range(20)]
            steps_alone = [step_seconds(optimizer.step()) for _ in range(options.rounds)]
            before = optimizer.stats()
            beside, steps_beside = [], []
            for _ in range(options.rounds):
                ticket = optimizer.step()
                while not has_ended(ticket):
                    beside.append(prefetches.seconds())
                steps_beside.append(step_seconds(ticket))
            after = optimizer.stats()
            results[name] = {
                "prefetch_bytes": size_bytes,
                "prefetch_alone_seconds": statistics.median(alone),
                "prefetch_beside_seconds": statistics.median(beside) if beside else None,
                "prefetch_beside_seconds_max": max(beside, default=None),
                "prefetches_beside": len(beside),
                "step_alone_seconds": statistics.median(steps_alone),
                "step_beside_seconds": statistics.median(steps_beside),
                "gave_way_copies": after.gave_way_copies - before.gave_way_copies,
                "gave_way_seconds": after.gave_way_seconds - before.gave_way_seconds,
                "ahead_bytes": prefetches.stash.stats().ahead_bytes,
            }
            prefetches.stash.close()
    return results


def show_link(results: dict[str, dict[str, Any]]) -> None:
    first = next(iter(results.values()))
    print(f"prefetches of {first['prefetch_bytes'] >> 20} MiB beside steps whose state streams, ms, median (max):")
    for name, result in results.items():
        beside, most = (1e3 * (result[f"prefetch_beside_seconds{end}"] or 0.0) for end in ("", "_max"))
        print(
            f"{name:24} prefetch alone {1e3 * result['prefetch_alone_seconds']:.2f}, beside {beside:.2f} ({most:.2f}); "
            f"step alone {1e3 * result['step_alone_seconds']:.2f}, beside {1e3 * result['step_beside_seconds']:.2f}; "
            f"{result['gave_way_copies']} chunks gave way"
        )


# --------------------------------------------------------------------------------------- telling --


def row(name: str, result: dict[str, Any], yardstick: dict[str, Any]) -> str:
    seconds, first = result["seconds"], yardstick["seconds"]
    cells = f"{name:30} {seconds:9.4f} s {100 * (seconds / first - 1):+7.2f} %"
    if result["gpu_peak_bytes"] is not None:
        peak, others = result["gpu_peak_bytes"], yardstick["gpu_peak_bytes"]
        cells += f" {peak / GIB:8.2f} GiB {100 * (peak / others - 1):+7.2f} %"
    else:
        cells += f" {'-':>12} {'-':>9}"
    choice, stats = result.get("choice"), result.get("stats")
    if choice is not None and stats is not None:
        share = choice["chosen_bytes"] / max(choice["eligible_bytes"], 1)
        speed = f"{stats['down_bytes_per_second'] / GIB:6.1f} {stats['up_bytes_per_second'] / GIB:6.1f}"
        cells += f" {choice['chosen_bytes'] / GIB:8.3f} GiB {100 * share:6.1f} % {speed}"
    else:
        cells += f" {'-':>12} {'-':>8} {'-':>6} {'-':>6}"
    if "same_bits" in result:
        cells += "  same" if result["same_bits"] else "  OTHER"
    return cells


def main() -> None:
    options = parse()
    where = torch.cuda.get_device_name() if options.device == "cuda" else "the CPU, a tiny model"
    print(f"{where}, {os.cpu_count()} CPUs, torch {torch.__version__}, {options.tokens} tokens")
    print(
        f"{'':30} {'iteration':>11} {'':>9} {'peak':>12} {'':>9} {'to the host':>12} {'share':>8} "
        f"{'down, up GiB/s':>13}  bits"
    )
    results: dict[str, Any] = {}
    expected = None
    for name, make in contenders(options).items():
        result = results[name] = run(make, options)
        if "left_out" in result:
            print(f"{name}: left out, {result['left_out']}", flush=True)
            continue
        if "bits" in result:
            found = result.pop("bits")
            expected = expected or found
            result["same_bits"] = found == expected
        print(row(name, result, next(iter(results.values()))), flush=True)
    link = measure_link(options)
    show_link(link)
    if options.json:
        with open(options.json, "w", encoding="utf-8") as file:
            json.dump(
                {"options": vars(options), "device": where, "results": results, "link": link}, file, indent=1
            )
    wrong = [name for name, result in results.items() if not result.get("same_bits", True)]
    if wrong:
        raise SystemExit(f"FAILED: losses and gradients are not those of no stash: {', '.join(wrong)}")


if __name__ == "__main__":
    main()
