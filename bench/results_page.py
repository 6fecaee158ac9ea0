#!/usr/bin/env python3
"""Draws the tables and plots of the docs from what was measured: bench/results/*.json.

python3 bench/results_page.py           writes them into docs/PERFORMANCE.md, README.md and docs/plots
python3 bench/results_page.py --check   says whether they are what it would write

A file of bench/results is a list of runs. A run says what was measured, on which machine, when, at which commit and
by which command (null: not recorded), then has columns, rows of figures as they are shown, and remarks: sentences that
say what explains or limits the figures. A cell is a text, a number, null or a pair of quartiles.

A page shows a run between two comments. Words behind the run's name choose parts of it:
    <!-- result: NAME -->          where it comes from, the table, the remarks
    <!-- result: NAME table -->    the table alone; "remarks" and "source" are the other parts
    <!-- result: NAME table REGEX -->   the rows, or the remarks, that match
    <!-- end of result -->
"""

import json
import pathlib
import re
import sys
import textwrap

ROOT = pathlib.Path(__file__).resolve().parent.parent
PAGES = ("docs/PERFORMANCE.md", "README.md")
KEYS = {"id", "what", "machine", "date", "commit", "command", "columns", "rows"}
LINE_WIDTH = 118


def load():
    """The runs by name. Numbers keep the form in which they are written, because 1.10 has a digit more than 1.1."""
    runs = {}
    for path in sorted((ROOT / "bench/results").glob("*.json")):
        for run in json.loads(path.read_text(), parse_float=str, parse_int=str):
            where = f"{path.relative_to(ROOT)}: {run.get('id', 'a run without id')}"
            if missing := KEYS - run.keys():
                sys.exit(f"error: {where}: lacks {', '.join(sorted(missing))}")
            if run["id"] in runs:
                sys.exit(f"error: {where}: the id is there twice")
            for row in run["rows"]:
                if len(row) != len(run["columns"]):
                    sys.exit(f"error: {where}: a row has {len(row)} cells, expected {len(run['columns'])}: {row}")
            runs[run["id"]] = run
    return runs


# --------------------------------------------------------------------------------------- tables --


def shown(cell):
    if cell is None:
        return ""
    return f"{cell['q1']} .. {cell['q3']}" if isinstance(cell, dict) else cell


def source_lines(run):
    commit = "commit not recorded" if run["commit"] is None else f"commit {run['commit']}"
    command = "command not recorded" if run["command"] is None else f"`{run['command']}`"
    parts = (run["machine"], run.get("software"), run["date"], commit, command)
    where = "; ".join(part for part in parts if part)
    text = f"{run['what']}. *{where[0].upper()}{where[1:]}.*"
    return textwrap.wrap(text, LINE_WIDTH, break_on_hyphens=False, break_long_words=False)


def table_lines(run, pattern=""):
    rows = [row for row in run["rows"] if re.search(pattern, shown(row[0]))]
    if not rows:
        sys.exit(f"error: no row of {run['id']} matches '{pattern}'")
    cells = [run["columns"]] + [[shown(cell) for cell in row] for row in rows]
    lines = ["|" + "|".join(f" {cell} " if cell else " " for cell in row) + "|" for row in cells]
    return [lines[0], "|" + "---|" * len(run["columns"]), *lines[1:]]


def remark_lines(run, pattern=""):
    lines = []
    for remark in run.get("remarks", ()):
        if not re.search(pattern, remark):
            continue
        lines += textwrap.wrap(remark, LINE_WIDTH, initial_indent="- ", subsequent_indent="  ",
                               break_on_hyphens=False, break_long_words=False)
    return lines


def drawn(run, words):
    if not words:
        parts = [source_lines(run), table_lines(run), remark_lines(run)]
    else:
        part, *pattern = words
        parts = [{"source": source_lines, "table": table_lines, "remarks": remark_lines}[part](run, *pattern)]
    return "\n\n".join("\n".join(lines) for lines in parts if lines)


def page_text(page, runs):
    """The text of the page with every result drawn again."""

    def replace(match):
        name, *words = match.group(1).split(" ", 2)
        if name not in runs:
            sys.exit(f"error: {page} shows the result '{name}', which no file of bench/results has")
        return f"<!-- result: {match.group(1)} -->\n{drawn(runs[name], words)}\n<!-- end of result -->"

    pattern = r"<!-- result: (.*?) -->\n(?:(?!<!-- result:).)*?<!-- end of result -->"
    return re.sub(pattern, replace, (ROOT / page).read_text(), flags=re.DOTALL)


