"""Building a model without its memory, and making the weights afterwards, each rank its own part.

    with zpartition.Init():
        model = GPT(...)                          # parameters on the meta device: shapes, no memory
    partition = zpartition.shard(model, ...)      # weights as a plain build with this seed makes them

Problem.  A model that fits only when it is sharded cannot be built first; and weights that are drawn shard by shard
are other weights than those of the unsharded build, so nothing could be compared.

Design.  Inside the block every tensor is made on the meta device, and what would have filled it goes onto a *tape*:
the operations, in order, and the state of the random generator where somebody seeded it.  `Tape.play` carries them
out later, in the same order and so with the same random numbers.  Memory is made when an operation writes it and
given back as soon as the next one would overwrite it (a layer's own initialisation, when the model draws again) or
when nothing follows: then the finished tensor is delivered, and only this rank's part of it is kept.

A number that the construction asks for (`.item()`) is computed there and then, from the steps that lead to it.  One
that depends on random numbers cannot be had: torch raises its error about meta tensors.
Numbers that come from elsewhere (`torch.tensor([...])`, numpy) are real at once, and small.

Rejected.  Patching `nn.Module.__init__` (DeepSpeed's way: it outlives the block, and re-initialising parents have to
be patched too); FakeTensor (its caches and its dispatch cost more than this whole file).
"""

from __future__ import annotations

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
from zpartition.cells import deals_of
from zpartition.hidden import hide, make_hollow, show
from zpartition.tape import Key, Ref, Tape, is_meta, key_of

__all__ = [
    "Deferred",
    "Init",
    "draw_alike",
    "is_deferred",
    "noting",
    "recording",
    "share_random_numbers",
    "tape_in_progress",
    "tape_of",
    "tape_that_knows",
    "tapes_of",
    "tensors_of",
    "wire_device",
]


class _Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Everything inside goes onto the tape, but for operations on real tensors alone."""

    def __init__(self, tape: Tape) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.tape = tape
        self.is_paused = False  # while values are made

    def __enter__(self) -> _Recorder:
        super().__enter__()  # type: ignore[no-untyped-call]
        _open.append(self.tape)
        return self

    def __exit__(self, *error: Any) -> None:
        tape = _open.pop()
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        tape.marks.rest()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        tensors = [leaf for leaf in tree_flatten((args, kwargs))[0] if isinstance(leaf, Tensor)]
        is_random = torch.Tag.nondeterministic_seeded in func.tags
        if self.is_paused or (tensors and not is_random and not any(map(is_meta, tensors))):
            return func(*args, **kwargs)
        if func is _compat.TO_NUMBER:
            value = self.tape.evaluate(args[0])
            return func(args[0] if value is None else value)  # on a meta tensor: torch's own error
        return self.tape.record(func, args, kwargs)


class _NotMeta(TorchFunctionMode):
    """Tensors inside say that they are not on the meta device: torch.nn.init leaves those that say so as they are."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return False if func == _compat.IS_META_GETTER else func(*args, **(kwargs or {}))


# Storage -> the tape that knows it.  Kept until the values are taken: tensors cannot hold it.  A tape is small: meta
# tensors, and the few real numbers that it was given.
_tapes: dict[Key, Tape] = {}
_open: list[Tape] = []  # those that are being recorded, the innermost last


