"""A picture of memory_timeline(), and of the lanes of each step. Needs matplotlib, the optional extra "plots"."""

from __future__ import annotations

import os
from typing import Any

from .history import MemorySample
from .plans import StepResult

# The lanes of a step, in the order of the pipeline, by fields of offload_step_result_t.
LANES = {
    "norm_seconds": "norm and verdict",
    "grads_down_seconds": "gradients down",
    "update_seconds": "update on the host",
    "params_up_seconds": "params up",
    "device_update_seconds": "update on the device",
    "state_up_seconds": "state up",
    "streamed_update_seconds": "update of that state",
    "state_down_seconds": "state down",
    "stall_seconds": "stalled",
    "total_seconds": "whole step",
}
LANE_COLORS = (
    *("#aa3377", "#ee6677", "#4477aa", "#66ccee", "#228833"),
    *("#882255", "#117733", "#88ccee", "#ccbb44", "#bbbbbb"),
)
STEPS = 12  # the picture has room for these
KINDS = ("params", "grads", "state")
COLORS = ("#4477aa", "#ee6677", "#228833")


def plot_timeline(
    samples: list[MemorySample], results: list[StepResult], path: str | os.PathLike[str]
) -> None:
    """Writes a PNG (or what the ending of the path says): above, the bytes of params, gradients and
    states on the device and on the host around every step and move; below, how long each lane of
    the last steps was busy."""
    if not samples:
        raise RuntimeError("there is nothing to plot yet; call step() first")
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ImportError(
            "plots need matplotlib; install it, or hybridopt with its extra: "
            "pip install 'hybridopt[plots]'"
        ) from None
    figure = Figure(figsize=(10, 8), layout="constrained")
    device, host, lanes = figure.subplots(3, 1, height_ratios=[2, 2, 3])
    _plot_memory(device, samples, "device", "on the device")
    _plot_memory(host, samples, "host", "on the host")
    _plot_lanes(lanes, results)
    figure.savefig(path, dpi=120)


def _plot_memory(axes: Any, samples: list[MemorySample], tier: str, title: str) -> None:
    seconds = [sample.seconds for sample in samples]
    heights = [
        [getattr(getattr(sample, f"{kind}_bytes"), tier) for sample in samples] for kind in KINDS
    ]
    unit, name = _unit(max(map(sum, zip(*heights))))
    heights = [[value / unit for value in kind] for kind in heights]
    # A sample holds until the next one.
    axes.stackplot(seconds, *heights, labels=KINDS, colors=COLORS, step="post")
    for sample in samples:
        if sample.label in ("offload", "reload"):
            axes.axvline(sample.seconds, color="black", linewidth=0.5, linestyle=":")
            axes.annotate(
                sample.label,
                (sample.seconds, 1),
                xycoords=("data", "axes fraction"),
                rotation=90,
                fontsize=7,
                ha="right" if sample.label == "offload" else "left",
                va="top",
            )
    axes.set_title(f"Memory {title}", loc="left")
    axes.set_ylabel(name)
    axes.set_xlabel("seconds")
    axes.set_xlim(seconds[0], max(seconds[-1], seconds[0] + 1e-6))
    axes.legend(loc="upper left", bbox_to_anchor=(1, 1), frameon=False)


def _unit(bytes_max: int) -> tuple[int, str]:
    for shift, name in ((30, "GiB"), (20, "MiB"), (10, "KiB")):
        if bytes_max >= 1 << shift:
            return 1 << shift, name
    return 1, "bytes"


def _plot_lanes(axes: Any, results: list[StepResult]) -> None:
    """One row for each lane. Steps follow each other; inside a step each bar begins at its start and is as long as
    the lane was busy."""
    start_ms = 0.0
    for result in results[-STEPS:]:
        for row, (field, color) in enumerate(zip(LANES, LANE_COLORS)):
            busy_ms = 1e3 * getattr(result, field)
            axes.broken_barh([(start_ms, busy_ms)], (row - 0.35, 0.7), color=color, linewidth=0)
        end_ms = start_ms + 1e3 * result.total_seconds
        axes.axvline(end_ms, color="black", linewidth=0.5, linestyle=":")
        axes.text((start_ms + end_ms) / 2, -0.45, result.step, ha="center", fontsize=7)
        start_ms = end_ms
    axes.set_yticks(range(len(LANES)), LANES.values())
    axes.set_ylim(len(LANES) - 0.5, -1.1)
    axes.set_xlim(0, max(start_ms, 1e-6))
    axes.set_xlabel("milliseconds of stepping, one step after the other")
    axes.set_title("Lanes of the last steps", loc="left")
