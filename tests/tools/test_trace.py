"""hybridopt trace: what its table says of a trace, of one that it has recorded and of one that is there."""

import json

import pytest
from command import DONE, USAGE, misuse, on_a_terminal, refuse, succeed, tool

SMALL = ["--params", "300K", "--steps", "2"]


def bar(row, name, begin, end, step=1, **more):
    return {"ph": "X", "name": name, "pid": 1, "tid": row, "ts": begin, "dur": end - begin, "args": {"step": step, **more}}


def row(number, name, place):
    return [
        {"ph": "M", "name": "thread_name", "pid": 1, "tid": number, "args": {"name": name}},
        {"ph": "M", "name": "thread_sort_index", "pid": 1, "tid": number, "args": {"sort_index": place}},
    ]


def trace_of(*events, **head):
    head = {"library": "hybridopt", "device": "host", "dropped_events": 0, "clock_error_us": 2.5, **head}
    name = {"ph": "M", "name": "process_name", "pid": 1, "args": {"name": "hybridopt"}}
    return {"displayTimeUnit": "ms", "otherData": head, "traceEvents": [name, *events]}


# One row with bars in each other, one with a bar that overlaps another, and a caller, who stands at the top.
MADE = trace_of(
    *row(0, "steps and moves", 1),
    *row(7, "worker 0", 8),
    *row(9, "calling thread 0", 0),
    bar(0, "step", 1000, 11000),
    bar(0, "norm", 1000, 3000),
    bar(0, "await workers", 4000, 9000),
    bar(0, "await params up", 9500, 10000, chunk=3),
    bar(0, "step", 12000, 13000, step=2),
    bar(7, "update", 4000, 8000, bytes=1024),
    bar(7, "update", 6000, 8500, bytes=1024),
    bar(9, "wait", 3000, 21000, step=2),
)


def written(path, trace):
    path.write_text(trace if isinstance(trace, str) else json.dumps(trace))
    return path


def covered(bars):
    """The time that bars cover, counted between the points at which any of them begins or ends."""
    points = sorted({point for begin, end in bars for point in (begin, end)})
    return sum(
        right - left
        for left, right in zip(points, points[1:], strict=False)
        if any(begin <= left and right <= end for begin, end in bars)
    )


def test_rows_and_waits_of_a_trace(tmp_path):
    told = json.loads(succeed("trace", written(tmp_path / "made.json", MADE), "--read", "--json"))
    assert told["steps"] == 2 and told["seconds"] == pytest.approx(0.020) and told["dropped_events"] == 0
    assert told["clock_error_seconds"] == pytest.approx(2.5e-6) and told["device"] == "host"
    rows = [tuple(row.values()) for row in told["rows"]]
    assert rows == [
        ("calling thread 0", 0, pytest.approx(0.018), 1, 0),
        ("steps and moves", pytest.approx(0.0055), pytest.approx(0.0055), 5, 0),
        ("worker 0", pytest.approx(0.0045), 0, 2, 2048),
    ]
    waits = [tuple(wait.values()) for wait in told["longest_waits"]]
    assert waits == [
        ("wait", "calling thread 0", 2, pytest.approx(0.002), pytest.approx(0.018)),
        ("await workers", "steps and moves", 1, pytest.approx(0.003), pytest.approx(0.005)),
        ("await params up", "steps and moves", 1, pytest.approx(0.0085), pytest.approx(0.0005)),
    ]


def test_the_text_of_a_trace(tmp_path):
    path = written(tmp_path / "made.json", MADE)
    lines = succeed("trace", path, "--read").splitlines()
    assert lines == [
        "2 steps on host, 20.0 ms from the first bar to the last",
        "",
        "row               busy %  waits %  bars   copied",
        "calling thread 0   0.000     90.0     1",
        "steps and moves     27.5     27.5     5",
        "worker 0            22.5    0.000     2  2.0 KiB",
        "",
        "longest waits    row               step    ms  from ms",
        "wait             calling thread 0     2  18.0     2.00",
        "await workers    steps and moves      1  5.00     3.00",
        "await params up  steps and moves      1  0.50     8.50",
        "",
        f"The picture: open https://ui.perfetto.dev and drag {path} there; it stays on your machine.",
    ]
    written(path, trace_of(device="a\x1b[2Jb", dropped_events=12))
    assert succeed("trace", path, "--read").splitlines()[:2] == [
        "0 steps on a\\x1b[2Jb, 0.000 ms from the first bar to the last",
        "12 events are missing: the trace had no room for them",
    ]


@pytest.mark.parametrize("device", ["none", "sim"])
def test_what_is_recorded_is_what_the_file_has(tmp_path, device):
    path = tmp_path / "step.json"
    told = json.loads(succeed("trace", path, *SMALL, "--device", device, "--json"))
    assert told["path"] == str(path) and told["steps"] == 2 and told["dropped_events"] == 0
    events = json.loads(path.read_text())["traceEvents"]
    names = {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}
    bars = [event for event in events if event["ph"] == "X"]
    of_file = {}
    assert not {0, events[0]["pid"]} & set(names)  # Perfetto shows threads 0 and 1 of process 1 in one row
    for number, name in names.items():
        mine = [(b["ts"], b["ts"] + b["dur"], b["name"]) for b in bars if b["tid"] == number]
        for begin, end, _ in mine:  # Perfetto leaves out what begins in another bar and ends behind it
            assert not any(other[0] < begin - 1e-6 < other[1] - 2e-6 < end - 3e-6 for other in mine)
        waits = covered([b[:2] for b in mine if b[2].startswith(("await ", "wait"))])
        busy = covered([b[:2] for b in mine]) - waits
        copied = sum(b["args"].get("bytes", 0) for b in bars if b["tid"] == number)
        of_file[name] = (pytest.approx(busy * 1e-6, abs=1e-8), pytest.approx(waits * 1e-6, abs=1e-8), len(mine), copied)
    assert {row["row"]: tuple(list(row.values())[1:]) for row in told["rows"]} == of_file
    on_device = {"stream: copies down", "stream: copies up"}
    assert on_device & set(names.values()) == (on_device if device == "sim" else set())
    longest = [wait["seconds"] for wait in told["longest_waits"]]
    assert longest == sorted(longest, reverse=True) and len(longest) in range(1, 6)


