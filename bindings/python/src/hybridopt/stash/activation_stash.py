"""ActivationStash: what the forward pass saves for the backward pass lies on the host in between."""

from __future__ import annotations

import functools
import inspect
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

import torch
import torch.utils.checkpoint
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves

from ..abi.errors import HybridoptError
from ..abi.stash import Stash
from ..base.checks import check_switch, refuse_assignment, shown
from ..base.modes import is_in_backward, refuse_capture
from ..base.units import readable
from ..traps.away import keepers
from .arguments import check_count, check_key, context_of, device_of, fraction_of
from .blocks import Block, Transfers
from .choice import Choice, Link, choose, nothing
from .clock import clock_of
from .forward_pass import ForwardPass
from .layers import LayerHooks, Wrapping, modules_of
from .names import ROLES, Call, Names, Roles
from .program import Program
from .saved import Kept, Put, Wrapped, is_param, may_go, range_of
from .statements import Exit, Statement
from .stats import Saved, StashStats, link_of, stats_of
from .table import Table
from .weights import Weights

MIN_BYTES = 1 << 20

# Arguments of the constructor that hold as long as the stash.
_WAYS_OUT = dict.fromkeys(
    ("budget", "keep_last", "min_bytes", "slab_bytes", "window_bytes", "model", "device", "pin"),
    "give it to the constructor of a new stash",
)


class Thread(threading.local):
    """The contexts that each thread has entered."""

    def __init__(self) -> None:
        self.statements: list[Statement] = []
        self.next_end: weakref.ref[Any] | None = None  # of the statement that begins
        self.entered: list[Entered] = []

    def begin_statement(self, forward_pass: ForwardPass | None) -> None:
        end, self.next_end = self.next_end, None
        self.statements.append(Statement(forward_pass, end))


class Entered:
    """Hooks that are in force. `module` is None for a with statement, `name` for what has no name on the stack."""

    def __init__(self, module: nn.Module | None, name: str | None = None) -> None:
        self.module = module
        self.name = name
        self._undo: list[Any] = []

    def enter(self, context: Any) -> None:
        # In one statement: Ctrl-C between two would leave the hook without a note of it.
        append: Callable[[Any], Any] = self._undo.append
        _ = context.__enter__(), append(context)

    def leave(self) -> None:
        while self._undo:
            _ = self._undo[-1].__exit__(None, None, None), self._undo.pop()


class Keyed:
    """What stash("key") returns: a context for a forward pass of the program with this name."""

    def __init__(self, stash: ActivationStash, key: str) -> None:
        self._stash = stash
        self._key = key

    def __repr__(self) -> str:
        return f"<stash({self._key!r}), for a with statement>"

    def __enter__(self) -> ActivationStash:
        self._stash._enter(self._key)
        return self._stash

    if TYPE_CHECKING:

        def __exit__(self, kind: Any, *_: Any) -> None: ...
    else:
        __exit__ = Exit()

    def _note_end(self, end: Callable[..., None]) -> None:
        self._stash._note_end(end, self._key)

    def _leave_statement(self, kind: Any, *_: Any) -> None:
        self._stash._exit(self._key, kind is None)


