"""hybridopt's optimizers as torch optimizers: steps, state, state_dict and params that change."""

import copy
import dataclasses
import gc
import io
import pickle
import re
import weakref
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import Parameter

import hybridopt
from hybridopt import abi
from hybridopt.optimizers import adopting
from hybridopt.settings.options import MASTER_LAYOUTS
from hybridopt.state import master_bits
from hybridopt.sync import samples
from models import PAIRS, WITH_TORCH, bits, clone, perceptron, run, set_gradients, state_bits, watch_params

every_optimizer = pytest.mark.parametrize("name", PAIRS)
every_torch_pair = pytest.mark.parametrize("name", WITH_TORCH)
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


# ----------------------------------------------------------------------------------------- state --


@every_torch_pair
def test_state_has_torchs_keys_and_shapes_when_torch_has_them(name):
    ours_class, torchs_class, arguments = PAIRS[name]
    model = perceptron()
    ours, torchs = ours_class(model.parameters(), **arguments), None
    reference = copy.deepcopy(model)
    torchs = torchs_class(reference.parameters(), **arguments)
    set_gradients(list(model.parameters())[:2], 1)
    set_gradients(list(reference.parameters())[:2], 1)
    ours.step()
    torchs.step()
    ours_state, torchs_state = ours.state_dict(), torchs.state_dict()
    assert list(ours_state["state"]) == list(torchs_state["state"])
    for index, entry in torchs_state["state"].items():
        assert list(ours_state["state"][index]) == list(entry)
        for key, value in entry.items():
            ours_value = ours_state["state"][index][key]
            assert ours_value.shape == value.shape and ours_value.dtype == value.dtype, key
    assert ours_state["param_groups"] == torchs_state["param_groups"]


@pytest.mark.parametrize("dtype", DTYPES)
def test_adagrad_has_state_before_its_first_step(dtype):
    arguments = {"lr": 0.1, "initial_accumulator_value": 0.25}
    model = perceptron(dtype)
    next(model.parameters()).requires_grad_(False)
    others, params = clone(model.parameters()), list(model.parameters())
    ours, torchs = hybridopt.Adagrad(params, **arguments), torch.optim.Adagrad(others, **arguments)
    unseen = hybridopt.Adagrad(clone(params), **arguments)
    for state in (ours.state, copy.deepcopy(ours).state, pickle.loads(pickle.dumps(ours)).state):
        for entry, torchs_entry in zip(state.values(), torchs.state.values(), strict=True):
            assert list(entry) == list(torchs_entry)
            assert entry["sum"].dtype == torch.float32 and entry["step"] == 0
            assert torch.equal(entry["sum"], torchs_entry["sum"].float())
    ours.share_memory()
    ours.load_state_dict(torchs.state_dict())
    assert list(ours.state) == params
    run(ours, params, [1, 2])
    run(unseen, unseen.param_groups[0]["params"], [1, 2])
    assert bits(params) == bits(unseen.param_groups[0]["params"])
    assert [entry["step"] for entry in ours.state.values()] == [2, 2, 2, 2]


def test_what_is_deleted_of_adagrads_state_stays_away():
    params = [Parameter(torch.ones(3)), Parameter(torch.ones(2))]
    optimizer = hybridopt.Adagrad(params)
    del optimizer.state[params[0]]
    assert list(optimizer.state) == [params[1]]
    optimizer.add_param_group({"params": [Parameter(torch.ones(4))], "initial_accumulator_value": 2.0})
    assert [float(entry["sum"][0]) for entry in optimizer.state.values()] == [0.0, 2.0]
    optimizer.state.clear()
    assert len(optimizer.state) == 0
    run(optimizer, params, [1])
    assert [entry["step"] for entry in optimizer.state.values()] == [1, 1]


def test_a_first_momentum_leaves_masters_their_low_bits():
    for layout in ("fp32", "split"):
        param = Parameter(torch.randn(50).bfloat16())
        optimizer = hybridopt.SGD([param], lr=1e-3, master_layout=layout)
        run(optimizer, [param], [1, 2])
        before = optimizer.master_of(param).clone()
        assert not torch.equal(before, before.bfloat16().float())
        optimizer.param_groups[0].update(momentum=0.9, lr=0.0)
        run(optimizer, [param], [3])
        assert bits([optimizer.master_of(param)]) == bits([before])


def test_state_is_a_view_of_what_the_step_works_on():
    param = nn.Parameter(torch.ones(4, 3))
    optimizer = hybridopt.AdamW([param], lr=0.1)
    run(optimizer, [param], [1])
    moment = optimizer.state[param]["exp_avg"]
    before = moment.clone()
    run(optimizer, [param], [2])
    assert optimizer.state[param]["exp_avg"] is moment
    assert not torch.equal(moment, before)
    assert optimizer.state[param]["step"] == 2
    moment.zero_()  # written from outside: the next step must use it
    set_gradients([param], 3)
    optimizer.step()
    assert torch.allclose(moment, 0.1 * param.grad)


def test_views_outlive_the_optimizer():
    param = nn.Parameter(torch.ones(1000))
    optimizer = hybridopt.AdamW([param])
    run(optimizer, [param], [1])
    moment = optimizer.state[param]["exp_avg"]
    expected = moment.clone()
    ended = weakref.ref(optimizer)
    del optimizer
    gc.collect()
    assert ended() is None
    assert torch.equal(moment, expected)


def test_memory_is_given_back_without_views():
    param = nn.Parameter(torch.ones(1000))
    optimizer = hybridopt.AdamW([param])
    run(optimizer, [param], [1])
    context = optimizer._engine.context
    assert context.info().optimizers == 1
    optimizer.close()
    gc.collect()
    assert context.info().optimizers == 0


def test_params_without_gradients_are_untouched_and_have_no_state():
    params = [nn.Parameter(torch.ones(3)) for _ in range(3)]
    optimizer = hybridopt.AdamW(params, lr=0.1)
    optimizer.step()
    assert len(optimizer.state) == 0
    params[1].grad = torch.ones(3)
    optimizer.step()
    assert list(optimizer.state) == [params[1]]
    assert torch.equal(params[0], torch.ones(3))
    params[1].grad = None
    params[2].grad = torch.ones(3)
    before = params[1].clone()
    optimizer.step()
    assert torch.equal(params[1], before)  # with a gradient of None the last gradient is not used again
    assert optimizer.state[params[1]]["step"] == 1 and optimizer.state[params[2]]["step"] == 1


def test_frozen_params_take_no_memory_until_they_are_trained():
    frozen = nn.Parameter(torch.ones(100_000), requires_grad=False)
    trained = nn.Parameter(torch.ones(10))
    optimizer = hybridopt.AdamW([frozen, trained])
    run(optimizer, [trained], [1, 2])
    assert optimizer.plan().element_count == 10
    moment = optimizer.state[trained]["exp_avg"].clone()
    frozen.requires_grad_()
    frozen.grad = torch.ones_like(frozen)
    trained.grad = None
    optimizer.step()
    assert optimizer.plan().element_count == 100_010
    assert torch.equal(optimizer.state[trained]["exp_avg"], moment)
    assert optimizer.state[trained]["step"] == 2 and optimizer.state[frozen]["step"] == 1


@every_optimizer
def test_state_that_is_deleted_starts_afresh(name):
    ours, _, arguments = PAIRS[name]
    start = [torch.randn(7, 5), torch.randn(3)]
    for reset in (
        lambda optimizer: optimizer.state.clear(),
        lambda optimizer: setattr(optimizer, "state", {}),
    ):
        params = [nn.Parameter(tensor.clone()) for tensor in start]
        optimizer = ours(params, **arguments)
        run(optimizer, params, [1, 2])
        reset(optimizer)
        fresh_params = clone(params)
        fresh = ours(fresh_params, **arguments)
        run(optimizer, params, [3, 4])
        run(fresh, fresh_params, [3, 4])
        assert bits(params) == bits(fresh_params)
        assert state_bits(optimizer) == state_bits(fresh)


