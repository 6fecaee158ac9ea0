"""Makes SkyRL importable without its packages for GPUs, data sets and servers. Not a test itself."""

import contextlib
import typing
from unittest import mock

import typing_extensions

from verl_on_cpu import leave_out


@contextlib.contextmanager
def importable():
    """SkyRL needs Python 3.12, since with an older one pydantic does not accept typing's TypedDict."""
    leave_out("datasets", "pandas", "flash_attn", "flash_attn.bert_padding")
    with mock.patch.object(typing, "TypedDict", typing_extensions.TypedDict):
        yield
