"""The bodies of PyTorch's own optimizer tests, with PyTorch's generators of inputs, errors and schedulers
(torch.testing._internal.common_optimizers). docs/PYTORCH.md lists the tests that apply."""

import copy
import io
import itertools

import pytest
import torch
from torch.nn import Parameter
from torch.optim import lr_scheduler
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.testing._internal.common_optimizers import (
    OptimizerErrorEnum,
    OptimizerInfo,
    OptimizerInput,
    _get_optim_inputs_including_global_cliquey_kwargs,
    optim_db,
)

import hybridopt
from models import bits


def registered():
    """torch's entries with the package's classes in place of torch's, and an entry for each class that torch does
    not have."""
    classes = (hybridopt.AdamW, hybridopt.Adam, hybridopt.SGD, hybridopt.Adagrad)
    ours = {cls.__name__: cls for cls in classes}
    infos = []
    for info in optim_db:
        if info.optim_cls.__name__ in ours and info.optim_cls.__module__.startswith("torch"):
            own = copy.copy(info)
            own.optim_cls = ours[info.optim_cls.__name__]
            own.supported_impls = tuple(i for i in info.supported_impls if i != "differentiable")
            own.supports_complex = own.supports_sparse = False
            own.supports_multiple_devices = False
            infos.append(own)
    infos.extend(
        OptimizerInfo(
            cls,
            optim_inputs_func=lambda device, dtype=None: [
                OptimizerInput(params=None, kwargs={}, desc="default"),
                OptimizerInput(params=None, kwargs={"lr": 0.01}, desc="non-default lr"),
                OptimizerInput(params=None, kwargs={"lr": torch.tensor(0.001)}, desc="Tensor lr"),
                OptimizerInput(
                    params=None, kwargs={"weight_decay": 0.1, "maximize": True}, desc="maximize"
                ),
            ],
            optim_error_inputs_func=lambda device, dtype: [],
            supported_impls=("foreach", "fused"),
            not_og_supported_flags=("maximize",),
            supports_complex=False,
        )
        for cls in (hybridopt.Lion, hybridopt.Signum)
    )
    return infos


INFOS = registered()
optim_db.extend(INFOS)  # registers them like any other optimizer


def inputs_of(info):
    everything = _get_optim_inputs_including_global_cliquey_kwargs("cpu", torch.float32, info)
    return [each for each in everything if not each.kwargs.get("amsgrad")]


CASES = [(info, each) for info in INFOS for each in inputs_of(info)]
every_optimizer = pytest.mark.parametrize("info", INFOS, ids=lambda info: info.name)
every_case = pytest.mark.parametrize(
    ("info", "case"), CASES, ids=[f"{info.name}: {case.desc}" for info, case in CASES]
)


def kwargs_of(case):
    return copy.deepcopy(case.kwargs)


def problem(contiguous=True):
    """Returns a weight, a bias, and a closure for |weight input + bias|^2."""
    if contiguous:
        weight, bias = Parameter(torch.randn(10, 5)), Parameter(torch.randn(10))
    else:
        weight = Parameter(torch.randn(10, 5, 2)[..., 0])
        bias = Parameter(torch.randn(10, 2)[..., 0])
    value = torch.randn(5)

    def loss():
        return (weight.mv(value) + bias).pow(2).sum()

    return weight, bias, loss


def closure_of(optimizer, loss):
    def closure():
        optimizer.zero_grad()
        value = loss()
        value.backward()
        return value

    return closure


def trained(info, case, steps=6, params=None):
    """An optimizer after some steps, its params and closure."""
    weight, bias, loss = problem()
    optimizer = info.optim_cls([weight, bias], **kwargs_of(case))
    closure = closure_of(optimizer, loss)
    for _ in range(steps):
        optimizer.step(closure)
    return optimizer, [weight, bias], closure


