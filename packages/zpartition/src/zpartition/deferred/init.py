"""Deferred initialization: build a model without memory, and materialize each rank's shards later.

    with zpartition.Init():
        model = GPT(...)                          # parameters on the meta device: shapes, no memory
    partition = zpartition.shard(model, ...)      # weights as a plain build with this seed makes them

Problem.  A model that fits only when it is sharded cannot be built first; and weights drawn shard by shard differ
from those of the unsharded build, so results cannot be compared.

Design.  Inside the block every tensor is created on the meta device, and operations that would fill it are recorded
(`InitRecording`): in order, with the state of the random generator where user code seeded it.
`InitRecording.replay` executes them later, in the same order and so with the same random numbers.  Memory is
allocated when an operation writes it and freed as soon as the next operation would overwrite it (a layer's own
initialization, when the model initializes again) or none follows: then the finished tensor is delivered, and each
rank keeps its own part.

A number that the construction reads (`.item()`) is computed immediately, from the operations that lead to it.  A
number that depends on random numbers is not available: torch raises its error about meta tensors.  Tensors made from
data (`torch.tensor([...])`, numpy) are real at once, and small.

A nested block continues the recording of the outer one.  `suspend_init` suspends all open blocks, while one of the
models is partitioned, say: flags in the modes make them pass operations on, whatever modes of others lie between;
the recordings are as after their blocks, and continue afterwards.

Rejected.  Patching `nn.Module.__init__` (as DeepSpeed: it outlives the block, and parents that initialize again must
be patched, too); FakeTensor (its caches and its dispatch cost more than this file); popping modes to suspend a block
(modes of others, which lie above, would have to be popped and restored as well).
"""

from __future__ import annotations

import gc
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any, final

import attrs
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.nn import Parameter
from torch.nn.modules.module import (
    register_module_buffer_registration_hook,
    register_module_parameter_registration_hook,
)
from torch.overrides import TorchFunctionMode

import zcomm
from zpartition import _compat
from zpartition._compat import TorchDispatchMode, tree_flatten
from zpartition.deferred.fake_device import clear_fake_device, make_hollow, set_fake_device
from zpartition.deferred.recording import GeneratorMarks, InitRecording, Key, Ref, is_meta, key_of
from zpartition.layout.model_parallel import expert_shards_of

__all__ = [
    "Deferred",
    "Init",
    "active_recording",
    "is_deferred",
    "recording",
    "recording_for",
    "recording_if_deferred",
    "recording_of",
    "recordings_of",
    "share_random_numbers",
    "share_seeds",
    "suspend_init",
    "tensors_of",
    "wire_device",
]


class _OpenRecorders(threading.local):
    """Recorders of the open blocks of this thread."""

    def __init__(self) -> None:
        self.stack: list[_Recorder] = []  # the innermost last


_open = _OpenRecorders()


def _active() -> _Recorder | None:
    """Return the recorder of the innermost open block; None if there is none, or it is suspended."""
    return _open.stack[-1] if _open.stack and not _open.stack[-1].is_suspended else None


