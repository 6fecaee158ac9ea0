"""The structs, constants and functions of offload.h, by the same names, and the algorithms.

Written by generate_abi.py; do not edit. The manual is the header.
"""

from __future__ import annotations

import ctypes
from ctypes import CFUNCTYPE, POINTER
from typing import Any, NamedTuple


class Struct(ctypes.Structure):
    """A struct of the ABI: zero except struct_size and the fields that are named."""

    def __init__(self, **fields: Any) -> None:
        super().__init__(struct_size=ctypes.sizeof(type(self)), **fields)

    def __repr__(self) -> str:
        fields = ", ".join(f"{name}={getattr(self, name)!r}" for name, *_ in self._fields_[1:])
        return f"{type(self).__name__}({fields})"


OFFLOAD_OK = 0
OFFLOAD_INVALID_ARGUMENT = 10
OFFLOAD_INVALID_STATE = 11
OFFLOAD_UNSUPPORTED = 12
OFFLOAD_OUT_OF_HOST_MEMORY = 20
OFFLOAD_OUT_OF_DEVICE_MEMORY = 21
OFFLOAD_DEVICE_FAILED = 30
OFFLOAD_COMM_FAILED = 31
OFFLOAD_IO_FAILED = 40
OFFLOAD_CHECKPOINT_CORRUPT = 41
OFFLOAD_CHECKPOINT_MISMATCH = 42
OFFLOAD_TIMED_OUT = 50
OFFLOAD_POISONED = 60
OFFLOAD_INTERNAL = 70
OFFLOAD_DEVICE_HOST = 0
OFFLOAD_DEVICE_SIM = 1
OFFLOAD_DEVICE_CUDA = 2
OFFLOAD_ADAMW = 1
OFFLOAD_ADAM = 2
OFFLOAD_SGD = 3
OFFLOAD_LION = 4
OFFLOAD_ADAGRAD = 5
OFFLOAD_SIGNUM = 6
OFFLOAD_MUON = 7
OFFLOAD_FP32 = 1
OFFLOAD_BF16 = 2
OFFLOAD_FP16 = 3
OFFLOAD_U16 = 4
OFFLOAD_I8 = 5
OFFLOAD_MASTER_FP32 = 0
OFFLOAD_MASTER_SPLIT = 1
OFFLOAD_MASTER_SPLIT24 = 2
OFFLOAD_ROUND_STOCHASTIC = 0
OFFLOAD_ROUND_NEAREST = 1
OFFLOAD_PLACE_AUTO = 0
OFFLOAD_PLACE_HOST = 1
OFFLOAD_PLACE_DEVICE = 2
OFFLOAD_PLACE_DISK = 3
OFFLOAD_TIER_DEVICE = 0
OFFLOAD_TIER_HOST = 1
OFFLOAD_TIER_DISK = 2
OFFLOAD_STATE_MASTER = 0
OFFLOAD_STATE_EXP_AVG = 1
OFFLOAD_STATE_EXP_AVG_SQ = 2
OFFLOAD_STATE_MOMENTUM_BUFFER = 3
OFFLOAD_STATE_SUM = 4
OFFLOAD_STATE_MASTER_LOW = 5
OFFLOAD_MOVABLE_PARAMS = 1
OFFLOAD_MOVABLE_GRADS = 2
OFFLOAD_MOVABLE_STATES = 4
OFFLOAD_MOVABLE_ACCUMULATE = 8
OFFLOAD_LOG_INFO = 1
OFFLOAD_LOG_WARNING = 2
OFFLOAD_LOG_ERROR = 3
offload_context_t = ctypes.c_void_p
offload_optimizer_t = ctypes.c_void_p
offload_stash_t = ctypes.c_void_p
offload_pool_t = ctypes.c_void_p
offload_exchange_t = ctypes.c_void_p
offload_ticket_t = ctypes.c_uint64
offload_stream_t = ctypes.c_void_p
offload_log_function_t = CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_int32, ctypes.c_char_p)


class offload_context_options_t(Struct):
    struct_size: int
    device_kind: int
    device_index: int
    threads: int
    pinned_bytes_max: int
    device_timeout_ns: int
    log: Any
    log_user: int | None
    sim_memory_bytes: int
    sim_seed: int
    sim_delay_ns_max: int
    numa_nodes: int
    local_rank: int
    local_world: int
    sim_pinned_bytes_max: int
    allow_pageable: int
    numa_policy: int
    _fields_ = [
        ("struct_size", ctypes.c_uint32),
        ("device_kind", ctypes.c_int32),
        ("device_index", ctypes.c_int32),
        ("threads", ctypes.c_uint32),
        ("pinned_bytes_max", ctypes.c_uint64),
        ("device_timeout_ns", ctypes.c_uint64),
        ("log", offload_log_function_t),
        ("log_user", ctypes.c_void_p),
        ("sim_memory_bytes", ctypes.c_uint64),
        ("sim_seed", ctypes.c_uint64),
        ("sim_delay_ns_max", ctypes.c_uint64),
        ("numa_nodes", ctypes.c_uint64),
        ("local_rank", ctypes.c_uint32),
        ("local_world", ctypes.c_uint32),
        ("sim_pinned_bytes_max", ctypes.c_uint64),
        ("allow_pageable", ctypes.c_int32),
        ("numa_policy", ctypes.c_int32),
    ]


OFFLOAD_NUMA_NEAR = 0
OFFLOAD_NUMA_INTERLEAVED = 1
OFFLOAD_NUMA_NONE = 0
OFFLOAD_NUMA_FIRST_TOUCH = 1
OFFLOAD_NUMA_PLACED = 2