def test_step_counts_written_in_place_are_used():
    params = [nn.Parameter(torch.ones(3))]
    optimizer = hybridopt.AdamW(params, lr=0.1)
    run(optimizer, params, [1])
    optimizer.state[params[0]]["step"].fill_(100)
    other_params = clone(params)
    other = torch.optim.AdamW(other_params, lr=0.1)
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    run(optimizer, params, [2])
    run(other, other_params, [2])
    assert optimizer.state[params[0]]["step"] == 101
    assert torch.allclose(params[0], other_params[0], rtol=1e-6)


# ------------------------------------------------------------------------------------ state_dict --


@every_torch_pair
def test_state_dict_goes_to_torch_and_back_bit_for_bit(name):
    ours_class, torchs_class, arguments = PAIRS[name]
    params = [nn.Parameter(torch.randn(7, 5)), nn.Parameter(torch.randn(3))]
    ours = ours_class(params, **arguments)
    run(ours, params, [1, 2, 3])
    torchs_params = clone(params)
    torchs = torchs_class(torchs_params, **arguments)
    torchs.load_state_dict(ours.state_dict())
    assert state_bits(torchs) == state_bits(ours)

    back_params = clone(params)
    back = ours_class(back_params, **arguments)
    back.load_state_dict(copy.deepcopy(torchs.state_dict()))
    assert state_bits(back) == state_bits(ours)
    run(ours, params, [4, 5])
    run(back, back_params, [4, 5])
    assert bits(back_params) == bits(params)
    assert state_bits(back) == state_bits(ours)

    torchs.load_state_dict(copy.deepcopy(ours.state_dict()))  # after steps of ours
    assert state_bits(torchs) == state_bits(ours)


@every_torch_pair
def test_training_begun_with_torch_goes_on_here(name):
    ours_class, torchs_class, arguments = PAIRS[name]
    params = [nn.Parameter(torch.randn(7, 5)), nn.Parameter(torch.randn(3))]
    torchs = torchs_class(params, **arguments)
    run(torchs, params, [1, 2, 3])
    ours_params = clone(params)
    ours = ours_class(ours_params, **arguments)
    ours.load_state_dict(copy.deepcopy(torchs.state_dict()))
    before = clone(params)
    run(torchs, params, range(4, 14))
    run(ours, ours_params, range(4, 14))
    for ours_param, param, start in zip(ours_params, params, before):
        update = (param - start).norm()
        assert (ours_param - param).norm() < 1e-5 * update


@every_optimizer
@pytest.mark.parametrize("dtype", DTYPES)
def test_resuming_through_a_file_changes_no_bit(name, dtype):
    ours, _, arguments = PAIRS[name]
    params = [nn.Parameter(torch.randn(7, 5).to(dtype)), nn.Parameter(torch.randn(3).to(dtype))]
    optimizer = ours(params, **arguments)
    run(optimizer, params, [1, 2, 3])
    file = io.BytesIO()
    torch.save({"params": [param.data for param in params], "opt": optimizer.state_dict()}, file)
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    # Params may be loaded before the optimizer's state or after it: the masters keep their low bits.
    for params_first in (True, False):
        resumed_params = [nn.Parameter(torch.zeros_like(param)) for param in params]
        resumed = ours(resumed_params, **arguments)
        if not params_first:
            resumed.load_state_dict(saved["opt"])
        for param, value in zip(resumed_params, saved["params"]):
            param.data.copy_(value)
        if params_first:
            resumed.load_state_dict(saved["opt"])
        again, again_params = copy.deepcopy((optimizer, params))
        run(again, again_params, [4, 5])
        run(resumed, resumed_params, [4, 5])
        assert bits(resumed_params) == bits(again_params)
        assert state_bits(resumed) == state_bits(again)


def test_state_stays_fp32_for_low_precision_params():
    params = [nn.Parameter(torch.randn(5).bfloat16())]
    optimizer = hybridopt.AdamW(params)
    run(optimizer, params, [1])
    entry = optimizer.state[params[0]]
    assert list(entry) == ["step", "exp_avg", "exp_avg_sq", "master_param"]
    assert all(value.dtype == torch.float32 for value in entry.values())
    loaded_params = clone(params)
    loaded = hybridopt.AdamW(loaded_params)
    loaded.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert state_bits(loaded) == state_bits(optimizer)
    run(loaded, loaded_params, [2])
    assert all(value.dtype == torch.float32 for value in loaded.state[loaded_params[0]].values())


def test_state_of_another_shape_is_refused():
    small, large = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(3))
    saved = hybridopt.AdamW([small])
    run(saved, [small], [1])
    optimizer = hybridopt.AdamW([("weight", large)])
    optimizer.load_state_dict(saved.state_dict())
    large.grad = torch.ones(3)
    with pytest.raises(ValueError, match=r"'weight' has 'exp_avg' of shape \(2,\), expected \(3,\)"):
        optimizer.step()


def test_state_that_lacks_a_moment_is_refused():
    param = nn.Parameter(torch.ones(2))
    optimizer = hybridopt.AdamW([("weight", param)])
    run(optimizer, [param], [1])
    del optimizer.state[param]["exp_avg_sq"]
    with pytest.raises(ValueError, match="'weight' lacks 'exp_avg_sq'.*to start its state afresh"):
        run(optimizer, [param], [2])


def items_one_by_one(optimizer):
    """Trainers for reinforcement learning bring state to the device for the next step like this; clones stand for
    copies to a device here."""
    for group in optimizer.param_groups:
        for param in group["params"]:
            for key, value in optimizer.state[param].items():
                optimizer.state[param][key] = value.clone()
                yield weakref.ref(optimizer.state[param][key])


def whole_entries(optimizer):
    for param, entry in list(optimizer.state.items()):
        entry.update({key: value.clone() for key, value in entry.items()})
        entry |= {key: value.clone() for key, value in entry.items()}
        optimizer.state[param] = {key: value.clone() for key, value in entry.items()}
        yield from map(weakref.ref, optimizer.state[param].values())


@every_optimizer
@pytest.mark.parametrize("moved", [items_one_by_one, whole_entries])
@pytest.mark.parametrize("layout", ["fp32", "split"])
def test_state_that_helpers_bring_to_the_device_stays_in_the_librarys_memory(
    name, moved, layout, monkeypatch
):
    ours, _, arguments = PAIRS[name]
    params = [Parameter(torch.randn(50)), Parameter(torch.randn(7, 5).bfloat16())]
    others = clone(params)
    optimizer = ours(params, threads=1, master_layout=layout, **arguments)
    undisturbed = ours(others, threads=1, master_layout=layout, **arguments)
    run(optimizer, params, [1, 2])
    run(undisturbed, others, [1, 2])
    places = {id(t): t.data_ptr() for entry in optimizer.state.values() for t in entry.values()}
    shown = list(moved(optimizer))
    assert {id(ref()): ref().data_ptr() for ref in shown} == places
    monkeypatch.setattr(adopting, "adopt_entry", None)  # the next step must have nothing to adopt
    run(optimizer, params, [3])
    run(undisturbed, others, [3])
    assert bits(params) == bits(others) and state_bits(optimizer) == state_bits(undisturbed)


def test_state_that_is_assigned_is_taken_over_at_once():
    param = Parameter(torch.randn(50).bfloat16())
    optimizer = hybridopt.AdamW([param], lr=1e-2, threads=1)
    run(optimizer, [param], [1])
    entry = optimizer.state[param]
    given = torch.full((50,), 0.25, dtype=torch.float64)
    freed = weakref.ref(given)
    entry["exp_avg"], entry["step"] = given, torch.tensor(7)
    del given
    assert freed() is None
    assert (entry["exp_avg"] == 0.25).all() and entry["exp_avg"].dtype == torch.float32
    slot = optimizer._engine.slots[0]
    assert (optimizer._engine.state_memory.read(slot, abi.OFFLOAD_STATE_EXP_AVG) == 0.25).all()
    run(optimizer, [param], [2])
    assert optimizer.state[param]["step"] == 8
    master = entry["master_param"].clone()
    entry["master_param"] = master + 1.0  # the param is no longer this master, rounded
    optimizer.param_groups[0].update(lr=0.0, weight_decay=0.0)
    before = bits([param])
    run(optimizer, [param], [3])
    assert bits([param]) == before


