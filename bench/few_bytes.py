#!/usr/bin/env python3
"""Which codes may hold AdamW's state in 3 bytes a parameter: trains the same models with state stored in one form
after the other, and compares losses. Plain torch, no part of the library; the forms are in few_bytes_codes/forms.py.

    python3 bench/few_bytes.py --results few_bytes.jsonl                            all problems, on a GPU
    python3 bench/few_bytes.py --results few_bytes.jsonl --problems text outliers --budget-seconds 540
    python3 bench/few_bytes.py --table few_bytes.jsonl                              the table, and the gate
    python3 bench/few_bytes.py --check                                              the codes alone
    python3 bench/few_bytes.py --tiny --results /tmp/tiny.jsonl                     shows on a CPU that all of it runs

A batch trains all seeds of one form at once: every array has a dimension for the runs, every product is one of
batches. The runs of a seed share first weights, data, and learning rates. Params and gradients are bf16, masters and
arithmetic of the update fp32. Results are appended to the file batch after batch, and what is in the file is not
trained again; when the next batch would pass the budget, it is left out and named.

The problems, with betas 0.9, 0.95 where nothing else is said:

- text: a GPT of 40 M params (width 640, 6 layers, 8,192 pieces of text), 1,000 steps of 3,072 tokens.
- outliers: a bowl of 32,768 params over four decades of curvature, 3,000 steps, betas 0.9, 0.999. One gradient of a
  thousand is a thousand times too large.
- betas: as text, with betas 0.9, 0.999.
- sparse: two tables of 262,144 rows of 96 for hashes of the last 2 and 3 pieces, and a small network; 1,000 steps of
  1,024 tokens. Nine rows of ten have a gradient in at most 5 of these, and groups of 128 lie across rows.
- switch: a smaller GPT (13.5 M params, width 384, 4 layers), 900 steps of 2,048 tokens; beta2 is 0.95, after 300 steps
  0.999, after 600 steps 0.95 again.
- scales: the smaller GPT, 1,200 steps without clipping; the loss is multiplied by 1,000 after 240 steps, by 0.001 after
  480.
- long: the smaller GPT, to fit the time, and 5,000 steps.

Text is the repository's docs and the sources of Python and torch, cut into words and marks; what is not among the
most frequent ones is spelled in bytes. Its loss is in nats a piece on text held out, the same batches in all runs, the
mean of four evaluations in the last tenth of the steps. That of the bowl is the mean of the last tenth of the steps.

**The gate**, written down before any run. A form passes if
1. on each problem of text (text, sparse, betas, long) the mean over seeds of (loss - loss of fp32) / loss of fp32
   lies within twice its standard error among runs that differ by a nudge: runs in fp32 whose gradients are off by one
   part in a million. With s^2 the variance among the fp32 and nudged runs of a seed, each over the loss of fp32, pooled
   over the seeds, and n seeds, the standard error of that mean is sqrt(2 s^2 / n);
2. on outliers every seed is within 1 % of fp32;
3. no loss is NaN, on any problem.
Two standard errors refuse one good form in twenty on each problem. `scales` and `switch` are judged by rule 3 alone:
they show whether codes saturate and recover. `misread` decodes ratios by the bound of the new betas, so what it loses
is what decoding by the old ones is for.

Columns `at ends, %`: the largest share of codes at an end of their range in any sample of 25 steps, and that of the
last one: exp_avg at its bound, then exp_avg_sq at its lowest code, then, without groups, at its highest.
"""

from __future__ import annotations

import argparse
import array
import collections
import dataclasses
import itertools
import json
import math
import pathlib
import re
import statistics
import sys
import sysconfig
import time
import traceback
import warnings
from collections.abc import Callable
from typing import Any

import torch
from few_bytes_codes.checks import check_codes
from few_bytes_codes.forms import FORMS, THREE_BYTES, Coefficients, Form, State, ends, new_state, step_key, update
from torch import Tensor
from torch.nn import functional

EVALUATIONS = 4
SAMPLE_STEPS = 25
HASH_FACTOR = 0x1E3779B97F4A7C15
REFERENCES = [name for name in FORMS if name.startswith("fp32")]
ALL_FORMS = [name for name in FORMS if "misread" not in name]