class _Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records every operation inside, except those on real tensors alone; only the innermost one records."""

    def __init__(self, recorded: InitRecording) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.recorded = recorded
        self.is_suspended = False  # operations pass, while values are made
        self.blocks: list[Init] = []  # open blocks whose operations it records, the innermost last

    def __enter__(self) -> _Recorder:
        super().__enter__()  # type: ignore[no-untyped-call]
        _open.stack.append(self)
        return self

    def __exit__(self, *error: Any) -> None:
        _open.stack.remove(self)
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        self.recorded.marks.rewind()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        tensors = [leaf for leaf in tree_flatten((args, kwargs))[0] if isinstance(leaf, Tensor)]
        is_random = torch.Tag.nondeterministic_seeded in func.tags
        if _active() is not self or (tensors and not is_random and not any(map(is_meta, tensors))):
            return func(*args, **kwargs)
        if func is _compat.TO_NUMBER:
            value = self.recorded.evaluate(args[0])
            return func(args[0] if value is None else value)  # on a meta tensor: torch's own error
        return self.recorded.record(func, args, kwargs)

    @contextmanager
    def suspended(self) -> Iterator[None]:
        """Suspend the recording inside the block, as if its own block had ended; then continue it.

        Once nothing of the module's is left in it, a new recording begins, so that nothing is replayed twice.
        """
        with ExitStack() as blocks:
            self.is_suspended = True
            blocks.callback(setattr, self, "is_suspended", False)
            for block in reversed(self.blocks):
                blocks.enter_context(block.suspended())
            marks, state = self.recorded.marks.copy(), torch.get_rng_state()
            self.recorded.marks.rewind()
            start, num_replays = torch.get_rng_state(), self.recorded.num_replays
            _register(self.recorded)
            try:
                yield
            finally:
                if self.recorded.num_replays == num_replays:
                    self.recorded.marks = marks
                    if torch.equal(torch.get_rng_state(), start):
                        torch.set_rng_state(state)
                elif self.blocks and not _is_pending(self.recorded):
                    self.recorded = InitRecording()
                else:
                    self.recorded.marks = GeneratorMarks()  # the generator is where the replay has left it
                _unregister(self.recorded)


class _NotMeta(TorchFunctionMode):
    """Makes `is_meta` False for tensors inside: torch.nn.init skips meta tensors."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func == _compat.IS_META_GETTER and _active() is not None:
            return False
        return func(*args, **(kwargs or {}))