def test_entries_are_copied_and_saved_as_dicts():
    param = Parameter(torch.randn(5).bfloat16())
    optimizer = hybridopt.AdamW([param], threads=1)
    run(optimizer, [param], [1])
    entry = optimizer.state[param]
    for copied in (
        copy.copy(entry),
        copy.deepcopy(entry),
        pickle.loads(pickle.dumps(entry)),
        optimizer.state_dict()["state"][0],
    ):
        assert type(copied) is dict and list(copied) == list(entry)
        copied["exp_avg"] = torch.ones(5)
    assert not torch.equal(entry["exp_avg"], torch.ones(5))


def replace_state(optimizer, params):
    for entry in list(optimizer.state.values()):
        for key, value in list(entry.items()):
            dict.__setitem__(entry, key, value.clone())
    return optimizer, params


def load_own_state(optimizer, params):
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    return optimizer, params


def add_a_group(optimizer, params):
    optimizer.add_param_group({"params": [Parameter(torch.ones(3))]})
    return optimizer, params


def copy_both(optimizer, params):
    return copy.deepcopy((optimizer, params))


def pickle_both(optimizer, params):
    return pickle.loads(pickle.dumps((optimizer, params)))


@pytest.mark.parametrize("name", ["SGD", "SGD plain", "Lion", "Signum"])
@pytest.mark.parametrize("options", [{"state_dtype": torch.bfloat16}, {"master_layout": "split24"}])
@pytest.mark.parametrize(
    "moved", [replace_state, load_own_state, add_a_group, copy_both, pickle_both]
)
def test_state_that_others_have_moved_is_not_rounded_with_the_same_bits_again(name, options, moved):
    """The state_dict of SGD, Lion and Signum has no step count, but the random bits are drawn from the step count."""
    ours, _, arguments = PAIRS[name]
    params = [Parameter(torch.randn(500, dtype=dtype)) for dtype in (torch.float32, torch.bfloat16)]
    others = clone(params)
    optimizer = ours(params, threads=1, **options, **arguments)
    undisturbed = ours(others, threads=1, **options, **arguments)
    for seed in range(4):
        run(optimizer, params, [seed])
        run(undisturbed, others, [seed])
        optimizer, params = moved(optimizer, params)
    run(optimizer, params, [7])
    run(undisturbed, others, [7])
    assert bits(params) == bits(others)


@pytest.mark.parametrize("options", [{"state_dtype": torch.bfloat16}, {"master_layout": "split24"}])
def test_a_state_dict_without_step_counts_has_all_else_and_a_checkpoint_goes_on_with_the_same_bits(options, tmp_path):
    """The state_dict of Lion has no step count, from which the random bits are drawn, as docs/PYTORCH.md says."""
    params = [Parameter(torch.randn(500).bfloat16())]
    optimizer = hybridopt.Lion(params, **options)
    run(optimizer, params, range(4))
    optimizer.save_checkpoint(tmp_path / "saved")
    by_dict, by_checkpoint = clone(params), clone(params)
    resumed, exact = hybridopt.Lion(by_dict, **options), hybridopt.Lion(by_checkpoint, **options)
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    exact.load_checkpoint(tmp_path / "saved")
    assert bits(map(resumed.master_of, by_dict)) == bits(map(optimizer.master_of, params))
    assert state_bits(resumed) == state_bits(exact) == state_bits(optimizer)
    for which, stepped in ((optimizer, params), (resumed, by_dict), (exact, by_checkpoint)):
        run(which, stepped, [5])
    assert bits(by_checkpoint) == bits(params) and state_bits(exact) == state_bits(optimizer)
    assert state_bits(resumed) != state_bits(optimizer)


def test_state_without_moments_starts_again_once():
    param = Parameter(torch.ones(3))
    optimizer = hybridopt.SGD([param], lr=0.1, momentum=0.9)
    run(optimizer, [param], [1])
    optimizer._engine.settle = lambda: None  # on a GPU, steps are settled when `state` is read
    dict.__setitem__(optimizer._state, param, {"momentum_buffer": None})
    run(optimizer, [param], [1, 1])
    engine = optimizer._engine
    momentum = engine.state_memory.read(engine.slots[0], abi.OFFLOAD_STATE_MOMENTUM_BUFFER)
    assert torch.allclose(momentum, 1.9 * param.grad)


def test_amsgrads_state_dict_is_refused():
    param = nn.Parameter(torch.ones(2))
    torchs = torch.optim.AdamW([param], amsgrad=True)
    run(torchs, [param], [1])
    optimizer = hybridopt.AdamW([param])
    with pytest.raises(RuntimeError, match="does not support amsgrad=True .param group 0."):
        optimizer.load_state_dict(torchs.state_dict())
    assert not optimizer.param_groups[0]["amsgrad"] and len(optimizer.state) == 0


# ---------------------------------------------------------------------------- copies, new groups --


@every_optimizer
@pytest.mark.parametrize("copied", [copy.deepcopy, lambda both: pickle.loads(pickle.dumps(both))])
def test_copies_go_on_by_themselves(name, copied):
    ours, _, arguments = PAIRS[name]
    params = [nn.Parameter(torch.randn(7, 5)), nn.Parameter(torch.randn(3).bfloat16())]
    optimizer = ours(params, threads=1, max_grad_norm=1.0, **arguments)
    run(optimizer, params, [1, 2])
    other, other_params = copied((optimizer, params))
    assert other._options == optimizer._options
    assert state_bits(other) == state_bits(optimizer)
    run(optimizer, params, [3])
    run(other, other_params, [3])
    assert bits(params) == bits(other_params) and state_bits(other) == state_bits(optimizer)
    run(optimizer, params, [4])
    assert state_bits(other) != state_bits(optimizer) or name == "SGD plain"


@every_optimizer
def test_a_group_added_after_steps_changes_nothing_else(name):
    ours, _, arguments = PAIRS[name]
    params = [nn.Parameter(torch.randn(7, 5)), nn.Parameter(torch.randn(3).bfloat16())]
    late = nn.Parameter(torch.randn(4))
    alone_params, alone_late = clone(params), clone([late])
    optimizer = ours(params, **arguments)
    run(optimizer, params, [1, 2])
    optimizer.add_param_group({"params": [late], "lr": 0.5})
    run(optimizer, [*params, late], [3, 4])

    alone = ours(alone_params, **arguments)
    run(alone, alone_params, [1, 2])
    run(alone, alone_params, [3, 4])  # the same gradients come first
    assert bits(alone_params) == bits(params)
    lone = ours(alone_late, **{**arguments, "lr": 0.5})
    for seed in (3, 4):
        set_gradients([*alone_params, alone_late[0]], seed)
        lone.step()
    assert bits(alone_late) == bits([late])


def test_a_group_added_after_steps_is_clipped_with_the_others():
    params = [nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))]
    optimizer = hybridopt.SGD([params[0]], lr=1.0, max_grad_norm=1.0)
    params[0].grad = torch.zeros(2)
    optimizer.step()
    optimizer.add_param_group({"params": [params[1]]})
    params[0].grad, params[1].grad = torch.tensor([3.0, 0.0]), torch.tensor([0.0, 4.0])
    optimizer.step()
    assert optimizer.last_step().grad_norm == 5.0
    assert torch.allclose(params[0], torch.tensor([1 - 0.6, 1.0]))
    assert torch.allclose(params[1], torch.tensor([1.0, 1 - 0.8]))


def test_a_momentum_that_comes_later_gets_its_buffers():
    params = [nn.Parameter(torch.ones(3))]
    other_params = clone(params)
    optimizer, other = hybridopt.SGD(params, lr=0.1), torch.optim.SGD(other_params, lr=0.1)
    for each, its_params in ((optimizer, params), (other, other_params)):
        run(each, its_params, [1])
        each.param_groups[0]["momentum"] = 0.9
        run(each, its_params, [2, 3])
    assert torch.allclose(params[0], other_params[0], rtol=1e-6)
    assert list(optimizer.state[params[0]]) == ["momentum_buffer"]