@dataclasses.dataclass(frozen=True)
class Problem:
    name: str
    model: str  # gpt, tables or bowl
    forms: list[str]
    steps: int
    lr: float
    betas: tuple[tuple[int, tuple[float, float]], ...] = ((0, (0.9, 0.95)),)  # from which step on
    scales: tuple[tuple[int, float], ...] = ((0, 1.0),)  # of the loss, from which step on
    seeds: int = 5
    decay: float = 0.1
    clip: float = 1.0
    width: int = 640
    layers: int = 6
    heads: int = 10
    batch: int = 12
    context: int = 256
    vocabulary: int = 8192
    rows: int = 0  # of each table
    evaluated: int = 8  # batches
    judged_as: str = "text"


SMALL: dict[str, Any] = {"width": 384, "layers": 4, "heads": 6, "batch": 8}
CHANGES = [*REFERENCES, THREE_BYTES, "bf16, 24", "ratio, log 5 fixed, 24"]
PROBLEMS = [
    Problem("text", "gpt", ALL_FORMS, 1000, 1e-3),
    Problem("outliers", "bowl", ALL_FORMS, 3000, 1e-2, ((0, (0.9, 0.999)),), seeds=10, decay=0.0, judged_as="outliers"),
    Problem("betas", "gpt", [*REFERENCES, THREE_BYTES, "bf16, 24"], 1000, 1e-3, ((0, (0.9, 0.999)),)),
    Problem(
        "sparse", "tables", [*REFERENCES, THREE_BYTES, "bf16, 24", "ratio, log 5 fixed, 24", "ratio, log 12 of 128, 24",
                             "ratio, log 10 of 32, 24", "ratio, log 10 of 128 by logarithm, 24",
                             "ratio, log 10 of 128 by inverse root, 24", "ratio, bf16, 24", "bf16, log 10 of 128, 24"],
        1000, 3e-3, width=96, layers=2, batch=4, rows=1 << 18,
    ),
    Problem(
        "switch", "gpt", [*CHANGES[:5], f"{THREE_BYTES}, misread"], 900, 1e-3,
        ((0, (0.9, 0.95)), (300, (0.9, 0.999)), (600, (0.9, 0.95))), judged_as="NaN alone", **SMALL,
    ),
    Problem(
        "scales", "gpt", CHANGES, 1200, 1e-3, scales=((0, 1.0), (240, 1e3), (480, 1e-3)), clip=math.inf,
        judged_as="NaN alone", **SMALL,
    ),
    Problem("long", "gpt", [*REFERENCES, THREE_BYTES], 5000, 1e-3, **SMALL),
]  # fmt: skip


