"""hybridopt.abi against the library of this build. No torch here."""

import array
import contextlib
import ctypes
import gc
import os
import resource
import signal
import subprocess
import sys
import threading

import pytest

from hybridopt import abi


def addressed(values):
    """A float array and its address."""
    data = array.array("f", values)
    return data, data.buffer_info()[0]


def registered(context, data_address, grad_address, count, options=None, **fields):
    optimizer = abi.Optimizer(context, algorithm=abi.OFFLOAD_ADAMW, **(options or {}))
    group = optimizer.add_group(lr=0.5, beta1=0.9, beta2=0.99, eps=1e-8)
    param = abi.offload_param_t(
        group=group,
        dtype=abi.OFFLOAD_FP32,
        grad_dtype=abi.OFFLOAD_FP32,
        name=b"weight",
        data=data_address,
        grad=grad_address,
        count=count,
        **fields,
    )
    optimizer.add_params([param])
    return optimizer


def test_no_torch_is_needed():
    program = (
        "import sys, hybridopt; hybridopt.abi.Context().close(); "
        "assert 'torch' not in sys.modules and 'numpy' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


def test_layout_is_that_of_the_compiled_header():
    rows = subprocess.run(
        [os.environ["HYBRIDOPT_LAYOUT_TEST"], "--table"], check=True, capture_output=True, text=True
    ).stdout.splitlines()
    assert len(rows) > 100
    for row in rows:
        name, offset, size = row.split()
        if "." in name:
            struct, field = name.split(".")
            descriptor = getattr(getattr(abi, struct), field)
            assert (descriptor.offset, descriptor.size) == (int(offset), int(size)), name
        elif name.endswith("_t"):
            assert ctypes.sizeof(getattr(abi, name)) == int(size), name
        else:
            assert getattr(abi, name) == int(offset), name


def test_every_function_is_found():
    for name in abi.FUNCTIONS:
        assert abi.library()[name] is not None


def test_a_pool_gives_memory_away_and_keeps_addresses():
    context = abi.Context(device_kind=abi.OFFLOAD_DEVICE_SIM, threads=1)
    pool = abi.Pool(context)
    data, address = addressed([1, 2, 3])
    block = pool.alloc(12)
    context.upload(block, address, 12)
    pool.release_memory()
    with pytest.raises(abi.InvalidArgumentError, match="no memory lies behind it"):
        context.upload(block, address, 12)
    with pytest.raises(abi.InvalidStateError, match="is released; call offload_pool_take_memory first"):
        pool.alloc(12)
    pool.take_memory()
    context.upload(block, address, 12)
    pool.free(block)
    with pytest.raises(abi.InvalidArgumentError, match="has not been freed yet"):
        pool.free(block)
    with pytest.raises(abi.UnsupportedError, match="OFFLOAD_DEVICE_HOST, which has none"):
        abi.Pool(abi.Context(threads=1))


def test_torchs_allocator_takes_from_the_pool_that_its_thread_has_entered():
    context = abi.Context(device_kind=abi.OFFLOAD_DEVICE_SIM, threads=1)
    alloc = abi.library().offload_pool_torch_alloc
    free = abi.library().offload_pool_torch_free
    alloc.restype, alloc.argtypes = abi.FUNCTIONS["offload_pool_torch_alloc"]
    free.restype, free.argtypes = abi.FUNCTIONS["offload_pool_torch_free"]
    pool = abi.Pool(context)
    elsewhere = []
    with pool.entered():
        block = alloc(64, 0, None)
        thread = threading.Thread(target=lambda: elsewhere.append(alloc(64, 0, None)))
        thread.start(), thread.join()
        assert alloc(0, 0, None) is None
    assert block and elsewhere == [None]
    assert alloc(64, 0, None) is None
    data, address = addressed([1, 2])
    pool.close()
    context.upload(block, address, 8)  # blocks outlive their pool
    free(block, 64, 0, None)
    with pytest.raises(abi.InvalidArgumentError, match="freed or never allocated|not in this device's memory"):
        context.upload(block, address, 8)
    free(block, 64, 0, None)  # does nothing


def test_a_step_updates_memory_of_ours():
    weights, weights_address = addressed([1.0, 2.0, 3.0])
    _, grad_address = grad = addressed([1.0, -1.0, 1.0])
    with abi.Context(threads=1) as context:
        with registered(context, weights_address, grad_address, 3) as optimizer:
            assert optimizer.plan().element_count == 3
            optimizer.commit()
            ticket = optimizer.step()
            optimizer.wait(ticket)
            assert weights.tolist() == pytest.approx([0.5, 2.5, 2.5])
            result = optimizer.step_result(ticket)
            assert (result.step, result.skipped) == (1, 0)
            assert result.grad_norm == pytest.approx(3**0.5)
            view = optimizer.state(0, abi.OFFLOAD_STATE_EXP_AVG)
            moments = (ctypes.c_float * view.host_count).from_address(view.host_data)
            assert list(moments) == pytest.approx([0.1, -0.1, 0.1])
            assert view.step_count == 1
            read, read_address = addressed([0.0, 0.0])
            optimizer.read_state(0, abi.OFFLOAD_STATE_EXP_AVG, 1, 2, read_address)
            assert list(read) == list(moments)[1:]
            optimizer.write_state(0, abi.OFFLOAD_STATE_MASTER, 1, 2, read_address)
            assert list(weights) == [0.5, *read]
            with pytest.raises(abi.InvalidArgumentError, match="first is 2 and count is 2"):
                optimizer.read_state(0, abi.OFFLOAD_STATE_EXP_AVG, 2, 2, read_address)
            assert optimizer.stats().steps_applied == 1
    assert grad[0].tolist() == [1.0, -1.0, 1.0]


def test_errors_carry_the_librarys_text_and_their_own_class():
    with pytest.raises(abi.InvalidArgumentError, match="options.device_kind is 9"):
        abi.Context(device_kind=9)
    with pytest.raises(ValueError, match="options.threads is 5000"):
        abi.Context(threads=5000)
    with abi.Context() as context:
        with pytest.raises(abi.InvalidArgumentError, match="options.algorithm is 0") as caught:
            abi.Optimizer(context)
        assert caught.value.status == abi.OFFLOAD_INVALID_ARGUMENT
        with abi.Optimizer(context, algorithm=abi.OFFLOAD_SGD) as optimizer:
            with pytest.raises(abi.InvalidStateError, match="no params"):
                optimizer.commit()
            with pytest.raises(abi.InvalidStateError, match="still has 1 optimizers"):
                context.close()
            assert not context.closed


def test_every_status_has_its_class():
    named = {value for name, value in vars(abi).items() if name in STATUSES}
    assert len(named) == len(STATUSES)
    for status in named:
        error = abi.errors.error_of(status, "text")
        assert error.status == status and type(error) is not abi.HybridoptError
        assert abi.status_name(status) == abi_name(status)
    assert abi.errors.error_of(999, "text").status == 999


STATUSES = [
    "OFFLOAD_INVALID_ARGUMENT",
    "OFFLOAD_INVALID_STATE",
    "OFFLOAD_UNSUPPORTED",
    "OFFLOAD_OUT_OF_HOST_MEMORY",
    "OFFLOAD_OUT_OF_DEVICE_MEMORY",
    "OFFLOAD_DEVICE_FAILED",
    "OFFLOAD_COMM_FAILED",
    "OFFLOAD_IO_FAILED",
    "OFFLOAD_CHECKPOINT_CORRUPT",
    "OFFLOAD_CHECKPOINT_MISMATCH",
    "OFFLOAD_TIMED_OUT",
    "OFFLOAD_POISONED",
    "OFFLOAD_INTERNAL",
]


def abi_name(status):
    return next(name for name in STATUSES if getattr(abi, name) == status).removeprefix("OFFLOAD_")


def test_fields_that_a_struct_lacks_are_named():
    for threads in (1 << 32, -1, 10**400):
        with pytest.raises(ValueError, match=r"^offload_context_options_t.threads got a number that its 32 bits do not hold$"):
            abi.Context(threads=threads)
    with pytest.raises(TypeError, match="has no field 'thread', expected some of .*threads"):
        abi.Context(thread=1)


def test_use_after_close():
    context = abi.Context()
    context.close()
    context.close()
    with pytest.raises(abi.InvalidStateError, match="this Context is closed; make a new one"):
        context.info()


def test_what_is_not_referred_to_is_destroyed():
    context = abi.Context()
    optimizer = abi.Optimizer(context, algorithm=abi.OFFLOAD_LION)
    assert context.info().optimizers == 1
    del optimizer
    gc.collect()
    assert context.info().optimizers == 0


def test_a_foreign_handle_is_refused():
    with abi.Context() as context:
        with pytest.raises(abi.InvalidArgumentError, match="optimizer"):
            abi.call("offload_optimizer_commit", context.value, None)


@contextlib.contextmanager
def full_disk():
    """A limit on the size of files stands for a full disk. Python ignores the signal that comes with it."""
    unlimited = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (64, unlimited[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, unlimited)


@pytest.fixture
def saver():
    """An optimizer that can save. Its saves run one after the other."""
    weights, weights_address = addressed([1.0, 2.0, 3.0])
    grad, grad_address = addressed([0.0, 0.0, 0.0])
    with abi.Context(threads=1) as context:
        with registered(context, weights_address, grad_address, 3) as optimizer:
            optimizer.commit()
            yield optimizer
    assert len(weights) == len(grad)


def fail_unheard(optimizer, path):
    """Makes a save that has failed before this function returns, and whose failure nobody has been told."""
    with full_disk():
        ticket = optimizer.save(path)
        with pytest.raises(abi.IoFailedError, match=r"/\.behind\..*File too large"):
            optimizer.wait(optimizer.save(path.with_name("behind")))
    return ticket


@pytest.mark.parametrize("how", ["its ticket", "all"])
def test_a_save_that_failed_is_told_once_though_others_have_begun(how, saver, tmp_path):
    failed = fail_unheard(saver, tmp_path / "failed")
    works = saver.save(tmp_path / "works")
    saver.wait(works)
    with pytest.raises(abi.IoFailedError, match=r"/\.failed\..*File too large"):
        saver.wait(failed if how == "its ticket" else 0)
    saver.wait()
    saver.wait(works)


def test_each_save_that_failed_is_told(saver, tmp_path):
    fail_unheard(saver, tmp_path / "first")
    fail_unheard(saver, tmp_path / "second")
    saver.save(tmp_path / "works")
    for name in ("first", "second"):
        with pytest.raises(abi.IoFailedError, match=rf"/\.{name}\..*File too large"):
            saver.wait()
    saver.wait()


def test_a_thread_that_only_asks_takes_no_failure_away(saver, tmp_path):
    failed = fail_unheard(saver, tmp_path / "failed")
    assert saver.ended(failed)
    saver.drain()
    saver.drain()
    with pytest.raises(abi.IoFailedError, match=r"/\.failed\..*File too large"):
        saver.wait()
    saver.wait()


def test_draining_tells_what_concerns_all():
    types = dict(field[:2] for field in abi.offload_comm_t._fields_)
    comm = abi.offload_comm_t(
        world=2,
        sum=types["sum"](lambda *_: 1),  # the other rank is gone
        max=types["max"](lambda *_: 0),
        barrier=types["barrier"](lambda *_: 0),
    )
    _, address = memory = addressed([1.0])
    options = {"comm": ctypes.pointer(comm)}
    with abi.Context(threads=1) as context:
        with registered(context, address, address, 1, options) as optimizer:
            optimizer.commit()
            optimizer.step(grad_norm_max=1.0)
            for wait in (optimizer.drain, optimizer.wait, optimizer.drain):
                with pytest.raises(abi.CommFailedError, match="comm.sum"):
                    wait()
    assert memory[0].tolist() == [1.0]


def test_a_failure_that_was_heard_keeps_no_optimizer(tmp_path):
    _, address = memory = addressed([1.0])
    with abi.Context(threads=1) as context:
        optimizer = registered(context, address, address, 1)
        optimizer.commit()
        fail_unheard(optimizer, tmp_path / "failed")
        optimizer.drain()
        gc.collect()
        gc.disable()
        try:
            del optimizer
            assert context.info().optimizers == 0
        finally:
            gc.enable()
    assert len(memory[0]) == 1


def slow_context():
    """A simulated device whose every command takes up to 50 ms."""
    return abi.Context(
        device_kind=abi.OFFLOAD_DEVICE_SIM, sim_delay_ns_max=50_000_000, sim_memory_bytes=1 << 20
    )


def committed_on(context):
    data, grad = context.alloc(4096), context.alloc(4096)
    zeros = (ctypes.c_float * 1024)()
    for address in (data, grad):
        context.upload(address, ctypes.addressof(zeros), 4096)
    optimizer = registered(context, data, grad, 1024)
    optimizer.commit()
    return optimizer


def test_other_threads_run_during_a_wait():
    with slow_context() as context, committed_on(context) as optimizer:
        waiting = threading.Event()

        def wait():
            waiting.set()
            optimizer.wait()

        for _ in range(8):
            optimizer.step()
        thread = threading.Thread(target=wait)
        thread.start()
        waiting.wait()
        turns = 0
        while thread.is_alive():
            turns += 1
        thread.join()
        # If the wait held the interpreter's lock, this loop would run only before and after the wait.
        assert turns > 10


def test_waits_hear_signals():
    class Alarm(Exception):
        pass

    def ring(*_):
        raise Alarm

    before = signal.signal(signal.SIGALRM, ring)
    try:
        with slow_context() as context, committed_on(context) as optimizer:
            signal.setitimer(signal.ITIMER_REAL, 0.01)
            with pytest.raises(Alarm):
                while True:
                    optimizer.step()
                    optimizer.wait()
            optimizer.wait()
    finally:
        signal.signal(signal.SIGALRM, before)


def test_a_timeout_is_a_timeout_error():
    with slow_context() as context, committed_on(context) as optimizer:
        for _ in range(8):
            optimizer.step()
        with pytest.raises(TimeoutError):
            optimizer.wait(timeout_ns=0)
        optimizer.wait()


def test_moves_take_ids_and_streams():
    with slow_context() as context:
        stream = context.stream_create()
        data, grad = context.alloc(4096), context.alloc(4096)
        with abi.Optimizer(
            context, algorithm=abi.OFFLOAD_LION, movable=abi.OFFLOAD_MOVABLE_PARAMS
        ) as optimizer:
            group = optimizer.add_group(lr=0.1)
            optimizer.add_params(
                [
                    abi.offload_param_t(
                        group=group, dtype=1, grad_dtype=1, name=b"w", data=data, grad=grad, count=9
                    )
                ]
            )
            optimizer.commit()
            optimizer.offload_params(params=[])
            assert optimizer.stats().params_bytes[abi.OFFLOAD_TIER_HOST] == 0
            optimizer.wait(optimizer.offload_params(params=[0], streams=[stream]))
            assert optimizer.stats().params_bytes[abi.OFFLOAD_TIER_HOST] == 36
            with pytest.raises(abi.InvalidArgumentError, match="1 params have been added"):
                optimizer.offload_params(params=[1])
        context.stream_destroy(stream)


def test_a_forked_child_is_refused_and_disturbs_nothing():
    weights, weights_address = addressed([1.0])
    _, grad_address = grad = addressed([1.0])
    with abi.Context(threads=1) as context:
        with registered(context, weights_address, grad_address, 1) as optimizer:
            optimizer.commit()
            optimizer.step()
            optimizer.wait()
            child = os.fork()
            if child == 0:
                status = 1
                try:
                    optimizer.step()
                except abi.InvalidStateError as error:
                    status = 0 if "fork" in str(error) else 2
                optimizer.close()
                context.close()
                os._exit(status)
            assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
            optimizer.step()
            optimizer.wait()
            assert optimizer.stats().steps_applied == 2
    assert grad[0].tolist() == [1.0]


def test_log_lines_come_to_a_function_of_ours():
    lines = []
    log = abi.offload_log_function_t(lambda user, level, text: lines.append((level, text)))
    with abi.Context(threads=2, log=log) as context:
        assert context.info().threads == 2
    assert all(level in (1, 2, 3) for level, _ in lines)


def test_a_missing_library_says_what_to_do():
    environment = {**os.environ, "HYBRIDOPT_LIBRARY": "/nowhere/libhybridopt.so"}
    run = subprocess.run(
        [sys.executable, "-c", "import hybridopt.abi as abi; abi.Context()"],
        env=environment,
        capture_output=True,
        text=True,
    )
    assert run.returncode == 1
    assert "cannot load /nowhere/libhybridopt.so" in run.stderr
    assert "HYBRIDOPT_LIBRARY" in run.stderr.splitlines()[-1]
