"""Programs write into param groups after the optimizer has been made. The next call refuses a value or a list that
is invalid, and changes nothing. Groups may have algorithms of their own, in one optimizer."""

import copy
import inspect
import math

import pytest
import torch
from torch.nn import Parameter

import hybridopt
from hybridopt import abi
from hybridopt.params.hyperparameters import OWN_DEFAULTS
from models import bits, clone, run, state_bits, told

NUMBERS = {
    "AdamW": ("lr", "eps", "weight_decay"),
    "Adam": ("lr", "eps", "weight_decay"),
    "SGD": ("lr", "momentum", "dampening", "weight_decay"),
    "Lion": ("lr", "weight_decay"),
    "Signum": ("lr", "momentum", "weight_decay"),
    "Adagrad": ("lr", "lr_decay", "weight_decay", "eps", "initial_accumulator_value"),
}
NO_NUMBERS = ["1", b"1", True, None, 10**400, 1j, [], {}, (0.1,), torch.tensor(True), torch.tensor([1.0, 2.0])]
NO_PAIRS = [
    *NO_NUMBERS[:-1],
    0.9,
    "ab",
    (0.9,),
    [0.9, 0.99, 0.999],
    ("0.9", 0.99),
    (True, 0.9),
    (0.9, None),
    {0: 0.9, 1: 0.99},
    torch.tensor(0.9),
    torch.tensor([0.9, 0.99, 0.5]),
]
NO_FLAGS = ["False", "", None, 2, -1, math.nan, (), [], {}, torch.tensor([True, False])]


def two_groups(algorithm):
    """An optimizer with two groups after some steps, and its params."""
    params = [Parameter(torch.ones(3)), Parameter(torch.ones(2))]
    groups = [{"params": [("first", params[0])]}, {"params": [("second", params[1])], "lr": 1e-2}]
    kwargs = {"momentum": 0.5} if algorithm in ("SGD", "Signum") else {}
    optimizer = getattr(hybridopt, algorithm)(groups, lr=1e-3, **kwargs)
    run(optimizer, params, [1])
    return optimizer, params


def refuses(algorithm, key, value, text):
    """Both groups get new values, of which that of the second group is invalid. No param is stepped. With a valid
    value the training continues as if nothing had happened."""
    (optimizer, params), (other, twins) = two_groups(algorithm), two_groups(algorithm)
    for each in (optimizer, other):
        each.param_groups[0]["lr"] = 0.25
    good = optimizer.param_groups[1][key]
    optimizer.param_groups[1][key] = value
    before = bits(params), state_bits(optimizer)
    for call in (lambda: run(optimizer, params, [2]), lambda: optimizer.save_checkpoint("/nowhere")):
        with pytest.raises(ValueError, match=text):
            call()
    assert (bits(params), state_bits(optimizer)) == before
    optimizer.param_groups[1][key] = good
    run(optimizer, params, [2, 3])
    run(other, twins, [2, 3])
    assert (bits(params), state_bits(optimizer)) == (bits(twins), state_bits(other))
    group = {**optimizer.param_groups[0], "params": [("third", Parameter(torch.ones(2)))], key: value}
    del group["param_names"]
    with pytest.raises(ValueError, match=text.replace("group 1", "group 2")):
        optimizer.add_param_group(group)
    assert len(optimizer.param_groups) == 2


@pytest.mark.parametrize(("algorithm", "key"), [(name, key) for name, keys in NUMBERS.items() for key in keys])
def test_a_hyperparameter_that_is_no_number_is_refused(algorithm, key):
    for value in NO_NUMBERS:
        refuses(algorithm, key, value, f"^param group 1 has {key}={told(value)}, expected a number$")


@pytest.mark.parametrize(
    ("algorithm", "key"), [("AdamW", "eps"), ("SGD", "momentum"), ("Adagrad", "lr_decay"), ("Signum", "momentum")]
)
def test_an_argument_that_is_several_numbers_is_refused(algorithm, key):
    value = torch.tensor([0.5, 0.25])
    with pytest.raises(ValueError, match=f"^Invalid {key}: {told(value)}, expected a number$"):
        getattr(hybridopt, algorithm)([Parameter(torch.ones(1))], lr=0.1, **{key: value})


