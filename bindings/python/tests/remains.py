"""What is left of a training after its last reference has gone. Not a test itself."""

import gc
import os
import time
import warnings
import weakref

import torch

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
        comm = getattr(root, "_comm", None)
        if comm is not None:
            parts[f"the ranks of {number}"] = comm
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


def tensor_bytes():
    """The bytes of all tensors on the CPU that Python knows."""
    storages = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of objects that warn when something asks for their class
        for each in gc.get_objects():
            if issubclass(type(each), torch.Tensor) and each.device.type == "cpu" and each.layout == torch.strided:
                storage = getattr(each, "_local_tensor", each).untyped_storage()
                storages[storage._cdata] = storage.nbytes()
    return sum(storages.values())


def assert_that_nothing_piles_up(train, repetitions=4, bytes_now=tensor_bytes, first_gone=0):
    """train() trains once and returns what is to be gone, one part after the other: the first one first, or the last
    one first (first_gone=-1). The first training may leave what a framework keeps of its own,
    and the second one makes the group by which several ranks agree on others."""
    counts = []
    for _ in range(repetitions):
        remains = Remains()
        parts = list(train())
        remains.watch(*parts)
        while parts:
            parts.pop(first_gone)
            gc.collect()
        assert remains.alive() == []
        if len(counts) >= 2:
            remains.assert_no_thread()
        counts.append(bytes_now())
    assert counts[1:] == counts[1:2] * (repetitions - 1)
