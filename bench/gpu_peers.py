#!/usr/bin/env python3
"""One optimizer step of several kinds on one GPU, each over the same bf16 model, in turn; and how
much of an offloaded step hides behind matrix products. Needs torch with CUDA and the package of
bindings/python; peers that cannot be imported are named and left out.

    HYBRIDOPT_LIBRARY=build/release/libhybridopt.so PYTHONPATH=bindings/python/src \
        python3 bench/gpu_peers.py --elements 536870912 --json peers.json
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import time
from typing import Callable

import torch

import hybridopt

LAYERS = 32  # as many params; what is copied per parameter pays for each
HYPERPARAMETERS = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.01}


def make_params(elements: int, dtype: torch.dtype) -> list[torch.nn.Parameter]:
    each = elements // LAYERS
    params = []
    for layer in range(LAYERS):
        generator = torch.Generator("cuda").manual_seed(layer)
        param = torch.nn.Parameter(torch.ones(each, dtype=dtype, device="cuda"))
        param.grad = torch.empty_like(param).normal_(std=0.01, generator=generator)
        params.append(param)
    return params


class TorchOnGpu:
    """torch's fused AdamW with fp32 params on the GPU: 28 bytes a parameter move there too."""

    name = "torch AdamW fused, fp32 on the GPU"

    def __init__(self, elements: int) -> None:
        self.params = make_params(elements, torch.float32)
        self.optimizer = torch.optim.AdamW(self.params, fused=True, **HYPERPARAMETERS)

    def step(self) -> None:
        self.optimizer.step()


class TorchOnCpu:
    """What Megatron's HybridDeviceOptimizer does: per parameter, the gradient goes to pinned host
    memory, torch's fused AdamW updates an fp32 copy there, and the result comes back."""

    name = "torch AdamW fused on the CPU, pinned copies per parameter"

    def __init__(self, elements: int) -> None:
        self.params = make_params(elements, torch.bfloat16)
        self.masters, self.grads = [], []
        for param in self.params:
            master = torch.nn.Parameter(param.detach().float().cpu().pin_memory())
            master.grad = torch.empty_like(master, pin_memory=True)
            self.masters.append(master)
            self.grads.append(torch.empty(param.shape, dtype=param.dtype, pin_memory=True))
        self.optimizers = [
            torch.optim.AdamW([master], fused=True, **HYPERPARAMETERS) for master in self.masters
        ]
        self.stream = torch.cuda.Stream()

    def step(self) -> None:
        self.stream.wait_stream(torch.cuda.current_stream())
        landed = []
        with torch.cuda.stream(self.stream):
            for param, grad in zip(self.params, self.grads):
                grad.copy_(param.grad, non_blocking=True)
                landed.append(self.stream.record_event())
        for param, master, grad, event, optimizer in zip(
            self.params, self.masters, self.grads, landed, self.optimizers
        ):
            event.synchronize()
            master.grad.copy_(grad)
            optimizer.step()
            with torch.cuda.stream(self.stream):
                param.data.copy_(master.data, non_blocking=True)
        torch.cuda.current_stream().wait_stream(self.stream)


class Ours:
    def __init__(self, elements: int, offload_fraction: float) -> None:
        self.name = f"hybridopt AdamW, {offload_fraction:.0%} offloaded"
        self.params = make_params(elements, torch.bfloat16)
        self.optimizer = hybridopt.AdamW(
            self.params, offload_fraction=offload_fraction, **HYPERPARAMETERS
        )

    def step(self) -> None:
        self.optimizer.step()


class TorchAo:
    name = "torchao CPUOffloadOptimizer"

    def __init__(self, elements: int) -> None:
        from torchao.optim import CPUOffloadOptimizer

        self.params = make_params(elements, torch.bfloat16)
        for param in self.params:  # it listens to the backward pass, so it is given one
            param.grad = None
        self.optimizer = CPUOffloadOptimizer(
            self.params, torch.optim.AdamW, fused=True, **HYPERPARAMETERS
        )

    def step(self) -> None:
        torch.stack([param.sum() for param in self.params]).sum().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


