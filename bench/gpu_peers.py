#!/usr/bin/env python3
"""hybridopt's AdamW with 0 to 100 % of its state on the host, beside torch's, torchao's and
DeepSpeed's, on one GPU and in one process: time of a step, memory of the GPU and of the host, and how
much of a step hides behind matrix products. Every contender steps the same params, once a round;
ratios pair the times of one round. Needs torch with CUDA and the package of bindings/python; peers
that cannot be imported or made are named and left out.

    HYBRIDOPT_LIBRARY=build/release/libhybridopt.so PYTHONPATH=bindings/python/src \\
        python3 bench/gpu_peers.py --json peers.json

At 2^29 elements all contenders live at the same time: 60 GiB of the GPU, 60 GiB of the host. Where they
do not fit they take turns in groups, and the first contender, the yardstick, is in every group.
"""

from __future__ import annotations

import argparse
import datetime
import gc
import json
import os
import platform
import statistics
import time
from collections.abc import Callable

# OpenMP threads that spin after their work would take CPU time from the contender that runs next.
os.environ["OMP_WAIT_POLICY"] = "passive"

import torch

import hybridopt

DEVICE = "cuda"
LAYERS = 32  # the number of params; contenders that copy each param by itself pay for each
HYPERPARAMETERS = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.01}
PRODUCT_SIDE = 16384  # side of the matrices that keep the GPU busy: 9 TFLOP for each product
GIB = 1 << 30


def numbers(elements: int, dtype: torch.dtype, seed: int, std: float) -> torch.Tensor:
    """Random numbers that are equal in every dtype, because they are rounded to bf16 first."""
    generator = torch.Generator(DEVICE).manual_seed(seed)
    exact = torch.empty(elements, device=DEVICE).normal_(std=std, generator=generator)
    return exact.bfloat16().to(dtype)