class offload_context_info_t(Struct):
    struct_size: int
    device_kind: int
    threads: int
    cpus_allowed: int
    nodes: int
    threads_seated: int
    huge_pages: int
    optimizers: int
    device_memory_bytes: int
    device_memory_free_bytes: int
    pinned_bytes: int
    isa: bytes
    device_name: bytes
    local_rank: int
    local_world: int
    cpus: int
    numa_rung: int
    numa_nodes: int
    notes: bytes
    numa_memory_nodes: int
    numa_policy: int
    stashes: int
    _fields_ = [
        ("struct_size", ctypes.c_uint32),
        ("device_kind", ctypes.c_int32),
        ("threads", ctypes.c_uint32),
        ("cpus_allowed", ctypes.c_uint32),
        ("nodes", ctypes.c_uint32),
        ("threads_seated", ctypes.c_int32),
        ("huge_pages", ctypes.c_int32),
        ("optimizers", ctypes.c_uint32),
        ("device_memory_bytes", ctypes.c_uint64),
        ("device_memory_free_bytes", ctypes.c_uint64),
        ("pinned_bytes", ctypes.c_uint64),
        ("isa", ctypes.c_char * 32),
        ("device_name", ctypes.c_char * 256),
        ("local_rank", ctypes.c_uint32),
        ("local_world", ctypes.c_uint32),
        ("cpus", ctypes.c_uint32),
        ("numa_rung", ctypes.c_int32),
        ("numa_nodes", ctypes.c_uint64),
        ("notes", ctypes.c_char * 1024),
        ("numa_memory_nodes", ctypes.c_uint64),
        ("numa_policy", ctypes.c_int32),
        ("stashes", ctypes.c_uint32),
    ]


class offload_message_t(Struct):
    struct_size: int
    rank: int
    sends: int
    reserved: int
    data: int | None
    bytes: int
    _fields_ = [
        ("struct_size", ctypes.c_uint32),
        ("rank", ctypes.c_int32),
        ("sends", ctypes.c_int32),
        ("reserved", ctypes.c_uint32),
        ("data", ctypes.c_void_p),
        ("bytes", ctypes.c_uint64),
    ]


class offload_comm_t(Struct):
    struct_size: int
    rank: int
    world: int
    reserved: int
    user: int | None
    sum: Any
    max: Any
    barrier: Any
    exchange: Any
    exchange_on_host: int
    reserved1: int
    _fields_ = [
        ("struct_size", ctypes.c_uint32),
        ("rank", ctypes.c_int32),
        ("world", ctypes.c_int32),
        ("reserved", ctypes.c_uint32),
        ("user", ctypes.c_void_p),
        ("sum", CFUNCTYPE(ctypes.c_int32, ctypes.c_void_p, POINTER(ctypes.c_double), ctypes.c_uint32, ctypes.c_int64)),
        ("max", CFUNCTYPE(ctypes.c_int32, ctypes.c_void_p, POINTER(ctypes.c_int32), ctypes.c_uint32, ctypes.c_int64)),
        ("barrier", CFUNCTYPE(ctypes.c_int32, ctypes.c_void_p, ctypes.c_int64)),
        ("exchange", CFUNCTYPE(ctypes.c_int32, ctypes.c_void_p, POINTER(offload_message_t), ctypes.c_uint32, offload_stream_t, ctypes.c_int64)),
        ("exchange_on_host", ctypes.c_int32),
        ("reserved1", ctypes.c_uint32),
    ]


OFFLOAD_EXECUTORS_AUTO = 0
OFFLOAD_EXECUTORS_CPU = 1
OFFLOAD_EXECUTORS_STREAMED = 2


class offload_optimizer_options_t(Struct):
    struct_size: int
    algorithm: int
    device_fraction: float
    chunk_elements: int
    staging_slots: int
    movable: int
    comm: Any
    comm_timeout_ns: int
    master_layout: int
    moment_dtype: int
    moment_rounding: int
    reserved: int
    rounding_seed: int
    stream_ring_bytes: int
    host_executors: int
    reserved1: int
    early_update_bytes: int
    track_changes: int
    reserved2: int
    save_buffer_bytes: int
    disk_fraction: float
    disk_paths: bytes | None
    disk_ring_bytes: int
    _fields_ = [
        ("struct_size", ctypes.c_uint32),
        ("algorithm", ctypes.c_int32),
        ("device_fraction", ctypes.c_double),
        ("chunk_elements", ctypes.c_uint64),
        ("staging_slots", ctypes.c_uint32),
        ("movable", ctypes.c_uint32),
        ("comm", POINTER(offload_comm_t)),
        ("comm_timeout_ns", ctypes.c_uint64),
        ("master_layout", ctypes.c_int32),
        ("moment_dtype", ctypes.c_int32),
        ("moment_rounding", ctypes.c_int32),
        ("reserved", ctypes.c_uint32),
        ("rounding_seed", ctypes.c_uint64),
        ("stream_ring_bytes", ctypes.c_uint64),
        ("host_executors", ctypes.c_int32),
        ("reserved1", ctypes.c_uint32),
        ("early_update_bytes", ctypes.c_uint64),
        ("track_changes", ctypes.c_int32),
        ("reserved2", ctypes.c_uint32),
        ("save_buffer_bytes", ctypes.c_uint64),
        ("disk_fraction", ctypes.c_double),
        ("disk_paths", ctypes.c_char_p),
        ("disk_ring_bytes", ctypes.c_uint64),
    ]


class offload_group_t(Struct):
    struct_size: int
    nesterov: int
    maximize: int
    cautious_weight_decay: int
    lr: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    momentum: float
    dampening: float
    lr_decay: float
    initial_accumulator_value: float
    algorithm: int
    ns_steps: int
    update_rms: float
    ns_coefficients: ctypes.Array[ctypes.Array[ctypes.c_double]]
    _fields_ = [
        ("struct_size", ctypes.c_uint32),
        ("nesterov", ctypes.c_int32),
        ("maximize", ctypes.c_int32),
        ("cautious_weight_decay", ctypes.c_int32),
        ("lr", ctypes.c_double),
        ("beta1", ctypes.c_double),
        ("beta2", ctypes.c_double),
        ("eps", ctypes.c_double),
        ("weight_decay", ctypes.c_double),
        ("momentum", ctypes.c_double),
        ("dampening", ctypes.c_double),
        ("lr_decay", ctypes.c_double),
        ("initial_accumulator_value", ctypes.c_double),
        ("algorithm", ctypes.c_int32),
        ("ns_steps", ctypes.c_int32),
        ("update_rms", ctypes.c_double),
        ("ns_coefficients", ctypes.c_double * 3 * 10),
    ]


OFFLOAD_PARAM_REPLICA = 1
OFFLOAD_SHARD_RANGE = 1