def test_all_optimizers_are_registered():
    names = sorted(info.name for info in INFOS)
    assert names == ["Adagrad", "Adam", "AdamW", "Lion", "SGD", "Signum"]
    assert len(CASES) > 50


# ---------------------------------------------------------------------------------------- errors --


@every_optimizer
def test_errors(info):
    errors = info.optim_error_inputs_func("cpu", torch.float32)
    assert errors or info.name in ("Lion", "Signum")
    for error in errors:
        given = error.optimizer_error_input
        params = given.params
        if params is None:
            params = [Parameter(torch.randn(1))]
        assert error.error_on == OptimizerErrorEnum.CONSTRUCTION_ERROR
        if issubclass(error.error_type, Warning):
            # torch warns if a param is twice in a group, and announces that this will become an error.
            twice = pytest.raises(ValueError, match="is twice in param group 0")
            with pytest.warns(error.error_type, match=error.error_regex), twice:
                info.optim_cls(params, **given.kwargs)
        else:
            with pytest.raises(error.error_type, match=error.error_regex):
                info.optim_cls(params, **given.kwargs)


@pytest.mark.parametrize(
    ("cls", "names"),
    [
        (hybridopt.Lion, {"lr", "betas", "weight_decay"}),
        (hybridopt.Signum, {"lr", "weight_decay"}),
    ],
    ids=["Lion", "Signum"],
)
def test_what_torch_has_not_refuses_what_adam_does(cls, names):
    param = Parameter(torch.randn(1))
    for error in next(i for i in INFOS if i.name == "Adam").optim_error_inputs_func("cpu", None):
        kwargs = error.optimizer_error_input.kwargs
        if set(kwargs) <= names and "betas must" not in error.error_regex:
            params = error.optimizer_error_input.params or [param]
            if isinstance(params, torch.Tensor) or not issubclass(error.error_type, Warning):
                with pytest.raises(error.error_type, match=error.error_regex):
                    cls(params, **kwargs)


@pytest.mark.parametrize("option", ["amsgrad", "capturable", "differentiable"])
@pytest.mark.parametrize("cls", [hybridopt.Adam, hybridopt.AdamW], ids=["Adam", "AdamW"])
def test_options_that_do_not_apply_are_refused(cls, option):
    param = Parameter(torch.randn(1))
    with pytest.raises(RuntimeError, match=f"{cls.__name__} does not support {option}=True"):
        cls([param], **{option: True})
    optimizer = cls([param])
    with pytest.raises(RuntimeError, match=rf"{option}=True .param group 1."):
        optimizer.add_param_group({"params": [Parameter(torch.randn(1))], option: True})
    assert len(optimizer.param_groups) == 1


@every_optimizer
def test_sparse_gradients_are_refused(info):
    embedding = torch.nn.Embedding(4, 3, sparse=True)
    optimizer = info.optim_cls(embedding.parameters())
    embedding(torch.tensor([1])).sum().backward()
    before = embedding.weight.clone()
    with pytest.raises(RuntimeError, match="does not support sparse gradients"):
        optimizer.step()
    assert torch.equal(embedding.weight, before)


@every_optimizer
@pytest.mark.parametrize("dtype", [torch.complex64, torch.float64])
def test_dtypes_without_a_kernel_are_refused(info, dtype):
    param = Parameter(torch.ones(2, dtype=dtype))
    with pytest.raises(TypeError, match="'param_groups.0.0' is torch.*, expected torch.float32"):
        info.optim_cls([param])


# ------------------------------------------------------------------------------------- directions --


def train(optimizer, loss, scheduler_constructors):
    """Makes twenty steps. Returns the loss before them."""
    schedulers = [constructor(optimizer) for constructor in scheduler_constructors]
    closure = closure_of(optimizer, loss)
    initial = closure().item()
    for _ in range(20):
        value = optimizer.step(closure)
        for scheduler in schedulers:
            if isinstance(scheduler, lr_scheduler.ReduceLROnPlateau):
                scheduler.step(value.detach())
            else:
                scheduler.step()
    return initial