class ActivationStash:
    """Puts activations aside: what autograd saves in the forward pass is copied to pinned host memory and comes
    back before the backward pass needs it. Losses and gradients keep their bits.

        stash = hybridopt.ActivationStash(budget=16 << 30)
        for batch in batches:
            with stash:
                loss = model(batch)
            loss.backward()

    The first forward and backward passes put all aside that they can, and measure sizes, lifetimes and times.
    Those after it put aside what lives longest, as much as the link to the host can copy while the forward pass
    computes. What stays: params and views of them, tensors smaller than min_bytes, what was put aside already,
    what does not fit into the budget, what is saved during a backward pass (checkpoints that compute again), and
    what the innermost other saved_tensors_hooks take, those of torch.utils.checkpoint among them.

    Args:
        budget (int): host memory for activations, in bytes. All of it is taken and pinned by this call. What
            finds no room stays on the device.
        keep_last (int, default 2): the number of groups at the end of a forward pass that stay, because the
            backward pass begins with them. A group is what one call of a wrapped module saves; without wrap() each
            tensor is a group.
        fraction (float, default None): share of the bytes that may go, 0.0 to 1.0, which goes whether it can be
            hidden or not, except for keep_last. None: as much as the link can hide.
        min_bytes (int, default 1 MiB): smaller tensors stay.
        slab_bytes (int, default 4 MiB): the budget is cut into slabs, and each tensor takes whole ones; a
            multiple of 4096.
        window_bytes (int, default None): device memory for copies that are under way, beside what stays. A
            smaller window saves more memory and makes the device wait more often. None: twice the largest
            tensor that goes.
        model (torch.nn.Module, default None): its modules' names are used in errors, in tables and by only().
        device (torch.device or str, default None): where the activations are. None: the current GPU, or the CPU
            where there is none. On the CPU copies are made at once, and none is hidden.
        pin (bool, default True): host memory that the system does not pin is an error. False: it is then used
            unpinned, which is slower.

    Raises:
        TypeError, ValueError: an argument is wrong; the text says what was expected.
        hybridopt.abi.OutOfHostMemoryError: the budget is more than the host has or pins.
    """

    def __init__(
        self,
        budget: int,
        keep_last: int = 2,
        fraction: float | None = None,
        *,
        min_bytes: int = MIN_BYTES,
        slab_bytes: int = 0,
        window_bytes: int | None = None,
        model: nn.Module | None = None,
        device: torch.device | str | None = None,
        pin: bool = True,
    ) -> None:
        check_count("budget", budget, 1, "bytes of host memory, 16 << 30 say")
        check_count("keep_last", keep_last, 0, "groups at the end of a forward pass that stay")
        check_count("min_bytes", min_bytes, 1, "bytes of the smallest tensor that goes")
        check_count("slab_bytes", slab_bytes, 0, "a multiple of 4096, or 0 for 4 MiB")
        if window_bytes is not None:
            check_count("window_bytes", window_bytes, 0, "bytes of copies under way, or None")
        check_switch("pin", pin)
        if model is not None and not isinstance(model, nn.Module):
            raise TypeError(f"Invalid model: {shown(model)}, expected a torch.nn.Module")
        self._device = device_of(device)
        self._budget_bytes = budget
        self._keep_last = keep_last
        self._fraction = fraction_of(fraction)
        self._min_bytes = min_bytes
        self._window_bytes = window_bytes
        self._handle = Stash(
            context_of(self._device, pin),
            budget_bytes=budget,
            slab_bytes=slab_bytes,
            min_bytes=min_bytes,
        )
        self._transfers = Transfers(self._handle, self._device)
        self._clock = clock_of(self._device)
        self._lock = threading.RLock()
        self._thread = Thread()
        self._names = Names()
        if model is not None:
            self._names.watch(model)
        # Weak references: the stash must not keep the memory of models.
        self._module_names: weakref.WeakKeyDictionary[nn.Module, str] = weakref.WeakKeyDictionary()
        if model is not None:
            self._module_names.update((module, name) for name, module in model.named_modules())
        self._wanted: tuple[str, ...] = ()
        self._roles = Roles(self._names.stack)
        self._is_telling = False  # set during dry_run(), which needs roles
        self._programs: dict[str, Program] = {}
        self._previous: weakref.ref[ForwardPass] | None = None
        self._wrapped: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self._weights_only: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self._weights = Weights(self._transfers, self._device)
        self._first_called: weakref.ref[nn.Module] | None = None
        self._open: ForwardPass | None = None  # of wrapped modules outside of with statements
        self._group = 0
        self._blocks: weakref.WeakValueDictionary[tuple, Block] = weakref.WeakValueDictionary()
        self._saved = Saved()

    def __setattr__(self, name: str, value: Any) -> None:
        refuse_assignment(self, name, value, _WAYS_OUT)
        super().__setattr__(name, value)

    # ------------------------------------------------------------------------------ what users call --

    def __enter__(self) -> ActivationStash:
        """Begins a forward pass: until the end of the with statement, tensors that autograd saves may be put aside."""
        self._enter("")
        return self

    if TYPE_CHECKING:

        def __exit__(self, kind: Any, *_: Any) -> None: ...
    else:
        __exit__ = Exit()

    def __call__(self, key: str) -> Keyed:
        """For a with statement: like the stash itself, but for a program that saves other tensors than the programs
        of other keys, for example a chunk of a model in an interleaved pipeline. Each program is measured by itself
        and gets a choice of its own."""
        check_key("stash()", key)
        return Keyed(self, key)

    def wrap(
        self, modules: nn.Module | Iterable[nn.Module], *, weights: bool = False, activations: bool = True
    ) -> Wrapping:
        """Only what these modules save is put aside from now on, layer by layer; a with statement is not needed.
        A forward pass begins when the module that was the first of the last pass is called again, or where a
        with statement says so. A module whose call is inside of another one's saved_tensors_hooks (of
        torch.utils.checkpoint, say) leaves all to these.

        Args:
            modules (torch.nn.Module, or several): the layers; of a torch.nn.ModuleList its entries. What
                torch.compile(layer) has made counts as a layer, and so does a layer after layer.compile().
            weights (bool, default False): the params of these layers leave the device too, after the forward and
                after the backward pass of their layer, and come back before the next one. At most three layers
                are on the device: the one at work, the one before it, and the one that comes next. All trained
                params are there while an optimizer steps. No layer may share params with another one.
            activations (bool, default True): False, with weights=True: weights alone.

        Returns:
            Wrapping: its remove() ends this, its bring_back() brings weights back.

        Raises:
            TypeError, ValueError: a module that cannot be wrapped, or whose params cannot leave; the text says why.
        """
        layers = modules_of(modules)
        check_switch("weights", weights)
        check_switch("activations", activations)
        if not weights and not activations:
            raise ValueError("wrap() got weights=False and activations=False, expected one of them to be True")
        for layer in layers:
            if layer in self._wrapped:
                raise ValueError("wrap() got a module that is wrapped already; remove() that wrapping first")
        if weights:
            names = {layer: self._name_of(layer, number) for number, layer in enumerate(layers)}
            known = ((name, module) for module, name in self._module_names.items())
            with self._lock:
                self._weights.add(names, known)
        undo = [undo for number, layer in enumerate(layers) for undo in self._hooked(layer, number)]
        if weights:
            undo += [undo for layer in layers for undo in self._attach_weights(layer)]
            _hook_steps()
            keepers.add(self)
        self._wrapped.update(layers)
        if not activations:
            self._weights_only.update(layers)
        kept = weakref.WeakSet(layers)
        undo.append(functools.partial(self._unwrap, kept))
        return Wrapping(undo, functools.partial(self._bring_back, kept), len(layers))

    def only(self, *names: str) -> None:
        """Only some activations may go from now on; the next forward pass is measured again. only() without
        names ends this.

        Args:
            names (str): parts of modules' names one behind the other ("mlp", "blocks.0", "attention.*"; the model
                was given as model=), or what saves them: "norm", "attention.core", "linear", "activation",
                "softmax", "dropout", "loss" are the roles of functions of torch. Megatron-LM's words for
                --offload-modules ("attn_norm", "core_attn", "mlp_norm" and so on) stand for the names that its
                modules have.

        Raises:
            ValueError: a name that no module and no role has.
        """
        self._names.check(names)
        self._wanted = names
        self.measure_again()

    @property
    def fraction(self) -> float | None:
        """The argument `fraction`. It can be assigned; then the next forward pass is measured again."""
        return self._fraction

    @fraction.setter
    def fraction(self, fraction: float | None) -> None:
        self._fraction = fraction_of(fraction)
        self.measure_again()

    def measure_again(self) -> None:
        """Makes the stash measure the next forward and backward passes as it measured the first ones: for a changed
        model, batch size or machine. The stash does so by itself if two passes one after the other save the same
        number of tensors, and this number is not that of the measured pass."""
        with self._lock:
            self._programs.clear()

    def dry_run(self, step: Callable[[], Any]) -> Table:
        """Runs a forward and a backward pass inside of this stash, and tells what each choice saves and costs.
        str() of the table can be printed.

        Args:
            step: a function without arguments that does both passes, as training does them.
        """
        if not callable(step):
            raise TypeError(f"dry_run() got {shown(step)}, expected a function that calls the model and then backward()")
        with self._lock:
            self._programs["dry run"] = program = Program()
        self._is_telling = True
        try:
            with self("dry run"):
                step()
        finally:
            self._is_telling = False
            del self._programs["dry run"]
        if program.measuring is None or not program.measuring.was_used:
            raise RuntimeError(
                "dry_run() has seen no backward pass use what the forward pass saved; expected a function that "
                "calls the model and then backward(), with tensors of at least min_bytes "
                f"({self._min_bytes} bytes)"
            )
        ranges, forward_seconds = program.measuring.measured()
        return Table.of(ranges, forward_seconds, self._link(), self._budget_bytes, self._keep_last)

    def choice(self, key: str = "") -> Choice | None:
        """The choice of the tensors that go to the host in each forward pass; None until a forward and a backward
        pass have been measured. If a pass has saved no tensor that may go (for example none of min_bytes), the
        choice has no tensors."""
        check_key("choice()", key)
        with self._lock:
            program = self._programs.get(key)
            if program is None:
                return None
            program.settle(self._choose)
            if program.choice is None and program.saves_nothing:
                return nothing(self._link())
            return program.choice

    def stats(self) -> StashStats:
        """Counts and bytes since the stash was made, what is on the host now, and rates of the link."""
        self._transfers.end_abandoned()
        weights = self._weights
        return stats_of(self._handle.stats(), self._saved, weights.host_bytes(), weights.away_bytes())

    def close(self) -> None:
        """Gives the host memory back. From now on a backward pass that needs this memory raises. Modules that were
        wrapped are called as before, with their weights on the device; call remove() of their Wrapping."""
        if not self._handle.closed:
            with self._lock:
                self._weights.remove(self._weights.modules())
        self._handle.close()
        self._transfers.end_abandoned()
        self._names.remove()

    def __repr__(self) -> str:
        lines = "".join(f"    {name}: {value}\n" for name, value in self._particulars().items())
        return f"{type(self).__name__} (\n{lines})"

    def _particulars(self) -> dict[str, str]:
        """The content of repr(). It does not wait, and does not raise."""
        particulars = {"device": str(self._device), "budget": readable(self._budget_bytes)}
        if self._handle.closed:
            return {**particulars, "in use": "none, the stash is closed"}
        try:
            held = readable(self._handle.stats().held_bytes)
        except HybridoptError as error:  # in a forked child
            held = f"not known: {error}"
        particulars["in use"] = held
        if self._wrapped:
            count = sum(module in self._weights for module in self._wrapped)
            weights = f", of {count} the weights too" if count else ""
            particulars["wrapped"] = f"{len(self._wrapped)} modules{weights}"
        for key, program in list(self._programs.items()):
            particulars[f"choice({key!r})" if key else "choice()"] = program.told(self._min_bytes)
        return particulars

    # ----------------------------------------------------------------------------- forward passes --

    def _enter(self, key: str) -> None:
        refuse_capture("an activation stash")
        thread = self._thread
        if is_in_backward():
            thread.begin_statement(None)
            return
        outer = thread.statements[-1].forward_pass if thread.statements else None
        depth = len(thread.statements)
        while depth == 0 and thread.entered and thread.entered[-1].module is None:
            self._leave(thread.entered[-1])  # Ctrl-C has ended the _exit() that had to
        try:
            with self._lock:
                thread.begin_statement(self._begin(key) if outer is None else outer)
            if outer is None and not self._wrapped:
                self._install(Entered(None))
        except BaseException:  # _exit() will not be called
            del thread.statements[depth:]
            raise

    def _note_end(self, end: Callable[..., None], key: str = "") -> None:
        stash = weakref.ref(self)

        def note(its: weakref.ref[Any]) -> None:
            """Ends the forward pass if Ctrl-C has come before the first line of _exit()."""
            this = stash()
            statements = [] if this is None else this._thread.statements
            if this is not None and statements and statements[-1].end is its:
                this._exit(key, False)

        self._thread.next_end = weakref.ref(end, note)

    def _leave_statement(self, kind: Any, *_: Any) -> None:
        self._exit("", kind is None)

    def _exit(self, key: str, is_whole: bool) -> None:
        (this, _), thread = self._thread.statements.pop(), self._thread
        if this is None or (thread.statements and thread.statements[-1].forward_pass is this):
            return
        try:
            with self._lock:
                self._end(this, key, is_whole)
        finally:
            if thread.entered and thread.entered[-1].module is None:
                self._leave(thread.entered[-1])

    def _begin(self, key: str) -> ForwardPass:
        program = self._programs.setdefault(key, Program())
        program.settle(self._choose)
        previous = None if self._previous is None else self._previous()
        if previous is not None:
            previous.release_all()
        self._transfers.end_abandoned()
        is_measured = program.is_to_be_measured
        program.has_waited = False
        clock = self._clock if is_measured else None
        begun = ForwardPass(self._transfers, program.choice, clock, self._window_bytes)
        if is_measured:
            program.measuring = begun
        self._previous = weakref.ref(begun)
        return begun

    def _end(self, this: ForwardPass, key: str, is_whole: bool) -> None:
        this.end_forward()
        program = self._programs.get(key)
        if program is not None:
            if is_whole:
                program.note_length(len(this))
            elif program.measuring is this:
                program.measuring = None

    def _choose(self, ranges: Any, forward_seconds: float) -> Choice:
        budget_bytes = max(self._budget_bytes - self._weights.host_bytes(), 0)
        return choose(
            ranges,
            forward_seconds,
            self._link(),
            budget_bytes=budget_bytes,
            keep_last=self._keep_last,
            fraction=self._fraction,
        )

    def _link(self) -> Link:
        """The speed of the link, as the device has measured it; on the CPU, as the host has."""
        return link_of(self._handle.stats()) or self._transfers.link()

    # ---------------------------------------------------------------------------- wrapped modules --

    def _hooked(self, layer: nn.Module, number: int) -> Iterator[Callable[[], None]]:
        return LayerHooks(self, layer, self._name_of(layer, number), layer in self._weights).attach(layer)

    def _name_of(self, layer: nn.Module, number: int) -> str:
        return self._module_names.get(layer) or f"layer {number}"

    def _attach_weights(self, layer: nn.Module) -> Iterator[Callable[[], None]]:
        its = weakref.ref(layer)

        def bring_back(*_: Any) -> None:
            module = its()
            if module is not None:
                self._bring_back([module])

        for module in layer.modules():
            yield module.register_state_dict_pre_hook(Call(bring_back)).remove
            yield module.register_load_state_dict_pre_hook(Call(bring_back)).remove

    def come_for_step(self, params: Iterable[Tensor]) -> None:
        """Implements away.Keeper."""
        if not self._handle.closed:
            with self._lock:
                self._weights.come_for_step(params)

    def come_to_be_read(self, params: Iterable[Tensor]) -> None:
        """Implements away.Keeper."""
        if not self._handle.closed:
            with self._lock:
                self._weights.come_to_be_read(params)

    def _bring_back(self, layers: Iterable[nn.Module]) -> None:
        if not self._handle.closed:
            with self._lock:
                self._weights.come_back(layers)

    def _unwrap(self, layers: Iterable[nn.Module]) -> None:
        if not self._handle.closed:
            with self._lock:
                self._weights.remove(layers)
        self._weights_only.difference_update(layers)
        self._wrapped.difference_update(layers)
        self._first_called = self._open = None

    def _enter_layer(self, layer: nn.Module, name: str) -> None:
        if self._handle.closed:
            return
        thread = self._thread
        self._leave_cut_off(layer)
        if layer in self._weights:
            with self._lock:
                self._weights.enter(layer, is_backward=False)
        if is_in_backward() or not torch.is_grad_enabled() or self._has_other_hooks():
            return
        refuse_capture("an activation stash")
        if not thread.entered and layer not in self._weights_only:
            with self._lock:
                self._group += 1
                self._continue_pass(layer)
        self._install(Entered(layer, name))

    def _leave_layer(self, layer: nn.Module, result: Any) -> None:
        try:
            if layer in self._weights and not self._handle.closed:
                self._leave_weights(layer, result)
        finally:
            entered = self._thread.entered
            if entered and entered[-1].module is layer:
                self._leave(entered[-1])

    def _leave_cut_off(self, layer: nn.Module) -> None:
        """Ends the calls of layers that Ctrl-C has ended before their hooks ran: `layer` is called, and not by them."""
        entered = self._thread.entered
        while entered and entered[-1].module is not None:
            is_among = any(each.module is layer for each in entered)
            if not is_among and _may_call(entered[-1].module, layer):
                return
            self._leave(entered[-1])

    def _leave(self, entered: Entered) -> None:
        """If Ctrl-C ends this, the next call of a layer begins it again."""
        entered.leave()
        names = self._names.stack.modules
        if entered.name is not None and names and names[-1] == entered.name:
            names.pop()
        if self._thread.entered and self._thread.entered[-1] is entered:
            self._thread.entered.pop()

    def _leave_weights(self, layer: nn.Module, result: Any) -> None:
        with self._lock:
            self._weights.exit(layer)
        its = weakref.ref(layer)

        def before_backward(_: Tensor) -> None:
            module = its()
            if module is not None and not self._handle.closed:
                with self._lock:
                    self._weights.enter(module, is_backward=True)

        for each in tree_leaves(result):
            if isinstance(each, Tensor) and each.requires_grad:
                each.register_hook(before_backward)

    def _continue_pass(self, layer: nn.Module) -> None:
        """Outside of with statements, forward passes begin with the same layer."""
        if self._thread.statements:
            return
        is_first = self._first_called is not None and self._first_called() is layer
        if self._open is None or is_first or self._open.was_used:
            if self._open is not None:
                self._end(self._open, "", True)
            self._first_called = weakref.ref(layer)
            self._open = self._begin("")

    def _has_other_hooks(self) -> bool:
        if _top_hooks is None:
            return _is_in_checkpoint()
        top = _top_hooks(False)
        return top is not None and top[0] != self._pack

    def _install(self, entered: Entered) -> None:
        try:
            self._thread.entered.append(entered)
            if entered.name is not None:
                self._names.stack.modules.append(entered.name)
            entered.enter(saved_tensors_hooks(self._pack, self._unpack))
            if self._is_telling or any(name in ROLES for name in self._wanted):
                entered.enter(self._roles)
        except BaseException:
            self._leave(entered)
            raise

    # ------------------------------------------------------------------------------ what hooks do --

    def _pack(self, tensor: Tensor) -> Any:
        with self._lock:
            return self._save(tensor)

    def _unpack(self, saved: Any) -> Tensor:
        with self._lock:
            return self._restore(saved)

    def _save(self, tensor: Tensor) -> Any:
        entered = self._thread.entered
        if entered and entered[-1].module in self._weights_only:
            return Kept(tensor, self._names.module)
        kind = type(tensor)
        if kind is not Tensor and kind is not nn.Parameter:
            if not is_traceable_wrapper_subclass(tensor) or is_param(tensor):
                return Kept(tensor, self._names.module)
            wait = getattr(tensor, "trigger_wait", None)  # the tensor that a running collective will return
            if wait is not None:
                return self._save(wait())
            names, context = tensor.__tensor_flatten__()
            parts = {name: self._save_part(getattr(tensor, name)) for name in names}
            return Wrapped(tensor, parts, context, self._names.module)
        this = self._pass_now()
        if this is None or not may_go(tensor, self._device, self._min_bytes) or self._weights.holds(tensor):
            return Kept(tensor, self._names.module)
        refuse_capture("an activation stash")
        return self._put(tensor, this)

    def _save_part(self, part: Any) -> Any:
        return self._save(part) if isinstance(part, Tensor) else part  # for example a DeviceMesh

    def _pass_now(self) -> ForwardPass | None:
        if is_in_backward():
            return None
        statements = self._thread.statements
        return statements[-1].forward_pass if statements else self._open

    def _put(self, tensor: Tensor, this: ForwardPass) -> Any:
        module = self._names.module
        if self._wanted and not self._names.is_one_of(self._wanted):
            return Kept(tensor, module)
        found = range_of(tensor)
        if found is None:
            return Kept(tensor, module)
        address, size = found
        storage = tensor.untyped_storage()
        self._saved.count += 1
        self._saved.bytes += size
        # The same memory with the same content. As long as the block lives no other storage has this name.
        key = (storage._cdata, address, size, tensor._version)
        block = self._blocks.get(key)
        if block is None or block.origin.expired():
            block = Block(storage, address, size)
            self._blocks[key] = block
            group = self._group if self._wrapped else len(this)
            this.save(block, module, self._names.stack.role, group)
        else:
            self._saved.twice += 1
            self._saved.twice_bytes += size
        return Put(tensor, block, tensor.data_ptr(), module)

    def _restore(self, saved: Any) -> Any:
        if isinstance(saved, Wrapped):
            return saved.restore({name: self._restore(part) for name, part in saved.parts.items()})
        if not isinstance(saved, (Kept, Put)):
            return saved
        saved.guard.check()
        if isinstance(saved, Put):
            saved.block.forward_pass.use(saved.block)
        elif self._weights:
            self._weights.come_for(saved.tensor)
        return saved.restore()


@functools.cache
def _hook_steps() -> None:
    """Registers one hook for all stashes, because torch has no hook that ends with its stash."""
    register_optimizer_step_pre_hook(_before_step)


def _before_step(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    """torch calls this before the step of any optimizer."""
    lists = [group.get("params") for group in optimizer.param_groups]
    entries = [entry for each in lists if isinstance(each, (list, tuple)) for entry in each]
    params = [entry for entry in entries if isinstance(entry, Tensor)]  # the step refuses others
    for keeper in list(keepers):
        keeper.come_for_step(params)


# Older versions of torch do not have this function.
_top_hooks = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", None)


def _is_in_checkpoint() -> bool:
    """Whether a checkpoint of torch is among the callers."""
    frame = inspect.currentframe()
    while frame is not None:
        if frame.f_globals.get("__name__") == torch.utils.checkpoint.__name__:
            return True
        frame = frame.f_back
    return False


def _may_call(outer: nn.Module, inner: nn.Module) -> bool:
    """Whether the running call of `inner` may be part of a call of `outer`."""
    if any(each is inner for each in outer.modules()):
        return True
    frame = inspect.currentframe()
    while frame is not None:
        if frame.f_locals.get("self") is outer:
            return True
        frame = frame.f_back
    return False
