"""Draws the pictures of README.md and docs/CONCEPTS.md. Usage: draw.py [--check] TOOL

TOOL is the command `hybridopt`, whose plan gives the bytes of the first picture. --check compares with the files.
"""

import json
import subprocess
import sys
from pathlib import Path

BLUE, AMBER, GREY, GREEN, PALE = "#3465a4", "#e9a03b", "#9a9a9a", "#5f9f5f", "#f3f3f3"
GIB = 1 << 30


class Picture:
    def __init__(self, width, height, title):
        self.parts = [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" '
            f'font-family="sans-serif" role="img"><title>{title}</title>',
            f'<rect width="{width}" height="{height}" fill="white"/>',
        ]

    def text(self, x, y, text, anchor="start", size=14, colour="black", bold=False):
        weight = ' font-weight="bold"' if bold else ""
        self.parts.append(
            f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-size="{size}" fill="{colour}"{weight}>{text}</text>'
        )

    def box(self, x, y, width, height, colour, label="", size=13):
        self.parts.append(
            f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" fill="{colour}" stroke="white"/>'
        )
        dark = colour in (PALE, AMBER)
        if label:
            self.text(x + width / 2, y + height / 2 + size / 3, label, "middle", size, "black" if dark else "white")

    def arrow(self, x1, y1, x2, y2):
        self.parts.append(
            f'<path d="M{x1} {y1}L{x2} {y2}" stroke="#333" stroke-width="1.5" marker-end="url(#tip)" fill="none"/>'
        )
        if "<defs>" not in self.parts[1]:
            self.parts[1] += (
                '<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="8" markerHeight="8" '
                'orient="auto"><path d="M0 0L8 4L0 8z" fill="#333"/></marker></defs>'
            )

    def whole(self):
        return "\n".join([*self.parts, "</svg>", ""])


def planned(tool, *options):
    command = [tool, "plan", "8B", "--json", "--device-memory", "141GB", "--host-memory", "300GB", *options]
    return json.loads(subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout)


def memory(tool):
    """The memory of a model of 8 billion params, with and without offloading."""
    picture = Picture(760, 268, "Memory of a model of 8 billion params: all on the GPU, and with its state on the host")
    picture.text(8, 22, "8 billion params in bf16, AdamW: GiB without activations", bold=True)
    scale = 3.3  # points for each GiB
    rows = [
        ("all on the GPU", ["--offload-fraction", "0"]),
        ("offload_fraction=1.0", []),
        (".. and half the bytes of state *", ["--small-state"]),
    ]
    for number, (name, options) in enumerate(rows):
        plan = planned(tool, *options)
        y = 40 + 60 * number
        picture.text(232, y + 15, name, "end")
        x = 240
        params = plan["params_bytes"] / GIB
        for label, gib, colour in (("params", params, BLUE), ("grads", params, GREEN)):
            picture.box(x, y, gib * scale, 22, colour, label, 12)
            x += gib * scale
        state = plan["device_bytes"] / GIB
        if state > 1:
            picture.box(x, y, state * scale, 22, AMBER, f"state {state:.1f}", 12)
            x += state * scale
        picture.text(x + 5, y + 15, f"{2 * params + state:.1f} on the GPU", size=13)
        host = plan["host_bytes"] / GIB
        if host > 1:
            picture.box(240, y + 24, host * scale, 22, AMBER, f"state {host:.1f}", 12)
            picture.text(245 + host * scale, y + 39, "on the host", size=13)
    picture.text(8, 248, '* master_layout="split", state_dtype="bf16"', size=12)
    return picture.whole()