@every_case
@pytest.mark.parametrize("contiguous", [True, False], ids=["dense", "strided"])
@pytest.mark.parametrize("with_lrsched", [False, True], ids=["", "schedulers"])
def test_forloop_goes_right_direction(info, case, contiguous, with_lrsched):
    if with_lrsched:
        constructors = info.scheduler_inputs
    else:
        constructors = [[]]
    for schedulers in constructors:
        weight, bias, loss = problem(contiguous)
        optimizer = info.optim_cls([weight, bias], **kwargs_of(case))
        initial = train(optimizer, loss, schedulers)
        if optimizer.param_groups[0]["maximize"]:
            assert loss().item() > initial
        else:
            assert loss().item() < initial


@every_optimizer
def test_param_group_with_lrscheduler_goes_right_direction(info):
    for schedulers in info.scheduler_inputs:
        weight, bias, loss = problem()
        optimizer = info.optim_cls([{"params": [weight]}, {"params": [bias], "lr": 0.01}])
        initial = train(optimizer, loss, schedulers)
        assert loss().item() < initial


@every_optimizer
def test_param_groups_lr(info):
    for case in inputs_of(info):
        if case.kwargs.get("maximize"):
            continue
        weight, bias, loss = problem()
        irrelevant = Parameter(torch.randn(2))
        kwargs = {**kwargs_of(case), "lr": 0.0}
        optimizer = info.optim_cls(
            [{"params": [weight], "lr": 0.01}, {"params": [bias]}, {"params": [irrelevant]}],
            **kwargs,
        )
        start, bias_before, before = loss().item(), bias.clone(), irrelevant.clone()
        closure = closure_of(optimizer, loss)
        for _ in range(20):
            optimizer.step(closure)
            irrelevant.grad = torch.rand_like(irrelevant)
        assert loss().item() < start
        assert torch.equal(bias, bias_before) and torch.equal(irrelevant, before)


@every_optimizer
def test_param_groups_weight_decay(info):
    for case in inputs_of(info):
        if case.kwargs.get("maximize"):
            continue
        kwargs = {k: v for k, v in kwargs_of(case).items() if k != "weight_decay"}
        start = torch.randn(10)
        decayed, kept = Parameter(start.clone()), Parameter(start.clone())
        optimizer = info.optim_cls(
            [{"params": [decayed], "weight_decay": 0.9}, {"params": [kept]}],
            **{**kwargs, "weight_decay": 0.0},
        )
        for param in (decayed, kept):
            param.grad = torch.zeros(10)
        for _ in range(5):
            optimizer.step()
        assert torch.equal(kept, start)
        assert (decayed.abs() < start.abs()).all()


# ----------------------------------------------------------------------------- tensor lr, no-ops --


def schedulers_take(shape):
    """True if torch's own optimizer has a scheduler that takes a learning rate of that shape."""
    optimizer = torch.optim.SGD([torch.ones(1)], lr=torch.full(shape, 0.1))
    try:
        lr_scheduler.StepLR(optimizer, step_size=1)
    except RuntimeError:
        return False
    return True


@every_optimizer
@pytest.mark.parametrize("shape", [(), (1,), (1, 1)])
def test_tensor_lr(info, shape):
    if not schedulers_take(shape):
        pytest.skip(f"schedulers of this torch take no learning rate of shape {shape}")
    for case in inputs_of(info):
        kwargs = kwargs_of(case)
        lr = float(kwargs.pop("lr", 0.01))
        if kwargs.get("foreach"):
            continue  # torch's Adam refuses this combination
        weight, bias, loss = problem()
        twin_weight, twin_bias = copy.deepcopy((weight, bias))
        optimizer = info.optim_cls([weight, bias], lr=torch.full(shape, lr), **kwargs)
        twin = info.optim_cls([twin_weight, twin_bias], lr=float(torch.tensor(lr)), **kwargs)
        scheduler = lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
        twin_scheduler = lr_scheduler.StepLR(twin, step_size=1, gamma=0.5)
        for _ in range(4):
            closure_of(optimizer, loss)()
            twin_weight.grad, twin_bias.grad = weight.grad, bias.grad
            optimizer.step()
            twin.step()
            scheduler.step()
            twin_scheduler.step()
        assert bits([weight, bias]) == bits([twin_weight, twin_bias])


