"""Steps, moves and checkpoints give the same results under all of torch's defaults and modes, and state stays shared
with the library where torch moves its tensors to other memory."""

import copy
import warnings

import pytest
import torch
import torch.multiprocessing
from torch.nn import Parameter

import hybridopt
from hybridopt.ranks.process_group import ProcessGroupComm
from models import PAIRS, bits, clone, perceptron, run, set_gradients, state_bits

every_optimizer = pytest.mark.parametrize("name", PAIRS)
ALL = ("params", "grads", "states")


@pytest.fixture
def defaults():
    yield
    torch.set_default_dtype(torch.float32)
    torch.set_default_device(None)


def trained(name, dtype, between=lambda optimizer: None, **options):
    """The bits of params and state after some steps, between which the engine is replaced."""
    cls, _, arguments = PAIRS[name]
    model = perceptron(dtype)
    params = list(model.parameters())
    optimizer = cls(params[:3], **arguments, **options, threads=1)
    run(optimizer, params[:3], [1, 2])
    between(optimizer)
    optimizer.add_param_group({"params": params[3:]})
    run(optimizer, params, [3])
    between(optimizer)
    run(optimizer, params, [4])
    return bits(params), state_bits(optimizer)


# -------------------------------------------------------------------------------------- defaults --


@every_optimizer
@pytest.mark.parametrize("default", [torch.bfloat16, torch.float16])
def test_a_default_dtype_of_16_bits_changes_no_bit(name, default, defaults):
    param = Parameter(torch.randn(5))
    other = copy.deepcopy(param)
    cls, _, arguments = PAIRS[name]
    if name == "Adagrad":
        arguments = {**arguments, "initial_accumulator_value": 0.1}
    optimizers = []
    for each, dtype in ((param, torch.float32), (other, default)):
        torch.set_default_dtype(dtype)
        optimizer = cls([each], **arguments, threads=1)
        for seed in range(300 if name == "AdamW" else 3):  # bf16 could count only to 256
            each.grad = torch.full((5,), 0.1 * (seed % 7 - 3), dtype=torch.float32)
            optimizer.step()
        optimizer.add_param_group({"params": [Parameter(torch.ones(2, dtype=torch.float32))]})
        each.grad = torch.ones(5, dtype=torch.float32)
        optimizer.step()  # the bias corrections use the counts that were carried over
        optimizer.state.clear()  # state starts afresh
        optimizer.step()
        optimizers.append(optimizer)
    assert bits([param]) == bits([other])
    assert state_bits(optimizers[0]) == state_bits(optimizers[1])


def test_steps_are_counted_in_the_dtype_of_torchs(defaults):
    for default in (torch.float64, torch.float32, torch.bfloat16):
        torch.set_default_dtype(default)
        param = Parameter(torch.ones(3, dtype=torch.float32))
        counts = []
        for cls in (hybridopt.AdamW, torch.optim.AdamW):
            optimizer = cls([param])
            param.grad = torch.ones(3, dtype=torch.float32)
            optimizer.step()
            counts.append(optimizer.state[param]["step"])
        assert counts[0].dtype == counts[1].dtype and counts[0] == counts[1] == 1


@every_optimizer
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_default_device_that_holds_nothing_changes_no_bit(name, dtype, tmp_path, defaults):
    def moved(optimizer):
        optimizer.offload(params=True, states=True)
        optimizer.reload(params=True, states=True)
        optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))

    torch.manual_seed(0)
    expected = trained(name, dtype, moved, movable=ALL)
    torch.manual_seed(0)
    model = perceptron(dtype)
    cls, _, arguments = PAIRS[name]
    params = list(model.parameters())
    gradients = []
    for seed in range(1, 5):
        set_gradients(params, seed)
        gradients.append([param.grad for param in params])
        for param in params:
            param.grad = None
    torch.set_default_device("meta")
    optimizer = cls(params[:3], **arguments, movable=ALL, threads=1)
    for step, grads in enumerate(gradients):
        if step == 2:
            moved(optimizer)
            optimizer.add_param_group({"params": params[3:]})
        if step == 3:
            moved(optimizer)
        for param, grad in zip(params[: 3 if step < 2 else 4], grads):
            param.grad = grad
        optimizer.step()
    torch.set_default_device(None)
    assert (bits(params), state_bits(optimizer)) == expected


