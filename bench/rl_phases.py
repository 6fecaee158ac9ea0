#!/usr/bin/env python3
"""What it costs RL trainers to give the GPU to a rollout and to take it back, by their own worker code: verl's engine,
SkyRL's strategy and NeMo-RL's policy worker for FSDP2, each with torch's AdamW and with ours, and torch's AdamW under
torch_memory_saver.

    HYBRIDOPT_LIBRARY=build/release/libhybridopt.so PYTHONPATH=bindings/python/src python3 bench/rl_phases.py

One GPU, one process for each contender, and nothing in the place of the rollout. An iteration is: wake, one step, sleep.
Its seconds are medians of all but the first. "free" is the device memory that another process could take while the
worker sleeps, "host" how much more of the machine's memory is in use at most than before the worker was made. A second
process makes the same steps without a phase: "same bits" compares hashes of the params. Where our state is on the host,
the worker's own switch that moves state is off. torch is asked for deterministic algorithms, and attention is eager,
because other kinds have none. verl, skyrl, nemo_rl and torch_memory_saver are used where they can be imported, nemo_rl
from a folder with NeMo-RL's sources on PYTHONPATH; Ray, data sets and servers are left out. NeMo-RL's worker is
dtensor_policy_worker.py; "worker unchanged" is without the lines of docs/FRAMEWORKS.md.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import contextlib
import dataclasses
import functools
import hashlib
import importlib
import importlib.util
import json
import os
import pathlib
import re
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch

# Helpers of the tests of these frameworks.
sys.path.append(str(pathlib.Path(__file__).resolve().parent.parent / "bindings/python/tests/integrations"))
import nemo_rl_on_cpu  # noqa: E402
from skyrl_on_cpu import STRATEGY, patched  # noqa: E402
from verl_on_cpu import leave_out  # noqa: E402

LEFT_OUT = ("datasets", "pandas", "ray", "ray.util", "ray.util.collective", "ray.actor", "ray.util.placement_group",
            "ray.util.scheduling_strategies", "ray.experimental", "ray.experimental.state", "fastapi", "uvicorn",
            "ray.experimental.state.api", "flash_attn", "flash_attn.bert_padding", "tyro", "vllm")  # fmt: skip
GIB = 1 << 30
DEVICE = "cuda"


@dataclasses.dataclass
class Worker:
    """A trainer's worker: its model, and what brings model and state to the GPU and takes both away again."""

    model: torch.nn.Module
    wake: Callable[[], Any]
    sleep: Callable[[], Any]
    step: Callable[[torch.Tensor], Any]


def leave_out_what_is_missing() -> None:
    """Replaces packages that workers import but do not use here."""
    packages = {name.partition(".")[0] for name in LEFT_OUT}
    missing = {name for name in packages if name == "ray" or importlib.util.find_spec(name) is None}
    leave_out(*(name for name in LEFT_OUT if name.partition(".")[0] in missing))


# --------------------------------------------------------------------------------------- workers --


def verl_worker(options: argparse.Namespace, ours: dict | None) -> Worker:
    leave_out_what_is_missing()
    from verl.trainer.config import CheckpointConfig
    from verl.workers.config import FSDPEngineConfig, FSDPOptimizerConfig, HFModelConfig
    from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead

    optimizer = {"optimizer_impl": "torch.optim"} if ours is None else {
        "optimizer_impl": "hybridopt", "override_optimizer_config": ours}  # fmt: skip
    config = FSDPOptimizerConfig(
        optimizer="AdamW", lr=1e-5, clip_grad=1.0, total_training_steps=100, lr_warmup_steps=2, **optimizer
    )
    engine = FSDPEngineWithLMHead(
        HFModelConfig(path=options.model, load_tokenizer=False, use_remove_padding=False,
                      override_config={"attn_implementation": "eager"}),
        FSDPEngineConfig(strategy="fsdp2", param_offload=options.phases,
                         optimizer_offload=options.phases and ours is None,  # ours leaves state where it is
                         model_dtype="fp32" if ours is None else "bf16", use_torch_compile=False),
        config, CheckpointConfig(),
    )  # fmt: skip
    engine.initialize()

    def step(tokens: torch.Tensor) -> None:
        engine.optimizer_zero_grad()
        engine.module(input_ids=tokens, labels=tokens).loss.backward()
        engine.optimizer_step()
        engine.lr_scheduler_step()
        engine.optimizer_zero_grad()

    sleep, wake = with_states(engine.optimizer, ours)
    move = functools.partial(engine.to, optimizer=ours is None, grad=False)  # as its train_mode does
    return Worker(engine.module, lambda: (move(DEVICE), wake()), lambda: (sleep(), move("cpu")), step)


