"""State that is independent of the state format, for checkpoints, resharding and loading.

8-bit codes need the scales of their own blocks, so other code cannot cut or join them; portable state is float32.
But users choose 8-bit states because float32 ones do not fit, so a whole moment is never decoded: `Coded` decodes the
requested part, and `convert` encodes by chunks.  Codes -> float32 -> codes is the identity, except for second moments
whose roots are below 1e-19: float32 cannot hold their squares.

[Note: state dicts] `state_dict()` has the tensors of torch's optimizers, under their names, because torch.optim loads
any tensors as values: moments in float32 (or in the parameter's dtype if they have it), no scales.
`state_dict(compact=True)` has the optimizer's own tensors, without a copy, and only zoptim loads it: it has a
sentence in place of the list of parameter groups, so torch's `load_state_dict` raises.
Rejected: codes in torch's form with a marker, since torch ignores keys that it does not know.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import attrs
import torch
from torch import Tensor

from zoptim.backends.contract import BLOCK_NUMEL
from zoptim.backends.memory import memory_view
from zoptim.states.codes import decode, encode
from zoptim.states.spec import StateSpec, scale_key

__all__ = ["Coded", "as_compact_dict", "as_torch_dict", "convert", "export_state", "numbers"]

_CHUNK_NUMEL = 1 << 20  # elements decoded or encoded at once; a multiple of BLOCK_NUMEL
_VERSION = 1  # of compact state dicts
_SENTENCE = (
    "This is a compact state dict of zoptim: 8-bit codes with scales, which only zoptim's load_state_dict() reads. "
    "optimizer.state_dict() without compact=True has decoded values, which torch.optim can load."
)


@attrs.frozen(eq=False)
class Coded:
    """A moment in 8-bit codes that is decoded to float32 part by part."""

    codes: Tensor  # uint8, the parameter's shape, dense
    scales: Tensor  # (ceil(numel / 256),) float32
    is_square: bool  # the codes are of square roots

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of what `read` returns."""
        return torch.float32

    @property
    def shape(self) -> torch.Size:
        return self.codes.shape

    def read(self, start: int, stop: int) -> Tensor:
        """Decode elements [start, stop) of the flattened moment: (stop - start,) float32."""
        if not self.codes.is_contiguous():
            return self.whole().reshape(-1)[start:stop]
        first = start // BLOCK_NUMEL
        codes = memory_view(self.codes)[first * BLOCK_NUMEL : stop]
        scales = self.scales[first : -(-stop // BLOCK_NUMEL)]
        made = torch.empty(codes.numel(), dtype=torch.float32, device=codes.device)
        for chunk, blocks in _chunks(codes.numel()):
            decode(codes[chunk], scales[blocks], made[chunk], self.is_square)
        return made[start - first * BLOCK_NUMEL :]

    def whole(self) -> Tensor:
        """Decode the moment to float32, in the shape and memory layout of the codes."""
        made = torch.empty_like(self.codes, dtype=torch.float32)
        codes, values = memory_view(self.codes), memory_view(made)
        for chunk, blocks in _chunks(codes.numel()):
            decode(codes[chunk], self.scales[blocks], values[chunk], self.is_square)
        return made


def export_state(state: Mapping[str, Any], spec: StateSpec) -> dict[str, Any]:
    """Return the state of a parameter with `Coded` in place of codes and scales; other tensors are not copied."""
    coded = [name for name in state if scale_key(name) in state]
    scales = {scale_key(name) for name in coded}
    made = {key: value for key, value in state.items() if key not in scales}
    for name in coded:
        made[name] = Coded(state[name], state[scale_key(name)], name in spec.squares)
    return made


def numbers(state: Mapping[str, Any], param: Tensor, spec: StateSpec) -> dict[str, Any]:
    """Return the state of `param` as torch's optimizers would have it, see [Note: state dicts].

    Moments are float32, or the optimizer's own tensors if these are at least as wide or have the parameter's dtype.
    """
    return {key: _number(value, param) for key, value in export_state(state, spec).items()}


def _number(value: Any, param: Tensor) -> Any:
    if isinstance(value, Coded):
        return value.whole()
    is_narrow = isinstance(value, Tensor) and value.is_floating_point() and value.dtype.itemsize < 4
    return value.float() if is_narrow and value.dtype is not param.dtype else value


def as_compact_dict(state_dict: Mapping[str, Any]) -> dict[str, Any]:
    """Return a compact state dict, which torch's optimizers reject."""
    return {"state": {}, "param_groups": _SENTENCE, "compact": {"version": _VERSION, **state_dict}}


def as_torch_dict(state_dict: Any, owner: str) -> dict[str, Any]:
    """Convert a state dict of either form to torch's form; `owner` is the loading class, for errors.

    Raises TypeError or ValueError for anything else.
    """
    if not isinstance(state_dict, Mapping):
        raise TypeError(
            f"{owner}.load_state_dict was given a {type(state_dict).__name__}; pass the result of state_dict()."
        )
    found = state_dict.get("compact", state_dict)
    if not _is_state_dict(found):
        raise ValueError(
            f"{owner}.load_state_dict was given a dict with {', '.join(map(repr, state_dict)) or 'nothing'}; it needs"
            " 'state', a dict of dicts, and 'param_groups', a list of dicts with 'params'. Pass the result of "
            "state_dict()."
        )
    if found is not state_dict and found.get("version") != _VERSION:
        raise ValueError(
            f"{owner}.load_state_dict was given a compact state dict of version {found.get('version')!r}; this "
            f"zoptim reads version {_VERSION}. Save it with state_dict(), without compact=True, in that version."
        )
    listed = {index for group in found["param_groups"] for index in group["params"]}
    if unlisted := [key for key in found["state"] if key not in listed]:
        more = f" and {len(unlisted) - 1} more" if unlisted[1:] else ""
        raise ValueError(
            f"{owner}.load_state_dict was given the state of {unlisted[0]!r}{more}, which no parameter group lists; "
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


def convert(spec: StateSpec, given: Mapping[str, Any], state: dict[str, Any], name: str) -> None:
    """Convert moment `name` of `given`, in any format, into the format of `state`; rounds to nearest."""
    kept, is_square = state[name], name in spec.squares
    if kept.dtype is not torch.uint8:
        spec.write(state, name, spec.read(given, name))
        return
    value = given[name]
    if value.stride() != kept.stride():
        value = torch.empty_like(kept, dtype=value.dtype).copy_(value)
    flat, codes, scales = memory_view(value), memory_view(kept), state[scale_key(name)]
    for chunk, blocks in _chunks(kept.numel()):
        encode(flat[chunk].float(), codes[chunk], scales[blocks], is_square)


def _chunks(numel: int) -> Iterator[tuple[slice, slice]]:
    """Yield (elements, blocks) of each chunk."""
    for start in range(0, numel, _CHUNK_NUMEL):
        stop = min(start + _CHUNK_NUMEL, numel)
        yield slice(start, stop), slice(start // BLOCK_NUMEL, -(-stop // BLOCK_NUMEL))
