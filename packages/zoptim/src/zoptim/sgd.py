"""Stochastic gradient descent with momentum, drop-in for torch.optim.SGD.

[Note: the first momentum] torch starts the buffer as the gradient itself, so "the first update" is
state: it is told by the absence of the buffer.  torch's fused path creates that buffer before it looks
at found_inf, and a skipped first step leaves uninitialised memory behind; here a skipped first step
leaves no buffer.  The price is one read of found_inf on the host, only while buffers are missing.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import attrs
import torch
from torch import Tensor

from . import _compat
from ._compat import SgdLists
from .batch import Batch, Entry, Path
from .checks import check_sgd
from .flat import FlatOptimizer, Params

__all__ = ["SGD"]

_BUFFER = "momentum_buffer"


class SGD(FlatOptimizer):
    """SGD: lr >= 0 (a number, or a tensor of one element), momentum >= 0, dampening, weight_decay >= 0.

    `nesterov` needs momentum > 0 and dampening 0.  `fused` and `foreach` force a path; None takes the fused
    kernel wherever device, dtype and layout allow it.

    State of a parameter, by torch's name: `momentum_buffer` of the parameter's shape, dtype and device, from
    the first update on and only with momentum.

    Raises ValueError or TypeError naming the argument that is out of range.
    """

    _fused_on = _compat.FUSED_SGD_ON
    _absent_options: ClassVar[Mapping[str, Any]] = {**FlatOptimizer._absent_options, "nesterov": False}

    def __init__(
        self,
        params: Params,
        lr: float | Tensor = 1e-3,
        momentum: float = 0.0,
        dampening: float = 0.0,
        weight_decay: float = 0.0,
        nesterov: bool = False,
        *,
        maximize: bool = False,
        foreach: bool | None = None,
        fused: bool | None = None,
    ) -> None:
        defaults = {
            "lr": lr,
            "momentum": momentum,
            "dampening": dampening,
            "weight_decay": weight_decay,
            "nesterov": nesterov,
            "maximize": maximize,
            "foreach": foreach,
            "fused": fused,
        }
        super().__init__(params, defaults)

    def _check_options(self, options: Mapping[str, Any]) -> None:
        check_sgd(options)

    def _state_keys(self, group: Mapping[str, Any]) -> tuple[str, ...]:
        return ()  # a buffer may be absent: before the first update, or without momentum

    def _init_state(self, group: Mapping[str, Any], param: Tensor) -> dict[str, Any]:
        return {}  # see [Note: the first momentum]

    def _update(self, group: Mapping[str, Any], batch: Batch) -> None:
        if group["momentum"] == 0:
            self._update_alike(group, batch, first=False)
            return
        fresh = [entry for entry in batch.entries if _BUFFER not in entry.state]
        seasoned = [entry for entry in batch.entries if _BUFFER in entry.state]
        for entries, first in ((fresh, True), (seasoned, False)):
            if entries:
                self._update_alike(group, attrs.evolve(batch, entries=entries), first=first)

    def _update_alike(self, group: Mapping[str, Any], batch: Batch, *, first: bool) -> None:
        """Update entries that all have a buffer, or all have none."""
        if (first or batch.path is Path.FOREACH) and batch.is_skipped():
            return
        momentum = group["momentum"] != 0
        if batch.path is Path.FUSED:
            buffers = _buffers(batch.entries, first) if momentum else []
            lists = SgdLists(batch.params, batch.grads, buffers, first)
            _compat.fused_sgd(group, lists, batch.signals)
        else:
            if batch.signals.grad_scale is not None:
                _compat.divide_(batch.grads, batch.signals.grad_scale)
            buffers = batch.state(_BUFFER) if momentum and not first else []
            buffers = _compat.foreach_sgd(group, SgdLists(batch.params, batch.grads, buffers, first))
        for entry, buffer in zip(batch.entries, buffers):
            entry.state[_BUFFER] = buffer


def _buffers(entries: list[Entry], first: bool) -> list[Tensor]:
    """The momentum buffers; on the first update, unwritten ones that the kernel fills."""
    if first:
        return [torch.empty_like(entry.param, requires_grad=False) for entry in entries]
    return [entry.state[_BUFFER] for entry in entries]
