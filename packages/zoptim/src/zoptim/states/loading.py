"""Conversion of loaded state, from torch.optim, another state format or an older version, to an optimizer's format.

torch casts every loaded state tensor to its parameter's dtype, which would round float32 moments of bf16 weights and
cast 8-bit codes as if they were values.  So tensors pass through torch's loading inside a box, and are converted
here: tensors in the right format are copied bit for bit, others are converted by way of float32.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import attrs
import torch
from torch import Tensor

from zoptim.backends.memory import as_dense
from zoptim.states.portable import convert
from zoptim.states.spec import ALIKE, REMAINDER, STEP, StateSpec, num_blocks, scale_key

__all__ = ["adopt", "box_tensors", "check", "unbox_tensors"]


@attrs.frozen(eq=False)
class _Box:
    """A tensor that torch's load_state_dict must not cast."""

    tensor: Tensor


def box_tensors(state: Mapping[Any, Any]) -> dict[Any, Any]:
    """Wrap the tensors in the "state" of a state_dict."""
    return {
        index: {key: _Box(v) if isinstance(v, Tensor) else v for key, v in entry.items()}
        if isinstance(entry, Mapping)
        else entry
        for index, entry in state.items()
    }


def unbox_tensors(state: Mapping[str, Any]) -> dict[str, Any]:
    """Unwrap the tensors in the state of one parameter."""
    return {key: value.tensor if isinstance(value, _Box) else value for key, value in state.items()}


def adopt(loaded: Mapping[str, Any], param: Tensor, spec: StateSpec, label: str) -> dict[str, Any]:
    """Convert the loaded state of `param` to the form that kernels read.  `label` names the parameter in errors.

    Raises ValueError for state that lacks a moment or has another shape.
    """
    given, moments = check(loaded, param, spec, label)
    state = spec.make(param) if given else {}
    state.update({ALIKE: given[ALIKE]} if ALIKE in given else {})
    for name in set(spec.names) - set(moments):  # the first update makes it
        state.pop(name, None)
        state.pop(scale_key(name), None)
    with torch.no_grad():
        for key in state:
            _fill(state, key, given, param, spec)
    return state


def check(
    loaded: Mapping[str, Any], param: Tensor, spec: StateSpec, label: str
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return the entries of `loaded` that are not None, and its moments.  Raises ValueError as `adopt` does."""
    given = {key: value for key, value in loaded.items() if value is not None}
    moments = {name: given[name] for name in spec.names if isinstance(given.get(name), Tensor)}
    missing = [name for name in spec.names if name not in moments and name not in spec.lazy]
    missing += [STEP] * (spec.counts and STEP not in given)
    _check_codes(moments, given, label)
    scales = [scale_key(name) for name, value in moments.items() if value.dtype is torch.uint8]
    missing += [scale for scale in scales if scale not in given]
    if given and missing:
        raise ValueError(
            f"the loaded state of {label} lacks {', '.join(missing)}; it has {', '.join(given)}. It was written by "
            "another optimizer, or by one with other options."
        )
    _check_shapes(given, param, spec, label)
    return given, moments


def _fill(state: dict[str, Any], key: str, given: dict[str, Any], param: Tensor, spec: StateSpec) -> None:
    if key == STEP:
        counts = torch.as_tensor(given.get(key, 0.0), dtype=torch.float32).to(param.device)
        state[key] = counts.reshape(()).clone() if counts.numel() == 1 else counts.clone()
    elif key == REMAINDER:
        # Another dtype: another optimizer cast it and updated the weights without it, so it no longer applies.
        if key in given and given[key].dtype is state[key].dtype:
            state[key].copy_(given[key])
    elif key in spec.names:
        value = {name: _on(param, tensor) for name, tensor in given.items() if isinstance(tensor, Tensor)}
        if value[key].dtype is not state[key].dtype:
            convert(spec, value, state, key)
        elif (scale := scale_key(key)) not in state:
            state[key].copy_(value[key])
        elif value[key].stride() == state[key].stride():
            state[key].copy_(value[key])
            state[scale].copy_(value[scale])
        else:  # blocks are counted in memory order
            spec.write(state, key, spec.read(value, key))


def _on(param: Tensor, tensor: Tensor) -> Tensor:
    """Return `tensor` on the parameter's device, dense."""
    return as_dense(tensor.detach().to(param.device))


def _check_codes(moments: Mapping[str, Tensor], given: Mapping[str, Any], label: str) -> None:
    for name, value in moments.items():
        if scale_key(name) in given and value.dtype is not torch.uint8:
            raise ValueError(
                f"{name} of {label} has a scale, but is {value.dtype}: another optimizer cast its 8-bit codes. "
                "Load the state dict that zoptim wrote."
            )


def _check_shapes(given: Mapping[str, Any], param: Tensor, spec: StateSpec, label: str) -> None:
    for key, shape in _expected_shapes(given, param, spec):
        if given[key].shape != shape:
            wanted = "the parameter has" if shape == param.shape else "it must have"
            raise ValueError(
                f"{key} of {label} has shape {tuple(given[key].shape)}, {wanted} {tuple(shape)}. "
                "Load the state of this model; or, if the parameter's data was replaced, clear its gradient and drop "
                "its entry from optimizer.state."
            )


def _expected_shapes(
    given: Mapping[str, Any], param: Tensor, spec: StateSpec
) -> Iterator[tuple[str, tuple[int, ...] | torch.Size]]:
    for key in (*spec.names, REMAINDER):
        if isinstance(given.get(key), Tensor):
            yield key, param.shape
        if isinstance(given.get(scale_key(key)), Tensor):
            yield scale_key(key), (num_blocks(param),)
