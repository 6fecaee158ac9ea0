#!/usr/bin/env python3
"""The time of a whole training iteration of a GPT, which is what users pay for: forward and backward
passes, step and what hides of it, with the optimizer's state in several places. Ratios are to the same
model with fp32 masters and state beside it, stepped by torch's fused AdamW. With --algorithm muon the matrices
of hidden layers have Muon, and all else AdamW, for every contender.

    HYBRIDOPT_LIBRARY=build/release/libhybridopt.so PYTHONPATH=bindings/python/src \\
        python3 bench/iteration.py --json iteration.json

On one GPU, on several with FSDP2 (torchrun --nproc-per-node 2 bench/iteration.py), or with a tiny model on
the CPU where there is no GPU. Contenders take turns, each with a fresh model. The time is that of some
iterations with one synchronisation at their end, divided. Who cannot be imported, or has no place here,
is named with the reason and left out; any other failure ends the run.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import gc
import importlib.util
import json
import os
import re
import time
from collections.abc import Callable, Iterator
from typing import Any

# OpenMP threads that spin after their work would take CPU time from the contender that runs next.
os.environ["OMP_WAIT_POLICY"] = "passive"

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

import hybridopt
from hybridopt.settings.options import DEFAULT_OPTIONS

HYPERPARAMETERS = {"lr": 1e-4, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
MUON = {"lr": 1e-3, "momentum": 0.95, "weight_decay": 0.1}
SMALL = {"master_layout": "split", "state_dtype": torch.bfloat16}
# On a GPU the model has 2.7 G params, on several 6.7 G; on the CPU it has the fewest that still run all of the code.
SIZES = {
    "cuda": {"width": 2560, "layers": 32, "heads": 20, "vocabulary": 50304, "context": 1024},
    "fsdp2": {"width": 4096, "layers": 32, "heads": 32, "vocabulary": 50304, "context": 1024},
    "cpu": {"width": 32, "layers": 2, "heads": 2, "vocabulary": 64, "context": 16},
}


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Times whole training iterations of a GPT.")
    add_model_options(parser)
    parser.add_argument("--algorithm", choices=("adamw", "muon"), default="adamw")
    parser.add_argument("--micro-batches", type=int, nargs="+", default=[1, 4], help="of an iteration")
    parser.add_argument("--iterations", type=int, default=3, help="that are timed; 2 before are not")
    parser.add_argument(
        "--fractions", type=float, nargs="+", default=[1.0, 0.5],
        help="of the state on the host; the first one without overlap too",
    )  # fmt: skip
    parser.add_argument(
        "--only", default="", help="contenders whose names match this regular expression, and the yardstick"
    )
    parser.add_argument("--max-grad-norm", type=float, default=1.0, help="early updates want one that is not reached")
    parser.add_argument("--early-gib", type=float, default=0.0, help="of host memory for early updates; 0: none")
    parser.add_argument("--lanes", help="where to write a picture of the lanes of hybridopt's steps")
    return parse_with_model(parser, int(os.environ.get("WORLD_SIZE", "1")))


def add_model_options(parser: argparse.ArgumentParser) -> None:
    for name in SIZES["cpu"]:
        parser.add_argument(f"--{name}", type=int)
    parser.add_argument("--tokens", type=int, help="of a rank's micro-batch; 8192 on a GPU")
    parser.add_argument("--device", choices=("cuda", "cpu"))
    parser.add_argument("--json", help="where to write all figures")


def parse_with_model(parser: argparse.ArgumentParser, world: int) -> argparse.Namespace:
    """Parses the options, and fills in the sizes of the model and the device where they were left out."""
    options = parser.parse_args()
    options.world = world
    options.device = options.device or ("cuda" if torch.cuda.is_available() else "cpu")
    sharded = world > 1 and options.device == "cuda"
    for name, size in SIZES["fsdp2" if sharded else options.device].items():
        if getattr(options, name) is None:
            setattr(options, name, size)
    if options.tokens is None:
        options.tokens = 8192 if options.device == "cuda" else 2 * options.context
    if options.tokens % options.context != 0:
        parser.error(f"--tokens {options.tokens} is no multiple of --context {options.context}")
    return options


# ----------------------------------------------------------------------------------------- model --


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        qkv = self.qkv(self.norm1(x)).view(batch, length, 3, self.heads, width // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        attended = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(functional.gelu(self.up(self.norm2(x))))


class Gpt(nn.Module):
    def __init__(self, sizes: argparse.Namespace) -> None:
        super().__init__()
        self.token = nn.Embedding(sizes.vocabulary, sizes.width)
        self.place = nn.Embedding(sizes.context, sizes.width)
        self.blocks = nn.ModuleList(Block(sizes.width, sizes.heads) for _ in range(sizes.layers))
        self.norm = nn.LayerNorm(sizes.width)
        self.head = nn.Linear(sizes.width, sizes.vocabulary, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        places = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.token(tokens) + self.place(places)
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        return functional.cross_entropy(logits.flatten(0, 1), tokens.flatten())


def make_model(options: argparse.Namespace, offload_policy: Any = None) -> nn.Module:
    """A model in bf16 with the same params for every contender."""
    torch.manual_seed(0)
    device = torch.device(options.device)
    with device:
        torch.set_default_dtype(torch.bfloat16)
        try:
            model = Gpt(options)
        finally:
            torch.set_default_dtype(torch.float32)
    for param in model.parameters():
        if param.dim() > 1:
            nn.init.normal_(param, std=0.02)
    if options.world > 1:
        from torch.distributed.fsdp import fully_shard

        policy = {} if offload_policy is None else {"offload_policy": offload_policy}
        for block in model.blocks:
            fully_shard(block, **policy)
        fully_shard(model, **policy)
    return model


# ------------------------------------------------------------------------------------ contenders --


class Backwards:
    """Measures how long backward passes take on the stream that they run on. Each pass runs inside a `with`.
    Measuring does not wait for a pass."""

    def __init__(self, on_gpu: bool) -> None:
        self._on_gpu = on_gpu
        self._marks: list[Any] = []

    def __enter__(self) -> None:
        self._mark()

    def __exit__(self, *_: Any) -> None:
        self._mark()

    def seconds(self) -> float:
        """The seconds of all passes so far, which must have ended."""
        pairs = zip(self._marks[0::2], self._marks[1::2])
        if self._on_gpu:
            return sum(begin.elapsed_time(end) for begin, end in pairs) * 1e-3
        return sum(end - begin for begin, end in pairs)

    def _mark(self) -> None:
        if self._on_gpu:
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self._marks.append(event)
        else:
            self._marks.append(time.perf_counter())


class Unavailable(Exception):
    """The reason why a contender cannot take part in this run."""


def local(tensor: Tensor) -> Tensor:
    return getattr(tensor, "_local_tensor", tensor)


class Contender:
    model: nn.Module
    optimizer: Any
    backwards: Backwards | contextlib.nullcontext[None] = contextlib.nullcontext()

    def backward(self, losses: list[Callable[[], Tensor]]) -> None:
        for loss in losses:
            value = loss()
            with self.backwards:
                value.backward()

    def step(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()

    def close(self) -> None:
        pass


class AllOnDevice(Contender):
    """fp32 masters and state beside the model, clipped and stepped by torch."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.model = make_model(options)
        self.max_grad_norm = options.max_grad_norm
        self.params = list(self.model.parameters())
        self.masters = [nn.Parameter(param.detach().float()) for param in self.params]
        self.optimizers = self.make_optimizers(options)

    def make_optimizers(self, options: argparse.Namespace) -> list[torch.optim.Optimizer]:
        if options.algorithm == "adamw":
            return [torch.optim.AdamW(self.masters, fused=True, **HYPERPARAMETERS)]
        if not hasattr(torch.optim, "Muon"):
            raise Unavailable(f"torch {torch.__version__} has no Muon")
        names = {name for name, _ in hybridopt.muon_groups(self.model)[0]["params"]}
        sorted_masters: dict[bool, list[nn.Parameter]] = {True: [], False: []}
        for (name, _), master in zip(self.model.named_parameters(), self.masters):
            sorted_masters[name in names].append(master)
        return [
            torch.optim.Muon(sorted_masters[True], **MUON),
            torch.optim.AdamW(sorted_masters[False], fused=True, **HYPERPARAMETERS),
        ]

    def step(self) -> None:
        clip(self.params, self.max_grad_norm)
        for param, master in zip(self.params, self.masters):
            master.grad = param.grad.float()
            param.grad = None
        for optimizer in self.optimizers:
            optimizer.step()
        for master in self.masters:
            master.grad = None
        torch._foreach_copy_([local(p.data) for p in self.params], [local(m.data) for m in self.masters])