@every_case
def test_step_is_noop_when_params_have_no_grad(info, case):
    params = [Parameter(torch.randn(2, 3)) for _ in range(2)]
    before = copy.deepcopy(params)
    optimizer = info.optim_cls(params, **kwargs_of(case))
    optimizer.step()
    assert bits(params) == bits(before)


@every_case
def test_step_is_noop_for_zero_grads(info, case):
    param = Parameter(torch.randn(5, 1))
    before = copy.deepcopy([param])
    kwargs = {**kwargs_of(case), "weight_decay": 0}
    optimizer = info.optim_cls([param], **kwargs)
    param.grad = torch.zeros_like(param)
    for _ in range(2):
        optimizer.step()
    assert bits([param]) == bits(before)


@every_case
def test_empty_params(info, case):
    empty, full = Parameter(torch.empty(0, 3)), Parameter(torch.randn(2))
    optimizer = info.optim_cls([empty, full], **kwargs_of(case))
    for _ in range(2):
        empty.grad, full.grad = torch.empty(0, 3), torch.ones(2)
        optimizer.step()
    for entry in optimizer.state.values():
        assert entry.get("step", 2) == 2
    shapes = {key: value.shape for key, value in optimizer.state.get(empty, {}).items()}
    assert all(shape == ((), (0, 3))[key != "step"] for key, shape in shapes.items())


# ----------------------------------------------------------------- foreach and fused change nothing --


@every_optimizer
def test_foreach_and_fused_match_forloop(info):
    for case in info.optim_inputs_func("cpu"):
        if case.kwargs.get("amsgrad"):
            continue
        results = []
        for flags in [{}, *({impl: True} for impl in info.supported_impls)]:
            if "foreach" in flags and isinstance(case.kwargs.get("lr"), torch.Tensor):
                continue
            torch.manual_seed(1)
            weight, bias, loss = problem()
            optimizer = info.optim_cls([weight, bias], **kwargs_of(case), **flags)
            for _ in range(5):
                optimizer.step(closure_of(optimizer, loss))
            results.append(bits([weight, bias]))
        assert all(result == results[0] for result in results)
        assert len(results) >= 1


# ------------------------------------------------------------------------------------- state_dict --


@every_case
def test_state_dict_deterministic(info, case):
    optimizer, params, closure = trained(info, case)
    copied_params = copy.deepcopy(params)
    fresh = info.optim_cls(copied_params, **kwargs_of(case))
    fresh.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for _ in range(3):
        closure()
        for param, copied in zip(params, copied_params):
            copied.grad = param.grad.clone()
        optimizer.step()
        fresh.step()
        assert bits(params) == bits(copied_params)
    # With the params in another order the state_dict differs.
    ours, theirs = optimizer.state_dict(), fresh.state_dict()
    assert ours["param_groups"] == theirs["param_groups"]
    for index, entry in ours["state"].items():
        for key, value in entry.items():
            assert torch.equal(value, theirs["state"][index][key])


@every_case
def test_can_load_older_state_dict(info, case):
    for flag in info.not_og_supported_flags:
        if flag == "capturable" and not info.has_capturable_arg:
            continue
        optimizer, params, closure = trained(info, case)
        older = copy.deepcopy(optimizer.state_dict())
        for group in older["param_groups"]:
            group.pop(flag, None)
        optimizer.load_state_dict(older)
        optimizer.step(closure)
        assert flag in optimizer.param_groups[0]


