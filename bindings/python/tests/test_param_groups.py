"""Programs write into param groups after the optimizer has been made. The next call refuses a value or a list that
is invalid, and changes nothing."""

import math

import pytest
import torch
from torch.nn import Parameter

import hybridopt
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