def skyrl_worker(options: argparse.Namespace, ours: dict | None) -> Worker:
    leave_out_what_is_missing()
    from skyrl.train.config import FSDPConfig, ModelConfig, OptimizerConfig
    from transformers import AutoConfig, LlamaForCausalLM

    module = importlib.import_module(STRATEGY) if ours is None else patched(ours)
    strategy = module.FSDPStrategy(
        FSDPConfig(cpu_offload=False),
        OptimizerConfig(lr=1e-5, max_grad_norm=1.0, offload_after_step=ours is None, num_warmup_steps=2,
                        scheduler="cosine"),
        ModelConfig(),
        num_training_steps=100,
    )
    strategy.setup_distributed()
    torch.manual_seed(3)
    dtype = torch.float32 if ours is None else torch.bfloat16
    model = LlamaForCausalLM(AutoConfig.from_pretrained(options.model, attn_implementation="eager")).to(dtype)
    model, optimizer, scheduler = strategy.prepare((model, None, None))

    def step(tokens: torch.Tensor) -> None:
        strategy.backward(model(input_ids=tokens, labels=tokens).loss, model, optimizer)
        strategy.optimizer_step(optimizer, model, scheduler)
        optimizer.zero_grad()

    sleep, wake = with_states(optimizer, ours)
    return Worker(
        model,
        lambda: (strategy.backload_to_gpu(model, optimizer), wake()),
        lambda: (sleep(), strategy.offload_to_cpu(model, optimizer)),
        step,
    )


def nemo_rl_worker(options: argparse.Namespace, ours: dict | None) -> Worker:
    leave_out_what_is_missing()
    module = nemo_rl_on_cpu.worker_module("dtensor_policy_worker", is_changed="movable" in (ours or {}))
    name = "torch.optim.AdamW" if ours is None else "hybridopt.AdamW"
    optimizer = {"name": name, "kwargs": {"lr": 1e-5, **(ours or {})}}
    config = nemo_rl_on_cpu.configuration(options.model, optimizer, options.batch, options.batch)
    worker = nemo_rl_on_cpu.made(module.DTensorPolicyWorkerImpl, config, has_reference=False)
    loss = nemo_rl_on_cpu.loss_function()
    return Worker(
        worker.model,
        worker.prepare_for_training,
        lambda: (worker.offload_before_refit(), worker.offload_after_refit()),
        lambda tokens: worker.train(nemo_rl_on_cpu.batch_of(tokens), loss),
    )


def memory_saver_worker(options: argparse.Namespace, ours: dict | None) -> Worker:
    """torch's AdamW over fp32 params, all of whose memory torch_memory_saver copies to the host and frees."""
    from torch_memory_saver import torch_memory_saver as saver
    from transformers import AutoConfig, LlamaForCausalLM

    torch.manual_seed(3)
    config = AutoConfig.from_pretrained(options.model, attn_implementation="eager")
    with saver.region(enable_cpu_backup=True), torch.device("cuda"):
        model = LlamaForCausalLM(config)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
        for param in model.parameters():
            optimizer.state[param] = {
                "step": torch.zeros(()), "exp_avg": torch.zeros_like(param), "exp_avg_sq": torch.zeros_like(param)
            }  # fmt: skip

    def step(tokens: torch.Tensor) -> None:
        with torch.autocast("cuda", torch.bfloat16):
            loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    paused = []

    def sleep() -> None:
        torch.cuda.empty_cache()
        saver.pause()
        paused.append(True)

    return Worker(model, lambda: paused and (paused.clear(), saver.resume()), sleep, step)