class Init(AbstractContextManager["Init"]):
    """Modules built inside have no memory until `shard` gives each rank its part.

    enabled: False makes the block do nothing, so that one script serves both ways.
    shown_on: where parameters say that they are once the block is over; "meta" is the truth.  On another device they
        are one NaN in the right shape until somebody looks (see hidden.py): for code that puts new modules beside.
    make_buffers: buffers get their values at once, unless these are random: for code that writes into them before
        `shard`, as loaders of checkpoints do.
    The weights are those that a plain build with the same seed has.  Nothing outlives the block.
    """

    def __init__(
        self, *, enabled: bool = True, make_buffers: bool = False, shown_on: torch.device | str = "meta"
    ) -> None:
        self.tape = Tape()
        self._shown_on = torch.device(shown_on)
        self._params: list[Parameter] = []  # those that modules have registered
        self._modes = ExitStack()
        self._enabled = enabled
        self._make_buffers = make_buffers
        self._recorder = _Recorder(self.tape)

    def __enter__(self) -> Init:
        if self._enabled:
            self._modes.enter_context(self._recorder)
            self._modes.enter_context(_NotMeta())
            self._modes.enter_context(_compat.truncated_normal_through(self.tape.record_filling))
            if self._shown_on.type != "meta":
                note: Any = lambda _module, _name, param: self._params.append(param)  # noqa: E731
                self._modes.callback(register_module_parameter_registration_hook(note).remove)
            if self._make_buffers:
                hook: Any = self._made  # may return the tensor to register, which torch's annotation does not know
                self._modes.callback(register_module_buffer_registration_hook(hook).remove)
        return self

    def _made(self, module: nn.Module, name: str, buffer: Tensor | None) -> Tensor | None:
        """The value of a buffer that is being registered; None leaves it as it is."""
        if buffer is None or not is_meta(buffer):
            return None
        self._recorder.is_paused = True
        try:
            return self.tape.evaluate(buffer)
        finally:
            self._recorder.is_paused = False

    def __exit__(self, *error: Any) -> None:
        self._modes.close()
        for key in self.tape.storages:
            _tapes[key] = self.tape
        hide([param for param in self._params if param is not None and is_meta(param)], self._shown_on)
        self._params.clear()


def tape_that_knows(tensor: Tensor) -> Tape | None:
    """The tape that fills this tensor, once its block is over; None for any other."""
    return _tapes.get(key_of(tensor)) if is_meta(tensor) else None


def tape_of(module: nn.Module) -> Tape | None:
    """The tape that fills the meta tensors of `module`; None where it has none.

    Raises ValueError for meta tensors that no tape knows.
    """
    show(module.parameters())
    for name, tensor in tensors_of(module):
        if is_meta(tensor):
            tape = _tapes.get(key_of(tensor))
            if tape is None:
                raise ValueError(
                    f"{name} is on the meta device, and nothing says what its values are. Build the module inside "
                    "zpartition.Init(), or load values into it (module.to_empty and load_state_dict) first."
                )
            return tape
    return None


def tapes_of(module: nn.Module) -> list[Tape]:
    """Those that know values which parameters of `module` do not have yet."""
    found = map(tape_that_knows, module.parameters())
    return list({id(tape): tape for tape in found if tape is not None}.values())


def is_deferred(module: nn.Module) -> bool:
    """Whether `module` was built inside `Init`, as a whole or in parts, and nobody has taken its values yet."""
    show(module.parameters())
    return bool(tapes_of(module))


def noting(module: nn.Module) -> AbstractContextManager[None]:
    """Where the module has no values yet, what is done to it is put onto the tape that will make them.

    As `recording`, and a module on the meta device that no tape knows is left to itself.
    """
    return recording(module) if is_deferred(module) else nullcontext()


def tape_in_progress() -> Tape | None:
    """The tape of the innermost block that is open."""
    return _open[-1] if _open else None


@contextmanager
def recording(module: nn.Module) -> Iterator[None]:
    """Casting a module that was built inside `Init`, or moving it, inside this block is put onto its tape.

    For other modules the block does nothing.
    """
    tape = tape_of(module)
    if tape is None:
        yield
        return
    with _Recorder(tape):
        yield
    for key in tape.storages:
        _tapes[key] = tape


