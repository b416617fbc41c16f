"""Nested batches of tensors: tuples, lists, named tuples, mappings."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from typing import Any

from torch import Tensor


def mapped(tree: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """Return the same nest with changed tensors; values that are neither containers nor tensors are unchanged."""
    if isinstance(tree, Tensor):
        return change(tree)
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):
        return type(tree)(*(mapped(member, change) for member in tree))
    if type(tree) in (tuple, list):
        return type(tree)(mapped(member, change) for member in tree)
    if isinstance(tree, MutableMapping):
        twin = copy.copy(tree)  # of the same class: a tokenizer's batch, say
        twin.update({key: mapped(member, change) for key, member in tree.items()})
        return twin
    return tree


def tensors(tree: Any) -> Iterator[Tensor]:
    """Yield the tensors of a nest, in order."""
    found: list[Tensor] = []

    def note(tensor: Tensor) -> Tensor:
        found.append(tensor)
        return tensor

    mapped(tree, note)
    yield from found


def named_tensors(tree: Any, name: str) -> Iterator[tuple[str, Tensor]]:
    """Yield (path, tensor) of a nest called `name`: batch['input_ids'], batch[0]."""
    if isinstance(tree, Tensor):
        yield name, tree
    elif isinstance(tree, (tuple, list)):
        for index, member in enumerate(tree):
            yield from named_tensors(member, f"{name}[{index}]")
    elif isinstance(tree, Mapping):
        for key, member in tree.items():
            yield from named_tensors(member, f"{name}[{key!r}]")
