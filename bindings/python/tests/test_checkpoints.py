"""save_checkpoint, load_checkpoint, and the functions of hybridopt.abi about a checkpoint's directory."""

import copy
import os
import pathlib
import resource
import sys
import threading
import time

import pytest
import torch
from torch.nn import Parameter

import hybridopt
from hybridopt import abi
from models import PAIRS, bits, clone, run, set_gradients, state_bits
from scripts import Scripts

every_optimizer = pytest.mark.parametrize("name", PAIRS)


def three_params():
    return [
        Parameter(torch.randn(7, 5)),
        Parameter(torch.randn(3).bfloat16()),
        Parameter(torch.randn(2, 3, 4).half()),
    ]


@every_optimizer
def test_resuming_changes_no_bit(name, tmp_path):
    ours, _, arguments = PAIRS[name]
    params = three_params()
    optimizer = ours(params, **arguments)
    run(optimizer, params, [1, 2])
    params[0].grad = None  # counts differ between params
    optimizer.step()
    optimizer.save_checkpoint(tmp_path / "saved")

    other_params = [Parameter(torch.zeros_like(param)) for param in params]
    other = ours(other_params, **arguments)
    other.load_checkpoint(tmp_path / "saved")
    assert bits(other_params) == bits(params)
    if name != "SGD plain":  # plain SGD has no state but its masters
        assert state_bits(other) == state_bits(optimizer)
    run(optimizer, params, [4, 5])
    run(other, other_params, [4, 5])
    assert bits(other_params) == bits(params)


@every_optimizer
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_params_without_elements_keep_their_state(name, dtype, tmp_path):
    ours, _, arguments = PAIRS[name]
    if name == "SGD plain":  # plain SGD has no state to keep
        arguments = {**arguments, "momentum": 0.5}
    params = [Parameter(torch.zeros(size, dtype=dtype)) for size in ((3,), (0, 2))]
    optimizer = ours(params, **arguments)
    run(optimizer, params, [1, 2])
    params[1].grad = None  # counts differ between params
    optimizer.step()
    saved = state_bits(optimizer)
    optimizer.save_checkpoint(tmp_path / "saved")
    other_params = clone(params)
    other = ours(other_params, **arguments)
    other.load_checkpoint(tmp_path / "saved")
    assert state_bits(other) == saved
    run(optimizer, params, [3, 4])
    optimizer.load_checkpoint(tmp_path / "saved")
    assert state_bits(optimizer) == saved
    other.load_checkpoint(tmp_path / "saved", fresh_moments=True)
    run(other, other_params, [3])
    if "step" in other.state[other_params[1]]:
        assert other.state[other_params[1]]["step"] == 1


def test_loading_over_steps_replaces_them(tmp_path):
    params = three_params()
    optimizer = hybridopt.AdamW(params)
    run(optimizer, params, [1, 2])
    saved = bits(params), state_bits(optimizer)
    views = [optimizer.state[param]["exp_avg"] for param in params]
    optimizer.save_checkpoint(tmp_path / "saved")
    run(optimizer, params, [3, 4, 5])
    versions = [param._version for param in params]
    optimizer.load_checkpoint(tmp_path / "saved")
    assert (bits(params), state_bits(optimizer)) == saved
    assert all(optimizer.state[p]["exp_avg"] is view for p, view in zip(params, views))
    assert all(param._version > version for param, version in zip(params, versions))


def test_saving_before_the_first_step_saves_the_weights(tmp_path):
    params = three_params()
    hybridopt.AdamW(params).save_checkpoint(tmp_path / "saved")
    other_params = [Parameter(torch.zeros_like(param)) for param in params]
    other = hybridopt.AdamW(other_params)
    other.load_checkpoint(tmp_path / "saved")
    assert bits(other_params) == bits(params) and len(other.state) == 0


