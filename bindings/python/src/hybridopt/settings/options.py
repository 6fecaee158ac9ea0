"""The keyword arguments that all optimizers of this package have in addition to torch's, in one row each."""

from __future__ import annotations

import difflib
import os
import textwrap
from collections.abc import Callable, Collection, Iterable
from typing import Annotated, Any, NamedTuple, TypedDict, TypeVar, cast, get_type_hints

import torch
from torch import nn

from .. import abi
from ..base.checks import check_word, is_finite, is_number, is_whole, is_word, listed, shown
from ..ranks.local_ranks import check_local_rank, nodes_of
from . import disk, placement

Optimizer = TypeVar("Optimizer", bound=torch.optim.Optimizer)

MASTER_LAYOUTS = {
    "fp32": abi.OFFLOAD_MASTER_FP32,
    "split": abi.OFFLOAD_MASTER_SPLIT,
    "split24": abi.OFFLOAD_MASTER_SPLIT24,
}
HOST_EXECUTORS = {
    "auto": abi.OFFLOAD_EXECUTORS_AUTO,
    "cpu": abi.OFFLOAD_EXECUTORS_CPU,
    "streamed": abi.OFFLOAD_EXECUTORS_STREAMED,
}
MOVABLE = {
    "params": abi.OFFLOAD_MOVABLE_PARAMS,
    "grads": abi.OFFLOAD_MOVABLE_GRADS,
    "states": abi.OFFLOAD_MOVABLE_STATES,
    "accumulate": abi.OFFLOAD_MOVABLE_ACCUMULATE | abi.OFFLOAD_MOVABLE_GRADS,
}
STATE_DTYPES = {
    "float32": torch.float32,
    "fp32": torch.float32,
    "bfloat16": torch.bfloat16,
    "bf16": torch.bfloat16,
}
MOST_THREADS = 1024  # of the library
MOST_SECONDS = 1e9  # the library counts nanoseconds in 63 bits
AUTO_BUFFER = "auto"
ALL_BYTES = (1 << 64) - 1  # as save_buffer_bytes of the library: the library chooses
NUMA_POLICIES = {"near": abi.OFFLOAD_NUMA_NEAR, "interleaved": abi.OFFLOAD_NUMA_INTERLEAVED}


# ---------------------------------------------------------------------- what one option may be --
# A check takes the name of an option and the value that the caller gives, and returns the value to use.

Check = Callable[[str, Any], Any]


def expect(is_right: Callable[[Any], bool], expected: str) -> Check:
    def check(name: str, value: Any) -> Any:
        if not is_right(value):
            raise ValueError(f"Invalid {name}: {shown(value)}, expected {expected}")
        return value

    return check


def one_of(words: Collection[str]) -> Check:
    def check(name: str, value: Any) -> Any:
        check_word(name, value, words)
        return value

    return check


def anything(_: str, value: Any) -> Any:
    return value


def group_of_ranks(name: str, group: Any) -> Any:
    available = torch.distributed.is_available()
    if group is not None and not (available and isinstance(group, torch.distributed.ProcessGroup)):
        raise TypeError(
            f"Invalid {name}: {shown(group)}, expected a torch.distributed.ProcessGroup that this rank is in, such "
            "as torch.distributed.group.WORLD, or None"
        )
    return group


def movable_words(movable: Any) -> tuple[str, ...]:
    """The words of the `movable` option, which may be one word or several."""
    words = listed(movable)
    if words is None:
        words = [movable]
    for word in words:
        if not isinstance(word, str) or word not in MOVABLE:
            raise ValueError(f"Invalid movable: {shown(word)}, expected some of {', '.join(MOVABLE)}")
    return tuple(words)


def state_dtype_of(state_dtype: torch.dtype | str) -> torch.dtype:
    """The dtype of moments, which configuration files name by a string."""
    for name, dtype in STATE_DTYPES.items():
        if state_dtype is dtype or is_word(state_dtype, name) or is_word(state_dtype, f"torch.{name}"):
            return dtype
    raise ValueError(
        f"Invalid state_dtype: {shown(state_dtype)}, expected torch.float32 or torch.bfloat16, or one of the "
        f"strings {', '.join(map(repr, STATE_DTYPES))}"
    )