class offload_shard_t(Struct):
    struct_size: int
    dimensions: int
    box_count: int
    flags: int
    global_shape: Any
    box_offsets: Any
    box_extents: Any
    range_begin: int
    range_count: int
    _fields_ = [
        ("struct_size", ctypes.c_uint32),
        ("dimensions", ctypes.c_uint32),
        ("box_count", ctypes.c_uint32),
        ("flags", ctypes.c_uint32),
        ("global_shape", POINTER(ctypes.c_int64)),
        ("box_offsets", POINTER(ctypes.c_int64)),
        ("box_extents", POINTER(ctypes.c_int64)),
        ("range_begin", ctypes.c_uint64),
        ("range_count", ctypes.c_uint64),
    ]


class offload_param_t(Struct):
    struct_size: int
    group: int
    dtype: int
    grad_dtype: int
    placement: int
    flags: int
    name: bytes | None
    data: int | None
    grad: int | None
    count: int
    shard: Any
    chunk_order: int
    split_count: int
    split_rows: Any
    _fields_ = [
        ("struct_size", ctypes.c_uint32),
        ("group", ctypes.c_uint32),
        ("dtype", ctypes.c_int32),
        ("grad_dtype", ctypes.c_int32),
        ("placement", ctypes.c_int32),
        ("flags", ctypes.c_uint32),
        ("name", ctypes.c_char_p),
        ("data", ctypes.c_void_p),
        ("grad", ctypes.c_void_p),
        ("count", ctypes.c_uint64),
        ("shard", POINTER(offload_shard_t)),
        ("chunk_order", ctypes.c_int32),
        ("split_count", ctypes.c_uint32),
        ("split_rows", POINTER(ctypes.c_uint64)),
    ]


class offload_binding_t(Struct):
    struct_size: int
    param: int
    data: int | None
    grad: int | None
    _fields_ = [
        ("struct_size", ctypes.c_uint32),
        ("param", ctypes.c_uint32),
        ("data", ctypes.c_void_p),
        ("grad", ctypes.c_void_p),
    ]


class offload_plan_t(Struct):
    struct_size: int
    param_count: int
    element_count: int
    elements: ctypes.Array[ctypes.c_uint64]
    state_bytes: ctypes.Array[ctypes.Array[ctypes.c_uint64]]
    staging_bytes: int
    host_params_bytes: int
    host_grads_bytes: int
    host_swap_bytes: int
    host_scratch_bytes: int
    device_scratch_bytes: int
    host_bytes: int
    device_bytes: int
    device_free_bytes: int
    host_available_bytes: int
    pinned_bytes_left: int
    chunk_count: int
    grads_down_bytes: int
    params_up_bytes: int
    fits: int
    reserved: int
    numa_bytes: ctypes.Array[ctypes.c_uint64]
    numa_unknown_bytes: int
    device_ring_bytes: int
    pinned_state_bytes: int
    host_early_bytes: int
    host_change_bytes: int
    device_change_bytes: int
    host_save_bytes: int
    disk_bytes: int
    disk_step_bytes: int
    host_disk_bytes: int
    _fields_ = [
        ("struct_size", ctypes.c_uint32),
        ("param_count", ctypes.c_uint32),
        ("element_count", ctypes.c_uint64),
        ("elements", ctypes.c_uint64 * 4),
        ("state_bytes", ctypes.c_uint64 * 32 * 4),
        ("staging_bytes", ctypes.c_uint64),
        ("host_params_bytes", ctypes.c_uint64),
        ("host_grads_bytes", ctypes.c_uint64),
        ("host_swap_bytes", ctypes.c_uint64),
        ("host_scratch_bytes", ctypes.c_uint64),
        ("device_scratch_bytes", ctypes.c_uint64),
        ("host_bytes", ctypes.c_uint64),
        ("device_bytes", ctypes.c_uint64),
        ("device_free_bytes", ctypes.c_uint64),
        ("host_available_bytes", ctypes.c_uint64),
        ("pinned_bytes_left", ctypes.c_uint64),
        ("chunk_count", ctypes.c_uint64),
        ("grads_down_bytes", ctypes.c_uint64),
        ("params_up_bytes", ctypes.c_uint64),
        ("fits", ctypes.c_int32),
        ("reserved", ctypes.c_uint32),
        ("numa_bytes", ctypes.c_uint64 * 64),
        ("numa_unknown_bytes", ctypes.c_uint64),
        ("device_ring_bytes", ctypes.c_uint64),
        ("pinned_state_bytes", ctypes.c_uint64),
        ("host_early_bytes", ctypes.c_uint64),
        ("host_change_bytes", ctypes.c_uint64),
        ("device_change_bytes", ctypes.c_uint64),
        ("host_save_bytes", ctypes.c_uint64),
        ("disk_bytes", ctypes.c_uint64),
        ("disk_step_bytes", ctypes.c_uint64),
        ("host_disk_bytes", ctypes.c_uint64),
    ]


OFFLOAD_STEP_ASSUME_FINITE = 1
OFFLOAD_STEP_FOLLOW_PARAMS = 2


class offload_step_options_t(Struct):
    struct_size: int
    flags: int
    grad_scale: float
    grad_norm_max: float
    stream: int | None
    _fields_ = [
        ("struct_size", ctypes.c_uint32),
        ("flags", ctypes.c_uint32),
        ("grad_scale", ctypes.c_double),
        ("grad_norm_max", ctypes.c_double),
        ("stream", offload_stream_t),
    ]