def test_weights_and_state_from_outside_are_in_the_checkpoint(tmp_path):
    params = three_params()
    optimizer = hybridopt.AdamW(params)
    run(optimizer, params, [1])
    with torch.no_grad():
        for param in params:
            param.fill_(0.5)
    optimizer.state[params[0]]["step"].fill_(77)
    optimizer.save_checkpoint(tmp_path / "saved")
    other_params = [Parameter(torch.zeros_like(param)) for param in params]
    other = hybridopt.AdamW(other_params)
    other.load_checkpoint(tmp_path / "saved")
    assert bits(other_params) == bits(params)
    assert other.state[other_params[0]]["step"] == 77


def test_params_with_gaps_are_saved_and_loaded(tmp_path):
    params = [Parameter(torch.randn(4, 3, 2)[..., 0])]
    optimizer = hybridopt.AdamW([("weight", params[0])])
    run(optimizer, params, [1])
    optimizer.save_checkpoint(tmp_path / "saved")
    other_params = [Parameter(torch.zeros(4, 3))]
    other = hybridopt.AdamW([("weight", other_params[0])])
    other.load_checkpoint(tmp_path / "saved")
    assert bits(other_params) == bits(params)
    kept = bits(params)
    run(optimizer, params, [2])
    optimizer.load_checkpoint(tmp_path / "saved")
    assert bits(params) == kept


def test_params_in_another_order_of_dimensions_are_refused(tmp_path):
    param = Parameter(torch.randn(4, 3, 5, 5).to(memory_format=torch.channels_last))
    optimizer = hybridopt.AdamW([("weight", param)])
    with pytest.raises(abi.UnsupportedError, match="'weight' has strides .*contiguous"):
        optimizer.save_checkpoint(tmp_path / "saved")


def as_loaded(path, params):
    """The params and the state that a new optimizer loads from a checkpoint."""
    others = clone(params)
    other = hybridopt.AdamW(others)
    other.load_checkpoint(path)
    return bits(others), state_bits(other)


def test_training_goes_on_during_a_save(tmp_path):
    params = three_params()
    optimizer = hybridopt.AdamW(params)
    run(optimizer, params, [1])
    at_save = bits(params), state_bits(optimizer)
    transfer = optimizer.save_checkpoint(tmp_path / "saved", wait=False)
    run(optimizer, params, [2, 3])
    transfer.wait()
    assert transfer.done()
    assert as_loaded(tmp_path / "saved", params) == at_save


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_params_in_other_memory_are_saved_and_loaded_there(dtype, tmp_path):
    param = Parameter(torch.zeros(1000, dtype=dtype))
    optimizer = hybridopt.AdamW([("weight", param)])
    run(optimizer, [param], [1])
    before = param.data
    param.data = torch.full_like(param, 5.0)
    optimizer.save_checkpoint(tmp_path / "saved")
    loaded = Parameter(torch.zeros(1000, dtype=dtype))
    hybridopt.AdamW([("weight", loaded)]).load_checkpoint(tmp_path / "saved")
    assert (loaded == 5.0).all()

    before.fill_(77)
    moved, param.data = param.data, torch.zeros_like(param)
    moved.fill_(77)
    optimizer.load_checkpoint(tmp_path / "saved")
    assert (param == 5.0).all() and (before == 77).all() and (moved == 77).all()


def saved_names(path):
    return {tensor.name for tensor in abi.checkpoint_inspect(path)[1]}


def test_a_save_knows_params_and_groups_as_they_are_now(tmp_path):
    params = three_params()
    params[1].requires_grad_(False)
    optimizer = hybridopt.AdamW([("a", params[0]), ("b", params[1])])
    run(optimizer, params[:1], [1])
    params[1].requires_grad_(True)
    optimizer.save_checkpoint(tmp_path / "unfrozen")
    assert saved_names(tmp_path / "unfrozen") == {"a", "b"}
    optimizer.add_param_group({"params": [("c", params[2])]})
    optimizer.save_checkpoint(tmp_path / "added")
    assert saved_names(tmp_path / "added") == {"a", "b", "c"}
    other = Parameter(torch.full_like(params[0], 9.0))
    optimizer.param_groups[0]["params"][0] = other
    optimizer.save_checkpoint(tmp_path / "replaced")
    run(optimizer, [other], [2])
    optimizer.load_checkpoint(tmp_path / "replaced")
    assert (other == 9.0).all()


