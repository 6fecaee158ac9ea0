"""The package as users see it: its names, its version, what works without torch, the lines in the README, and the
`hybridopt` command as Python runs it. tests/tools tests what the command does."""

import inspect
import os
import pydoc
import re
import subprocess
import sys
import types
from pathlib import Path

import pytest
import torch
from torch import nn

import hybridopt
from hybridopt import abi
from hybridopt.base.units import readable
from hybridopt.changes import wire_forms
from hybridopt.settings.options import DEFAULT_OPTIONS
from models import PAIRS, perceptron, set_gradients
from scripts import ten_lines

CLASSES = {hybridopt.Muon, *(pair[0] for pair in PAIRS.values())}


def test_version_is_the_librarys():
    assert re.fullmatch(r"\d+\.\d+\.\d+", hybridopt.__version__)
    assert abi.build_info().startswith(f"hybridopt {hybridopt.__version__},")


def test_every_name_is_listed_and_there():
    """The names hold no matter what has been imported from the package before, including its modules."""
    assert hybridopt.optimizers.__name__ == "hybridopt.optimizers" and hybridopt.sys is sys
    assert dir(hybridopt) == sorted(hybridopt.__all__)
    public = {"OffloadOptimizer", "OffloadOptions", "ActivationStash", "Plan", "Stats", "StepResult", "TensorShard"}
    public |= {"WeightChange", "WeightPatch", "apply_changes", "gather_changes", "muon_groups", "ShardedMuon"}
    modules = {"abi", "integrations", "stash"}
    assert set(dir(hybridopt)) == {cls.__name__ for cls in CLASSES} | public | modules | {"__version__"}
    for name in hybridopt.__all__:
        assert getattr(hybridopt, name) is not None
    with pytest.raises(AttributeError, match="module 'hybridopt' has no attribute 'Adamw'"):
        hybridopt.Adamw  # noqa: B018


KNOWN = {
    abi: {"Context", "OFFLOAD_ADAMW", "offload_param_t", "checkpoint_newest"},
    hybridopt.stash: {"ActivationStash", "Choice"},
    wire_forms: {"vllm_patches", "verl_flushes", "write_slime_version"},
}


@pytest.mark.parametrize("module", KNOWN)
def test_modules_list_their_own_names_alone(module):
    names = dir(module)
    values = {name: getattr(module, name) for name in names}
    assert names == sorted(names) and not any(name.startswith("_") for name in names)
    assert [name for name, value in values.items() if isinstance(value, types.ModuleType)] == []
    # What another package has made is none of its names; the types of functions in the header come from ctypes.
    elsewhere = [name for name, value in values.items() if not type_of(value).__module__.startswith(("hybridopt", "builtins"))]
    assert [name for name in elsewhere if not name.startswith("offload_")] == []
    assert KNOWN[module] <= set(names)


def type_of(value):
    """The value, if it is a class or function, or else its type."""
    return value if hasattr(value, "__module__") else type(value)


def test_what_calls_return_says_what_it_is(tmp_path):
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    optimizer = hybridopt.AdamW(model.parameters(), max_grad_norm=None)
    hooks, overlap = optimizer.hook_gradients(), optimizer.overlap(model)
    assert repr(hooks) == "<hook_gradients() of AdamW, until remove()>"
    assert repr(overlap) == "<overlap(Sequential) of AdamW, until remove()>"
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    save = optimizer.save_checkpoint(tmp_path / "saved", wait=False)
    save.wait()
    assert repr(save) == f"<save to {str(tmp_path / 'saved')!r}, ended>"
    hooks.remove(), overlap.remove()
    assert repr(hooks) == "<hook_gradients() of AdamW, removed>"
    assert repr(overlap) == "<overlap(Sequential) of AdamW, removed>"
    stash = hybridopt.ActivationStash(budget=1 << 20)
    both = stash.wrap([*model])
    assert repr(both) == "<wrap() of 2 modules, until remove()>"
    both.remove()
    one = stash.wrap(model[0])
    assert (repr(both), repr(one)) == ("<wrap() of 2 modules, removed>", "<wrap() of 1 module, until remove()>")
    one.remove()
    assert repr(one) == "<wrap() of 1 module, removed>"
    assert repr(stash("a key")) == "<stash('a key'), for a with statement>"
    context = abi.Context(device_kind=abi.OFFLOAD_DEVICE_HOST)
    assert repr(context) == "<hybridopt.abi.Context, open>"
    context.close()
    assert repr(context) == "<hybridopt.abi.Context, closed>"