def tiny(problem: Problem) -> Problem:
    """The smallest problem that still runs all of the code."""
    part = problem.steps // 20
    return dataclasses.replace(
        problem, steps=20, seeds=2, width=32, layers=1, heads=2, batch=2, context=16, vocabulary=512, evaluated=2,
        rows=64 if problem.rows else 0,
        betas=tuple((start // part, value) for start, value in problem.betas),
        scales=tuple((start // part, value) for start, value in problem.scales),
    )  # fmt: skip


def value_at(step: int, table: tuple[tuple[int, Any], ...]) -> Any:
    return [value for start, value in table if start <= max(step, 0)][-1]


class OutOfTime(Exception):
    pass


@dataclasses.dataclass
class Run:
    """What a batch of runs needs in addition to the problem and the form."""

    device: torch.device
    compile: bool
    deadline: float
    functions: dict[str, Callable[..., Any]] = dataclasses.field(default_factory=dict)  # the model's, and "update"
    text: tuple[Tensor, Tensor] | None = None

    def eager(self) -> None:
        self.compile = False
        self.functions = {each.__name__: each for each in (attention, perceptron, losses_of, update)}

    def check_time(self) -> None:
        if time.monotonic() > self.deadline:
            raise OutOfTime


# ----------------------------------------------------------------------------------------- text --

PIECE = re.compile(rb" ?[A-Za-z]+|[0-9]| ?[^\sA-Za-z0-9]+|\s+")
TEXT_BYTES = 24 << 20


def read_text(vocabulary: int, limit: int) -> tuple[Tensor, Tensor]:
    """The numbers of the pieces of text, in two parts: those to train on, and those held out, which are every 16th
    block."""
    folders = [
        (pathlib.Path(__file__).parents[1], "docs/*.md"),
        (pathlib.Path(sysconfig.get_paths()["stdlib"]), "**/*.py"),
        (pathlib.Path(torch.__file__).parent, "**/*.py"),
    ]
    text = bytearray()
    for number, (folder, pattern) in enumerate(folders):
        for file in sorted(folder.glob(pattern)):
            if len(text) < limit and not (number < 2 and "site-packages" in file.parts) and file.is_file():
                text += file.read_bytes()
    pieces = PIECE.findall(bytes(text[:limit]))
    known = [piece for piece, _ in collections.Counter(pieces).most_common(vocabulary - 256)]
    spelled: dict[bytes, list[int]] = {piece: list(piece) for piece in set(pieces)}
    spelled.update((piece, [256 + number]) for number, piece in enumerate(known))
    numbers = array.array("i", itertools.chain.from_iterable(map(spelled.__getitem__, pieces)))
    blocks = torch.frombuffer(numbers, dtype=torch.int32).long().split(1 << 14)
    train = torch.cat([block for i, block in enumerate(blocks) if i % 16 != 8])
    print(f"text: {len(text)} bytes, {len(numbers)} pieces, {len(train)} to train on", flush=True)
    return train, torch.cat(blocks[8::16])


# --------------------------------------------------------------------------------------- models --


def norm(x: Tensor) -> Tensor:
    wide = x.float()
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-6)).type_as(x)


def product(x: Tensor, weight: Tensor) -> Tensor:
    """The product of x, [runs, tokens, inputs], and weight, [runs, outputs, inputs]."""
    return torch.bmm(x, weight.transpose(1, 2))


def attention(x: Tensor, qkv: Tensor, out: Tensor, heads: int, context: int) -> Tensor:
    runs, tokens, width = x.shape
    parts = product(norm(x), qkv).view(runs * (tokens // context), context, 3, heads, width // heads)
    q, k, v = parts.permute(2, 0, 3, 1, 4)
    mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    return x + product(mixed.transpose(1, 2).reshape(runs, tokens, width), out)


def perceptron(x: Tensor, up: Tensor, down: Tensor) -> Tensor:
    return x + product(functional.relu(product(norm(x), up)).square(), down)


def losses_of(x: Tensor, head: Tensor, targets: Tensor) -> Tensor:
    """The mean loss of each run."""
    logits = product(norm(x), head).float()
    return functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none").view(len(x), -1).mean(1)


def looked_up(table: Tensor, index: Tensor) -> Tensor:
    """The rows at `index` of the tables, where each run has a table of its own."""
    runs, rows = table.shape[:2]
    offset = torch.arange(runs, device=index.device).view(-1, 1) * rows
    return functional.embedding(index + offset, table.reshape(runs * rows, -1))


class Model:
    """Params of all runs in one array of [runs, elements], and weights and gradients that are views of such arrays.
    Each weight begins at a multiple of 128 elements."""

    def __init__(self, problem: Problem, seeds: list[int], run: Run) -> None:
        self.problem, self.run = problem, run
        shapes = self.shapes()
        sizes = [-(-math.prod(shape) // 128) * 128 for shape, _ in shapes.values()]
        places = list(itertools.accumulate(sizes, initial=0))
        self.master = torch.zeros(len(seeds), places[-1], device=run.device)
        for row, seed in zip(self.master, seeds, strict=True):
            generator = torch.Generator(run.device).manual_seed(seed)
            for place, (shape, deviation) in zip(places, shapes.values()):
                numbers = torch.randn(math.prod(shape), generator=generator, device=run.device)
                row[place : place + numbers.numel()] = deviation * numbers
        self.param = self.master.bfloat16()
        self.grad = torch.zeros_like(self.param)
        self.weights: dict[str, Tensor] = {}
        for place, (name, (shape, _)) in zip(places, shapes.items()):
            part = slice(place, place + math.prod(shape))
            self.weights[name] = self.param[:, part].view(-1, *shape).detach().requires_grad_()
            self.weights[name].grad = self.grad[:, part].view(-1, *shape)

    def shapes(self) -> dict[str, tuple[tuple[int, ...], float]]:
        """The shape of each weight, and the standard deviation of its initial values."""
        p = self.problem
        inner = p.width**-0.5
        shapes = {"token": ((p.vocabulary, p.width), 0.02), "head": ((p.vocabulary, p.width), 0.0)}
        if p.model == "gpt":
            shapes["place"] = ((p.context, p.width), 0.02)
        else:
            shapes.update((f"table{length}", ((p.rows, p.width), 0.02)) for length in (2, 3))
        for layer in range(p.layers):
            if p.model == "gpt":
                shapes[f"qkv{layer}"] = ((3 * p.width, p.width), inner)
                shapes[f"out{layer}"] = ((p.width, p.width), 0.0)
            shapes[f"up{layer}"] = ((4 * p.width, p.width), inner)
            shapes[f"down{layer}"] = ((p.width, 4 * p.width), 0.0)
        return shapes

    def losses(self, windows: Tensor) -> Tensor:
        """The losses of the runs for [runs, batch, context + 1] pieces."""
        p, w, functions = self.problem, self.weights, self.run.functions
        inputs, targets = windows[..., :-1], windows[..., 1:]
        runs, batch, context = inputs.shape
        x = looked_up(w["token"], inputs.flatten(1))
        if p.model == "gpt":
            x = x + w["place"].repeat(1, batch, 1)
        else:
            key = inputs
            for length in (2, 3):
                key = key * HASH_FACTOR + functional.pad(inputs, (length - 1, 0))[..., :context]
                row = ((key * HASH_FACTOR) >> 32) % p.rows
                x = x + looked_up(w[f"table{length}"], row.flatten(1))
        for layer in range(p.layers):
            if p.model == "gpt":
                x = functions["attention"](x, w[f"qkv{layer}"], w[f"out{layer}"], p.heads, context)
            x = functions["perceptron"](x, w[f"up{layer}"], w[f"down{layer}"])
        return functions["losses_of"](x, w["head"], targets.flatten(1))

    def gradients(self, windows: Tensor, scale: float) -> Tensor:
        self.grad.zero_()
        losses = self.losses(windows)
        (losses.sum() * scale).backward()
        return losses.detach()


# ------------------------------------------------------------------------------------- training --


class Updates:
    """Makes the steps of one form, and samples how many codes lie at the ends of their range."""

    def __init__(self, problem: Problem, form: Form, seeds: list[int], master: Tensor, param: Tensor, run: Run) -> None:
        self.form, self.run, self.samples = form, run, []
        self.state: State = new_state(form, master)
        self.param = param.view(self.state.master.shape)
        rows, keys = [], []
        for step in range(problem.steps):
            betas = value_at(step, problem.betas)
            rate = min(1.0, 10 * (step + 1) / problem.steps) * min(1.0, (1 - step / problem.steps) / 0.7)
            if problem.model == "bowl":
                rate = min(1.0, 2 * (1 - step / problem.steps))
            coefficients = Coefficients(rate * problem.lr, *betas, step + 1, problem.decay)
            rows.append(coefficients.row(form, value_at(step - 1, problem.betas)))
            keys.append([step_key(seed + 1000 * form.nudge, step + 1) for seed in seeds])
        self.rows = torch.tensor(rows, device=run.device)
        self.keys = torch.tensor(keys, dtype=torch.int32, device=run.device)
        self.update = update if problem.model == "bowl" else run.functions["update"]  # a bowl is too small to compile

    @torch.no_grad()
    def step(self, step: int, grad: Tensor, factor: Tensor) -> None:
        grouped = grad.view(self.param.shape)
        row, keys = self.rows[step].clone(), self.keys[step].clone()  # a clone is aligned
        self.update(self.form, self.state.master, self.state.moments, self.param, grouped, factor, row, keys)
        if step % SAMPLE_STEPS == 0 or step + 1 == len(self.rows):
            self.run.check_time()
            self.samples.append([step, *(round(share, 7) for share in ends(self.form, self.state.moments))])


def clip_factor(grad: Tensor, clip: float) -> Tensor:
    if math.isinf(clip):
        return torch.ones(len(grad), device=grad.device)
    return (clip / (torch.linalg.vector_norm(grad, dim=1, dtype=torch.float32) + 1e-6)).clamp(max=1)


def train_text(problem: Problem, form: Form, seeds: list[int], run: Run) -> tuple[list[float], list[list[float]]]:
    """The loss of each seed's run on the text held out, and the samples of Updates."""
    assert run.text is not None
    train, held_out = run.text
    model = Model(problem, seeds, run)
    updates = Updates(problem, form, seeds, model.master, model.param, run)
    length, within = problem.context + 1, torch.arange(problem.context + 1, device=run.device)
    generators = [torch.Generator().manual_seed(seed) for seed in seeds]
    shape = (problem.steps, problem.batch)
    places = torch.stack([torch.randint(len(train) - length, shape, generator=one) for one in generators], 1)
    places = places.to(run.device)
    evaluated = torch.arange(problem.evaluated * problem.batch, device=run.device)
    evaluated = evaluated * ((len(held_out) - length) // len(evaluated))
    evaluate_at = {problem.steps - i * (problem.steps // (10 * EVALUATIONS)) for i in range(EVALUATIONS)}
    found = torch.zeros(len(seeds), device=run.device)
    began = time.monotonic()
    for step in range(problem.steps):
        losses = model.gradients(train[places[step][..., None] + within], value_at(step, problem.scales))
        updates.step(step, model.grad, clip_factor(model.grad, problem.clip))
        if (step + 1) % max(problem.steps // 5, 1) == 0:
            print(f"    step {step + 1}: {losses.mean():.4f}, {time.monotonic() - began:.1f} s", flush=True)
        if step + 1 in evaluate_at:
            with torch.no_grad():
                for part in evaluated.split(problem.batch):
                    found += model.losses(held_out[part[:, None] + within].expand(len(seeds), -1, -1))
    return (found / (len(evaluate_at) * problem.evaluated)).tolist(), updates.samples


def train_bowl(problem: Problem, form: Form, seeds: list[int], run: Run) -> tuple[list[float], list[list[float]]]:
    """A quadratic bowl whose curvatures span four decades. The gradients have noise as large as a typical gradient.
    One in a thousand is a thousand times too large, and is then the largest number of its group."""
    size = 1 << 15
    generators = [torch.Generator(run.device).manual_seed(seed) for seed in seeds]

    def each(function: Callable[..., Tensor]) -> Tensor:
        return torch.stack([function(size, generator=one, device=run.device) for one in generators])

    curvature = 10.0 ** (4 * each(torch.rand) - 4)
    master = each(torch.randn)
    updates = Updates(problem, form, seeds, master, torch.empty_like(master), run)
    master, factor = updates.state.master.view(len(seeds), size), torch.ones(len(seeds), device=run.device)
    counted = problem.steps // 10
    found = torch.zeros(len(seeds), device=run.device)
    for step in range(problem.steps):
        grad = curvature * (master + each(torch.randn))
        grad = torch.where(each(torch.rand) < 1e-3, 1000 * grad, grad)
        updates.step(step, grad, factor)
        if step >= problem.steps - counted:
            found += (curvature * master.square()).sum(1) / curvature.sum(1) / counted
    return found.tolist(), updates.samples


def train_or_without_compiler(
    problem: Problem, form: Form, seeds: list[int], run: Run
) -> tuple[list[float], list[list[float]]]:
    """A compiled run that fails may fail because of the compiler, so it is repeated eagerly, and all later runs are
    eager too."""
    train = train_bowl if problem.model == "bowl" else train_text
    try:
        return train(problem, form, seeds, run)
    except OutOfTime:
        raise
    except Exception as error:
        if not run.compile or problem.model == "bowl":
            raise
        print(f"  once more, without torch.compile, after {type(error).__name__}: {str(error)[:2000]}", flush=True)
    run.eager()
    return train(problem, form, seeds, run)


def train_all(options: argparse.Namespace, run: Run, problems: list[Problem]) -> None:
    """Trains batch after batch until the budget is spent."""
    results: pathlib.Path = options.results
    results.touch()
    if results.stat().st_size and not results.read_text().endswith("\n"):
        with results.open("a") as file:
            file.write("\n")  # ends a line that an interrupted call has left
    done = {(row["problem"], row["form"], row["seed"]) for row in read_results(results)}
    vocabularies = {p.vocabulary for p in problems if p.model != "bowl"}
    if vocabularies:
        limit = 1 << 20 if options.tiny else TEXT_BYTES
        train, held_out = read_text(vocabularies.pop(), limit)
        run.text = train.to(run.device), held_out.to(run.device)
    left = []
    for problem in problems:
        longest = 0.0
        for name in problem.forms:
            seeds = [seed for seed in range(1, problem.seeds + 1) if (problem.name, name, seed) not in done]
            if not seeds or (options.forms and name not in options.forms):
                continue
            began = time.monotonic()
            print(f"{problem.name}: {name}", flush=True)
            try:
                if began + longest > run.deadline:
                    raise OutOfTime
                losses, samples = train_or_without_compiler(problem, FORMS[name], seeds, run)
            except Exception as error:
                left.append(f"{problem.name}: {name}")
                if not isinstance(error, OutOfTime):
                    traceback.print_exc(file=sys.stdout)
                continue
            seconds = round(time.monotonic() - began, 2)
            # The first batch compiles, so later batches take no longer than it.
            longest = min(longest, seconds) if longest else seconds
            print(f"  {' '.join(f'{loss:.5f}' for loss in losses)}, {seconds} s", flush=True)
            row = {"problem": problem.name, "form": name, "steps": problem.steps, "batch_seconds": seconds}
            row |= {"device": device_name(run.device), "torch": torch.__version__, "ends": samples}
            with results.open("a") as file:
                file.writelines(json.dumps(row | {"seed": s, "loss": loss}) + "\n" for s, loss in zip(seeds, losses))
    print("left for another run with the same file: " + "; ".join(left) if left else "nothing is left", flush=True)


def device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"


# ---------------------------------------------------------------------------------------- table --


def read_results(path: pathlib.Path) -> list[dict[str, Any]]:
    """Ignores a line that an interrupted call has left unfinished."""
    rows = []
    for line in path.read_text().splitlines():
        try:
            rows.append(json.loads(line))
        except json.JSONDecodeError:
            print(f"{path}: a line that is not whole is passed over", file=sys.stderr)
    return rows


@dataclasses.dataclass
class Comparison:
    """One form compared with fp32 on one problem, over the seeds that both have."""

    off: list[float]  # the difference for each seed, in %
    judged_as: str
    standard_error: float  # in %, for text; NaN if there is no nudged run

    @property
    def verdict(self) -> str:
        if any(not math.isfinite(each) for each in self.off):
            return "FAIL"
        if self.judged_as == "text":
            if math.isnan(self.standard_error):
                return "-"
            return "PASS" if abs(statistics.mean(self.off)) <= 2 * self.standard_error else "FAIL"
        return "FAIL" if self.judged_as == "outliers" and max(map(abs, self.off)) > 1 else "PASS"


def standard_error(losses: dict[str, dict[int, float]], seeds: list[int]) -> float:
    """The standard error of the mean over seeds of a run's difference from the fp32 run, if only a nudge
    distinguishes them; in %."""
    squares, free = 0.0, 0
    for seed in seeds:
        same = [100 * losses[n][seed] / losses["fp32"][seed] for n in REFERENCES if seed in losses.get(n, {})]
        if len(same) > 1:
            squares += statistics.variance(same) * (len(same) - 1)
            free += len(same) - 1
    return math.sqrt(2 * squares / free / len(seeds)) if free else math.nan


def compare(problem: Problem, rows: list[dict[str, Any]]) -> dict[str, Comparison]:
    losses: dict[str, dict[int, float]] = collections.defaultdict(dict)
    for row in rows:
        losses[row["form"]][row["seed"]] = row["loss"]
    compared = {}
    for name in (name for name in FORMS if name in losses):
        seeds = sorted(losses[name].keys() & losses["fp32"].keys())
        if seeds:
            off = [100 * (losses[name][seed] / losses["fp32"][seed] - 1) for seed in seeds]
            compared[name] = Comparison(off, problem.judged_as, standard_error(losses, seeds))
    return compared


def shares(rows: list[dict[str, Any]], form: str) -> str:
    samples = [sample[1:] for row in rows if row["form"] == form for sample in row["ends"] if len(sample) > 1]
    if not samples:
        return ""
    columns = zip(*samples, strict=True)
    return ", ".join(f"{100 * max(each):.2g} ({100 * each[-1]:.2g})" for each in columns)


def aligned(table: list[list[str]]) -> str:
    widths = [max(len(row[i]) for row in table) for i in range(len(table[0]))]
    lines = ["| " + " | ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)) + " |" for row in table]
    return "\n".join([lines[0], "|" + "|".join("-" * (w + 2) for w in widths) + "|", *lines[1:]])


def print_table(path: pathlib.Path, problems: list[Problem]) -> None:
    rows, verdicts = read_results(path), collections.defaultdict(dict)
    for problem in problems:
        mine = [row for row in rows if row["problem"] == problem.name]
        compared = compare(problem, mine)
        if not compared:
            continue
        table = [["stored as", "bytes", "loss", "off fp32, %: mean", "each seed", "at ends, %: most (last)", "gate"]]
        for name, one in compared.items():
            loss = statistics.mean(row["loss"] for row in mine if row["form"] == name)
            each = " ".join(f"{off:+.2f}" for off in one.off)
            mean = f"{statistics.mean(one.off):+.3f}"
            verdict = "" if name == "fp32" else one.verdict
            table.append([name, f"{FORMS[name].bytes:.2f}", f"{loss:.4f}", mean, each, shares(mine, name), verdict])
            verdicts[name][problem.name] = one.verdict
        gates = {"text": "the mean within {:.3f} %, two standard errors", "outliers": "each seed within 1 %"}
        error = compared[next(iter(compared))].standard_error
        gate = gates.get(problem.judged_as, "no NaN").format(2 * error)
        head = f"**{problem.name}** ({mine[0]['steps']:,} steps, {mine[0]['device']}; gate: {gate})"
        print(f"\n{head}\n\n{aligned(table)}")
    table = [["stored as", "bytes", "verdict", "fails on", "was not run on"]]
    for name in (name for name in verdicts if name not in REFERENCES):
        fails = [problem for problem, verdict in verdicts[name].items() if verdict == "FAIL"]
        missing = [p.name for p in problems if p.judged_as != "NaN alone" and p.name not in verdicts[name]]
        verdict = "FAIL" if fails else "PASS" if "PASS" in verdicts[name].values() else "-"
        table.append([name, f"{FORMS[name].bytes:.2f}", verdict, ", ".join(fails), ", ".join(missing)])
    print(f"\n**The gate**\n\n{aligned(table)}")


# ----------------------------------------------------------------------------------------- main --


def parse() -> argparse.Namespace:
    names = [problem.name for problem in PROBLEMS]
    parser = argparse.ArgumentParser(description="Compares forms of AdamW's state in few bytes by losses of trainings.")
    parser.add_argument("--results", type=pathlib.Path, help="JSON lines: what is there stays, and is not run again")
    parser.add_argument("--table", type=pathlib.Path, help="print what such a file says, and train nothing")
    parser.add_argument("--check", action="store_true", help="check the codes on the device first")
    parser.add_argument("--problems", nargs="+", choices=names, default=names)
    parser.add_argument("--forms", nargs="+", choices=list(FORMS), help="all of a problem's if left out")
    parser.add_argument("--seeds", type=int, help="of each problem")
    parser.add_argument("--budget-seconds", type=float, default=math.inf)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--no-compile", action="store_true", help="slower; the same codes")
    parser.add_argument("--tiny", action="store_true", help="models and steps as small as show that all of it runs")
    return parser.parse_args()


def main() -> None:
    began = time.monotonic()
    warnings.filterwarnings("ignore", "grad and param do not obey the gradient layout contract")
    options = parse()
    problems = [tiny(problem) if options.tiny else problem for problem in PROBLEMS]
    if options.table:
        print_table(options.table, problems)
        return
    device = torch.empty(0, device=options.device).device  # the device with its index
    run = Run(device, not options.no_compile, began + options.budget_seconds)
    run.eager()
    if not options.no_compile:
        run.compile = True
        run.functions = {name: torch.compile(each, dynamic=False) for name, each in run.functions.items()}
    for limit in ("recompile_limit", "cache_size_limit"):  # every form is one more version of the same code
        if hasattr(torch._dynamo.config, limit):
            setattr(torch._dynamo.config, limit, 256)
    if options.check and not check_codes(device, run.compile):
        sys.exit("the codes are not what few_bytes_codes/forms.py says")
    if options.results:
        seeds = {"seeds": options.seeds} if options.seeds else {}
        chosen = [dataclasses.replace(one, **seeds) for one in problems if one.name in options.problems]
        train_all(options, run, chosen)


if __name__ == "__main__":
    main()