def test_a_load_knows_params_added_since_the_last_step(tmp_path):
    params = three_params()
    optimizer = hybridopt.AdamW([("a", params[0]), ("b", params[1])])
    run(optimizer, params, [1])
    optimizer.save_checkpoint(tmp_path / "saved")
    other_params = [Parameter(torch.zeros_like(param)) for param in params]
    other = hybridopt.AdamW([("a", other_params[0])])
    run(other, other_params[:1], [1])
    other.add_param_group({"params": [("b", other_params[1])]})
    other.load_checkpoint(tmp_path / "saved")
    assert bits(other_params[:2]) == bits(params[:2])
    assert other.state[other_params[1]]["step"] == 1


@pytest.mark.parametrize("touch", ["clear", "load_state_dict", "replace", "delete one"])
def test_a_load_replaces_state_that_was_touched_before(touch, tmp_path):
    params = three_params()
    optimizer = hybridopt.AdamW(params)
    run(optimizer, params, [1])
    other = copy.deepcopy(optimizer.state_dict())
    run(optimizer, params, [2])
    saved = bits(params), state_bits(optimizer)
    optimizer.save_checkpoint(tmp_path / "saved")
    run(optimizer, params, [3])
    expected = bits(params), state_bits(optimizer)
    if touch == "clear":
        optimizer.state.clear()
    elif touch == "load_state_dict":
        optimizer.load_state_dict(other)
    elif touch == "replace":
        optimizer.state[params[0]]["exp_avg"] = torch.ones(7, 5)
    else:
        del optimizer.state[params[1]]
    optimizer.load_checkpoint(tmp_path / "saved")
    assert (bits(params), state_bits(optimizer)) == saved
    run(optimizer, params, [3])
    assert (bits(params), state_bits(optimizer)) == expected


def test_masters_loaded_with_fresh_moments_keep_their_low_bits(tmp_path):
    params = three_params()
    optimizer = hybridopt.AdamW(params, lr=1e-4)
    run(optimizer, params, [1])
    masters = bits(optimizer.state[param]["master_param"] for param in params[1:])
    optimizer.save_checkpoint(tmp_path / "saved")
    others = [Parameter(torch.zeros_like(param)) for param in params]
    other = hybridopt.AdamW(others, lr=0.0, weight_decay=0.0)
    other.load_checkpoint(tmp_path / "saved", fresh_moments=True)
    other.add_param_group({"params": [Parameter(torch.ones(2))]})  # this makes another engine
    run(other, others, [1])
    assert bits(other.state[param]["master_param"] for param in others[1:]) == masters
    assert all(other.state[param]["step"] == 1 for param in others)


@pytest.fixture(scope="module")
def scripts():
    made = Scripts()
    yield made
    made.close()


SAVE_AND_LET_GO = """
import gc, hybridopt, sys, torch
param = torch.nn.Parameter(torch.ones(1 << 22))
optimizer = hybridopt.AdamW([("weight", param)], lr=1e-3)
param.grad = torch.ones_like(param)
optimizer.step()
state = optimizer.state_dict()
saved = float(param.detach()[0])
transfer = optimizer.save_checkpoint(sys.argv[1], wait=False)
{then}
loaded = torch.nn.Parameter(torch.zeros(1 << 22))
hybridopt.AdamW([("weight", loaded)]).load_checkpoint(sys.argv[1])
assert (loaded == saved).all()
print("as saved")
"""


