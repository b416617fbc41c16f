"""Adopting state that somebody else wrote: torch.optim, another state format, an older run.

torch casts every loaded state tensor to its parameter's dtype, which would round float32 moments of bf16 weights
and take 8-bit codes for numbers.  So the values travel through torch's loading in a box that it does not open, and
are converted here, exactly: what is in the right format is taken bit for bit, what is not passes through float32.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import attrs
import torch
from torch import Tensor

from zoptim.backends.layouts import dense
from zoptim.states.portable import convert
from zoptim.states.spec import ALIKE, REMAINDER, STEP, StateSpec, num_blocks, scale_key

__all__ = ["adopt", "boxed", "unboxed"]


@attrs.frozen(eq=False)
class _Box:
    """A tensor that torch's loading must not cast."""

    tensor: Tensor


def boxed(state: Mapping[Any, Any]) -> dict[Any, Any]:
    """The "state" of a state_dict with its tensors in boxes."""
    return {
        index: {key: _Box(v) if isinstance(v, Tensor) else v for key, v in entry.items()}
        if isinstance(entry, Mapping)
        else entry
        for index, entry in state.items()
    }


def unboxed(state: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value.tensor if isinstance(value, _Box) else value for key, value in state.items()}


def adopt(loaded: Mapping[str, Any], param: Tensor, memory: StateSpec, who: str) -> dict[str, Any]:
    """The loaded state of `param` in the form that the kernels rely on.  `who` names the parameter in errors.

    Raises ValueError for state that lacks a moment or is of another size.
    """
    given, moments = check(loaded, param, memory, who)
    state = memory.make(param) if given else {}
    state.update({ALIKE: given[ALIKE]} if ALIKE in given else {})
    for name in set(memory.names) - set(moments):  # the first update makes it
        state.pop(name, None)
        state.pop(scale_key(name), None)
    with torch.no_grad():
        for key in state:
            _fill(state, key, given, param, memory)
    return state


def check(
    loaded: Mapping[str, Any], param: Tensor, memory: StateSpec, who: str
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return what is there of `loaded`, and the moments of it; ValueError as of `adopt`."""
    given = {key: value for key, value in loaded.items() if value is not None}
    moments = {name: given[name] for name in memory.names if isinstance(given.get(name), Tensor)}
    missing = [name for name in memory.names if name not in moments and name not in memory.lazy]
    missing += [STEP] * (memory.counts and STEP not in given)
    _check_codes(moments, given, who)
    scales = [scale_key(name) for name, value in moments.items() if value.dtype is torch.uint8]
    missing += [scale for scale in scales if scale not in given]
    if given and missing:
        raise ValueError(
            f"the loaded state of {who} lacks {', '.join(missing)}; it has {', '.join(given)}. It was written by "
            "another optimizer, or by one with other options."
        )
    _check_shapes(given, param, memory, who)
    return given, moments


def _fill(state: dict[str, Any], key: str, given: dict[str, Any], param: Tensor, memory: StateSpec) -> None:
    if key == STEP:
        counts = torch.as_tensor(given.get(key, 0.0), dtype=torch.float32).to(param.device)
        state[key] = counts.reshape(()).clone() if counts.numel() == 1 else counts.clone()
    elif key == REMAINDER:
        # Another dtype: it went through an optimizer that moved the weights without it.  They are the truth then.
        if key in given and given[key].dtype is state[key].dtype:
            state[key].copy_(given[key])
    elif key in memory.names:
        value = {name: _on(param, tensor) for name, tensor in given.items() if isinstance(tensor, Tensor)}
        if value[key].dtype is not state[key].dtype:
            convert(memory, value, state, key)
        elif (scale := scale_key(key)) not in state:
            state[key].copy_(value[key])
        elif value[key].stride() == state[key].stride():
            state[key].copy_(value[key])
            state[scale].copy_(value[scale])
        else:  # blocks are counted in memory order
            memory.write(state, key, memory.read(value, key))


def _on(param: Tensor, tensor: Tensor) -> Tensor:
    """Beside the parameter, and without holes."""
    return dense(tensor.detach().to(param.device))


def _check_codes(moments: Mapping[str, Tensor], given: Mapping[str, Any], who: str) -> None:
    for name, value in moments.items():
        if scale_key(name) in given and value.dtype is not torch.uint8:
            raise ValueError(
                f"{name} of {who} has a scale beside it, but is {value.dtype}: 8-bit codes that another optimizer "
                "took for numbers. Load the state dict that zoptim wrote."
            )


def _check_shapes(given: Mapping[str, Any], param: Tensor, memory: StateSpec, who: str) -> None:
    for key, shape in _expected_shapes(given, param, memory):
        if given[key].shape != shape:
            wanted = "the parameter has" if shape == param.shape else "it must be"
            raise ValueError(
                f"{key} of {who} has shape {tuple(given[key].shape)}, {wanted} {tuple(shape)}. "
                "Load the state of this model; or, if the parameter's data was replaced, clear its gradient and drop "
                "its entry from optimizer.state."
            )


def _expected_shapes(
    given: Mapping[str, Any], param: Tensor, memory: StateSpec
) -> Iterator[tuple[str, tuple[int, ...] | torch.Size]]:
    for key in (*memory.names, REMAINDER):
        if isinstance(given.get(key), Tensor):
            yield key, param.shape
        if isinstance(given.get(scale_key(key)), Tensor):
            yield scale_key(key), (num_blocks(param),)
