"""Muon: matrices beside AdamW's groups in one optimizer. The library's own tests hold its bits; these compare with
torch.optim.Muon and with AdamW, and check the groups, their errors and their state."""

import copy
import hashlib
import inspect
import io
import math
import os
import re
import sys
import types
import weakref

import pytest
import ranks
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn import Parameter

import hybridopt
from hybridopt import abi
from hybridopt.params.hyperparameters import OWN_DEFAULTS
from hybridopt.ranks import homes
from models import bits, clone, run, state_bits, told

with_torchs = pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="this torch has no Muon")
SHAPES = ((12, 7), (7, 12), (9, 9), (1, 5))


class Predictor(nn.Module):
    """Predicts the next of 32 numbers from the last 8, by matrices that are tall, wide and square."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(32, 24)
        self.mix, self.up, self.down = nn.Linear(24, 24), nn.Linear(24, 64), nn.Linear(64, 24)
        self.norm, self.head = nn.LayerNorm(24), nn.Linear(24, 32)

    def forward(self, batch):
        hidden = self.embedding(batch[:, :-1]).cumsum(1)
        hidden = hidden + torch.tanh(self.mix(hidden))
        hidden = self.norm(hidden + self.down(torch.tanh(self.up(hidden))))
        return nn.functional.cross_entropy(self.head(hidden).flatten(0, 1), batch[:, 1:].flatten())


def batch_of(seed):
    begin = torch.randint(32, (8, 1), generator=torch.Generator().manual_seed(seed))
    return (begin + 5 * torch.arange(9)) % 32


def steps_of(count):
    """More steps in a long run."""
    return count * round(max(1.0, float(os.environ.get("HYBRIDOPT_TEST_SCALE", "1"))))


def matrices(dtype=torch.float32):
    generator = torch.Generator().manual_seed(3)
    return [Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in SHAPES]


def mixed(params, **options):
    """Matrices by Muon, the last two params by AdamW."""
    adamw = {"params": params[-2:], "algorithm": "adamw", "lr": 0.02, "betas": (0.8, 0.9), "weight_decay": 0.2}
    return hybridopt.Muon([{"params": params[:-2]}, adamw], lr=0.05, **options)


def with_vectors(dtype=torch.float32):
    return matrices(dtype) + [Parameter(torch.ones(11, dtype=dtype)), Parameter(torch.ones(2, 3, 4, dtype=dtype))]


# --------------------------------------------------------------------------------- the updates --


def in_float64(matrix, gradients, adjust_lr_fn, nesterov, lr, weight_decay, ns_steps=5, update_rms=0.2):
    """The param after steps by torch's formulas in float64."""
    param, momentum = matrix.detach().double(), torch.zeros_like(matrix).double()
    for gradient in gradients:
        gradient = gradient.double()
        momentum = 0.95 * momentum + 0.05 * gradient
        update = 0.05 * gradient + 0.95 * momentum if nesterov else momentum
        rows, cols = update.shape
        update = update.T if rows > cols else update
        update = update / update.norm()
        for _ in range(ns_steps):
            gram = update @ update.T
            update = 3.4445 * update + (-4.775 * gram + 2.0315 * gram @ gram) @ update
        by_rms = adjust_lr_fn == "match_rms_adamw"
        scale = update_rms * max(rows, cols) ** 0.5 if by_rms else max(1, rows / cols) ** 0.5
        param = param * (1 - lr * weight_decay) - lr * scale * (update.T if rows > cols else update)
    return param


@with_torchs
@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize("adjust_lr_fn", [None, "original", "match_rms_adamw"])
def test_updates_are_those_of_torch_as_far_as_products_in_bf16_tell(adjust_lr_fn, nesterov):
    """Gradients of 20 steps (200 in a long run) of a model that our Muon trains go to torch's Muon and to its formulas in
    float64 too. Both
    round products to bf16, so an update may be off by 5 % (docs/NUMERICS.md), and the sum of several by less, because
    their errors differ in sign: 0.5 to 1.4 % here. They round at the same places, so they differ from each other by
    0.1 %, where sums in another order round differently. Without Newton-Schulz params would be off by more than a third."""
    torch.manual_seed(1)
    model = Predictor()
    layers = [layer.weight for layer in (model.mix, model.up, model.down)]
    start = [layer.detach().clone() for layer in layers]
    arguments = {"lr": 0.01, "weight_decay": 0.1, "nesterov": nesterov, "adjust_lr_fn": adjust_lr_fn}
    ours = hybridopt.Muon(hybridopt.muon_groups(model, adamw={"lr": 0.01}), **arguments)
    theirs = [Parameter(layer.detach().clone()) for layer in layers]
    torchs = torch.optim.Muon(theirs, **arguments)
    gradients, losses = [], []
    for seed in range(steps_of(20)):
        loss = model(batch_of(seed))
        losses.append(loss.item())
        ours.zero_grad()
        loss.backward()
        gradients.append([layer.grad.clone() for layer in layers])
        for param, gradient in zip(theirs, gradients[-1]):
            param.grad = gradient.clone()
        ours.step()
        torchs.step()
    assert losses[-1] < losses[0] - 0.5
    for index, (own, other, before) in enumerate(zip(layers, theirs, start)):
        own_gradients = [each[index] for each in gradients]
        exact = in_float64(before, own_gradients, adjust_lr_fn, nesterov, 0.01, 0.1)
        skipping = in_float64(before, own_gradients, adjust_lr_fn, nesterov, 0.01, 0.1, ns_steps=0)
        moved = (exact - before).norm()
        ours_off, torchs_off = ((param - exact).norm() / moved for param in (own, other))
        assert ours_off < 0.03 and ours_off < 1.5 * torchs_off, (ours_off, torchs_off)
        assert (own - other).norm() < 0.01 * moved
        assert (skipping - exact).norm() > 0.33 * moved


def rms_groups(params):
    """The scale of the optimizer, which is 0.2, and those of groups; AdamW has none."""
    adamw = {"params": params[-2:], "algorithm": "adamw"}
    groups = [
        {"params": params[:1]},
        {"params": params[1:2], "update_rms": 0.18},
        {"params": params[2:4], "update_rms": torch.tensor(1.25), "adjust_lr_fn": "match_rms_adamw"},
        adamw,
    ]
    return hybridopt.Muon(groups, lr=0.05, update_rms=0.2)


def test_update_rms_is_the_scale_of_a_group():
    """As of float64, with matrices that are tall, wide and square; 0.2 has the bits of "match_rms_adamw"."""
    params, named = with_vectors(), matrices()
    before = clone(params)
    gradients = []
    optimizer, by_name = rms_groups(params), hybridopt.Muon(named, lr=0.05, adjust_lr_fn="match_rms_adamw")
    for seed in range(3):
        run(optimizer, params, [seed])
        gradients.append([param.grad.clone() for param in params])
        for param, gradient in zip(named, gradients[-1]):
            param.grad = gradient.clone()
        by_name.step()
    assert bits(named[:1]) == bits(params[:1])
    for index, scale in enumerate((0.2, 0.18, 1.25)):
        own = [each[index] for each in gradients]
        exact = in_float64(before[index], own, "match_rms_adamw", True, 0.05, 0.1, update_rms=scale)
        other = in_float64(before[index], own, "match_rms_adamw", True, 0.05, 0.1, update_rms=scale * 1.1)
        moved_by = (exact - before[index]).norm()
        assert (params[index] - exact).norm() < 0.03 * moved_by
        assert (other - exact).norm() > 0.06 * moved_by


@pytest.mark.parametrize("sharded", [False, True])
def test_a_state_dict_without_update_rms_has_the_scale_that_it_names(sharded):
    """As torch's, which has no such argument: loading it gives up the scale of the optimizer, at once and for later."""
    params = matrices()
    torchs = hybridopt.Muon(params, lr=0.05)
    run(torchs, params, range(2))
    state_dict = copy.deepcopy(torchs.state_dict())
    del state_dict["param_groups"][0]["update_rms"]
    loaded_params = clone(params)
    loaded = (hybridopt.ShardedMuon if sharded else hybridopt.Muon)(loaded_params, update_rms=0.18)
    loaded.load_state_dict(state_dict)
    assert loaded.param_groups[0]["update_rms"] is None
    for each, own in ((torchs, params), (loaded, loaded_params)):
        run(each, own, [5, 6])
    assert bits(loaded_params) == bits(params)
    for each, own in ((torchs, params), (loaded, loaded_params)):
        each.param_groups[0]["update_rms"] = 0.18
        run(each, own, [7])
    assert bits(loaded_params) == bits(params)
    torchs.param_groups[0]["update_rms"] = None
    run(torchs, params, [8])
    run(loaded, loaded_params, [8])
    assert bits(loaded_params) != bits(params)


@pytest.mark.parametrize("through", ["checkpoint", "state_dict"])
def test_update_rms_goes_on_after_a_resume(through, tmp_path):
    params = with_vectors()
    optimizer = rms_groups(params)
    run(optimizer, params, range(2))
    resumed_params = clone(params)
    resumed = rms_groups(resumed_params)
    if through == "checkpoint":
        optimizer.save_checkpoint(tmp_path / "saved")
        resumed.load_checkpoint(tmp_path / "saved")
    else:
        plain = [{"params": resumed_params[:1]}, {"params": resumed_params[1:2]}, {"params": resumed_params[2:4]}]
        resumed = hybridopt.Muon([*plain, {"params": resumed_params[-2:], "algorithm": "adamw"}])
        resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        assert [group["update_rms"] for group in resumed.param_groups[:3]] == [0.2, 0.18, 1.25]
    for each, own in ((optimizer, params), (resumed, resumed_params)):
        run(each, own, [5, 6])
    assert bits(resumed_params) == bits(params)


def in_float64_by(update_of, matrix, gradients, lr, weight_decay):
    """The param after steps of other code's formulas: update_of(momentum, gradient) gives the new momentum and the
    scaled update."""
    param, momentum = matrix.detach().double(), torch.zeros_like(matrix).double()
    for gradient in gradients:
        momentum, update = update_of(momentum, gradient.double())
        param = param * (1 - lr * weight_decay) - lr * update
    return param


def iterated(update, coefficients, safety=1.0):
    """Newton-Schulz of a matrix or, if it is tall, of its transpose; the norm is multiplied by `safety`."""
    tall = update.shape[0] > update.shape[1]
    x = update.T if tall else update
    x = x / (x.norm() * safety)
    for a, b, c in coefficients:
        gram = x @ x.T
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.T if tall else x