@pytest.mark.parametrize(
    "then",
    [
        "del param, optimizer, transfer; gc.collect(); del state",
        "optimizer.close(); del param, optimizer; gc.collect(); transfer.wait()",
        "param.data = torch.zeros(1 << 22); optimizer.step(); transfer.wait()",
        "param.data = torch.zeros(1); gc.collect(); transfer.wait()",
    ],
)
def test_memory_of_params_outlives_a_save_of_it(then, tmp_path, scripts):
    ended = scripts.run(SAVE_AND_LET_GO.format(then=then), tmp_path / "saved")
    assert (ended.returncode, ended.stdout) == (0, "as saved\n"), ended.stderr


def slowly(done, total):
    """A progress function that keeps a save running for a while."""
    time.sleep(0.2)


@pytest.mark.parametrize("edit", ["step", "moment", "clear"])
def test_state_that_is_edited_during_a_save_is_taken_behind_it(edit, tmp_path):
    params = three_params()
    optimizer = hybridopt.AdamW(params)
    run(optimizer, params, [1, 2])
    at_save = bits(params), state_bits(optimizer)
    transfer = optimizer.save_checkpoint(tmp_path / "saved", wait=False, progress=slowly)
    if edit == "step":
        optimizer.state[params[0]]["step"].fill_(76)
    elif edit == "moment":
        optimizer.state[params[0]]["exp_avg"] = torch.zeros(7, 5)
    else:
        optimizer.state.clear()
    run(optimizer, params, [3])
    assert optimizer.state[params[0]]["step"] == {"step": 77, "moment": 3, "clear": 1}[edit]
    transfer.wait()
    assert as_loaded(tmp_path / "saved", params) == at_save


def test_steps_do_not_wait_for_the_end_of_a_save(tmp_path):
    """The progress function delays the save at its end."""
    params = three_params()
    optimizer = hybridopt.AdamW(params)
    run(optimizer, params, [1])
    at_save = bits(params), state_bits(optimizer)
    go_on = threading.Event()

    def held(done, total):
        if done == total:
            go_on.wait()

    transfer = optimizer.save_checkpoint(tmp_path / "saved", wait=False, progress=held)
    try:
        for seed in range(2, 12):
            run(optimizer, params, [seed])
            assert optimizer.state[params[0]]["step"] == seed
            assert optimizer.last_step().step == seed
        assert not transfer.done()
    finally:
        go_on.set()
    transfer.wait()
    assert as_loaded(tmp_path / "saved", params) == at_save


def test_params_added_during_a_save_wait_for_its_end(tmp_path):
    """State moves to new memory, but params stay where they were, and the save reads them."""
    params = [Parameter(torch.zeros(1 << 22)), Parameter(torch.zeros(3))]
    optimizer = hybridopt.SGD(params[:1], lr=1.0)
    optimizer.plan()
    transfer = optimizer.save_checkpoint(tmp_path / "saved", wait=False, progress=slowly)
    optimizer.add_param_group({"params": params[1:]})
    run(optimizer, params, [1])
    assert transfer.done()
    loaded = Parameter(torch.ones(1 << 22))
    hybridopt.SGD([loaded], lr=1.0).load_checkpoint(tmp_path / "saved")
    assert not loaded.any()


def test_weights_written_behind_a_failed_save_tell_nothing_of_it(tmp_path):
    param = Parameter(torch.randn(50).bfloat16())
    optimizer = hybridopt.AdamW([param])
    run(optimizer, [param], [1])
    unlimited = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (64, unlimited[1]))
    try:
        transfer = optimizer.save_checkpoint(tmp_path / "saved", wait=False)
        with torch.no_grad():
            param.fill_(1.0)
        run(optimizer, [param], [2])
        assert optimizer.state[param]["step"] == 2
        with pytest.raises(abi.IoFailedError, match="saved.*File too large"):
            transfer.wait()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, unlimited)