# ----------------------------------------------------------------------------------- the options --


class Option(NamedTuple):
    """The row of an option, beside its name and its type."""

    kind: str  # the type, for people
    default: Any
    about: str
    check: Check = anything  # of this option alone; checked() compares options with each other
    changed_by: str = "give it to the constructor"  # after the optimizer has been made


class OffloadOptions(TypedDict, total=False):
    offload_fraction: Annotated[
        float | str,
        Option(
            'float or "auto"',
            1.0,
            """share of the state's elements that lives on the host, 0.0 to 1.0. "auto" leaves as much on the
            device as device_budget_bytes allows, or without that as the device has left after two steps.""",
            changed_by="call optimizer.set_offload_fraction()",
        ),
    ]
    device_budget_bytes: Annotated[
        int | None,
        Option(
            "int",
            None,
            """with "auto", how many bytes of the device the state may take. With host_executors "auto" state
            then streams through the GPU only if the ring for that takes no more than an eighth of them. None:
            what the device has left after two steps; all of it goes back to the host if torch runs out of
            memory later.""",
        ),
    ]
    device_headroom: Annotated[
        float | None,
        Option(
            "float",
            None,
            """with "auto" and without a budget, the share of the device that stays free, 0.0 to below 1.0. None
            is 0.1.""",
        ),
    ]
    state_dtype: Annotated[
        torch.dtype | str,
        Option(
            "torch.dtype or str",
            torch.float32,
            """of moments; torch.bfloat16 is rounded at random so that small changes are not lost. As a string
            "float32", "fp32", "bfloat16" or "bf16". Masters stay in fp32.""",
            lambda _, value: state_dtype_of(value),
        ),
    ]
    master_layout: Annotated[
        str,
        Option(
            "str",
            "fp32",
            """of the fp32 masters of bf16 params, "fp32", 4 bytes an element, or "split", 2 bytes: the param is
            the upper half, and only the lower one is kept. The same masters. A param differs only where its
            master lies exactly between two bf16 numbers, because these ties are rounded away from zero.
            "split24" keeps 1 byte: masters have 24 bits, and a step rounds the lower 8 bits of the fp32 result
            away at random.""",
            one_of(MASTER_LAYOUTS),
        ),
    ]
    host_executors: Annotated[
        str,
        Option(
            "str",
            "auto",
            """who updates the host's share of params on a GPU. "auto": CPU threads and, where the host's state
            can be pinned, the GPU, through which state then streams; "cpu" or "streamed": one of them alone.
            The same bits.""",
            one_of(HOST_EXECUTORS),
        ),
    ]
    early_update_bytes: Annotated[
        int,
        Option(
            "int",
            0,
            """pinned host memory for early updates on a GPU, which need hook_gradients(): CPU threads update
            params while the backward pass still runs, for the case that the step neither clips nor is skipped.
            If it does, they are undone. The same bits.""",
            expect(lambda v: is_whole(v, 0, 1 << 64), "a number of bytes, or 0 for no early updates"),
        ),
    ]
    track_changes: Annotated[
        bool,
        Option(
            "bool",
            False,
            """steps note which elements of params they change, for weight_changes(): two bits for each element on a
            GPU, and two on the host.""",
            expect(lambda v: isinstance(v, bool), "True or False"),
        ),
    ]
    save_buffer_bytes: Annotated[
        int | str,
        Option(
            'int or "auto"',
            "auto",
            """host memory to which a step copies state before it overwrites it, while save_checkpoint() has still
            to read it; 0: the step waits for that. "auto": at most a quarter of the host memory that is free when
            the optimizer makes its state, shared with the other ranks of the machine; the first save takes it, so
            that an optimizer that never saves takes none. A number of bytes is taken with the state. No more is
            taken than all state could use; plan().host_save_bytes says how much that is.""",
            expect(
                lambda v: is_word(v, AUTO_BUFFER) or is_whole(v, 0, ALL_BYTES),
                f"a number of bytes, 0 for no buffer, or {AUTO_BUFFER!r}",
            ),
        ),
    ]
    disk_fraction: Annotated[
        float,
        Option(
            "float",
            0.0,
            """share of the state's elements that lives on disk, a part of offload_fraction: the last params. For state
            that does not fit into host memory. CPU threads update it. The same bits. `state` shows copies of it, which
            the next step lets go.""",
            disk.fraction_of,
            changed_by="call optimizer.set_offload_fraction()",
        ),
    ]
    disk_paths: Annotated[
        str | os.PathLike[str] | Iterable[str | os.PathLike[str]] | None,
        Option(
            "path or paths",
            None,
            """directories for that, one on each drive, over which state is spread. The files have no name and end with
            the process; they are no checkpoint. With disk_fraction=0.0 state may go there later.""",
            disk.paths_of,
        ),
    ]
    disk_ring_bytes: Annotated[
        int,
        Option(
            "int",
            0,
            """host memory through which state on disk goes; 0 is at most 256 MiB.""",
            expect(lambda v: is_whole(v, 0, 1 << 64), "a number of bytes, or 0 for at most 256 MiB"),
        ),
    ]
    threads: Annotated[
        int,
        Option(
            "int",
            0,
            """CPU threads that update the host's share; 0 is one per CPU of this rank.""",
            expect(
                lambda v: is_whole(v, 0, MOST_THREADS + 1),
                f"a whole number up to {MOST_THREADS}, or 0 for one thread per CPU of this rank",
            ),
        ),
    ]
    numa_policy: Annotated[
        str,
        Option(
            "str",
            "near",
            """where host memory lies on a machine of several NUMA nodes, "near" the update threads or
            "interleaved" page by page over all nodes that this process may use. Where that cannot be had, a
            line on stderr says why.""",
            one_of(NUMA_POLICIES),
        ),
    ]
    local_rank: Annotated[
        int | None,
        Option(
            "int",
            None,
            """the number of this rank among those that share the host's CPUs. None: ranks of the process group
            count themselves; without one LOCAL_RANK says.""",
        ),
    ]
    local_world: Annotated[
        int | None,
        Option(
            "int",
            None,
            """how many ranks share the host's CPUs; 1 for a rank with CPUs of its own. None: as counted, else
            as LOCAL_WORLD_SIZE says.""",
        ),
    ]
    numa_nodes: Annotated[
        Iterable[int] | None,
        Option(
            "ints",
            None,
            """the NUMA nodes of update threads and host memory. None: those near the device.""",
            lambda _, value: nodes_of(value),
        ),
    ]
    pin: Annotated[
        bool,
        Option(
            "bool",
            True,
            """staging memory that the system does not pin is an error. False: it is then used unpinned, which
            is slower.""",
            expect(lambda v: isinstance(v, bool), "True or False"),
        ),
    ]
    max_grad_norm: Annotated[
        float | None,
        Option(
            "float",
            None,
            """clips the global norm of the gradients inside the step, as torch.nn.utils.clip_grad_norm_ does
            before it. None: no clipping.""",
            expect(
                lambda v: v is None or (is_finite(v) and v > 0),
                "a finite number above 0, or None for no clipping",
            ),
            changed_by="assign optimizer.max_grad_norm",
        ),
    ]
    movable: Annotated[
        str | Iterable[str],
        Option(
            "str or strs",
            (),
            """what offload() may move, one or some of "params", "grads" and "states"; "accumulate" is "grads" with
            room for hook_gradients(accumulate=True). Room for it on the host is taken with the state.""",
            lambda _, value: movable_words(value),
        ),
    ]
    keep_addresses: Annotated[
        bool,
        Option(
            "bool",
            False,
            """params on a GPU come back from offload(params=True) at the addresses that they had, as CUDA graphs
            need. The first step, or materialize(), moves them there once. Needs `movable` with "params".""",
            expect(lambda v: isinstance(v, bool), "True or False"),
        ),
    ]
    overlap: Annotated[
        nn.Module | None,
        Option(
            "nn.Module",
            None,
            """the model. step() returns at once, and the model's modules wait for their params
            (OffloadOptimizer.overlap). None: step() waits.""",
            changed_by="call optimizer.overlap()",
        ),
    ]
    process_group: Annotated[
        Any,
        Option(
            "ProcessGroup",
            None,
            """the ranks that agree on norm, clipping and skipped steps. None: those of the DTensors' largest
            mesh, or this process alone.""",
            group_of_ranks,
        ),
    ]
    replica_group: Annotated[
        Any,
        Option(
            "ProcessGroup",
            None,
            """the ranks that hold the same params, those that DistributedDataParallel averages over. None:
            those that the DTensors' meshes connect.""",
            group_of_ranks,
        ),
    ]
    comm_timeout_seconds: Annotated[
        float,
        Option(
            "float",
            600.0,
            """a rank that does not answer within this time has failed.""",
            expect(
                lambda v: is_finite(v) and 0 < float(v) < MOST_SECONDS,
                f"a number of seconds above 0 and below {MOST_SECONDS:.0e}",
            ),
        ),
    ]


