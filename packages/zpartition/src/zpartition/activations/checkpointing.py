"""Activation checkpointing with several random number streams, around a call or around chosen modules of a model.

torch's checkpoint restores the generators of the CPU and of the devices of its arguments.  Tensor-parallel models
have more streams: inside a split layer each rank draws its own numbers, between layers all ranks draw the same.  Such
streams are passed as `Streams`.  Their states are recorded before a block runs, set when it is recomputed, and
restored afterwards.

`CheckpointedBlocks` replaces the class of a block by a subclass whose `__call__` goes through a `Checkpointing`.  It
wraps the call and not `forward`, so that hooks of the block (those that gather its weights, say) run again with it.
Names, parameters and state dicts do not change, `close` restores the classes, and pickles and copies are plain
modules.

Rejected: wrapper modules, which put a component into every name; a `forward` set on each instance, which hooks and
compiled calls bypass in the recomputation.
"""

from __future__ import annotations

import contextvars
import enum
import functools
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any, Protocol, TypeVar, final

import attrs
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from zpartition.activations.saved_inputs import UNPARTITIONED, SavedInputs
from zpartition.layout.units import matches

__all__ = ["NO_STREAMS", "CheckpointedBlocks", "Checkpointing", "Replay", "Streams", "Variant", "is_checkpointing"]

T = TypeVar("T")

Span = Callable[[str], AbstractContextManager[Any]]

FORWARD, RECOMPUTATION = "checkpointed forward", "recomputation"

_inside: contextvars.ContextVar[bool] = contextvars.ContextVar("a checkpointed block runs", default=False)


class Variant(enum.Enum):
    """Variant of torch's checkpoint."""

    HOOKS = "hooks"  # non-reentrant: saved tensors are recomputed on demand; inputs need not require gradients
    REENTRANT = "reentrant"  # a backward inside the backward; at least one tensor argument requires gradients


class Streams(Protocol):
    """Named states of random number generators, as in Megatron's tracker."""

    def get_states(self) -> Any: ...
    def set_states(self, states: Any) -> None: ...


@final
class NoStreams:
    """No streams beside torch's own."""

    def get_states(self) -> Mapping[str, Any]:
        return {}

    def set_states(self, states: Mapping[str, Any]) -> None: ...


NO_STREAMS = NoStreams()


def no_span(name: str) -> AbstractContextManager[None]:
    """Measure nothing."""
    return nullcontext()


def no_synchronization() -> None:
    """Wait for nothing."""