SAVE_AND_END = """
import hybridopt, os, resource, sys, torch
param = torch.nn.Parameter(torch.zeros(1 << 22))
optimizer = hybridopt.AdamW([("weight", param)])
progress = {"none": None, "function": lambda done, total: None, "bar": True}[sys.argv[2]]
if sys.argv[3] == "fails":
    resource.setrlimit(resource.RLIMIT_FSIZE, (64, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))
transfer = optimizer.save_checkpoint(sys.argv[1], wait=False, progress=progress)
if sys.argv[4:] == ["asks"]:
    while not transfer.done():
        pass
    optimizer._engine.wait()  # as work on weights does
if sys.argv[4:] == ["waits"]:
    try:
        transfer.wait()
    except OSError:
        print("told")
"""


@pytest.mark.parametrize("progress", ["none", "function", "bar"])
def test_a_save_at_the_end_of_a_script_ends_first(progress, tmp_path, scripts):
    ended = scripts.run(SAVE_AND_END, tmp_path / "saved", progress, "works")
    assert ended.returncode == 0, ended.stderr
    abi.checkpoint_verify(tmp_path / "saved")


@pytest.mark.parametrize("then", [[], ["asks"]])
def test_a_save_at_the_end_of_a_script_tells_why_it_failed(then, tmp_path, scripts):
    ended = scripts.run(SAVE_AND_END, tmp_path / "saved", "none", "fails", *then)
    assert "a save that was not waited for: " in ended.stderr and "File too large" in ended.stderr
    assert not list(tmp_path.iterdir())


def test_a_failed_save_that_was_waited_for_is_told_once(tmp_path, scripts):
    ended = scripts.run(SAVE_AND_END, tmp_path / "saved", "none", "fails", "waits")
    assert ended.stdout == "told\n" and "not waited for" not in ended.stderr


def test_a_step_behind_a_failed_save_tells_nothing_of_it(tmp_path):
    params = three_params()
    optimizer = hybridopt.AdamW(params)
    run(optimizer, params, [1])
    unlimited = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (64, unlimited[1]))  # Python ignores SIGXFSZ
    try:
        transfer = optimizer.save_checkpoint(tmp_path / "saved", wait=False)
        run(optimizer, params, [2])  # this need not wait for the save, so the limit stays until the save has ended
        assert optimizer.last_step().step == 2
        with pytest.raises(abi.IoFailedError, match="saved.*File too large"):
            transfer.wait()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, unlimited)
    run(optimizer, params, [3])
    assert optimizer.state[params[0]]["step"] == 3 and not list(tmp_path.iterdir())


def test_steps_count_on_where_a_loaded_state_moves_to_new_memory(tmp_path):
    params = three_params()
    optimizer = hybridopt.AdamW(params)
    run(optimizer, params, [1, 2, 3])
    optimizer.save_checkpoint(tmp_path / "saved")
    others = three_params()
    other = hybridopt.AdamW(others)
    run(other, others, [1])
    other.load_checkpoint(tmp_path / "saved")
    more = torch.nn.Parameter(torch.ones(3))
    other.add_param_group({"params": [more]})
    run(other, [*others, more], [4])
    assert other.last_step().step == 4 and other.state[others[0]]["step"] == 4


def test_masters_only_and_fresh_moments(tmp_path):
    params = three_params()
    optimizer = hybridopt.AdamW(params)
    run(optimizer, params, [1, 2])
    optimizer.save_checkpoint(tmp_path / "weights", masters_only=True)
    with pytest.raises(abi.CheckpointMismatchError, match="has no exp_avg"):
        optimizer.load_checkpoint(tmp_path / "weights")
    before = bits(params)
    optimizer.load_checkpoint(tmp_path / "weights", fresh_moments=True)
    assert bits(params) == before
    entry = optimizer.state[params[0]]
    assert entry["step"] == 0 and not entry["exp_avg"].any()
    optimizer.load_checkpoint(tmp_path / "weights", fresh_moments=True, keep_steps=True)
    assert optimizer.state[params[0]]["step"] == 2