def clip(params: list[nn.Parameter], max_grad_norm: float) -> None:
    nn.utils.clip_grad_norm_(params, max_grad_norm, foreach=True)


class Ours(Contender):
    def __init__(
        self, options: argparse.Namespace, overlap: bool, hooked: bool, **arguments: Any
    ) -> None:
        missing = [name for name in arguments if name not in DEFAULT_OPTIONS]
        if missing:
            raise Unavailable(f"this hybridopt has no option {missing[0]}")
        if options.device == "cpu" and arguments.get("host_executors") == "streamed":
            raise Unavailable("state streams through a device that has memory of its own")
        self.model = make_model(options)
        arguments |= {"max_grad_norm": options.max_grad_norm, "overlap": self.model if overlap else None}
        if options.algorithm == "muon":
            groups = hybridopt.muon_groups(self.model, adamw=HYPERPARAMETERS)
            self.optimizer = hybridopt.Muon(groups, **MUON, **arguments)
        else:
            self.optimizer = hybridopt.AdamW(self.model.named_parameters(), **HYPERPARAMETERS, **arguments)
        if hooked:
            self.optimizer.hook_gradients(micro_batches=None)

    def backward(self, losses: list[Callable[[], Tensor]]) -> None:
        super().backward(losses[:-1])
        with self.optimizer.last_micro_batch():
            super().backward(losses[-1:])

    def close(self) -> None:
        self.optimizer.close()


