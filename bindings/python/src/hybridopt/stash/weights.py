"""Weights that are put aside: the params of a layer are on the host while other layers compute."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import Any, cast

import torch
from torch import Tensor, nn

from ..abi import HybridoptError, InvalidStateError, await_transfers
from ..abi.generated import OFFLOAD_STASH_KEEP
from ..base.modes import refuse_capture
from ..params.members import takes_part
from ..params.tensors import local
from ..traps.away import note_away, note_back
from ..traps.offloaded import is_offloaded
from ..traps.trap import spring, without_traps
from .blocks import Transfers

# The number of used layers that stay on the device: the running layer, and the one before it, whose params are being
# copied to the host. In addition the next layer is copied back.
RESIDENT_LAYERS = 2


class Weight:
    """A storage, which is all of one or more params of a layer.

        storage   ticket   is_coming
        memory    0        no         there is no copy of it on the host
        memory    yes      no         the copy on the host is the same, or will be when is_leaving ends
        empty     yes      no         it is on the host
        memory    yes      yes        it is copied back; nobody may use it yet
    """

    def __init__(self, transfers: Transfers, params: dict[str, Tensor]) -> None:
        self.params = params
        self.storage = next(iter(params.values())).untyped_storage()
        self.bytes = self.storage.nbytes()
        self._transfers = transfers
        self._copied_version = 0  # the version of the bits on the host
        self._stream = transfers.default_stream()  # its memory belongs to this stream
        self._user = self._stream  # the stream that has used it last
        self.ticket = 0
        self._is_leaving = False
        self.is_coming = False
        self._stays = False

    def __del__(self) -> None:
        if self.ticket:
            self._transfers.abandon(self.ticket, self._user, self.storage)

    def _version(self) -> int:
        return sum(param._version for param in self.params.values())

    @property
    def has_no_memory(self) -> bool:
        """Whether this stash or somebody else has taken the memory away."""
        return self.bytes > 0 and self.storage.nbytes() == 0

    @property
    def is_offloaded(self) -> bool:
        """Whether an optimizer's offload(params=True) has taken the memory away."""
        return self.has_no_memory and any(map(is_offloaded, self.params.values()))

    @property
    def is_away(self) -> bool:
        return self.ticket > 0 and self.has_no_memory and not self.is_offloaded

    def push(self) -> None:
        """Queues the copy to the host, unless the host has these bits already. If the stash has no room there is no
        copy."""
        if self.has_no_memory or self.is_coming or self._stays:
            return
        if self.ticket and self._version() != self._copied_version:
            self.forget_copy()
        if self.ticket:
            return
        self._user = self._transfers.stream()
        self._copied_version = self._version()
        self._is_leaving = True
        self.ticket = self._transfers.handle.push(self.storage.data_ptr(), self.bytes, self._user)  # last: Ctrl-C

    def leave(self) -> None:
        """Releases the device memory. The stream that has used it waits for the copy."""
        self.push()
        if not self.ticket or self.has_no_memory or self._stays:
            return
        if self.is_coming:
            self._arrive()
        if self._is_leaving:
            self._transfers.handle.release(self.ticket, self._user)
            self._is_leaving = False
        self._refuse_shared_memory()
        self._transfers.order(self._stream, self._user)
        await_transfers(lambda storage: storage._cdata == self.storage._cdata)  # a save may still read the weights
        for name, param in self.params.items():
            note_away(param, name)
        self.storage.resize_(0)

    def _refuse_shared_memory(self) -> None:
        """Raises if other code has got the memory since wrap() has looked, so that torch cannot free it any more."""
        if not self.storage.resizable():
            raise InvalidStateError(
                f"parameter {next(iter(self.params))!r} has been given memory that torch cannot free, or numpy() or "
                "share_memory_() have shared its memory since wrap(weights=True); give it memory of its own, "
                "param.data = param.data.clone(), or call remove() on what wrap() has returned"
            )

    def prefetch(self) -> None:
        """Queues the copy back into new memory."""
        if self.is_away:
            self._stream = self._user = self._transfers.stream()
            try:
                self.storage.resize_(self.bytes)
                self._transfers.handle.prefetch(self.ticket, self.storage.data_ptr(), self.bytes, self._stream)
                self.is_coming = True
            except BaseException:
                self._forget_prefetch()
                raise

    def _forget_prefetch(self) -> None:
        """The memory does not have the weights, even if Ctrl-C came when the library had begun to copy them."""
        with contextlib.suppress(HybridoptError):  # it has not begun
            self._transfers.handle.pop(self.ticket, self._stream, OFFLOAD_STASH_KEEP)
        self.storage.resize_(0)

    def come(self) -> None:
        """Makes the current stream wait until it may use the weights."""
        self.prefetch()
        if self.is_coming:
            self._arrive()
        if not self.is_away:
            note_back(self.params.values())  # even if they have not left: an exception may have ended leave()
        self._user = self._transfers.stream()

    def come_for_backward(self) -> None:
        """For a backward pass. If it is differentiated (create_graph=True), it saves params where no hook sees it:
        from then on these params stay."""
        self.come()
        self._stays = self._stays or torch.is_grad_enabled()

    def _arrive(self) -> None:
        self._transfers.pop(self, self._transfers.stream(), OFFLOAD_STASH_KEEP)

    def note_arrival(self, user: int) -> None:
        """The stream `user` waits for the weights."""
        self._user = user
        self.is_coming = False

    def forget_copy(self) -> None:
        """To be called when the weights change: the copy on the host is no longer valid."""
        self.come()
        if self.ticket:
            # In one statement, since Ctrl-C between two would leave a ticket that has ended, or one that nobody ends.
            dropped = self.ticket, self._user, self.storage
            append = cast("Callable[[Any], Any]", self._transfers.abandoned.append)
            self.ticket, self._is_leaving, _ = 0, False, append(dropped)
            self._transfers.end_abandoned()