class offload_step_result_t(Struct):
    struct_size: int
    skipped: int
    step: int
    grad_norm: float
    grad_clip: float
    total_seconds: float
    norm_seconds: float
    grads_down_seconds: float
    update_seconds: float
    params_up_seconds: float
    device_update_seconds: float
    stall_seconds: float
    grads_down_bytes: int
    params_up_bytes: int
    cpu_elements: int
    streamed_elements: int
    state_up_bytes: int
    state_down_bytes: int
    state_up_seconds: float
    streamed_update_seconds: float
    state_down_seconds: float
    cpu_idle_seconds: float
    streamed_idle_seconds: float
    early_elements: int
    undone_elements: int
    _fields_ = [
        ("struct_size", ctypes.c_uint32),
        ("skipped", ctypes.c_int32),
        ("step", ctypes.c_uint64),
        ("grad_norm", ctypes.c_double),
        ("grad_clip", ctypes.c_double),
        ("total_seconds", ctypes.c_double),
        ("norm_seconds", ctypes.c_double),
        ("grads_down_seconds", ctypes.c_double),
        ("update_seconds", ctypes.c_double),
        ("params_up_seconds", ctypes.c_double),
        ("device_update_seconds", ctypes.c_double),
        ("stall_seconds", ctypes.c_double),
        ("grads_down_bytes", ctypes.c_uint64),
        ("params_up_bytes", ctypes.c_uint64),
        ("cpu_elements", ctypes.c_uint64),
        ("streamed_elements", ctypes.c_uint64),
        ("state_up_bytes", ctypes.c_uint64),
        ("state_down_bytes", ctypes.c_uint64),
        ("state_up_seconds", ctypes.c_double),
        ("streamed_update_seconds", ctypes.c_double),
        ("state_down_seconds", ctypes.c_double),
        ("cpu_idle_seconds", ctypes.c_double),
        ("streamed_idle_seconds", ctypes.c_double),
        ("early_elements", ctypes.c_uint64),
        ("undone_elements", ctypes.c_uint64),
    ]


OFFLOAD_MOVE_ACCUMULATE = 1
OFFLOAD_MOVE_DROP = 2


class offload_move_options_t(Struct):
    struct_size: int
    flags: int
    params: Any
    param_count: int
    stream_count: int
    streams: Any
    _fields_ = [
        ("struct_size", ctypes.c_uint32),
        ("flags", ctypes.c_uint32),
        ("params", POINTER(ctypes.c_uint32)),
        ("param_count", ctypes.c_uint32),
        ("stream_count", ctypes.c_uint32),
        ("streams", POINTER(offload_stream_t)),
    ]


class offload_state_view_t(Struct):
    struct_size: int
    dtype: int
    device_data: int | None
    device_count: int
    host_data: int | None
    host_count: int
    step_count: int
    disk_count: int
    _fields_ = [
        ("struct_size", ctypes.c_uint32),
        ("dtype", ctypes.c_int32),
        ("device_data", ctypes.c_void_p),
        ("device_count", ctypes.c_uint64),
        ("host_data", ctypes.c_void_p),
        ("host_count", ctypes.c_uint64),
        ("step_count", ctypes.c_uint64),
        ("disk_count", ctypes.c_uint64),
    ]


OFFLOAD_CHANGES_IN_TENSOR = 1
OFFLOAD_CHANGES_GAPS = 2
OFFLOAD_CHANGES_WIDE = 4
OFFLOAD_CHANGES_ON_DEVICE = 8


class offload_changes_options_t(Struct):
    struct_size: int
    flags: int
    buffer: int | None
    buffer_bytes: int
    dense_above: float
    stream: int | None
    _fields_ = [
        ("struct_size", ctypes.c_uint32),
        ("flags", ctypes.c_uint32),
        ("buffer", ctypes.c_void_p),
        ("buffer_bytes", ctypes.c_uint64),
        ("dense_above", ctypes.c_double),
        ("stream", offload_stream_t),
    ]


class offload_change_t(Struct):
    struct_size: int
    param: int
    dense: int
    dtype: int
    index_bytes: int
    gaps: int
    count: int
    indices_offset: int
    values_offset: int
    hash: int
    base_hash: int
    has_base: int
    reserved: int
    _fields_ = [
        ("struct_size", ctypes.c_uint32),
        ("param", ctypes.c_uint32),
        ("dense", ctypes.c_int32),
        ("dtype", ctypes.c_int32),
        ("index_bytes", ctypes.c_uint32),
        ("gaps", ctypes.c_int32),
        ("count", ctypes.c_uint64),
        ("indices_offset", ctypes.c_uint64),
        ("values_offset", ctypes.c_uint64),
        ("hash", ctypes.c_uint64),
        ("base_hash", ctypes.c_uint64),
        ("has_base", ctypes.c_int32),
        ("reserved", ctypes.c_uint32),
    ]


class offload_changes_t(Struct):
    struct_size: int
    param_count: int
    take: int
    bytes: int
    params: Any
    _fields_ = [
        ("struct_size", ctypes.c_uint32),
        ("param_count", ctypes.c_uint32),
        ("take", ctypes.c_uint64),
        ("bytes", ctypes.c_uint64),
        ("params", POINTER(offload_change_t)),
    ]


class offload_stats_t(Struct):
    struct_size: int
    queued: int
    steps_applied: int
    steps_skipped: int
    host_bytes: int
    device_bytes: int
    staging_bytes: int
    params_bytes: ctypes.Array[ctypes.c_uint64]
    grads_bytes: ctypes.Array[ctypes.c_uint64]
    state_bytes: ctypes.Array[ctypes.c_uint64]
    grads_down_bytes: int
    params_up_bytes: int
    offloaded_bytes: int
    reloaded_bytes: int
    total_seconds: float
    norm_seconds: float
    grads_down_seconds: float
    update_seconds: float
    params_up_seconds: float
    device_update_seconds: float
    stall_seconds: float
    cpu_elements: int
    streamed_elements: int
    state_up_bytes: int
    state_down_bytes: int
    state_up_seconds: float
    streamed_update_seconds: float
    state_down_seconds: float
    cpu_idle_seconds: float
    streamed_idle_seconds: float
    gave_way_copies: int
    gave_way_seconds: float
    pushes_ahead_bytes: int
    early_elements: int
    undone_elements: int
    disk_read_bytes: int
    disk_written_bytes: int
    _fields_ = [
        ("struct_size", ctypes.c_uint32),
        ("queued", ctypes.c_uint32),
        ("steps_applied", ctypes.c_uint64),
        ("steps_skipped", ctypes.c_uint64),
        ("host_bytes", ctypes.c_uint64),
        ("device_bytes", ctypes.c_uint64),
        ("staging_bytes", ctypes.c_uint64),
        ("params_bytes", ctypes.c_uint64 * 4),
        ("grads_bytes", ctypes.c_uint64 * 4),
        ("state_bytes", ctypes.c_uint64 * 4),
        ("grads_down_bytes", ctypes.c_uint64),
        ("params_up_bytes", ctypes.c_uint64),
        ("offloaded_bytes", ctypes.c_uint64),
        ("reloaded_bytes", ctypes.c_uint64),
        ("total_seconds", ctypes.c_double),
        ("norm_seconds", ctypes.c_double),
        ("grads_down_seconds", ctypes.c_double),
        ("update_seconds", ctypes.c_double),
        ("params_up_seconds", ctypes.c_double),
        ("device_update_seconds", ctypes.c_double),
        ("stall_seconds", ctypes.c_double),
        ("cpu_elements", ctypes.c_uint64),
        ("streamed_elements", ctypes.c_uint64),
        ("state_up_bytes", ctypes.c_uint64),
        ("state_down_bytes", ctypes.c_uint64),
        ("state_up_seconds", ctypes.c_double),
        ("streamed_update_seconds", ctypes.c_double),
        ("state_down_seconds", ctypes.c_double),
        ("cpu_idle_seconds", ctypes.c_double),
        ("streamed_idle_seconds", ctypes.c_double),
        ("gave_way_copies", ctypes.c_uint64),
        ("gave_way_seconds", ctypes.c_double),
        ("pushes_ahead_bytes", ctypes.c_uint64),
        ("early_elements", ctypes.c_uint64),
        ("undone_elements", ctypes.c_uint64),
        ("disk_read_bytes", ctypes.c_uint64),
        ("disk_written_bytes", ctypes.c_uint64),
    ]