# ---------------------------------------------------------------------- weights from outside --


@pytest.fixture(params=[False, True])
def watched(request, monkeypatch):
    watch_params(monkeypatch, request.param)
    return request.param


@pytest.mark.parametrize("options", [{}, {"master_layout": "split"}])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["AdamW", "SGD plain"])
def test_loaded_weights_are_not_reverted(name, dtype, options, watched):
    ours, _, arguments = PAIRS[name]
    param = nn.Parameter(torch.randn(5000).to(dtype))
    optimizer = ours([param], **{**arguments, "lr": 0.0, "weight_decay": 0.0}, **options)
    run(optimizer, [param], [1])
    loaded = torch.randn(5000).to(dtype)
    for load in (
        lambda: param.copy_(loaded),
        lambda: setattr(param, "data", loaded.clone()),
        lambda: param.data.copy_(loaded),
        lambda: (param.data.copy_(loaded), optimizer.refresh_masters()),
    ):
        with torch.no_grad():
            load()
        run(optimizer, [param], [2])
        assert bits([param]) == bits([loaded])
        with torch.no_grad():
            param.zero_()
        run(optimizer, [param], [3])


def low_precision_pair(**options):
    """A small and a large param in bf16; their masters have bits that bf16 does not."""
    params = [nn.Parameter(torch.randn(10).bfloat16()), nn.Parameter(torch.randn(5000).bfloat16())]
    optimizer = hybridopt.AdamW(params, lr=1e-3, threads=1, **options)
    run(optimizer, params, [1, 2])
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    return params, optimizer


@pytest.mark.parametrize("stepped_last", [[0, 1], [1]])
def test_a_write_that_a_sample_has_seen_is_looked_for_everywhere(monkeypatch, stepped_last):
    """The sample of the large param misses one element; the small param is compared completely."""
    watch_params(monkeypatch)
    params, optimizer = low_precision_pair()
    set_gradients(params, 3)
    for index, param in enumerate(params):
        param.grad = param.grad if index in stepped_last else None
    optimizer.step()
    masters = [optimizer.state[param]["master_param"].clone() for param in params]
    unseen = 100
    params[1].data[unseen] = 7.0
    assert optimizer._engine.in_sync._are_as_sampled(optimizer._engine.slots)
    params[0].data[3] = 5.0
    run(optimizer, params, [3])
    assert params[0][3] == 5.0 and params[1][unseen] == 7.0
    masters[0][3], masters[1][unseen] = 5.0, 7.0
    assert bits(optimizer.state[param]["master_param"] for param in params) == bits(masters)


def test_one_element_written_behind_our_back_is_kept(watched):
    """For watched params no sample has this element, but refresh_masters() compares all elements."""
    params, optimizer = low_precision_pair()
    masters = [optimizer.state[param]["master_param"].clone() for param in params]
    params[1].data[100] = masters[1][100] = 7.0
    if watched:
        optimizer.refresh_masters()
    run(optimizer, params, [3])
    assert params[1][100] == 7.0
    assert bits(optimizer.state[param]["master_param"] for param in params) == bits(masters)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_every_element_written_behind_our_back_is_kept_on_the_cpu(dtype):
    whole = torch.randn(103).to(dtype)  # params of odd lengths that begin at unaligned addresses
    params = [Parameter(whole[:32]), Parameter(whole[33:63]), Parameter(whole[63:])]
    optimizer = hybridopt.AdamW(params, lr=1e-3, weight_decay=0.0, threads=1)
    run(optimizer, params, [1, 2])
    optimizer.param_groups[0]["lr"] = 0.0
    for param in params:
        for index in range(param.numel()):
            masters = [optimizer.master_of(each).clone() for each in params]
            written = float(param.detach()[index]) + 1.0
            versions = [each._version for each in params]
            param.data[index] = written
            assert [each._version for each in params] == versions
            run(optimizer, params, [3])
            expected = torch.tensor(written).to(dtype)
            assert param.detach()[index] == expected
            for each, master in zip(params, masters):
                if each is param:
                    master[index] = float(expected)
                assert bits([optimizer.master_of(each)]) == bits([master])


def load_same_weights(module, how):
    same = {name: value.clone() for name, value in module.state_dict().items()}
    if how == "load_state_dict":
        module.load_state_dict(same)
    for name, param in module.named_parameters():
        with torch.no_grad():
            if how == "copy_":
                param.copy_(same[name])
            elif how == "data":
                param.data = same[name]


@pytest.mark.parametrize("options", [{}, {"master_layout": "split"}, {"master_layout": "split24"}])
@pytest.mark.parametrize("dtype", DTYPES)
def test_weights_that_are_loaded_unchanged_change_no_bit(dtype, options, watched):
    torch.manual_seed(1)
    module = nn.Sequential(nn.Linear(30, 70), nn.Linear(70, 5)).to(dtype)
    other = copy.deepcopy(module)
    both = [(each, hybridopt.AdamW(each.named_parameters(), lr=1e-2, **options)) for each in (module, other)]
    for seed, how in enumerate(("load_state_dict", "copy_", "data", "all left as it is")):
        load_same_weights(module, how)
        for each, optimizer in both:
            run(optimizer, list(each.parameters()), [seed])
        masters = [[optimizer.master_of(param) for param in each.parameters()] for each, optimizer in both]
        assert bits(masters[0]) == bits(masters[1]), how
        assert bits(module.parameters()) == bits(other.parameters()), how


def test_masters_follow_though_the_step_is_skipped(watched):
    params, optimizer = low_precision_pair()
    master = optimizer.state[params[1]]["master_param"]
    expected = master.clone()
    with torch.no_grad():
        params[1][100] = expected[100] = 7.0
    set_gradients(params, 3)
    params[0].grad[0] = torch.inf
    with pytest.warns(UserWarning, match="skipped"):
        optimizer.step()
    assert optimizer.last_step().skipped and bits([master]) == bits([expected])


def test_on_the_cpu_a_step_of_all_params_refreshes_no_masters(monkeypatch):
    params, optimizer = low_precision_pair()
    calls = []
    refresh = abi.Optimizer.refresh_masters
    monkeypatch.setattr(abi.Optimizer, "refresh_masters", lambda *a, **k: calls.append(1) or refresh(*a, **k))
    with torch.no_grad():
        params[0].copy_(params[0].clone())
    run(optimizer, params, [3, 4])
    assert not calls
    optimizer.master_of(params[0])
    assert calls


def test_other_memory_at_the_same_address_is_noticed(watched):
    """The new memory has the version, the address and the sampled bytes of the old one."""
    memory = bytearray(2 * 5000)
    param = Parameter(torch.frombuffer(memory, dtype=torch.bfloat16))
    optimizer = hybridopt.SGD([param], lr=1e-3, threads=1)
    run(optimizer, [param], [1, 2])
    param.data = torch.empty(0, dtype=torch.bfloat16)  # frees the storage, but not the memory
    torch.frombuffer(memory, dtype=torch.bfloat16)[77] = 3.0
    param.data = torch.frombuffer(memory, dtype=torch.bfloat16)
    param.grad = torch.zeros_like(param)
    optimizer.step()
    assert param[77] == 3.0 and optimizer.master_of(param)[77] == 3.0


def test_rows_zeroed_behind_our_back_before_a_save_or_a_phase_are_kept(tmp_path):
    embedding = nn.Embedding(300, 64, dtype=torch.bfloat16)
    optimizer = hybridopt.AdamW(embedding.named_parameters(), lr=1e-3, movable=["params"])
    run(optimizer, [embedding.weight], [1, 2])
    embedding.weight.data[77].zero_()
    optimizer.save_checkpoint(tmp_path / "saved")
    embedding.weight.data[78].zero_()
    optimizer.offload(params=True)
    optimizer.reload(params=True)
    optimizer.param_groups[0]["lr"] = 0.0
    run(optimizer, [embedding.weight], [3])
    assert not embedding.weight[77:79].any() and embedding.weight[76].any()
    other = nn.Embedding(300, 64, dtype=torch.bfloat16)
    hybridopt.AdamW(other.named_parameters()).load_checkpoint(tmp_path / "saved")
    assert not other.weight[77].any() and other.weight[78].any()


