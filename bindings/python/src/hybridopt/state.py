"""The `state` of an optimizer."""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Iterator
from typing import Any


class State(defaultdict):
    """Waits for queued steps before it says anything."""

    def __init__(self, optimizer: Any, content: Any = ()) -> None:
        super().__init__(dict)
        self._optimizer = weakref.ref(optimizer)
        dict.update(self, content)

    def _settle(self) -> None:
        optimizer = self._optimizer()
        if optimizer is not None and optimizer._engine is not None:
            optimizer._engine.shown.refuse_hidden()
            optimizer._engine.settle(self)

    def __getitem__(self, param: Any) -> Any:
        self._settle()
        return super().__getitem__(param)

    def get(self, param: Any, default: Any = None) -> Any:
        self._settle()
        return super().get(param, default)

    def pop(self, param: Any, *default: Any) -> Any:
        self._settle()
        return super().pop(param, *default)

    def __contains__(self, param: Any) -> bool:
        self._settle()
        return super().__contains__(param)

    def __iter__(self) -> Iterator[Any]:
        self._settle()
        return super().__iter__()

    def __len__(self) -> int:
        self._settle()
        return super().__len__()

    def keys(self) -> Any:
        self._settle()
        return super().keys()

    def values(self) -> Any:
        self._settle()
        return super().values()

    def items(self) -> Any:
        self._settle()
        return super().items()

    def clear(self) -> None:
        self._settle()
        super().clear()

    def copy(self) -> Any:
        self._settle()
        return defaultdict(dict, dict.items(self))

    __copy__ = copy

    def __reduce__(self) -> Any:  # for pickle and deepcopy
        self._settle()
        return defaultdict, (dict,), None, None, iter(list(dict.items(self)))