def test_names_and_version_do_not_need_torch():
    program = (
        "import sys; sys.modules['torch'] = None; import hybridopt; "
        "print(hybridopt.__version__, 'AdamW' in dir(hybridopt))"
    )
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert run.stdout.split() == [hybridopt.__version__, "True"]


def test_without_torch_the_error_says_so():
    program = "import sys; sys.modules['torch'] = None; from hybridopt import AdamW"
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert run.returncode == 1
    said = run.stderr.splitlines()[-1]
    assert said.startswith("ImportError: hybridopt.AdamW needs torch, which this Python (")
    assert said.endswith("(pip install torch), or use hybridopt.abi, which does without")


def test_another_missing_module_is_named_as_it_is():
    program = "import sys, torch; sys.modules['numbers'] = None; from hybridopt import AdamW"
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert "import of numbers halted" in run.stderr.splitlines()[-1]


def documented(text):
    """The names and defaults of the arguments that a docstring documents: {"threads": "0"}."""
    found = {}
    for names, default in re.findall(r"^        (\w[\w, ]*) \(.*?(?:, default (.*))?\): ", text, re.MULTILINE):
        found.update(dict.fromkeys(names.split(", "), default))
    return found


def test_the_stash_without_torch_says_so():
    program = "import sys; sys.modules['torch'] = None; import hybridopt; hybridopt.stash"
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert run.stderr.splitlines()[-1].startswith("ImportError: hybridopt.stash needs torch, which this Python (")


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 bytes"), (1, "1 byte"), (1023, "1023 bytes"), (1024, "1.0 KiB"), (1536, "1.5 KiB"),
        ((1 << 20) - 1, "1.0 MiB"), (6 << 20, "6.0 MiB"), (80 << 30, "80.0 GiB"), (3 << 40, "3.0 TiB"), (1 << 50, "1024.0 TiB"),
    ],
)  # fmt: skip
def test_bytes_are_told_in_a_unit_that_fits(count, text):
    assert readable(count) == text


@pytest.mark.parametrize("cls", CLASSES, ids=lambda cls: cls.__name__)
def test_docstrings_list_every_argument_and_option(cls):
    arguments = dict(inspect.signature(cls.__init__).parameters)
    del arguments["self"], arguments["options"]
    expected = {name: argument.default for name, argument in arguments.items()} | DEFAULT_OPTIONS
    found = documented(cls.__doc__)
    assert set(found) == set(expected)
    assert not found.pop("params")
    for name, text in found.items():
        assert eval(text, {"torch": torch}) == expected[name], name
    assert "comm_timeout_seconds (float, default 600.0)" in pydoc.render_doc(cls, renderer=pydoc.plaintext)
    assert f"class {cls.__name__}(" in pydoc.render_doc(hybridopt, renderer=pydoc.plaintext)


def test_the_guide_has_every_option_in_its_table():
    guide = Path(__file__).resolve().parents[3] / "docs" / "PYTORCH.md"
    table = guide.read_text().partition("| keyword argument | default | |\n")[2].partition("\n\n")[0]
    cells = [line.split("|")[1] for line in table.splitlines()[1:]]
    assert sorted(re.findall(r"`(\w+)`", " ".join(cells))) == sorted(DEFAULT_OPTIONS)


def particulars(optimizer):
    """The part of repr() that torch's repr() does not have."""
    lines = repr(optimizer).partition("Offload\n")[2].splitlines()
    return dict(line.strip().split(": ", 1) for line in lines[:-1])


