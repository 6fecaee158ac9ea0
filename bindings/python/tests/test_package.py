"""The package as people meet it: names, version, and what needs torch."""

import inspect
import os
import pydoc
import re
import subprocess
import sys

import pytest
import torch

import hybridopt
from hybridopt import abi
from hybridopt.options import DEFAULT_OPTIONS
from models import PAIRS, perceptron, set_gradients

CLASSES = {pair[0] for pair in PAIRS.values()}


def test_version_is_the_librarys():
    assert re.fullmatch(r"\d+\.\d+\.\d+", hybridopt.__version__)
    assert abi.build_info().startswith(f"hybridopt {hybridopt.__version__},")


def test_every_name_is_listed_and_there():
    assert set(hybridopt.__all__) <= set(dir(hybridopt))
    assert {"AdamW", "Lion", "OffloadOptions", "Plan", "__version__"} <= set(hybridopt.__all__)
    for name in hybridopt.__all__:
        assert getattr(hybridopt, name) is not None
    with pytest.raises(AttributeError, match="module 'hybridopt' has no attribute 'Adamw'"):
        hybridopt.Adamw  # noqa: B018


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
    """Names and defaults of a docstring's arguments: {"threads": "0"}."""
    found = {}
    for names, default in re.findall(r"^        (\w[\w, ]*) \(.*?(?:, default (.*))?\): ", text, re.MULTILINE):
        found.update(dict.fromkeys(names.split(", "), default))
    return found


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


def particulars(optimizer):
    """What repr() says beside torch's."""
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
        r"6\.0 MiB of state on the host, 0\.0 MiB on the device", particulars(optimizer)["bytes"]
    )
    optimizer.close()
    assert particulars(optimizer)["bytes"] == "none, the optimizer is closed"


def test_repr_in_a_forked_child_does_not_raise():
    optimizer = hybridopt.SGD(perceptron().parameters(), momentum=0.9)
    set_gradients((param for group in optimizer.param_groups for param in group["params"]), 1)
    optimizer.step()
    child = os.fork()
    if child == 0:
        os._exit(0 if particulars(optimizer)["bytes"].startswith("not known: ") else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