@every_case
def test_load_nontensor_step(info, case):
    optimizer, params, closure = trained(info, case)
    saved = copy.deepcopy(optimizer.state_dict())
    for entry in saved["state"].values():
        if "step" in entry:
            entry["step"] = entry["step"].item()
    optimizer.load_state_dict(saved)
    for entry in optimizer.state.values():
        assert "step" not in entry or torch.is_tensor(entry["step"])
    optimizer.step(closure)
    assert all(entry.get("step", 7) == 7 for entry in optimizer.state.values())


@every_case
@pytest.mark.parametrize("default", [torch.float64, torch.float16])
def test_set_default_dtype_works_with_foreach(info, case, default):
    if "foreach" not in info.supported_impls:
        pytest.fail(f"{info.name} takes no foreach")
    torch.set_default_dtype(default)
    try:
        params = [Parameter(torch.rand(2, 3, dtype=torch.float32)) for _ in range(2)]
        optimizer = info.optim_cls(params, **{**kwargs_of(case), "foreach": True, "fused": False})
        for param in params:
            param.grad = torch.rand_like(param)
        for _ in range(5):
            optimizer.step()
        expected = torch.float64 if default == torch.float64 else torch.float32
        for entry in optimizer.state.values():
            assert "step" not in entry or (entry["step"].dtype == expected and entry["step"] == 5)
            moments = [value for key, value in entry.items() if key != "step"]
            assert all(value.dtype == torch.float32 for value in moments)
    finally:
        torch.set_default_dtype(torch.float32)


@every_case
def test_save_load_equality_with_weights_only(info, case):
    optimizer, _, _ = trained(info, case)
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    loaded = torch.load(file, weights_only=True)
    saved = optimizer.state_dict()
    assert loaded["param_groups"] == saved["param_groups"]
    for index, entry in saved["state"].items():
        assert all(torch.equal(value, loaded["state"][index][key]) for key, value in entry.items())


@every_optimizer
@pytest.mark.parametrize(("saved_named", "loads_named"), list(itertools.product([True, False], repeat=2)))
def test_can_load_from_to_named_state_dict(info, saved_named, loads_named):
    for case in inputs_of(info):
        weight, bias, loss = problem()
        named = [("weight", weight), ("bias", bias)]

        def optimizer_of(with_names):
            return info.optim_cls(named if with_names else [weight, bias], **kwargs_of(case))

        optimizer = optimizer_of(saved_named)
        for _ in range(2):
            optimizer.step(closure_of(optimizer, loss))
        other = optimizer_of(loads_named)
        other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        other.step(closure_of(other, loss))
        names = other.param_groups[0].get("param_names")
        assert names == (["weight", "bias"] if saved_named or loads_named else None)


@every_case
def test_deepcopy(info, case):
    optimizer, params, closure = trained(info, case)
    (twin, twin_params) = copy.deepcopy((optimizer, params))
    closure()
    for param, copied in zip(params, twin_params):
        copied.grad = param.grad.clone()
    optimizer.step()
    twin.step()
    assert bits(params) == bits(twin_params)


@every_optimizer
def test_non_empty_state(info):
    for case in inputs_of(info):
        optimizer, _, _ = trained(info, case, steps=1)
        if info.name == "SGD" and not case.kwargs.get("momentum"):
            assert len(optimizer.state) == 0  # as with torch.optim.SGD
        else:
            assert len(optimizer.state) == 2 and all(optimizer.state.values())


# ------------------------------------------------------------------------------------------ hooks --


