"""What is left of a training after its last reference has gone. Not a test itself."""

import gc
import os
import time
import weakref

PATIENCE_SECONDS = 10


def parts_of(*roots):
    """The modules, params, optimizers and other objects that a training consists of, and the library's objects of its
    optimizers, by name."""
    parts = {}
    for number, root in enumerate(roots):
        parts[f"{number} {type(root).__name__}"] = root
        if hasattr(root, "named_modules"):
            parts.update((f"module {name!r} of {number}", module) for name, module in root.named_modules())
            parts.update((f"param {name} of {number}", param) for name, param in root.named_parameters())
        engine = getattr(root, "_engine", None)
        if engine is not None:
            parts[f"the library's optimizer of {number}"] = engine.handle
            parts[f"the library's context of {number}"] = engine.context
    return parts


class Remains:
    """Remembers parts of a training weakly, and the threads of before it."""

    def __init__(self):
        gc.collect()
        self._threads = threads()
        self._parts = {}

    def watch(self, *roots):
        self._parts.update((name, weakref.ref(part)) for name, part in parts_of(*roots).items())

    def alive(self):
        """The names of what is alive."""
        return [name for name, part in self._parts.items() if part() is not None]

    def assert_nothing(self):
        assert self._parts
        gc.collect()
        assert self.alive() == []
        self.assert_no_thread()

    def assert_no_thread(self):
        """The system may list a thread for a moment after it has been joined."""
        end = time.monotonic() + PATIENCE_SECONDS
        while threads() > self._threads and time.monotonic() < end:
            time.sleep(0.001)
        assert threads() <= self._threads


def threads():
    return len(os.listdir("/proc/self/task"))


def resident_bytes():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