offload_progress_function_t = CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_uint64, ctypes.c_uint64)
OFFLOAD_SAVE_MASTERS_ONLY = 1


class offload_save_options_t(Struct):
    struct_size: int
    flags: int
    path: bytes | None
    stream: int | None
    progress: Any
    progress_user: int | None
    io_depth: int
    reserved: int
    _fields_ = [
        ("struct_size", ctypes.c_uint32),
        ("flags", ctypes.c_uint32),
        ("path", ctypes.c_char_p),
        ("stream", offload_stream_t),
        ("progress", offload_progress_function_t),
        ("progress_user", ctypes.c_void_p),
        ("io_depth", ctypes.c_uint32),
        ("reserved", ctypes.c_uint32),
    ]


OFFLOAD_LOAD_FRESH_MOMENTS = 1
OFFLOAD_LOAD_KEEP_STEPS = 2
OFFLOAD_LOAD_NO_VERIFY = 4


class offload_load_options_t(Struct):
    struct_size: int
    flags: int
    path: bytes | None
    stream: int | None
    progress: Any
    progress_user: int | None
    io_depth: int
    reserved: int
    _fields_ = [
        ("struct_size", ctypes.c_uint32),
        ("flags", ctypes.c_uint32),
        ("path", ctypes.c_char_p),
        ("stream", offload_stream_t),
        ("progress", offload_progress_function_t),
        ("progress_user", ctypes.c_void_p),
        ("io_depth", ctypes.c_uint32),
        ("reserved", ctypes.c_uint32),
    ]


class offload_checkpoint_info_t(Struct):
    struct_size: int
    format_version: int
    algorithm: int
    save_flags: int
    world: int
    group_count: int
    step: int
    param_count: int
    tensor_count: int
    file_count: int
    bytes: int
    _fields_ = [
        ("struct_size", ctypes.c_uint32),
        ("format_version", ctypes.c_uint32),
        ("algorithm", ctypes.c_int32),
        ("save_flags", ctypes.c_uint32),
        ("world", ctypes.c_uint32),
        ("group_count", ctypes.c_uint32),
        ("step", ctypes.c_uint64),
        ("param_count", ctypes.c_uint64),
        ("tensor_count", ctypes.c_uint64),
        ("file_count", ctypes.c_uint64),
        ("bytes", ctypes.c_uint64),
    ]


class offload_checkpoint_tensor_t(Struct):
    struct_size: int
    kind: int
    dtype: int
    rank: int
    dimensions: int
    box_count: int
    global_shape: Any
    box_offsets: Any
    box_extents: Any
    range_begin: int
    range_count: int
    name: bytes | None
    file: bytes | None
    file_offset: int
    bytes: int
    step_count: int
    _fields_ = [
        ("struct_size", ctypes.c_uint32),
        ("kind", ctypes.c_int32),
        ("dtype", ctypes.c_int32),
        ("rank", ctypes.c_uint32),
        ("dimensions", ctypes.c_uint32),
        ("box_count", ctypes.c_uint32),
        ("global_shape", POINTER(ctypes.c_int64)),
        ("box_offsets", POINTER(ctypes.c_int64)),
        ("box_extents", POINTER(ctypes.c_int64)),
        ("range_begin", ctypes.c_uint64),
        ("range_count", ctypes.c_uint64),
        ("name", ctypes.c_char_p),
        ("file", ctypes.c_char_p),
        ("file_offset", ctypes.c_uint64),
        ("bytes", ctypes.c_uint64),
        ("step_count", ctypes.c_uint64),
    ]


offload_tensor_function_t = CFUNCTYPE(None, ctypes.c_void_p, POINTER(offload_checkpoint_tensor_t))


class offload_verify_options_t(Struct):
    struct_size: int
    io_depth: int
    progress: Any
    progress_user: int | None
    _fields_ = [
        ("struct_size", ctypes.c_uint32),
        ("io_depth", ctypes.c_uint32),
        ("progress", offload_progress_function_t),
        ("progress_user", ctypes.c_void_p),
    ]


offload_stash_ticket_t = ctypes.c_uint64
offload_stash_mark_t = ctypes.c_uint64


class offload_stash_options_t(Struct):
    struct_size: int
    lanes: int
    budget_bytes: int
    slab_bytes: int
    min_bytes: int
    tickets_max: int
    reserved: int
    _fields_ = [
        ("struct_size", ctypes.c_uint32),
        ("lanes", ctypes.c_uint32),
        ("budget_bytes", ctypes.c_uint64),
        ("slab_bytes", ctypes.c_uint64),
        ("min_bytes", ctypes.c_uint64),
        ("tickets_max", ctypes.c_uint32),
        ("reserved", ctypes.c_uint32),
    ]