class Layer:
    """The weights of a module."""

    def __init__(
        self,
        module: nn.Module,
        name: str,
        transfers: Transfers,
        of_storage: weakref.WeakValueDictionary[int, Weight],
    ) -> None:
        self.module = weakref.ref(module)
        self._name = name
        self._transfers = transfers
        self._of_storage = of_storage
        self.weights: list[Weight] = []
        self.look()

    def look(self) -> None:
        """Finds the present storages: params may have got other memory, or there may be other params."""
        module = self.module()
        found: dict[int, dict[str, Tensor]] = {}
        if module is not None:
            away = {id(param) for weight in self.weights if weight.is_away or weight.is_coming
                    for param in weight.params.values()}  # fmt: skip
            here = {name: param for name, param in module.named_parameters() if id(param) not in away}
            for each in self.weights:
                if not each.is_away and not each.is_coming:
                    note_back(each.params.values())  # an exception may have ended come() or leave()
            spring(here.values())  # a step may still write them
            for name, param in here.items():
                if param.device.type != "meta":
                    key = param.untyped_storage()._cdata
                    found.setdefault(key, {})[f"{self._name}.{name}"] = param
        known = {weight.storage._cdata: weight for weight in self.weights}
        kept = [weight for weight in self.weights if weight.is_away or weight.is_coming]
        for key, params in found.items():
            weight = known.get(key)
            kept.append(Weight(self._transfers, params) if weight is None else weight)
        self.weights = [weight for weight in kept if weight.bytes > 0]
        self._of_storage.update((weight.storage._cdata, weight) for weight in self.weights)


