"""FLOPs meter: reads a FLOP counter and a clock when each module is entered and left.

The counter is torch's `FlopCounterMode`, active while the model's forward runs.  A module's share is the difference
of the totals at its entry and exit, so counting needs no knowledge of modules.  Operations outside the model's
forward are not counted: activations recomputed in backward call modules too, and belong to the backward.

On CUDA every entry and exit synchronizes: times are exact and the pass is slower than usual.  On any device the
counter costs some microseconds per operation; use its times to compare modules, not as throughput.

Rejected: patching `torch.nn.functional`, which misses attention kernels and methods of tensors.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Any, final

import attrs
import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

__all__ = ["FlopsMeter", "MeterReading", "make_counter"]


@attrs.define(eq=False)
class MeterReading:
    """Totals of one module."""

    flops: int = 0
    seconds: float = 0.0
    calls: int = 0


@attrs.frozen
class Edge:
    """Running module, with counter and clock at its entry."""

    path: str
    flops: int
    seconds: float


def make_counter() -> Any:
    """Return torch's FLOP counter without display, extended by the attention kernels of CPUs."""
    from torch.utils import flop_counter  # late: few runs need it

    aten = torch.ops.aten
    known = flop_counter.flop_registry
    forward = known[aten._scaled_dot_product_flash_attention]
    backward = known[aten._scaled_dot_product_flash_attention_backward]
    pairs = {
        "_scaled_dot_product_flash_attention_for_cpu": forward,
        "_scaled_dot_product_flash_attention_for_cpu_backward": backward,
    }
    extra = {getattr(aten, name): formula for name, formula in pairs.items() if hasattr(aten, name)}
    counter = flop_counter.FlopCounterMode(display=False)
    counter.flop_registry.update({name: formula for name, formula in extra.items() if name not in known})
    return counter


@final
@attrs.define(eq=False)
class FlopsMeter:
    """Measures forwards of `model` from `start` to `stop`.

    Invariant: the counter is active exactly while the model's forward runs.
    """

    model: nn.Module
    ignored: tuple[type[nn.Module], ...] = ()  # classes whose work, and that of their children, is not counted
    synchronize: Callable[[], object] = lambda: None  # waits for the device; the identity on CPUs
    clock: Callable[[], float] = time.perf_counter  # seconds
    readings: dict[str, MeterReading] = attrs.field(factory=dict, init=False)  # by path
    operations: dict[str, int] = attrs.field(factory=dict, init=False)  # FLOPs by operation, all forwards
    _counter: Any = attrs.field(default=None, init=False)  # of the forward that runs; None between two
    _running: list[Edge] = attrs.field(factory=list, init=False)  # from the model inwards
    _ignored_flops: int = attrs.field(default=0, init=False)  # FLOPs of ignored modules in this forward
    _handles: list[RemovableHandle] = attrs.field(factory=list, init=False)

    def start(self) -> None:
        """Hook every module."""
        self.stop()
        for path, module in self._watched():
            self.readings.setdefault(path, MeterReading())
            before = module.register_forward_pre_hook(self._entering(path), prepend=True)
            after = module.register_forward_hook(self._leaving(path), always_call=True)
            self._handles += [before, after]

    def stop(self) -> None:
        """Remove the hooks; the readings stay."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._close()

    def _watched(self) -> Iterable[tuple[str, nn.Module]]:
        """Return all modules except those inside ignored ones."""
        hidden = [f"{path}." for path, module in self.model.named_modules() if isinstance(module, self.ignored)]
        return (each for each in self.model.named_modules() if not each[0].startswith(tuple(hidden)))

    def _entering(self, path: str) -> Callable[..., None]:
        def hook(_module: nn.Module, _args: Any) -> None:
            if path == "" and not self._running:
                self._open()
            if self._counter is not None:
                self.synchronize()
                self._running.append(Edge(path, self._counted(), self.clock()))

        return hook

    def _leaving(self, path: str) -> Callable[..., None]:
        def hook(module: nn.Module, _args: Any, _output: Any) -> None:
            if not self._running or self._running[-1].path != path:
                return
            self.synchronize()
            edge = self._running.pop()
            if isinstance(module, self.ignored):
                self._ignored_flops += self._counted() - edge.flops
            elif path not in [outer.path for outer in self._running]:  # called recursively: the outer call counts
                reading = self.readings[path]
                reading.flops += self._counted() - edge.flops
                reading.seconds += self.clock() - edge.seconds
                reading.calls += 1
            if not self._running:
                self._close()

        return hook

    def _counted(self) -> int:
        return int(self._counter.get_total_flops()) - self._ignored_flops

    def _open(self) -> None:
        self._ignored_flops = 0
        self._counter = make_counter()
        self._counter.__enter__()

    def _close(self) -> None:
        """Leave the counter, also after an interrupted forward."""
        self._running.clear()
        if self._counter is None:
            return
        counter, self._counter = self._counter, None
        counter.__exit__(None, None, None)
        for operation, flops in counter.get_flop_counts().get("Global", {}).items():
            name = str(operation).removeprefix("aten.")
            self.operations[name] = self.operations.get(name, 0) + int(flops)