class offload_stash_plan_t(Struct):
    struct_size: int
    tickets_max: int
    slab_bytes: int
    slab_count: int
    slabs_bytes: int
    scratch_bytes: int
    host_bytes: int
    host_available_bytes: int
    pinned_bytes_left: int
    fits: int
    reserved: int
    _fields_ = [
        ("struct_size", ctypes.c_uint32),
        ("tickets_max", ctypes.c_uint32),
        ("slab_bytes", ctypes.c_uint64),
        ("slab_count", ctypes.c_uint64),
        ("slabs_bytes", ctypes.c_uint64),
        ("scratch_bytes", ctypes.c_uint64),
        ("host_bytes", ctypes.c_uint64),
        ("host_available_bytes", ctypes.c_uint64),
        ("pinned_bytes_left", ctypes.c_uint64),
        ("fits", ctypes.c_int32),
        ("reserved", ctypes.c_uint32),
    ]


class offload_stash_stats_t(Struct):
    struct_size: int
    tickets: int
    slabs_bytes: int
    pinned_bytes: int
    used_bytes: int
    used_bytes_max: int
    held_bytes: int
    pushes: int
    pushed_bytes: int
    refused_pushes: int
    refused_bytes: int
    small_pushes: int
    prefetches: int
    prefetched_bytes: int
    pops: int
    drops: int
    down_timed_bytes: int
    down_seconds: float
    up_timed_bytes: int
    up_seconds: float
    release_wait_seconds: float
    pop_wait_seconds: float
    ahead_bytes: int
    _fields_ = [
        ("struct_size", ctypes.c_uint32),
        ("tickets", ctypes.c_uint32),
        ("slabs_bytes", ctypes.c_uint64),
        ("pinned_bytes", ctypes.c_uint64),
        ("used_bytes", ctypes.c_uint64),
        ("used_bytes_max", ctypes.c_uint64),
        ("held_bytes", ctypes.c_uint64),
        ("pushes", ctypes.c_uint64),
        ("pushed_bytes", ctypes.c_uint64),
        ("refused_pushes", ctypes.c_uint64),
        ("refused_bytes", ctypes.c_uint64),
        ("small_pushes", ctypes.c_uint64),
        ("prefetches", ctypes.c_uint64),
        ("prefetched_bytes", ctypes.c_uint64),
        ("pops", ctypes.c_uint64),
        ("drops", ctypes.c_uint64),
        ("down_timed_bytes", ctypes.c_uint64),
        ("down_seconds", ctypes.c_double),
        ("up_timed_bytes", ctypes.c_uint64),
        ("up_seconds", ctypes.c_double),
        ("release_wait_seconds", ctypes.c_double),
        ("pop_wait_seconds", ctypes.c_double),
        ("ahead_bytes", ctypes.c_uint64),
    ]


OFFLOAD_STASH_KEEP = 1


class offload_exchange_matrix_t(Struct):
    struct_size: int
    dtype: int
    grad_dtype: int
    reserved: int
    name: bytes | None
    shard: Any
    _fields_ = [
        ("struct_size", ctypes.c_uint32),
        ("dtype", ctypes.c_int32),
        ("grad_dtype", ctypes.c_int32),
        ("reserved", ctypes.c_uint32),
        ("name", ctypes.c_char_p),
        ("shard", POINTER(offload_shard_t)),
    ]


class offload_exchange_options_t(Struct):
    struct_size: int
    matrix_count: int
    matrices: Any
    comm: Any
    comm_timeout_ns: int
    _fields_ = [
        ("struct_size", ctypes.c_uint32),
        ("matrix_count", ctypes.c_uint32),
        ("matrices", POINTER(offload_exchange_matrix_t)),
        ("comm", POINTER(offload_comm_t)),
        ("comm_timeout_ns", ctypes.c_uint64),
    ]


class offload_exchange_plan_t(Struct):
    struct_size: int
    home_count: int
    home_elements: int
    device_bytes: int
    host_bytes: int
    _fields_ = [
        ("struct_size", ctypes.c_uint32),
        ("home_count", ctypes.c_uint32),
        ("home_elements", ctypes.c_uint64),
        ("device_bytes", ctypes.c_uint64),
        ("host_bytes", ctypes.c_uint64),
    ]


offload_stream_function_t = CFUNCTYPE(None, ctypes.c_void_p)