def _fill(function: Callable[..., Tensor], tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """Call a function that fills `tensor` with random numbers, or record the call inside an open block."""
    recorder = _active()
    if recorder is None:
        return function(tensor, *args, **kwargs)
    return recorder.recorded.record_filling(function, tensor, *args, **kwargs)


# Storage -> its recording, until it is materialized: tensors cannot hold it.  A recording is small: meta tensors, and
# few real numbers.
_recordings: dict[Key, InitRecording] = {}

_SAME_NUMBERS = (
    "zpartition.Init: this model draws the same random numbers as another model that was built inside Init and is "
    "not materialized yet, so layers of equal shapes get equal weights. Partition the first model before you build "
    "the second, or call torch.manual_seed with another seed in between. Weights loaded later are not affected."
)


class Init(AbstractContextManager["Init"]):
    """Context manager: modules built inside have no memory until `shard` gives each rank its part.

    enabled: if False, the block does nothing, so that one script can do both.
    fake_device: device that parameters report after the block, for code that creates new modules beside them
        (fake_device.py); "meta": none.
    make_buffers: materialize buffers at once, unless they are random: for code that writes into them before
        `shard`, such as checkpoint loaders.
    dtype: torch's default dtype inside the block; None leaves it.
    registered: called with the parameters that modules registered inside, when the block ends or is suspended (then
        again with those that are still deferred).

    Weights equal those of a plain build with the same seed.  Nothing outlives the block.  Random numbers are drawn at
    materialization: a second model that is built before the first is materialized draws the same numbers, and `Init`
    warns; in one block, or in nested ones, its numbers follow those of the first.

    >>> import torch, zpartition
    >>> with zpartition.Init():
    ...     model = torch.nn.Linear(4, 2)
    >>> zpartition.is_deferred(model)
    True
    >>> partition = zpartition.shard(model, policy=zpartition.ZeroPolicy(stage=3))
    >>> zpartition.is_deferred(model)
    False
    """

    def __init__(
        self,
        *,
        enabled: bool = True,
        make_buffers: bool = False,
        fake_device: torch.device | str = "meta",
        dtype: torch.dtype | None = None,
        registered: Callable[[list[Parameter]], object] | None = None,
    ) -> None:
        self._enabled = enabled
        self._make_buffers = make_buffers
        self._fake_device = torch.device(fake_device)
        self._dtype = dtype
        self._outer_dtype = torch.get_default_dtype()
        self._announce = registered
        self._registered: list[tuple[Parameter, torch.device]] = []  # by modules, with their fake device
        self._modes = ExitStack()
        self._recorder = _Recorder(InitRecording())
        self._is_second = False  # of two models with the same random numbers

    @property
    def recorded(self) -> InitRecording:
        """Recording of the block."""
        return self._recorder.recorded

    def __enter__(self) -> Init:
        if self._enabled:
            outer = _active()
            self._recorder = _Recorder(InitRecording()) if outer is None else outer
            if outer is None:
                for recorded in {*_recordings.values()}:
                    _forget_dead(recorded)
                self._is_second = any(recorded.marks.end() is not None for recorded in _recordings.values())
                self._modes.enter_context(self._recorder)
                self._modes.enter_context(_NotMeta())
                self._modes.enter_context(_compat.truncated_normal_through(_fill))
            self._recorder.blocks.append(self)
            if self._fake_device.type != "meta" or self._announce is not None:
                self._modes.callback(register_module_parameter_registration_hook(self._note).remove)
            if self._make_buffers:
                hook: Any = self._made  # may return the tensor to register, which torch's annotation does not know
                self._modes.callback(register_module_buffer_registration_hook(hook).remove)
            if self._dtype is not None:
                self._outer_dtype = torch.get_default_dtype()
                self._modes.callback(torch.set_default_dtype, self._outer_dtype)
                torch.set_default_dtype(self._dtype)
        return self

    def _note(self, module: nn.Module, name: str, param: Parameter | None) -> None:
        if param is not None and not self._recorder.is_suspended:
            self._registered.append((param, self._fake_device))

    def _made(self, module: nn.Module, name: str, buffer: Tensor | None) -> Tensor | None:
        """Return the materialized buffer that is being registered; None leaves it unchanged."""
        recorder = _active()
        if recorder is None or self._recorder.is_suspended or buffer is None or not is_meta(buffer):
            return None
        recorder.is_suspended = True
        try:
            return recorder.recorded.evaluate(buffer)
        finally:
            recorder.is_suspended = False

    @contextmanager
    def suspended(self) -> Iterator[None]:
        """Let default dtype and hooks have no effect inside the block, while the recorder is suspended."""
        self._finish()
        current = torch.get_default_dtype()
        if current == self._dtype:
            torch.set_default_dtype(self._outer_dtype)
        try:
            yield
        finally:
            if current == self._dtype:
                torch.set_default_dtype(current)
            self._registered = [pair for pair in self._registered if is_meta(pair[0])]

    def _finish(self) -> None:
        """Warn of equal random numbers, and announce the parameters so far."""
        if self._is_second and self.recorded.marks.end() is not None:
            warnings.warn(_SAME_NUMBERS, stacklevel=3)
            self._is_second = False
        if self._announce is not None:
            self._announce([param for param, _ in self._registered])

    def __exit__(self, *error: Any) -> None:
        if not self._enabled:
            return
        self._modes.close()
        self._recorder.blocks.remove(self)
        if self._recorder.blocks:  # the recording goes on, on the meta device
            self._finish()
            self._recorder.blocks[-1]._registered += self._registered
        else:
            self._finish()
            _register(self.recorded)
            for param, device in self._registered:
                set_fake_device([param] if is_meta(param) else [], device)
        self._registered = []


@contextmanager
def suspend_init() -> Iterator[None]:
    """Suspend all open `Init` and `recording` blocks of this thread: inside, modules and tensors are real.

    What was built in these blocks can be materialized (`shard`), as after them.  Afterwards the blocks continue, and
    random numbers follow those of the models so far.  The default device is the CPU inside, if it is "meta".
    Suspending suspended blocks does nothing, and an `Init` inside begins a block of its own.
    """
    with ExitStack() as stack:
        for recorder in reversed(_open.stack):
            if not recorder.is_suspended:
                stack.enter_context(recorder.suspended())
        if torch.get_default_device().type == "meta":
            stack.enter_context(torch.device("cpu"))
        yield


def recording_for(tensor: Tensor) -> InitRecording | None:
    """Return the recording that fills this tensor, after its block; None for any other tensor."""
    return _recordings.get(key_of(tensor)) if is_meta(tensor) else None


def recording_of(module: nn.Module) -> InitRecording | None:
    """Return the recording that fills the meta tensors of `module`; None if it has none.

    Recordings of several blocks become one.  Raises ValueError for meta tensors without a recording.
    """
    clear_fake_device(module.parameters())
    found: InitRecording | None = None
    for name, tensor in tensors_of(module):
        if is_meta(tensor):
            recorded = _recordings.get(key_of(tensor))
            if recorded is None:
                raise ValueError(
                    f"{name} is on the meta device without a recording of its values. Build the module inside "
                    "zpartition.Init(), or load values into it (module.to_empty and load_state_dict) first."
                )
            if found is None:
                found = recorded
            elif recorded is not found:
                found.absorb(recorded)
                _recordings.update((key, found) for key, known in _recordings.items() if known is recorded)
    return found


def recordings_of(module: nn.Module) -> list[InitRecording]:
    """Return the recordings of parameters of `module` that are not materialized."""
    found = map(recording_for, module.parameters())
    return list({id(recorded): recorded for recorded in found if recorded is not None}.values())


def is_deferred(module: nn.Module) -> bool:
    """Return whether `module` was built inside `Init`, as a whole or in parts, and is not materialized."""
    clear_fake_device(module.parameters())
    return bool(recordings_of(module))


def recording_if_deferred(module: nn.Module) -> AbstractContextManager[None]:
    """Record what is done to `module` inside the block if it is deferred.

    As `recording`, but a module on the meta device without a recording is left alone.
    """
    return recording(module) if is_deferred(module) else nullcontext()


def active_recording() -> InitRecording | None:
    """Return the recording of the innermost open block."""
    recorder = _active()
    return None if recorder is None else recorder.recorded


@contextmanager
def recording(module: nn.Module) -> Iterator[None]:
    """Record casts and moves of a module that was built inside `Init`.

    For other modules the block does nothing.
    """
    recorded = recording_of(module)
    if recorded is None:
        yield
        return
    with _Recorder(recorded) as recorder:
        yield
    _register(recorder.recorded)


@final
@attrs.define(eq=False)
class Deferred:
    """Values of a module built inside `Init`, until they are materialized."""

    recorded: InitRecording
    slots: dict[Key, list[tuple[str, Ref]]]  # storage -> names of the module's tensors in it
    tensors: dict[str, Tensor]  # these tensors, hollow, by name
    real: dict[str, Tensor]  # values of parameters created outside `Init`, by name
    num_expert_shards: dict[str, int]  # of expert-sharded parameters, by name

    @classmethod
    def of(cls, module: nn.Module, device: torch.device) -> Deferred | None:
        """Make the parameters and buffers of `module` hollow tensors on `device`; None for an ordinary module.

        Raises ValueError for meta tensors without a recording.
        """
        recorded = recording_of(module)
        if recorded is None:
            return None
        slots: dict[Key, list[tuple[str, Ref]]] = {}
        tensors: dict[str, Tensor] = {}
        real = {name: param.detach() for name, param in module.named_parameters() if not is_meta(param)}
        for name, tensor in list(tensors_of(module)):
            if is_meta(tensor):
                slots.setdefault(key_of(tensor), []).append((name, Ref.of(tensor)))
                tensors[name] = tensor
                make_hollow(tensor, device)
        for key in slots:
            _recordings.pop(key, None)
        _forget_dead(recorded)
        return cls(
            recorded,
            slots,
            tensors,
            real,
            {name: expert_group.size for name, expert_group in expert_shards_of(module).items()},
        )

    def fill(self, adopt: Callable[[str, Tensor], None], group: ProcessGroup | None) -> None:
        """Call `adopt(name, values)` with the values of every tensor, on the CPU, in any order.

        All ranks draw rank 0's random numbers.
        """
        share_seeds(self.recorded, group)

        def deliver(key: Key, content: Tensor) -> None:
            for name, ref in self.slots[key]:
                adopt(name, ref.seen_in(content))

        self.recorded.replay(deliver, wanted=frozenset(self.slots))
        for name, values in self.real.items():
            together = values.clone(memory_format=torch.contiguous_format)
            shards = self.num_expert_shards.get(name)
            holders = group if shards is None else zcomm.strided_group(shards, group)
            zcomm.broadcast(together, holders, source=0, label=f"weights of {name}")
            adopt(name, together)


def _register(recorded: InitRecording) -> None:
    """Let tensors of a recording whose block has ended find it."""
    _recordings.update(dict.fromkeys(recorded.storages, recorded))
    _forget_dead(recorded)


def _unregister(recorded: InitRecording) -> None:
    for key in recorded.storages:
        if _recordings.get(key) is recorded:
            del _recordings[key]


def _is_pending(recorded: InitRecording) -> bool:
    """Return whether tensors of a recording are not materialized; equal on all ranks, whatever garbage they have."""
    _forget_dead(recorded)
    if recorded in _recordings.values():
        gc.collect()
        _forget_dead(recorded)
    return recorded in _recordings.values()


def _forget_dead(recorded: InitRecording) -> None:
    """Drop storages without tensors, so that a recording is freed with all that it keeps once it is replayed."""
    for key, storage in recorded.storages.items():
        if _recordings.get(key) is recorded and _compat.is_unreferenced(storage):
            del _recordings[key]


def share_seeds(recorded: InitRecording, group: ProcessGroup | None) -> None:
    """Give all ranks rank 0's random numbers.  A collective.  Raises ValueError if ranks built different modules."""
    seeded = [index for index, step in enumerate(recorded.steps) if step.generator is not None]
    states = [recorded.steps[index].generator for index in seeded]
    if zcomm.group_size(group) == 1 or not states:
        return
    counts = zcomm.all_gather_object([len(recorded.steps), len(seeded)], group)
    if any(count != counts[0] for count in counts):
        raise ValueError(
            f"the ranks built different modules inside Init (operations and seeds by rank: {counts}); build the "
            "same, and call torch.manual_seed at the same places, on all."
        )
    own = torch.stack([state for state in states if state is not None]).to(wire_device(group))
    together = own.clone()
    zcomm.broadcast(together, group, source=0, label="seeds")
    recorded.is_own = recorded.is_own and torch.equal(own, together)
    for index, state in zip(seeded, together.cpu()):
        recorded.steps[index] = attrs.evolve(recorded.steps[index], generator=state.clone())


def share_random_numbers(recorded: InitRecording, group: ProcessGroup | None) -> None:
    """Call `share_seeds` and let all ranks continue with rank 0's generator, which advances with the recording."""
    share_seeds(recorded, group)
    mark = recorded.marks.mark
    if mark is not None and zcomm.group_size(group) > 1:
        state = mark.start.to(wire_device(group), copy=True)
        zcomm.broadcast(state, group, source=0, label="seeds")
        recorded.is_own, has_end = zcomm.all_gather_object([recorded.is_own, bool(recorded.marks.known)], group)[0]
        if has_end:
            recorded.marks.follow(state.cpu())
        else:
            recorded.marks.known.clear()


def wire_device(group: ProcessGroup | None) -> torch.device:
    """Return the device on which tensors travel over `group`: NCCL needs a GPU."""
    on_gpu = dist.is_initialized() and dist.get_backend(group) == "nccl"
    return torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")


def tensors_of(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield parameters, buffers, and tensors that are plain attributes of modules."""
    yield from module.named_parameters()
    yield from module.named_buffers()
    for path, child in module.named_modules() if _recordings else ():
        for name, value in vars(child).items():
            if isinstance(value, Tensor) and key_of(value) in _recordings:
                yield f"{path}.{name}" if path else name, value
