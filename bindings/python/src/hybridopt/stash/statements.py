"""Statements: the with statements of a stash. The end of a statement is noticed even if Ctrl-C comes before the first
line of what the statement calls at its end."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

from .forward_pass import ForwardPass


class Statement(NamedTuple):
    """A with statement that has begun and not ended."""

    forward_pass: ForwardPass | None  # None: the statement is in a backward pass
    end: weakref.ref[Any] | None  # of what Exit has given to the statement; None: nobody knows


class Exit:
    """The `__exit__` of a class. When a with statement begins, Python asks for it. From then on the statement alone
    keeps what it gets, and releases it when it ends in any way: a weak reference to this tells of the end. It must be no
    method, because the traceback of an exception keeps the arguments of a method."""

    def __get__(self, entered: Any, owner: Any) -> Callable[..., None]:
        leave: Callable[..., None] = owner._leave_statement
        if entered is None:  # contextlib.ExitStack takes it from the class
            return leave
        end = functools.partial(leave, entered)
        entered._note_end(end)
        return end
