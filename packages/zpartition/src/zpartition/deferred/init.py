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

Rejected.  Patching `nn.Module.__init__` (as DeepSpeed: it outlives the block, and parents that initialize again must
be patched, too); FakeTensor (its caches and its dispatch cost more than this file).
"""

from __future__ import annotations

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
from zpartition.deferred.recording import InitRecording, Key, Ref, is_meta, key_of
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
    "tensors_of",
    "wire_device",
]


class _Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records every operation inside, except those on real tensors alone."""

    def __init__(self, recorded: InitRecording) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.recorded = recorded
        self.is_paused = False  # while values are made

    def __enter__(self) -> _Recorder:
        super().__enter__()  # type: ignore[no-untyped-call]
        _open.append(self.recorded)
        return self

    def __exit__(self, *error: Any) -> None:
        recorded = _open.pop()
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        recorded.marks.rewind()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        tensors = [leaf for leaf in tree_flatten((args, kwargs))[0] if isinstance(leaf, Tensor)]
        is_random = torch.Tag.nondeterministic_seeded in func.tags
        if self.is_paused or (tensors and not is_random and not any(map(is_meta, tensors))):
            return func(*args, **kwargs)
        if func is _compat.TO_NUMBER:
            value = self.recorded.evaluate(args[0])
            return func(args[0] if value is None else value)  # on a meta tensor: torch's own error
        return self.recorded.record(func, args, kwargs)


class _NotMeta(TorchFunctionMode):
    """Makes `is_meta` False for tensors inside: torch.nn.init skips meta tensors."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return False if func == _compat.IS_META_GETTER else func(*args, **(kwargs or {}))


# Storage -> its recording, until it is materialized: tensors cannot hold it.  A recording is small: meta tensors, and
# few real numbers.
_recordings: dict[Key, InitRecording] = {}
_open: list[InitRecording] = []  # open recordings, the innermost last


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

    Weights equal those of a plain build with the same seed.  Nothing outlives the block.  Random numbers are drawn at
    materialization: a second model that is built before the first is materialized draws the same numbers, and `Init`
    warns.
    """

    def __init__(
        self, *, enabled: bool = True, make_buffers: bool = False, fake_device: torch.device | str = "meta"
    ) -> None:
        self.recorded = InitRecording()
        self._fake_device = torch.device(fake_device)
        self._params: list[Parameter] = []  # registered by modules
        self._modes = ExitStack()
        self._enabled = enabled
        self._make_buffers = make_buffers
        self._recorder = _Recorder(self.recorded)
        self._is_second = False  # of two models with the same random numbers

    def __enter__(self) -> Init:
        if self._enabled:
            for recorded in {*_recordings.values()}:
                _forget_dead(recorded)
            self._is_second = any(recorded.marks.end() is not None for recorded in _recordings.values())
            self._modes.enter_context(self._recorder)
            self._modes.enter_context(_NotMeta())
            self._modes.enter_context(_compat.truncated_normal_through(self.recorded.record_filling))
            if self._fake_device.type != "meta":
                note: Any = lambda _module, _name, param: self._params.append(param)  # noqa: E731
                self._modes.callback(register_module_parameter_registration_hook(note).remove)
            if self._make_buffers:
                hook: Any = self._made  # may return the tensor to register, which torch's annotation does not know
                self._modes.callback(register_module_buffer_registration_hook(hook).remove)
        return self

    def _made(self, module: nn.Module, name: str, buffer: Tensor | None) -> Tensor | None:
        """Return the materialized buffer that is being registered; None leaves it unchanged."""
        if buffer is None or not is_meta(buffer):
            return None
        self._recorder.is_paused = True
        try:
            return self.recorded.evaluate(buffer)
        finally:
            self._recorder.is_paused = False

    def __exit__(self, *error: Any) -> None:
        self._modes.close()
        if self._is_second and self.recorded.marks.end() is not None:
            warnings.warn(_SAME_NUMBERS, stacklevel=2)
        for key in self.recorded.storages:
            _recordings[key] = self.recorded
        set_fake_device([param for param in self._params if param is not None and is_meta(param)], self._fake_device)
        self._params.clear()


def recording_for(tensor: Tensor) -> InitRecording | None:
    """Return the recording that fills this tensor, after its block; None for any other tensor."""
    return _recordings.get(key_of(tensor)) if is_meta(tensor) else None


def recording_of(module: nn.Module) -> InitRecording | None:
    """Return the recording that fills the meta tensors of `module`; None if it has none.

    Raises ValueError for meta tensors without a recording.
    """
    clear_fake_device(module.parameters())
    for name, tensor in tensors_of(module):
        if is_meta(tensor):
            recorded = _recordings.get(key_of(tensor))
            if recorded is None:
                raise ValueError(
                    f"{name} is on the meta device without a recording of its values. Build the module inside "
                    "zpartition.Init(), or load values into it (module.to_empty and load_state_dict) first."
                )
            return recorded
    return None


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
    return _open[-1] if _open else None


@contextmanager
def recording(module: nn.Module) -> Iterator[None]:
    """Record casts and moves of a module that was built inside `Init`.

    For other modules the block does nothing.
    """
    recorded = recording_of(module)
    if recorded is None:
        yield
        return
    with _Recorder(recorded):
        yield
    for key in recorded.storages:
        _recordings[key] = recorded


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
    counts = zcomm.all_gather_object(len(recorded.steps), group)
    if len(set(counts)) > 1:
        raise ValueError(
            f"the ranks built different modules inside Init (operations by rank: {counts}); build the same on all."
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
    for path, child in module.named_modules():
        for name, value in vars(child).items():
            if isinstance(value, Tensor) and key_of(value) in _recordings:
                yield f"{path}.{name}" if path else name, value