# ---------------------------------------------------------------------------------------- plots --

# Each entry: the run, the columns that become bars, the label of the axis, and a column whose value stands after the
# label of a row.
# A picture's result, the columns that it shows, their text, the column in parentheses, and the value with a line.
PLOTS = {
    "iterations.svg": ("iterations", ("8 K tokens", "32 K tokens"), "time of an iteration over that with everything "
                       "on the GPU (line: 1)", None, 1),
    "update.svg": ("peers", ("Mparam/s",), "million parameters a second (bytes a parameter)", "bytes a parameter", None),
    "fractions.svg": ("fractions", ("ms",), "ms a step, by the share of the state on the GPU", None, None),
}
COLORS = ("#3465a4", "#e9a03b")
BAR_WIDTH, BAR_HEIGHT, LETTER_WIDTH = 380, 14, 6.9


def number(cell):
    return float(cell) if isinstance(cell, str) and re.fullmatch(r"-?[\d.]+", cell) else None


def svg_text(x, y, text, anchor="start", size=12):
    text = text.replace("&", "&amp;").replace("<", "&lt;")
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-size="{size}">{text}</text>'


def svg_bars(run, columns, axis, noted, line):
    """Draws the rows that have a number in the first of these columns, with a bar for each column."""
    at = [run["columns"].index(column) for column in columns]
    rows = [row for row in run["rows"] if number(row[at[0]]) is not None]
    largest = max(number(row[i]) or 0 for row in rows for i in at)
    labels = [row[0].replace("`", "") + (f" ({row[run['columns'].index(noted)]})" if noted else "") for row in rows]
    left_of_bars = int(16 + LETTER_WIDTH * max(len(label) for label in labels))
    y, parts = 34, [svg_text(8, 20, axis)]
    left_of_key = max(left_of_bars, int(24 + LETTER_WIDTH * len(axis)))
    for color, column, left in zip(COLORS, columns if len(columns) > 1 else (), (left_of_key, left_of_key + 130)):
        parts.append(f'<rect x="{left}" y="9" width="12" height="12" fill="{color}"/>')
        parts.append(svg_text(left + 18, 20, column))
    for row, label in zip(rows, labels):
        parts.append(svg_text(left_of_bars - 8, y + BAR_HEIGHT * len(at) / 2 + 4, label, "end"))
        for color, i in zip(COLORS, at):
            value = number(row[i])
            if value is not None:
                width = BAR_WIDTH * value / largest
                parts.append(f'<rect x="{left_of_bars}" y="{y}" width="{width:.1f}" height="{BAR_HEIGHT - 1}" '
                             f'fill="{color}"/>')
                parts.append(svg_text(left_of_bars + width + 4, y + BAR_HEIGHT - 3, row[i], size=11))
            y += BAR_HEIGHT
        y += 7
    if line is not None:
        x = left_of_bars + BAR_WIDTH * line / largest
        parts.append(f'<line x1="{x:.1f}" y1="30" x2="{x:.1f}" y2="{y - 4}" stroke="black" stroke-dasharray="4 3"/>')
    where = "; ".join(part for part in (run["machine"], run.get("software"), run["date"]) if part)
    parts.append(svg_text(8, y + 14, where, size=10))
    width = max(left_of_bars + BAR_WIDTH + 60, left_of_key + 260 if len(columns) > 1 else 0,
                int(24 + 6 * max(len(where), len(axis))))
    height = y + 22
    return "\n".join([f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
                      f'font-family="sans-serif">', f'<rect width="{width}" height="{height}" fill="white"/>',
                      *parts, "</svg>", ""])


def main():
    if sys.argv[1:] not in ([], ["--check"]):
        sys.exit(__doc__)
    runs = load()
    texts = {page: page_text(page, runs) for page in PAGES}
    for name, (run, *rest) in PLOTS.items():
        texts[f"docs/plots/{name}"] = svg_bars(runs[run], *rest)
    for name, text in texts.items():
        path = ROOT / name
        if not sys.argv[1:]:
            path.parent.mkdir(exist_ok=True)
            path.write_text(text)
        elif not path.exists() or path.read_text() != text:
            sys.exit(f"FAILED: {name} is not what bench/results has: run bench/results_page.py")
    print(f"{len(runs)} runs; {', '.join(texts)} show what they have")


if __name__ == "__main__":
    main()