class CpuOffloadPolicy(Contender):
    """FSDP2's CPUOffloadPolicy: sharded params are on the host, where torch's fused AdamW steps them."""

    def __init__(self, options: argparse.Namespace) -> None:
        if options.algorithm != "adamw":
            raise Unavailable("it is measured with AdamW")
        if options.world == 1:
            raise Unavailable("FSDP2 needs several ranks: torchrun --nproc-per-node 2")
        if options.device != "cuda":
            raise Unavailable("params are on the CPU already")
        from torch.distributed.fsdp import CPUOffloadPolicy

        self.model = make_model(options, CPUOffloadPolicy())
        self.max_grad_norm = options.max_grad_norm
        self.optimizer = torch.optim.AdamW(self.model.parameters(), fused=True, **HYPERPARAMETERS)

    def step(self) -> None:
        clip(list(self.model.parameters()), self.max_grad_norm)
        super().step()


class TorchAo(Contender):
    """torchao's offloading optimizer starts each param's step in the backward pass; it has no masters and cannot
    clip."""

    def __init__(self, options: argparse.Namespace) -> None:
        need("torchao", options)
        from torchao.optim import CPUOffloadOptimizer

        self.model = make_model(options)
        self.optimizer = CPUOffloadOptimizer(
            self.model.parameters(), torch.optim.AdamW, fused=True, **HYPERPARAMETERS
        )