# Result and arguments of every function.
FUNCTIONS: dict[str, tuple[Any, list[Any]]] = {
    "offload_abi_version": (ctypes.c_uint32, []),
    "offload_build_info": (ctypes.c_char_p, []),
    "offload_status_name": (ctypes.c_char_p, [ctypes.c_int32]),
    "offload_last_error": (ctypes.c_char_p, []),
    "offload_context_create": (ctypes.c_int32, [POINTER(offload_context_options_t), POINTER(offload_context_t)]),
    "offload_context_destroy": (ctypes.c_int32, [offload_context_t]),
    "offload_context_get_info": (ctypes.c_int32, [offload_context_t, POINTER(offload_context_info_t)]),
    "offload_optimizer_create": (ctypes.c_int32, [offload_context_t, POINTER(offload_optimizer_options_t), POINTER(offload_optimizer_t)]),
    "offload_optimizer_destroy": (ctypes.c_int32, [offload_optimizer_t]),
    "offload_optimizer_add_group": (ctypes.c_int32, [offload_optimizer_t, POINTER(offload_group_t), POINTER(ctypes.c_uint32)]),
    "offload_optimizer_set_group": (ctypes.c_int32, [offload_optimizer_t, ctypes.c_uint32, POINTER(offload_group_t)]),
    "offload_optimizer_add_params": (ctypes.c_int32, [offload_optimizer_t, POINTER(offload_param_t), ctypes.c_uint32, POINTER(ctypes.c_uint32)]),
    "offload_optimizer_bind": (ctypes.c_int32, [offload_optimizer_t, POINTER(offload_binding_t), ctypes.c_uint32]),
    "offload_optimizer_plan": (ctypes.c_int32, [offload_optimizer_t, POINTER(offload_plan_t)]),
    "offload_optimizer_commit": (ctypes.c_int32, [offload_optimizer_t, offload_stream_t]),
    "offload_optimizer_step": (ctypes.c_int32, [offload_optimizer_t, POINTER(offload_step_options_t), POINTER(offload_ticket_t)]),
    "offload_optimizer_step_result": (ctypes.c_int32, [offload_optimizer_t, offload_ticket_t, POINTER(offload_step_result_t)]),
    "offload_optimizer_wait": (ctypes.c_int32, [offload_optimizer_t, offload_ticket_t, ctypes.c_int64]),
    "offload_optimizer_stream_wait": (ctypes.c_int32, [offload_optimizer_t, offload_ticket_t, offload_stream_t, POINTER(ctypes.c_uint32), ctypes.c_uint32]),
    "offload_optimizer_offload_params": (ctypes.c_int32, [offload_optimizer_t, POINTER(offload_move_options_t), POINTER(offload_ticket_t)]),
    "offload_optimizer_reload_params": (ctypes.c_int32, [offload_optimizer_t, POINTER(offload_move_options_t), POINTER(offload_ticket_t)]),
    "offload_optimizer_offload_grads": (ctypes.c_int32, [offload_optimizer_t, POINTER(offload_move_options_t), POINTER(offload_ticket_t)]),
    "offload_optimizer_reload_grads": (ctypes.c_int32, [offload_optimizer_t, POINTER(offload_move_options_t), POINTER(offload_ticket_t)]),
    "offload_optimizer_grads_to_keep": (ctypes.c_int32, [offload_optimizer_t, POINTER(ctypes.c_uint8), ctypes.c_uint32]),
    "offload_optimizer_undo_early_updates": (ctypes.c_int32, [offload_optimizer_t, POINTER(offload_ticket_t)]),
    "offload_optimizer_offload_states": (ctypes.c_int32, [offload_optimizer_t, POINTER(offload_move_options_t), POINTER(offload_ticket_t)]),
    "offload_optimizer_reload_states": (ctypes.c_int32, [offload_optimizer_t, POINTER(offload_move_options_t), POINTER(offload_ticket_t)]),
    "offload_optimizer_refresh_masters": (ctypes.c_int32, [offload_optimizer_t, POINTER(offload_move_options_t), POINTER(offload_ticket_t)]),
    "offload_optimizer_set_device_fraction": (ctypes.c_int32, [offload_optimizer_t, ctypes.c_double, POINTER(offload_ticket_t)]),
    "offload_optimizer_set_fractions": (ctypes.c_int32, [offload_optimizer_t, ctypes.c_double, ctypes.c_double, POINTER(offload_ticket_t)]),
    "offload_optimizer_state": (ctypes.c_int32, [offload_optimizer_t, ctypes.c_uint32, ctypes.c_int32, POINTER(offload_state_view_t)]),
    "offload_optimizer_read_state": (ctypes.c_int32, [offload_optimizer_t, ctypes.c_uint32, ctypes.c_int32, ctypes.c_uint64, ctypes.c_uint64, POINTER(ctypes.c_float)]),
    "offload_optimizer_write_state": (ctypes.c_int32, [offload_optimizer_t, ctypes.c_uint32, ctypes.c_int32, ctypes.c_uint64, ctypes.c_uint64, POINTER(ctypes.c_float)]),
    "offload_optimizer_set_step_count": (ctypes.c_int32, [offload_optimizer_t, ctypes.c_uint32, ctypes.c_uint64]),
    "offload_optimizer_changes": (ctypes.c_int32, [offload_optimizer_t, POINTER(ctypes.c_uint32), ctypes.c_uint32, POINTER(offload_changes_options_t), POINTER(offload_changes_t)]),
    "offload_optimizer_acknowledge_changes": (ctypes.c_int32, [offload_optimizer_t, ctypes.c_uint64]),
    "offload_optimizer_mark_changed": (ctypes.c_int32, [offload_optimizer_t, POINTER(ctypes.c_uint32), ctypes.c_uint32]),
    "offload_content_hash": (ctypes.c_int32, [ctypes.c_void_p, ctypes.c_uint64, POINTER(ctypes.c_uint64)]),
    "offload_optimizer_get_stats": (ctypes.c_int32, [offload_optimizer_t, POINTER(offload_stats_t)]),
    "offload_optimizer_trace_start": (ctypes.c_int32, [offload_optimizer_t, ctypes.c_uint64]),
    "offload_optimizer_trace_stop": (ctypes.c_int32, [offload_optimizer_t, ctypes.c_char_p, POINTER(ctypes.c_uint64)]),
    "offload_optimizer_save": (ctypes.c_int32, [offload_optimizer_t, POINTER(offload_save_options_t), POINTER(offload_ticket_t)]),
    "offload_optimizer_load": (ctypes.c_int32, [offload_optimizer_t, POINTER(offload_load_options_t), POINTER(offload_ticket_t)]),
    "offload_checkpoint_inspect": (ctypes.c_int32, [ctypes.c_char_p, POINTER(offload_checkpoint_info_t), offload_tensor_function_t, ctypes.c_void_p]),
    "offload_checkpoint_verify": (ctypes.c_int32, [ctypes.c_char_p, POINTER(offload_verify_options_t)]),
    "offload_checkpoint_newest": (ctypes.c_int32, [ctypes.c_char_p, POINTER(offload_verify_options_t), ctypes.c_char_p, ctypes.c_uint64]),
    "offload_stash_plan": (ctypes.c_int32, [offload_context_t, POINTER(offload_stash_options_t), POINTER(offload_stash_plan_t)]),
    "offload_stash_create": (ctypes.c_int32, [offload_context_t, POINTER(offload_stash_options_t), POINTER(offload_stash_t)]),
    "offload_stash_destroy": (ctypes.c_int32, [offload_stash_t]),
    "offload_stash_push": (ctypes.c_int32, [offload_stash_t, ctypes.c_uint32, ctypes.c_void_p, ctypes.c_uint64, offload_stream_t, POINTER(offload_stash_ticket_t)]),
    "offload_stash_release": (ctypes.c_int32, [offload_stash_t, offload_stash_ticket_t, offload_stream_t]),
    "offload_stash_prefetch": (ctypes.c_int32, [offload_stash_t, offload_stash_ticket_t, ctypes.c_void_p, ctypes.c_uint64, offload_stream_t]),
    "offload_stash_pop": (ctypes.c_int32, [offload_stash_t, offload_stash_ticket_t, offload_stream_t, ctypes.c_uint32]),
    "offload_stash_drop": (ctypes.c_int32, [offload_stash_t, offload_stash_ticket_t, offload_stream_t]),
    "offload_stash_mark": (ctypes.c_int32, [offload_stash_t, ctypes.c_uint32, POINTER(offload_stash_mark_t)]),
    "offload_stash_rollback": (ctypes.c_int32, [offload_stash_t, offload_stash_mark_t, offload_stream_t]),
    "offload_stash_wait": (ctypes.c_int32, [offload_stash_t, offload_stash_ticket_t, ctypes.c_int64]),
    "offload_stash_get_stats": (ctypes.c_int32, [offload_stash_t, POINTER(offload_stash_stats_t)]),
    "offload_exchange_plan": (ctypes.c_int32, [offload_context_t, POINTER(offload_exchange_options_t), POINTER(offload_exchange_plan_t)]),
    "offload_exchange_create": (ctypes.c_int32, [offload_context_t, POINTER(offload_exchange_options_t), POINTER(offload_exchange_t)]),
    "offload_exchange_destroy": (ctypes.c_int32, [offload_exchange_t]),
    "offload_exchange_home": (ctypes.c_int32, [offload_exchange_t, ctypes.c_uint32, POINTER(ctypes.c_int32)]),
    "offload_exchange_gather": (ctypes.c_int32, [offload_exchange_t, ctypes.c_uint32, ctypes.c_int32, ctypes.c_void_p, ctypes.c_void_p, offload_stream_t]),
    "offload_exchange_scatter": (ctypes.c_int32, [offload_exchange_t, ctypes.c_uint32, ctypes.c_int32, ctypes.c_void_p, ctypes.c_void_p, offload_stream_t]),
    "offload_device_alloc": (ctypes.c_int32, [offload_context_t, ctypes.c_uint64, POINTER(ctypes.c_void_p)]),
    "offload_device_free": (ctypes.c_int32, [offload_context_t, ctypes.c_void_p]),
    "offload_device_upload": (ctypes.c_int32, [offload_context_t, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint64, offload_stream_t]),
    "offload_device_download": (ctypes.c_int32, [offload_context_t, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint64, offload_stream_t]),
    "offload_device_map": (ctypes.c_int32, [offload_context_t, ctypes.c_void_p, ctypes.c_uint64, POINTER(ctypes.c_void_p)]),
    "offload_stream_create": (ctypes.c_int32, [offload_context_t, POINTER(offload_stream_t)]),
    "offload_stream_destroy": (ctypes.c_int32, [offload_context_t, offload_stream_t]),
    "offload_stream_synchronize": (ctypes.c_int32, [offload_context_t, offload_stream_t, ctypes.c_int64]),
    "offload_stream_run": (ctypes.c_int32, [offload_context_t, offload_stream_t, offload_stream_function_t, ctypes.c_void_p]),
    "offload_pool_create": (ctypes.c_int32, [offload_context_t, POINTER(offload_pool_t)]),
    "offload_pool_destroy": (ctypes.c_int32, [offload_pool_t]),
    "offload_pool_alloc": (ctypes.c_int32, [offload_pool_t, ctypes.c_uint64, POINTER(ctypes.c_void_p)]),
    "offload_pool_free": (ctypes.c_int32, [ctypes.c_void_p]),
    "offload_pool_release_memory": (ctypes.c_int32, [offload_pool_t]),
    "offload_pool_take_memory": (ctypes.c_int32, [offload_pool_t]),
    "offload_pool_enter": (ctypes.c_int32, [offload_pool_t]),
    "offload_pool_torch_alloc": (ctypes.c_void_p, [ctypes.c_int64, ctypes.c_int32, offload_stream_t]),
    "offload_pool_torch_free": (None, [ctypes.c_void_p, ctypes.c_int64, ctypes.c_int32, offload_stream_t]),
}


