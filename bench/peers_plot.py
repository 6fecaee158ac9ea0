"""Draws what bench/peers.py measured: params per second against bytes a parameter, with the ceiling.
peers.py uses it for --plot; alone it draws what --json wrote:
python bench/peers_plot.py REPORT.json FILE.png"""

from __future__ import annotations

import json
import sys

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot  # noqa: E402

LABELS = {
    "adamw28": "fp32 state",
    "split26": "split master",
    "bf16_20": "bf16 moments",
    "split18": "both",
    "deepspeed_kernel": "DeepSpeed, kernel alone",
    "deepspeed_bf16_path": "DeepSpeed: unscale, step, cast",
    "torch_fused": "torch fused, alone",
    "torch_fused_bf16_path": "torch fused: unscale, step, cast",
}
KINDS = (("hybridopt", "tab:blue", "o"), ("peers", "tab:orange", "s"))
LABEL_GAP = 0.045  # of the axis' height


def spread_out(heights: list[float]) -> list[float]:
    """Heights in ascending order, moved apart to at least the gap around where they were."""
    moved = list(heights)
    for _ in range(100):
        for i in range(1, len(moved)):
            lack = LABEL_GAP - (moved[i] - moved[i - 1])
            if lack > 0:
                moved[i - 1] -= lack / 2
                moved[i] += lack / 2
    return moved


def label_points(axes, points: list[tuple[float, float, str]]) -> None:
    """Texts of points with as many bytes stand in one column on their right, or on their left near the
    edge, and lines lead to the points. Where the next column is too near they stand above."""
    columns = sorted({count for count, _, _ in points})
    top = axes.get_ylim()[1]
    for count in columns:
        column = sorted((rate, text) for x, rate, text in points if x == count)
        crowded = any(count < other < count + 3 for other in columns)
        shift, align = (0, "center") if crowded else (-0.9, "right") if count > 38 else (0.9, "left")
        heights = spread_out([rate / top + (0.07 if crowded else 0) for rate, _ in column])
        for (rate, text), height in zip(column, heights):
            axes.annotate(
                text, (count, rate), xytext=(count + shift, height * top), fontsize=8, ha=align,
                va="center",
                arrowprops={"arrowstyle": "-", "color": "0.7", "lw": 0.6, "shrinkA": 1, "shrinkB": 4})


def plot(report: dict, path: str) -> None:
    """All threads, bf16 gradients."""
    rows = {row["key"]: row for row in report["rows"]
            if row["threads"] == report["threads"] and row["grads"] == "bf16"}
    rate = {key: report["elements"] / row["seconds"]["median"] / 1e9 for key, row in rows.items()}
    ceiling = max(rate["memory_cached"], rate["memory_streamed"]) * rows["memory_cached"]["bytes"]
    shown = [key for key in LABELS if key in rows]
    figure, axes = pyplot.subplots(figsize=(8, 5))
    bytes_axis = [14 + 0.25 * i for i in range(137)]
    axes.plot(bytes_axis, [ceiling / count for count in bytes_axis], color="0.6",
              label=f"the memory: {ceiling:.0f} GB/s")
    for kind, color, marker in KINDS:
        keys = [key for key in shown if rows[key]["name"].startswith("hybridopt")
                == (kind == "hybridopt")]
        quartiles = [[rate[key] - report["elements"] / rows[key]["seconds"]["q3"] / 1e9
                      for key in keys],
                     [report["elements"] / rows[key]["seconds"]["q1"] / 1e9 - rate[key]
                      for key in keys]]
        axes.errorbar([rows[key]["bytes"] for key in keys], [rate[key] for key in keys], quartiles,
                      fmt=marker, color=color, elinewidth=0.8, alpha=0.9, label=kind)
    where = report["machine"]
    axes.set(xlabel="bytes moved a parameter", ylabel="10⁹ parameters a second", xlim=(13, 49),
             title=f"AdamW step, {report['threads']} threads, bf16 gradients: medians and quartiles")
    axes.set_ylim(0, None)
    label_points(axes, [(rows[key]["bytes"], rate[key], LABELS[key]) for key in shown])
    axes.legend(loc="upper right", frameon=False)
    figure.text(0.995, 0.005, f"{where['cpu']}, {where['cpus']} CPUs; torch {where['torch']}, "
                f"DeepSpeed {where['deepspeed']}; {where['date']}", ha="right", fontsize=7, color="0.4")
    figure.tight_layout(rect=(0, 0.02, 1, 1))
    figure.savefig(path, dpi=100)


def main() -> None:
    if len(sys.argv) != 3:
        sys.exit(f"usage: {sys.argv[0]} REPORT.json FILE.png; the report is what --json wrote")
    with open(sys.argv[1], encoding="utf-8") as file:
        plot(json.load(file), sys.argv[2])


if __name__ == "__main__":
    main()
