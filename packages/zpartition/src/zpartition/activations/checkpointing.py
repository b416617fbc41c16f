"""The verb: run a block, keep its inputs, compute the rest again in backward."""

from __future__ import annotations

import enum
import functools
from collections.abc import Callable
from typing import Any, TypeVar, final

import attrs
import torch
from torch.utils.checkpoint import checkpoint

from zpartition.activations.keeping import WHOLE, Keeping
from zpartition.activations.replay import NO_STREAMS, Replay, Span, Streams, is_inside, no_span, nothing

__all__ = ["Checkpointing", "Variant"]

T = TypeVar("T")


class Variant(enum.Enum):
    """How torch computes again."""

    HOOKS = "hooks"  # saved tensors are computed when autograd asks; inputs need not require gradients
    REENTRANT = "reentrant"  # a backward inside the backward; at least one tensor argument requires gradients


@final
@attrs.frozen(kw_only=True, eq=False)
class Checkpointing:
    """Runs blocks, and says where their inputs wait.

    A checkpoint inside a checkpointed block is torch's plain one: what it keeps is there for one block's backward.
    """

    keeping: Keeping = WHOLE
    streams: Streams = NO_STREAMS  # random numbers beside torch's own
    synchronize: Callable[[], object] = nothing  # before and after each block, forwards and again
    span: Span = no_span  # times the same two
    variant: Variant = Variant.HOOKS

    def __call__(self, function: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        """`function(*args, **kwargs)`; random numbers are the same when it runs again.

        Tensors among `args` themselves that require gradients are kept as `keeping` says; whatever else is among the
        arguments stays referred to.  Without gradients the function is just called.
        """
        if not torch.is_grad_enabled():
            return function(*args, **kwargs)
        run: Callable[..., T] = Replay(function, self.streams, self.synchronize, self.span)
        reentrant = self.variant is Variant.REENTRANT
        if reentrant and kwargs:
            run, kwargs = functools.partial(run, **kwargs), {}  # torch's takes none there
        if is_inside() or self.keeping.is_identity:
            return checkpoint(run, *args, use_reentrant=reentrant, **kwargs)  # type: ignore[no-any-return]
        with self.keeping.hooks(args):
            return checkpoint(run, *args, use_reentrant=reentrant, **kwargs)  # type: ignore[no-any-return]