@every_optimizer
def test_step_hooks(info):
    case = inputs_of(info)[0]
    optimizer, params, closure = trained(info, case)
    calls = []
    pre = optimizer.register_step_pre_hook(lambda opt, args, kwargs: calls.append("pre"))
    post = optimizer.register_step_post_hook(lambda opt, args, kwargs: calls.append("post"))
    first = register_optimizer_step_pre_hook(
        lambda opt, args, kwargs: calls.append("global pre")
    )
    last = register_optimizer_step_post_hook(
        lambda opt, args, kwargs: calls.append("global post")
    )
    optimizer.step(closure)
    assert calls == ["global pre", "pre", "post", "global post"]
    for handle in (pre, post, first, last):
        handle.remove()
    optimizer.step(closure)
    assert len(calls) == 4


@every_optimizer
def test_step_pre_hook_changes_the_arguments(info):
    optimizer, params, closure = trained(info, inputs_of(info)[0])
    optimizer.register_step_pre_hook(lambda opt, args, kwargs: ((opt, closure), {}))
    assert isinstance(optimizer.step(), torch.Tensor)


@every_optimizer
def test_state_dict_hooks(info):
    optimizer, _, _ = trained(info, inputs_of(info)[0])
    calls = []
    optimizer.register_state_dict_pre_hook(lambda opt: calls.append("pre"))

    def post(opt, state_dict):
        calls.append("post")
        return {**state_dict, "extra": 1}

    optimizer.register_state_dict_post_hook(post)
    assert optimizer.state_dict()["extra"] == 1
    assert calls == ["pre", "post"]


@every_optimizer
def test_load_state_dict_hooks(info):
    optimizer, _, _ = trained(info, inputs_of(info)[0])
    calls = []

    def halve(opt, state_dict):
        calls.append("second")
        changed = copy.deepcopy(state_dict)
        changed["param_groups"][0]["lr"] *= 0.5
        return changed

    optimizer.register_load_state_dict_pre_hook(halve)
    optimizer.register_load_state_dict_pre_hook(lambda *_: calls.append("first"), prepend=True)
    optimizer.register_load_state_dict_post_hook(lambda opt: calls.append("post"))
    lr = optimizer.param_groups[0]["lr"]
    optimizer.load_state_dict(optimizer.state_dict())
    assert calls == ["first", "second", "post"]
    assert optimizer.param_groups[0]["lr"] == lr * 0.5


# ------------------------------------------------------------------------------------- GradScaler --


@every_optimizer
def test_does_not_step_if_found_inf(info):
    for case in inputs_of(info):
        param = Parameter(torch.randn(3))
        optimizer = info.optim_cls([param], **kwargs_of(case))
        param.grad = torch.ones(3)
        optimizer.grad_scale, optimizer.found_inf = None, torch.tensor(1.0)
        before = param.clone()
        optimizer.step()
        assert torch.equal(param, before)
        # torch's Adagrad has state already before its first step.
        assert len(optimizer.state) == (info.name == "Adagrad")
        assert all(entry["step"] == 0 for entry in optimizer.state.values())
        optimizer.found_inf = torch.tensor(0.0)
        optimizer.step()
        assert not torch.equal(param, before)
        del optimizer.grad_scale, optimizer.found_inf


@every_optimizer
@pytest.mark.parametrize("unscale", [False, True])
def test_grad_scaling(info, unscale):
    for case in inputs_of(info):
        weight, bias, loss = problem()
        twin_weight, twin_bias = copy.deepcopy((weight, bias))
        optimizer = info.optim_cls([weight, bias], **kwargs_of(case))
        twin = info.optim_cls([twin_weight, twin_bias], **kwargs_of(case))
        scaler = torch.amp.GradScaler("cpu", init_scale=128.0, growth_interval=2)
        for step in range(5):
            optimizer.zero_grad()
            value = loss()
            scaler.scale(value).backward()
            scale = scaler.get_scale()
            twin_weight.grad = weight.grad / scale
            twin_bias.grad = bias.grad / scale
            if step == 3:
                weight.grad[0, 0] = torch.inf
            if unscale:
                scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
            if step == 3:
                assert scaler.get_scale() == scale / 2
            else:
                twin.step()
            assert bits([weight, bias]) == bits([twin_weight, twin_bias])


