"""What goes to the host: the choice, which needs no tensors to be tested; names and roles; tables; bad input."""

import functools
import inspect
import os
import pathlib
import re
import types

import pytest
import torch
from models import VALUES, Block, told
from torch import nn
from torch.nn import functional

import hybridopt
from hybridopt import abi
from hybridopt.stash import wrap_as_megatron
from hybridopt.stash.choice import LINK_SHARE, Link, Measured, choose, schedule
from hybridopt.stash.names import matches

MIB = 1 << 20
LINK = Link(down=100.0 * MIB / LINK_SHARE, up=100.0 * MIB / LINK_SHARE)


def ranges_of(count, bytes=10 * MIB, forward=1.0, held=()):
    """Ranges that are saved at equal intervals in the forward pass and used in reverse order at twice these
    intervals."""
    return [
        Measured(
            bytes=bytes,
            name="",
            role="",
            group=place,
            saved=forward * place / count,
            used=forward + 2 * forward * (count - place) / count,
            is_held=place in held,
        )
        for place in range(count)
    ]


def chosen(ranges, forward=1.0, link=LINK, budget=1 << 40, keep_last=0, fraction=None):
    return choose(ranges, forward, link, budget_bytes=budget, keep_last=keep_last, fraction=fraction)


def test_what_lives_longest_goes_until_the_link_is_full():
    choice = chosen(ranges_of(40))
    assert choice.goes == (True,) * 10 + (False,) * 30  # the link copies 10 times 10 MiB in a second
    assert choice.chosen_bytes == 100 * MIB and choice.kept_bytes == 300 * MIB
    assert choice.order == tuple(range(9, -1, -1))
    assert choice.forward_seconds == 1.0 and choice.backward_seconds == pytest.approx(2.0)


def test_what_is_saved_late_has_less_time():
    """The copies to the host must also be complete when the forward pass ends."""
    ranges = ranges_of(10)
    for each in ranges[:5]:
        each.used = None  # never used, so their lifetime is zero
    choice = chosen(ranges, link=Link(down=113.0 * MIB, up=113.0 * MIB))
    assert choice.goes == (False,) * 5 + (True,) * 5
    choice = chosen(ranges, link=Link(down=57.0 * MIB, up=57.0 * MIB))
    assert choice.goes == (False,) * 5 + (True,) * 2 + (False,) * 3


def test_what_is_used_early_cannot_come_back_in_time():
    ranges = ranges_of(10)
    ranges[0].used = 1.05  # lives long enough to be copied to the host, and is then needed at once
    ranges[0].saved = -5.0
    assert not chosen(ranges).goes[0]
    assert chosen(ranges, fraction=0.1).goes[0]
    assert chosen(ranges, link=Link(down=LINK.down, up=1000.0 * MIB)).goes[0]


def test_a_fraction_goes_whether_it_can_be_hidden_or_not():
    slow = Link(down=1.0, up=1.0)
    assert chosen(ranges_of(40), link=slow).chosen_bytes == 0
    assert sum(chosen(ranges_of(40), link=slow, fraction=0.25).goes) == 10
    assert sum(chosen(ranges_of(40), link=slow, fraction=1.0).goes) == 40
    assert sum(chosen(ranges_of(40), fraction=0.0).goes) == 0


def test_last_groups_held_ranges_and_the_budget():
    assert chosen(ranges_of(8), fraction=1.0, keep_last=3).goes == (True,) * 5 + (False,) * 3
    assert sum(chosen(ranges_of(8), fraction=1.0, keep_last=9).goes) == 0
    ranges = ranges_of(8)
    for place, each in enumerate(ranges):
        each.group = place // 4
    assert chosen(ranges, fraction=1.0, keep_last=1).goes == (True,) * 4 + (False,) * 4
    assert chosen(ranges_of(4, held=(0, 2)), fraction=1.0).goes == (False, True, False, True)
    assert sum(chosen(ranges_of(8), fraction=1.0, budget=35 * MIB).goes) == 3
    assert chosen([]).order == ()