def test_split_masters_and_comm_tables_are_made_where_they_belong(defaults):
    param = Parameter(torch.randn(5).bfloat16())
    param.grad = torch.ones_like(param)
    optimizer = hybridopt.AdamW([param], master_layout="split")
    count, moment = torch.tensor(1.0), torch.ones(5)
    torch.set_default_device("meta")
    entry = {"step": count, "exp_avg": moment, "exp_avg_sq": moment}
    optimizer.load_state_dict({**optimizer.state_dict(), "state": {0: entry}})
    optimizer.step()
    assert optimizer.state[param]["master_low"].device.type == "cpu"
    comm = object.__new__(ProcessGroupComm)
    comm.rank, comm.world, comm.error = 0, 1, ""
    comm._all = lambda own, timeout_ns: [own]
    values = [1.5, 2.5]
    assert comm._sum(None, values, 2, 1) == 0 and values == [1.5, 2.5]
    assert comm._barrier(None, 1) == 0


# ----------------------------------------------------------------------------------------- modes --


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_whatever_is_called_in_inference_mode_training_goes_on(dtype, tmp_path):
    def backward(model, seed):
        set_gradients(model.parameters(), seed)
        return model(torch.ones(2, 10, dtype=dtype)).float().sum()

    results = []
    for inference in (False, True):
        torch.manual_seed(0)
        model = perceptron(dtype)
        optimizer = hybridopt.AdamW(
            model.named_parameters(), lr=0.1, movable=ALL, max_grad_norm=1.0
        )
        set_gradients(model.parameters(), 0)
        with torch.inference_mode(inference):
            optimizer.step()
            with optimizer.offloaded():
                pass
            model(torch.ones(2, 10, dtype=dtype))
            optimizer.save_checkpoint(tmp_path / f"saved {inference}")
            optimizer.plan(), optimizer.refresh_masters()
            for param in model.parameters():
                optimizer.master_of(param)
            state = optimizer.state_dict()["state"]
        for entry in state.values():
            for value in entry.values():
                value.add_(0.0)  # can still be written
        backward(model, 1).backward()  # adds to gradients that had been offloaded
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
        with torch.inference_mode(inference):
            optimizer.load_checkpoint(tmp_path / f"saved {inference}")
            hooks = optimizer.hook_gradients(accumulate=False)
        backward(model, 2).backward()
        with torch.inference_mode(inference):
            optimizer.reload(grads=True)
            hooks.remove()
        assert not any(param.grad.is_inference() for param in model.parameters())
        optimizer.step()
        optimizer.add_param_group({"params": [("more", Parameter(torch.ones(2)))]})
        with torch.inference_mode(inference):
            optimizer.save_checkpoint(tmp_path / f"again {inference}")
        assert not any(
            value.is_inference() for entry in optimizer.state.values() for value in entry.values()
        )
        results.append((bits(model.parameters()), state_bits(optimizer)))
        optimizer.close()
    assert results[0] == results[1]


def test_a_closure_may_differentiate_in_inference_mode():
    model = perceptron()
    optimizer = hybridopt.SGD(model.parameters(), lr=0.1)

    def closure():
        loss = model(torch.ones(2, 10)).sum()
        loss.backward()
        return loss

    before = bits(model.parameters())
    with torch.inference_mode():
        loss = optimizer.step(closure)
    assert loss.requires_grad and bits(model.parameters()) != before