def make_params(elements: int, dtype: torch.dtype) -> list[torch.nn.Parameter]:
    """Small random params: a step of the size lr changes a bf16 param by more than rounding undoes."""
    params = []
    for layer in range(LAYERS):
        param = torch.nn.Parameter(numbers(elements // LAYERS, dtype, layer, 0.02))
        param.grad = numbers(elements // LAYERS, dtype, LAYERS + layer, 0.01)
        params.append(param)
    return params


def bytes_of(tensors: list[torch.Tensor], kind: str) -> int:
    return sum(t.numel() * t.element_size() for t in tensors if t.device.type == kind)


def states_of(optimizers: list[torch.optim.Optimizer]) -> list[torch.Tensor]:
    return [
        value
        for optimizer in optimizers
        for entry in optimizer.state.values()
        for value in entry.values()
        if isinstance(value, torch.Tensor)
    ]


class Contender:
    """A model on the GPU and its optimizer. tensors() returns the tensors that the optimizer holds in addition."""

    params: list[torch.nn.Parameter]
    has_masters = True  # without masters, bf16 params and moments are rounded at each step

    def step(self) -> None:
        raise NotImplementedError

    def tensors(self) -> list[torch.Tensor]:
        raise NotImplementedError

    def lanes(self) -> dict[str, float]:
        """Where the time of the last step has gone, for contenders that report it."""
        return {}

    def gpu_bytes(self) -> int:
        """The GPU memory that the optimizer holds in addition to params and gradients."""
        return bytes_of(self.tensors(), "cuda")

    def host_bytes(self) -> int:
        return bytes_of(self.tensors(), "cpu")


class Ours(Contender):
    def __init__(self, elements: int, offload_fraction: float, **options) -> None:
        self.params = make_params(elements, torch.bfloat16)
        self.optimizer = hybridopt.AdamW(
            self.params, offload_fraction=offload_fraction, **options, **HYPERPARAMETERS
        )

    def step(self) -> None:
        self.optimizer.step()

    def lanes(self) -> dict[str, float]:
        result = self.optimizer.last_step()
        names = ("total", "norm", "grads_down", "update", "params_up", "device_update", "stall")
        return {f"{name}_s": getattr(result, f"{name}_seconds") for name in names}

    def gpu_bytes(self) -> int:
        return self.optimizer.stats().device_bytes

    def host_bytes(self) -> int:
        return self.optimizer.stats().host_bytes


class TorchOnGpu(Contender):
    """fp32 params on the GPU: a step moves 28 bytes an element on the GPU, as many as the others move on the host."""

    def __init__(self, elements: int) -> None:
        self.params = make_params(elements, torch.float32)
        self.optimizer = torch.optim.AdamW(self.params, fused=True, **HYPERPARAMETERS)

    def step(self) -> None:
        self.optimizer.step()

    def tensors(self) -> list[torch.Tensor]:
        return states_of([self.optimizer])


class OnCpu(Contender):
    """Does what Megatron's HybridDeviceOptimizer does: for each parameter, the gradient is copied to pinned host
    memory, an optimizer on the CPU updates an fp32 copy there, and the result is copied back."""

    def __init__(self, elements: int, make: Callable) -> None:
        self.params = make_params(elements, torch.bfloat16)
        self.masters, self.grads = [], []
        for param in self.params:
            master = torch.nn.Parameter(pinned(param.shape, torch.float32).copy_(param.detach()))
            master.grad = pinned(param.shape, torch.float32)
            self.masters.append(master)
            self.grads.append(pinned(param.shape, param.dtype))
        self.optimizers = [make([master]) for master in self.masters]
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

    def tensors(self) -> list[torch.Tensor]:
        held = [*self.masters, *(master.grad for master in self.masters), *self.grads]
        return held + states_of(self.optimizers)


def pinned(shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, pin_memory=True)


def torch_on_cpu(params: list) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, fused=True, **HYPERPARAMETERS)


def deepspeed_on_cpu(params: list) -> torch.optim.Optimizer:
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    return DeepSpeedCPUAdam(params, adamw_mode=True, **HYPERPARAMETERS)


class TorchAo(Contender):
    """It steps params in their own dtype, and starts in hooks of the backward pass, so it gets a backward pass."""

    def __init__(self, elements: int, dtype: torch.dtype) -> None:
        from torchao.optim import CPUOffloadOptimizer

        self.params = make_params(elements, dtype)
        self.has_masters = dtype == torch.float32
        self.grads = [param.grad for param in self.params]
        for param in self.params:
            param.grad = None
        self.optimizer = CPUOffloadOptimizer(
            self.params, torch.optim.AdamW, fused=True, **HYPERPARAMETERS
        )

    def step(self) -> None:
        for param, grad in zip(self.params, self.grads):
            torch.dot(param, grad).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def tensors(self) -> list[torch.Tensor]:
        copies = list(self.optimizer.param_d2h_map.values())
        held = copies + [copy.grad for copy in copies]
        return held + states_of(list(self.optimizer.optim_dict.values()))


# All contenders: name, a function that makes one, and the bytes of the GPU and of the host that an element needs.
def contenders(elements: int) -> list[tuple[str, Callable[[], Contender], float, float]]:
    def ours(fraction: float, **options) -> tuple:
        words = ", split masters, bf16 moments" if options else ""
        name = f"hybridopt, {fraction:.0%} of the state offloaded{words}"
        make = lambda: Ours(elements, fraction, **options)  # noqa: E731
        return name, make, 4 + 12.5 * (1 - fraction), 12.5 * fraction + 0.5

    small = {"master_layout": "split", "state_dtype": torch.bfloat16}
    return [
        ours(1.0),
        ours(0.75),
        ours(0.5),
        ours(0.25),
        ours(0.0),
        ours(1.0, **small),
        ("torch fused on the GPU, fp32 params", lambda: TorchOnGpu(elements), 16, 0),
        ("torch fused on the CPU, pinned copies per param",
         lambda: OnCpu(elements, torch_on_cpu), 4.5, 18),
        ("DeepSpeed CPUAdam, the same copies",
         lambda: OnCpu(elements, deepspeed_on_cpu), 4.5, 18),
        ("torchao CPUOffloadOptimizer, fp32 params",
         lambda: TorchAo(elements, torch.float32), 12.5, 16),
        ("torchao CPUOffloadOptimizer, all in bf16",
         lambda: TorchAo(elements, torch.bfloat16), 6.5, 8),
    ]  # fmt: skip


def grouped(everyone: list[tuple], elements: int, apart: bool) -> list[list[tuple]]:
    """Groups of contenders that fit into memory together with the yardstick, in order; groups of one contender if
    `apart`."""
    gpu_room = 0.9 * torch.cuda.mem_get_info()[0] - 2 * GIB
    host_room = 0.8 * os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    yardstick, *rest = everyone
    if apart:
        return [[yardstick, each] for each in rest]
    groups: list[list[tuple]] = [[yardstick]]
    for each in rest:
        group = [*groups[-1], each]
        fits = all(
            sum(one[place] for one in group) * elements <= room
            for place, room in ((2, gpu_room), (3, host_room))
        )
        if not fits and len(groups[-1]) > 1:
            groups.append([yardstick])
        groups[-1].append(each)
    return groups


def timed(*works: Callable[[], None]) -> float:
    torch.cuda.synchronize()
    begin = time.perf_counter()
    for work in works:
        work()
    torch.cuda.synchronize()
    return time.perf_counter() - begin


def first_step(contender: Contender) -> list[torch.Tensor]:
    """Makes one step, checks that the params have changed, and returns the beginning of each."""
    begins = [slice(0, min(4096, param.numel())) for param in contender.params]
    before = [param.detach()[part].clone() for param, part in zip(contender.params, begins)]
    contender.step()
    torch.cuda.synchronize()
    after = [param.detach()[part].float() for param, part in zip(contender.params, begins)]
    for one, other in zip(before, after):
        assert not torch.equal(one.float(), other), "a step has changed nothing"
    return after


def check_same(name: str, params: list[torch.Tensor], others: list[torch.Tensor]) -> None:
    """Checks that two contenders computed the same, since others cannot be compared. bf16 params are rounded."""
    for one, other in zip(params, others):
        off = ((one - other).abs() - other.abs() * 2.0**-7).max().item()
        assert off < 2e-5, f"{name}: a step has led elsewhere, {off} apart"


class HostMemory:
    """Measures the speed of the host's memory while contenders run, because other programs of the machine use it
    too."""

    def __init__(self) -> None:
        self.source, self.target = (torch.ones(GIB // 4) for _ in range(2))
        self.gb_per_s: list[float] = []

    def measure(self) -> None:
        seconds = timed(lambda: self.target.copy_(self.source))
        self.gb_per_s.append(2 * GIB / seconds * 1e-9)

    @staticmethod
    def huge_share() -> float:
        """The fraction of this process's anonymous memory that is in huge pages."""
        with open("/proc/self/smaps_rollup", encoding="ascii") as file:
            kib = {line.split(":")[0]: int(line.split()[1]) for line in file if "kB" in line}
        return kib["AnonHugePages"] / kib["Anonymous"]


class Load:
    """Matrix products on a stream of their own, in place of the next forward pass."""

    def __init__(self) -> None:
        side = PRODUCT_SIDE
        self.a = torch.randn(side, side, dtype=torch.bfloat16, device=DEVICE)
        self.out = torch.empty_like(self.a)
        self.stream = torch.cuda.Stream()
        self.count = 1
        self()
        self.seconds_each = statistics.median(timed(self) for _ in range(3))

    def __call__(self) -> None:
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            for _ in range(self.count):
                torch.mm(self.a, self.a, out=self.out)

    def hidden_share(self, step: Callable[[], None], step_seconds: float) -> dict[str, float]:
        """The fraction of a step that is hidden by products that take a little longer than the step."""
        self.count = max(1, round(1.25 * step_seconds / self.seconds_each + 0.5))
        alone, products, both = timed(step), timed(self), timed(self, step)
        return {
            "step_s": alone,
            "products_s": products,
            "both_s": both,
            "hidden": 1 - (both - products) / alone,
        }


class Result:
    def __init__(self, name: str) -> None:
        self.name = name
        self.seconds: list[float] = []
        self.ratios: list[float] = []  # to the yardstick's time in the same round
        self.lanes: list[dict[str, float]] = []
        self.overlap: list[dict[str, float]] = []
        self.gpu_bytes = self.host_bytes = 0


def measure(
    group: list[tuple],
    rounds: int,
    overlap_rounds: int,
    reference: list[torch.Tensor],
    memory: HostMemory,
) -> list[Result]:
    alive: list[tuple[Contender, Result]] = []
    for name, make, _, _ in group:
        begin = time.perf_counter()
        try:
            contender = make()
            after = first_step(contender)
            if contender.has_masters:
                reference[:] = reference or after
                check_same(name, after, reference)
        except Exception as error:  # a peer that does not work on this machine must not end the run
            print(f"left out: {name}: {type(error).__name__}: {str(error)[:300]}", flush=True)
            contender = None
            gc.collect()
            torch.cuda.empty_cache()
            continue
        result = Result(name)
        result.gpu_bytes, result.host_bytes = contender.gpu_bytes(), contender.host_bytes()
        alive.append((contender, result))
        print(f"made in {time.perf_counter() - begin:5.1f} s: {name}", flush=True)
    for index in range(rounds):
        for place in range(len(alive)):
            contender, result = alive[(index + place) % len(alive)]
            time.sleep(0.02)
            result.seconds.append(timed(contender.step))
            result.lanes.append(contender.lanes())
        memory.measure()
        for _, result in alive:
            result.ratios.append(result.seconds[-1] / alive[0][1].seconds[-1])
    print(f"{memory.huge_share():.0%} of this process's memory is in huge pages", flush=True)
    load = Load()
    for _ in range(overlap_rounds):
        for contender, result in alive:
            time.sleep(0.02)
            step_seconds = statistics.median(result.seconds)
            result.overlap.append(load.hidden_share(contender.step, step_seconds))
    return [result for _, result in alive]


def quartiles(values: list[float]) -> tuple[float, float, float]:
    if len(values) == 1:
        return values[0], values[0], values[0]
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, middle, high


def print_table(results: list[Result], elements: int) -> None:
    heads = ("ms", "quartiles", "Mparam/s", "to 1st", "quartiles", "GPU GiB", "host GiB", "hidden")
    widths = (10, 20, 10, 8, 16, 9, 10, 8)
    space = max(len(result.name) for result in results)
    print("\n" + " " * space + "".join(f"{h:>{w}}" for h, w in zip(heads, widths)))
    for result in results:
        low, middle, high = (value * 1e3 for value in quartiles(result.seconds))
        least, ratio, most = quartiles(result.ratios)
        hidden = statistics.median(each["hidden"] for each in result.overlap)
        cells = (
            f"{middle:.1f}",
            f"{low:.1f} .. {high:.1f}",
            f"{elements / middle * 1e-3:.0f}",
            f"{ratio:.2f}",
            f"{least:.2f} .. {most:.2f}",
            f"{result.gpu_bytes / GIB:.2f}",
            f"{result.host_bytes / GIB:.2f}",
            f"{hidden:.0%}",
        )
        print(f"{result.name:{space}}" + "".join(f"{c:>{w}}" for c, w in zip(cells, widths)))
    for result in results:
        if result.lanes and result.lanes[0]:
            lanes = {
                name[:-2]: statistics.median(each[name] for each in result.lanes) * 1e3
                for name in result.lanes[0]
            }
            words = ", ".join(f"{name} {value:.1f}" for name, value in lanes.items() if value)
            print(f"{result.name:{space}}  ms: {words}")
    print(
        "GPU GiB, host GiB: of the optimizer, without params and gradients on the GPU. hidden: the "
        "part\nof a step that passes while products on another stream take no longer than without it."
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--elements", type=int, default=1 << 29)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--overlap-rounds", type=int, default=3)
    parser.add_argument("--apart", action="store_true", help="one at a time beside the yardstick")
    parser.add_argument("--json")
    arguments = parser.parse_args()
    elements = arguments.elements
    machine = {
        "gpu": torch.cuda.get_device_name(),
        "cpus": len(os.sched_getaffinity(0)),
        "host": platform.processor() or platform.machine(),
        "torch": torch.__version__,
        "torch_threads": torch.get_num_threads(),
        "hybridopt": hybridopt.abi.build_info(),
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="minutes"),
    }
    print("; ".join(f"{key} {value}" for key, value in machine.items()))
    print(f"{elements:,} elements in {LAYERS} params, {arguments.rounds} rounds", flush=True)
    results: dict[str, Result] = {}
    reference: list[torch.Tensor] = []
    memory = HostMemory()
    for group in grouped(contenders(elements), elements, arguments.apart):
        for result in measure(
            group, arguments.rounds, arguments.overlap_rounds, reference, memory
        ):
            results.setdefault(result.name, result)  # keeps the yardstick's first result
        gc.collect()
        torch.cuda.empty_cache()
    print_table(list(results.values()), elements)
    low, middle, high = quartiles(memory.gb_per_s)
    print(f"host memory, plain copies in each round: {middle:.1f} GB/s ({low:.1f} .. {high:.1f})")
    if arguments.json:
        report = {
            "machine": machine,
            "elements": elements,
            "host_copy_gb_per_s": memory.gb_per_s,
            "contenders": [vars(result) for result in results.values()],
        }
        with open(arguments.json, "w", encoding="utf-8") as file:
            json.dump(report, file, indent=2)


if __name__ == "__main__":
    main()
