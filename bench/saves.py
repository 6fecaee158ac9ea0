#!/usr/bin/env python3
"""What training pays for a save that runs beside it: seconds of the iterations before, at and behind a
save_checkpoint(wait=False), and of the save, with a buffer for what steps overwrite and without one.

    HYBRIDOPT_LIBRARY=build/release/libhybridopt.so PYTHONPATH=bindings/python/src \\
        python3 bench/saves.py --folder /mnt/drive

The model is that of bench/iteration.py, and so are its options. All state is on the host. Each iteration ends with a
wait for the GPU and the step. The checkpoint goes to the folder and is removed. The first row's save also makes the
memory of the buffer, which later saves use again.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import shutil
import statistics
import time
from typing import Any

import torch

import hybridopt
from iteration import HYPERPARAMETERS, SMALL, add_model_options, batches, make_model, parse_with_model

GB = 1e9


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_model_options(parser)
    parser.add_argument("--folder", type=pathlib.Path, required=True, help="where the checkpoint goes")
    parser.add_argument("--state", choices=("small", "fp32"), default="small")
    parser.add_argument("--buffers", nargs="+", default=["auto", "0"], help="values of save_buffer_bytes")
    parser.add_argument("--saves", type=int, default=2, help="with each buffer")
    parser.add_argument("--iterations", type=int, default=5, help="before each save")
    return parse_with_model(parser, world=1)


class Training:
    """A model in training, one iteration after the other."""

    def __init__(self, options: argparse.Namespace, buffer: str) -> None:
        self.model = make_model(options)
        self.batch = batches(options, 1)[0]
        self.optimizer = hybridopt.AdamW(
            self.model.named_parameters(),
            **HYPERPARAMETERS,
            max_grad_norm=1.0,
            save_buffer_bytes=buffer if buffer == "auto" else int(buffer),
            **(SMALL if options.state == "small" else {}),
        )

    def iterate(self) -> float:
        """Seconds of one iteration."""
        begin = time.perf_counter()
        self.model(self.batch).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.optimizer.synchronize()
        if self.batch.is_cuda:
            torch.cuda.synchronize()
        return time.perf_counter() - begin


def measure(training: Training, options: argparse.Namespace) -> dict[str, Any]:
    """Iterations before a save, and those beside it until it ends."""
    before = [training.iterate() for _ in range(options.iterations)]
    folder = options.folder / "checkpoint-of-bench-saves"
    shutil.rmtree(folder, ignore_errors=True)
    beside = []
    begin = time.perf_counter()
    save = training.optimizer.save_checkpoint(folder, wait=False, progress=False)
    called = time.perf_counter() - begin
    while not beside or not save.done():
        beside.append(training.iterate())
    save.wait()
    seconds = time.perf_counter() - begin
    written = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    shutil.rmtree(folder)
    return {"before": statistics.median(before), "call": called, "beside": beside, "save": seconds, "bytes": written,
            "buffer": training.optimizer.plan().host_save_bytes}  # fmt: skip


def row(name: str, result: dict[str, Any]) -> str:
    before, (first, *later) = result["before"], result["beside"]
    behind = f"{statistics.median(later) / before:8.2f}{max(later) / before:10.2f}" if later else f"{'-':>8}{'-':>10}"
    return (
        f"{name:16}{before:10.3f} s{(result['call'] + first) / before:10.2f}{behind}"
        f"{result['save']:9.2f} s{result['bytes'] / GB / result['save']:10.2f}{result['buffer'] / GB:10.2f}"
    )


def main() -> None:
    options = parse()
    results = {}
    print(f"{'':16}{'iteration':>12}{'first':>10}{'later':>8}{'longest':>10}{'save':>11}{'GB/s':>10}{'buffer GB':>10}")
    for buffer in options.buffers:
        training = Training(options, buffer)
        training.iterate()
        for number in range(options.saves):
            name = f"{buffer}, save {number + 1}"
            results[name] = measure(training, options)
            print(row(name, results[name]), flush=True)
        training.optimizer.close()
        del training
        if options.device == "cuda":
            torch.cuda.empty_cache()
    print("first, later, longest: iterations that begin while the save runs, over one without a save")
    if options.json:
        pathlib.Path(options.json).write_text(json.dumps({"options": str(vars(options)), "results": results}))


if __name__ == "__main__":
    main()