ROWS: dict[str, Option] = {
    name: hint.__metadata__[0]
    for name, hint in get_type_hints(OffloadOptions, include_extras=True).items()
}
DEFAULT_OPTIONS = cast(OffloadOptions, {name: row.default for name, row in ROWS.items()})


def _paragraph(name: str, row: Option) -> str:
    default = f'"{row.default}"' if isinstance(row.default, str) else row.default
    text = f"{name} ({row.kind}, default {default}): {' '.join(row.about.split())}"
    return textwrap.fill(text, 110, initial_indent=" " * 8, subsequent_indent=" " * 12)


_LISTED = "".join(f"{_paragraph(name, row)}\n" for name, row in ROWS.items())
OffloadOptions.__doc__ = f"""Keyword arguments that all optimizers here have beside torch's.

    Options:
{_LISTED}    """


def with_options(cls: type[Optimizer]) -> type[Optimizer]:
    """A class decorator: the docstring lists the options too."""
    if cls.__doc__:  # python -OO has none
        cls.__doc__ = f"{cls.__doc__.rstrip()}\n\n    Options:\n{_LISTED}    "
    return cls


def movable_bits(words: Iterable[str]) -> int:
    """The flags of enum offload_movable for the words of the `movable` option."""
    bits = 0
    for word in words:
        bits |= MOVABLE[word]
    return bits


