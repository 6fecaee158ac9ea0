"""Checks of values that callers pass. True and False do not count as numbers: where a number is expected they are a
mistake, although Python accepts them as numbers."""

from __future__ import annotations

import inspect
import math
import numbers
from collections.abc import Collection, Iterable, Mapping
from typing import Any


def is_number(value: Any) -> bool:
    return isinstance(value, numbers.Real) and not isinstance(value, bool)


def is_whole(value: Any, least: int, end: int) -> bool:
    """Whether it is an int from `least` to below `end`."""
    return isinstance(value, int) and not isinstance(value, bool) and least <= value < end


def is_finite(value: Any) -> bool:
    """Whether it is a number that a float can hold."""
    try:
        return is_number(value) and math.isfinite(float(value))
    except OverflowError:
        return False


def is_word(value: Any, word: str) -> bool:
    """Whether it is this text. An array would compare each of its elements with the text."""
    return isinstance(value, str) and value == word


def listed(value: Any) -> list[Any] | None:
    """What it consists of; None if it is no list, tuple, iterator or the like. A text is one thing, not its letters."""
    if isinstance(value, (str, bytes, bytearray)) or not isinstance(value, Iterable):
        return None
    try:
        return list(value)
    except TypeError:  # an array or a tensor without dimensions
        return None


def is_switch(value: Any) -> bool:
    """Whether it is True or False, or a number that is equal to one of them."""
    try:
        return bool(value in (False, True))
    except (RuntimeError, ValueError):  # several numbers
        return False


def shown(value: Any) -> str:
    """A value in an error: its repr() in one line, cut if that is long."""
    try:
        text = " ".join(repr(value).split())
    except Exception as error:  # an int of more digits than Python prints, say
        return f"a {type(value).__name__} without a repr() ({type(error).__name__})"
    return text if len(text) <= 100 else f"{text[:80]}... ({len(text)} characters)"


def kind_of(value: Any) -> str:
    """The type of a value in an error: "an int", "a Tensor"."""
    name = type(value).__name__
    return f"{'an' if name[0] in 'aeiouAEIOU' else 'a'} {name}"


def check_switch(name: str, value: Any) -> None:
    """Refuses what is neither True nor False. Any text would count as True."""
    if not is_switch(value):
        raise ValueError(f"Invalid {name}: {shown(value)}, expected True or False")


def check_word(option: str, value: Any, words: Collection[str]) -> None:
    if not isinstance(value, str) or value not in words:
        *others, last = map(repr, words)
        raise ValueError(f"Invalid {option}: {shown(value)}, expected {', '.join(others)} or {last}")


def refuse_assignment(owner: object, name: str, value: Any, ways_out: Mapping[str, str]) -> None:
    """Refuses an argument of the constructor that is assigned to the object, unless its class has a property of this
    name. A caller may assign a wrapper of a method. `ways_out` tells by name what to do instead."""
    if name not in ways_out:
        return
    declared = getattr(type(owner), name, None)
    if hasattr(declared, "__set__") or (inspect.isroutine(declared) and inspect.isroutine(value)):
        return
    raise AttributeError(
        f"{type(owner).__name__}.{name} = {shown(value)} would have no effect, because {name} is read by the "
        f"constructor; {ways_out[name]}"
    )