def test_samples_are_runs_from_the_first_to_the_last_bytes():
    for count in (1, 255, 256, 257, 300, 5000, 99_999):
        for dtype in DTYPES:
            tensors = [torch.randn(count).to(dtype), torch.ones(2), torch.randn(count).to(dtype)]
            slots = [SimpleNamespace(id=id, bytes=each.nbytes) for id, each in enumerate(tensors)]
            addresses = SimpleNamespace(moves=0, params=[each.data_ptr() for each in tensors])
            taken = samples.Samples(slots, addresses, torch.device("cpu"))
            for tensor, sample in zip(tensors, taken.cut(taken.take())):
                content = bytes(tensor.view(torch.uint8).tolist())
                assert len(sample) == min(tensor.nbytes, 512)
                assert sample[:64] == content[:64] and sample[-64:] in content[-92:]


def test_weights_written_behind_our_back_before_a_phase_are_not_reverted(watched):
    params, optimizer = low_precision_pair(movable=["params"])
    for param in params:
        param.data.fill_(3.0)
    optimizer.offload(params=True)
    optimizer.reload(params=True)
    run(optimizer, params, [3])
    assert all((param == 3.0).all() for param in params)


def assert_saved(path, params):
    others = [nn.Parameter(torch.zeros_like(param)) for param in params]
    hybridopt.AdamW(others).load_checkpoint(path)
    assert bits(others) == bits(params)


def test_a_save_has_weights_that_were_written_and_then_offloaded(watched, tmp_path):
    params, optimizer = low_precision_pair(movable=["params", "states"])
    params[1].data.fill_(3.0)
    optimizer.offload(params=True, states=True)
    optimizer.save_checkpoint(tmp_path / "saved")
    optimizer.reload(params=True)
    assert_saved(tmp_path / "saved", params)
    params[0].data.fill_(4.0)
    optimizer.save_checkpoint(tmp_path / "again")
    assert_saved(tmp_path / "again", params)
    params[1].data.fill_(5.0)
    optimizer.offload(params=True)
    optimizer.save_checkpoint(tmp_path / "last")
    optimizer.reload(params=True, states=True)
    assert_saved(tmp_path / "last", params)
    optimizer.param_groups[0]["weight_decay"] = 0.0
    run(optimizer, params, [3])
    assert (params[0] == 4.0).all() and (params[1] == 5.0).all()


def test_a_save_does_not_take_masters_that_could_not_follow(monkeypatch, tmp_path):
    """The device's state is on the host when the weights are written and offloaded."""
    watch_params(monkeypatch)
    params, optimizer = low_precision_pair(movable=["params", "states"])
    optimizer.offload(states=True)
    with torch.no_grad():
        params[1].fill_(3.0)
    monkeypatch.setattr(optimizer._engine, "plan", lambda: SimpleNamespace(elements=[1, 0]))
    optimizer.offload(params=True)
    with pytest.raises(abi.InvalidStateError, match=r"'param_groups.0.1' has been written and then off"):
        optimizer.save_checkpoint(tmp_path / "saved")
    optimizer.reload(params=True, states=True)
    optimizer.save_checkpoint(tmp_path / "saved")
    optimizer.offload(params=True)
    optimizer.save_checkpoint(tmp_path / "again")
    optimizer.reload(params=True)
    for name in ("saved", "again"):
        assert_saved(tmp_path / name, params)


def test_weights_at_the_address_of_others_are_not_reverted():
    """Freed memory may be allocated again: two assignments return to one address."""
    memory = bytearray(16)
    param = nn.Parameter(torch.frombuffer(memory, dtype=torch.bfloat16))
    optimizer = hybridopt.SGD([param], lr=0.0)
    run(optimizer, [param], [1])
    param.data = torch.frombuffer(memory, dtype=torch.bfloat16)
    param.data.fill_(3.0)
    run(optimizer, [param], [2])
    assert torch.equal(param, torch.full_like(param, 3.0))


def test_weights_with_gaps_from_elsewhere_are_not_reverted():
    param = nn.Parameter(torch.ones(4, 2).bfloat16()[:, 0])
    optimizer = hybridopt.SGD([param], lr=0.0)
    run(optimizer, [param], [1])
    param.data = torch.full((4, 2), 3.0).bfloat16()[:, 0]
    run(optimizer, [param], [2])
    assert torch.equal(param, torch.full_like(param, 3.0))


def test_memory_that_a_param_has_left_is_not_held():
    param = nn.Parameter(torch.ones(4))
    optimizer = hybridopt.AdamW([param])
    run(optimizer, [param], [1])
    param.grad = None
    storage = StorageWeakRef(param.untyped_storage())
    param.data = torch.ones(4)
    assert storage.expired()


@pytest.mark.parametrize("steps_before", [0, 1])
def test_masters_of_other_weights_do_not_replace_params(steps_before):
    other = nn.Parameter(torch.randn(50).bfloat16())
    saved = hybridopt.AdamW([other])
    run(saved, [other], [1])
    param = nn.Parameter(torch.randn(50).bfloat16())
    optimizer = hybridopt.AdamW([param], lr=0.0)
    run(optimizer, [param], range(steps_before))
    before = bits([param])
    optimizer.load_state_dict(copy.deepcopy(saved.state_dict()))
    optimizer.param_groups[0]["lr"] = 0.0
    run(optimizer, [param], [5])
    assert bits([param]) == before
    assert optimizer.state[param]["step"] == 2


def test_one_written_element_leaves_the_other_masters_alone():
    param = nn.Parameter(torch.randn(50).bfloat16())
    optimizer = hybridopt.AdamW([param], lr=1e-3)
    run(optimizer, [param], [1, 2])
    masters = optimizer.state[param]["master_param"].clone()
    assert not torch.equal(masters, masters.bfloat16().float())
    with torch.no_grad():
        param[7] = 3.0
    optimizer.param_groups[0]["lr"] = 0.0
    run(optimizer, [param], [3])
    masters[7] = 3.0
    assert torch.equal(optimizer.state[param]["master_param"], masters)


def test_two_optimizers_may_share_params():
    for dtype in DTYPES:
        param = nn.Parameter(torch.ones(10).to(dtype))
        first = hybridopt.SGD([param], lr=0.5)
        second = hybridopt.SGD([param], lr=0.25)
        param.grad = torch.ones_like(param)
        for _ in range(3):
            first.step()
            second.step()
        assert torch.equal(param, torch.full((10,), 1 - 3 * 0.75).to(dtype))


def test_autograd_notices_the_step():
    param = nn.Parameter(torch.ones(3))
    optimizer = hybridopt.SGD([param], lr=0.1)
    loss = (param * param).sum()
    param.grad = torch.ones(3)
    optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


# ------------------------------------------------------------------------------- moments in bf16 --


@every_optimizer
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_moments_in_bf16(name, dtype):
    ours, _, arguments = PAIRS[name]
    start = [torch.randn(70, 50).to(dtype), torch.randn(3).to(dtype)]
    params, exact_params = ([Parameter(tensor.clone()) for tensor in start] for _ in range(2))
    optimizer = ours(params, state_dtype=torch.bfloat16, **arguments)
    exact = ours(exact_params, **arguments)
    run(optimizer, params, range(5))
    run(exact, exact_params, range(5))
    for entry in optimizer.state.values():
        for key, value in entry.items():
            assert value.dtype == (
                torch.float32 if key in ("step", "master_param") else torch.bfloat16
            )
    if name == "AdamW":
        assert bits(params) != bits(exact_params)
    assert (params[0] - exact_params[0]).norm() < 0.3 * (exact_params[0] - start[0]).norm()

    resumed_params = clone(params)
    resumed = ours(resumed_params, state_dtype=torch.bfloat16, **arguments)
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    run(optimizer, params, [5])
    run(resumed, resumed_params, [5])
    if name not in ("SGD", "Lion", "Signum"):  # their state_dict has no step count, on which random rounding depends
        assert bits(resumed_params) == bits(params)
        assert state_bits(resumed) == state_bits(optimizer)