class Megatron(Contender):
    """Megatron's HybridDeviceOptimizer with all state on the host and overlapped copies."""

    def __init__(self, options: argparse.Namespace) -> None:
        need("megatron", options)
        from megatron.core.optimizer.cpu_offloading import HybridDeviceOptimizer

        self.model = make_model(options)
        self.max_grad_norm = options.max_grad_norm
        self.optimizer = HybridDeviceOptimizer(
            list(self.model.parameters()),
            offload_fraction=1.0,
            cpu_optimizer_cls=torch.optim.AdamW,
            gpu_optimizer_cls=torch.optim.AdamW,
            param_update_in_fp32=True,
            overlap_cpu_optimizer_d2h_h2d=True,
            fused=True,
            **HYPERPARAMETERS,
        )

    def step(self) -> None:
        clip(list(self.model.parameters()), self.max_grad_norm)
        super().step()


def need(package: str, options: argparse.Namespace) -> None:
    if importlib.util.find_spec(package) is None:
        raise Unavailable(f"{package} is not installed")
    if options.device != "cuda":
        raise Unavailable("it needs a GPU")
    if options.world > 1:
        raise Unavailable("it is measured on one GPU")
    if options.algorithm != "adamw":
        raise Unavailable("it is measured with AdamW")


def contenders(options: argparse.Namespace) -> dict[str, Callable[[], Contender]]:
    """All contenders by name, the yardstick first."""
    found: dict[str, Callable[[], Contender]] = {"all on the device": lambda: AllOnDevice(options)}

    def add(words: str, overlap: bool, hooked: bool, **arguments: Any) -> None:
        name = f"hybridopt {words}{', overlap' if overlap else ''}{', hooks' if hooked else ''}"
        found[name] = lambda: Ours(options, overlap, hooked, **arguments)

    for fraction in options.fractions:
        for layout, arguments in (("fp32 state", {}), ("split, bf16 moments", SMALL)):
            for overlap in (False, True) if fraction == options.fractions[0] else (True,):
                add(f"{fraction:.0%} {layout}", overlap, False, offload_fraction=fraction, **arguments)
    for layout, arguments in (("fp32 state", {}), ("split, bf16 moments", SMALL)):
        add(f"100% {layout}", True, True, offload_fraction=1.0, **arguments)
        # No CPU thread updates matrices beside a GPU.
        early_bytes = int(options.early_gib * (1 << 30)) if options.algorithm == "adamw" else 0
        if early_bytes > 0:
            add(f"100% {layout}, early updates", True, True, offload_fraction=1.0,
                early_update_bytes=early_bytes, **arguments)  # fmt: skip
    for executors in ("cpu", "streamed") if options.algorithm == "adamw" else ():
        add(f"100% fp32 state, {executors} only", True, False, offload_fraction=1.0,
            host_executors=executors)  # fmt: skip
    found["FSDP2 CPUOffloadPolicy, torch's AdamW"] = lambda: CpuOffloadPolicy(options)
    found["torchao CPUOffloadOptimizer, bf16, no clipping"] = lambda: TorchAo(options)
    found["Megatron HybridDeviceOptimizer"] = lambda: Megatron(options)
    yardstick = next(iter(found))
    return {n: make for n, make in found.items() if n == yardstick or re.search(options.only, n)}


# ------------------------------------------------------------------------------------- measuring --


def synchronize(options: argparse.Namespace) -> None:
    if options.device == "cuda":
        torch.cuda.synchronize()
    if options.world > 1:
        dist.barrier()