def test_copies_back_begin_as_late_as_they_may_and_end_in_time():
    ranges = ranges_of(40)
    goes = [place < 10 for place in range(40)]
    order, begin = schedule(ranges, goes, LINK)
    uses = sorted(each.used for each in ranges)
    free_at = 0.0
    for place, count in zip(order, begin):
        start = max(free_at, uses[max(count - 1, 0)])
        free_at = start + ranges[place].bytes / LINK.up
        assert free_at <= ranges[place].used
    assert begin[0] == 16  # ten copies of 0.1125 s, with their margin, before the last use at 3.0 s
    assert list(begin) == sorted(begin)


@pytest.mark.parametrize(
    "module, name, expected",
    [
        ("blocks.3.norm1", "norm1", True),
        ("blocks.3.norm1", "norm", False),
        ("blocks.3.norm1", "norm*", True),
        ("blocks.3.norm1", "blocks.3", True),
        ("blocks.31.norm1", "blocks.3", False),
        ("blocks.3.attention.core", "attention.core", True),
        ("blocks.3.attention.core.softmax", "attention.core", True),
        ("blocks.3.attention", "attention.core", False),
        ("decoder.layers.0.self_attention.core_attention", "core_attn", True),
        ("decoder.layers.0.pre_mlp_layernorm", "mlp_norm", True),
        ("decoder.layers.0.mlp.experts.linear_fc1", "expert_fc1", True),
        ("decoder.layers.0.mlp.linear_fc1", "expert_fc1", False),
        ("", "norm", False),
    ],
)
def test_names(module, name, expected):
    assert matches(module, name) == expected


# ------------------------------------------------------------------------------- only, dry_run --


class Layer(nn.Module):
    def __init__(self, width=16):
        super().__init__()
        self.mix, self.mlp = nn.Linear(width, width), Block(width, 64)

    def forward(self, x):
        heads = self.mix(x).unflatten(-1, (2, 8)).transpose(-2, -3)
        return self.mlp(functional.scaled_dot_product_attention(heads, heads, heads).transpose(-2, -3).flatten(-2))


def model_and_stash(**options):
    model = nn.Sequential(*(Layer() for _ in range(4)))
    options = {"budget": 4 * MIB, "min_bytes": 1, "slab_bytes": 4096, "keep_last": 0, "model": model, **options}
    return model, hybridopt.ActivationStash(**options)


def backward(model):
    model(torch.randn(2, 6, 16)).square().mean().backward()


# --------------------------------------------------------------------------------------- reports --


def particulars(stash):
    """The parts of repr()."""
    first, *lines, last = repr(stash).splitlines()
    assert (first, last) == ("ActivationStash (", ")")
    return dict(line.strip().split(": ", 1) for line in lines)


NOT_MEASURED = "none before a forward and a backward pass have been measured"


def test_repr_tells_budget_use_modules_and_choice():
    model, stash = model_and_stash(fraction=1.0)
    assert particulars(stash) == {"device": "cpu", "budget": "4.0 MiB", "in use": "0 bytes"}
    with stash:
        loss = model(torch.randn(2, 6, 16)).square().mean()
    held = stash.stats().host_bytes
    assert 1024 < held < 1 << 20
    assert particulars(stash)["in use"] == f"{held / 1024:.1f} KiB"
    assert particulars(stash)["choice()"] == NOT_MEASURED and stash.choice() is None
    loss.backward()
    choice = stash.choice()
    told = f"{len(choice.order)} of {len(choice.goes)} tensors go, "
    assert particulars(stash)["choice()"].startswith(told) and len(choice.order) > 0
    assert "goes=" not in repr(choice) and f"chosen_bytes={choice.chosen_bytes}" in repr(choice)
    first, others = stash.wrap(model[0], weights=True), stash.wrap(list(model[1:]))
    assert particulars(stash)["wrapped"] == "4 modules, of 1 the weights too"
    first.remove()
    assert particulars(stash)["wrapped"] == "3 modules"
    others.remove()
    assert "wrapped" not in particulars(stash)
    with stash("other"):
        pass
    assert particulars(stash)["choice('other')"].startswith("nothing goes")
    stash.close()
    assert particulars(stash)["in use"] == "none, the stash is closed"