@pytest.mark.parametrize("algorithm", ["AdamW", "Adam", "Lion"])
def test_betas_that_are_not_two_numbers_are_refused(algorithm):
    for value in NO_PAIRS:
        refuses(algorithm, "betas", value, f"^param group 1 has betas={told(value)}, expected two numbers$")


@pytest.mark.parametrize(
    ("algorithm", "flag"), [("SGD", "nesterov"), ("AdamW", "maximize"), ("Adagrad", "maximize")]
)
def test_a_flag_that_is_neither_true_nor_false_is_refused(algorithm, flag):
    for value in NO_FLAGS:
        refuses(algorithm, flag, value, f"^param group 1 has {flag}={told(value)}, expected True or False$")


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, -1.0, 1e39, torch.tensor(math.nan)])
@pytest.mark.parametrize(("algorithm", "key"), [(name, key) for name, keys in NUMBERS.items() for key in keys[:2]])
def test_a_number_out_of_range_names_the_group(algorithm, key, value):
    optimizer, params = two_groups(algorithm)
    before = bits(params)
    optimizer.param_groups[1][key] = value
    with pytest.raises(ValueError, match=rf"^param group 1: {key} is {float(value):g}, expected .*\b0\b".replace("+", r"\+")):
        run(optimizer, params, [2])
    assert bits(params) == before
    optimizer.param_groups[1][key] = 0.5
    run(optimizer, params, [2])


@pytest.mark.parametrize("switch", ["amsgrad", "capturable", "differentiable"])
@pytest.mark.parametrize("value", [True, "False", 2, math.nan, torch.tensor([True, False])])
def test_a_switch_of_torchs_that_is_not_supported_is_told_as_it_is(switch, value):
    optimizer, params = two_groups("AdamW")
    before = bits(params)
    optimizer.param_groups[1][switch] = value
    text = rf"does not support {switch}={told(value)} \(param group 1\): .*; set it to False"
    with pytest.raises(RuntimeError, match=text):
        run(optimizer, params, [2])
    assert bits(params) == before


def test_numbers_of_all_kinds_are_the_same_number():
    numpy = pytest.importorskip("numpy")
    results = []
    for number in (float, numpy.float64, torch.tensor, lambda value: torch.tensor([value], dtype=torch.float64)):
        params = [Parameter(torch.ones(3))]
        optimizer = hybridopt.AdamW(params)
        group = optimizer.param_groups[0]
        group["lr"], group["eps"] = number(0.25), number(0.125)
        group["betas"] = [number(0.5), number(0.75)]
        run(optimizer, params, [1, 2])
        group["betas"] = torch.tensor([0.5, 0.75])
        run(optimizer, params, [3])
        results.append((bits(params), state_bits(optimizer)))
    assert all(result == results[0] for result in results)


def test_a_hyperparameter_that_has_been_deleted_is_named():
    optimizer, params = two_groups("AdamW")
    del optimizer.param_groups[1]["betas"]
    with pytest.raises(ValueError, match="^param group 1 has no 'betas', expected two numbers$"):
        run(optimizer, params, [2])


ARGUMENTS = {**NUMBERS, "AdamW": ("lr", "betas", "eps", "weight_decay"), "Lion": ("lr", "betas", "weight_decay")}


@pytest.mark.parametrize(("algorithm", "key"), [(name, key) for name, keys in ARGUMENTS.items() for key in keys])
def test_an_argument_that_is_no_number_is_refused(algorithm, key):
    expected = "two numbers" if key == "betas" else "a number"
    for value in NO_PAIRS if key == "betas" else NO_NUMBERS:
        if isinstance(value, torch.Tensor):  # torch refuses tensors with its own error text
            continue
        with pytest.raises(ValueError, match=f"^Invalid {key}: {told(value)}, expected {expected}$"):
            getattr(hybridopt, algorithm)([Parameter(torch.ones(1))], **{key: value})


# ----------------------------------------------------------------------------------- params and names --


def named_three():
    params = [Parameter(torch.ones(3)) for _ in range(3)]
    optimizer = hybridopt.AdamW(list(zip("abc", params)))
    run(optimizer, params, [1])
    return optimizer, params


