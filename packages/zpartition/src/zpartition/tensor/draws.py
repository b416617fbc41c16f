"""Random numbers of a split model: equal where activations are whole, different where ranks have parts of them.

Problem.  Tensor ranks must draw the same dropout mask for activations that all of them have, or their activations
drift apart without a word.  For heads and columns, of which each has its own, the same mask on all ranks is a mask
that repeats, which no single process would draw.  Megatron-LM keeps a second generator state beside the default one,
offset by the rank, which layers enter by hand, and which checkpoints of runs and of activations have to know of.

Design.  No second state.  When activations come apart (a column layer has run), one number is drawn from torch's
default generator, which is equal on all ranks; its state is set aside, and it is seeded by that number and the rank.
A row layer puts the state back.  What is drawn in between is a function of the state before it, so whoever saves and
restores default generators (torch.utils.checkpoint, checkpoints of runs) has all, and a model needs no change.

[Note: recomputation]  A region that is run again in backward finds the generators as they were, but not this object.
So what is drawn depends on the order of the layers alone, never on whether a region seems to be open; and a region is
closed with the module around it also when an exception ends that, as torch's early stop of a recomputation does.

Not done: while torch.compile traces or a CUDA graph is captured no state is touched, so masks repeat there.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from typing import Any, final

import attrs
import torch
from torch import Tensor, nn

import zcomm
from zpartition.cells import Cell

__all__ = ["Draws", "agree_on_random_numbers"]

_MASK = (1 << 64) - 1


@final
@attrs.define(eq=False)
class Draws:
    """Switches torch's default generators for all layers of one model."""

    cell: Cell
    aside: tuple[tuple[torch.Generator, Tensor], ...] = ()  # generators that are seeded anew, and their states before
    reader: weakref.ref[Tensor] | None = None  # the activations whose readers opened the region

    def apart(self, x: Tensor) -> None:
        """From now on each rank draws its own numbers; once for all layers that read `x`."""
        if self.cell.size == 1 or _is_recorded(x):
            return
        if self.reader is not None and self.reader() is x:
            return
        self.reader = weakref.ref(x)
        own = _default_generators(x.device)
        seed = int(torch.empty((), dtype=torch.int64).random_(generator=own[0]))
        if not self.aside:
            self.aside = tuple((generator, generator.get_state()) for generator in own)
        for generator in own:
            generator.manual_seed(_mixed(seed, self.cell.rank))

    def whole(self) -> None:
        """From now on all ranks draw the same numbers, going on where they were."""
        for generator, state in self.aside:
            generator.set_state(state)
        self.aside, self.reader = (), None

    def close_with(self, module: nn.Module) -> None:
        """End a region with `module`, however that ends."""
        module.register_forward_hook(self._ended, always_call=True)

    def _ended(self, *_: object) -> None:
        if self.aside:
            self.whole()

    def __deepcopy__(self, memo: Mapping[int, Any]) -> Draws:
        """Of the same ranks, with no region open."""
        return Draws(self.cell)


def agree_on_random_numbers(cell: Cell, device: torch.device) -> None:
    """Give all ranks of `cell` the default generators of the first; a collective."""
    for generator in _default_generators(device) if cell.size > 1 else ():
        state = generator.get_state()
        on_wire = state.to(device)
        zcomm.broadcast(on_wire, cell.group, source=0, label="random state")
        generator.set_state(on_wire.to(state.device))


def _default_generators(device: torch.device) -> tuple[torch.Generator, ...]:
    """The host's, and the device's."""
    host = torch.default_generator
    if device.type != "cuda":
        return (host,)
    index = torch.cuda.current_device() if device.index is None else device.index
    return host, torch.cuda.default_generators[index]


def _is_recorded(x: Tensor) -> bool:
    """Whether what runs now is kept as a graph, in which no state can be switched."""
    return torch.compiler.is_compiling() or (x.is_cuda and torch.cuda.is_current_stream_capturing())


def _mixed(seed: int, rank: int) -> int:
    """A seed for each rank whose every bit depends on all of both (SplitMix64, Steele et al. 2014)."""
    z = (seed + (rank + 1) * 0x9E3779B97F4A7C15) & _MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
    return z ^ (z >> 31)