def test_progress(tmp_path, capfd):
    params = three_params()
    optimizer = hybridopt.AdamW(params)
    run(optimizer, params, [1])
    calls = []
    optimizer.save_checkpoint(tmp_path / "saved", progress=lambda *call: calls.append(call))
    assert calls and calls[-1][0] == calls[-1][1] > 0
    assert [done for done, _ in calls] == sorted(done for done, _ in calls)
    optimizer.load_checkpoint(tmp_path / "saved")
    assert capfd.readouterr().err == ""  # no bar, because this is not a terminal
    optimizer.load_checkpoint(tmp_path / "saved", progress=True)
    error = capfd.readouterr().err
    assert f"load {tmp_path / 'saved'}: 100%" in error


def test_a_progress_function_that_raises_is_named_once_and_the_save_goes_on(tmp_path, caplog, capfd):
    params = three_params()
    optimizer = hybridopt.AdamW(params)
    run(optimizer, params, [1])
    at_save = bits(params), state_bits(optimizer)
    calls = []

    def failing(done, total):
        calls.append(done)
        raise ValueError("no such bar")

    for call in (optimizer.save_checkpoint, optimizer.load_checkpoint):
        calls.clear(), caplog.clear()
        call(tmp_path / "saved", progress=failing)
        assert len(calls) == 1
        (record,) = caplog.records
        assert record.message == (
            "the progress function has raised, and is not called again; the save or load goes on"
        )
        assert str(record.exc_info[1]) == "no such bar"
    assert as_loaded(tmp_path / "saved", params) == at_save
    assert "Exception ignored" not in capfd.readouterr().err


@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError])
def test_what_a_progress_function_raises_ends_a_verification_when_all_is_read(tmp_path, error):
    param = Parameter(torch.ones(3))
    optimizer = hybridopt.AdamW([param])
    run(optimizer, [param], [1])
    optimizer.save_checkpoint(tmp_path / "saved")
    calls = []

    def failing(done, total):
        calls.append(done)
        raise error

    with pytest.raises(error):
        abi.checkpoint_verify(tmp_path / "saved", progress=failing)
    assert len(calls) == 1
    with pytest.raises(error):
        abi.checkpoint_newest(tmp_path, verify=True, progress=failing)
    assert len(calls) == 2
    data = next((tmp_path / "saved").glob("*.safetensors"))
    data.write_bytes(data.read_bytes()[:-1] + b"?")
    with pytest.raises(abi.CheckpointCorruptError):
        abi.checkpoint_verify(tmp_path / "saved", progress=failing)


def test_an_existing_path_is_refused_and_stays(tmp_path):
    param = Parameter(torch.ones(3))
    optimizer = hybridopt.AdamW([param])
    (tmp_path / "saved").mkdir()
    (tmp_path / "saved" / "mine").write_text("kept")
    with pytest.raises(abi.InvalidArgumentError, match="saved"):
        optimizer.save_checkpoint(tmp_path / "saved")
    assert (tmp_path / "saved" / "mine").read_text() == "kept"


def test_a_missing_checkpoint_and_one_of_another_model(tmp_path):
    params = three_params()
    optimizer = hybridopt.AdamW(params)
    run(optimizer, params, [1])
    before = bits(params), state_bits(optimizer)
    hybridopt.AdamW([("weight", Parameter(torch.ones(3)))]).save_checkpoint(tmp_path / "other")
    torch.save(optimizer.state_dict(), tmp_path / "state.pt")
    for path in (tmp_path / "nowhere", tmp_path, tmp_path / "state.pt"):
        told = rf"{path}/manifest.json', as it is not there; .* \(hybridopt.abi.checkpoint_newest\(\) finds"
        with pytest.raises(abi.IoFailedError, match=told):
            optimizer.load_checkpoint(path)
    told = r"other names \(model.named_parameters\(\) gives .*, such as 'weight': param 'param_groups.0.0' is missing"
    with pytest.raises(abi.CheckpointMismatchError, match=told):
        optimizer.load_checkpoint(tmp_path / "other")
    assert (bits(params), state_bits(optimizer)) == before
    run(optimizer, params, [2])