LENGTHS = (
    "^param group 0 has {} names in 'param_names' for {} parameters in 'params', expected one for each, in the same "
    r"order; change both lists alike, or call add_param_group\(\) for new parameters$"
)
EDITS = {
    "append": (lambda group: group["params"].append(Parameter(torch.ones(2))), ValueError, LENGTHS.format(3, 4)),
    "delete": (lambda group: group["params"].pop(0), ValueError, LENGTHS.format(3, 2)),
    "delete a name": (lambda group: group["param_names"].pop(), ValueError, LENGTHS.format(2, 3)),
    "clear": (lambda group: group["params"].clear(), ValueError, LENGTHS.format(3, 0)),
    "twice": (
        lambda group: group["params"].__setitem__(1, group["params"][0]),
        ValueError,
        "^parameter 'b' is twice in param group 0, before as 'a', and would be updated twice in each step; name it once$",
    ),
    "generator": (
        lambda group: group.update(params=iter(group["params"])),
        TypeError,
        "^param group 0 has params=<list_iterator object at .*>, expected a list of parameters$",
    ),
    "one param": (
        lambda group: group.update(params=group["params"][0]),
        TypeError,
        r"^param group 0 has params=Parameter containing: tensor\(.*, expected a list of parameters$",
    ),
    "no params": (lambda group: group.pop("params"), TypeError, "has params=None, expected a list of parameters"),
    "a name and a param": (
        lambda group: group["params"].__setitem__(2, ("d", Parameter(torch.ones(1)))),
        TypeError,
        r"^params\[2\] of param group 0 is \('d', .*\), expected a parameter; its name belongs into the group's 'param_names'$",
    ),
    "a result": (
        lambda group: group["params"].__setitem__(0, group["params"][0] * 2),
        ValueError,
        "^parameter 'a' of param group 0 is the result of an operation, for which autograd keeps no gradient; expected a",
    ),
    "a text of names": (
        lambda group: group.update(param_names="abc"),
        TypeError,
        "^param group 0 has param_names='abc', expected a list of names$",
    ),
    "a number as a name": (
        lambda group: (
            group.update(param_names=["a", 2, "c"]),
            group["params"].__setitem__(0, Parameter(torch.ones(1))),
        ),
        TypeError,
        r"^param_names\[1\] of param group 0 is 2, expected a string$",
    ),
}


@pytest.mark.parametrize("edit", EDITS)
def test_lists_that_cannot_be_are_refused_and_can_be_put_right(edit):
    change, error, text = EDITS[edit]
    (optimizer, params), (other, twins) = named_three(), named_three()
    group, good = optimizer.param_groups[0], {"params": list(params), "param_names": ["a", "b", "c"]}
    before = bits(params), state_bits(optimizer)
    change(group)
    is_seen_later = edit == "delete a name"  # a step that needs no names does not check them
    for call in (
        lambda: optimizer.save_checkpoint("/nowhere"),
        optimizer.hook_gradients,
        *(() if is_seen_later else (lambda: run(optimizer, params, [2]),)),
    ):
        with pytest.raises(error, match=text):
            call()
    group.update(good)
    assert (bits(params), state_bits(optimizer)) == before
    run(optimizer, params, [2, 3])
    run(other, twins, [2, 3])
    assert (bits(params), state_bits(optimizer)) == (bits(twins), state_bits(other))


def test_a_param_in_two_groups_names_both():
    optimizer, params = two_groups("AdamW")
    optimizer.param_groups[1]["params"][0] = params[0]
    text = "^parameter 'second' is in param groups 0 and 1, before as 'first', and would be updated twice in each step; name"
    with pytest.raises(ValueError, match=text):
        run(optimizer, params, [2])


@pytest.mark.parametrize("named", [True, False])
def test_params_are_taken_out_replaced_and_added_with_their_names(named):
    """As in torch, params that stay keep their state, and new params start without state."""
    params = [Parameter(torch.full((3,), float(each))) for each in range(4)]
    twins = clone(params)
    optimizer = hybridopt.AdamW(list(zip("abc", params)) if named else params[:3], lr=1e-2)
    other = torch.optim.AdamW(list(zip("abc", twins)) if named else twins[:3], lr=1e-2)
    for each, owned in ((optimizer, params), (other, twins)):
        group = each.param_groups[0]
        run(each, owned, [1])
        group["params"][1] = owned[3]
        run(each, owned, [2])
        group["params"].append(owned[1])
        if named:
            group["param_names"].append("d")
        run(each, owned, [3])
        del group["params"][0]
        if named:
            del group["param_names"][0]
        run(each, owned, [4])
    assert [(each - twin).abs().max() < 1e-6 for each, twin in zip(params, twins)] == [True] * 4
    assert [int(optimizer.state[each]["step"]) for each in params[1:]] == [
        int(other.state[each]["step"]) for each in twins[1:]
    ]
    names = [slot.name for slot in optimizer._engine.slots]
    assert names == (["b", "c", "d"] if named else [f"param_groups.0.{place}" for place in range(3)])


