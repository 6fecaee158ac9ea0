"""Translates the library's texts from the words of the C ABI into the words of this package.

hybridopt.abi is the C ABI with its own names, and its errors use the words of offload.h. The optimizers and the
stash have other names for the same things, so the texts that they raise and print are translated here."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from typing import Any

from .. import abi

# In these phrases the library advises a call that has another form in this package. The keys are regular expressions;
# they are applied before WORDS.
_PHRASES: dict[str, str | Callable[[re.Match[str]], str]] = {
    r"\bflags is 0x[0-9a-f]+: ": "",
    r"\blower device_fraction": "raise offload_fraction",
    r"\braise device_fraction": "lower offload_fraction",
    r"\b(?:options\.)?device_fraction (?:is )?(\d[\d.e+-]*)": lambda found: (
        f"offload_fraction {1.0 - float(found[1]):g}"
    ),
    r"\b(?:options\.)?device_fraction": "offload_fraction",
    r"chunk_elements, staging_slots, movable or": "movable or",
    r",(?: or)? make chunk_elements(?: or staging_slots)? smaller": "",
    r"set allow_pageable of the context": "set pin=False",
    r"tell the new one with offload_optimizer_bind, then reload": "call reload() first",
    r"\bbind and reload_params first": "call reload(params=True) first",
    r"; the trace is kept, call offload_optimizer_trace_stop again.*": "; give trace() another path",
    r"end it with offload_optimizer_trace_stop first": "leave its with statement first",
    r"\bgive offload_optimizer_trace_stop a path that can be written, or NULL.*": "give trace() a path that can be written",
    r"whose params have other names, such as": "whose params have other names (model.named_parameters() gives an optimizer "
    "those of the model), such as",
    r"call offload_optimizer_trace_start first": "begin one by trace()",
    r", or bind NULL(?: and step)?": "",
    r"call offload_optimizer_(?:commit|add_params|add_group)(?: first| before commit)?": "call step() first",
    r"\bin host memory with OFFLOAD_DEVICE_HOST": "on the CPU",
    r"OFFLOAD_MASTER_FP32 \(0\) or _SPLIT \(1\)": "'fp32' or 'split'",
    r"OFFLOAD_EXECUTORS_AUTO \(0\), _CPU \(1\) or _STREAMED \(2\)": "'auto', 'cpu' or 'streamed'",
}

WORDS = {
    "OFFLOAD_BF16": "torch.bfloat16",
    "OFFLOAD_EXECUTORS_AUTO": "'auto'",
    "OFFLOAD_EXECUTORS_CPU": "'cpu'",
    "OFFLOAD_EXECUTORS_STREAMED": "'streamed'",
    "OFFLOAD_FP16": "torch.float16",
    "OFFLOAD_FP32": "torch.float32",
    "OFFLOAD_LOAD_FRESH_MOMENTS": "fresh_moments=True",
    "OFFLOAD_LOAD_KEEP_STEPS": "keep_steps=True",
    "OFFLOAD_MASTER_FP32": "'fp32'",
    "OFFLOAD_MOVABLE_ACCUMULATE": "'accumulate'",
    "OFFLOAD_MOVABLE_GRADS": "'grads'",
    "OFFLOAD_MOVABLE_PARAMS": "'params'",
    "OFFLOAD_MOVABLE_STATES": "'states'",
    "OFFLOAD_MOVE_ACCUMULATE": "hook_gradients(accumulate=True)",
    "OFFLOAD_MOVE_DROP": "zero_grad()",
    "OFFLOAD_MUON": "Muon",
    "OFFLOAD_NUMA_INTERLEAVED": "'interleaved'",
    "OFFLOAD_NUMA_NEAR": "'near'",
    "OFFLOAD_PARAM_REPLICA": "replica_group=",
    "OFFLOAD_STATE_MASTER": "master_param",
    "OFFLOAD_STATE_MASTER_LOW": "master_low",
    "allow_pageable": "pin=False",
    "beta1": "betas[0]",
    "beta2": "betas[1]",
    "budget_bytes": "budget",
    "comm_timeout_ns": "comm_timeout_seconds",
    "grad_norm_max": "max_grad_norm",
    "moment_dtype": "state_dtype",
    "offload_checkpoint_newest": "hybridopt.abi.checkpoint_newest()",
    "offload_checkpoint_verify": "the command `hybridopt verify`",
    "offload_grads": "offload(grads=True)",
    "offload_optimizer_bind": "reload()",
    "offload_optimizer_refresh_masters": "refresh_masters()",
    "offload_optimizer_reload_states": "reload(states=True)",
    "offload_optimizer_state": "optimizer.state",
    "offload_optimizer_step": "step()",
    "offload_optimizer_wait": "synchronize()",
    "offload_params": "offload(params=True)",
    "offload_states": "offload(states=True)",
    "reload_grads": "reload(grads=True)",
    "reload_params": "reload(params=True)",
    "reload_states": "reload(states=True)",
}
# Names of params and files, which stay as they are. An apostrophe inside of one is taken for a part of it if another
# letter or apostrophe follows.
_QUOTED = re.compile(r"((?<!\w)'(?:[^']|'(?=[\w']))*'(?![\w']))")
_STRUCT = re.compile(r"(?<![\w.])(?:options|group)\.(?=\w)")
_WORD = re.compile(r"(?<![\w.])(?:" + "|".join(sorted(map(re.escape, WORDS), key=len, reverse=True)) + r")(?!\w)")


def in_python(text: str) -> str:
    """A text of the library in the words of this package."""
    return "".join(part if part.startswith("'") else _retold(part) for part in _QUOTED.split(text))


def _retold(part: str) -> str:
    for phrase, replacement in _PHRASES.items():
        part = re.sub(phrase, replacement, part)
    return _WORD.sub(lambda found: WORDS[found[0]], _STRUCT.sub("", part))


def retold(error: abi.HybridoptError) -> abi.HybridoptError:
    """An error of the library in the words of this package."""
    return abi.error_of(error.status, in_python(str(error)))


def _logged(_: Any, level: int, text: bytes) -> None:
    """Prints warnings to stderr, as the library itself does. Errors are not printed, because they are raised."""
    if level == abi.OFFLOAD_LOG_WARNING:
        print(f"hybridopt: {in_python(text.decode(errors='replace'))}", file=sys.stderr)


LOG = abi.offload_log_function_t(_logged)