def test_repr_tells_fraction_layout_executor_and_bytes():
    model = torch.nn.Linear(1024, 1024, bias=False).bfloat16()
    optimizer = hybridopt.AdamW(
        model.parameters(), state_dtype="bf16", master_layout="split", host_executors="cpu", max_grad_norm=2.0
    )
    expected = {
        "offload_fraction": "1.0",
        "host_executors": "cpu",
        "master_layout": "split",
        "max_grad_norm": "2.0",
        "state_dtype": "torch.bfloat16",
        "bytes": "none before the first step; plan() tells them",
    }
    assert particulars(optimizer) == expected
    set_gradients(model.parameters(), 1)
    optimizer.step()
    assert re.fullmatch(
        r"6\.0 MiB of state on the host, 0 bytes on the device", particulars(optimizer)["bytes"]
    )
    assert particulars(optimizer)["steps"] == "1 applied and 0 skipped since it was made"
    optimizer.close()
    assert particulars(optimizer)["bytes"] == "none, the optimizer is closed"


def test_repr_tells_the_bytes_of_small_state():
    param = torch.nn.Parameter(torch.ones(1000))
    optimizer = hybridopt.AdamW([param])
    set_gradients([param], 1)
    optimizer.step()
    held = optimizer.stats().state_bytes.host
    assert 8000 <= held < 1 << 20
    assert particulars(optimizer)["bytes"] == f"{held / 1024:.1f} KiB of state on the host, 0 bytes on the device"


def test_repr_and_stats_tell_steps_of_a_loaded_checkpoint_apart(tmp_path):
    optimizers = [hybridopt.AdamW(perceptron().named_parameters()) for _ in range(2)]
    for optimizer, steps in zip(optimizers, (3, 1)):
        for _ in range(steps):
            set_gradients(optimizer.param_groups[0]["params"], 1)
            optimizer.step()
    optimizers[0].save_checkpoint(tmp_path / "saved")
    optimizers[1].load_checkpoint(tmp_path / "saved")
    assert optimizers[1].stats().steps_applied == 1
    loaded = "; the checkpoint that was loaded has 3"
    assert particulars(optimizers[1])["steps"] == f"1 applied and 0 skipped since it was made{loaded}"
    optimizers[1].step()
    assert optimizers[1].last_step().step == 4
    assert particulars(optimizers[1])["steps"] == f"2 applied and 0 skipped since it was made{loaded}"
    assert "`steps_applied` goes on from what this" in hybridopt.Stats.__doc__


def test_repr_in_a_forked_child_does_not_raise():
    optimizer = hybridopt.SGD(perceptron().parameters(), momentum=0.9)
    set_gradients((param for group in optimizer.param_groups for param in group["params"]), 1)
    optimizer.step()
    child = os.fork()
    if child == 0:
        os._exit(0 if particulars(optimizer)["bytes"].startswith("not known: ") else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


# ------------------------------------------------------------------------ the README's ten lines --


def test_ten_lines_of_pytorch_run_twice(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    variables = {}
    for _ in range(2):
        exec(compile(ten_lines(), "README.md", "exec"), variables)
        assert variables["optimizer"].stats().steps_applied == 100
        *losses, shown = capsys.readouterr().out.split("\n", 4)
        losses = [float(line.split()[-1]) for line in losses]
        assert len(losses) == 4 and losses[-1] < losses[0]
        assert shown.startswith("AdamW (") and "offload_fraction" in shown, shown


# ------------------------------------------------------------------------------------ the command --


def command(*arguments, **environment):
    return subprocess.run(
        [sys.executable, "-m", "hybridopt", *arguments],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
    )


def test_runs_the_program_with_its_arguments_and_exit_code():
    run = command("plan", "7B", "--host-memory", "1TiB", "--json")
    assert run.returncode == 0 and '"elements": 7000000000' in run.stdout, run
    run = command("plan", "many")
    assert run.returncode == 2 and "expected a number of parameters" in run.stderr, run


def test_without_the_program_it_says_where_to_get_it(tmp_path):
    run = command("info", HYBRIDOPT_TOOL=str(tmp_path / "absent"))
    assert run.returncode == 1
    assert f"there is no program {tmp_path / 'absent'}; install the package with pip" in run.stderr