def test_a_compiled_training_step_is_that_of_plain_python():
    model = perceptron()
    plain = copy.deepcopy(model)
    optimizers = [hybridopt.AdamW(each.parameters(), lr=0.1) for each in (model, plain)]
    inputs = torch.randn(4, 10)

    def train(module, optimizer):
        optimizer.zero_grad()
        loss = module(inputs).square().sum()
        loss.backward()
        optimizer.step()
        return loss

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns about its profiler and its guards
        compiled = torch.compile(train, backend="eager")
        for _ in range(3):
            compiled(model, optimizers[0])
    for _ in range(3):
        train(plain, optimizers[1])
    assert bits(model.parameters()) == bits(plain.parameters())
    assert state_bits(optimizers[0]) == state_bits(optimizers[1])
    assert all(entry["step"] == 3 for entry in optimizers[0].state.values())


# ------------------------------------------------------------------------- tensors that are moved --


def share(optimizer):
    for entry in optimizer.state.values():
        for value in entry.values():
            value.share_memory_()


def send(optimizer):
    queue = torch.multiprocessing.get_context("spawn").SimpleQueue()
    queue.put(optimizer.state_dict())


def point_elsewhere(optimizer):
    for entry in optimizer.state.values():
        for value in entry.values():
            value.data = value.clone()


@every_optimizer
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("move", [share, send, point_elsewhere])
@pytest.mark.parametrize("layout", ["fp32", "split"])
def test_state_that_torch_moves_stays_that_of_the_steps(name, dtype, move, layout):
    cls, _, arguments = PAIRS[name]
    torch.manual_seed(0)
    param = Parameter(torch.randn(40).to(dtype))
    (other,) = clone([param])
    options = {**arguments, "master_layout": layout, "threads": 1}
    optimizer, plain = cls([param], **options), cls([other], **options)
    run(optimizer, [param], [1])
    run(plain, [other], [1])
    for seed in (2, 3, 4):
        move(optimizer)
        run(optimizer, [param], [seed])
        run(plain, [other], [seed])
        assert bits([param]) == bits([other])
        assert state_bits(optimizer) == state_bits(plain)
    for each in (optimizer, plain):  # the views that exist now show writes of either side
        for entry in each.state.values():
            for key, value in entry.items():
                if key != "step":
                    value.zero_()
    run(optimizer, [param], [5])
    run(plain, [other], [5])
    assert bits([param]) == bits([other]) and state_bits(optimizer) == state_bits(plain)


def test_data_assigned_to_state_is_what_the_next_step_takes():
    param = Parameter(torch.zeros(4))
    optimizer = hybridopt.AdamW([param], lr=0.1, weight_decay=0.0)
    run(optimizer, [param], [1])
    optimizer.state[param]["exp_avg"].data = torch.full((4,), 100.0)
    optimizer.state[param]["step"].data = torch.tensor(9.0)
    param.grad = torch.zeros(4)
    optimizer.step()
    entry = optimizer.state[param]
    assert entry["exp_avg"].tolist() == [90.0] * 4 and entry["step"] == 10
    run(optimizer, [param], [2])
    assert optimizer.state_dict()["state"][0]["step"] == 11
    optimizer.state[param]["exp_avg"].data = torch.ones(3)
    with pytest.raises(ValueError, match=r"'exp_avg' of shape \(3,\), expected \(4,\)"):
        optimizer.step()


def test_state_that_torch_moves_is_saved(tmp_path):
    param = Parameter(torch.randn(4))
    optimizer = hybridopt.AdamW([("weight", param)])
    run(optimizer, [param], [1])
    optimizer.state[param]["exp_avg"].data = torch.full((4,), 3.0)
    optimizer.save_checkpoint(tmp_path / "saved")
    other = Parameter(torch.zeros(4))
    loaded = hybridopt.AdamW([("weight", other)])
    loaded.load_checkpoint(tmp_path / "saved")
    assert loaded.state[other]["exp_avg"].tolist() == [3.0] * 4