def with_states(optimizer: Any, ours: dict | None) -> tuple[Callable, Callable]:
    """What moves the device's share of our state; torch's is moved by the worker."""
    if not ours or "states" not in ours.get("movable", ()):
        return (lambda: None), (lambda: None)
    return functools.partial(optimizer.offload, states=True), functools.partial(optimizer.reload, states=True)


MAKERS = {"verl": verl_worker, "skyrl": skyrl_worker, "nemo_rl": nemo_rl_worker,
          "torch_memory_saver": memory_saver_worker}  # fmt: skip
SMALL = {"master_layout": "split", "state_dtype": "bf16"}
CONTENDERS: dict[str, tuple[str, dict | None]] = {
    "verl, torch's AdamW": ("verl", None),
    "verl, ours, all on the host": ("verl", {"offload_fraction": 1.0}),
    "verl, ours, half on the host": ("verl", {"offload_fraction": 0.5, "movable": ["states"]}),
    "verl, ours, all on the host, small state": ("verl", {"offload_fraction": 1.0, **SMALL}),
    "SkyRL, torch's AdamW": ("skyrl", None),
    "SkyRL, ours, all on the host": ("skyrl", {"offload_fraction": 1.0}),
    "NeMo-RL, torch's AdamW": ("nemo_rl", None),
    "NeMo-RL, ours, all on the host": ("nemo_rl", {"offload_fraction": 1.0, "movable": ["states"]}),
    "NeMo-RL, ours, half on the host": ("nemo_rl", {"offload_fraction": 0.5, "movable": ["states"]}),
    "NeMo-RL, ours, all on the host, small state": ("nemo_rl", {"offload_fraction": 1.0, "movable": ["states"],
                                                                "state_dtype": "bf16"}),  # fmt: skip
    "NeMo-RL, ours, all on the host, worker unchanged": ("nemo_rl", {"offload_fraction": 1.0}),
    "torch's AdamW, torch_memory_saver": ("torch_memory_saver", None),
}


# ---------------------------------------------------------------------------------------- memory --


def host_in_use() -> int:
    fields = dict(line.split(":") for line in pathlib.Path("/proc/meminfo").read_text().splitlines())
    return sum(sign * int(fields[name].split()[0]) for sign, name in ((1, "MemTotal"), (-1, "MemAvailable"))) << 10


@contextlib.contextmanager
def peak_of_host() -> Iterator[list[int]]:
    """A list whose entry is the highest reading until the end."""
    peak, ended = [host_in_use()], threading.Event()

    def watch() -> None:
        while not ended.wait(0.02):
            peak[0] = max(peak[0], host_in_use())

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield peak
    finally:
        ended.set()
        thread.join()


# ------------------------------------------------------------------------------------ one contender --


def timed(call: Callable[[], Any]) -> float:
    torch.cuda.synchronize()
    begin = time.perf_counter()
    call()
    torch.cuda.synchronize()
    return time.perf_counter() - begin


def run(options: argparse.Namespace, name: str) -> dict:
    maker, ours = CONTENDERS[name]
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
    torch.use_deterministic_algorithms(True, warn_only=True)
    port = str(29500 + os.getpid() % 1000)  # several processes may run at a time
    os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
    torch.cuda.set_device(0)
    if maker != "torch_memory_saver":
        torch.distributed.init_process_group("nccl", rank=0, world_size=1)
    before = host_in_use()
    with peak_of_host() as peak:
        worker = MAKERS[maker](options, ours)
        worker.wake()
        rows = [iteration(worker, options, seed) for seed in range(options.iterations)]
        worker.wake()
        digest = hashlib.blake2b(digest_size=8)
        for param in worker.model.parameters():
            whole = param.full_tensor() if hasattr(param, "full_tensor") else param
            digest.update(whole.detach().cpu().contiguous().view(torch.uint8).numpy())
    result = {"hash": digest.hexdigest(), "host": peak[0] - before, "total": torch.cuda.mem_get_info()[1]}
    if options.phases:
        for column, key in enumerate(("wake", "step", "sleep", "free")):
            result[key] = statistics.median(row[column] for row in rows[1:])
    return result