# ------------------------------------------------------------------------------------------ other --


@every_optimizer
def test_can_be_printed(info):
    optimizer, _, _ = trained(info, inputs_of(info)[0])
    assert repr(optimizer).startswith(f"{info.name} (\nParameter Group 0\n")


def schedulers():
    """Every lr_scheduler with arguments that make it change something."""
    one = {"step_size": 2, "gamma": 0.5}
    return {
        "LambdaLR": lambda o: lr_scheduler.LambdaLR(o, lambda epoch: 0.9**epoch),
        "MultiplicativeLR": lambda o: lr_scheduler.MultiplicativeLR(o, lambda epoch: 0.9),
        "StepLR": lambda o: lr_scheduler.StepLR(o, **one),
        "MultiStepLR": lambda o: lr_scheduler.MultiStepLR(o, [2, 4]),
        "ConstantLR": lambda o: lr_scheduler.ConstantLR(o, total_iters=3),
        "LinearLR": lambda o: lr_scheduler.LinearLR(o, total_iters=4),
        "ExponentialLR": lambda o: lr_scheduler.ExponentialLR(o, 0.8),
        "SequentialLR": lambda o: lr_scheduler.SequentialLR(
            o, [lr_scheduler.ConstantLR(o), lr_scheduler.ExponentialLR(o, 0.8)], milestones=[3]
        ),
        "PolynomialLR": lambda o: lr_scheduler.PolynomialLR(o, total_iters=5),
        "CosineAnnealingLR": lambda o: lr_scheduler.CosineAnnealingLR(o, T_max=5),
        "ChainedScheduler": lambda o: lr_scheduler.ChainedScheduler(
            [lr_scheduler.ConstantLR(o), lr_scheduler.ExponentialLR(o, 0.8)]
        ),
        "ReduceLROnPlateau": lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=0),
        "CyclicLR": lambda o: lr_scheduler.CyclicLR(o, 1e-3, 1e-2, step_size_up=3),
        "CosineAnnealingWarmRestarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, T_0=3),
        "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(o, max_lr=1e-2, total_steps=10),
    }


def test_every_scheduler_is_tried():
    known = set(lr_scheduler.__all__) - {"LRScheduler"}
    assert known == set(schedulers())


# Older versions of torch warn of a call that SequentialLR makes itself.
@pytest.mark.filterwarnings("ignore:The epoch parameter in `scheduler.step:UserWarning")
@pytest.mark.parametrize("name", schedulers())
@pytest.mark.parametrize("optimizer_name", ["AdamW", "SGD"])
def test_schedulers_reach_the_step(name, optimizer_name):
    """Compares with torch's optimizer under the same schedule: same updates. OneCycleLR and CyclicLR change betas or
    momentum too."""
    kwargs = {"lr": 1e-2, **({"momentum": 0.8} if optimizer_name == "SGD" else {})}
    weight, bias, loss = problem()
    twin_weight, twin_bias = copy.deepcopy((weight, bias))
    optimizer = getattr(hybridopt, optimizer_name)([weight, bias], **kwargs)
    twin = getattr(torch.optim, optimizer_name)([twin_weight, twin_bias], **kwargs)
    pair = [(optimizer, schedulers()[name](optimizer)), (twin, schedulers()[name](twin))]
    start = weight.clone()
    for _ in range(8):
        closure_of(optimizer, loss)()
        twin_weight.grad, twin_bias.grad = weight.grad, bias.grad
        for each, scheduler in pair:
            each.step()
            if name == "ReduceLROnPlateau":
                scheduler.step(1.0)
            else:
                scheduler.step()
        assert optimizer.param_groups[0]["lr"] == twin.param_groups[0]["lr"]
    assert len({group["lr"] for group in optimizer.param_groups}) == 1
    update = (twin_weight - start).norm()
    assert (weight - twin_weight).norm() < 2e-5 * update  # of fp32 weights of size 1