@final
@attrs.frozen(kw_only=True, eq=False)
class Checkpointing:
    """Runs blocks with checkpointing, and decides where their inputs are saved.

    A checkpoint inside a checkpointed block is torch's plain one: its inputs live for one block's backward only.
    """

    saved_inputs: SavedInputs = UNPARTITIONED
    streams: Streams = NO_STREAMS  # random numbers beside torch's own
    synchronize: Callable[[], object] = no_synchronization  # before and after each block and its recomputation
    span: Span = no_span  # measures the same two
    variant: Variant = Variant.HOOKS

    def __call__(self, function: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        """Return `function(*args, **kwargs)`; a recomputation draws the same random numbers.

        Tensors directly in `args` that require gradients are saved by `saved_inputs`, and with the reentrant variant
        those in `kwargs`; other arguments are kept by reference.  If gradients are disabled, the function is just
        called.
        """
        if not torch.is_grad_enabled():
            return function(*args, **kwargs)
        run: Callable[..., T] = Replay(function, self.streams, self.synchronize, self.span)
        reentrant = self.variant is Variant.REENTRANT
        if reentrant and kwargs:  # that variant takes no keywords, and would backpropagate past captured tensors
            run, args, kwargs = _by_position(run, len(args), tuple(kwargs)), (*args, *kwargs.values()), {}
        if is_checkpointing() or self.saved_inputs.is_identity:
            return checkpoint(run, *args, use_reentrant=reentrant, **kwargs)  # type: ignore[no-any-return]
        with self.saved_inputs.hooks(args):
            return checkpoint(run, *args, use_reentrant=reentrant, **kwargs)  # type: ignore[no-any-return]


def _by_position(run: Callable[..., T], num_args: int, names: tuple[str, ...]) -> Callable[..., T]:
    """Return `run` with the keywords `names` as further positional arguments after `num_args`."""

    def call(*given: Any) -> T:
        return run(*given[:num_args], **dict(zip(names, given[num_args:])))

    return call


@final
@attrs.define(eq=False)
class CheckpointedBlocks:
    """Modules of one model that are checkpointed until `close`."""

    modules: dict[str, nn.Module]  # by name
    original_classes: dict[nn.Module, type[nn.Module]]

    @classmethod
    def of(
        cls, model: nn.Module, patterns: Sequence[str], run: Checkpointing, *, elsewhere: Sequence[str] = ()
    ) -> CheckpointedBlocks:
        """Checkpoint the modules of `model` that match a pattern; of nested matches only the outermost.

        elsewhere: names of modules on other ranks, such as those of other pipeline stages.

        Raises:
            ValueError: a pattern matches no module, here or elsewhere.
        """
        names = [name for name, _ in model.named_modules() if name]
        for pattern in patterns:
            if not any(matches(pattern, name) for name in (*names, *elsewhere)):
                shown = ", ".join([name for name in names if name.count(".") < 2][:10])
                raise ValueError(
                    f"pattern {pattern!r} of activation checkpoints matches none of the model's {len(names)} modules "
                    f"({shown}, ...): `*` is one component of a name, `**` any number"
                )
        chosen: dict[str, nn.Module] = {}
        for name, module in model.named_modules():
            inside = any(name.startswith(f"{outer}.") for outer in chosen)
            if name and not inside and any(matches(pattern, name) for pattern in patterns):
                chosen[name] = module
        blocks = cls(chosen, {module: type(module) for module in chosen.values()})
        for module, kind in blocks.original_classes.items():
            module.__class__ = _checkpointed(kind, run)
        return blocks

    def close(self) -> None:
        """Restore the classes; idempotent."""
        for module, kind in self.original_classes.items():
            module.__class__ = kind
        self.modules, self.original_classes = {}, {}


@final
@attrs.define(eq=False)
class Replay:
    """Call `function` with the same random states each time."""

    function: Callable[..., Any]
    streams: Streams
    synchronize: Callable[[], object]  # before and after each call
    span: Span
    initial_states: tuple[Any, ...] = ()  # the states of the first call; () before it

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with ExitStack() as stack:
            token = _inside.set(True)
            stack.callback(_inside.reset, token)
            now = self.streams.get_states()
            if self.initial_states:
                stack.callback(self.streams.set_states, now)
                self.streams.set_states(self.initial_states[0])
            name = RECOMPUTATION if self.initial_states else FORWARD
            self.initial_states = self.initial_states or (now,)
            self.synchronize()
            stack.callback(self.synchronize)
            with self.span(name):
                return self.function(*args, **kwargs)


def is_checkpointing() -> bool:
    """Check if a checkpointed block runs in this thread, in forward or in recomputation."""
    return _inside.get()


def _checkpointed(kind: type[nn.Module], run: Checkpointing) -> type[nn.Module]:
    def call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return run(functools.partial(kind.__call__, self), *args, **kwargs)

    def reduce(self: nn.Module, protocol: Any) -> Any:
        """Pickle and copy as a block of the original class."""
        given: Any = kind.__reduce_ex__(self, protocol)
        make, arguments, *rest = given
        if make.__name__ == "__newobj__":  # which can only create the object's own class
            make = object.__new__
        return (make, tuple(kind if each is type(self) else each for each in arguments), *rest)

    copied = {name: getattr(kind, name) for name in ("__module__", "__qualname__", "__doc__")}
    return type(kind.__name__, (kind,), {**copied, "__call__": call, "__reduce_ex__": reduce})
