"""A block that runs again finds the random numbers that it had the first time.

torch's checkpoint sets back the generators of the CPU and of the devices of its arguments.  Tensor-parallel models
have more streams: inside a split layer each rank draws its own numbers, between layers all draw the same.  Whoever
keeps such streams gives them as `Streams`; the states that a block began with are taken before it runs, set when it
runs again, and set back afterwards.
"""

from __future__ import annotations

import contextvars
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any, Protocol, final

import attrs

__all__ = ["NO_STREAMS", "Replay", "Streams", "is_inside"]

Span = Callable[[str], AbstractContextManager[Any]]

FORWARD, AGAIN = "checkpointed forward", "recomputation"

_inside: contextvars.ContextVar[bool] = contextvars.ContextVar("a checkpointed block runs", default=False)


class Streams(Protocol):
    """Named states of random number generators, as Megatron's tracker has them."""

    def get_states(self) -> Any: ...
    def set_states(self, states: Any) -> None: ...


@final
class NoStreams:
    """There are none beside torch's own."""

    def get_states(self) -> Mapping[str, Any]:
        return {}

    def set_states(self, states: Mapping[str, Any]) -> None: ...


NO_STREAMS = NoStreams()


def is_inside() -> bool:
    """Whether a checkpointed block runs in this thread, for the first time or again."""
    return _inside.get()


@final
@attrs.define(eq=False)
class Replay:
    """`function`, which begins with the same states each time it is called."""

    function: Callable[..., Any]
    streams: Streams
    synchronize: Callable[[], object]  # before and after each call
    span: Span
    begun_with: tuple[Any, ...] = ()  # the states of the first call; () before it

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with ExitStack() as stack:
            token = _inside.set(True)
            stack.callback(_inside.reset, token)
            now = self.streams.get_states()
            if self.begun_with:
                stack.callback(self.streams.set_states, now)
                self.streams.set_states(self.begun_with[0])
            name = AGAIN if self.begun_with else FORWARD
            self.begun_with = self.begun_with or (now,)
            self.synchronize()
            stack.callback(self.synchronize)
            with self.span(name):
                return self.function(*args, **kwargs)


def no_span(name: str) -> AbstractContextManager[None]:
    """Measures nothing."""
    return nullcontext()


def nothing() -> None:
    """Waits for nothing."""
