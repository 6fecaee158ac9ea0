"""hybridopt_swig trains to the bits of the C program, and turns statuses into exceptions.

Usage: swig_test.py TRAINING_STEP
"""

import ctypes
import sys
import tempfile

import hybridopt_swig as h
from training_step import BIASES, STEPS, WEIGHTS, bf16, check, hash_bytes, summary, values


def address(array):
    return array.buffer_info()[0]


def make(kind, **fields):
    made = kind()
    for name, value in fields.items():
        assert hasattr(made, name), name
        setattr(made, name, value)
    return made


def adamw():
    return make(
        h.offload_group_t, lr=0.01, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.1,
        cautious_weight_decay=1,
    )


def train():
    weight, bias = bf16(values(WEIGHTS, 1)), values(BIASES, 2)
    weight_grad, bias_grad = bf16(values(WEIGHTS, 0)), values(BIASES, 0)

    context = h.offload_context_create(h.offload_context_options_t())
    options = make(h.offload_optimizer_options_t, algorithm=h.OFFLOAD_ADAMW)
    optimizer = h.offload_optimizer_create(context, options)
    group = h.offload_optimizer_add_group(optimizer, adamw())
    params = h.ParamArray(2)
    params[0] = make(
        h.offload_param_t,
        group=group,
        dtype=h.OFFLOAD_BF16,
        grad_dtype=h.OFFLOAD_BF16,
        name="weight",
        data=address(weight),
        grad=address(weight_grad),
        count=WEIGHTS,
    )
    params[1] = make(
        h.offload_param_t,
        group=group,
        dtype=h.OFFLOAD_FP32,
        grad_dtype=h.OFFLOAD_FP32,
        name="bias",
        data=address(bias),
        grad=address(bias_grad),
        count=BIASES,
    )
    assert h.offload_optimizer_add_params(optimizer, params.cast(), 2) == 0
    h.offload_optimizer_commit(optimizer, None)

    for step in range(1, STEPS + 1):
        weight_grad[:] = bf16(values(WEIGHTS, 10 + step))
        bias_grad[:] = values(BIASES, 20 + step)
        options = make(h.offload_step_options_t, grad_scale=4, grad_norm_max=1)
        ticket = h.offload_optimizer_step(optimizer, options)
        h.offload_optimizer_wait(optimizer, ticket, -1)
    result = h.offload_step_result_t()
    h.offload_optimizer_step_result(optimizer, ticket, result)
    assert (result.step, result.skipped) == (STEPS, 0)

    states = hash_bytes(b"")
    for param in range(2):
        for kind in (h.OFFLOAD_STATE_MASTER, h.OFFLOAD_STATE_EXP_AVG, h.OFFLOAD_STATE_EXP_AVG_SQ):
            view = h.offload_state_view_t()
            h.offload_optimizer_state(optimizer, param, kind, view)
            content = ctypes.string_at(view.host_data, 4 * view.host_count)
            states = hash_bytes(content, states)
            read = values(view.host_count, 0)
            h.offload_optimizer_read_state(optimizer, param, kind, 0, len(read), address(read))
            assert read.tobytes() == content
            h.offload_optimizer_write_state(optimizer, param, kind, 1, 1, address(read) + 4)
    got = summary(hash_bytes(bias, hash_bytes(weight)), states, result.grad_norm)
    h.offload_optimizer_destroy(optimizer)
    h.offload_context_destroy(context)
    return got


def refused(call, *arguments, status, words):
    try:
        call(*arguments)
    except h.Error as error:
        assert error.status == status, error
        assert all(word in str(error) for word in words), error
    else:
        raise AssertionError(f"{call.__name__} was not refused")


def test_errors():
    bad = h.OFFLOAD_INVALID_ARGUMENT
    options = make(h.offload_context_options_t, threads=5000)
    words = ["INVALID_ARGUMENT", "threads", "1024"]
    refused(h.offload_context_create, options, status=bad, words=words)
    refused(h.offload_context_destroy, None, status=bad, words=["context is NULL"])
    refused(h.offload_context_destroy, 12345, status=bad, words=["not a handle"])
    context = h.offload_context_create(h.offload_context_options_t())
    options = make(h.offload_optimizer_options_t, algorithm=h.OFFLOAD_SGD)
    optimizer = h.offload_optimizer_create(context, options)
    state = h.OFFLOAD_INVALID_STATE
    refused(h.offload_optimizer_commit, optimizer, None, status=state, words=["add_params"])
    refused(h.offload_context_destroy, context, status=state, words=["optimizers"])
    h.offload_optimizer_destroy(optimizer)
    h.offload_context_destroy(context)
    refused(h.offload_optimizer_destroy, optimizer, status=bad, words=["destroyed"])
    try:
        h.offload_device_free(context, "text")
    except TypeError:
        pass
    else:
        raise AssertionError("a text passed for an address")


