"""Translates the settings by which users of Megatron-LM and Transformer Engine choose what leaves the GPU."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import nn

from .activation_stash import ActivationStash
from .layers import Wrapping

# Fields of Megatron-LM's TransformerConfig with its defaults.
DEFAULTS: dict[str, Any] = {
    "cpu_offloading": False,
    "cpu_offloading_num_layers": 0,
    "cpu_offloading_activations": True,
    "cpu_offloading_weights": False,
    "cpu_offloading_double_buffering": False,
    "fine_grained_activation_offloading": False,
    "offload_modules": None,
    "enable_cuda_graph": False,
    "external_cuda_graph": False,
    "cuda_graph_impl": "none",
}
SWITCHES = [name for name, default in DEFAULTS.items() if isinstance(default, bool)]


def wrap_as_megatron(stash: ActivationStash, layers: Iterable[nn.Module], config: Any) -> Wrapping:
    """Wraps layers of a model as Megatron-LM's settings ask for it.

    Args:
        stash (ActivationStash): for fine-grained modules it was made with model=, which has their names.
        layers (torch.nn.ModuleList or modules): all layers of the model, or of this rank's stage, in order.
        config: an object with fields of Megatron-LM's TransformerConfig. A missing field has Megatron-LM's default.
            The function reads: cpu_offloading with cpu_offloading_num_layers (the first n layers),
            cpu_offloading_activations, cpu_offloading_weights; fine_grained_activation_offloading with
            offload_modules (names for only(), in all layers but the last). cpu_offloading_double_buffering
            may have either value: copies are always double-buffered. CUDA graphs are refused.

    Returns:
        Wrapping: its remove() ends this. Nothing is wrapped where both kinds are off.

    Raises:
        TypeError, ValueError: a setting is wrong, or contradicts another one; nothing has been wrapped.
    """
    settings = {name: getattr(config, name, default) for name, default in DEFAULTS.items()}
    modules = list(layers)
    for name in SWITCHES:
        if not isinstance(settings[name], bool):
            raise TypeError(f"{name} is {settings[name]!r}, expected True or False")
    is_whole, is_fine = settings["cpu_offloading"], settings["fine_grained_activation_offloading"]
    if not is_whole and not is_fine:
        return stash.wrap([])
    _refuse_graphs(settings)
    if is_whole and is_fine:
        raise ValueError(
            "cpu_offloading and fine_grained_activation_offloading are both True, expected one of them: the first "
            "puts whole layers aside, the second some modules of each layer"
        )
    if is_fine:
        stash.only(*_modules_of(settings["offload_modules"]))
        return stash.wrap(modules[:-1])
    count = _count_of(settings["cpu_offloading_num_layers"], len(modules))
    weights, activations = settings["cpu_offloading_weights"], settings["cpu_offloading_activations"]
    if not weights and not activations:
        raise ValueError(
            "cpu_offloading_activations and cpu_offloading_weights are both False, expected one of them to be True, "
            "or cpu_offloading=False"
        )
    return stash.wrap(modules[:count], weights=weights, activations=activations)


def _count_of(count: Any, layers: int) -> int:
    if not isinstance(count, int) or isinstance(count, bool):
        raise TypeError(f"cpu_offloading_num_layers is {count!r}, expected an int")
    if not 0 <= count < max(layers, 1):
        raise ValueError(
            f"cpu_offloading_num_layers is {count}, expected 0 to {max(layers - 1, 0)}: one less than the {layers} "
            "layers that there are, because the backward pass begins with the last one"
        )
    return count


def _modules_of(names: Any) -> list[str]:
    found = list(names) if isinstance(names, (list, tuple)) else []
    if not found or not all(isinstance(name, str) for name in found):
        raise ValueError(
            f"offload_modules is {names!r}, expected a list of names with fine_grained_activation_offloading, "
            "['core_attn', 'mlp_norm'] say"
        )
    return found


def _refuse_graphs(settings: dict[str, Any]) -> None:
    wanted = [name for name in ("enable_cuda_graph", "external_cuda_graph") if settings[name]]
    if settings["cuda_graph_impl"] not in (None, "none"):
        wanted.append("cuda_graph_impl")
    if wanted:
        raise ValueError(
            f"{wanted[0]} is {settings[wanted[0]]!r}, expected no CUDA graphs beside cpu_offloading or "
            "fine_grained_activation_offloading: a stash runs on the host, and its copies cannot be captured"
        )
