"""Makes engines: chooses the context, the ranks and how much of the state is on the device."""

from __future__ import annotations

import sys
import warnings
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .. import abi
from ..base.callers import depth_of_caller
from ..base.device_memory import DeviceMemory
from ..params.kept_addresses import KeptAddresses
from ..params.members import Member
from ..params.registered import Slot, Wanted
from ..params.tensors import DTYPES, is_spread, local
from ..ranks.local_ranks import mask_of
from ..settings import disk, placement
from ..settings.contexts import context_for
from ..settings.options import (
    ALL_BYTES,
    AUTO_BUFFER,
    HOST_EXECUTORS,
    MASTER_LAYOUTS,
    NUMA_POLICIES,
    OffloadOptions,
    movable_bits,
    state_dtype_of,
)
from ..settings.placement import Leftover, Placement
from ..steps.history import History
from .engine import Engine

if TYPE_CHECKING:
    from ..ranks.process_group import ProcessGroupComm


def needs_ranks(members: list[Member], options: OffloadOptions) -> bool:
    return options["process_group"] is not None or any(is_spread(m.param) for m in members)


def ranks_of(members: list[Member], options: OffloadOptions) -> ProcessGroupComm | None:
    """The ranks that step together; None for this process alone. All these ranks must call this."""
    if not needs_ranks(members, options):
        return None
    from ..ranks import distributed  # which imports much

    group, timeout_seconds = options["process_group"], options["comm_timeout_seconds"]
    return distributed.comm_for(members, group, timeout_seconds)


def with_shards(
    members: list[Member],
    before: dict[Tensor, Slot],
    comm: ProcessGroupComm | None,
    options: OffloadOptions,
) -> list[Member]:
    """Adds their shards to the members. `before` has the slots of the previous engine. If they have the same params
    and names as the members, this asks no other rank: this rank may be the only one that makes a new engine (because
    one of its gradients has a wider dtype). Otherwise all ranks must call this."""
    names = {param: slot.name for param, slot in before.items()}
    if comm is not None and names == {member.param: member.name for member in members}:
        return [member._replace(shard=before[member.param].shard) for member in members]
    if not needs_ranks(members, options):
        return members
    from ..ranks import distributed

    return distributed.with_shards(members, comm, options["replica_group"])


def _only_device_updates(wanted: Wanted, device: torch.device) -> bool:
    return device.type != "cpu" and any(group["algorithm"] == abi.OFFLOAD_MUON for group in wanted.groups)


def host_executors_of(options: OffloadOptions, wanted: Wanted, device: torch.device) -> str:
    """Who updates the host share. CPU threads would give matrices of Muon other bits than a GPU."""
    chosen = options["host_executors"]
    if device.type == "cpu" and chosen == "streamed":
        raise ValueError(
            "host_executors='streamed' with parameters on the CPU: state streams through a GPU; set "
            "host_executors='auto', or move the model to the GPU before its first step"
        )
    if not _only_device_updates(wanted, device):
        return chosen
    if chosen == "cpu":
        raise ValueError(
            "host_executors='cpu' with Muon on a GPU: only the GPU updates its matrices, because CPU threads would "
            "give other bits; set host_executors='auto'"
        )
    return "streamed"


def kept_addresses_of(options: OffloadOptions, engine: Engine, before: KeptAddresses | None) -> KeptAddresses | None:
    """The addresses that params keep. `before` are those of the engine before this one."""
    if not options["keep_addresses"] or (before is not None and before.device == engine.device):
        return before
    return KeptAddresses(engine.context, engine.device)


def _check_device(options: OffloadOptions, device: torch.device) -> None:
    if options["keep_addresses"] and device.type == "cpu":
        raise ValueError(
            "keep_addresses=True with parameters on the CPU: only memory of a GPU is given away behind its addresses; "
            "leave keep_addresses out, or move the model to the GPU before its first step"
        )


def early_update_bytes(options: OffloadOptions, device: torch.device, host_executors: str) -> int:
    """The bytes that the library should take for early updates. 0 if the library would refuse them, because
    gradients do not leave the device (before hook_gradients()), or because no CPU thread could update a copy of a
    param."""
    leave = {"grads", "accumulate"} & set(options["movable"])
    usable = device.type != "cpu" and bool(leave) and host_executors != "streamed"
    return options["early_update_bytes"] if usable else 0