def test_device_and_log():
    """Memory of the simulated device, and log lines that Python gets from the library."""
    heard = []
    options = make(h.offload_context_options_t, device_kind=h.OFFLOAD_DEVICE_SIM)
    options.sim_pinned_bytes_max = 1
    options.allow_pageable = 1
    options.set_log(lambda level, text: heard.append((level, text)))
    context = h.offload_context_create(options)
    data, grad = (h.offload_device_alloc(context, 4 * BIASES) for _ in range(2))
    stream = h.offload_stream_create(context)
    bias = values(BIASES, 1)
    for target in (data, grad):
        h.offload_device_upload(context, target, address(bias), 4 * BIASES, stream)
    options = make(h.offload_optimizer_options_t, algorithm=h.OFFLOAD_ADAMW)
    optimizer = h.offload_optimizer_create(context, options)
    param = make(h.offload_param_t, name="bias", dtype=h.OFFLOAD_FP32, grad_dtype=h.OFFLOAD_FP32)
    param.group = h.offload_optimizer_add_group(optimizer, adamw())
    param.data, param.grad, param.count = data, grad, BIASES
    h.offload_optimizer_add_params(optimizer, param, 1)
    h.offload_optimizer_commit(optimizer, stream)
    plan = h.offload_plan_t()
    h.offload_optimizer_plan(optimizer, plan)
    by_tier = ctypes.cast(int(plan.state_bytes), ctypes.POINTER(ctypes.c_uint64 * 32))
    assert by_tier[h.OFFLOAD_TIER_HOST][h.OFFLOAD_STATE_EXP_AVG] >= 4 * BIASES
    ticket = h.offload_optimizer_step(optimizer, None)
    h.offload_optimizer_stream_wait(optimizer, ticket, stream, None, 0)
    after = values(BIASES, 1)
    h.offload_device_download(context, address(after), data, 4 * BIASES, stream)
    assert all(abs(new) < abs(old) or old == 0 for new, old in zip(after, bias))
    info = h.offload_context_info_t()
    h.offload_context_get_info(context, info)
    assert "pin" in info.notes, info.notes
    assert any(level == h.OFFLOAD_LOG_WARNING and "pin" in text for level, text in heard), heard
    h.offload_optimizer_destroy(optimizer)
    h.offload_stream_destroy(context, stream)
    h.offload_device_free(context, data)
    h.offload_context_destroy(context)


def test_checkpoints():
    x = values(BIASES, 1)
    context = h.offload_context_create(h.offload_context_options_t())
    options = make(h.offload_optimizer_options_t, algorithm=h.OFFLOAD_ADAMW)
    optimizer = h.offload_optimizer_create(context, options)
    param = make(h.offload_param_t, name="x", dtype=h.OFFLOAD_FP32, grad_dtype=h.OFFLOAD_FP32)
    param.group = h.offload_optimizer_add_group(optimizer, adamw())
    param.data, param.count = address(x), BIASES
    h.offload_optimizer_add_params(optimizer, param, 1)
    h.offload_optimizer_commit(optimizer, None)
    with tempfile.TemporaryDirectory() as directory:
        heard = []
        options = make(h.offload_save_options_t, path=f"{directory}/saved")
        options.set_progress(lambda done, total: heard.append((done, total)))
        h.offload_optimizer_wait(optimizer, h.offload_optimizer_save(optimizer, options), -1)
        assert heard and heard[-1][0] == heard[-1][1] > 0, heard
        assert h.offload_checkpoint_newest(directory, None, 4096) == f"{directory}/saved"
        info = h.offload_checkpoint_info_t()
        h.offload_checkpoint_inspect(f"{directory}/saved", info, None, None)
        assert (info.param_count, info.tensor_count, info.step) == (1, 3, 0)
        h.offload_checkpoint_verify(f"{directory}/saved", None)
        before, x[:] = x[:], values(BIASES, 2)
        options = make(h.offload_load_options_t, path=f"{directory}/saved")
        h.offload_optimizer_wait(optimizer, h.offload_optimizer_load(optimizer, options), -1)
        assert x == before
        options.path = f"{directory}/nowhere"
        ticket = h.offload_optimizer_load(optimizer, options)
        failed = h.OFFLOAD_IO_FAILED
        refused(h.offload_optimizer_wait, optimizer, ticket, -1, status=failed, words=["nowhere"])
    h.offload_optimizer_destroy(optimizer)
    h.offload_context_destroy(context)