QUINTIC = [
    *((4.0848, -6.8946, 2.9270), (3.9505, -6.3029, 2.6377), (3.7418, -5.5913, 2.3037)),
    *((2.8769, -3.1427, 1.2046), (2.8366, -3.0525, 1.2012)),
]
QKV = (4, 2, 2)  # rows of queries, keys and values of a group; 3 groups in 24 rows


def megatrons(momentum, gradient):
    """As Megatron-LM updates fused queries, keys and values: the rows of each, of all groups, are a matrix."""
    momentum = momentum.lerp(gradient, 0.05)
    update = gradient.lerp(momentum, 0.95)
    parts = [part.flatten(0, 1) for part in update.view(-1, sum(QKV), update.shape[1]).split(QKV, 1)]
    parts = [iterated(part, QUINTIC) * 0.2 * max(part.shape) ** 0.5 for part in parts]
    by_group = [part.view(-1, rows, update.shape[1]) for part, rows in zip(parts, QKV)]
    return momentum, torch.cat(by_group, 1).flatten(0, 1)


def dions(momentum, gradient):
    """As dion's Muon: gradients are added up undamped, which the norm takes out, and the norm has a safety factor."""
    momentum = 0.95 * momentum + gradient
    update = iterated(gradient + 0.95 * momentum, POLAR_EXPRESS[:5], safety=1.02)
    return momentum, update * 0.2 * max(gradient.shape) ** 0.5


def divided(coefficients, safety):
    """Coefficients that divide by the safety factor in the first step."""
    a, b, c = coefficients[0]
    return [(a / safety, b / safety**3, c / safety**5), *coefficients[1:]]


@pytest.mark.parametrize("formulas", [megatrons, dions])
def test_updates_are_those_of_megatrons_and_dions_formulas(formulas):
    torch.manual_seed(1)
    model = Predictor()
    layer = model.mix.weight if formulas is megatrons else model.up.weight
    before = layer.detach().clone()
    extra = {"split_rows": QKV, "ns_coefficients": QUINTIC}
    if formulas is dions:
        extra = {"ns_coefficients": divided(POLAR_EXPRESS[:5], 1.02)}
    groups = [{"params": [layer], "adjust_lr_fn": "match_rms_adamw", **extra}]
    others = [param for param in model.parameters() if param is not layer]
    optimizer = hybridopt.Muon([*groups, {"params": others, "algorithm": "adamw", "lr": 0.01}], lr=0.01, weight_decay=0.1)
    gradients = []
    for seed in range(steps_of(20)):
        optimizer.zero_grad()
        model(batch_of(seed)).backward()
        gradients.append(layer.grad.clone())
        optimizer.step()
    exact = in_float64_by(formulas, before, gradients, 0.01, 0.1)
    moved_by = (exact - before).norm()
    assert (layer - exact).norm() < 0.03 * moved_by
    # A product on a part of the matrix, or another list, is seen.
    plain = in_float64(before, gradients, "match_rms_adamw", True, 0.01, 0.1)
    assert (plain - exact).norm() > 0.06 * moved_by


# Amsel et al., "The Polar Express", 2025, divided by 1.01 as there: as many triples as steps.
POLAR_EXPRESS = [
    *((8.2051, -22.9019, 16.4607), (4.0664, -2.8612, 0.5184), (3.9096, -2.8234, 0.5250), (3.2856, -2.4153, 0.4853)),
    *((2.2779, -1.6198, 0.3985), (1.8726, -1.2307, 0.3585), (1.8564, -1.2132, 0.3568), (1.8750, -1.2500, 0.3750)),
]


def moved(params, before):
    """How each param has moved in a step without decay."""
    return [old.double() - param.detach().double() for param, old in zip(params, before)]


def test_each_step_has_coefficients_of_its_own_and_the_last_go_on():
    """Polar express brings all singular values near 1, which the default does not."""
    for coefficients, steps, band in ((POLAR_EXPRESS, 8, (0.97, 1.03)), (POLAR_EXPRESS[:6], 9, (0.9, 1.1))):
        params = [Parameter(torch.randn(40, 24, generator=torch.Generator().manual_seed(2)))]
        before = clone(params)
        arguments = {"ns_coefficients": coefficients, "ns_steps": steps, "weight_decay": 0.0}
        run(hybridopt.Muon(params, lr=1.0, **arguments), params, [1])
        values = torch.linalg.svdvals(moved(params, before)[0]) / (40 / 24) ** 0.5
        assert values.min() > band[0] and values.max() < band[1], values
    results = []
    for coefficients in (POLAR_EXPRESS[:2], [*POLAR_EXPRESS[:2], POLAR_EXPRESS[1]], POLAR_EXPRESS[:3], POLAR_EXPRESS[0]):
        params = matrices()
        run(hybridopt.Muon(params, ns_coefficients=coefficients, ns_steps=3), params, range(2))
        results.append(bits(params))
    assert results[0] == results[1] and len({str(each) for each in results}) == 3


