"""Weights for inference: memory for a model on the meta device, and values from files.

Each rank reads only its own parts, also of experts that a Transformers folder stores one by one and the model stacks.
Files have parameters and persistent buffers.  Other buffers (rotary frequencies, say) are computed when a model is
built, so for a model on the meta device they are computed again: by Transformers' `_init_weights`, or by the module's
`reset_parameters`.  A buffer that neither sets raises ValueError, since its values would be undefined.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

import zpartition
from zengine.checkpoint.huggingface import to_module_names
from zengine.inference.loading.parts import join_parts
from zengine.inference.loading.sources import Given, open_source
from zengine.inference.loading.stored import QuantizedSlice

__all__ = [
    *("check_fits", "is_on_meta", "load", "load_part", "materialize", "named_by_module", "opened", "stored_tensors"),
]

_FREQUENCIES = ".rotary_emb.inv_freq"


def is_on_meta(module: nn.Module) -> bool:
    """Return True if a parameter or buffer of `module` is on the meta device."""
    return any(tensor.is_meta for tensor in (*module.parameters(), *module.buffers()))


def materialize(module: nn.Module, device: torch.device) -> None:
    """Allocate what is on the meta device on `device`; tied weights stay tied.  Values of parameters are undefined.

    Raises ValueError for buffers that neither files nor the model define.
    """
    allocated: dict[int, Tensor] = {}
    meta_buffers = [
        (child, name)
        for child in module.modules()
        for name, buffer in child.named_buffers(recurse=False)
        if buffer.is_meta
    ]
    with torch.no_grad():
        for child in module.modules():
            for name, tensor in [*_own_tensors(child)]:
                if tensor.is_meta:
                    setattr(child, name, allocated.setdefault(id(tensor), _allocate(tensor, device)))
    persistent = module.state_dict(keep_vars=True).values()
    kept = {id(tensor) for tensor in persistent}
    _make_buffers(module, [(child, name) for child, name in meta_buffers if id(child.get_buffer(name)) not in kept])


def load(module: nn.Module, path: Given, base_dir: str = "") -> None:
    """Load weights from what `open_source` opens, tensor by tensor, this rank's rows of each; codes are decoded.

    Raises ValueError, with nothing loaded, for missing or unexpected names and wrong shapes.
    """
    with open_source(path, base_dir) as source:
        zpartition.load_own_slices(module, named_by_module(source.tensors, module))
        source.adjust(module)


def check_fits(module: nn.Module, path: Given, base_dir: str = "") -> bool:
    """Raise the ValueError of `load`, without changing `module`; return whether files hold quantized layers."""
    with open_source(path, base_dir) as source:
        try:
            named = named_by_module(source.tensors, module)
            zpartition.check_slices(module, named)
            has_codes = any(isinstance(each, QuantizedSlice) for each in source.tensors.values())
            if not has_codes:
                _check_floating(module, named)
            return has_codes
        except ValueError as error:
            raise ValueError(f"{source.origin} does not fit {type(module).__name__}: {error}") from None


def _check_floating(module: nn.Module, tensors: Mapping[str, Any]) -> None:
    """Raise ValueError for whole numbers in the place of weights: codes, whose scales are not known."""
    for name, tensor in stored_tensors(module):
        if name not in tensors or not tensor.is_floating_point() or not tensor.numel() or not tensor.dim():
            continue
        dtype = tensors[name][tuple(slice(0, 0) for _ in tensor.shape)].dtype
        if not dtype.is_floating_point:
            raise ValueError(f"{name} is {dtype} in the files, and must be of floating point")


@contextmanager
def opened(module: nn.Module, path: Given | None, base_dir: str = "") -> Iterator[Mapping[str, Any] | None]:
    """Open the tensors of a file or folder by the names of `module`, for `load_part`; None without a path."""
    if path is None:
        yield None
        return
    with open_source(path, base_dir) as source:
        yield named_by_module(source.tensors, module)


def load_part(part: nn.Module, name: str, tensors: Mapping[str, Any] | None) -> None:
    """Allocate the submodule `name` on the host, and load it, if there are `tensors` of the whole module."""
    materialize(part, torch.device("cpu"))
    if tensors is None:
        return
    prefix = f"{name}." if name else ""
    own = {*part.state_dict(), *(key for key, _ in part.named_parameters(remove_duplicate=False))}
    zpartition.load_own_slices(part, {key: tensors[prefix + key] for key in own if prefix + key in tensors})


def named_by_module(tensors: Mapping[str, Any], module: nn.Module) -> Mapping[str, Any]:
    """Return tensors of files under the names of `module`, which may be whole or split over ranks; parts are joined.

    Frequencies of rotary positions, which older folders have, are omitted: the module computes them.
    """
    joining, held = zpartition.FullTensors.of(module), module.state_dict(keep_vars=True)
    shapes = {name: joining.shape(value) for name, value in held.items() if isinstance(value, Tensor)}
    known = {name: value for name, value in tensors.items() if name in shapes or not name.endswith(_FREQUENCIES)}
    whole = join_parts(known, shapes, getattr(module, "config", None))
    return to_module_names(whole, module, shapes)


def stored_tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield the parameters and persistent buffers of `module`; a tied one under its first name."""
    yield from module.named_parameters()
    for path, child in module.named_modules():
        for name, buffer in child.named_buffers(recurse=False):
            if name not in child._non_persistent_buffers_set:
                yield f"{path}.{name}" if path else name, buffer


def _own_tensors(child: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from child.named_parameters(recurse=False, remove_duplicate=False)
    yield from child.named_buffers(recurse=False, remove_duplicate=False)


def _allocate(tensor: Tensor, device: torch.device) -> Tensor:
    memory = torch.empty(tensor.shape, dtype=tensor.dtype, device=device)
    if not isinstance(tensor, nn.Parameter):
        return memory
    param = nn.Parameter(memory, requires_grad=tensor.requires_grad)
    vars(param).update(vars(tensor))
    return param


def _make_buffers(module: nn.Module, buffers: list[tuple[nn.Module, str]]) -> None:
    """Compute the buffers that no file has, twice over different fill values: a difference shows an undefined one."""
    first, second = (_make_over(mark, module, buffers) for mark in (0, 1))
    paths = {child: path for path, child in module.named_modules()}
    undefined = [
        f"{paths[child]}.{name}" for (child, name), a, b in zip(buffers, first, second) if not torch.equal(a, b)
    ]
    if undefined:
        raise ValueError(
            f"buffers of {type(module).__name__} are on the meta device and not persistent, so no file has them, and "
            f"neither _init_weights nor reset_parameters sets them: {', '.join(undefined[:5])}. Build the model with "
            "real buffers, for example under accelerate.init_empty_weights(include_buffers=False)."
        )


def _make_over(mark: int, module: nn.Module, buffers: list[tuple[nn.Module, str]]) -> list[Tensor]:
    """Fill buffers with `mark`, let the model or its modules set them, and return copies."""
    make = getattr(module, "_init_weights", None)
    with torch.no_grad():
        for child, name in buffers:
            child.get_buffer(name).fill_(mark)
        for child in dict.fromkeys(child for child, _ in buffers):
            if make is not None:
                make(child)
            elif hasattr(child, "reset_parameters"):
                child.reset_parameters()  # type: ignore[operator]
        return [child.get_buffer(name).clone() for child, name in buffers]
