"""cffi on offload.h trains to the bits of the C program: in ABI mode, without a compiler, and in API
mode, compiled.

Usage: cffi_test.py abi|api SOURCE_DIR BUILD_DIR TRAINING_STEP
"""

import importlib
import sys
import tempfile

mode, source, build, training_step = sys.argv[1:]
sys.path.insert(0, f"{source}/bindings/python/cffi")

import hybridopt_cffi
from training_step import BIASES, STEPS, WEIGHTS, bf16, check, hash_bytes, summary, values

header = f"{source}/include/offload.h"
if mode == "abi":
    ffi, lib = hybridopt_cffi.load(f"{build}/libhybridopt.so", header)
else:
    scratch = tempfile.TemporaryDirectory()
    hybridopt_cffi.builder(
        "_hybridopt_cffi", header, library_dirs=[build], runtime_library_dirs=[build]
    ).compile(tmpdir=scratch.name)
    sys.path.insert(0, scratch.name)
    compiled = importlib.import_module("_hybridopt_cffi")
    ffi, lib = compiled.ffi, compiled.lib


def must(status):
    hybridopt_cffi.check(ffi, lib, status)


def struct(name, /, **fields):
    return hybridopt_cffi.struct(ffi, name, **fields)


def train():
    weight, bias = bf16(values(WEIGHTS, 1)), values(BIASES, 2)
    weight_grad, bias_grad = bf16(values(WEIGHTS, 0)), values(BIASES, 0)

    context = ffi.new("offload_context_t*")
    optimizer = ffi.new("offload_optimizer_t*")
    group = ffi.new("uint32_t*")
    must(lib.offload_context_create(struct("offload_context_options_t"), context))
    options = struct("offload_optimizer_options_t", algorithm=lib.OFFLOAD_ADAMW)
    must(lib.offload_optimizer_create(context[0], options, optimizer))
    adamw = struct(
        "offload_group_t", lr=0.01, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.1,
        cautious_weight_decay=1,
    )
    must(lib.offload_optimizer_add_group(optimizer[0], adamw, group))
    for name, dtype, data, grad in (
        (b"weight", lib.OFFLOAD_BF16, weight, weight_grad),
        (b"bias", lib.OFFLOAD_FP32, bias, bias_grad),
    ):
        text = ffi.new("char[]", name)
        param = struct(
            "offload_param_t",
            group=group[0],
            dtype=dtype,
            grad_dtype=dtype,
            name=text,
            data=ffi.from_buffer(data),
            grad=ffi.from_buffer(grad),
            count=len(data),
        )
        must(lib.offload_optimizer_add_params(optimizer[0], param, 1, ffi.NULL))
    must(lib.offload_optimizer_commit(optimizer[0], ffi.NULL))

    for step in range(1, STEPS + 1):
        weight_grad[:] = bf16(values(WEIGHTS, 10 + step))
        bias_grad[:] = values(BIASES, 20 + step)
        options = struct("offload_step_options_t", grad_scale=4, grad_norm_max=1)
        must(lib.offload_optimizer_step(optimizer[0], options, ffi.NULL))
        must(lib.offload_optimizer_wait(optimizer[0], 0, -1))
    result = struct("offload_step_result_t")
    must(lib.offload_optimizer_step_result(optimizer[0], 0, result))
    assert (result.step, result.skipped) == (STEPS, 0)

    states = hash_bytes(b"")
    for param in range(2):
        for kind in ("MASTER", "EXP_AVG", "EXP_AVG_SQ"):
            view = struct("offload_state_view_t")
            number = getattr(lib, f"OFFLOAD_STATE_{kind}")
            must(lib.offload_optimizer_state(optimizer[0], param, number, view))
            states = hash_bytes(ffi.buffer(view.host_data, 4 * view.host_count), states)
            read = ffi.new("float[]", int(view.host_count))
            elements = (optimizer[0], param, number, 0, view.host_count)
            must(lib.offload_optimizer_read_state(*elements, read))
            assert ffi.buffer(read)[:] == ffi.buffer(view.host_data, 4 * view.host_count)[:]
            must(lib.offload_optimizer_write_state(*elements, read))
    got = summary(hash_bytes(bias, hash_bytes(weight)), states, result.grad_norm)
    must(lib.offload_optimizer_destroy(optimizer[0]))
    must(lib.offload_context_destroy(context[0]))
    return got


def test_errors():
    context = ffi.new("offload_context_t*")
    options = struct("offload_context_options_t", threads=5000)
    try:
        must(lib.offload_context_create(options, context))
    except RuntimeError as error:
        assert "INVALID_ARGUMENT" in str(error) and "threads is 5000" in str(error), error
    else:
        raise AssertionError("5000 threads were not refused")