@pytest.mark.parametrize("rows", [(6, 6), (5, 7), (1, 3), (2, 1, 1)])
def test_parts_of_a_fused_matrix_are_updated_as_matrices(rows):
    """Rows of the same part may lie apart: the list of their numbers is repeated."""
    generator = torch.Generator().manual_seed(3)
    fused = Parameter(torch.randn(12, 7, generator=generator))
    part_of = torch.tensor([part for part, count in enumerate(rows) for _ in range(count)] * (12 // sum(rows)))
    parts = [Parameter(fused.detach()[part_of == part].clone()) for part in range(len(rows))]
    together = hybridopt.Muon([{"params": [fused], "split_rows": rows}], lr=0.05)
    apart = hybridopt.Muon(parts, lr=0.05)
    for seed in range(3):
        run(together, [fused], [seed])
        for part, param in enumerate(parts):
            param.grad = fused.grad[part_of == part].clone()
        apart.step()
    for part, param in enumerate(parts):
        assert torch.equal(fused.detach()[part_of == part], param)
        buffers = together.state[fused]["momentum_buffer"], apart.state[param]["momentum_buffer"]
        assert torch.equal(buffers[0][part_of == part], buffers[1])


def test_stacks_are_matrices_each_by_itself():
    stack = Parameter(torch.randn(3, 12, 7, generator=torch.Generator().manual_seed(3)))
    each = [Parameter(matrix.detach().clone()) for matrix in stack]
    together, apart = hybridopt.Muon([{"params": [stack], "stacked": True, "split_rows": (4, 8)}]), hybridopt.Muon(
        [{"params": each, "split_rows": (4, 8)}]
    )
    for seed in range(3):
        run(together, [stack], [seed])
        for param, gradient in zip(each, stack.grad):
            param.grad = gradient.clone()
        apart.step()
    assert torch.equal(stack, torch.stack([param.detach() for param in each]))


def test_split_rows_may_change_between_steps():
    params, other = matrices()[:1], matrices()[:1]
    optimizer = hybridopt.Muon(params)
    run(optimizer, params, [1])
    optimizer.param_groups[0]["split_rows"] = (6, 6)
    run(optimizer, params, [2])
    whole = hybridopt.Muon(other)
    run(whole, other, [1])
    split = hybridopt.Muon([{"params": other, "split_rows": [6, 6]}])
    split.load_state_dict({**whole.state_dict(), "param_groups": split.state_dict()["param_groups"]})
    run(split, other, [2])
    assert bits(params) == bits(other)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_groups_of_adamw_have_the_bits_of_adamw(dtype):
    params, alone = with_vectors(dtype), with_vectors(dtype)
    optimizer, muon = mixed(params), hybridopt.Muon(alone[:-2], lr=0.05)
    adamw = hybridopt.AdamW(alone[-2:], lr=0.02, betas=(0.8, 0.9), weight_decay=0.2)
    before = clone(params)
    for seed in range(4):
        run(optimizer, params, [seed])
        for param, own in zip(alone, params):
            param.grad = own.grad.clone()
        muon.step()
        adamw.step()
    assert bits(params) == bits(alone)
    assert not any(torch.equal(param, old) for param, old in zip(params, before))
    masters = set() if dtype == torch.float32 else {"master_param"}
    assert set(optimizer.state[params[0]]) == {"momentum_buffer"} | masters
    assert set(optimizer.state[params[-1]]) == {"step", "exp_avg", "exp_avg_sq"} | masters


def test_all_groups_have_one_norm_and_one_verdict():
    params = with_vectors()
    optimizer = mixed(params, max_grad_norm=0.5)
    run(optimizer, params, [1])
    norm = math.sqrt(sum(float(param.grad.double().square().sum()) for param in params))
    assert optimizer.last_step().grad_norm == pytest.approx(norm, rel=1e-6)
    before = bits(params)
    params[-1].grad.fill_(math.inf)  # of AdamW's group
    optimizer.step()
    assert optimizer.last_step().skipped and bits(params) == before


@pytest.mark.parametrize(
    "options",
    [
        {"threads": 1},
        {"master_layout": "split"},
        {"master_layout": "split24", "state_dtype": "bf16"},
        {"state_dtype": "bf16"},
    ],
)
def test_options_of_all_optimizers_work(options):
    params, exact = with_vectors(torch.bfloat16), with_vectors(torch.bfloat16)
    before = clone(params)
    optimizer, other = mixed(params, **options), mixed(exact)
    run(optimizer, params, range(5))
    run(other, exact, range(5))
    for param, reference, start in zip(params, exact, before):
        assert (param - reference).norm() <= 0.15 * (reference - start).norm()
    if "threads" in options:
        assert bits(params) == bits(exact)
    dtype = torch.bfloat16 if "state_dtype" in options else torch.float32
    assert optimizer.state[params[0]]["momentum_buffer"].dtype == dtype


def test_a_matrix_with_gaps_is_updated_as_a_whole():
    whole, wide = matrices()[:1], torch.zeros(12, 9)
    wide[:, :7] = whole[0].detach()
    gaps = [Parameter(wide[:, :7])]
    assert not gaps[0].is_contiguous()
    for params in (whole, gaps):
        run(hybridopt.Muon(params), params, range(3))
    assert torch.equal(whole[0], gaps[0])


def test_schedulers_averages_and_later_groups():
    params = with_vectors()
    optimizer = mixed(params)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)
    model = nn.ParameterList(params)
    average = torch.optim.swa_utils.AveragedModel(model, avg_fn=lambda mean, new, _: (mean + new) / 2)
    run(optimizer, params, [1])
    scheduler.step()
    average.update_parameters(model)
    assert [group["lr"] for group in optimizer.param_groups] == [0.025, 0.01]
    expected = [(mean.detach() + param.detach()) / 2 for mean, param in zip(average.parameters(), params)]
    run(optimizer, params, [2])
    average.update_parameters(model)
    assert not torch.equal(average.module[0], expected[0])

    alone = clone(params[:4])
    other = hybridopt.Muon(alone, lr=0.025)
    other.load_state_dict({**other.state_dict(), "state": {i: optimizer.state_dict()["state"][i] for i in range(4)}})
    added = [Parameter(torch.ones(4, 6)), Parameter(torch.ones(3))]
    optimizer.add_param_group({"params": added[:1]})
    optimizer.add_param_group({"params": added[1:], "algorithm": "adamw"})
    before = clone(added)
    run(optimizer, params + added, [3, 4])
    for seed in (3, 4):
        run(other, alone, [seed])
    assert bits(alone) == bits(params[:4])
    assert not any(torch.equal(param, old) for param, old in zip(added, before))
    assert [group["lr"] for group in optimizer.param_groups[2:]] == [0.05, 1e-3]


def test_weights_learn_the_same_with_overlap():
    results = []
    for overlapped in (False, True):
        torch.manual_seed(2)
        model = Predictor()
        optimizer = hybridopt.Muon(hybridopt.muon_groups(model))
        if overlapped:
            optimizer.overlap(model)
        for seed in range(3):
            optimizer.zero_grad()
            model(batch_of(seed)).backward()
            optimizer.step()
        optimizer.synchronize()
        results.append(bits(model.parameters()))
    assert results[0] == results[1]


# ------------------------------------------------------------------------------------ the state --


@with_torchs
def test_state_dicts_go_to_torch_and_back():
    params = matrices()
    ours = hybridopt.Muon(params, lr=0.05)
    run(ours, params, range(3))
    torchs_params = clone(params)
    torchs = torch.optim.Muon(torchs_params)
    torchs.load_state_dict(copy.deepcopy(ours.state_dict()))
    assert state_bits(torchs) == state_bits(ours)
    assert torchs.param_groups[0]["lr"] == 0.05
    back_params = clone(params)
    back = hybridopt.Muon(back_params)
    back.load_state_dict(copy.deepcopy(torchs.state_dict()))
    run(ours, params, [4, 5])
    run(back, back_params, [4, 5])
    assert bits(back_params) == bits(params) and state_bits(back) == state_bits(ours)

    run(torchs, torchs_params, [4, 5])  # and training that torch has begun goes on here
    back.load_state_dict(copy.deepcopy(torchs.state_dict()))
    assert state_bits(back) == state_bits(torchs)


@with_torchs
def test_arguments_and_defaults_are_torchs():
    ours = dict(inspect.signature(hybridopt.Muon.__init__).parameters)
    theirs = inspect.signature(torch.optim.Muon.__init__).parameters
    assert list(ours)[: len(theirs)] == list(theirs)
    assert {name: ours[name].default for name in theirs} == {name: row.default for name, row in theirs.items()}
    own = {name: ours[name].default for name in OWN_DEFAULTS[abi.OFFLOAD_MUON]}
    assert own == OWN_DEFAULTS[abi.OFFLOAD_MUON]
    groups = hybridopt.Muon(matrices()).param_groups, torch.optim.Muon(matrices()).param_groups
    assert set(groups[0][0]) - {"update_rms"} == set(groups[1][0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("through", ["checkpoint", "state_dict"])
def test_resuming_changes_no_bit(through, dtype, tmp_path):
    params = with_vectors(dtype)
    optimizer = mixed(params)
    run(optimizer, params, range(3))
    resumed_params = clone(params)
    resumed = mixed(resumed_params)
    if through == "checkpoint":
        for param in resumed_params:
            param.data.zero_()
        optimizer.save_checkpoint(tmp_path / "saved")
        resumed.load_checkpoint(tmp_path / "saved")
    else:
        file = io.BytesIO()
        torch.save(optimizer.state_dict(), file)
        file.seek(0)
        resumed.load_state_dict(torch.load(file, weights_only=True))
        assert resumed.param_groups[1]["algorithm"] == "adamw"
    run(optimizer, params, [4, 5])
    run(resumed, resumed_params, [4, 5])
    assert bits(resumed_params) == bits(params) and state_bits(resumed) == state_bits(optimizer)


def test_a_checkpoint_of_another_algorithm_is_refused(tmp_path):
    params = matrices()
    optimizer = hybridopt.AdamW(params)
    run(optimizer, params, [1])
    optimizer.save_checkpoint(tmp_path / "saved")
    with pytest.raises(abi.CheckpointMismatchError, match="AdamW, here .*Muon"):
        hybridopt.Muon(params).load_checkpoint(tmp_path / "saved")
    with pytest.raises(ValueError, match="load a state_dict of hybridopt.Muon"):
        hybridopt.Muon(params).load_state_dict(optimizer.state_dict())


# ------------------------------------------------------------------------------------ the groups --


def test_a_group_of_another_algorithm_has_its_defaults_and_one_of_muon_the_optimizers():
    params = with_vectors()
    groups = [
        {"params": params[:1]},
        {"params": params[1:2], "algorithm": "muon", "lr": 0.5},
        {"params": params[4:5], "algorithm": "adamw"},
        {"params": params[5:], "algorithm": "sgd", "momentum": 0.5},
    ]
    optimizer = hybridopt.Muon(groups, lr=0.25, momentum=0.75, ns_steps=3, weight_decay=0.5)
    muon, named, adamw, sgd = optimizer.param_groups
    assert (muon["lr"], muon["momentum"], muon["ns_steps"]) == (0.25, 0.75, 3)
    assert (named["lr"], named["momentum"], named["ns_steps"], named["weight_decay"]) == (0.5, 0.75, 3, 0.5)
    assert (adamw["lr"], adamw["betas"], adamw["eps"], adamw["weight_decay"]) == (1e-3, (0.9, 0.999), 1e-8, 0.01)
    assert (sgd["lr"], sgd["momentum"], sgd["weight_decay"], sgd["nesterov"]) == (1e-3, 0.5, 0, False)
    run(optimizer, params[:2] + params[4:], [1, 2])


def test_muon_may_be_a_group_of_adamw():
    params, alone = with_vectors(), with_vectors()
    muon = {"params": params[:-2], "algorithm": "muon", "lr": 0.05, "weight_decay": 0.1}
    run(hybridopt.AdamW([muon, {"params": params[-2:]}]), params, range(3))
    run(hybridopt.Muon(alone[:-2], lr=0.05), alone, range(3))
    assert bits(params[:-2]) == bits(alone[:-2])


def went(groups):
    return {name: group.get("algorithm", "muon") for group in groups for name, _ in group["params"]}


def test_muon_groups_refuse_what_is_no_hyperparameter_of_adamw():
    told = r"adamw of muon_groups\(\) has 'weight_deacy', expected hyperparameters of AdamW: lr, betas, .*, cautious_w"
    with pytest.raises(ValueError, match=told):
        hybridopt.muon_groups(Predictor(), adamw={"lr": 3e-4, "weight_deacy": 0.1})
    every = {"lr": 1e-3, "betas": (0.9, 0.99), "eps": 1e-7, "weight_decay": 0.1, "maximize": True}
    assert hybridopt.muon_groups(Predictor(), adamw=every)[-1].items() >= every.items()


def test_muon_groups_sort_a_model():
    model = Predictor()
    groups = hybridopt.muon_groups(model, adamw={"lr": 3e-4})
    matrices_of_layers = {"mix.weight", "up.weight", "down.weight"}
    expected = {name: "muon" if name in matrices_of_layers else "adamw" for name, _ in model.named_parameters()}
    assert went(groups) == expected
    lines = str(groups).splitlines()
    assert lines[0].split() == ["adamw", "embedding.weight", "32", "x", "24", "embedding"]
    assert lines[1].split() == ["muon", "mix.weight", "24", "x", "24", "matrix", "of", "a", "hidden", "layer"]
    assert lines[-2].split() == ["adamw", "head.weight", "32", "x", "24", "head"]
    assert lines[-1].split() == ["adamw", "head.bias", "32", "no", "matrix"]
    optimizer = hybridopt.Muon(groups, lr=0.02)
    assert [group["lr"] for group in optimizer.param_groups] == [0.02, 3e-4]
    assert optimizer.param_groups[0]["param_names"] == ["mix.weight", "up.weight", "down.weight"]
    for head, name in (("up", "up.weight"), (None, None)):
        found = went(hybridopt.muon_groups(model, head=head))
        assert {key for key in expected if found[key] != expected[key]} == {"head.weight", name} - {None}


def test_muon_groups_have_stacks_and_splits_of_their_own():
    model = Predictor()
    model.experts = nn.Parameter(torch.ones(2, 6, 4))
    groups = hybridopt.muon_groups(model, stacks=["expert*"], splits={"up.w*": [32, 32], "experts": (3, 3)})
    extras = [{key: group[key] for key in group if key != "params"} for group in groups]
    assert {"stacked": True, "split_rows": (3, 3)} in extras and {"split_rows": (32, 32)} in extras
    assert extras[-1] == {"algorithm": "adamw"} and len(groups) == 4
    lines = {line.split()[1]: line for line in str(groups).splitlines()}
    assert lines["experts"].endswith("stack of matrices, in parts of 3, 3 rows")
    assert lines["up.weight"].endswith("matrix of a hidden layer, in parts of 32, 32 rows")
    params = [param for group in groups for _, param in group["params"]]
    run(hybridopt.Muon(groups), params, [1])
    for arguments, text in (
        ({"stacks": ["none.*"]}, "no parameter of the model has the name 'none.*' of stacks or splits"),
        ({"splits": {"embed*": (16, 16)}}, "name 'embedding.weight', which Muon does not update: embedding"),
        ({"stacks": ["norm.*"]}, "name 'norm.weight', which Muon does not update: no matrix"),
    ):
        with pytest.raises(ValueError, match=re.escape(text)):
            hybridopt.muon_groups(model, **arguments)
    for stacks in ("experts", 3, [3]):
        with pytest.raises(TypeError, match=f"^stacks is {told(stacks)}, expected a list of names"):
            hybridopt.muon_groups(model, stacks=stacks)
    for splits in ("up.w*", ["up.w*"], 3, {"up.w*": 32}, {3: (32, 32)}, False, torch.ones(2)):
        with pytest.raises(TypeError, match=f"^splits is {told(splits)}, expected a dict of names with the rows"):
            hybridopt.muon_groups(model, splits=splits)


@pytest.mark.parametrize("head", ["x" * 5000, 10**400, ["up"]])
def test_muon_groups_say_that_a_head_is_no_layer(head):
    with pytest.raises(ValueError, match=f"^head={told(head)} is no layer of Predictor"):
        hybridopt.muon_groups(Predictor(), head=head)


def test_muon_groups_know_the_head_of_tied_models_and_of_those_that_tell_it():
    tied = Predictor()
    tied.head.weight = tied.embedding.weight
    tied.last = nn.Linear(24, 24)  # registered behind the head
    assert went(hybridopt.muon_groups(tied))["last.weight"] == "muon"
    assert went(hybridopt.muon_groups(tied))["embedding.weight"] == "adamw"
    telling = Predictor()
    telling.last = nn.Linear(24, 24)
    telling.get_output_embeddings = lambda: telling.head
    found = went(hybridopt.muon_groups(telling))
    assert (found["head.weight"], found["last.weight"]) == ("adamw", "muon")
    other = nn.ModuleDict({"pos_embed": nn.Linear(4, 4), "gate": nn.Linear(4, 1), "layer": nn.Linear(4, 4), "out": nn.Linear(4, 2)})
    found = went(hybridopt.muon_groups(other))
    assert [key for key, value in found.items() if value == "muon"] == ["layer.weight"]


# ---------------------------------------------------------------------------------- the refusals --


def test_what_is_no_matrix_names_itself_and_the_way_out():
    for shape in ((3,), (), (2, 3, 4)):
        param = Parameter(torch.ones(shape))
        text = rf"parameter 'norm' has the shape {told(tuple(shape))}, but Muon updates matrices, .*algorithm='adamw'.*muon_groups"
        with pytest.raises(ValueError, match=text):
            hybridopt.Muon([("norm", param)])
        optimizer = hybridopt.Muon([("matrix", Parameter(torch.ones(2, 2)))])
        with pytest.raises(ValueError, match=text):
            optimizer.add_param_group({"params": [("norm", param)]})
        assert len(optimizer.param_groups) == 1
        other = hybridopt.AdamW([("norm", param)])
        other.param_groups[0].update(OWN_DEFAULTS[abi.OFFLOAD_MUON], algorithm="muon")
        param.grad = torch.ones(shape)
        with pytest.raises(ValueError, match=text):
            other.step()


def test_groups_that_fit_no_matrix_name_the_way_out():
    def group(shape=(12, 7), **extra):
        return {"params": [("w", Parameter(torch.ones(shape)))], **extra}

    for wrong, text in (
        (group((2, 3, 4)), r"the shape \(2, 3, 4\), .*as of experts, set stacked=True in its group"),
        (group((2, 2, 3, 4), stacked=True), r"the shape \(2, 2, 3, 4\), but Muon updates matrices, of two dim"),
        (group(stacked="yes"), "param group 0 has stacked='yes', expected True or False"),
        (group(split_rows=()), r"has split_rows=\(\), expected a list of the rows of each part"),
        (group(split_rows=6), "has split_rows=6, expected a list of the rows of each part"),
        (group(split_rows=(6, 0)), r"has split_rows=\(6, 0\), expected a list of the rows"),
        (group(split_rows=(6, True)), r"has split_rows=\(6, True\), expected a list of the rows"),
        (group(split_rows=(6, 7)), "add up to 13, but parameter 'w' has 12 rows, expected a multiple of the sum"),
        (group(split_rows=(6, 6), algorithm="adamw"), r"has split_rows=\(6, 6\), but AdamW updates no matrices; leave"),
        (group(stacked=True, algorithm="sgd"), "has stacked=True, but SGD updates no matrices; leave it out"),
        (group(ns_coefficients=POLAR_EXPRESS), "has 8 triples in ns_coefficients, but ns_steps=5; set ns_steps to at least 8"),
        (group(ns_coefficients=[]), r"has ns_coefficients=\[\], expected three numbers, .*or a list of 1 to 10 such triples"),
        (group(ns_coefficients=[(1, 2, 3)] * 11, ns_steps=11), "expected three numbers, .*or a list of 1 to 10"),
        (group(ns_coefficients=[(1, 2, 3), (1, 2)]), "expected three numbers, .*or a list of 1 to 10"),
        (group(ns_coefficients=[(1, 2, 3), (0, 0, 0)]), "expected three numbers, .*or a list of 1 to 10"),
    ):
        with pytest.raises(ValueError, match=text):
            hybridopt.Muon([wrong])


def test_a_matrix_by_columns_is_refused():
    with pytest.raises(ValueError, match=r"parameter 'x' has the strides \(1, 3\), .*contiguous\(\).*algorithm='adamw'"):
        hybridopt.Muon([("x", Parameter(torch.ones(2, 3).T))])


@pytest.fixture
def mesh():
    """A mesh of two ranks of which only this one is there."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.testing._internal.distributed.fake_pg import FakeStore

    torch.distributed.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    yield init_device_mesh("cpu", (2,))
    torch.distributed.destroy_process_group()


def test_sharded_matrices_are_refused_and_replicated_ones_are_not(mesh):
    from torch.distributed.tensor import DTensor, Replicate, Shard

    for placement, local in ((Shard(0), torch.ones(2, 3)), (Shard(1), torch.ones(4, 2))):
        param = Parameter(DTensor.from_local(local, mesh, [placement], run_check=False))
        text = r"parameter 'x' is cut between ranks \(a DTensor with the placements .*\), but Muon needs whole .*'adamw'"
        with pytest.raises(ValueError, match=text):
            hybridopt.Muon([("x", param)])
    # One row of two ranks: this rank has all of it, the other one nothing.
    param = Parameter(DTensor.from_local(torch.ones(1, 3), mesh, [Shard(0)], run_check=False, shape=(1, 3), stride=(3, 1)))
    with pytest.raises(ValueError, match="is cut between ranks"):
        hybridopt.Muon([("x", param)])
    hybridopt.Muon([("x", Parameter(DTensor.from_local(torch.ones(4, 3), mesh, [Replicate()], run_check=False)))])
    stack = Parameter(DTensor.from_local(torch.ones(2, 2, 3), mesh, [Shard(1)], run_check=False))
    with pytest.raises(ValueError, match="needs whole matrices; use hybridopt.ShardedMuon, which"):
        hybridopt.Muon([{"params": [("x", stack)], "stacked": True}])


def test_tensor_parallel_matrices_of_megatron_are_refused(monkeypatch):
    state = types.SimpleNamespace(
        model_parallel_is_initialized=lambda: True,
        get_tensor_model_parallel_world_size=lambda: 2,
        get_expert_tensor_parallel_world_size=lambda: 1,
    )
    param = Parameter(torch.ones(2, 3))
    param.tensor_model_parallel = True
    hybridopt.Muon([param])
    monkeypatch.setitem(sys.modules, "megatron.core.parallel_state", state)
    text = r"parameter 'x' is cut between ranks \(by Megatron-LM, over 2 tensor parallel ranks\), but Muon needs whole"
    for kind in (hybridopt.Muon, hybridopt.ShardedMuon):
        with pytest.raises(ValueError, match=text):
            kind([("x", param)])
    param.allreduce = False  # an expert, which one rank has whole
    hybridopt.Muon([("x", param)])


def test_parts_of_matrices_are_refused():
    param = Parameter(torch.ones(2, 3))
    param.offload_shard = hybridopt.TensorShard((4, 3), (((0, 0), (2, 3)),))
    text = r"parameter 'x' is cut between ranks \(offload_shard .* \(4, 3\)\), but Muon needs whole matrices; .*'adamw'"
    with pytest.raises(ValueError, match=text):
        hybridopt.Muon([("x", param)])
    param = Parameter(torch.ones(6))
    param._fsdp_flattened = True
    with pytest.raises(ValueError, match="cut between ranks .by FullyShardedDataParallel, FSDP1., .*'adamw'"):
        hybridopt.Muon([("x", param)])


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"lr": -1.0}, "Learning rate should be >= 0 but is: -1.0"),
        ({"lr": torch.ones(2)}, "Tensor lr must be 1-element"),
        ({"lr": "1"}, "Invalid lr: '1', expected a number"),
        ({"momentum": -0.1}, "momentum should be >= 0 and below 1 but is: -0.1"),
        ({"momentum": 1.0}, "momentum should be >= 0 and below 1 but is: 1.0"),
        ({"weight_decay": -1}, "weight decay should be >= 0 but is: -1"),
        ({"nesterov": "no"}, "Invalid nesterov: 'no', expected True or False"),
        ({"ns_coefficients": (1, 2)}, r"Invalid ns_coefficients: \(1, 2\), expected three numbers, not all of them 0"),
        ({"ns_coefficients": (0, 0.0, 0)}, "Invalid ns_coefficients: .* expected three numbers, not all of them 0"),
        ({"ns_coefficients": (1, math.inf, 0)}, r"ns_coefficients\[0\]\[1\] is inf, expected a number that is finite"),
        ({"ns_steps": 0}, "param group 0 has ns_steps=0, expected a whole number from 1 to 99"),
        ({"ns_steps": 100}, "param group 0 has ns_steps=100, expected a whole number from 1 to 99"),
        ({"ns_steps": True}, "param group 0 has ns_steps=True, expected a whole number from 1 to 99"),
        ({"ns_steps": 2.0}, "param group 0 has ns_steps=2.0, expected a whole number from 1 to 99"),
        ({"adjust_lr_fn": "rms"}, "has adjust_lr_fn='rms', expected None, 'original' or 'match_rms_adamw'"),
        ({"adjust_lr_fn": 0.2}, "has adjust_lr_fn=0.2, expected None, 'original' or 'match_rms_adamw'"),
        ({"update_rms": 0.0}, "group 0 has update_rms=0.0, expected None or a number that is finite and above 0"),
        ({"update_rms": -0.2}, "has update_rms=-0.2, expected None or a number that is finite and above 0"),
        ({"update_rms": math.inf}, "has update_rms=inf, expected None or a number that is finite and above 0"),
        ({"update_rms": math.nan}, "has update_rms=nan, expected None or a number that is finite and above 0"),
        ({"update_rms": True}, "has update_rms=True, expected None or a number that is finite and above 0"),
        ({"update_rms": "0.2"}, "has update_rms='0.2', expected None or a number that is finite and above 0"),
        ({"update_rms": 0.2, "adjust_lr_fn": "original"}, "has update_rms=0.2 and adjust_lr_fn='original', .*; set adjust_lr_fn=None"),
        ({"eps": -1.0}, "eps is -1, expected a number that is finite and above 0"),
        ({"state_dtype": "int8"}, "Invalid state_dtype: 'int8', expected torch.float32 or torch.bfloat16"),
    ],
)
def test_arguments_that_cannot_be_are_refused(arguments, text):
    params = matrices()
    before = bits(params)
    with pytest.raises(ValueError, match=text):
        run(hybridopt.Muon(params, **arguments), params, [1])
    assert bits(params) == before


def test_groups_that_cannot_be_are_refused():
    with pytest.raises(ValueError, match="has no matrix of a hidden layer for Muon; use hybridopt.AdamW"):
        hybridopt.muon_groups(nn.Linear(3, 3))
    with pytest.raises(ValueError, match="head='lm_head' is no layer of Predictor with a matrix"):
        hybridopt.muon_groups(Predictor(), head="lm_head")
    with pytest.raises(TypeError, match="got a list, expected a model"):
        hybridopt.muon_groups([])
    with pytest.raises(ValueError, match="param group 1 has algorithm='adam2', expected one of .*'muon'"):
        hybridopt.Muon([{"params": matrices()}, {"params": [Parameter(torch.ones(2))], "algorithm": "adam2"}])
    with pytest.raises(ValueError, match="param group 1 has nesterov=True, but AdamW does not use it"):
        groups = [{"params": matrices()}, {"params": [Parameter(torch.ones(2))], "algorithm": "adamw", "nesterov": True}]
        hybridopt.Muon(groups)


def test_no_momentum_is_the_gradient_itself():
    results = []
    for nesterov in (True, False):
        params = matrices()
        run(hybridopt.Muon(params, momentum=0.0, nesterov=nesterov), params, range(2))
        results.append(bits(params))
    assert results[0] == results[1] != bits(matrices())


# --------------------------------------------------------------------------- matrices in parts --


class Block(nn.Module):
    """Layers of sizes that 2 and 4 do not divide: some shards are uneven, and some are empty."""

    def __init__(self):
        super().__init__()
        self.up, self.down, self.mix = nn.Linear(10, 14), nn.Linear(14, 10), nn.Linear(10, 3)
        self.gate_up = nn.Linear(3, 12)

    def forward(self, x):
        return self.gate_up(self.mix(x + self.down(torch.tanh(self.up(x)))))


def block():
    torch.manual_seed(5)
    return Block()


def backward(module, seed, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    inputs, targets = torch.randn(6, 10, generator=generator), torch.randn(6, 12, generator=generator)
    nn.functional.mse_loss(module(inputs.to(dtype)), targets.to(dtype)).backward()


def groups_of(module):
    return hybridopt.muon_groups(module, head=None, splits={"gate_up.weight": (2, 4)})


def full(tensor):
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def digest(module):
    bits = b"".join(full(param).detach().float().numpy().tobytes() for param in module.parameters())
    return hashlib.sha256(bits).hexdigest()


OPTIONS = {"lr": 0.05, "threads": 1, "adjust_lr_fn": "match_rms_adamw"}


def fsdp2(rank, world, dtype, folder):
    plain = block().to(dtype)
    start = digest(plain)
    module = fully_shard(copy.deepcopy(plain))
    optimizer = hybridopt.ShardedMuon(groups_of(module), **OPTIONS)
    follower = hybridopt.Muon(groups_of(plain), **OPTIONS)
    for seed in range(3):
        optimizer.zero_grad()
        backward(module, seed, dtype)
        for own, param in zip(plain.parameters(), module.parameters()):
            own.grad = full(param.grad).detach().clone()
        optimizer.step()
        follower.step()
        for group in [*optimizer.param_groups, *follower.param_groups]:
            group["lr"] *= 0.5  # as a scheduler does
    assert digest(module) == digest(plain) != start
    optimizer.save_checkpoint(folder / "saved")
    # An optimizer without shards goes on from there.
    later = block().to(dtype)
    resumed = hybridopt.Muon(groups_of(later), **OPTIONS)
    resumed.load_checkpoint(folder / "saved")
    assert digest(later) == digest(plain)
    for own, other in zip(later.parameters(), plain.parameters()):
        own.grad = other.grad.clone()
    for each in (resumed, follower):
        for group in each.param_groups:
            group["lr"] = 0.01
        each.step()
    assert digest(later) == digest(plain)
    return {cut.name: cut.home for cut in optimizer.homes}, digest(plain)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_fsdp2_has_the_bits_of_one_process_at_any_world(dtype, tmp_path):
    """Each world has gradients of its own, because FSDP2 adds them up in another order, and is compared with a process
    that gets the same ones."""
    for world in (1, 2, 4):
        folder = tmp_path / str(world)
        folder.mkdir()
        results = ranks.run(fsdp2, world, dtype, folder)
        assert all(each == results[0] for each in results)
        given, _ = results[0]
        assert set(given) == (set() if world == 1 else {"up.weight", "down.weight", "mix.weight", "gate_up.weight"})
        assert len(set(given.values())) == (0 if world == 1 else world)


def inside(placement):
    """The placement that cuts the matrices of a stack as this one cuts a matrix."""
    return Shard(placement.dim + 1) if isinstance(placement, Shard) else placement


def same_gradients(rank, world, placements, mesh_shape):
    """Gradients that do not depend on the world: the hash of the results must not either."""
    mesh = init_device_mesh("cpu", mesh_shape)
    plain = block()
    plain.experts = Parameter(torch.randn(2, 6, 5))
    of_dimensions = {1: [Replicate()] * len(mesh_shape), 2: placements, 3: [inside(each) for each in placements]}
    sharded = {
        name: Parameter(distribute_tensor(param.detach(), mesh, of_dimensions[param.ndim])) for name, param in plain.named_parameters()
    }
    matrices = [(name, param) for name, param in sharded.items() if param.ndim == 2]
    stack = {"params": [("experts", sharded["experts"])], "stacked": True, "split_rows": (2, 1), "update_rms": 0.3}
    others = {"params": [(name, param) for name, param in sharded.items() if param.ndim == 1], "algorithm": "adamw"}
    optimizer = hybridopt.ShardedMuon([{"params": matrices}, stack, others], **OPTIONS)
    assert ("experts" in {cut.name for cut in optimizer.homes}) == (world > 1)
    for seed in range(3):
        generator = torch.Generator().manual_seed(seed)
        for param in sharded.values():
            gradient = torch.randn(param.shape, generator=generator)
            param.grad = distribute_tensor(gradient, mesh, param.placements)
        if seed == 1:
            matrices[0][1].grad = None  # everywhere
        optimizer.step()
    return hashlib.sha256(b"".join(full(param).detach().numpy().tobytes() for param in sharded.values())).hexdigest()


def test_any_cut_gives_the_same_hash_at_worlds_of_1_2_and_4():
    hashes = [ranks.run(same_gradients, 1, [Shard(0)], (1,))]
    for placements, shape in (
        ([Shard(0)], (2,)),
        ([Shard(1)], (2,)),
        ([Shard(0)], (4,)),
        ([Shard(1)], (4,)),
        ([Shard(0), Shard(1)], (2, 2)),
        ([Replicate(), Shard(0)], (2, 2)),
        ([Shard(0), Shard(0)], (2, 2)),
    ):
        hashes.append(ranks.run(same_gradients, shape[0] * (shape[1] if len(shape) > 1 else 1), placements, shape))
    assert len({each for results in hashes for each in results}) == 1


def tensor_parallel(rank, world):
    """Layers that torch's tensor parallelism cuts by rows and by columns, in FSDP2's mesh."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    plain = block()
    module = copy.deepcopy(plain)
    parallelize_module(module, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    fully_shard(module, mesh=mesh["dp"])
    names = {name: param for name, param in module.named_parameters()}
    muon = [(name, names[name]) for name in ("up.weight", "down.weight")]
    optimizer = hybridopt.ShardedMuon(muon, process_group=dist.group.WORLD, **OPTIONS)
    plain_names = dict(plain.named_parameters())
    follower = hybridopt.Muon([(name, plain_names[name]) for name, _ in muon], **OPTIONS)
    for seed in range(2):
        module.zero_grad()
        backward(module, seed)
        for name, param in muon:
            plain_names[name].grad = full(param.grad).detach().clone()
        optimizer.step()
        follower.step()
    for name, param in muon:
        assert torch.equal(full(param), plain_names[name])


@ranks.cuts_unevenly_beside_tensor_parallelism
def test_tensor_parallel_layers_in_fsdp2s_mesh():
    ranks.run(tensor_parallel, 4)


def refusals(rank, world):
    mesh = init_device_mesh("cpu", (world,))
    unknown = Parameter(DTensor.from_local(torch.ones(4, 4), mesh, [Partial()], run_check=False))
    with pytest.raises(ValueError, match="'?x'?: placement .* is unsupported, expected Shard or Replicate"):
        hybridopt.ShardedMuon([("x", unknown)])
    cut = Parameter(distribute_tensor(torch.ones(4, 4), mesh, [Shard(0)]))
    with pytest.raises(ValueError, match="ShardedMuon does not support track_changes=.*; leave it out"):
        hybridopt.ShardedMuon([("x", cut)], track_changes=True)
    with pytest.raises(TypeError, match=r"overlap is an int, expected the torch.nn.Module"):
        hybridopt.ShardedMuon([("x", cut)], overlap=3)
    other = Parameter(distribute_tensor(torch.ones(4, 4), mesh, [Shard(0)]))
    named = [("x", cut), ("y", other)]
    text = f"rank {rank} shares parameter '{'xy'[rank]}' of the shape \\(4, 4\\) with rank {1 - rank}, which has parameter '{'yx'[rank]}' of .*; give"
    with pytest.raises(ValueError, match=text):
        hybridopt.ShardedMuon(named if rank == 0 else named[::-1])
    with pytest.raises(ValueError, match="shares .*, which has .* in its place; give the params in the same order"):
        hybridopt.ShardedMuon(named if rank == 0 else named[:1])
    optimizer = hybridopt.ShardedMuon([("x", cut)], threads=1)
    assert str(optimizer.homes).startswith("x  4 x 4  rank 0 of 2  100.0% of the work")
    for call, text in (
        (lambda: optimizer.offloaded(grads=True).__enter__(), "offloads no params and gradients, "),
        (lambda: optimizer.offload(params=True), r"offloads no params and gradients, .* offload\(states=True\) .* alone"),
        (lambda: copy.deepcopy(optimizer), r"cannot be copied or pickled, .* load state_dict\(\) into it"),
        (lambda: setattr(optimizer, "state", {cut: {}}), r"cannot be assigned, .* use load_state_dict\(\)"),
        (lambda: optimizer.add_param_group({"params": [Parameter(torch.ones(2, 2))]}), "takes its groups when it is made"),
    ):
        with pytest.raises(abi.UnsupportedError, match=text):
            call()
    plan = optimizer.plan()  # rank 0 is home, and has the matrix and its gradient, in fp32
    assert (plan.home_bytes, plan.message_bytes) == ((128, 64) if rank == 0 else (0, 32))
    assert str(plan).endswith(f"\n{optimizer.homes}") and str(plan).startswith("ShardedPlan(")
    with pytest.raises(AttributeError, match="ShardedMuon.offload_fraction = 0.5 would have no effect"):
        optimizer.offload_fraction = 0.5
    loaded = optimizer.state_dict()
    loaded["state"] = {0: {"momentum_buffer": torch.ones(4, 4)}} if rank == 1 else {}
    own, other = ("momentum_buffer in torch.float32", "nothing") if rank == 1 else ("nothing", "momentum_buffer in torch.float32")
    text = f"of parameter 'x' in the loaded state_dict has {own}, but that of rank {1 - rank} of the group has {other}; load a"
    with pytest.raises(ValueError, match=text):
        optimizer.load_state_dict(loaded)
    with pytest.raises(ValueError, match="a different number of parameter groups"):
        optimizer.load_state_dict({"state": {}, "param_groups": []})
    if rank == 0:
        cut.grad = ranks.distributed(torch.ones(4, 4), mesh, [Shard(0)])
    with pytest.raises(ValueError, match=r"'x' has no gradient on the ranks \[1\], but the others of \[0, 1\] have one"):
        optimizer.step()


def test_what_cannot_be_put_together_is_refused():
    ranks.run(refusals, 2)


def gradients_of(module, seed):
    """Gradients that are the same in every world."""
    generator = torch.Generator().manual_seed(seed)
    for param in module.parameters():
        whole = torch.randn(param.shape, generator=generator).to(param.dtype)
        is_cut = isinstance(param, DTensor)
        param.grad = ranks.distributed(whole, param.device_mesh, param.placements) if is_cut else whole


def train(module, optimizer, seeds):
    for seed in seeds:
        gradients_of(module, seed)
        optimizer.step()
    optimizer.zero_grad()


SPLIT = {**OPTIONS, "master_layout": "split"}
SPLIT_STATE = {"master_layout": "split", "state_dtype": torch.bfloat16}


def saves(rank, world, folder):
    module = fully_shard(block().bfloat16())
    optimizer = hybridopt.ShardedMuon(groups_of(module), **SPLIT)
    assert not optimizer.state and not optimizer.state_dict()["state"]
    train(module, optimizer, range(3))
    shown = optimizer.state[module.up.weight]
    assert shown["momentum_buffer"].device.type == shown["master_low"].device.type == "meta"
    assert shown["master_low"].shape == (14, 10, 2) and shown["master_low"].placements == module.up.weight.placements
    weights, state = get_state_dict(module, optimizer)
    assert all(isinstance(entry["master_low"], DTensor) for entry in state["state"].values())
    dcp.save({"model": weights, "optimizer": state}, checkpoint_id=folder / "sharded")
    options = StateDictOptions(full_state_dict=True)
    whole = get_state_dict(module, optimizer, options=options)
    if rank == 0:
        torch.save(whole, folder / "whole")
    train(module, optimizer, [3, 4])
    return digest(module), whole[1]["state"]["up.weight"]["momentum_buffer"].sum()


def loads(rank, world, folder, layout):
    """A model with other weights and another learning rate, which are to be replaced."""
    torch.manual_seed(9)
    results = []
    for is_whole in (True, False):
        module = fully_shard(Block().bfloat16())
        optimizer = hybridopt.ShardedMuon(groups_of(module), **{**SPLIT, "lr": 0.7, "master_layout": layout})
        if is_whole:
            weights, state = torch.load(folder / "whole")
        else:
            weights, state = get_state_dict(module, optimizer)
            if layout != "split":  # torch's checkpoints load what is asked for
                continue
            content = {"model": weights, "optimizer": state}
            dcp.load(content, checkpoint_id=folder / "sharded")
            weights, state = content["model"], content["optimizer"]
        options = StateDictOptions(full_state_dict=is_whole)
        set_state_dict(module, optimizer, model_state_dict=weights, optim_state_dict=state, options=options)
        assert [group["lr"] for group in optimizer.param_groups] == [0.05, 0.05, 0.001]
        train(module, optimizer, [3, 4])
        results.append(digest(module))
    return results


def test_state_dicts_go_through_torchs_checkpoints_from_any_world_to_any_other(tmp_path):
    expected = set()
    for world in (2, 4):
        folder = tmp_path / str(world)
        folder.mkdir()
        expected.update(each for each, _ in ranks.run(saves, world, folder))
    assert len(expected) == 1
    for world, later, layout in ((4, 1, "split"), (4, 2, "split"), (2, 4, "split"), (4, 2, "fp32")):
        results = ranks.run(loads, later, tmp_path / str(world), layout)
        assert {each for of_rank in results for each in of_rank} == expected
    # Without shards: a plain state_dict has numbers instead of names.
    weights, state = torch.load(tmp_path / "4" / "whole")
    module = block().bfloat16()
    module.load_state_dict(weights)
    optimizer = hybridopt.Muon(groups_of(module), **SPLIT)
    numbers = {name: number for number, name in enumerate(name for group in state["param_groups"] for name in group["params"])}
    state["state"] = {numbers[name]: entry for name, entry in state["state"].items()}
    for group in state["param_groups"]:
        group["params"] = [numbers[name] for name in group["params"]]
    optimizer.load_state_dict(state)
    train(module, optimizer, [3, 4])
    assert {digest(module)} == expected


def clips_and_skips(rank, world):
    plain = block()
    module = fully_shard(copy.deepcopy(plain))
    optimizer = hybridopt.ShardedMuon(groups_of(module), max_grad_norm=0.5, **OPTIONS)
    follower = hybridopt.Muon(groups_of(plain), max_grad_norm=0.5, **OPTIONS)
    assert optimizer.max_grad_norm == 0.5
    for norm in (0.5, None, 0.25):
        optimizer.max_grad_norm = follower.max_grad_norm = norm
        for each, steps in ((module, optimizer), (plain, follower)):
            train(each, steps, [1])
        found, expected = optimizer.last_step(), follower.last_step()
        # Ranks add the squares up in another order.
        assert found.grad_norm == pytest.approx(expected.grad_norm, rel=1e-12)
        assert found.grad_clip == pytest.approx(expected.grad_clip, rel=1e-12) and (found.grad_clip < 1) == (norm is not None)
    for own, param in zip(plain.parameters(), module.parameters()):
        torch.testing.assert_close(full(param), own, rtol=0, atol=1e-6)
    before = digest(module)
    gradients_of(module, 2)
    if rank == 1:
        module.up.weight.grad._local_tensor[0, 0] = math.inf
    optimizer.step()
    assert optimizer.last_step().skipped and digest(module) == before
    train(module, optimizer, [2])
    assert not optimizer.last_step().skipped and digest(module) != before
    assert optimizer.stats().steps_skipped == 1 and len(optimizer.step_results()) == 5
    return digest(module), optimizer.last_step().grad_norm.hex()


def test_all_ranks_clip_and_skip_alike():
    assert len(set(ranks.run(clips_and_skips, 2))) == 1


def test_without_ranks_it_is_muon():
    results = []
    for cls in (hybridopt.Muon, hybridopt.ShardedMuon):
        module = block()
        optimizer = cls(groups_of(module), **OPTIONS)
        train(module, optimizer, range(2))
        results.append((digest(module), state_bits(optimizer)))
    assert results[0] == results[1]
    assert str(optimizer.homes) == "no matrix is cut between ranks"
    with optimizer.overlap(module):
        module(torch.ones(1, 10))
        train(module, optimizer, [2])
    optimizer.synchronize()
    assert digest(module) != results[0][0]


def scaled(rank, world):
    plain = block()
    module = fully_shard(copy.deepcopy(plain))
    optimizer, follower = hybridopt.ShardedMuon(groups_of(module), **OPTIONS), hybridopt.Muon(groups_of(plain), **OPTIONS)
    scalers = [torch.amp.GradScaler("cpu", init_scale=128.0, growth_interval=2) for _ in range(2)]
    for seed in range(5):
        for each, steps, scaler in ((module, optimizer, scalers[0]), (plain, follower, scalers[1])):
            scaler.scale(torch.zeros(1))
            gradients_of(each, seed)
            if seed == 3 and each is plain:
                plain.up.weight.grad[-1, 0] = math.inf
            if seed == 3 and each is module and rank == 1:
                module.up.weight.grad._local_tensor[-1, 0] = math.inf
            scaler.step(steps)
            scaler.update()
        assert digest(module) == digest(plain)
        assert scalers[0].get_scale() == scalers[1].get_scale()
    return scalers[0].get_scale()


def test_a_grad_scaler_skips_on_all_ranks():
    assert set(ranks.run(scaled, 2)) == {128.0}


def moved_weights(rank, world):
    """Weights that other code writes between steps are those that the next step updates."""
    mesh = init_device_mesh("cpu", (world,))
    cut = Parameter(distribute_tensor(torch.ones(6, 4), mesh, [Shard(0)]))
    optimizer = hybridopt.ShardedMuon([("x", cut)], lr=0.1, threads=1)
    plain = Parameter(torch.ones(6, 4))
    follower = hybridopt.Muon([("x", plain)], lr=0.1, threads=1)
    for seed in range(3):
        gradient = torch.randn(6, 4, generator=torch.Generator().manual_seed(seed))
        cut.grad, plain.grad = distribute_tensor(gradient, mesh, [Shard(0)]), gradient
        optimizer.step()
        follower.step()
        assert torch.equal(full(cut), plain)
        with torch.no_grad():
            cut._local_tensor.data.mul_(0.5)
            plain.mul_(0.5)


def test_weights_that_are_written_between_steps_are_followed():
    ranks.run(moved_weights, 2)


def hidden(rank, world, dtype, mesh_shape, options):
    """Losses, params and state of steps that overlap, of hooked gradients, of both, and of neither."""
    seen = []
    for overlaps, hooks in ((False, False), *([(True, False), (False, True)] if world == 2 else []), (True, True)):
        module = block().to(dtype)
        if len(mesh_shape) > 1:
            mesh = init_device_mesh("cpu", mesh_shape, mesh_dim_names=("dp", "tp"))
            parallelize_module(module, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
            fully_shard(module, mesh=mesh["dp"])
            options = {**options, "process_group": dist.group.WORLD}
        else:
            fully_shard(module.mix)
            fully_shard(module)
        given = {"max_grad_norm": None, **OPTIONS, **options}
        optimizer = hybridopt.ShardedMuon(groups_of(module), overlap=module if overlaps else None, **given)
        if hooks:
            optimizer.hook_gradients(micro_batches=2)
        losses = []
        for step in range(5):
            for micro_batch in range(2):
                inputs = torch.randn(6, 10, generator=torch.Generator().manual_seed(100 * step + 10 * micro_batch + rank))
                loss = module(inputs.to(dtype)).square().mean()
                (loss * (math.inf if step == 2 and rank == world - 1 else 1.0)).backward()
                losses.append(loss.item())
                left = hooks and micro_batch == 1
                assert all((param.grad is None) == left for param in module.parameters())
                assert not left or len(optimizer._going_home._gone) == 4
            optimizer.step()
            optimizer.zero_grad(set_to_none=step != 3)
            gradients = [param.grad for param in module.parameters()]
            assert all(each is None if step != 3 else not each.to_local().any() for each in gradients)
            assert is_under_way(optimizer) == overlaps
            for group in optimizer.param_groups:
                group["lr"] *= 0.5
        shown = optimizer.state_dict()["state"]
        state = [full(value).float() for entry in shown.values() for value in entry.values()]
        results = [(result.skipped, result.grad_norm.hex()) for result in optimizer.step_results()]
        seen.append((losses, digest(module), hashlib.sha256(b"".join(each.numpy().tobytes() for each in state)).hexdigest(), results))
    assert all(each == seen[0] for each in seen)
    assert [skipped for skipped, _ in seen[0][3]] == [False, False, True, False, False]


def is_under_way(optimizer):
    return optimizer._way_back is not None and optimizer._way_back.is_wanted()


@pytest.mark.parametrize(
    ("dtype", "mesh_shape", "options"),
    [
        (torch.float32, (4,), {"max_grad_norm": 0.1}),
        (torch.bfloat16, (2,), SPLIT_STATE),
        pytest.param(torch.float32, (2, 2), {}, marks=ranks.cuts_unevenly_beside_tensor_parallelism),
    ],
)
def test_overlap_and_hooked_gradients_change_no_bit(dtype, mesh_shape, options):
    ranks.run(hidden, math.prod(mesh_shape), dtype, mesh_shape, options)


def forward(module):
    module(torch.ones(1, 10))
    module.reshard()  # as a backward pass does


def reads_different_params(rank, module, optimizer, folder):
    """A rank's first use decides nothing about the order of messages."""
    (module.up if rank == 0 else module.gate_up).weight.to_local().sum()


def reads_on_one_rank(rank, module, optimizer, folder):
    """It waits for the others, which bring params back when they use them."""
    if rank == 0:
        module.up.weight.to_local().sum()
    forward(module)


def ends(rank, module, optimizer, folder):
    optimizer.close()


def saves_and_loads(rank, module, optimizer, folder):
    optimizer.save_checkpoint(folder / "saved")
    optimizer.load_checkpoint(folder / "saved")


def loads_state(rank, module, optimizer, folder):
    optimizer.load_state_dict(optimizer.state_dict())


def moves_state(rank, module, optimizer, folder):
    """State may move while a step is under way; this rank's params come back later."""
    for fraction in (0.0, 0.5, 1.0):
        optimizer.set_offload_fraction(fraction)
    with optimizer.offloaded():
        assert optimizer.memory_timeline()[-1].label == "offload"
    assert optimizer.memory_timeline()[-1].label == "reload"
    with pytest.raises(ZeroDivisionError), optimizer.offloaded(states=True):
        raise ZeroDivisionError
    assert [sample.label for sample in optimizer.memory_timeline()[-2:]] == ["offload", "reload"]
    assert is_under_way(optimizer)
    optimizer.synchronize()


def is_forked(rank, module, optimizer, folder):
    """A process that is forked while params are away is told so: it cannot bring them back."""
    child = os.fork()
    if child == 0:
        try:
            with pytest.raises(abi.InvalidStateError, match=r"forked before it came back from its home; call optimizer.synchr"):
                module.up.weight.to_local()
            os._exit(0)
        finally:
            os._exit(1)
    assert os.waitpid(child, 0)[1] == 0
    assert is_under_way(optimizer)
    forward(module)


USES = {
    "params": reads_different_params,
    "one rank": reads_on_one_rank,
    "full_tensor": lambda rank, module, *_: module.down.weight.full_tensor(),
    "state_dict of the model": lambda rank, module, *_: module.state_dict(),
    "torch's checkpoints": lambda rank, module, optimizer, _: get_state_dict(module, optimizer),
    "the module above": lambda rank, module, *_: forward(module),
    "checkpoints": saves_and_loads,
    "state": loads_state,
    "moves": moves_state,
    "remove": lambda rank, module, optimizer, _: optimizer._way_back.remove(),
    "close": ends,
    "fork": is_forked,
}


def used_while_under_way(rank, world, folder):
    expected = None
    for use in (None, *USES):
        module = fully_shard(block())
        optimizer = hybridopt.ShardedMuon(groups_of(module), movable=("states",), **OPTIONS)
        if use is not None:
            assert repr(optimizer.overlap(module)) == "<overlap(FSDPBlock) of ShardedMuon, until remove()>"
        forward(module)
        gradients_of(module, 1)
        optimizer.step()
        if use is not None:
            assert is_under_way(optimizer)
            place = folder / use.replace(" ", "_")
            if rank == 0:
                place.mkdir()
            dist.barrier()
            USES[use](rank, module, optimizer, place)
            assert not is_under_way(optimizer), use
        expected = expected or digest(module)
        assert digest(module) == expected, use
    # The optimizer may end before: the params remember what is to come.
    optimizer = hybridopt.ShardedMuon(groups_of(module), overlap=module, **OPTIONS)
    forward(module)
    gradients_of(module, 1)
    optimizer.step()
    before = module.up.weight._local_tensor
    assert type(before).__torch_function__ is not torch.Tensor.__torch_function__  # it has a trap
    ended = weakref.ref(optimizer)
    del optimizer
    assert ended() is None
    assert digest(module) != expected
    assert "_hybridopt_way_back" not in vars(module.up.weight)


def test_the_first_use_of_a_param_brings_all_back_in_one_order(tmp_path):
    ranks.run(used_while_under_way, 2, tmp_path)


class Hooked:
    """Four matrices, one of them frozen, that two ranks share, and the same ones without shards."""

    def __init__(self, world):
        self.mesh = init_device_mesh("cpu", (world,))
        start = torch.randn(4, 6, 5, generator=torch.Generator().manual_seed(0)).unbind()
        self.cut = [Parameter(distribute_tensor(each, self.mesh, [Shard(0)])) for each in start]
        self.plain = [Parameter(each.clone()) for each in start]
        for params in (self.cut, self.plain):
            params[2].requires_grad_(False)  # has no turn
        self.optimizer = hybridopt.ShardedMuon(self.cut, max_grad_norm=None, **OPTIONS)
        self.follower = hybridopt.Muon(self.plain, **OPTIONS)
        self.removal = self.optimizer.hook_gradients()

    def backward(self, order, seed):
        """Makes the gradients of these matrices, one after the other."""
        for index in order:
            gradient = torch.randn(6, 5, generator=torch.Generator().manual_seed(10 * seed + index))
            part = ranks.distributed(gradient, self.mesh, [Shard(0)]).to_local()
            (self.cut[index].to_local() * part).sum().backward()
            self.plain[index].grad = gradient

    def gone(self):
        return len(self.optimizer._going_home._gone)

    def step(self):
        self.optimizer.step()
        self.follower.step()
        self.follower.zero_grad()
        assert all(torch.equal(full(own), other) for own, other in zip(self.cut, self.plain))


def orders_of_hooks(rank, world):
    """Gradients that are ready in another order on each rank, and passes in which some have none."""
    hooked = Hooked(world)
    optimizer, removal = hooked.optimizer, hooked.removal
    with pytest.raises(abi.InvalidStateError, match="gradients are hooked already"):
        optimizer.hook_gradients()
    for seed, orders in enumerate((((3, 1, 0), (0, 1, 3)), ((1, 3, 0), (3, 0, 1)))):
        hooked.backward(orders[rank], seed)
        assert hooked.gone() == 3 and all(param.grad is None for param in hooked.cut)
        with pytest.raises(abi.InvalidStateError, match=r"clip_grad_norm_\(\) and its like find no gradients"):
            nn.utils.clip_grad_norm_(hooked.cut, 1.0)
        for call, text in (
            (lambda: hooked.backward([1], seed), "'param_groups.0.1' has been taken already, .*micro_batches=None"),
            (optimizer.state_dict, r"state_dict\(\) is called between a backward pass, .*; call step\(\) or zero_grad\(\)"),
            (removal.remove, "the hooks are removed between a backward pass"),
        ):
            with pytest.raises(abi.InvalidStateError, match=text):
                call()
        hooked.cut[1].grad = None  # of the pass that was refused
        hooked.step()
    # A pass that is dropped, of which one rank has sent more than the other.
    hooked.backward([3] if rank == 0 else [3, 1], 7)
    assert hooked.gone() == 1 + rank
    optimizer.zero_grad()
    hooked.follower.zero_grad()
    # A gradient that another hook of one rank has kept, and the program has written.
    hooked.backward([3, 1], 7)
    if rank == 1:
        optimizer._going_home._taken[1].tensor.mul_(2)
    with pytest.raises(abi.InvalidStateError, match=r"gradient of parameter 'param_groups.0.1' was written in place after hook_"):
        optimizer.step()
    optimizer.zero_grad()
    hooked.follower.zero_grad()
    for indices in ([3], [0], [1, 0]):  # also where some matrices have no gradient anywhere
        hooked.backward(indices, 8)
        hooked.step()
    # One rank lacks a gradient, for which the home waits.
    hooked.backward([3, 1] if rank == 0 else [3], 9)
    with pytest.raises(ValueError, match=r"'param_groups.0.1' has no gradient on the ranks \[1\], but the others of \[0, 1\]"):
        optimizer.step()
    hooked.follower.zero_grad()
    hooked.backward([3, 1, 0], 10)
    hooked.step()
    if hasattr(torch.Tensor, "grad_dtype"):
        hooked.cut[3].grad_dtype = None  # any
        narrow = hooked.cut[3].detach().to_local().bfloat16()
        hooked.cut[3].grad = DTensor.from_local(narrow, hooked.mesh, [Shard(0)], run_check=False)
        with pytest.raises(abi.InvalidStateError, match="is torch.bfloat16, but goes home in torch.float32; set grad_dtype"):
            optimizer._going_home._take(hooked.cut[3])
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(torch.zeros(1))
    with pytest.raises(abi.UnsupportedError, match="does not go with a GradScaler, which finds no gradients; leave one of"):
        scaler.step(optimizer)
    del optimizer.grad_scale, optimizer.found_inf
    removal.remove()
    hooked.cut[3].grad = None
    optimizer.zero_grad()
    hooked.backward([3, 1, 0], 11)
    assert all(hooked.cut[index].grad is not None for index in (0, 1, 3))
    hooked.step()


def rounds_differ(rank, world):
    """zero_grad() on one rank alone is noticed: gradients of two passes would come together."""
    hooked = Hooked(world)
    hooked.backward([3, 1, 0], 0)
    if rank == 0:
        hooked.optimizer._going_home._round += 1
    with pytest.raises(abi.InvalidStateError, match=r"the ranks \[0, 1\] have ended \[1, 0\] backward passes by step\(\) or"):
        hooked.optimizer.step()


def test_hooked_gradients_go_home_in_one_order():
    ranks.run(orders_of_hooks, 2)
    ranks.run(rounds_differ, 2)


def without_matrices(rank, world):
    """Two stages of a pipeline, one of which has no matrices that its ranks share."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("stages", "shards"))["shards"]
    start = torch.randn(2, 6, 4, generator=torch.Generator().manual_seed(0)).unbind()
    is_apart = rank >= 2
    cut = [Parameter(each.clone() if is_apart else distribute_tensor(each, mesh, [Shard(0)])) for each in start]
    plain = [Parameter(each.clone()) for each in start]
    names = [f"{f'own{rank}.' if is_apart else 'shared'}{index}" for index in range(2)]
    optimizer = hybridopt.ShardedMuon(list(zip(names, cut)), process_group=dist.group.WORLD, **OPTIONS)
    follower = hybridopt.Muon(plain, **OPTIONS)
    assert len(optimizer.homes) == (0 if is_apart else 2)
    for seed in range(4):
        if seed == 2:
            optimizer.load_state_dict(optimizer.state_dict())
            optimizer.max_grad_norm = None  # the norm would be that of all ranks
            optimizer.hook_gradients()
        for own, other in zip(cut, plain):
            gradient = torch.randn(6, 4, generator=torch.Generator().manual_seed(seed))
            part = gradient if is_apart else ranks.distributed(gradient, mesh, [Shard(0)]).to_local()
            ((own if is_apart else own.to_local()) * part).sum().backward()
            other.grad = gradient
        optimizer.step()
        follower.step()
        optimizer.zero_grad()
        assert all(torch.equal(full(own), other) for own, other in zip(cut, plain))


def test_a_rank_may_share_no_matrix():
    ranks.run(without_matrices, 4)


def equal_names(rank, world):
    """Two models may give their matrices the same name: each is updated by its own gradient."""
    mesh = init_device_mesh("cpu", (world,))
    start = [torch.ones(6, 4), torch.ones(6, 4), torch.ones(5, 2)]
    cut = [Parameter(distribute_tensor(each, mesh, [Shard(0)])) for each in start]
    plain = [Parameter(each.clone()) for each in start]
    with pytest.warns(UserWarning, match="several parameters have the same name"):
        sharded = hybridopt.ShardedMuon([("x", param) for param in cut], **OPTIONS)
        for seed in range(2):
            for index in (1, 2):
                gradient = torch.randn(start[index].shape, generator=torch.Generator().manual_seed(seed))
                cut[index].grad = distribute_tensor(gradient, mesh, [Shard(0)])
                plain[index].grad = gradient
            sharded.step()
    follower = hybridopt.Muon([(f"x{index}", param) for index, param in enumerate(plain)], **OPTIONS)
    for seed in range(2):
        for index in (1, 2):
            plain[index].grad = torch.randn(start[index].shape, generator=torch.Generator().manual_seed(seed))
        follower.step()
    assert all(torch.equal(full(own), other) for own, other in zip(cut, plain))
    assert [torch.equal(own, other) for own, other in zip(plain, start)] == [True, False, False]


def test_matrices_with_equal_names_have_gradients_of_their_own():
    ranks.run(equal_names, 2)


def frozen(rank, world, folder):
    """A frozen matrix has no state, here as without shards, so that checkpoints go both ways."""
    mesh = init_device_mesh("cpu", (world,))
    start = torch.randn(2, 6, 4, generator=torch.Generator().manual_seed(0)).unbind()
    cut = [Parameter(distribute_tensor(each, mesh, [Shard(0)])) for each in start]
    plain = [Parameter(each.clone()) for each in start]
    for params in (cut, plain):
        params[1].requires_grad_(False)
    optimizer = hybridopt.ShardedMuon([("x", cut[0]), ("y", cut[1])], **OPTIONS)
    follower = hybridopt.Muon([("x", plain[0]), ("y", plain[1])], **OPTIONS)

    def step(index):
        for each in range(2):
            cut[each].grad = distribute_tensor(torch.ones(6, 4), mesh, [Shard(0)]) if each == index else None
            plain[each].grad = torch.ones(6, 4) if each == index else None
        optimizer.step()
        follower.step()
        assert all(torch.equal(full(own), other) for own, other in zip(cut, plain))

    step(0)
    optimizer.save_checkpoint(folder / "sharded")
    follower.load_checkpoint(folder / "sharded")
    if rank == 0:
        follower.save_checkpoint(folder / "whole")
    dist.barrier()
    optimizer.load_checkpoint(folder / "whole")
    step(0)
    for params in (cut, plain):  # trained from now on
        params[1].requires_grad_()
    step(1)


def test_a_frozen_matrix_has_no_state(tmp_path):
    ranks.run(frozen, 2, tmp_path)


def wide_gradients(rank, world):
    """Gradients in fp32 of params in bf16, where a home may have no row of its own."""
    mesh = init_device_mesh("cpu", (world,))
    start = torch.randn(4, 2, 5, generator=torch.Generator().manual_seed(0)).bfloat16().unbind()
    cut = [Parameter(distribute_tensor(each, mesh, [Shard(0)])) for each in start]
    plain = [Parameter(each.clone()) for each in start]
    optimizer, follower = hybridopt.ShardedMuon(cut, **OPTIONS), hybridopt.Muon(plain, **OPTIONS)
    assert {each.home for each in optimizer.homes} == set(range(world))
    for seed in range(3):
        is_wide = seed > 0  # as where a program begins to add up gradients
        for own, other in zip(cut, plain):
            own.grad = other.grad = None
            own.grad_dtype = other.grad_dtype = torch.float32 if is_wide else torch.bfloat16
            gradient = torch.randn(2, 5, generator=torch.Generator().manual_seed(seed)).to(other.grad_dtype)
            sharded = distribute_tensor(gradient, mesh, [Shard(0)])
            own.grad, other.grad = sharded if sharded._local_tensor.numel() > 0 else None, gradient
        optimizer.step()
        follower.step()
        assert all(torch.equal(full(own), other) for own, other in zip(cut, plain))


@pytest.mark.skipif(not hasattr(torch.Tensor, "grad_dtype"), reason="this torch has no Tensor.grad_dtype")
def test_gradients_go_home_as_they_are():
    ranks.run(wide_gradients, 4)


def test_homes_share_the_work_and_all_ranks_agree():
    cuts = [
        homes.CutMatrix(f"m{i}", (rows, 8), {rank: [[(0, 0)], [(0, 8)]] for rank in range(3)}, frozenset())
        for i, rows in enumerate((64, 8, 32, 8, 8, 32))
    ]
    given = homes.with_homes(cuts)
    load = [sum(cut.cost for cut in given if cut.home == rank) for rank in range(3)]
    assert [cut.name for cut in given] == [cut.name for cut in cuts]
    assert load == [64 * 64, 48 * 64, 40 * 64]


def test_a_part_may_have_several_runs_of_rows():
    """As a part that torch's _StridedShard has cut: its runs follow each other in the part, not in the matrix."""
    rows = {0: [(0, 2), (4, 6)], 1: [(2, 4), (6, 8)]}
    cut = homes.CutMatrix("m", (8, 3), {rank: [runs, [(0, 3)]] for rank, runs in rows.items()}, frozenset())
    whole, rebuilt = torch.arange(24).view(8, 3), torch.zeros(8, 3, dtype=torch.int64)
    for rank in rows:
        part = torch.empty(cut.extents(rank), dtype=torch.int64)
        for there, here in cut.regions(rank):
            part[here] = whole[there]
        assert torch.equal(part, torch.cat([whole[begin:end] for begin, end in rows[rank]]))
        for there, here in cut.regions(rank):
            rebuilt[there] = part[here]
    assert torch.equal(rebuilt, whole)
