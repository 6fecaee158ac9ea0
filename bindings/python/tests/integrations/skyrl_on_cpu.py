"""Makes SkyRL importable without its packages for GPUs, data sets and servers. Not a test itself."""

import contextlib
import importlib.util
import pathlib
import re
import typing
from unittest import mock

import typing_extensions

import hybridopt
from verl_on_cpu import leave_out

STRATEGY = "skyrl.backends.skyrl_train.distributed.fsdp_strategy"
FRAMEWORKS = pathlib.Path(__file__).parents[4] / "docs" / "FRAMEWORKS.md"


@contextlib.contextmanager
def importable():
    """SkyRL needs Python 3.12, since with an older one pydantic does not accept typing's TypedDict."""
    leave_out("datasets", "pandas", "flash_attn", "flash_attn.bert_padding")
    with mock.patch.object(typing, "TypedDict", typing_extensions.TypedDict):
        yield


def patched(options):
    """SkyRL's module with the lines that docs/FRAMEWORKS.md shows, and with options in addition to lr=."""
    spec = importlib.util.find_spec(STRATEGY)
    source = pathlib.Path(spec.origin).read_text()
    text = FRAMEWORKS.read_text().partition("\n## SkyRL\n")[2]
    removed, added = (re.search(rf"^[{sign}] +(.*)$", text, re.MULTILINE)[1] for sign in "-+")
    for old, new in ((removed, added), ("lr=optim_config.lr,", f"lr=optim_config.lr, **{options},")):
        assert source.count(old) == 1
        source = source.replace(old, new)
    module = importlib.util.module_from_spec(spec)
    module.hybridopt = hybridopt
    exec(compile(source, spec.origin, "exec"), module.__dict__)
    return module
