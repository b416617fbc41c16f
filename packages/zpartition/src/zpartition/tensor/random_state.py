"""TP random state: random numbers equal where activations are whole, and different where each rank has a part.

Problem.  Tensor ranks must draw the same dropout mask for activations that all of them hold, or their activations
diverge silently.  For heads and columns, of which each rank has its own, equal masks would repeat, which no single
process would draw.  Megatron-LM keeps a second generator state beside the default one, offset by the rank; layers
enter it by hand, and checkpoints of runs and of activations must know it.

Design.  No second state.  When activations are split (a column layer has run), one number is drawn from torch's
default generator, which is equal on all ranks; its state is saved, and it is seeded by that number and the rank.  A
row layer restores the state.  Numbers drawn in between are a function of the state before, so code that saves and
restores default generators (torch.utils.checkpoint, checkpoints of runs) has everything, and a model needs no change.

[Note: recomputation]  A region that is recomputed in backward finds the generators as they were, but not this object.
So the numbers depend only on the order of the layers, never on whether a region appears to be open; and a region is
closed with the module around it, also when an exception ends it, as torch's early stop of a recomputation does.

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
from zpartition.layout.model_parallel import ModelParallelGroup

__all__ = ["TPRandomState", "agree_on_random_numbers"]

_MASK = (1 << 64) - 1


@final
@attrs.define(eq=False)
class TPRandomState:
    """Switches torch's default generators for all layers of one model."""

    mp_group: ModelParallelGroup
    saved_states: tuple[tuple[torch.Generator, Tensor], ...] = ()  # of the generators inside the region
    reader: weakref.ref[Tensor] | None = None  # the activations whose readers opened the region

    def diverge(self, x: Tensor) -> None:
        """Draw per-rank numbers from now on; once for all layers that read `x`."""
        if self.mp_group.size == 1 or _is_capturing(x):
            return
        if self.reader is not None and self.reader() is x:
            return
        self.reader = weakref.ref(x)
        own = _default_generators(x.device)
        seed = int(torch.empty((), dtype=torch.int64).random_(generator=own[0]))
        if not self.saved_states:
            self.saved_states = tuple((generator, generator.get_state()) for generator in own)
        for generator in own:
            generator.manual_seed(_mix_seed(seed, self.mp_group.rank))

    def restore(self) -> None:
        """Draw equal numbers on all ranks from now on, continuing the saved state."""
        for generator, state in self.saved_states:
            generator.set_state(state)
        self.saved_states, self.reader = (), None

    def restore_after(self, module: nn.Module) -> None:
        """Restore when `module` ends, even by an exception."""
        module.register_forward_hook(self._restore_hook, always_call=True)

    def _restore_hook(self, *_: object) -> None:
        if self.saved_states:
            self.restore()

    def __deepcopy__(self, memo: Mapping[int, Any]) -> TPRandomState:
        """Copy with no region open."""
        return TPRandomState(self.mp_group)


def agree_on_random_numbers(mp_group: ModelParallelGroup, device: torch.device) -> None:
    """Broadcast the default generators of the first rank of `mp_group`; a collective."""
    for generator in _default_generators(device) if mp_group.size > 1 else ():
        state = generator.get_state()
        on_wire = state.to(device)
        zcomm.broadcast(on_wire, mp_group.group, source=0, label="random state")
        generator.set_state(on_wire.to(state.device))


def _default_generators(device: torch.device) -> tuple[torch.Generator, ...]:
    """Return the generators of the host and of the device."""
    host = torch.default_generator
    if device.type != "cuda":
        return (host,)
    index = torch.cuda.current_device() if device.index is None else device.index
    return host, torch.cuda.default_generators[index]


def _is_capturing(x: Tensor) -> bool:
    """Check if operations are being captured into a graph, in which no state can be switched."""
    return torch.compiler.is_compiling() or (x.is_cuda and torch.cuda.is_current_stream_capturing())


def _mix_seed(seed: int, rank: int) -> int:
    """Derive a seed for each rank whose every bit depends on all bits of both (SplitMix64, Steele et al. 2014)."""
    z = (seed + (rank + 1) * 0x9E3779B97F4A7C15) & _MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
    return z ^ (z >> 31)
