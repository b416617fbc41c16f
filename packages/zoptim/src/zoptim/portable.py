"""State in numbers that every format understands, for whoever moves it: checkpoints, resharding, loading.

8-bit codes mean something only beside the scales of their own blocks, so nobody else can cut or join them.  What
travels is float32.  But an optimizer has 8-bit states because float32 ones did not fit, so a moment is never decoded
whole: `Coded` gives the part that is asked for, and `convert` encodes by chunks.  Codes -> float32 -> codes is the
identity, unless second moments are so small that float32 cannot hold their squares (roots below 1e-19).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import attrs
import torch
from torch import Tensor

from .codes import decode, encode
from .job import BLOCK_NUMEL
from .layouts import in_memory
from .memory import Memory, scale_key

__all__ = ["Coded", "convert", "exported"]

_CHUNK_NUMEL = 1 << 20  # elements decoded or encoded at once; a multiple of BLOCK_NUMEL


@attrs.frozen(eq=False)
class Coded:
    """A moment that is kept in 8-bit codes, to be read in parts as float32."""

    codes: Tensor  # uint8, the parameter's shape, dense
    scales: Tensor  # (ceil(numel / 256),) float32
    is_square: bool  # the codes are of square roots

    @property
    def dtype(self) -> torch.dtype:
        """What `read` returns."""
        return torch.float32

    @property
    def shape(self) -> torch.Size:
        return self.codes.shape

    def read(self, start: int, stop: int) -> Tensor:
        """(stop - start,) float32: elements [start, stop) of the flattened moment."""
        if not self.codes.is_contiguous():
            made = torch.empty_like(self.codes, dtype=torch.float32)
            decode(in_memory(self.codes), self.scales, in_memory(made), self.is_square)
            return made.reshape(-1)[start:stop]
        first = start // BLOCK_NUMEL
        codes = in_memory(self.codes)[first * BLOCK_NUMEL : stop]
        scales = self.scales[first : -(-stop // BLOCK_NUMEL)]
        made = torch.empty(codes.numel(), dtype=torch.float32, device=codes.device)
        for chunk, blocks in _chunks(codes.numel()):
            decode(codes[chunk], scales[blocks], made[chunk], self.is_square)
        return made[start - first * BLOCK_NUMEL :]


def exported(state: Mapping[str, Any], memory: Memory) -> dict[str, Any]:
    """The state of a parameter with `Coded` in the place of codes and scales; the rest is as it is kept."""
    coded = [name for name in memory.names if name in state and scale_key(name) in state]
    scales = {scale_key(name) for name in coded}
    made = {key: value for key, value in state.items() if key not in scales}
    for name in coded:
        made[name] = Coded(state[name], state[scale_key(name)], name in memory.squares)
    return made


def convert(memory: Memory, given: Mapping[str, Any], state: dict[str, Any], name: str) -> None:
    """Put moment `name` of `given`, in any format, into `state`, in its format; rounded to nearest."""
    kept, is_square = state[name], name in memory.squares
    if kept.dtype is not torch.uint8:
        memory.write(state, name, memory.read(given, name))
        return
    value = given[name]
    if value.stride() != kept.stride():
        value = torch.empty_like(kept, dtype=value.dtype).copy_(value)
    flat, codes, scales = in_memory(value), in_memory(kept), state[scale_key(name)]
    for chunk, blocks in _chunks(kept.numel()):
        encode(flat[chunk].float(), codes[chunk], scales[blocks], is_square)


def _chunks(numel: int) -> Iterator[tuple[slice, slice]]:
    """(elements, blocks) of each chunk."""
    for start in range(0, numel, _CHUNK_NUMEL):
        stop = min(start + _CHUNK_NUMEL, numel)
        yield slice(start, stop), slice(start // BLOCK_NUMEL, -(-stop // BLOCK_NUMEL))
