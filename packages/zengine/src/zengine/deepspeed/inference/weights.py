"""Weights for a model that is to answer: memory where there is none yet (the meta device), and values from files.

Each rank reads its own parts alone, also of what a folder of Transformers has one by one and the model stacked.
Files have parameters and persistent buffers; other buffers (the frequencies of rotary positions) are made by whoever
makes the model, so on the meta device they are made again: by Transformers' `_init_weights` of the model, or by
`reset_parameters` of the module.  One that neither makes is refused by name, since nobody would notice what is in it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

import zpartition
from zengine.checkpoint.huggingface import to_module_names

__all__ = ["is_hollow", "load", "make_real"]


def is_hollow(module: nn.Module) -> bool:
    """Return whether some of `module` is on the meta device."""
    return any(tensor.is_meta for tensor in (*module.parameters(), *module.buffers()))


def make_real(module: nn.Module, device: torch.device) -> None:
    """Memory on `device` for what is on the meta device; ties stay ties.  Its values are not defined.

    Raises ValueError for buffers that no file has and nobody makes.
    """
    made: dict[int, Tensor] = {}
    hollow = [
        (child, name)
        for child in module.modules()
        for name, buffer in child.named_buffers(recurse=False)
        if buffer.is_meta
    ]
    with torch.no_grad():
        for child in module.modules():
            for name, tensor in [*_own(child)]:
                if tensor.is_meta:
                    setattr(child, name, made.setdefault(id(tensor), _real(tensor, device)))
    persistent = module.state_dict(keep_vars=True).values()
    kept = {id(tensor) for tensor in persistent}
    _make_buffers(module, [(child, name) for child, name in hollow if id(child.get_buffer(name)) not in kept])


def load(module: nn.Module, path: str) -> None:
    """Values of a file or a folder; tensor by tensor, of each this rank's rows.

    Raises ValueError, with nothing loaded, for what is missing, unexpected or of another shape.
    """
    with _opened(module, path) as weights:
        zpartition.load_own_slices(module, weights)


def refuse_unfit(module: nn.Module, path: str) -> None:
    """ValueError as `load` raises it, before anything is done with `module`."""
    with _opened(module, path) as weights:
        try:
            zpartition.check_slices(module, weights)
        except ValueError as error:
            raise ValueError(f"{path} does not fit {type(module).__name__}: {error}") from None


@contextmanager
def _opened(module: nn.Module, path: str) -> Iterator[Mapping[str, Any]]:
    """Slices of files by the module's names, whatever part of it is here."""
    import zckpt.interchange  # not at the top: it takes longer to import than the rest of this package

    joining, held = zpartition.FullTensors.of(module), module.state_dict(keep_vars=True)
    shapes = {name: joining.shape(value) for name, value in held.items() if isinstance(value, Tensor)}
    with zckpt.interchange.read_weights(path) as weights:
        yield to_module_names(weights, module, shapes)


def _own(child: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from child.named_parameters(recurse=False, remove_duplicate=False)
    yield from child.named_buffers(recurse=False, remove_duplicate=False)


def _real(tensor: Tensor, device: torch.device) -> Tensor:
    memory = torch.empty(tensor.shape, dtype=tensor.dtype, device=device)
    if not isinstance(tensor, nn.Parameter):
        return memory
    param = nn.Parameter(memory, requires_grad=tensor.requires_grad)
    vars(param).update(vars(tensor))
    return param


def _make_buffers(module: nn.Module, buffers: list[tuple[nn.Module, str]]) -> None:
    """Values for buffers that no file has.  Made twice, over different numbers: where these show, nobody made any."""
    first, second = (_made_over(mark, module, buffers) for mark in (0, 1))
    paths = {child: path for path, child in module.named_modules()}
    lost = [f"{paths[child]}.{name}" for (child, name), a, b in zip(buffers, first, second) if not torch.equal(a, b)]
    if lost:
        raise ValueError(
            f"buffers of {type(module).__name__} are on the meta device and not persistent, so no file has them, and "
            f"nobody says what they hold: {', '.join(lost[:5])}. Build the model with its buffers, by "
            "accelerate.init_empty_weights(include_buffers=False) say, which leaves out parameters alone."
        )


def _made_over(mark: int, module: nn.Module, buffers: list[tuple[nn.Module, str]]) -> list[Tensor]:
    """Copies of what the model, or its modules, put into buffers that are full of `mark` before."""
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
