"""The checkpoint call: run a block, keep its inputs, recompute the rest in backward with the same random numbers.

torch's checkpoint restores the generators of the CPU and of the devices of its arguments.  Tensor-parallel models
have more streams: inside a split layer each rank draws its own numbers, between layers all ranks draw the same.  Such
streams are passed as `Streams`.  Their states are recorded before a block runs, set when it is recomputed, and
restored afterwards.
"""

from __future__ import annotations

import contextvars
import enum
import functools
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any, Protocol, TypeVar, final

import attrs
import torch
from torch.utils.checkpoint import checkpoint

from zpartition.activations.saved_inputs import UNPARTITIONED, SavedInputs

__all__ = ["NO_STREAMS", "Checkpointing", "Replay", "Streams", "Variant", "is_checkpointing"]

T = TypeVar("T")
Span = Callable[[str], AbstractContextManager[Any]]

FORWARD, RECOMPUTATION = "checkpointed forward", "recomputation"

_inside: contextvars.ContextVar[bool] = contextvars.ContextVar("a checkpointed block runs", default=False)


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


def is_checkpointing() -> bool:
    """Check if a checkpointed block runs in this thread, in forward or in recomputation."""
    return _inside.get()


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


def no_span(name: str) -> AbstractContextManager[None]:
    """Measure nothing."""
    return nullcontext()


def no_synchronization() -> None:
    """Wait for nothing."""


class Variant(enum.Enum):
    """Variant of torch's checkpoint."""

    HOOKS = "hooks"  # non-reentrant: saved tensors are recomputed on demand; inputs need not require gradients
    REENTRANT = "reentrant"  # a backward inside the backward; at least one tensor argument requires gradients


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

        Tensors directly in `args` that require gradients are saved as `saved_inputs` says; other arguments are kept
        by reference.  If gradients are disabled, the function is just called.
        """
        if not torch.is_grad_enabled():
            return function(*args, **kwargs)
        run: Callable[..., T] = Replay(function, self.streams, self.synchronize, self.span)
        reentrant = self.variant is Variant.REENTRANT
        if reentrant and kwargs:
            run, kwargs = functools.partial(run, **kwargs), {}  # the reentrant variant takes no keywords
        if is_checkpointing() or self.saved_inputs.is_identity:
            return checkpoint(run, *args, use_reentrant=reentrant, **kwargs)  # type: ignore[no-any-return]
        with self.saved_inputs.hooks(args):
            return checkpoint(run, *args, use_reentrant=reentrant, **kwargs)  # type: ignore[no-any-return]