def batches(options: argparse.Namespace, count: int) -> list[Tensor]:
    rank = dist.get_rank() if options.world > 1 else 0
    generator = torch.Generator(options.device).manual_seed(1 + rank)
    shape = (options.tokens // options.context, options.context)
    return [
        torch.randint(options.vocabulary, shape, generator=generator, device=options.device)
        for _ in range(count)
    ]


def iterate(contender: Contender, micro_batches: list[Tensor], count: int) -> None:
    for _ in range(count):
        contender.backward([lambda batch=batch: contender.model(batch) for batch in micro_batches])
        contender.step()


def first_changes(contender: Contender, micro_batches: list[Tensor], options: argparse.Namespace) -> None:
    """Makes the first iterations, and fails if they change no params: such a contender cannot be compared."""
    before = [local(p.detach()).flatten()[:64].clone() for p in contender.model.parameters()]
    iterate(contender, micro_batches, 2)
    if isinstance(contender, Ours):
        contender.optimizer.synchronize()
    synchronize(options)
    after = [local(p.detach()).flatten()[:64] for p in contender.model.parameters()]
    changed = [not torch.equal(one, other) for one, other in zip(before, after) if one.numel() > 0]
    if not any(changed):
        raise AssertionError("steps have changed nothing")


def measure(contender: Contender, options: argparse.Namespace) -> dict[str, Any]:
    """Seconds of an iteration and of its backward passes, for each number of micro-batches."""
    everything = batches(options, max(options.micro_batches))
    first_changes(contender, everything[:1], options)
    seconds, backward_seconds = {}, {}
    for count in options.micro_batches:
        synchronize(options)
        backwards = contender.backwards = Backwards(options.device == "cuda")
        begin = time.perf_counter()
        iterate(contender, everything[:count], options.iterations)
        synchronize(options)
        if isinstance(contender, Ours):  # the last step is part of the time
            contender.optimizer.synchronize()
        seconds[count] = (time.perf_counter() - begin) / options.iterations
        backward_seconds[count] = backwards.seconds() / options.iterations
    result: dict[str, Any] = {"seconds": seconds, "backward_seconds": backward_seconds}
    if isinstance(contender, Ours):
        result["last_step"] = dataclasses.asdict(contender.optimizer.last_step())
        if options.lanes:
            contender.optimizer.plot_timeline(options.lanes)
    if options.device == "cuda":
        result["gpu_peak_bytes"] = torch.cuda.max_memory_allocated()
    return result


def run(name: str, make: Callable[[], Contender], options: argparse.Namespace) -> dict[str, Any]:
    if options.device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    try:
        contender = make()
    except Unavailable as why:
        say(f"{name}: left out, {why}")
        return {"left_out": str(why)}
    result = measure(contender, options)
    contender.close()
    del contender
    gc.collect()
    if options.device == "cuda":
        torch.cuda.empty_cache()
    return result


# --------------------------------------------------------------------------------------- telling --


def say(text: str) -> None:
    if not dist.is_initialized() or dist.get_rank() == 0:
        print(text, flush=True)


def row(name: str, result: dict[str, Any], yardstick: dict[str, Any]) -> str:
    cells = [
        f"{seconds:9.4f} s {seconds / yardstick[what][count]:5.2f}x"
        for what in ("seconds", "backward_seconds")
        for count, seconds in result[what].items()
    ]
    return f"{name:55}" + "".join(f"{cell:>20}" for cell in cells)


@contextlib.contextmanager
def ranks(options: argparse.Namespace) -> Iterator[None]:
    if options.device == "cuda":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    if options.world == 1:
        yield
        return
    # CPUOffloadPolicy clips tensors on the CPU.
    dist.init_process_group("cpu:gloo,cuda:nccl" if options.device == "cuda" else "gloo")
    try:
        yield
    finally:
        dist.destroy_process_group()


def main() -> None:
    options = parse()
    with ranks(options):
        where = torch.cuda.get_device_name() if options.device == "cuda" else "the CPU"
        say(f"{options.world} x {where}, {os.cpu_count()} CPUs, torch {torch.__version__}")
        counts = [f"{count * options.tokens} tokens" for count in options.micro_batches]
        heads = [*counts, *(f"backward, {count.split()[0]}" for count in counts)]
        say(f"{'iteration, a rank has':55}" + "".join(f"{head:>20}" for head in heads))
        results: dict[str, Any] = {}
        for name, make in contenders(options).items():
            results[name] = run(name, make, options)
            if "seconds" in results[name]:
                say(row(name, results[name], next(iter(results.values()))))
        if options.json and (options.world == 1 or dist.get_rank() == 0):
            with open(options.json, "w", encoding="utf-8") as file:
                json.dump({"options": vars(options), "device": where, "results": results}, file, indent=1)


if __name__ == "__main__":
    main()
