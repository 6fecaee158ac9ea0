"""Checks of values that callers give. True and False are no numbers here: in the place of a number they are a
mistake, though Python counts with them."""

from __future__ import annotations

import numbers
from collections.abc import Collection
from typing import Any


def is_number(value: Any) -> bool:
    return isinstance(value, numbers.Real) and not isinstance(value, bool)


def is_whole(value: Any, least: int, end: int) -> bool:
    """Whether it is an int from `least` to below `end`."""
    return isinstance(value, int) and not isinstance(value, bool) and least <= value < end


def check_switch(name: str, value: Any) -> None:
    """Refuses what is neither True nor False. Any text would count as True."""
    if value not in (False, True):
        raise ValueError(f"Invalid {name}: {value!r}, expected True or False")


def check_word(option: str, value: Any, words: Collection[str]) -> None:
    if not isinstance(value, str) or value not in words:
        *others, last = map(repr, words)
        raise ValueError(f"Invalid {option}: {value!r}, expected {', '.join(others)} or {last}")