def test_log():
    """A Python function that the library calls."""
    heard = []

    @ffi.callback("void(void*, int32_t, const char*)")
    def log(user, level, text):
        heard.append((level, ffi.string(text).decode()))

    context = ffi.new("offload_context_t*")
    options = struct("offload_context_options_t", device_kind=lib.OFFLOAD_DEVICE_SIM, log=log)
    options.sim_pinned_bytes_max = 1
    options.allow_pageable = 1
    must(lib.offload_context_create(options, context))
    optimizer = ffi.new("offload_optimizer_t*")
    options = struct("offload_optimizer_options_t", algorithm=lib.OFFLOAD_LION)
    must(lib.offload_optimizer_create(context[0], options, optimizer))
    group = ffi.new("uint32_t*")
    lion = struct("offload_group_t", lr=0.01, beta1=0.9, beta2=0.99)
    must(lib.offload_optimizer_add_group(optimizer[0], lion, group))
    data = ffi.new("void**")
    must(lib.offload_device_alloc(context[0], 4096, data))
    name = ffi.new("char[]", b"x")
    param = struct("offload_param_t", name=name, data=data[0], count=1024)
    param.dtype = param.grad_dtype = lib.OFFLOAD_FP32
    must(lib.offload_optimizer_add_params(optimizer[0], param, 1, ffi.NULL))
    must(lib.offload_optimizer_commit(optimizer[0], ffi.NULL))
    must(lib.offload_optimizer_destroy(optimizer[0]))
    must(lib.offload_context_destroy(context[0]))
    assert any(level == lib.OFFLOAD_LOG_WARNING and "pin" in text for level, text in heard), heard


def test_checkpoints():
    x = values(BIASES, 1)
    context = ffi.new("offload_context_t*")
    optimizer = ffi.new("offload_optimizer_t*")
    must(lib.offload_context_create(struct("offload_context_options_t"), context))
    options = struct("offload_optimizer_options_t", algorithm=lib.OFFLOAD_SGD)
    must(lib.offload_optimizer_create(context[0], options, optimizer))
    group = ffi.new("uint32_t*")
    must(lib.offload_optimizer_add_group(optimizer[0], struct("offload_group_t", lr=1), group))
    name = ffi.new("char[]", b"x")
    param = struct("offload_param_t", name=name, data=ffi.from_buffer(x), count=BIASES)
    param.dtype = param.grad_dtype = lib.OFFLOAD_FP32
    must(lib.offload_optimizer_add_params(optimizer[0], param, 1, ffi.NULL))
    must(lib.offload_optimizer_commit(optimizer[0], ffi.NULL))
    seen, heard = [], []

    @ffi.callback("void(void*, uint64_t, uint64_t)")
    def progress(user, done, total):
        heard.append((done, total))

    @ffi.callback("void(void*, const offload_checkpoint_tensor_t*)")
    def visit(user, tensor):
        shape = [tensor.global_shape[i] for i in range(tensor.dimensions)]
        seen.append((ffi.string(tensor.name), tensor.kind, shape, tensor.bytes))

    with tempfile.TemporaryDirectory() as directory:
        path = ffi.new("char[]", f"{directory}/saved".encode())
        options = struct("offload_save_options_t", path=path, progress=progress)
        must(lib.offload_optimizer_save(optimizer[0], options, ffi.NULL))
        must(lib.offload_optimizer_wait(optimizer[0], 0, -1))
        must(lib.offload_checkpoint_inspect(path, ffi.NULL, visit, ffi.NULL))
        must(lib.offload_checkpoint_verify(path, ffi.NULL))
        before, x[:] = x[:], values(BIASES, 2)
        options = struct("offload_load_options_t", path=path)
        must(lib.offload_optimizer_load(optimizer[0], options, ffi.NULL))
        must(lib.offload_optimizer_wait(optimizer[0], 0, -1))
    assert x == before
    assert seen == [(b"x", lib.OFFLOAD_STATE_MASTER, [BIASES], 4 * BIASES)], seen
    assert heard and heard[-1][0] == heard[-1][1] > 0, heard
    must(lib.offload_optimizer_destroy(optimizer[0]))
    must(lib.offload_context_destroy(context[0]))


def test_stash():
    x = values(BIASES, 1)
    size = 4 * BIASES
    context, stash = ffi.new("offload_context_t*"), ffi.new("offload_stash_t*")
    ticket = ffi.new("offload_stash_ticket_t*")
    must(lib.offload_context_create(struct("offload_context_options_t"), context))
    options = struct("offload_stash_options_t", budget_bytes=4096, slab_bytes=4096, min_bytes=1)
    must(lib.offload_stash_create(context[0], options, stash))
    data = ffi.from_buffer(x)
    must(lib.offload_stash_push(stash[0], 0, data, size, ffi.NULL, ticket))
    assert ticket[0] != 0
    before, x[:] = x[:], values(BIASES, 2)
    must(lib.offload_stash_prefetch(stash[0], ticket[0], data, size, ffi.NULL))
    must(lib.offload_stash_pop(stash[0], ticket[0], ffi.NULL, 0))
    assert x == before
    must(lib.offload_stash_destroy(stash[0]))
    must(lib.offload_context_destroy(context[0]))


def test_another_header():
    try:
        hybridopt_cffi.declarations(__file__)
    except ValueError as error:
        assert "plain-C99" in str(error)
    else:
        raise AssertionError("a file without markers was read")


test_errors()
test_log()
test_checkpoints()
test_stash()
test_another_header()
check(training_step, train())
print(f"cffi, {mode.upper()} mode:", ffi.string(lib.offload_build_info()).decode())