@final
@attrs.define(eq=False)
class Deferred:
    """The values of a module that was built inside `Init`, until somebody takes them."""

    tape: Tape
    slots: dict[Key, list[tuple[str, Ref]]]  # storage -> names of the module's tensors in it
    tensors: dict[str, Tensor]  # those, hollow now, by name
    real: dict[str, Tensor]  # values of the parameters that were made outside of `Init`, by name
    deals: dict[str, int]  # parameters of which other ranks have other values: over runs of how many

    @classmethod
    def of(cls, module: nn.Module, device: torch.device) -> Deferred | None:
        """Make the parameters and buffers of `module` hollow tensors on `device`; None for an ordinary module.

        Raises ValueError for meta tensors that no tape knows.
        """
        tape = tape_of(module)
        if tape is None:
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
            _tapes.pop(key, None)
        _forget_dead(tape)
        return cls(tape, slots, tensors, real, {name: deal.size for name, deal in deals_of(module).items()})

    def fill(self, take: Callable[[str, Tensor], None], group: ProcessGroup | None) -> None:
        """`take(name, values)` gets the values of every tensor, on the CPU, in any order.

        All ranks draw rank 0's random numbers.
        """
        draw_alike(self.tape, group)

        def deliver(key: Key, content: Tensor) -> None:
            for name, ref in self.slots[key]:
                take(name, ref.seen_in(content))

        self.tape.play(deliver, wanted=frozenset(self.slots))
        for name, values in self.real.items():
            together = values.clone(memory_format=torch.contiguous_format)
            holders = zcomm.run_mates(self.deals[name], group) if name in self.deals else group
            zcomm.broadcast(together, holders, source=0, label=f"weights of {name}")
            take(name, together)


def _forget_dead(tape: Tape) -> None:
    """Storages that no tensor has any more need no tape; then it can go when it is played, with all that it keeps."""
    for key, storage in tape.storages.items():
        if _tapes.get(key) is tape and _compat.is_unreferenced(storage):
            del _tapes[key]


def draw_alike(tape: Tape, group: ProcessGroup | None) -> None:
    """Give all ranks rank 0's random numbers.  A collective.  ValueError where they built different modules."""
    seeded = [index for index, step in enumerate(tape.steps) if step.generator is not None]
    states = [tape.steps[index].generator for index in seeded]
    if zcomm.group_size(group) == 1 or not states:
        return
    counts = zcomm.exchange(len(tape.steps), group)
    if len(set(counts)) > 1:
        raise ValueError(f"the ranks built different modules inside Init: operations by rank: {counts}.")
    own = torch.stack([state for state in states if state is not None]).to(wire_device(group))
    together = own.clone()
    zcomm.broadcast(together, group, source=0, label="seeds")
    tape.is_own = tape.is_own and torch.equal(own, together)
    for index, state in zip(seeded, together.cpu()):
        tape.steps[index] = attrs.evolve(tape.steps[index], generator=state.clone())


def share_random_numbers(tape: Tape, group: ProcessGroup | None) -> None:
    """`draw_alike`, for ranks that go on with rank 0's generator: it moves on with the tape, if rank 0's does."""
    draw_alike(tape, group)
    mark = tape.marks.mark
    if mark is not None and zcomm.group_size(group) > 1:
        state = mark.start.to(wire_device(group), copy=True)
        zcomm.broadcast(state, group, source=0, label="seeds")
        tape.is_own, has_end = zcomm.exchange([tape.is_own, bool(tape.marks.known)], group)[0]
        if has_end:
            tape.marks.follow(state.cpu())
        else:
            tape.marks.known.clear()


def wire_device(group: ProcessGroup | None) -> torch.device:
    """Where tensors travel over `group`: NCCL takes those of a GPU alone."""
    on_gpu = dist.is_initialized() and dist.get_backend(group) == "nccl"
    return torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")


def tensors_of(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Parameters, buffers, and tensors that are plain attributes of modules."""
    yield from module.named_parameters()
    yield from module.named_buffers()
    for path, child in module.named_modules():
        for name, value in vars(child).items():
            if isinstance(value, Tensor) and key_of(value) in _tapes:
                yield f"{path}.{name}" if path else name, value