class Algorithm(NamedTuple):
    """A row of src/kernels/algorithms.h."""

    name: str
    moments: dict[str, int]  # enum offload_state_kind, by the names that torch gives them
    needs_momentum: bool  # it keeps its moments for groups with momentum only
    reads: tuple[str, ...]  # the fields of offload_group_t that it reads
    counts_steps: bool  # torch keeps a step count beside the moments


# The fields of offload_group_t that are 0 or 1.
GROUP_FLAGS = ("nesterov", "maximize", "cautious_weight_decay")

# By enum offload_algorithm.
ALGORITHMS: dict[int, Algorithm] = {
    OFFLOAD_ADAMW: Algorithm(
        "AdamW",
        {"exp_avg": OFFLOAD_STATE_EXP_AVG, "exp_avg_sq": OFFLOAD_STATE_EXP_AVG_SQ},
        False,
        ("lr", "beta1", "beta2", "eps", "weight_decay", "maximize", "cautious_weight_decay"),
        True,
    ),
    OFFLOAD_ADAM: Algorithm(
        "Adam",
        {"exp_avg": OFFLOAD_STATE_EXP_AVG, "exp_avg_sq": OFFLOAD_STATE_EXP_AVG_SQ},
        False,
        ("lr", "beta1", "beta2", "eps", "weight_decay", "maximize"),
        True,
    ),
    OFFLOAD_SGD: Algorithm(
        "SGD",
        {"momentum_buffer": OFFLOAD_STATE_MOMENTUM_BUFFER},
        True,
        ("lr", "weight_decay", "momentum", "dampening", "nesterov", "maximize"),
        False,
    ),
    OFFLOAD_LION: Algorithm(
        "Lion",
        {"exp_avg": OFFLOAD_STATE_EXP_AVG},
        False,
        ("lr", "beta1", "beta2", "weight_decay", "maximize"),
        False,
    ),
    OFFLOAD_ADAGRAD: Algorithm(
        "Adagrad",
        {"sum": OFFLOAD_STATE_SUM},
        False,
        ("lr", "eps", "weight_decay", "lr_decay", "initial_accumulator_value", "maximize"),
        True,
    ),
    OFFLOAD_SIGNUM: Algorithm(
        "Signum",
        {"exp_avg": OFFLOAD_STATE_EXP_AVG},
        False,
        ("lr", "weight_decay", "momentum", "maximize"),
        False,
    ),
    OFFLOAD_MUON: Algorithm(
        "Muon",
        {"momentum_buffer": OFFLOAD_STATE_MOMENTUM_BUFFER},
        False,
        ("lr", "eps", "weight_decay", "momentum", "nesterov", "maximize", "ns_steps", "update_rms", "ns_coefficients"),
        False,
    ),
}