def iteration(worker: Worker, options: argparse.Namespace, seed: int) -> tuple[float, float, float, int]:
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, 1000, (options.batch, options.context), generator=generator).cuda()
    if not options.phases:
        return 0.0, timed(lambda: worker.step(tokens)), 0.0, 0
    wake = timed(worker.wake) if seed else 0.0
    step = timed(lambda: worker.step(tokens))
    sleep = timed(lambda: (worker.sleep(), torch.cuda.empty_cache()))
    return wake, step, sleep, torch.cuda.mem_get_info()[0]


# ------------------------------------------------------------------------------------------- all --


def save_model(options: argparse.Namespace, folder: str) -> str:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(3)
    config = LlamaConfig(vocab_size=32000, hidden_size=options.width, intermediate_size=4 * options.width,
                         num_hidden_layers=options.layers, num_attention_heads=options.width // 128,
                         max_position_embeddings=options.context)  # fmt: skip
    torch.set_default_dtype(torch.bfloat16)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model = LlamaForCausalLM(config)
    model.save_pretrained(folder)
    print(f"{sum(param.numel() for param in model.parameters()) / 1e9:.2f} G params", flush=True)
    return folder


def spawned(options: argparse.Namespace, name: str, phases: bool) -> dict | None:
    command = [sys.executable, __file__, "--one", name, "--model", options.model, *(["--phases"] if phases else [])]
    command += [f"--{key}={getattr(options, key)}" for key in ("iterations", "batch", "context")]
    environment = dict(os.environ)
    if CONTENDERS[name][0] == "torch_memory_saver":
        environment["LD_PRELOAD"] = memory_saver_library()
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    if done.returncode == 0:
        return json.loads(done.stdout.splitlines()[-1])
    print(f"{name}: left out\n" + "\n".join(done.stderr.splitlines()[-12:]), file=sys.stderr, flush=True)
    return None


def memory_saver_library() -> str:
    spec = importlib.util.find_spec("torch_memory_saver")
    if spec is None:
        return ""
    found = sorted(pathlib.Path(spec.origin).parent.parent.glob("torch_memory_saver_hook_mode_preload*.so"))
    return str(found[-1]) if found else ""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--iterations", type=int, default=4)
    parser.add_argument("--only", default="", help="contenders whose names match this regular expression")
    parser.add_argument("--one", choices=CONTENDERS, help=argparse.SUPPRESS)
    parser.add_argument("--model", help=argparse.SUPPRESS)
    parser.add_argument("--phases", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        print(json.dumps(run(options, options.one)))
        os._exit(0)  # what is left out does not always end by itself
    with tempfile.TemporaryDirectory() as folder:
        options.model = save_model(options, folder)
        print("| | wake, s | step, s | sleep, s | free, GiB | of, GiB | host, GiB | same bits |")
        print("|---|---|---|---|---|---|---|---|")
        names = list(filter(re.compile(options.only).search, CONTENDERS))
        with concurrent.futures.ThreadPoolExecutor(3) as pool:  # these are not timed
            stayed = dict(zip(names, pool.map(lambda name: spawned(options, name, False), names)))
        for name in names:
            moving, staying = spawned(options, name, True), stayed[name]
            if moving is None or staying is None:
                continue
            same = "yes" if moving["hash"] == staying["hash"] else "**no**"
            print(
                f"| {name} | {moving['wake']:.3f} | {moving['step']:.3f} | {moving['sleep']:.3f} | "
                f"{moving['free'] / GIB:.1f} | {moving['total'] / GIB:.1f} | {moving['host'] / GIB:.1f} | {same} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
