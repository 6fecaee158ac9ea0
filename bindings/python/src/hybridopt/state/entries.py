"""The `state` of an optimizer, its entries, and snapshots of it."""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable
from operator import is_, itemgetter
from typing import Any

import torch
from torch import Tensor

from .. import abi
from ..base.modes import in_no_mode
from ..params.registered import MASTER, MASTER_LOW
from ..params.tensors import local, local_part


class Entry(dict):
    """The state of one param. While the entry has views of the library's memory, an assignment to a key
    writes to that memory instead of storing another tensor. So helpers that move state to the device by
    `entry[key] = value.to(device)` leave it where it is."""

    def __init__(self, content: Any = ()) -> None:
        super().__init__(content)
        self._handle: abi.Optimizer | None = None
        self._views: dict[str, Tensor] = {}

    def show(self, handle: abi.Optimizer, views: dict[str, Tensor]) -> None:
        """Puts views of the library's memory into the entry."""
        dict.update(self, views)
        self._handle, self._views = handle, views

    def end(self) -> None:
        """Makes the entry an ordinary dict."""
        self._handle, self._views = None, {}

    @property
    def is_shown(self) -> bool:
        return bool(self._views)

    def __setitem__(self, key: str, value: Any) -> None:
        if not self._take(key, value):
            super().__setitem__(key, value)

    def update(self, *args: Any, **kwargs: Any) -> None:
        for key, value in dict(*args, **kwargs).items():
            self[key] = value

    def __ior__(self, other: Any) -> Any:  # type: ignore[misc]
        self.update(other)
        return self

    def __reduce_ex__(self, _: Any) -> Any:  # pickles and deep copies are ordinary dicts
        return dict, (dict(self),)

    @in_no_mode
    def _take(self, key: str, value: Any) -> bool:
        """Writes an assigned value to the library's memory. If this returns False, the entry stores the
        value, and the next step adopts or refuses it."""
        if self._handle is None or key not in self._views:
            return False
        view = self._views[key]
        if self.get(key) is not view:
            return False
        if value is view:
            return True
        if not isinstance(value, Tensor) or value.shape != view.shape:
            return False
        self._handle.drain()
        own, given = local(view), local_part(value.detach(), view)
        if key in (MASTER, MASTER_LOW):  # the param may have been written since this master was made
            # On the GPU, if one of them is there: a copy to the host may still be under way.
            device = given.device if own.device.type == "cpu" else own.device
            return own.dtype == given.dtype and same_content(own.to(device), given.to(device))
        own.copy_(given)
        return True


def same_content(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors of the same dtype and shape have the same bits."""
    bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[one.element_size()]
    return torch.equal(one.view(bits), other.view(bits))


class State(defaultdict):
    """A dict that is filled when it is read or changed. Until then no views of the library's memory are made,
    and nothing waits for queued steps."""

    def __init__(self, optimizer: Any, content: Any = ()) -> None:
        super().__init__(Entry)
        self._optimizer = weakref.ref(optimizer)
        dict.update(self, content)

    def _fill(self) -> None:
        optimizer = self._optimizer()
        if optimizer is not None and optimizer._state is self:
            optimizer._fill_state()

    def __setitem__(self, param: Any, entry: Any) -> None:
        self._fill()
        known = dict.get(self, param)
        if type(entry) is dict and isinstance(known, Entry) and known.is_shown:
            if entry.keys() == known.keys():
                known.update(entry)
                return
        super().__setitem__(param, entry)

    def copy(self) -> Any:
        self._fill()
        return defaultdict(dict, dict.items(self))

    __copy__ = copy

    def __reduce__(self) -> Any:  # for pickle and deepcopy
        self._fill()
        return defaultdict, (dict,), None, None, iter(list(dict.items(self)))


def filled(name: str) -> Callable[..., Any]:
    """A method of dict that first fills the state."""
    method = getattr(defaultdict, name)

    def call(self: State, *args: Any, **kwargs: Any) -> Any:
        self._fill()
        return method(self, *args, **kwargs)

    call.__name__ = name
    return call


for name in (
    *("__getitem__", "__contains__", "__iter__", "__reversed__", "__len__", "__eq__", "__ne__"),
    *("__repr__", "__or__", "__ror__", "get", "keys", "values", "items"),
    *("__delitem__", "__ior__", "clear", "pop", "popitem", "setdefault", "update"),
):
    setattr(State, name, filled(name))


PART_ENTRIES = 256  # this number of entries stays in the CPU's cache while they are compared


def are_same(some: Iterable[Any], others: Iterable[Any]) -> bool:
    """Whether two sequences of the same length have the same objects."""
    return all(map(is_, some, others))


class Part:
    """Some entries of a snapshot, and the tensors that Shown has put into them."""

    def __init__(self, shown: list[tuple[dict[str, Any], dict[str, Tensor]]]) -> None:
        # Entries with the same keys are compared together, key by key.
        by_names: dict[tuple[str, ...], tuple[list[dict[str, Any]], list[dict[str, Tensor]]]] = {}
        for entry, tensors in shown:
            entries, all_tensors = by_names.setdefault(tuple(tensors), ([], []))
            entries.append(entry)
            all_tensors.append(tensors)
        self._columns = [
            (name, entries, [tensors[name] for tensors in all_tensors])
            for names, (entries, all_tensors) in by_names.items()
            for name in names
        ]
        self._tensors = [tensor for _, _, column in self._columns for tensor in column]
        self._are_plain = all(local(tensor) is tensor for tensor in self._tensors)
        self._places = self._places_now()

    def is_as_before(self) -> bool:
        try:
            return (
                all(
                    are_same(map(itemgetter(name), entries), tensors)
                    for name, entries, tensors in self._columns
                )
                and self._places_now() == self._places
            )
        except KeyError:  # an entry lacks a tensor
            return False

    def _places_now(self) -> list[int]:
        tensors = self._tensors if self._are_plain else map(local, self._tensors)
        return list(map(Tensor.data_ptr, tensors))


class Snapshot:
    """Tells whether other code has put another object into `state` since the snapshot. Writes to the tensors
    there do not count. `shown` lists the entries with views of the library's memory, and these views. Of any
    other entry the snapshot notes only whether it is empty."""

    def __init__(
        self, state: dict[Any, Any], shown: list[tuple[dict[str, Any], dict[str, Tensor]]]
    ) -> None:
        self._keys = list(dict.keys(state))
        self._entries = list(dict.values(state))
        ours = {id(entry) for entry, _ in shown}
        self._others = [entry for entry in self._entries if id(entry) not in ours]
        self._filled = self._filled_now()
        begins = range(0, len(shown), PART_ENTRIES)
        self._parts = [Part(shown[begin : begin + PART_ENTRIES]) for begin in begins]

    def matches(self, state: dict[Any, Any]) -> bool:
        return (
            len(self._keys) == dict.__len__(state)
            and are_same(dict.keys(state), self._keys)
            and are_same(dict.values(state), self._entries)
            and self._filled_now() == self._filled
            and all(part.is_as_before() for part in self._parts)
        )

    def _filled_now(self) -> list[bool]:
        return [isinstance(entry, dict) and bool(entry) for entry in self._others]
