"""hybridopt against torch's and DeepSpeed's AdamW on the CPU, in one process. Every contender runs
once a round and each round starts with another one, so that ratios within a round pair times that met
the same machine. docs/PERFORMANCE.md says how it is measured. Started by scripts/bench --peers."""

from __future__ import annotations

import argparse
import ctypes
import datetime
import itertools
import json
import mmap
import os
import platform
import statistics
import sys
import time

# OpenMP threads that spin after their work would take CPU time from the contender that runs next.
os.environ["OMP_WAIT_POLICY"] = "passive"

import numpy
import torch

from hybridopt import abi

LR, BETAS, EPS, DECAY, SCALE = 1e-3, (0.9, 0.999), 1e-8, 0.01, 128.0
HUGE_PAGE = 2 << 20
STAGGER = (96 << 10) + 21 * 64
staggers = itertools.cycle(range(8))


def mapped(elements: int, dtype: torch.dtype, value: float) -> torch.Tensor:
    """A tensor in memory of its own that asks for huge pages, as the library's state does. No two tensors of a
    contender start in the same bank of the memory, because sharing banks would slow a contender."""
    size = torch.empty(0, dtype=dtype).element_size() * elements
    pages = mmap.mmap(-1, size + 2 * HUGE_PAGE)
    address = ctypes.addressof(ctypes.c_char.from_buffer(pages))
    begin = -address % HUGE_PAGE
    pages.madvise(mmap.MADV_HUGEPAGE, begin, (size + HUGE_PAGE) // mmap.PAGESIZE * mmap.PAGESIZE)
    begin += next(staggers) * STAGGER
    tensor = torch.frombuffer(memoryview(pages)[begin : begin + size], dtype=dtype)
    return tensor.fill_(value)


def gradients(elements: int, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    grads = mapped(elements, dtype, 0)
    for begin in range(0, elements, 1 << 20):
        part = grads[begin : begin + (1 << 20)]
        noise = torch.randn(part.numel(), generator=generator) * 0.01 * SCALE
        part.copy_(noise)
    return grads


class Ours:
    """The library's AdamW over one bf16 param; `layout` has options of the optimizer."""

    def __init__(self, context: abi.Context, grads: torch.Tensor, step: dict, **layout: int) -> None:
        elements = grads.numel()
        self.param = mapped(elements, torch.bfloat16, 1)
        self.grads = grads
        self.step = step
        self.optimizer = abi.Optimizer(context, algorithm=abi.OFFLOAD_ADAMW, **layout)
        group = self.optimizer.add_group(
            lr=LR, beta1=BETAS[0], beta2=BETAS[1], eps=EPS, weight_decay=DECAY
        )
        fp32 = grads.dtype == torch.float32
        param = abi.offload_param_t(
            name=b"param", group=group, dtype=abi.OFFLOAD_BF16,
            grad_dtype=abi.OFFLOAD_FP32 if fp32 else abi.OFFLOAD_BF16,
            data=self.param.data_ptr(), grad=grads.data_ptr(), count=elements,
        )
        self.optimizer.add_params([param])
        self.optimizer.commit()

    def __call__(self) -> None:
        self.optimizer.step(grad_scale=SCALE, **self.step)
        self.optimizer.wait()


class Peer:
    """Another library's AdamW over fp32 arrays; with `path` it also does the passes that bf16 training does before
    and after it."""

    def __init__(self, make, elements: int, grads: torch.Tensor, path: bool) -> None:
        self.param = torch.nn.Parameter(mapped(elements, torch.float32, 1))
        self.param.grad = grads
        self.optimizer = make([self.param])
        state = self.optimizer.state[self.param]
        deepspeed = hasattr(self.optimizer, "ds_opt_adam")
        state["step"] = 0 if deepspeed else torch.tensor(0.0)
        for name in ("exp_avg", "exp_avg_sq"):
            state[name] = mapped(elements, torch.float32, 0)
        self.low = mapped(elements, torch.bfloat16, 1) if path else None

    @torch.no_grad()
    def __call__(self) -> None:
        if self.low is not None:
            self.param.grad.mul_(1.0)  # the unscaling pass; by 1, so that all rounds are alike
        self.optimizer.step()
        if self.low is not None:
            self.low.copy_(self.param)


class Memory:
    """The ceiling: moves the same bytes as AdamW with fp32 state, with almost no arithmetic."""

    def __init__(self, library: ctypes.CDLL, threads: int, grads: torch.Tensor, streamed: bool):
        elements = grads.numel()
        self.library, self.streamed, self.grads = library, streamed, grads
        self.team = library.peers_team(threads, threads <= len(os.sched_getaffinity(0)))
        self.param = mapped(elements, torch.bfloat16, 1)
        self.state = [mapped(elements, torch.float32, 0) for _ in range(3)]

    def __call__(self) -> None:
        pointers = [tensor.data_ptr() for tensor in (self.grads, self.param, *self.state)]
        self.library.peers_memory(
            self.team, self.streamed, *map(ctypes.c_void_p, pointers),
            ctypes.c_uint64(self.grads.numel()),
        )

    def close(self) -> None:
        self.library.peers_team_free(self.team)


def deepspeed_adam():
    """Returns DeepSpeedCPUAdam, which compiles itself on first use, or None and the reason why it cannot be used."""
    try:
        from deepspeed.ops.adam import DeepSpeedCPUAdam

        DeepSpeedCPUAdam([torch.nn.Parameter(torch.zeros(16))], adamw_mode=True)
        return DeepSpeedCPUAdam, ""
    except Exception as error:  # noqa: BLE001: after any error the others are still measured
        return None, f"{type(error).__name__}: {error}"


SPLIT = {"master_layout": abi.OFFLOAD_MASTER_SPLIT}
BF16 = {"moment_dtype": abi.OFFLOAD_BF16}
FINITE = {"flags": abi.OFFLOAD_STEP_ASSUME_FINITE}
NAMES = {
    "memory_cached": ("memory only, param through the caches", 28),
    "memory_streamed": ("memory only, param past the caches", 28),
    "adamw28": ("hybridopt, fp32 state", 28),
    "adamw28_checked": (".. finite check", 30),
    "adamw28_clipped": (".. clipped", 30),
    "split26": ("hybridopt, split master", 26),
    "bf16_20": ("hybridopt, bf16 moments", 20),
    "bf16_20_nearest": (".. rounded to nearest", 20),
    "split18": ("hybridopt, both", 18),
    "deepspeed_kernel": ("DeepSpeedCPUAdam, kernel alone", 28),
    "deepspeed_bf16_path": (".. unscale, step, cast", 42),
    "torch_fused": ("torch AdamW fused, alone", 28),
    "torch_fused_bf16_path": (".. unscale, step, cast", 42),
    "torch_foreach": ("torch AdamW foreach, alone", 0),
    "torch_single": ("torch AdamW single, alone", 0),
}


def contenders(elements: int, threads: int, dtype: torch.dtype, loops: ctypes.CDLL, deepspeed):
    """The contenders by name: each is called to be timed, and closed afterwards."""
    context = abi.Context(threads=threads)
    grads = gradients(elements, dtype)
    wide = grads if dtype == torch.float32 else gradients(elements, torch.float32)
    found = {}
    if dtype == torch.bfloat16:
        found["memory_cached"] = Memory(loops, threads, grads, False)
        found["memory_streamed"] = Memory(loops, threads, grads, True)
    found["adamw28"] = Ours(context, grads, FINITE)
    found["adamw28_checked"] = Ours(context, grads, {})
    found["adamw28_clipped"] = Ours(context, grads, {"grad_norm_max": 1.0})
    found["split26"] = Ours(context, grads, FINITE, **SPLIT)
    found["bf16_20"] = Ours(context, grads, FINITE, **BF16)
    found["bf16_20_nearest"] = Ours(
        context, grads, FINITE, moment_rounding=abi.OFFLOAD_ROUND_NEAREST, **BF16
    )
    found["split18"] = Ours(context, grads, FINITE, **SPLIT, **BF16)

    def torch_adamw(**which):
        return lambda params: torch.optim.AdamW(
            params, lr=LR, betas=BETAS, eps=EPS, weight_decay=DECAY, **which
        )

    if deepspeed is not None:
        make = lambda params: deepspeed(  # noqa: E731
            params, lr=LR, betas=BETAS, eps=EPS, weight_decay=DECAY, adamw_mode=True
        )
        found["deepspeed_kernel"] = Peer(make, elements, wide, False)
        found["deepspeed_bf16_path"] = Peer(make, elements, wide, True)
    found["torch_fused"] = Peer(torch_adamw(fused=True), elements, wide, False)
    found["torch_fused_bf16_path"] = Peer(torch_adamw(fused=True), elements, wide, True)
    found["torch_foreach"] = Peer(torch_adamw(foreach=True), elements, wide, False)
    found["torch_single"] = Peer(torch_adamw(foreach=False), elements, wide, False)
    return found, context


def measure(found: dict, rounds: int, title: str) -> dict[str, list[float]]:
    names = list(found)
    times: dict[str, list[float]] = {name: [] for name in names}
    for name in names:
        found[name]()
    for turn in range(rounds):
        for i in range(len(names)):
            name = names[(turn + i) % len(names)]
            begin = time.perf_counter()
            found[name]()
            times[name].append(time.perf_counter() - begin)
        if sys.stderr.isatty():
            print(f"\r{title}: round {turn + 1} of {rounds}\033[K", end="", file=sys.stderr)
    if sys.stderr.isatty():
        print("\r\033[K", end="", file=sys.stderr)
    return times


def spread(values: list[float]) -> dict[str, float]:
    q1, median, q3 = statistics.quantiles(values, n=4, method="inclusive")
    return {"q1": q1, "median": median, "q3": q3}


# Figure -> (one contender, another one, goal). A ratio is the other's time divided by the first one's: above 1 the
# first contender is faster.
RATIOS = {
    "adamw28_vs_memory": ("adamw28", "memory", ">= 0.97"),
    "adamw28_vs_deepspeed_kernel": ("adamw28", "deepspeed_kernel", ">= 0.97"),
    "adamw28_vs_deepspeed_bf16_path": ("adamw28", "deepspeed_bf16_path", ">= 1.5"),
    "adamw28_vs_torch_fused_bf16_path": ("adamw28", "torch_fused_bf16_path", ">= 1.5"),
    "split26_vs_adamw28": ("split26", "adamw28", ">= 1.05"),
    "bf16_20_vs_adamw28": ("bf16_20", "adamw28", ">= 1.25"),
    "split18_vs_adamw28": ("split18", "adamw28", ">= 1.45"),
    "clip_cost": ("adamw28", "adamw28_clipped", "<= 0.10"),
    "finite_check_cost": ("adamw28", "adamw28_checked", ""),
}


def figures(times: dict[str, list[float]]) -> dict[str, dict]:
    times = dict(times)
    if "memory_cached" in times:  # the ceiling is the faster of the two ways to write the param
        ways = (times["memory_cached"], times["memory_streamed"])
        times["memory"] = min(ways, key=statistics.median)
    found = {}
    for key, (mine, other, goal) in RATIOS.items():
        if mine not in times or other not in times:
            continue
        ratios = [b / a for a, b in zip(times[mine], times[other])]
        if key.endswith("_cost"):
            ratios = [ratio - 1 for ratio in ratios]
        found[key] = {**spread(ratios), "goal": goal}
    return found


def require_same_work(found: dict) -> None:
    """Checks that one step of the library and one of torch from the same numbers change the weights alike."""
    ours, peer = found["adamw28"], found["torch_fused"]
    peer.param.grad.div_(SCALE)
    ours(), peer()
    moved = (1 - ours.param.float()).abs()[:4096]
    expected = (1 - peer.param.detach()).abs()[:4096].bfloat16().float()
    if not torch.allclose(moved, expected, atol=2**-8):
        sys.exit("peers: hybridopt and torch do not do the same work")


def machine() -> dict:
    cpu = platform.processor()
    with open("/proc/cpuinfo", encoding="utf-8") as lines:
        cpu = next((line.split(":")[1].strip() for line in lines if "model name" in line), cpu)
    return {
        "cpu": cpu,
        "cpus": len(os.sched_getaffinity(0)),
        "load": os.getloadavg()[0],
        "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
        "torch": torch.__version__,
        "numpy": numpy.__version__,
        "hybridopt": abi.build_info(),
    }


def print_table(report: dict) -> None:
    where = report["machine"]
    print(f"{where['cpu']}, {where['cpus']} CPUs; {where['hybridopt']}; torch {where['torch']}, "
          f"DeepSpeed {where['deepspeed']}; {where['date']}; load {where['load']:.1f}")
    print(f"{report['elements'] / 2**20:.0f} Mi elements, {report['rounds']} rounds")
    if report["deepspeed_missing"]:
        print(f"DeepSpeedCPUAdam left out: {report['deepspeed_missing']}")
    print(f"\n{'row':42} {'grads':>5} {'threads':>7} {'bytes':>5} {'ms':>8} {'quartiles':>18} "
          f"{'Mparam/s':>9}")
    for row in report["rows"]:
        ms = {key: value * 1e3 for key, value in row["seconds"].items()}
        print(f"{row['name']:42} {row['grads']:>5} {row['threads']:7} {row['bytes'] or '':>5} "
              f"{ms['median']:8.2f} {ms['q1']:8.2f} .. {ms['q3']:6.2f} "
              f"{report['elements'] / row['seconds']['median'] / 1e6:9.0f}")
    print(f"\n{'figure':48} {'median':>8} {'quartiles':>18}  goal")
    for key, value in report["figures"].items():
        print(f"{key:48} {value['median']:8.3f} {value['q1']:8.3f} .. {value['q3']:6.3f}  "
              f"{value['goal']}")


def main() -> None:
    parser = argparse.ArgumentParser(prog="scripts/bench --peers", description=__doc__)
    parser.add_argument("--elements", type=int, default=32 << 20)
    parser.add_argument("--rounds", type=int, default=21)
    parser.add_argument("--threads", type=int, default=0, help="of 'all threads'; 0 = all CPUs")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of the table")
    parser.add_argument("--loops", required=True, help=argparse.SUPPRESS)
    options = parser.parse_args()

    loops = ctypes.CDLL(options.loops)
    loops.peers_team.restype = ctypes.c_void_p
    loops.peers_team_free.argtypes = [ctypes.c_void_p]
    loops.peers_memory.argtypes = [ctypes.c_void_p, ctypes.c_int] + [ctypes.c_void_p] * 5 + [
        ctypes.c_uint64]
    everything = options.threads or len(os.sched_getaffinity(0))
    elements = options.elements // 4096 * 4096
    deepspeed, missing = deepspeed_adam()
    report = {
        "figures": {}, "rows": [], "elements": elements, "rounds": options.rounds,
        "threads": everything, "deepspeed_missing": missing, "machine": machine(),
    }
    report["machine"]["deepspeed"] = (
        sys.modules["deepspeed"].__version__ if "deepspeed" in sys.modules else "none"
    )
    for threads in sorted({1, everything}):
        torch.set_num_threads(threads)
        for dtype, grads in ((torch.bfloat16, "bf16"), (torch.float32, "fp32")):
            found, context = contenders(elements, threads, dtype, loops, deepspeed)
            require_same_work(found)
            times = measure(found, options.rounds, f"{threads} threads, {grads} gradients")
            for key, seconds in times.items():
                name, count = NAMES[key]
                if grads == "fp32" and count and not key.startswith(("torch", "deepspeed")):
                    count += 2 if count in (30,) else 0
                    count += 2
                report["rows"].append({
                    "key": key, "name": name, "grads": grads, "threads": threads, "bytes": count,
                    "seconds": spread(seconds)})
            suffix = ("" if threads == everything else "_1t") + ("" if grads == "bf16" else "_fp32")
            for key, value in figures(times).items():
                report["figures"][key + suffix] = value
            for one in found.values():
                if isinstance(one, Memory):
                    one.close()
                if isinstance(one, Ours):
                    one.optimizer.close()
            del found
            context.close()
    if options.json:
        medians = {key: value["median"] for key, value in report["figures"].items()}
        print(json.dumps({**medians, **report}, indent=2))
    else:
        print_table(report)


if __name__ == "__main__":
    main()
