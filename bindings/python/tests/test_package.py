"""The package as people meet it: names, version, and what needs torch."""

import re
import subprocess
import sys

import pytest

import hybridopt
from hybridopt import abi


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