class Weights:
    """Decides which layers' params are on the device. Each method is called under the lock of the stash."""

    def __init__(self, transfers: Transfers, device: torch.device) -> None:
        self._transfers = transfers
        self._device = device
        self._layers: weakref.WeakKeyDictionary[nn.Module, Layer] = weakref.WeakKeyDictionary()
        self._of_storage: weakref.WeakValueDictionary[int, Weight] = weakref.WeakValueDictionary()
        self._used: list[weakref.ref[Layer]] = []  # layers on the device, the last used one last
        self._last: tuple[bool, weakref.ref[Layer]] | None = None
        # By direction (True: backward) and layer: the layer that was used next.
        self._next: dict[bool, weakref.WeakKeyDictionary[Layer, weakref.ref[Layer]]] = {
            False: weakref.WeakKeyDictionary(),
            True: weakref.WeakKeyDictionary(),
        }

    def __contains__(self, module: nn.Module) -> bool:
        return module in self._layers

    def __bool__(self) -> bool:
        return bool(self._layers)

    def add(self, modules: Mapping[nn.Module, str], others: Iterable[tuple[str, nn.Module]]) -> None:
        """Raises for params that cannot leave, before anything is changed. `others` are all modules of the model."""
        owners: dict[int, str] = {
            weight.storage._cdata: name
            for layer in self._layers.values()
            for weight in layer.weights
            for name in weight.params
        }
        for module, name in modules.items():
            self._check(module, name, owners)
        inside = {each for module in (*modules, *self._layers) for each in module.modules()}
        for name, module in others:
            if module not in inside:
                for own, param in module.named_parameters(recurse=False):
                    refuse_shared(f"{name}.{own}", param, owners)
        for module, name in modules.items():
            self._layers[module] = Layer(module, name, self._transfers, self._of_storage)

    def _check(self, module: nn.Module, layer: str, owners: dict[int, str]) -> None:
        of_storage: dict[int, list[Tensor]] = {}
        for own, param in module.named_parameters():
            name = f"{layer}.{own}"
            if local(param) is not param:
                raise TypeError(
                    f"wrap(weights=True) got parameter {name!r}, a DTensor; expected plain tensors: FSDP2 gathers "
                    "and frees weights itself"
                )
            if param.device != self._device:
                raise ValueError(
                    f"wrap(weights=True) got parameter {name!r} on {param.device}, expected {self._device}, where "
                    "the stash is"
                )
            refuse_shared(name, param, owners)
            of_storage.setdefault(param.untyped_storage()._cdata, []).append(param)
            storage = param.untyped_storage()
            if not storage.resizable():
                raise ValueError(
                    f"wrap(weights=True) got parameter {name!r}, whose memory torch cannot free (shared, or not "
                    "torch's); give it a clone()"
                )
        for own, param in module.named_parameters():
            storage = param.untyped_storage()
            if sum(each.nbytes for each in of_storage[storage._cdata]) != storage.nbytes():
                raise ValueError(
                    f"wrap(weights=True) got parameter '{layer}.{own}', which shares its memory with something "
                    "outside of the layer (a flat buffer, say); give it memory of its own"
                )
            owners[storage._cdata] = f"{layer}.{own}"

    # ------------------------------------------------------------------------------ what hooks call --

    def enter(self, module: nn.Module, is_backward: bool) -> None:
        """The module's params are used from now on. Those of the layer before the previous one leave."""
        layer = self._layers.get(module)
        if layer is None:
            return
        refuse_capture("an activation stash")
        if not is_backward:
            layer.look()  # before tensors are saved, because holds() is asked about them
        for weight in layer.weights:
            if is_backward:
                weight.come_for_backward()
            else:
                weight.come()
        used = [each for each in map(_target, self._used) if each is not None and each is not layer]
        for before in used[: 1 - RESIDENT_LAYERS]:
            for weight in before.weights:
                weight.leave()
        used = [*used[1 - RESIDENT_LAYERS :], layer]
        self._used = list(map(weakref.ref, used))
        if is_backward and len(used) > 1:
            self._begin_to_leave(used[-2])
        self._prefetch_next(layer, is_backward)

    def _prefetch_next(self, layer: Layer, is_backward: bool) -> None:
        if self._last is not None and self._last[0] == is_backward:
            before = self._last[1]()
            if before is not None and before is not layer:
                self._next[is_backward][before] = weakref.ref(layer)
        self._last = (is_backward, weakref.ref(layer))
        referred = self._next[is_backward].get(layer)
        following = None if referred is None else referred()
        if following is None:
            return
        try:
            for weight in following.weights:
                weight.prefetch()
        except torch.OutOfMemoryError:
            return  # it comes back when it is used

    def exit(self, module: nn.Module) -> None:
        """The module's forward pass has ended: copies to the host begin."""
        layer = self._layers.get(module)
        if layer is not None and not any(weight.is_offloaded for weight in layer.weights):
            self._begin_to_leave(layer)

    def _begin_to_leave(self, layer: Layer) -> None:
        layer.look()
        for weight in layer.weights:
            weight.push()

    def holds(self, tensor: Tensor) -> bool:
        """Whether the tensor's memory belongs to a weight, which leaves and comes back as a whole. The tensor itself
        tells this only if autograd knows it as a view of a param, and for `weight.detach()` autograd does not."""
        return bool(self._of_storage) and tensor.untyped_storage()._cdata in self._of_storage

    def come_for(self, tensor: Tensor) -> None:
        """Brings back the storage of a tensor that a backward pass uses."""
        with without_traps():  # it may be on the host
            storage = tensor.untyped_storage()
        weight = self._of_storage.get(storage._cdata)
        if weight is not None:
            weight.come_for_backward()

    # ------------------------------------------------------------------------------------- others --

    def come_back(self, modules: Iterable[nn.Module]) -> None:
        """Brings all params of these modules to the device; they leave after their next use. They may be written, so
        the copies on the host are no longer valid."""
        weights = [weight for module in modules if module in self._layers for weight in self._layers[module].weights]
        for weight in weights:
            weight.prefetch()
        for weight in weights:
            weight.forget_copy()

    def come_for_step(self, params: Iterable[Tensor]) -> None:
        """Brings the params that an optimizer updates to the device, where the step leaves the new values."""
        weights = self._weights_of(param for param in params if takes_part(param))
        for weight in weights:
            weight.prefetch()
        for weight in weights:
            weight.forget_copy()
        self._used.clear()  # a step may still write them, so only code that waits for the step may let them leave

    def come_to_be_read(self, params: Iterable[Tensor]) -> None:
        """Brings these params to the device, to be read. Their copies on the host stay valid until somebody writes
        the params."""
        weights = self._weights_of(params)
        for weight in weights:
            weight.prefetch()
        for weight in weights:
            weight.come()

    def _weights_of(self, params: Iterable[Tensor]) -> list[Weight]:
        ids = {id(param) for param in params}
        return [
            weight
            for layer in self._layers.values()
            for weight in layer.weights
            if any(id(param) in ids for param in weight.params.values())
        ]

    def remove(self, modules: Iterable[nn.Module]) -> None:
        modules = list(modules)
        self.come_back(modules)
        for module in modules:
            self._layers.pop(module, None)
        kept = list(self._layers.values())
        self._used = [each for each in self._used if _target(each) in kept]

    def modules(self) -> list[nn.Module]:
        return list(self._layers)

    def host_bytes(self) -> int:
        return sum(w.bytes for layer in self._layers.values() for w in layer.weights if w.ticket)

    def away_bytes(self) -> int:
        return sum(w.bytes for layer in self._layers.values() for w in layer.weights if w.is_away)


def _target(reference: weakref.ref[Layer]) -> Layer | None:
    return reference()


def refuse_shared(name: str, param: Tensor, owners: dict[int, str]) -> None:
    owner = owners.get(local(param).untyped_storage()._cdata)
    if owner is not None:
        raise ValueError(
            f"wrap(weights=True) got tied parameters: {owner!r} and {name!r} share their memory, and one layer "
            "would use it while it is away for the other; leave one of the layers out, or wrap the module that has "
            "both"
        )
