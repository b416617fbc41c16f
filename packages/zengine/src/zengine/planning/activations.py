"""Activation memory of a forward and backward: a dry run on tensors without storage.

Every operation runs on fake tensors of the real device type, so the same kernels are selected (attention saves a row
of sums on one device and a square of scores on another).  A storage counts from the operation that creates it until
nothing holds it: tensors saved by autograd, dropped and recomputed by checkpointing, or needed for a moment.  A
parameter's gradient counts until it has arrived: afterwards it lies in a bucket, which the partition's plan counts.

Not counted: scratch memory inside a kernel, and the allocator's rounding.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, final

import attrs
import torch
from torch import Tensor, nn

from zengine._compat import fake_tensors, have_dry_runs, watching

__all__ = ["Activations", "CannotDryRun", "dry_run", "loss_of"]

_GRANULE = 512  # bytes that the CUDA allocator hands out


class CannotDryRun(ValueError):
    """The model reads values, or needs features that fake tensors lack."""


@attrs.frozen(kw_only=True)
class Activations:
    """Peak bytes of one micro-batch, by phase."""

    forward: int
    backward: int
    saved: int  # what is held when the forward is done: what backward waits for

    @property
    def peak(self) -> int:
        """Maximum of both phases."""
        return max(self.forward, self.backward)


@final
class Watermark:
    """Bytes of live storages and their maximum.  Storages that existed before are excluded."""

    def __init__(self, known: list[Tensor]) -> None:
        self._sizes: dict[int, int] = {}
        self._known = {id(tensor.untyped_storage()): tensor.untyped_storage() for tensor in known}
        self.current = 0
        self.peak = 0

    def see(self, results: list[Any]) -> None:
        """Count the storages of an operation's results."""
        for result in results:
            if isinstance(result, Tensor):
                self._count(result.untyped_storage())

    def restart(self) -> None:
        """Reset the maximum, not the live storages."""
        self.peak = self.current

    def _count(self, storage: Any) -> None:
        key = id(storage)
        if key in self._known or key in self._sizes:
            return
        size = -(-storage.nbytes() // _GRANULE) * _GRANULE
        self._sizes[key] = size
        self.current += size
        self.peak = max(self.peak, self.current)
        weakref.finalize(storage, self._gone, key).atexit = False

    def _gone(self, key: int) -> None:
        self.current -= self._sizes.pop(key)


def dry_run(
    module: nn.Module, batch: Callable[[], Any], *, device: str, autocast: torch.dtype = torch.float32
) -> Activations:
    """Return the activations of one micro-batch; allocates nothing and leaves `module` unchanged.

    module: in its training dtype, on any device, also meta.  batch: makes its argument while tensors have no storage:
    a tensor, a dict of keywords, or a tuple of arguments.  autocast: dtype of torch.autocast around the forward;
    float32: none.

    Raises CannotDryRun, with the reason and a remedy.
    """
    if not have_dry_runs():
        raise CannotDryRun(
            f"torch {torch.__version__} offers no tensors without storage: measure instead (--measure)"
        )
    try:
        with fake_tensors(), torch.device(device):
            casting = torch.autocast(device, dtype=autocast) if autocast != torch.float32 else nullcontext()
            return _watched(_hollow(module, device), batch(), casting)
    except CannotDryRun:
        raise
    except Exception as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else ""
        raise CannotDryRun(
            f"a dry run of the model failed with {type(error).__name__}: {reason}. Models that look at values cannot "
            "run without them: measure instead (--measure)"
        ) from error


def _hollow(module: nn.Module, device: str) -> nn.Module:
    """Return a copy whose parameters and buffers have no storage; shared ones stay shared."""
    made: dict[int, Any] = {}

    def hollow(tensor: Tensor) -> Any:
        if id(tensor) not in made:
            empty = torch.empty(tensor.shape, dtype=tensor.dtype, device=device)
            is_param = isinstance(tensor, nn.Parameter)
            made[id(tensor)] = nn.Parameter(empty, requires_grad=tensor.requires_grad) if is_param else empty
        return made[id(tensor)]

    copied = copy.deepcopy(module, {id(t): hollow(t) for t in (*module.parameters(), *module.buffers())})
    return copied.train()


def _watched(module: nn.Module, given: Any, casting: AbstractContextManager[Any]) -> Activations:
    for param in module.parameters():
        if param.requires_grad:
            param.register_post_accumulate_grad_hook(_arrived)  # type: ignore[no-untyped-call]
    mark = Watermark([*module.parameters(), *module.buffers()])
    with watching(mark.see):
        with casting:
            output = _call(module, given)
        loss = loss_of(output)
        del output
        forward, saved = mark.peak, mark.current
        mark.restart()
        loss.backward()  # type: ignore[no-untyped-call]
    return Activations(forward=forward, backward=mark.peak, saved=saved)


def _arrived(param: Tensor) -> None:
    param.grad = None


def _call(module: nn.Module, given: Any) -> Any:
    if isinstance(given, Mapping):
        return module(**given)
    return module(*given) if isinstance(given, (tuple, list)) else module(given)


def loss_of(output: Any) -> Tensor:
    """Return the loss of a model's output: the output, `.loss`, `["loss"]` or the first of a tuple; else a mean."""
    found = output
    if isinstance(output, Mapping):
        found = output.get("loss", next(iter(output.values())))
    elif isinstance(output, (tuple, list)):
        found = output[0]
    elif not isinstance(output, Tensor):
        found = getattr(output, "loss", None)
    if not isinstance(found, Tensor):
        raise CannotDryRun(
            f"the model returned a {type(output).__name__} without a loss; return a tensor, or a dict with one"
        )
    return found if found.dim() == 0 else found.float().mean()