# ------------------------------------------------------------------- algorithms of their own --

CLASSES = {
    name.lower(): getattr(hybridopt, name) for name in ("AdamW", "Adam", "SGD", "Lion", "Adagrad", "Signum")
}
FIRST = {"adamw": "sgd"}  # of the optimizer; for the others adamw
MOMENTS = {
    "adamw": {"step", "exp_avg", "exp_avg_sq"},
    "adam": {"step", "exp_avg", "exp_avg_sq"},
    "sgd": {"momentum_buffer"},
    "lion": {"exp_avg"},
    "adagrad": {"step", "sum"},
    "signum": {"exp_avg"},
}
# What makes state, and differs from the defaults.
OWN = {
    "adamw": {"betas": (0.8, 0.95)},
    "adam": {"betas": (0.8, 0.95)},
    "sgd": {"momentum": 0.9, "nesterov": True},
    "lion": {},
    "adagrad": {"initial_accumulator_value": 0.5},
    "signum": {"momentum": 0.5},
}


def some_params(seed, *, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    return [Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in ((5, 7), (11,))]


def give_gradients(params, seed):
    generator = torch.Generator().manual_seed(seed)
    for param in params:
        param.grad = torch.randn(param.shape, generator=generator).to(param.dtype)


def steps_of(optimizer, params, count, seed=100):
    for number in range(count):
        give_gradients(params, seed + number)
        optimizer.step()


def equal(these, others):
    return all(torch.equal(this, other) for this, other in zip(these, others, strict=True))


def mixed(params, name, **options):
    """The second half of the params by the algorithm of that name."""
    half = len(params) // 2
    own = {"params": params[half:], "algorithm": name, **OWN[name]}
    return CLASSES[FIRST.get(name, "adamw")]([{"params": params[:half]}, own], lr=0.01, weight_decay=0.1, **options)


@pytest.mark.parametrize("name", CLASSES)
def test_the_defaults_are_those_of_the_class(name):
    signature = inspect.signature(CLASSES[name].__init__).parameters
    algorithm = next(value for value, row in abi.ALGORITHMS.items() if row.name.lower() == name)
    own = {key: row.default for key, row in signature.items() if key in OWN_DEFAULTS[algorithm]}
    assert own == OWN_DEFAULTS[algorithm]
    needed = {"betas" if read.startswith("beta") else read for read in abi.ALGORITHMS[algorithm].reads}
    assert needed - {"lr", "weight_decay", "maximize", "cautious_weight_decay"} == set(OWN_DEFAULTS[algorithm])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", CLASSES)
def test_one_optimizer_gives_the_bits_of_two(name, dtype):
    params = some_params(1, dtype=dtype) + some_params(2, dtype=dtype)
    first, second = some_params(1, dtype=dtype), some_params(2, dtype=dtype)
    one = mixed(params, name)
    others = [
        CLASSES[FIRST.get(name, "adamw")](first, lr=0.01, weight_decay=0.1),
        CLASSES[name](second, lr=0.01, weight_decay=0.1, **OWN[name]),
    ]
    before = [param.detach().clone() for param in params]
    for number in range(3):
        give_gradients(params, number)
        for param, own in zip(first + second, params, strict=True):
            param.grad = own.grad.clone()
        one.step()
        for other in others:
            other.step()
    assert equal(params, first + second)
    assert not any(torch.equal(param, old) for param, old in zip(params, before, strict=True))
    masters = {"master_param"} if dtype == torch.bfloat16 else set()
    for own, alone in zip(params[2:], second, strict=True):
        state = one.state[own]
        assert set(state) == MOMENTS[name] | masters
        assert all(torch.equal(state[key], others[1].state[alone][key]) for key in state)


def test_all_groups_have_one_norm_and_one_verdict():
    params, alike = some_params(1) + some_params(2), some_params(1) + some_params(2)
    one, other = mixed(params, "sgd", max_grad_norm=0.5), mixed(alike, "sgd")
    give_gradients(params, 3)
    for param, own in zip(alike, params, strict=True):
        param.grad = own.grad.clone()
    norm = torch.nn.utils.clip_grad_norm_(alike, 0.5)
    one.step()
    other.step()
    assert one.last_step().grad_norm == pytest.approx(norm.item(), rel=1e-6)
    assert all(torch.allclose(own, param, rtol=1e-6) for own, param in zip(params, alike, strict=True))
    before = [param.detach().clone() for param in params]
    give_gradients(params, 4)
    params[-1].grad[3] = float("inf")  # of the other group
    one.step()
    assert one.last_step().skipped and equal(params, before)


@pytest.mark.parametrize("name", CLASSES)
def test_a_checkpoint_has_all_groups(name, tmp_path):
    params = some_params(1) + some_params(2)
    optimizer = mixed(params, name)
    steps_of(optimizer, params, 2)
    optimizer.save_checkpoint(tmp_path / "saved")
    steps_of(optimizer, params, 2, seed=7)
    loaded = some_params(5) + some_params(6)
    other = mixed(loaded, name)
    other.load_checkpoint(tmp_path / "saved")
    steps_of(other, loaded, 2, seed=7)
    assert equal(params, loaded)
    # Where a group has another algorithm, its moments are others.
    unlike = "lion" if name != "lion" else "signum"
    third = mixed(some_params(5) + some_params(6), unlike)
    with pytest.raises(abi.CheckpointMismatchError, match=r"was saved by \w+, here its group is \w+ \(fresh_moments=True"):
        third.load_checkpoint(tmp_path / "saved")


@pytest.mark.parametrize("name", CLASSES)
def test_a_state_dict_has_all_groups(name):
    params = some_params(1) + some_params(2)
    optimizer = mixed(params, name)
    steps_of(optimizer, params, 2)
    loaded = [Parameter(param.detach().clone()) for param in params]
    other = mixed(loaded, name)
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for each, its in ((optimizer, params), (other, loaded)):
        steps_of(each, its, 2, seed=7)
    assert equal(params, loaded)
    assert other.param_groups[1]["algorithm"] == name
    foreign = mixed(loaded, "lion" if name != "lion" else "adagrad").state_dict()
    foreign["state"] = optimizer.state_dict()["state"]
    if name != "signum":  # which has the same moment as Lion
        with pytest.raises(ValueError, match="the state of parameter 2 in the loaded state_dict"):
            other_kind = mixed(loaded, "lion" if name != "lion" else "adagrad")
            other_kind.load_state_dict(foreign)


def test_params_of_another_algorithm_in_adagrad_have_no_sums_before_their_first_step():
    def made():
        params = some_params(1) + some_params(2)
        return params, hybridopt.Adagrad([{"params": params[:2]}, {"params": params[2:], "algorithm": "lion"}])

    (params, optimizer), (loaded, other) = made(), made()
    assert set(optimizer.state) == set(params[:2])
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for each, its in ((optimizer, params), (other, loaded)):
        steps_of(each, its, 2)
    assert equal(params, loaded)


def test_a_state_dict_of_torch_leaves_the_algorithms():
    params = some_params(1) + some_params(2)
    optimizer = mixed(params, "sgd")
    theirs = torch.optim.AdamW([{"params": params[:2]}, {"params": params[2:]}])
    optimizer.load_state_dict(theirs.state_dict())
    assert optimizer.param_groups[1]["algorithm"] == "sgd" and "algorithm" not in optimizer.param_groups[0]


def test_names_and_flags_are_checked():
    params = some_params(1)
    for bad in ("sgdm", 3, ""):
        with pytest.raises(ValueError, match=f"param group 0 has algorithm={bad!r}, expected one of 'adamw', 'adam'"):
            hybridopt.AdamW([{"params": params, "algorithm": bad}])
    with pytest.raises(ValueError, match="nesterov=True, but Lion does not use it"):
        hybridopt.AdamW([{"params": params, "algorithm": "lion", "nesterov": True}])
    # What only the optimizer's own algorithm has is off in the group.
    own = {"params": params[1:], "algorithm": "AdamW"}
    optimizer = hybridopt.SGD([{"params": params[:1]}, own], momentum=0.9, nesterov=True)
    assert optimizer.param_groups[1]["nesterov"] is False and optimizer.param_groups[1]["eps"] == 1e-8
    optimizer = hybridopt.AdamW(
        [{"params": params[:1]}, {"params": params[1:], "algorithm": "sgd"}], cautious_weight_decay=True
    )
    assert [group["cautious_weight_decay"] for group in optimizer.param_groups] == [True, False]
    optimizer.param_groups[1]["algorithm"] = "sdg"
    give_gradients(params, 1)
    with pytest.raises(ValueError, match="param group 1 has algorithm='sdg'"):
        optimizer.step()


def test_another_algorithm_later_begins_again():
    params = some_params(1) + some_params(2)
    optimizer = mixed(params, "lion")
    steps_of(optimizer, params, 2)
    optimizer.param_groups[1].update(algorithm="sgd", momentum=0.9, dampening=0, nesterov=False)
    fresh = [Parameter(param.detach().clone()) for param in params[2:]]
    alone = hybridopt.SGD(fresh, lr=0.01, weight_decay=0.1, momentum=0.9)
    give_gradients(params, 9)
    for param, own in zip(fresh, params[2:], strict=True):
        param.grad = own.grad.clone()
    optimizer.step()
    alone.step()
    assert equal(params[2:], fresh)
    assert set(optimizer.state[params[2]]) == {"momentum_buffer"}
    assert optimizer.state[params[0]]["step"] == 3


def test_the_plan_tells_the_kinds_of_all_groups():
    params = some_params(1) + some_params(2)
    plan = mixed(params, "sgd").plan()
    state = plan.state_bytes.host
    # Arrays of 35 and 11 numbers; each begins at a multiple of 256 bytes. The buffers follow the averages.
    assert (state["exp_avg"], state["exp_avg_sq"], state["momentum_buffer"]) == (512, 256 + 44, 256 + 44)


def test_adam_may_decouple_the_decay_of_some_groups():
    params, first, second = some_params(1) + some_params(2), some_params(1), some_params(2)
    groups = [{"params": params[:2]}, {"params": params[2:], "decoupled_weight_decay": True}]
    try:
        one = hybridopt.Adam(groups, weight_decay=0.1)
        others = [hybridopt.Adam(first, weight_decay=0.1), hybridopt.AdamW(second, weight_decay=0.1)]
    except TypeError:
        pytest.skip("torch before 2.7 has no such argument")
    for number in range(2):
        give_gradients(params, number)
        for param, own in zip(first + second, params, strict=True):
            param.grad = own.grad.clone()
        for optimizer in (one, *others):
            optimizer.step()
    assert equal(params, first + second)


DECOUPLES = "decoupled_weight_decay" in torch.optim.AdamW([Parameter(torch.ones(1))]).defaults


@pytest.mark.skipif(not DECOUPLES, reason="torch before 2.7 has no such key")
@pytest.mark.parametrize("is_later", [False, True])
def test_a_group_of_adamw_may_couple_its_decay_as_torchs_may(is_later):
    params, twins = some_params(1), some_params(1)
    coupled = {"decoupled_weight_decay": False}
    made = []
    for cls, those in ((hybridopt.AdamW, params), (hybridopt.Adam, twins)):
        made.append(cls([{"params": those, **({} if is_later else coupled)}], weight_decay=0.1))
        if is_later:
            made[-1].param_groups[0].update(coupled)
    for number in range(3):
        give_gradients(params, number)
        for twin, own in zip(twins, params, strict=True):
            twin.grad = own.grad.clone()
        for optimizer in made:
            optimizer.step()
    assert equal(params, twins)


@pytest.mark.skipif(not DECOUPLES, reason="torch before 2.7 has no such key")
@pytest.mark.parametrize("value", NO_FLAGS, ids=repr)
def test_a_decoupling_that_is_neither_true_nor_false_is_refused(value):
    for algorithm in ("Adam", "AdamW"):
        text = f"^param group 1 has decoupled_weight_decay={told(value)}, expected True or False$"
        refuses(algorithm, "decoupled_weight_decay", value, text)
    with pytest.raises(ValueError, match=f"^Invalid decoupled_weight_decay: {told(value)}, expected True or False$"):
        hybridopt.Adam([Parameter(torch.ones(1))], decoupled_weight_decay=value)