class DeepSpeed:
    name = "DeepSpeed CPUAdam, copies per parameter"

    def __init__(self, elements: int) -> None:
        from deepspeed.ops.adam import DeepSpeedCPUAdam

        self.cpu = TorchOnCpu(elements)
        self.cpu.optimizers = [
            DeepSpeedCPUAdam([master], adamw_mode=True, **HYPERPARAMETERS)
            for master in self.cpu.masters
        ]
        self.params = self.cpu.params

    def step(self) -> None:
        self.cpu.step()


def timed(work: Callable[[], None]) -> float:
    torch.cuda.synchronize()
    begin = time.perf_counter()
    work()
    torch.cuda.synchronize()
    return time.perf_counter() - begin


def measure(make: Callable[[], object], rounds: int) -> tuple[str, list[float]]:
    contender = make()
    first = [param.detach().float().mean().item() for param in contender.params[:2]]
    contender.step()
    torch.cuda.synchronize()
    after = [param.detach().float().mean().item() for param in contender.params[:2]]
    assert first != after, f"{contender.name}: a step has changed nothing"
    times = [timed(contender.step) for _ in range(rounds)]
    return contender.name, times


def hidden(elements: int, rounds: int) -> dict[str, float]:
    """Products on one stream beside a step that starts when they do."""
    ours = Ours(elements, 1.0)
    a = torch.randn(8192, 8192, dtype=torch.bfloat16, device="cuda")
    out = torch.empty_like(a)
    ours.step()
    torch.cuda.synchronize()
    steps = statistics.median(timed(ours.step) for _ in range(rounds))
    once = statistics.median(timed(lambda: torch.mm(a, a, out=out)) for _ in range(rounds))
    products = max(1, round(steps / once))

    def load() -> None:
        for _ in range(products):
            torch.mm(a, a, out=out)

    other = torch.cuda.Stream()

    def both() -> None:
        with torch.cuda.stream(other):
            load()
        ours.step()

    loads = statistics.median(timed(load) for _ in range(rounds))
    boths = statistics.median(timed(both) for _ in range(rounds))
    return {
        "step_s": steps,
        "products_s": loads,
        "both_s": boths,
        "hidden_share_of_step": (loads + steps - boths) / steps,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--elements", type=int, default=1 << 29)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json")
    arguments = parser.parse_args()
    elements, rounds = arguments.elements, arguments.rounds

    makers: list[Callable[[], object]] = [lambda: TorchOnGpu(elements)]
    for fraction in (0.0, 0.25, 0.5, 1.0):
        makers.append(lambda fraction=fraction: Ours(elements, fraction))
    makers += [lambda: TorchOnCpu(elements), lambda: TorchAo(elements), lambda: DeepSpeed(elements)]
    results = {}
    print(f"{elements:,} parameters in {LAYERS} tensors; {torch.cuda.get_device_name()}, torch "
          f"{torch.__version__}, {torch.get_num_threads()} threads", flush=True)
    for make in makers:
        try:
            name, times = measure(make, rounds)
        except ImportError as error:
            print(f"not installed: {error}", flush=True)
            continue
        results[name] = times
        print(f"{name:60} {statistics.median(times) * 1e3:9.1f} ms  "
              f"{elements / statistics.median(times) * 1e-6:9.0f} Mparam/s", flush=True)
        gc.collect()
        torch.cuda.empty_cache()
    overlap = hidden(elements, rounds)
    print(f"hidden behind products on another stream: {overlap['hidden_share_of_step']:.0%} of a "
          f"step of {overlap['step_s'] * 1e3:.1f} ms", flush=True)
    if arguments.json:
        with open(arguments.json, "w", encoding="utf-8") as file:
            json.dump({"seconds": results, "overlap": overlap}, file, indent=2)


if __name__ == "__main__":
    main()