def refuse_in_group(index: int, group: dict[str, Any]) -> None:
    """Refuses options in a param group: they hold for the whole optimizer, and torch would keep them in the group
    silently."""
    if DEFAULT_OPTIONS.keys().isdisjoint(group):
        return
    name = next(name for name in DEFAULT_OPTIONS if name in group)
    raise ValueError(
        f"param group {index} has {name}={shown(group[name])}, an option of the whole optimizer, which has no effect in "
        f"a group; {ROWS[name].changed_by}, or make two optimizers, and delete the group's {name!r}"
    )


WAYS_OUT = {name: row.changed_by for name, row in ROWS.items()}


def _hint(name: str) -> str:
    """What a wrong name of an option probably means."""
    if name == "device_fraction":
        return "; device_fraction is the word of C and Rust: write offload_fraction, which is 1 - device_fraction"
    nearest = [row for row in ROWS if name in row] or difflib.get_close_matches(name, ROWS, 1)
    return f"; did you mean {nearest[0]!r}?" if nearest else ""


def checked(options: OffloadOptions, owner: str) -> OffloadOptions:
    """The options of an optimizer of that class, completed by the defaults. Refuses unknown options."""
    for name in options:
        if name not in ROWS:
            raise TypeError(
                f"{owner}() got an unexpected keyword argument {name!r}, expected torch's or some of "
                f"{', '.join(ROWS)}{_hint(name)}"
            )
    given = {**DEFAULT_OPTIONS, **options}
    values = cast(OffloadOptions, {name: row.check(name, given[name]) for name, row in ROWS.items()})
    placement.check(values["offload_fraction"], values["device_budget_bytes"], values["device_headroom"])
    disk.check(values)
    if values["keep_addresses"] and "params" not in values["movable"]:
        raise ValueError(
            f"keep_addresses=True with movable={values['movable']!r}: it is about params that offload() moves; give "
            "movable with 'params', or leave keep_addresses out"
        )
    check_local_rank(values["local_rank"], values["local_world"])
    if values["replica_group"] is not None and values["process_group"] is None:
        raise ValueError(
            "replica_group without process_group: no other rank is asked; give the group of all ranks "
            "whose gradients make up the norm as process_group too"
        )
    return values