def test_the_training_that_is_recorded_is_the_one_that_was_asked_for(tmp_path):
    first, copied = {}, {}
    for name, arguments in {"host": [], "small": ["--small-state"], "device": ["--offload-fraction", "0"]}.items():
        path = tmp_path / f"{name}.json"
        first[name] = succeed("trace", path, *SMALL, "--device", "sim", *arguments).splitlines()[0]
        told = json.loads(succeed("trace", path, "--read", "--json"))
        copied[name] = sum(row["bytes"] for row in told["rows"])
    assert first["host"].startswith("2 steps of AdamW, behind a first one, over 0.30 M params of bf16 with fp32 state on ")
    assert first["small"].startswith("2 steps of AdamW, behind a first one, over 0.30 M params of bf16 with split masters, bf16 moments on ")
    assert copied["device"] == 0 and copied["host"] >= 2 * 2 * 300_000 and copied["small"] > 0


def test_a_terminal_sees_that_steps_are_recorded(tmp_path):
    shown, _ = on_a_terminal("trace", tmp_path / "step.json", *SMALL, "--device", "none")
    assert "recording steps .." in shown and shown.endswith("\r\x1b[K")
    narrow, _ = on_a_terminal("trace", tmp_path / "other.json", *SMALL, "--device", "none", columns=10)
    assert narrow == "\rrecording\x1b[K\r\x1b[K"  # no line reaches the last column, where it would wrap


def test_a_file_that_is_there_is_not_replaced(tmp_path):
    path = written(tmp_path / "mine.json", MADE)
    refuse(USAGE, f"FILE '{path}' exists; give another FILE, or --read", "trace", path, *SMALL)
    assert json.loads(path.read_text()) == MADE


def without(key):
    return {name: value for name, value in MADE.items() if name != key}


@pytest.mark.parametrize(
    ("trace", "text"),
    [
        ("no json", "the file is no JSON text, expected a trace"),
        ([], "is no trace of hybridopt; expected a file that"),
        ({"traceEvents": []}, "is no trace of hybridopt"),
        (without("traceEvents"), "is no trace of hybridopt"),
        (trace_of(library="another"), "is no trace of hybridopt"),
        (trace_of(device=3), "has otherData that is not understood"),
        (trace_of(dropped_events=-1), "has otherData that is not understood"),
        (trace_of(clock_error_us="2"), "has otherData that is not understood"),
        (trace_of(3), "has an event that is not understood"),
        (trace_of({"ph": "X"}), "has an event that is not understood"),
        (trace_of(bar(-1, "step", 0, 1)), "has an event that is not understood"),
        (trace_of(bar(1, "step", 0, 1e300)), "has an event that is not understood"),
        (trace_of(bar(1, 7, 0, 1)), "has an event that is not understood"),
        (trace_of(bar(1, "step", 0, 1, bytes="9")), "has an event that is not understood"),
        (trace_of({"ph": "B", "name": "x", "tid": 1, "args": {}}), "has an event that is not understood"),
    ],
)
def test_a_file_that_is_no_trace_is_refused(tmp_path, trace, text):
    refuse(USAGE, text, "trace", written(tmp_path / "file.json", trace), "--read")


def test_what_cannot_be_recorded_is_refused(tmp_path):
    path = tmp_path / "step.json"
    refuse(USAGE, "--params '1T' is 1000000000000 params, expected 1 to ", "trace", path, "--params", "1T")
    refuse(USAGE, "'gpt9' is no model", "trace", path, "--params", "gpt9")
    refuse(USAGE, "'/none.json' is not there, expected a config.json", "trace", path, "--params", "/none.json")
    for given, why in ((path, "No such file or directory"), (tmp_path, "Is a directory")):
        refuse(USAGE, f"FILE '{given}' cannot be used: {why}; name a file that is there", "trace", given, "--read")
    missing = f"FILE '{tmp_path}/missing/step.json': its folder '{tmp_path}/missing' cannot be used: No such file or directory"
    refuse(USAGE, missing + "; make it first", "trace", tmp_path / "missing" / "step.json", *SMALL)
    refuse(USAGE, f"FILE is '{path}/', expected the name of a file to make", "trace", f"{path}/")
    misuse("FILE: got '', expected a path", "trace", "")
    refuse(3, "no trace could be written there: could not create '/proc/step.json.", "trace", "/proc/step.json", *SMALL)
    assert "offload_" not in tool("trace", "/proc/step.json", *SMALL).stderr
    refused = tool("trace", path, *SMALL, "--device", "cuda")
    assert refused.returncode == DONE or refused.stderr.startswith("hybridopt: th")
    misuse("--steps: got '0', expected a whole number from 1 to 1000", "trace", path, "--steps", "0")
    misuse("--offload-fraction: got '2', expected a number from 0 to 1", "trace", path, "--offload-fraction", "2")
    misuse("--device: got 'tpu', expected cuda, sim or none", "trace", path, "--device", "tpu")
    misuse("--read excludes --steps", "trace", path, "--read", "--steps", "2")