def state():
    """The place of the state of each element."""
    picture = Picture(760, 250, "The state of each param lies on the device or on the host; the fraction says how much")
    picture.text(8, 24, "GPU", bold=True)
    picture.text(8, 150, "host", bold=True)
    picture.box(70, 8, 680, 26, BLUE, "params, bf16: all of them")
    picture.box(70, 38, 680, 26, GREEN, "gradients, bf16: all of them")
    picture.box(70, 68, 226, 46, AMBER, "state of the device share")
    picture.box(296, 134, 454, 46, AMBER, "state of the host share: master, exp_avg, exp_avg_sq")
    picture.arrow(523, 66, 523, 130)
    picture.text(531, 104, "gradients of this share", size=12)
    picture.arrow(420, 132, 420, 68)
    picture.text(412, 104, "its new params", "end", 12)
    picture.text(183, 140, "the GPU updates it", "middle", 12)
    picture.text(523, 198, "CPU threads update it, or it streams through the GPU", "middle", 12)
    picture.text(70, 236, "offload_fraction=0.67 here. Any fraction gives the same bits.", size=13)
    return picture.whole()


def step():
    """The pipeline of one step."""
    picture = Picture(760, 250, "One step: gradients go down, CPU threads update, params go up, chunk by chunk")
    lanes = ("your stream", "down", "CPU threads", "up", "GPU")
    for lane, name in enumerate(lanes):
        picture.text(96, 32 + 42 * lane, name, "end", 13)
        picture.box(104, 12 + 42 * lane, 648, 32, PALE)
    picture.box(104, 12, 110, 32, BLUE, "backward")
    picture.box(688, 12, 64, 32, BLUE, "forward")
    for chunk in range(4):
        x = 214 + 79 * chunk
        picture.box(x, 54, 75, 32, GREEN, f"gradients {chunk}", 11)
        picture.box(x + 79, 96, 75, 32, AMBER, f"update {chunk}", 11)
        picture.box(x + 158, 138, 75, 32, BLUE, f"params {chunk}", 11)
    picture.box(214, 180, 60, 32, GREY, "norm", 11)
    picture.box(280, 180, 140, 32, AMBER, "update of its share", 11)
    picture.text(104, 238, "The norm decides first: clip, or skip the step. Nothing is written before.", size=13)
    return picture.whole()


def phases():
    """The users of the GPU in an RL cycle."""
    picture = Picture(760, 190, "In an RL cycle training and rollout have the GPU in turns")
    picture.text(84, 46, "GPU", "end", 13, bold=True)
    picture.text(84, 106, "host", "end", 13, bold=True)
    for x, width in ((92, 200), (552, 200)):
        picture.box(x, 20, width, 20, BLUE, "params", 12)
        picture.box(x, 40, width, 20, GREEN, "gradients", 12)
        picture.box(x, 90, width, 30, AMBER, "state", 12)
    picture.box(322, 20, 200, 40, GREY, "generator, KV cache")
    picture.box(322, 80, 200, 20, BLUE, "params", 12)
    picture.box(322, 100, 200, 20, GREEN, "gradients", 12)
    picture.box(322, 120, 200, 30, AMBER, "state", 12)
    picture.arrow(294, 62, 320, 84)
    picture.arrow(524, 84, 550, 62)
    for x, name in ((192, "train"), (422, "rollout"), (652, "train")):
        picture.text(x, 174, name, "middle", 13)
    picture.text(307, 14, "offload", "middle", 12)
    picture.text(537, 14, "reload", "middle", 12)
    return picture.whole()


def main(arguments):
    check = arguments[0] == "--check"
    tool = arguments[-1]
    drawn = {"memory": memory(tool), "state": state(), "step": step(), "phases": phases()}
    for name, text in drawn.items():
        path = Path(__file__).with_name(f"{name}.svg")
        if not check:
            path.write_text(text)
        elif not path.exists() or path.read_text() != text:
            sys.exit(f"FAILED: docs/plots/{name}.svg is not what docs/plots/draw.py draws; run it")
    print("the pictures of docs/CONCEPTS.md are as docs/plots/draw.py draws them")


if __name__ == "__main__":
    main(sys.argv[1:])