def make_engine(
    members: list[Member],
    wanted: Wanted,
    options: OffloadOptions,
    comm: ProcessGroupComm | None,
    history: History,
) -> tuple[Engine, Placement]:
    """A registered engine that is not committed, and where its state will be."""
    device = device_of(members)
    _check_device(options, device)
    host_executors = host_executors_of(options, wanted, device)
    context = context_for(
        device,
        options["local_rank"],
        options["local_world"],
        mask_of(options["numa_nodes"]),
        threads=options["threads"],
        numa_policy=NUMA_POLICIES[options["numa_policy"]],
        allow_pageable=int(not options["pin"]),
    )
    fraction, budget_bytes = options["offload_fraction"], options["device_budget_bytes"]
    buffer_bytes = options["save_buffer_bytes"]

    def engine_for(device_fraction: float, host_executors: str) -> Engine:
        return Engine(
            context,
            device,
            wanted,
            members,
            history,
            device_fraction=device_fraction,
            movable=movable_bits(options["movable"]),
            moment_dtype=DTYPES[state_dtype_of(options["state_dtype"])],
            master_layout=MASTER_LAYOUTS[options["master_layout"]],
            host_executors=HOST_EXECUTORS[host_executors],
            early_update_bytes=early_update_bytes(options, device, host_executors),
            track_changes=int(options["track_changes"]),
            disk_fraction=options["disk_fraction"],
            disk_paths=disk.joined(options["disk_paths"]),
            disk_ring_bytes=options["disk_ring_bytes"],
            save_buffer_bytes=ALL_BYTES if buffer_bytes == AUTO_BUFFER else buffer_bytes,
            **({} if comm is None else comm.options()),
        )

    if host_executors == "auto" and fraction == placement.AUTO and budget_bytes is not None:
        # If the ring for streamed state took much of the budget, the state itself would have no room.
        if engine_for(0.0, host_executors).plan().device_ring_bytes > budget_bytes // 8:
            host_executors = "cpu"
    chosen = placement.choose(
        fraction,
        budget_bytes,
        device.type == "cpu",
        lambda device_fraction: engine_for(device_fraction, host_executors).plan(),
    )
    if fraction == placement.AUTO:
        print_choice(chosen)
    engine = engine_for(chosen.device_fraction, host_executors)
    engine.plan_of = lambda device_fraction: engine_for(device_fraction, host_executors).plan()
    return engine, chosen


def warn_of_no_effect(options: OffloadOptions, wanted: Wanted, device: torch.device) -> None:
    """Warns of an option that has no effect on this device, or with the other options."""
    if options["early_update_bytes"] == 0:
        return
    why = None
    if device.type == "cpu":
        why = "the parameters are on the CPU, and early updates are for those on a GPU"
    elif options["host_executors"] == "streamed":
        why = "host_executors='streamed' leaves nothing to CPU threads, which update early"
    elif _only_device_updates(wanted, device):
        why = "only the GPU updates matrices of Muon, and CPU threads update early"
    elif "accumulate" in options["movable"]:
        why = "with hook_gradients(accumulate=True) gradients are final in the step alone"
    if why is not None:
        warnings.warn(
            f"early_update_bytes={options['early_update_bytes']} has no effect: {why}; leave it out",
            stacklevel=depth_of_caller(),
        )


def print_choice(chosen: Placement) -> None:
    """Prints what "auto" has chosen, and why."""
    print(
        f"hybridopt: offload_fraction {chosen.offload_fraction:.4f}: {chosen.reason}", file=sys.stderr
    )


def leftover_of(engine: Engine, options: OffloadOptions) -> Leftover | None:
    """The object that chooses the device fraction after some steps, if the options ask for that."""
    is_asked = options["offload_fraction"] == placement.AUTO and options["device_budget_bytes"] is None
    if not is_asked or engine.device.type == "cpu":
        return None
    headroom = options["device_headroom"]
    return Leftover(
        DeviceMemory(engine.device), placement.DEFAULT_HEADROOM if headroom is None else headroom
    )


def device_of(members: list[Member]) -> torch.device:
    """The device that all members are on."""
    devices = {local(member.param).device: member.name for member in members}
    if len(devices) > 1:
        places = ", ".join(f"{name!r} on {device}" for device, name in devices.items())
        raise ValueError(
            f"the parameters are on several devices ({places}); make one optimizer for each "
            "device"
        )
    return next(iter(devices))
