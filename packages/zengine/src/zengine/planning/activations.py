"""Activation memory of a forward and backward: a dry run on tensors without memory.

Every operation runs on tensors of the real device type, so the same kernels are selected: attention saves a row of
sums on one device and a square of scores on another.  Usual models run on hollow tensors (hollow.py), others on
torch's fake tensors, which take ten times as long.  A storage counts from the operation
that creates it until its last reference is gone, whether autograd saves it, checkpointing recomputes it, or it is
temporary.  A parameter's gradient counts until it is accumulated: then it lies in a bucket, which the partition's
plan counts.

Not counted: scratch memory inside a kernel, and the allocator's rounding.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import Any, final

import attrs
import torch
from torch import Tensor, nn

from zengine._compat import fake_tensors, have_dry_runs, watching
from zengine.planning.hollow import HollowTensors

__all__ = ["Activations", "CannotDryRun", "call_model", "copy_without_memory", "dry_run", "loss_of"]

Watching = Callable[[Callable[[list[Any]], None]], AbstractContextManager[Any]]

_GRANULE = 512  # bytes that the CUDA allocator hands out


class CannotDryRun(ValueError):
    """Model that reads values, or that needs features which fake tensors lack."""


@attrs.frozen(kw_only=True)
class Activations:
    """Peak bytes of one micro-batch, by phase."""

    forward: int
    backward: int
    saved: int  # held at the end of forward, for backward

    @property
    def peak(self) -> int:
        """Maximum of both phases."""
        return max(self.forward, self.backward)


@final
class MemoryTracker:
    """Bytes of live storages and their maximum, without the storages of `known` tensors."""

    def __init__(self, known: list[Tensor]) -> None:
        self._sizes: dict[int, int] = {}
        self._known = {id(tensor.untyped_storage()): tensor.untyped_storage() for tensor in known}
        self.current = 0
        self.peak = 0

    def count(self, results: list[Any]) -> None:
        """Count the storages of an operation's results."""
        for result in results:
            if isinstance(result, Tensor):
                self._add(result.untyped_storage())

    def reset(self) -> None:
        """Reset the maximum to the live bytes."""
        self.peak = self.current

    def _add(self, storage: Any) -> None:
        key = id(storage)
        if key in self._known or key in self._sizes:
            return
        size = -(-storage.nbytes() // _GRANULE) * _GRANULE
        self._sizes[key] = size
        self.current += size
        self.peak = max(self.peak, self.current)
        weakref.finalize(storage, self._remove, key).atexit = False

    def _remove(self, key: int) -> None:
        self.current -= self._sizes.pop(key)


def dry_run(
    module: nn.Module, batch: Callable[[], Any], *, device: str, autocast: torch.dtype = torch.float32
) -> Activations:
    """Return the activations of one micro-batch; allocates nothing and leaves `module` unchanged.

    module: in its training dtype, on any device, also meta.  batch: makes the model's argument, on fake tensors: a
    tensor, a dict of keywords, or a tuple of arguments.  autocast: dtype of torch.autocast around the forward;
    float32: none.

    Raises CannotDryRun, with the reason and a remedy.
    """
    if not have_dry_runs():
        raise CannotDryRun(f"torch {torch.__version__} has no fake tensors: measure instead (--measure)")
    run = _Run(module=module, batch=batch, device=device, autocast=autocast)
    if device == "cpu":
        with suppress(Exception):  # an operation without a rule, or a fault of the model, which comes again below
            hollow = HollowTensors(device)
            return run.tracked(hollow.running(), hollow.watching)
    try:
        return run.tracked(fake_tensors(), watching)
    except CannotDryRun:
        raise
    except Exception as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else ""
        raise CannotDryRun(
            f"a dry run of the model failed with {type(error).__name__}: {reason}. A model that reads values cannot "
            "run on fake tensors: measure instead (--measure)"
        ) from error


@attrs.frozen(kw_only=True)
class _Run:
    """Arguments of a dry run."""

    module: nn.Module
    batch: Callable[[], Any]
    device: str
    autocast: torch.dtype

    def tracked(self, running: AbstractContextManager[Any], watching: Watching) -> Activations:
        """Run forward and backward inside `running`; `watching` tells the results of operations."""
        with running, self._default_device():
            module, given = copy_without_memory(self.module, self.device), self.batch()
            for param in module.parameters():
                if param.requires_grad:
                    param.register_post_accumulate_grad_hook(_drop_grad)  # type: ignore[no-untyped-call]
            tracker = MemoryTracker([*module.parameters(), *module.buffers()])
            with watching(tracker.count):
                with self._casting():
                    output = call_model(module, given)
                loss = loss_of(output)
                del output
                forward, saved = tracker.peak, tracker.current
                tracker.reset()
                loss.backward()  # type: ignore[no-untyped-call]
            return Activations(forward=forward, backward=tracker.peak, saved=saved)

    def _default_device(self) -> AbstractContextManager[Any]:
        """Make the device the default one; a context costs time at each call of torch, so only if it is another."""
        return nullcontext() if torch.get_default_device() == torch.device(self.device) else torch.device(self.device)

    def _casting(self) -> AbstractContextManager[Any]:
        is_on = self.autocast != torch.float32
        return torch.autocast(self.device, dtype=self.autocast) if is_on else nullcontext()


def copy_without_memory(module: nn.Module, device: str) -> nn.Module:
    """Return a copy of `module` in training mode, on tensors without memory; shared tensors stay shared.

    Weights may be sharded: shapes suffice.  device: "meta", or another one inside a mode that allocates nothing.
    """
    copies: dict[int, Any] = {}

    def empty(tensor: Tensor) -> Any:
        if id(tensor) not in copies:
            made = torch.empty(tensor.shape, dtype=tensor.dtype, device=device)
            is_param = isinstance(tensor, nn.Parameter)
            copies[id(tensor)] = nn.Parameter(made, requires_grad=tensor.requires_grad) if is_param else made
        return copies[id(tensor)]

    memo: dict[int, Any] = {id(t): empty(t) for t in (*module.parameters(), *module.buffers())}
    for each in module.modules():
        params: dict[str, nn.Parameter | None] = vars(each)["_parameters"]  # of a partition's own class at stage 3
        memo[id(params)] = {name: None if param is None else empty(param) for name, param in dict.items(params)}
    return copy.deepcopy(module, memo).train()


def _drop_grad(param: Tensor) -> None:
    param.grad = None


def call_model(module: nn.Module, given: Any) -> Any:
    """Call `module` with a batch: a mapping of keywords, a tuple or list of arguments, or one argument."""
    if isinstance(given, Mapping):
        return module(**given)
    return module(*given) if isinstance(given, (tuple, list)) else module(given)


def loss_of(output: Any) -> Tensor:
    """Return the loss in a model's output: the tensor, `.loss`, `["loss"]` or the first item.

    A loss that is not a scalar is averaged.  Raises CannotDryRun if there is none.
    """
    found = output
    if isinstance(output, Mapping):
        found = output.get("loss", next(iter(output.values())))
    elif isinstance(output, (tuple, list)):
        found = output[0]
    elif not isinstance(output, Tensor):
        found = getattr(output, "loss", None)
    if not isinstance(found, Tensor):
        raise CannotDryRun(
            f"the model returned a {type(output).__name__} without a loss; return a tensor or {{'loss': tensor}}"
        )
    return found if found.dim() == 0 else found.float().mean()
