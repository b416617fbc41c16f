"""State in numbers that every format understands, for whoever moves it: checkpoints, resharding, loading.

8-bit codes mean something only beside the scales of their own blocks, so nobody else can cut or join them.  What
travels is float32.  But an optimizer has 8-bit states because float32 ones did not fit, so checkpoints never decode a
moment whole: `Coded` gives the part that is asked for, and `convert` encodes by chunks.  Codes -> float32 -> codes is
the identity, unless second moments are so small that float32 cannot hold their squares (roots below 1e-19).

[Note: state dicts] `state_dict()` holds what torch's optimizers hold, under their names, because they take whatever
they are given for numbers: moments in float32 (in the parameter's dtype where they are kept so), no scales.
`state_dict(compact=True)` holds what is kept, at no cost, and only zoptim reads it: where torch expects the list of
parameter groups there is a sentence, which its `load_state_dict` refuses whatever its own groups are.
Rejected: codes in torch's form with a mark beside them, since torch ignores what it does not know.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import attrs
import torch
from torch import Tensor

from zoptim.backends.contract import BLOCK_NUMEL
from zoptim.backends.layouts import in_memory
from zoptim.states.codes import decode, encode
from zoptim.states.spec import StateSpec, scale_key

__all__ = ["Coded", "compacted", "convert", "expanded", "exported", "numbers"]

_CHUNK_NUMEL = 1 << 20  # elements decoded or encoded at once; a multiple of BLOCK_NUMEL
_VERSION = 1  # of compact state dicts
_SENTENCE = (
    "This is a compact state dict of zoptim: 8-bit codes with scales, which only zoptim's load_state_dict() reads. "
    "optimizer.state_dict() without compact=True gives numbers for everybody."
)


@attrs.frozen(eq=False)
class Coded:
    """A moment that is kept in 8-bit codes, to be read in parts as float32."""

    codes: Tensor  # uint8, the parameter's shape, dense
    scales: Tensor  # (ceil(numel / 256),) float32
    is_square: bool  # the codes are of square roots

    @property
    def dtype(self) -> torch.dtype:
        """Return what `read` returns."""
        return torch.float32

    @property
    def shape(self) -> torch.Size:
        return self.codes.shape

    def read(self, start: int, stop: int) -> Tensor:
        """(stop - start,) float32: elements [start, stop) of the flattened moment."""
        if not self.codes.is_contiguous():
            return self.whole().reshape(-1)[start:stop]
        first = start // BLOCK_NUMEL
        codes = in_memory(self.codes)[first * BLOCK_NUMEL : stop]
        scales = self.scales[first : -(-stop // BLOCK_NUMEL)]
        made = torch.empty(codes.numel(), dtype=torch.float32, device=codes.device)
        for chunk, blocks in _chunks(codes.numel()):
            decode(codes[chunk], scales[blocks], made[chunk], self.is_square)
        return made[start - first * BLOCK_NUMEL :]

    def whole(self) -> Tensor:
        """The moment as float32, in the shape and memory layout of the codes."""
        made = torch.empty_like(self.codes, dtype=torch.float32)
        codes, values = in_memory(self.codes), in_memory(made)
        for chunk, blocks in _chunks(codes.numel()):
            decode(codes[chunk], self.scales[blocks], values[chunk], self.is_square)
        return made


def exported(state: Mapping[str, Any], memory: StateSpec) -> dict[str, Any]:
    """The state of a parameter with `Coded` in the place of codes and scales; the rest is as it is kept."""
    coded = [name for name in state if scale_key(name) in state]
    scales = {scale_key(name) for name in coded}
    made = {key: value for key, value in state.items() if key not in scales}
    for name in coded:
        made[name] = Coded(state[name], state[scale_key(name)], name in memory.squares)
    return made


def numbers(state: Mapping[str, Any], param: Tensor, memory: StateSpec) -> dict[str, Any]:
    """The state of `param` as torch's optimizers would keep it, see [Note: state dicts].

    Moments are float32, or the optimizer's own tensors where these are at least as wide or of the parameter's dtype.
    """
    return {key: _number(value, param) for key, value in exported(state, memory).items()}


def _number(value: Any, param: Tensor) -> Any:
    if isinstance(value, Coded):
        return value.whole()
    is_narrow = isinstance(value, Tensor) and value.is_floating_point() and value.dtype.itemsize < 4
    return value.float() if is_narrow and value.dtype is not param.dtype else value


def compacted(state_dict: Mapping[str, Any]) -> dict[str, Any]:
    """A state dict of what is kept, which torch's optimizers refuse."""
    return {"state": {}, "param_groups": _SENTENCE, "compact": {"version": _VERSION, **state_dict}}


def expanded(state_dict: Any, who: str) -> dict[str, Any]:
    """A state dict of either form, in torch's form; `who` is whose `load_state_dict` it was given to.

    Raises TypeError or ValueError for anything else.
    """
    if not isinstance(state_dict, Mapping):
        raise TypeError(
            f"{who}.load_state_dict was given a {type(state_dict).__name__}; give it what state_dict() returns."
        )
    found = state_dict.get("compact", state_dict)
    if not _is_state_dict(found):
        raise ValueError(
            f"{who}.load_state_dict was given a dict with {', '.join(map(repr, state_dict)) or 'nothing'}; it needs "
            "'state', a dict of dicts, and 'param_groups', a list of dicts with 'params': what state_dict() returns."
        )
    if found is not state_dict and found.get("version") != _VERSION:
        raise ValueError(
            f"{who}.load_state_dict was given a compact state dict of version {found.get('version')!r}; this zoptim "
            f"reads version {_VERSION}. Write state_dict() without compact=True where it was made."
        )
    listed = {index for group in found["param_groups"] for index in group["params"]}
    if strangers := [key for key in found["state"] if key not in listed]:
        more = f" and {len(strangers) - 1} more" if strangers[1:] else ""
        raise ValueError(
            f"{who}.load_state_dict was given the state of {strangers[0]!r}{more}, which no parameter group lists; "
            f"they list {', '.join(map(repr, list(listed)[:4])) or 'nothing'}. Number them as state_dict() does."
        )
    return dict(found)


def _is_state_dict(found: Any) -> bool:
    if not isinstance(found, Mapping):
        return False
    state, groups = found.get("state"), found.get("param_groups")
    if not isinstance(state, Mapping) or not isinstance(groups, (list, tuple)):
        return False
    has_params = all(
        isinstance(group, Mapping) and isinstance(group.get("params"), (list, tuple)) for group in groups
    )
    return has_params and all(isinstance(entry, Mapping) for entry in state.values())


def convert(memory: StateSpec, given: Mapping[str, Any], state: dict[str, Any], name: str) -> None:
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