def test_stash():
    x = values(BIASES, 1)
    size = 4 * BIASES
    context = h.offload_context_create(h.offload_context_options_t())
    options = make(h.offload_stash_options_t, budget_bytes=4096, slab_bytes=4096, min_bytes=1)
    plan, stats = h.offload_stash_plan_t(), h.offload_stash_stats_t()
    h.offload_stash_plan(context, options, plan)
    assert (plan.slab_count, plan.fits) == (1, 1)
    stash = h.offload_stash_create(context, options)
    mark = h.offload_stash_mark(stash, 0)
    ticket = h.offload_stash_push(stash, 0, address(x), size, None)
    assert ticket != 0
    assert h.offload_stash_push(stash, 0, address(x), size, None) == 0, "there was no room"
    before, x[:] = x[:], values(BIASES, 2)
    h.offload_stash_prefetch(stash, ticket, address(x), size, None)
    h.offload_stash_pop(stash, ticket, None, h.OFFLOAD_STASH_KEEP)
    assert x == before
    h.offload_stash_rollback(stash, mark, None)
    bad = h.OFFLOAD_INVALID_ARGUMENT
    refused(h.offload_stash_release, stash, ticket, None, status=bad, words=["has ended"])
    h.offload_stash_get_stats(stash, stats)
    assert (stats.pushes, stats.refused_pushes, stats.pops, stats.drops) == (1, 1, 1, 1)
    h.offload_stash_destroy(stash)
    h.offload_context_destroy(context)


def test_changes():
    x, grad = values(BIASES, 1), values(BIASES, 2)
    context = h.offload_context_create(h.offload_context_options_t())
    options = make(h.offload_optimizer_options_t, algorithm=h.OFFLOAD_SGD, track_changes=1)
    optimizer = h.offload_optimizer_create(context, options)
    h.offload_optimizer_add_group(optimizer, make(h.offload_group_t, lr=0.5))
    param = make(h.offload_param_t, name="x", data=address(x), grad=address(grad), count=BIASES)
    param.dtype = param.grad_dtype = h.OFFLOAD_FP32
    h.offload_optimizer_add_params(optimizer, param, 1)
    h.offload_optimizer_commit(optimizer, None)
    changes = h.offload_changes_t()
    h.offload_optimizer_changes(optimizer, None, 0, h.offload_changes_options_t(), changes)
    assert (changes.param_count, changes.params.dense, changes.params.count) == (1, 1, BIASES)
    assert changes.params.hash == h.offload_content_hash(address(x), 4 * BIASES)
    h.offload_optimizer_acknowledge_changes(optimizer, changes.take)
    h.offload_optimizer_changes(optimizer, None, 0, h.offload_changes_options_t(), changes)
    assert (changes.params.dense, changes.params.count) == (0, 0)
    h.offload_optimizer_mark_changed(optimizer, None, 0)
    h.offload_optimizer_destroy(optimizer)
    h.offload_context_destroy(context)


def test_structs_are_sized():
    structs = [kind for name, kind in vars(h).items() if name.endswith("_t")]
    assert len(structs) >= 22, structs
    for kind in structs:
        assert kind().struct_size > 4, f"{kind.__name__} needs a SIZED in hybridopt_swig.i"


def test_arrays_of_a_struct_are_written_in_place():
    group = h.offload_group_t()
    rows = [ctypes.cast(int(group.ns_coefficients), ctypes.POINTER(ctypes.c_double * 3)) for _ in range(2)]
    rows[0][9][2] = -2.5
    assert rows[1][9][2] == -2.5 and rows[1][0][0] == 0


def test_numbers_of_structs_are_read_as_they_were_written():
    fields = []
    for kind in (value for name, value in vars(h).items() if name.endswith("_t")):
        struct = kind()
        for name in [name for name, value in vars(kind).items() if isinstance(value, property)]:
            if isinstance(getattr(struct, name), float):
                setattr(struct, name, 0.95)
                assert repr(getattr(struct, name)) == "0.95", (kind.__name__, name)
                fields.append(name)
    assert {"lr", "beta2", "device_fraction", "grad_norm_max"} <= set(fields), fields


test_structs_are_sized()
test_numbers_of_structs_are_read_as_they_were_written()
test_arrays_of_a_struct_are_written_in_place()
test_changes()
test_errors()
test_device_and_log()
test_checkpoints()
test_stash()
check(sys.argv[1], train())
print("hybridopt_swig:", h.offload_build_info())