def test_other_moment_dtypes_are_refused():
    with pytest.raises(ValueError, match="Invalid state_dtype: torch.float16, expected torch.float32"):
        hybridopt.AdamW([Parameter(torch.ones(1))], state_dtype=torch.float16)
    with pytest.raises(ValueError, match="'half', expected .* strings 'float32', 'fp32', 'bfloat16', 'bf16'"):
        hybridopt.AdamW([Parameter(torch.ones(1))], state_dtype="half")


@pytest.mark.parametrize(
    "name, dtype",
    [
        *((name, torch.bfloat16) for name in ("bf16", "bfloat16", "torch.bfloat16")),
        *((name, torch.float32) for name in ("fp32", "float32", "torch.float32")),
    ],
)
def test_moment_dtypes_are_known_by_their_names(name, dtype):
    param = Parameter(torch.ones(3))
    optimizer = hybridopt.AdamW([param], state_dtype=name)
    run(optimizer, [param], [0])
    assert optimizer.state[param]["exp_avg"].dtype == dtype


# --------------------------------------------------------------------------------- split masters --


def split_pair(name, seeds=range(5), in_order=False, **options):
    """An optimizer with split masters and one with fp32 masters after the same steps."""
    ours, _, arguments = PAIRS[name]
    torch.manual_seed(5)
    start = [torch.randn(70, 50).bfloat16(), torch.randn(3), torch.randn(5).half(), torch.randn(1, 0)]
    if not in_order:
        start.append(torch.randn(4, 3, 2).bfloat16().permute(2, 0, 1))
    made = []
    for layout in ("split", "fp32"):
        params = [Parameter(tensor.clone()) for tensor in start]
        if not in_order:  # and params with gaps
            params.append(Parameter(torch.ones(9, 2).bfloat16()[:, 0]))
        optimizer = ours(params, master_layout=layout, **arguments, **options)
        run(optimizer, params, seeds)
        made.append((optimizer, params))
    return made


def test_zeros_over_split_masters_stay_zeros():
    param = torch.nn.Parameter(torch.randn(4000).bfloat16())
    optimizer = hybridopt.AdamW([param], lr=1e-3, weight_decay=0.0, master_layout="split")
    param.grad = torch.randn(4000).bfloat16()
    optimizer.step()
    low = optimizer.state[param]["master_low"].view(torch.int16)[..., 0]
    assert low.shape == param.shape and (low < 0).any() and (low > 0).any()
    param.data.zero_()
    assert (optimizer.master_of(param).abs() < 2.0**-126).all()
    param.grad = torch.zeros_like(param)
    optimizer.step()
    assert param.isfinite().all() and optimizer.master_of(param).isfinite().all()


@every_optimizer
@pytest.mark.parametrize("moments", [torch.float32, torch.bfloat16])
def test_split_masters_are_the_fp32_masters(name, moments):
    (split, params), (whole, whole_params) = split_pair(name, state_dtype=moments)
    keys = [set(split.state.get(param, {})) for param in params]
    assert "master_low" in keys[0] and not any("master_param" in each for each in keys[:2])
    assert "master_param" in keys[2]  # in fp16 masters are not split
    for param, own in zip(params, whole_params):
        assert bits([split.master_of(param)]) == bits([whole.master_of(own)])
        assert split.master_of(param).shape == param.shape
        for key, value in whole.state.get(own, {}).items():
            if key != "master_param":
                assert bits([split.state[param][key]]) == bits([value])
    low = split.state[params[0]]["master_low"]
    assert low.dtype == torch.uint8 and low.shape == (70, 50, 2)  # torch cannot gather 16-bit integers
    plan, whole_plan = split.plan(), whole.plan()
    count = sum(p.numel() for p in params if p.dtype == torch.bfloat16)
    assert plan.state_bytes.host["master_low"] >= 2 * count
    assert "master_low" not in whole_plan.state_bytes.host
    assert sum(plan.state_bytes.host.values()) < sum(whole_plan.state_bytes.host.values())


def through_state_dict(optimizer, params, layout, params_first, tmp_path):
    saved = copy.deepcopy(optimizer.state_dict())
    others = [Parameter(torch.zeros_like(param)) for param in params]
    other = hybridopt.AdamW(others, lr=1e-2, master_layout=layout)
    if not params_first:
        other.load_state_dict(saved)
    with torch.no_grad():
        for own, param in zip(others, params):
            own.copy_(param)
    if params_first:
        other.load_state_dict(saved)
    return other, others


def through_checkpoint(optimizer, params, layout, params_first, tmp_path):
    path = tmp_path / f"from_{optimizer._options['master_layout']}_to_{layout}"
    optimizer.save_checkpoint(path)
    others = [Parameter(torch.zeros_like(param)) for param in params]
    other = hybridopt.AdamW(others, lr=1e-2, master_layout=layout)
    other.load_checkpoint(path)
    return other, others


@pytest.mark.parametrize(
    ("through", "params_first"),
    [(through_state_dict, True), (through_state_dict, False), (through_checkpoint, True)],
)
def test_state_goes_from_either_master_layout_to_either(through, params_first, tmp_path):
    in_order = through is through_checkpoint  # a checkpoint needs this order
    for optimizer, params in split_pair("AdamW", range(20), in_order):
        for layout in ("split", "fp32"):
            other, others = through(optimizer, params, layout, params_first, tmp_path)
            run(other, others, range(20, 23))
            _, (expected, own) = split_pair("AdamW", range(23), in_order)
            masters = bits(expected.master_of(param) for param in own)
            assert bits(other.master_of(param) for param in others) == masters


def test_lower_halves_in_int16_as_older_versions_saved_them_load():
    for layout in ("split", "fp32"):
        (optimizer, params), _ = split_pair("AdamW", range(20))
        saved = copy.deepcopy(optimizer.state_dict())
        for entry in saved["state"].values():
            if "master_low" in entry:
                entry["master_low"] = entry["master_low"].contiguous().view(torch.int16).squeeze(-1)
        others = clone(params)
        other = hybridopt.AdamW(others, lr=1e-2, master_layout=layout)
        other.load_state_dict(saved)
        run(other, others, range(20, 23))
        run(optimizer, params, range(20, 23))
        assert bits(map(other.master_of, others)) == bits(map(optimizer.master_of, params))


@pytest.mark.parametrize("layout", ["split", "fp32"])
@pytest.mark.parametrize(
    ("shape", "dtype"), [((70, 50), torch.uint8), ((70, 50, 2), torch.int16), ((70, 50), torch.float32)]
)
def test_lower_halves_that_cannot_be_are_refused_before_anything_changes(layout, shape, dtype):
    low = torch.zeros(shape, dtype=dtype)
    made = split_pair("AdamW")
    (optimizer, params) = made[0] if layout == "split" else made[1]
    before = bits(params), bits(map(optimizer.master_of, params)), state_bits(optimizer)
    saved = optimizer.state_dict()
    good = dict(saved["state"][0])
    saved["state"][0] = {**{key: good[key] for key in ("step", "exp_avg", "exp_avg_sq")}, "master_low": low}
    optimizer.load_state_dict(saved)
    found = f"'param_groups.0.0' has 'master_low' in {dtype} of shape {shape}"
    text = re.escape(f"{found}, expected torch.uint8 of shape (70, 50, 2)")
    with pytest.raises(ValueError, match=text):
        run(optimizer, params, [9])
    optimizer.state[params[0]] = good
    assert (bits(params), bits(map(optimizer.master_of, params)), state_bits(optimizer)) == before