def test_repr_in_a_forked_child_does_not_raise():
    stash = model_and_stash()[1]
    child = os.fork()
    if child == 0:
        os._exit(0 if particulars(stash)["in use"].startswith("not known: ") else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_where_nothing_may_go_the_choice_is_one_without_tensors():
    model, stash = model_and_stash(min_bytes=1 << 20)
    for _ in range(2):
        assert stash.choice() is None or stash.choice().goes == ()
        with stash:
            loss = model(torch.randn(2, 6, 16)).square().mean()
        loss.backward()
    choice = stash.choice()
    assert choice.goes == choice.order == () and choice.eligible_bytes == choice.chosen_bytes == 0
    assert particulars(stash)["choice()"] == "nothing goes: no tensor of at least 1.0 MiB was saved that may go"
    for _ in range(3):  # tensors that are large enough would be measured in the first pass
        with stash:
            loss = model(torch.randn(2048, 16, 16)).square().mean()
        loss.backward()
    assert stash.choice().eligible_bytes > 1 << 20


def names_of(stash, model):
    table = stash.dry_run(functools.partial(backward, model))
    return {row.name for row in table.rows[:-1]}


def test_a_dry_run_tells_what_each_choice_saves_and_costs():
    model, stash = model_and_stash()
    table = stash.dry_run(functools.partial(backward, model))
    rows = {row.name: row for row in table.rows}
    assert {"*.mlp.norm (norm)", "*.mlp (activation)", "* (attention.core)", "*.mix (linear)"} <= set(rows)
    assert rows["*.mlp (activation)"].count == 4 and rows["*.mlp (activation)"].bytes == 4 * 12 * 64 * 4
    everything = rows.pop("all")
    assert table.rows[-1] is everything
    assert everything.bytes == sum(row.bytes for row in rows.values())
    assert everything.count == sum(row.count for row in rows.values())
    for row in table.rows:
        assert 0 <= row.hidden_bytes <= row.bytes and row.cost_seconds <= row.copy_seconds
        assert row.lifetime_seconds > 0
    text = str(table).splitlines()
    assert len(text) == len(table.rows) + 2 and text[1].startswith(table.rows[0].name)
    assert stash.choice() is None and stash.stats().host_bytes == 0


def test_only_some_go():
    model, stash = model_and_stash()
    everything = names_of(stash, model)
    stash.only("mlp.norm", "attention.core")
    assert names_of(stash, model) == {"*.mlp.norm (norm)", "* (attention.core)"}
    stash.only("mlp")
    assert names_of(stash, model) == {name for name in everything if ".mlp" in name}
    stash.only("2", "linear")
    assert {name for name in names_of(stash, model) if "(linear)" not in name} < everything
    stash.only()
    assert names_of(stash, model) == everything


def test_only_holds_in_training_too():
    model, stash = model_and_stash(fraction=1.0)
    stash.only("activation")
    for _ in range(3):
        with stash:
            loss = model(torch.randn(2, 6, 16)).square().mean()
        loss.backward()
    assert stash.choice().eligible_bytes == 4 * 12 * 64 * 4
    stash.only("mlp.norm")
    assert stash.choice() is None
    stash.wrap([model[1], model[2]])
    for _ in range(3):
        backward(model)
    assert stash.choice().eligible_bytes == 2 * 12 * (16 + 2) * 4


def test_names_that_stand_for_nothing_are_refused():
    _, stash = model_and_stash()
    with pytest.raises(ValueError, match=r"only\(\) got 'nrom', but the model has no module of that name; expected "
                       r"parts of .* roles norm, attention.core.* Megatron-LM's attn_norm"):  # fmt: skip
        stash.only("norm", "nrom")
    _, stash = model_and_stash(model=None)
    stash.only("norm")
    with pytest.raises(ValueError, match=r"'mlp', but the model is not known: give model="):
        stash.only("mlp")


def test_a_dry_run_without_a_backward_pass_is_refused():
    model, stash = model_and_stash()
    with pytest.raises(RuntimeError, match=r"dry_run\(\) has seen no backward pass .* at least min_bytes \(1 bytes\)"):
        stash.dry_run(lambda: model(torch.randn(2, 6, 16)))
    backward(model)


# ------------------------------------------------------------------------- settings of Megatron-LM --


def pushed_by(wrap):
    model, stash = model_and_stash(fraction=1.0)
    torch.manual_seed(0)
    wrap(stash, model)
    for _ in range(2):
        backward(model)
    stats = stash.stats()
    return stats.saved_bytes, stats.pushed_bytes, stats.weights_away_bytes


@pytest.mark.parametrize(
    "settings, wrap",
    [
        ({}, lambda stash, model: stash.wrap([])),
        ({"cpu_offloading_num_layers": 3}, lambda stash, model: stash.wrap([])),  # the switch for it is off
        ({"cpu_offloading": True}, lambda stash, model: stash.wrap([])),
        ({"cpu_offloading": True, "cpu_offloading_num_layers": 2}, lambda stash, model: stash.wrap(model[:2])),
        (
            {"cpu_offloading": True, "cpu_offloading_num_layers": 3, "cpu_offloading_weights": True},
            lambda stash, model: stash.wrap(model[:3], weights=True),
        ),
        (
            {"cpu_offloading": True, "cpu_offloading_num_layers": 3, "cpu_offloading_weights": True,
             "cpu_offloading_activations": False, "cpu_offloading_double_buffering": True},
            lambda stash, model: stash.wrap(model[:3], weights=True, activations=False),
        ),
        (
            {"fine_grained_activation_offloading": True, "offload_modules": ["norm", "mlp"]},
            lambda stash, model: (stash.only("norm", "mlp"), stash.wrap(model[:3])),
        ),
    ],
    ids=str,
)  # fmt: skip
def test_settings_of_megatron(settings, wrap):
    config = types.SimpleNamespace(**settings)
    found = pushed_by(lambda stash, model: wrap_as_megatron(stash, model, config))
    assert found == pushed_by(lambda stash, model: wrap(stash, list(model)))
    assert (found[1] > 0) == (settings.get("cpu_offloading_num_layers", 4) > 0 and len(settings) > 1)


WHOLE = {"cpu_offloading": True, "cpu_offloading_num_layers": 2}
FINE = {"fine_grained_activation_offloading": True, "offload_modules": ["mlp"]}


@pytest.mark.parametrize(
    "settings, kind, text",
    [
        ({**WHOLE, "cpu_offloading_num_layers": 4}, ValueError,
         "cpu_offloading_num_layers is 4, expected 0 to 3: one less than the 4 layers that there are"),
        ({**WHOLE, "cpu_offloading_num_layers": -1}, ValueError, "cpu_offloading_num_layers is -1, expected 0 to 3"),
        ({**WHOLE, "cpu_offloading_num_layers": 1.0}, TypeError, "cpu_offloading_num_layers is 1.0, expected an int"),
        ({**WHOLE, **FINE}, ValueError, "are both True, expected one of them: the first puts whole layers aside"),
        ({**WHOLE, "cpu_offloading_activations": False}, ValueError, "are both False, expected one of them to be True"),
        ({**WHOLE, "cpu_offloading_weights": "yes"}, TypeError, "cpu_offloading_weights is 'yes', expected True or"),
        ({**WHOLE, "enable_cuda_graph": True}, ValueError, "enable_cuda_graph is True, expected no CUDA graphs"),
        ({**WHOLE, "cuda_graph_impl": "local"}, ValueError, "cuda_graph_impl is 'local', expected no CUDA graphs"),
        ({**FINE, "external_cuda_graph": True}, ValueError, "external_cuda_graph is True, expected no CUDA graphs"),
        ({**FINE, "offload_modules": None}, ValueError, "offload_modules is None, expected a list of names"),
        ({**FINE, "offload_modules": ["nrom"]}, ValueError, "only.. got 'nrom', but the model has no module"),
    ],
    ids=str,
)  # fmt: skip
def test_settings_of_megatron_that_are_refused(settings, kind, text):
    model, stash = model_and_stash(fraction=1.0)
    with pytest.raises(kind, match=text):
        wrap_as_megatron(stash, model, types.SimpleNamespace(**settings))
    backward(model)
    assert stash.stats().saved == stash.stats().pushed_bytes == 0


# ----------------------------------------------------------------------------------- bad input --


@pytest.mark.parametrize(
    "arguments, kind, text",
    [
        ({"budget": "16 GiB"}, TypeError, "Invalid budget: '16 GiB', expected an int: bytes of host memory"),
        ({"budget": 0}, ValueError, "Invalid budget: 0, expected at least 1"),
        ({"budget": (1 << 64) + (4 << 20)}, ValueError, "Invalid budget: .*, expected less than 2"),
        ({"budget": 1.5e9}, TypeError, "Invalid budget: 1500000000.0, expected an int"),
        ({"keep_last": -1}, ValueError, "Invalid keep_last: -1, expected at least 0: groups"),
        ({"keep_last": True}, TypeError, "Invalid keep_last: True, expected an int"),
        ({"fraction": 1.5}, ValueError, "Invalid fraction: 1.5, expected a share .* from 0.0 to 1.0"),
        ({"fraction": "all"}, ValueError, "Invalid fraction: 'all'"),
        ({"fraction": True}, ValueError, "Invalid fraction: True"),
        ({"fraction": float("nan")}, ValueError, "Invalid fraction: nan"),
        ({"min_bytes": 0}, ValueError, "Invalid min_bytes: 0, expected at least 1"),
        ({"window_bytes": -5}, ValueError, "Invalid window_bytes: -5, expected at least 0"),
        ({"pin": "no"}, ValueError, "Invalid pin: 'no', expected True or False"),
        ({"model": []}, TypeError, r"Invalid model: \[\], expected a torch.nn.Module"),
        ({"device": "mps"}, ValueError, "Invalid device: 'mps', expected a torch.device .* number of GPUs here"),
        ({"slab_bytes": 1000}, abi.InvalidArgumentError, "slab_bytes"),
        ({"budget": 1 << 45}, abi.OutOfMemoryError, "^budget is 35184372088832, for which"),
    ],
    ids=str,
)
def test_wrong_arguments_are_refused(arguments, kind, text):
    with pytest.raises(kind, match=text):
        hybridopt.ActivationStash(**{"budget": MIB, **arguments})


ARGUMENTS = {  # for each, the entries of VALUES that it accepts
    "budget": {"1"},
    "keep_last": {"0", "1"},
    "fraction": {"0", "1", "None"},
    "min_bytes": {"1"},
    "slab_bytes": {"0"},
    "window_bytes": {"0", "1", "None"},
    "model": {"None"},
    "device": {"None"},
    "pin": {"True", "False", "0", "1", "tensor(1.)"},
}


@pytest.mark.parametrize("argument", ARGUMENTS)
def test_every_argument_takes_a_value_or_tells_what_it_expects(argument):
    for name, value in VALUES.items():
        arguments = {"budget": MIB, argument: value}
        if name in ARGUMENTS[argument]:
            hybridopt.ActivationStash(**arguments)
            continue
        with pytest.raises((ValueError, TypeError), match=rf"{argument}(: | is ){told(value)}, expected"):
            hybridopt.ActivationStash(**arguments)


CALLS = {  # for each, the entries of VALUES that it accepts
    "stash()": (lambda stash, value: stash(value), {"''", "'1'", "'cuda:99'"}),
    "choice()": (lambda stash, value: stash.choice(value), {"''", "'1'", "'cuda:99'"}),
    "wrap()": (lambda stash, value: stash.wrap(value), {"[]", "()", "{}", "range(0, 0)"}),
    "only()": (lambda stash, value: stash.only(value), set()),
    "dry_run()": (lambda stash, value: stash.dry_run(value), {repr(len)}),
}


@pytest.mark.parametrize("call", CALLS)
def test_every_call_takes_a_value_or_tells_what_it_expects(call):
    function, taken = CALLS[call]
    stash = hybridopt.ActivationStash(MIB)
    for name, value in VALUES.items():
        if name in taken:
            if call != "dry_run()":
                function(stash, value)
            continue
        with pytest.raises((ValueError, TypeError), match=rf"^{re.escape(call)} got .*, .*expected"):
            function(stash, value)


def test_wrong_calls_are_refused():
    model, stash = model_and_stash()
    name = "x" * 5000
    with pytest.raises(ValueError, match=f"^only\\(\\) got {told(name)}, but the model has no module of that name"):
        stash.only(name)
    with pytest.raises(TypeError, match=r"stash\(\) got 3, expected the name of a program as a string"):
        stash(3)
    with pytest.raises(TypeError, match=r"wrap\(\) got '0', expected torch.nn.Module or several of them"):
        stash.wrap(["0"])
    for switch in ("weights", "activations"):
        with pytest.raises(ValueError, match=rf"^Invalid {switch}: 'no', expected True or False$"):
            stash.wrap(model, **{switch: "no"})
    wrapping = stash.wrap(model)
    with pytest.raises(ValueError, match=r"wrap\(\) got a module that is wrapped already; remove\(\)"):
        stash.wrap([model])
    wrapping.remove()
    stash.wrap(model).remove()


def test_what_is_in_a_closed_stash_is_lost_and_says_so():
    model, stash = model_and_stash(fraction=1.0, window_bytes=0)
    with stash:
        loss = model(torch.randn(2, 6, 16)).sum()
    stash.close()
    with pytest.raises(abi.InvalidStateError, match="this Stash is closed; make a new one"):
        loss.backward()
    with pytest.raises(abi.InvalidStateError, match="this Stash is closed"), stash:
        model(torch.randn(2, 6, 16))
    backward(model)
    stash.close()


def test_a_forked_child_cannot_use_its_parents_stash():
    model, stash = model_and_stash()
    leaf = torch.randn(64, requires_grad=True)
    reading, writing = os.pipe()
    if os.fork() == 0:
        try:
            with stash:
                leaf.exp()
        except abi.HybridoptError as error:
            os.write(writing, str(error).encode())
        finally:
            os._exit(0)
    os.close(writing)
    os.wait()
    with open(reading) as said:
        assert "fork" in said.read()
    with stash:
        model(torch.randn(2, 6, 16)).sum().backward()


def test_the_library_as_it_is():
    """Tests abi.Stash alone: bytes go and come back."""
    context = abi.Context()
    plan = abi.stash_plan(context, budget_bytes=3 * 4096, slab_bytes=4096)
    assert (plan.slab_count, plan.slab_bytes, plan.fits) == (3, 4096, 1)
    with abi.Stash(context, budget_bytes=3 * 4096, slab_bytes=4096, min_bytes=1) as stash:
        source = torch.arange(1500, dtype=torch.int32)
        ticket = stash.push(source.data_ptr(), source.nbytes)
        assert ticket != 0 and stash.stats().held_bytes == 6000
        assert stash.push(source.data_ptr(), source.nbytes) == 0  # it takes two slabs
        stash.release(ticket)
        stash.wait(ticket)
        expected, back = source.clone(), torch.empty_like(source)
        source.zero_()
        stash.prefetch(ticket, back.data_ptr(), back.nbytes)
        stash.pop(ticket)
        assert torch.equal(back, expected)
        with pytest.raises(abi.InvalidArgumentError, match="ticket"):
            stash.pop(ticket)
        mark = stash.mark()
        assert stash.push(source.data_ptr(), source.nbytes) != 0
        stash.rollback(mark)
        stash.drop(stash.push(source.data_ptr(), source.nbytes))
        stash.wait()
        assert stash.stats().tickets == 0 and stash.stats().drops == 2


def test_the_example_in_the_docs_runs(capsys):
    text = (pathlib.Path(__file__).parents[3] / "docs/PYTORCH.md").read_text()
    (code,) = (block for block in re.findall(r"```python\n(.*?)```", text, re.S) if "ActivationStash(" in block)
    exec(compile(code, "docs/PYTORCH.md", "exec"), {})
    assert re.search(r"\d+ of \d+ bytes wait on the host", capsys.readouterr().out)


@pytest.mark.parametrize(
    "name", sorted(set(inspect.signature(hybridopt.ActivationStash).parameters) - {"fraction"})
)
def test_an_argument_that_is_assigned_is_refused(name):
    stash = hybridopt.ActivationStash(1 << 22, device="cpu", pin=False)
    with pytest.raises(AttributeError, match=rf"^ActivationStash\.{name} = 7 would have no effect, .*; give it to the constr"):
        setattr(stash, name, 7)
    stash.fraction, stash.another = 0.5, 7
    assert stash.fraction == 0.5 and stash.another == 7
