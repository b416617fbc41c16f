"""The state of a parameter: keys, formats, memory.

| `state_dtype` | a moment is stored as | bytes per element |
|---|---|---|
| None | the parameter's dtype, as in torch | 4 for float32 |
| "fp32" | float32 | 4 |
| "bf16" | bf16, rounded stochastically | 2 |
| "8bit" | 8-bit codes, a float32 scale per 256 elements | 1.016 |

With `split_master` a bf16 parameter is the upper half of a float32 weight, whose lower 16 bits are the state
"remainder": float32 training without a second copy of the weights.

Conversions pass through float32: `read` returns a moment of any format as float32 in the parameter's shape, and
`write` stores it, so state moves between formats, optimizers and checkpoints.  8-bit second moments are stored as
square roots, which doubles their range; `read` and `write` hide that.  8-bit -> float32 -> 8-bit is exact.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from typing import Any

import attrs
import torch
from torch import Tensor

from zoptim.backends.contract import BLOCK_NUMEL, FORMAT_OF_DTYPE
from zoptim.backends.memory import has_layout_of, memory_view
from zoptim.states import codes, formats
from zoptim.states.formats import StateFormat

__all__ = ["ALIKE", "REMAINDER", "STEP", "Master", "StateSpec", "num_blocks", "scale_key"]

STEP = "step"  # (), or (parts,) of a flat shard whose parts have different numbers of updates
ALIKE = "alike"  # (parts,) a partition's key in such a state, for parts with the same updates; kept unchanged
REMAINDER = "remainder"


class Master(enum.Enum):
    """The place of the full-precision weight."""

    WEIGHT = "weight"  # the parameter itself
    SPLIT = "split"  # upper 16 bits in a bf16 parameter, lower 16 in the state: 2 bytes per element more


def num_blocks(param: Tensor) -> int:
    """Return the number of scales for 8-bit codes of `param`."""
    return -(-param.numel() // BLOCK_NUMEL)


def scale_key(name: str) -> str:
    """Return the state key of the scales for the 8-bit codes `name`."""
    return f"{name}_scale"


@attrs.frozen(kw_only=True)
class StateSpec:
    """The state of a parameter group's tensors: keys and formats."""

    names: tuple[str, ...]  # moments, in the order of the kernel
    squares: frozenset[str]  # those of `names` that are second moments
    format: StateFormat | None  # None follows the parameter's dtype
    master: Master
    counts: bool  # the rule needs the number of updates
    first: float = 0.0  # the value of every element of a moment before the first update
    lazy: frozenset[str] = frozenset()  # those of `names` that the first update creates
    too_narrow: frozenset[torch.dtype] = frozenset()  # parameter dtypes whose moments are float32 instead

    def dtype_for(self, param: Tensor) -> torch.dtype:
        """Return the dtype of the moments of `param`."""
        if self.format is not None:
            return self.format.dtype
        follows = self.master is Master.WEIGHT and param.dtype not in self.too_narrow
        return param.dtype if follows else torch.float32

    def counts_for(self, param: Tensor) -> bool:
        """Return whether `param` has a step count: for rules that need it, and for stochastic rounding."""
        noisy = (torch.bfloat16, torch.uint8)
        rounds = bool(self.names) and self.dtype_for(param) in noisy
        return self.counts or rounds or (param.dtype is torch.bfloat16 and self.master is Master.WEIGHT)

    def keys_for(self, param: Tensor) -> tuple[str, ...]:
        """Return the state keys of `param` after its first update."""
        keys = [STEP] if self.counts_for(param) else []
        keys += self.names
        if self.dtype_for(param) is torch.uint8:
            keys += [scale_key(name) for name in self.names]
        return (*keys, REMAINDER) if self.master is Master.SPLIT else tuple(keys)

    def first_keys_for(self, param: Tensor) -> tuple[str, ...]:
        """Return the state keys of `param` before its first update."""
        late = {*self.lazy, *map(scale_key, self.lazy)}
        return tuple(key for key in self.keys_for(param) if key not in late)

    def make(self, param: Tensor) -> dict[str, Any]:
        """Return the state before the first update: zeros, or `first`."""
        state: dict[str, Any] = {}
        dtype = self.dtype_for(param)
        for key in self.keys_for(param):
            if key == STEP:
                state[key] = torch.zeros((), dtype=torch.float32, device=param.device)
            elif key == REMAINDER:
                state[key] = torch.zeros_like(param, dtype=torch.int16, requires_grad=False)
            elif key in self.names:
                state[key] = torch.zeros_like(param, dtype=dtype, requires_grad=False)
            else:
                state[key] = torch.zeros(num_blocks(param), dtype=torch.float32, device=param.device)
        if self.first:
            for name in self.names:
                self.write(state, name, torch.full_like(param, self.first, dtype=torch.float32))
        return state

    def is_readable(self, param: Tensor, state: Mapping[str, Any]) -> bool:
        """Return whether kernels can read the state of a dense `param`: its dtypes, shapes and memory layout."""
        for key, value in state.items():
            if key == STEP:
                good = isinstance(value, Tensor) and value.dtype is torch.float32 and value.dim() <= 1
            elif key in self.names:
                good = isinstance(value, Tensor) and _is_kept_like(value, param)
                if good and value.dtype is torch.uint8:
                    good = _are_scales(state.get(scale_key(key)), param)
            else:
                good = key != REMAINDER or (value.dtype is torch.int16 and has_layout_of(value, param))
            if not good:
                return False
        return True

    def read(self, state: Mapping[str, Any], name: str) -> Tensor:
        """Return moment `name` as float32 (or float64), in the parameter's shape; not a copy if stored like that."""
        kept: Tensor = state[name]
        if kept.dtype is torch.uint8:
            made = torch.empty_like(kept, dtype=torch.float32)
            codes.decode(memory_view(kept), state[scale_key(name)], memory_view(made), name in self.squares)
            return made
        return kept if kept.dtype is torch.float64 else kept.float()

    def write(self, state: dict[str, Any], name: str, value: Tensor, seed: int | None = None) -> None:
        """Store a float32 (or float64) moment in the format of `state`, rounded to nearest, or stochastically."""
        kept: Tensor = state[name]
        if kept.dtype is torch.uint8:
            value = memory_view(torch.empty_like(kept, dtype=torch.float32).copy_(value))
            codes.encode(value, memory_view(kept), state[scale_key(name)], name in self.squares, seed)
        elif kept.dtype is torch.bfloat16 and seed is not None:
            kept.copy_(formats.to_bf16_stochastic(value, seed))
        else:
            kept.copy_(value)

    def read_weight(self, param: Tensor, state: Mapping[str, Any]) -> Tensor:
        """Return the weight that the rule updates: float32, or float64 for a float64 parameter."""
        if self.master is Master.SPLIT:
            return formats.join(param.detach(), state[REMAINDER])
        return param.detach() if param.dtype is torch.float64 else param.detach().float()

    def write_weight(self, param: Tensor, state: dict[str, Any], value: Tensor, seed: int) -> None:
        """Round the new weight into the parameter (and its remainder)."""
        if self.master is Master.SPLIT:
            high, low = formats.split(value)
            param.detach().copy_(high)
            state[REMAINDER].copy_(low)
        elif param.dtype is torch.bfloat16:
            param.detach().copy_(formats.to_bf16_stochastic(value, seed))
        else:
            param.detach().copy_(value)

    def streams(self, state: Mapping[str, Any]) -> tuple[list[Tensor], list[Tensor]]:
        """Return moments and their scales (if any), in the order of the kernel."""
        scales = [state[key] for key in map(scale_key, self.names) if key in state]
        return [state[name] for name in self.names], scales


def _is_kept_like(moment: Tensor, param: Tensor) -> bool:
    known = moment.dtype in FORMAT_OF_DTYPE or moment.dtype is param.dtype
    return known and moment.shape == param.shape and has_layout_of(moment, param)


def _are_scales(scales: Any, param: Tensor) -> bool:
    is_float = isinstance(scales, Tensor) and scales.dtype is torch.float32
    return is_float and scales.shape == (num_blocks(param),) and scales.is_contiguous()