def test_lower_halves_are_views_that_can_be_written_and_assigned():
    (optimizer, params), _ = split_pair("AdamW")
    low = optimizer.state[params[0]]["master_low"]
    before, pointer = low.clone(), low.data_ptr()
    optimizer.state[params[0]]["master_low"] = before  # the same bits, so nothing changes
    assert optimizer.state[params[0]]["master_low"].data_ptr() == pointer
    low.zero_()
    assert torch.equal(optimizer.master_of(params[0]), params[0].float())
    low.copy_(before)
    (_, _), (whole, whole_params) = split_pair("AdamW")
    assert bits([optimizer.master_of(params[0])]) == bits([whole.master_of(whole_params[0])])


def trained(layout, seeds, in_order):
    """A model's params and their optimizer, with masters in that layout, after some steps."""
    torch.manual_seed(5)
    start = [torch.randn(70, 50).bfloat16(), torch.randn(3), torch.randn(5).half(), torch.randn(1, 0)]
    if not in_order:
        start.append(torch.randn(4, 3, 2).bfloat16().permute(2, 0, 1))
    params = [Parameter(tensor.clone()) for tensor in start]
    optimizer = hybridopt.AdamW(params, lr=1e-2, master_layout=layout)
    run(optimizer, params, seeds)
    return optimizer, params


def rounded_to_24_bits(masters):
    words = masters.view(torch.int32)
    return ((words + 0x7F + (words >> 8 & 1)) & ~0xFF).view(torch.float32)


@pytest.mark.parametrize(
    ("through", "params_first"),
    [(through_state_dict, True), (through_state_dict, False), (through_checkpoint, True)],
)
@pytest.mark.parametrize(("saved", "loaded"), [("split24", layout) for layout in MASTER_LAYOUTS] + [("fp32", "split24")])
def test_state_goes_to_and_from_masters_of_24_bits(saved, loaded, through, params_first, tmp_path):
    in_order = through is through_checkpoint  # a checkpoint needs this order
    optimizer, params = trained(saved, range(5), in_order)
    other, others = through(optimizer, params, loaded, params_first, tmp_path)
    for param, own in zip(params, others):
        expected = optimizer.master_of(param)
        if loaded == "split24" and param.dtype == torch.bfloat16:
            expected = rounded_to_24_bits(expected)
        assert bits([other.master_of(own)]) == bits([expected])
    if saved == loaded:  # as if the training had not been interrupted
        run(other, others, range(5, 8))
        run(optimizer, params, range(5, 8))
        assert bits(others) == bits(params)
        assert bits(map(other.master_of, others)) == bits(map(optimizer.master_of, params))


def test_masters_of_24_bits_take_a_byte_and_learn():
    (optimizer, params), (whole, whole_params) = (trained(layout, range(20), False) for layout in ("split24", "fp32"))
    low = optimizer.state[params[0]]["master_low"]
    assert low.dtype == torch.uint8 and low.shape == (70, 50, 1) and low.any()
    masters, exact = optimizer.master_of(params[0]), whole.master_of(whole_params[0])
    assert not (masters.view(torch.int32) & 0xFF).any()
    assert not torch.equal(masters, exact)
    step = 2.0**-15 * exact.abs()  # the largest rounding step of 24-bit masters
    assert ((masters - exact).abs() <= 20 * step + 1e-4).all()
    count = sum(param.numel() for param in params if param.dtype == torch.bfloat16)
    bytes_of = [each.plan().state_bytes.host for each in (optimizer, whole)]
    assert count <= bytes_of[0]["master_low"] <= count + 1024
    assert sum(bytes_of[0].values()) < sum(bytes_of[1].values()) - 2 * count


def test_masters_between_two_numbers_keep_every_bit_in_either_layout():
    """fp32 masters round such values to the even number, split masters round them away from zero."""
    masters = torch.tensor([0x3F808000, 0x3F818000, -0x407F8000, 0x3F80FFFF], dtype=torch.int32)
    masters = masters.view(torch.float32)
    for layout in ("split", "fp32"):
        param = Parameter(masters.bfloat16())
        optimizer = hybridopt.AdamW([param], lr=0.0, weight_decay=0.0, master_layout=layout)
        state = {"step": torch.tensor(1.0), "master_param": masters.clone()}
        state.update(exp_avg=torch.zeros(4), exp_avg_sq=torch.ones(4))
        optimizer.state = {param: state}
        run(optimizer, [param], [1])
        assert bits([optimizer.master_of(param)]) == bits([masters])
        back = Parameter(param.detach().clone())
        other = hybridopt.AdamW([back], lr=0.0, weight_decay=0.0)
        other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        other.param_groups[0].update(lr=0.0, weight_decay=0.0)
        run(other, [back], [1])
        assert bits([other.master_of(back)]) == bits([masters])


def test_low_halves_of_weights_that_were_written_are_dropped_on_demand():
    (optimizer, params), _ = split_pair("AdamW")
    optimizer.param_groups[0].update(lr=0.0, weight_decay=0.0)
    low = optimizer.state[params[0]]["master_low"]
    assert low.any()
    with torch.no_grad():
        params[0].fill_(1.0)
    run(optimizer, params, [7])
    assert (params[0] == 1.0).all() and low.any()  # below the precision of bf16
    assert not torch.equal(optimizer.master_of(params[0]), torch.ones(70, 50))
    optimizer.refresh_masters()
    assert not low.any() and torch.equal(optimizer.master_of(params[0]), torch.ones(70, 50))


def test_the_master_of_a_param_that_is_not_here_is_refused():
    (optimizer, params), _ = split_pair("AdamW")
    with pytest.raises(ValueError, match=r"^master_of\(\) got .*, expected one of the optimizer's trained parameters$"):
        optimizer.master_of(Parameter(torch.ones(1)))
    assert optimizer.master_of(params[1]).data_ptr() == params[1].data_ptr()


# ------------------------------------------------------------------------------ as torch has it --


@pytest.mark.parametrize("name", ["AdamW", "Adam", "Adagrad"])
def test_eps_may_be_zero(name):
    """As with torch, except that an element which has had only zero gradients stays unchanged; torch divides 0 by 0."""
    params = [Parameter(torch.randn(50)), Parameter(torch.randn(3))]
    others = clone(params)
    optimizer = getattr(hybridopt, name)(params, lr=1e-2, eps=0.0, weight_decay=0.0)
    other = getattr(torch.optim, name)(others[:1], lr=1e-2, eps=0.0, weight_decay=0.0)
    before, start = bits(params[1:]), params[0].detach().clone()
    for seed in range(5):
        set_gradients(params, seed)
        params[1].grad.zero_()
        others[0].grad = params[0].grad.clone()
        optimizer.step(), other.step()
    assert (params[0] - others[0]).norm() < 1e-5 * (others[0] - start).norm()
    assert bits(params[1:]) == before


def sgd_pair(change=lambda group, step: None, steps=6, missing=(), **arguments):
    """The package's SGD and torch's SGD with the same gradients; `change` edits their groups before each step."""
    params = [Parameter(torch.randn(50)), Parameter(torch.randn(3))]
    others = clone(params)
    start = clone(params)
    pair = hybridopt.SGD(params, lr=0.1, **arguments), torch.optim.SGD(others, lr=0.1, **arguments)
    for step in range(steps):
        for each, its_params in zip(pair, (params, others)):
            change(each.param_groups[0], step)
            set_gradients(its_params, step)
            if step in missing:
                its_params[1].grad = None
            each.step()
    for param, other, began in zip(params, others, start):
        assert (param - other).norm() < 1e-6 * (other - began).norm(), arguments
    return pair, params, others


@pytest.mark.parametrize(
    "arguments",
    [
        {"momentum": 0.9, "dampening": 0.5},
        {"momentum": 0.9, "dampening": 1.0},
        {"momentum": 0.9, "dampening": 0.5, "weight_decay": 0.1, "maximize": True},
        {"momentum": 0.9, "nesterov": True},
        {"dampening": 0.5},
    ],
)
def test_dampening_begins_with_a_params_second_step(arguments):
    """This holds even if other params have been stepped before."""
    sgd_pair(missing=(0, 1, 3), **arguments)