def test_a_flipped_bit_is_found_and_changes_nothing(tmp_path):
    params = three_params()
    optimizer = hybridopt.AdamW(params)
    run(optimizer, params, [1])
    optimizer.save_checkpoint(tmp_path / "saved")
    _, tensors = abi.checkpoint_inspect(tmp_path / "saved")
    victim = next(t for t in tensors if t.kind == abi.OFFLOAD_STATE_EXP_AVG)
    with open(tmp_path / "saved" / victim.file, "r+b") as file:
        file.seek(victim.file_offset)
        byte = file.read(1)[0]
        file.seek(victim.file_offset)
        file.write(bytes([byte ^ 1]))
    before = bits(params), state_bits(optimizer)
    with pytest.raises(abi.CheckpointCorruptError, match=victim.file):
        abi.checkpoint_verify(tmp_path / "saved")
    with pytest.raises(abi.CheckpointCorruptError, match=victim.file):
        optimizer.load_checkpoint(tmp_path / "saved")
    assert (bits(params), state_bits(optimizer)) == before


def test_what_a_checkpoint_holds(tmp_path):
    params = [Parameter(torch.randn(7, 5)), Parameter(torch.randn(3).bfloat16())]
    optimizer = hybridopt.AdamW([("embedding", params[0]), ("bias", params[1])])
    run(optimizer, params, [1, 2])
    for step in (1, 2):
        optimizer.save_checkpoint(tmp_path / f"step-{step}")
        run(optimizer, params, [step])
    info, tensors = abi.checkpoint_inspect(tmp_path / "step-1")
    assert (info.step, info.world, info.param_count) == (2, 1, 2)
    by_name = {(t.name, t.kind): t for t in tensors}
    assert set(by_name) == {(name, kind) for name in ("embedding", "bias") for kind in (0, 1, 2)}
    moment = by_name["embedding", abi.OFFLOAD_STATE_EXP_AVG]
    assert moment.global_shape == (7, 5) and moment.box_extents == ((7, 5),)
    assert (moment.bytes, moment.step_count) == (7 * 5 * 4, 2)
    calls = []
    abi.checkpoint_verify(tmp_path / "step-1", progress=lambda *call: calls.append(call))
    assert calls[-1][0] == calls[-1][1]
    assert abi.checkpoint_newest(tmp_path) == os.fspath(tmp_path / "step-2")
    shard = next((tmp_path / "step-2").glob("*.safetensors"))
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    shard.write_bytes(data)
    assert abi.checkpoint_newest(tmp_path) == os.fspath(tmp_path / "step-2")
    assert abi.checkpoint_newest(tmp_path, verify=True) == os.fspath(tmp_path / "step-1")


def test_other_tools_read_it(tmp_path):
    from safetensors.torch import load_file

    param = Parameter(torch.randn(7, 5))
    optimizer = hybridopt.AdamW([("weight", param)])
    run(optimizer, [param], [1])
    optimizer.save_checkpoint(tmp_path / "saved")
    arrays = {}
    for file in pathlib.Path(tmp_path / "saved").glob("*.safetensors"):
        arrays.update(load_file(file))
    moment = optimizer.state[param]["exp_avg"].flatten()
    assert any(torch.equal(array.flatten(), moment) for array in arrays.values())


def test_gradients_are_left_alone(tmp_path):
    param = Parameter(torch.ones(3))
    optimizer = hybridopt.AdamW([param])
    set_gradients([param], 1)
    grad = param.grad.clone()
    optimizer.save_checkpoint(tmp_path / "saved")
    optimizer.load_checkpoint(tmp_path / "saved")
    assert torch.equal(param.grad, grad)
