#!/usr/bin/env python3
"""What training pays for optimizer state on disk: seconds of the passes, the step and a save, how fast the drive reads
and writes meanwhile, and the host memory that the process has taken at most.

    HYBRIDOPT_LIBRARY=build/release/libhybridopt.so PYTHONPATH=bindings/python/src \\
        python3 bench/disk.py --folder /mnt/drive --saves

The model is that of bench/iteration.py, and so are its options; state is small (split masters, bf16 moments). The step
begins when the passes have ended, so that nothing hides it. The first iteration also makes the files of the state.
Checkpoints go to the same folder; each is removed when the next one is there, as programs do that keep the last one.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import resource
import shutil

import hybridopt
from iteration import HYPERPARAMETERS, SMALL, add_model_options, batches, make_model, parse_with_model
from weight_changes import seconds_of

GB = 1e9


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_model_options(parser)
    parser.add_argument("--folder", type=pathlib.Path, required=True, help="on the drive")
    parser.add_argument("--offload-fraction", type=float, default=1.0, help="of the state, off the GPU")
    parser.add_argument("--disk-fraction", type=float, default=1.0, help="of the state, on disk")
    parser.add_argument("--iterations", type=int, default=2)
    parser.add_argument("--saves", action="store_true", help="save behind each iteration")
    return parse_with_model(parser, world=1)


def save(optimizer: hybridopt.AdamW, folder: pathlib.Path, number: int) -> float:
    """Seconds of a save; then the checkpoint before it goes."""
    paths = [folder / f"checkpoint-of-bench-disk-{each}" for each in (number - 1, number)]
    seconds = seconds_of(lambda: optimizer.save_checkpoint(paths[1], progress=False))
    shutil.rmtree(paths[0], ignore_errors=True)
    return seconds


def main() -> None:
    options = parse()
    model = make_model(options)
    optimizer = hybridopt.AdamW(
        model.named_parameters(), **HYPERPARAMETERS, **SMALL, max_grad_norm=1.0,
        offload_fraction=options.offload_fraction, disk_fraction=options.disk_fraction, disk_paths=options.folder,
    )  # fmt: skip
    batch = batches(options, 1)[0]

    def step() -> None:
        optimizer.step()
        optimizer.synchronize()

    rows = []
    for number in range(options.iterations):
        passes, stepping = seconds_of(lambda: model(batch).backward()), seconds_of(step)
        optimizer.zero_grad()
        plan = optimizer.plan()
        if number == 0:
            count = sum(param.numel() for param in model.parameters())
            print(
                f"{count / 1e9:.2f} G params; state: {plan.elements}; {plan.disk_bytes / GB:.1f} GB on disk, of which a step "
                f"reads and writes {plan.disk_step_bytes / GB:.1f}; ring {plan.host_disk_bytes >> 20} MiB"
            )
            print(f"{'iteration':>9} {'passes s':>9} {'step s':>8} {'GB/s each way':>14} {'save s':>8} {'host peak GiB':>14}")
        saving = save(optimizer, options.folder, number) if options.saves else float("nan")
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (1 << 20)
        rows.append([passes, stepping, plan.disk_step_bytes / GB / stepping, saving, peak])
        print(f"{number:9} {passes:9.2f} {stepping:8.2f} {rows[-1][2]:14.2f} {saving:8.1f} {peak:14.1f}", flush=True)
    shutil.rmtree(options.folder / f"checkpoint-of-bench-disk-{options.iterations - 1}", ignore_errors=True)
    optimizer.close()
    if options.json:
        pathlib.Path(options.json).write_text(json.dumps({"options": str(vars(options)), "rows": rows}))


if __name__ == "__main__":
    main()