def test_dampening_goes_on_where_momentum_is_resumed_and_begins_where_it_is_new():
    (ours, torchs), params, others = sgd_pair(momentum=0.9, dampening=0.5)
    again = hybridopt.SGD(params, lr=0.1, momentum=0.9, dampening=0.5)
    again.load_state_dict(copy.deepcopy(torchs.state_dict()))
    start = clone(params)
    for each, its_params in ((again, params), (torchs, others)):
        dict.pop(each.state, its_params[1])  # torch then makes a new buffer
        run(each, its_params, [7, 8])
    for param, other, began in zip(params, others, start):
        assert (param - other).norm() < 1e-5 * (other - began).norm()


def momentum_that_comes(group, step):
    group["momentum"] = 0.0 if step < 2 else 0.9


def momentum_that_pauses(group, step):
    group["momentum"] = 0.0 if step == 3 else 0.9


@pytest.mark.parametrize("change", [momentum_that_comes, momentum_that_pauses])
@pytest.mark.parametrize("arguments", [{"dampening": 0.5}, {"nesterov": True}])
def test_momentum_that_comes_or_pauses_is_as_with_torch(change, arguments):
    sgd_pair(change, steps=8, momentum=0.9, **arguments)


def test_nesterov_with_dampening_is_refused_later_as_well():
    param = Parameter(torch.ones(3))
    with pytest.raises(ValueError, match="Nesterov momentum requires a momentum and zero dampening"):
        hybridopt.SGD([param], lr=0.1, momentum=0.9, dampening=0.5, nesterov=True)
    optimizer = hybridopt.SGD([param], lr=0.1, momentum=0.9, nesterov=True)
    run(optimizer, [param], [1])
    optimizer.param_groups[0]["dampening"] = 0.5
    with pytest.raises(abi.InvalidArgumentError, match="nesterov"):
        run(optimizer, [param], [2])


def test_a_flag_that_the_algorithm_does_not_use_is_refused():
    params = [Parameter(torch.ones(3)), Parameter(torch.ones(3))]
    refused = "param group 1 has nesterov=True, but AdamW does not use it; leave it out"
    with pytest.raises(ValueError, match=refused):
        hybridopt.AdamW([{"params": params[:1]}, {"params": params[1:], "nesterov": True}])
    optimizer = hybridopt.AdamW([{"params": params[:1], "nesterov": False}, {"params": params[1:]}])
    run(optimizer, params, [1])
    before = [param.detach().clone() for param in params]
    optimizer.param_groups[1]["nesterov"] = True
    with pytest.raises(ValueError, match=refused):
        run(optimizer, params, [2])
    assert all(map(torch.equal, params, before))
    del optimizer.param_groups[1]["nesterov"]
    run(optimizer, params, [2])


def test_stats_have_the_sums_of_all_results():
    params = [Parameter(torch.ones(5000))]
    optimizer = hybridopt.AdamW(params)
    run(optimizer, params, [1, 2, 3])
    stats, results = optimizer.stats(), optimizer.step_results()
    assert len(results) == 3
    names = {field.name for field in dataclasses.fields(hybridopt.StepResult)}
    summed = names & {field.name for field in dataclasses.fields(hybridopt.Stats)}
    assert summed == names - {"skipped", "step", "grad_norm", "grad_clip"}
    for name in summed:
        assert getattr(stats, name) == sum(getattr(result, name) for result in results), name
    assert stats.cpu_elements == 15000 and stats.update_seconds > 0 and stats.total_seconds > 0


@pytest.mark.parametrize("wrong", ["no", 2, None])
def test_a_flag_is_true_or_false(wrong):
    param = Parameter(torch.ones(3))
    refused = f"param group 0 has cautious_weight_decay={wrong!r}, expected True or False"
    with pytest.raises(ValueError, match=refused):
        hybridopt.AdamW([param], cautious_weight_decay=wrong)
    with pytest.raises(ValueError, match=refused):
        hybridopt.AdamW([{"params": [param], "cautious_weight_decay": wrong}])
    optimizer = hybridopt.AdamW([param], cautious_weight_decay=True)
    optimizer.param_groups[0]["cautious_weight_decay"] = wrong
    with pytest.raises(ValueError, match=refused):
        run(optimizer, [param], [1])
    assert torch.equal(param, torch.ones(3))


def adamw_after(seeds, params, **arguments):
    """Params after steps of AdamW, and their exp_avg."""
    params = [Parameter(param.detach().clone()) for param in params]
    optimizer = hybridopt.AdamW(params, lr=1e-2, **arguments)
    run(optimizer, params, seeds)
    return params, [optimizer.state[param]["exp_avg"].clone() for param in params]


def test_cautious_weight_decay_leaves_out_elements_that_move_away_from_zero():
    generator = torch.Generator().manual_seed(5)
    start = [torch.randn(5000, generator=generator), torch.randn(3, 7, generator=generator)]
    decayed, averages = adamw_after([1], start, weight_decay=0.5)
    kept, _ = adamw_after([1], start, weight_decay=0.0)
    cautious, _ = adamw_after([1], start, weight_decay=0.5, cautious_weight_decay=True)
    for begin, average, *ends in zip(start, averages, decayed, kept, cautious):
        expected = torch.where(average * begin >= 0, ends[0], ends[1])
        assert torch.equal(ends[2], expected)
        assert not torch.equal(ends[2], ends[0]) and not torch.equal(ends[2], ends[1])


def test_cautious_weight_decay_is_of_a_group_and_may_change():
    start = [torch.randn(500, generator=torch.Generator().manual_seed(seed)) for seed in (1, 2)]
    params = [Parameter(begin.clone()) for begin in start]
    groups = [{"params": params[:1]}, {"params": params[1:], "cautious_weight_decay": True}]
    optimizer = hybridopt.AdamW(groups, lr=1e-2, weight_decay=0.5)
    run(optimizer, params, [1])
    plain, _ = adamw_after([1], start, weight_decay=0.5)
    cautious, _ = adamw_after([1], start, weight_decay=0.5, cautious_weight_decay=True)
    assert torch.equal(params[0], plain[0]) and torch.equal(params[1], cautious[1])
    optimizer.param_groups[1]["cautious_weight_decay"] = False
    twins = [Parameter(begin.clone()) for begin in start]
    twin = hybridopt.AdamW(twins, lr=1e-2, weight_decay=0.5)
    run(twin, twins, [1])
    with torch.no_grad():
        twins[1].copy_(params[1])  # the moments are equal
    run(optimizer, params, [2])
    run(twin, twins, [2])
    assert all(map(torch.equal, params, twins))


def test_cautious_weight_decay_is_kept_by_state_dicts_and_given_by_those_of_torch():
    param = Parameter(torch.ones(3))
    optimizer = hybridopt.AdamW([param], cautious_weight_decay=True)
    run(optimizer, [param], [1])
    other = hybridopt.AdamW([Parameter(torch.ones(3))])
    other.load_state_dict(optimizer.state_dict())
    assert other.param_groups[0]["cautious_weight_decay"] is True
    assert pickle.loads(pickle.dumps(optimizer)).param_groups[0]["cautious_weight_decay"] is True
    theirs = torch.optim.AdamW([Parameter(torch.ones(3))])
    theirs.load_state_dict(optimizer.state_dict())  # it has one key more than torch's
    optimizer.load_state_dict(torch.optim.AdamW([Parameter(torch.ones(3))]).state_dict())
    assert optimizer.param_groups[0]["cautious_weight_decay"] is True, "as the optimizer was made"


def test_no_other_algorithm_decays_cautiously():
    param = Parameter(torch.ones(3))
    with pytest.raises(ValueError, match="param group 0 has cautious_weight_decay=True, but Adam does not use it"):
        hybridopt.Adam([{"params": [param], "cautious_weight_decay": True}])
    with pytest.raises(TypeError, match="unexpected keyword argument 'cautious_weight_decay'"):
        hybridopt.Lion([param], cautious_weight_decay=True)
