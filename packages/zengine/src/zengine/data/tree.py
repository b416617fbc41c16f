"""Nested batches of tensors: tuples, lists, named tuples, mappings."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from typing import Any

from torch import Tensor


def map_tensors(tree: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """Return the same nest with `change` applied to each tensor; other leaves are unchanged."""
    if isinstance(tree, Tensor):
        return change(tree)
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):
        return type(tree)(*(map_tensors(member, change) for member in tree))
    if type(tree) in (tuple, list):
        return type(tree)(map_tensors(member, change) for member in tree)
    if isinstance(tree, MutableMapping):
        copied = copy.copy(tree)  # keeps the class, e.g. a tokenizer's BatchEncoding
        copied.update({key: map_tensors(member, change) for key, member in tree.items()})
        return copied
    return tree


def iter_tensors(tree: Any) -> Iterator[Tensor]:
    """Yield the tensors of a nest, in order."""
    found: list[Tensor] = []

    def collect(tensor: Tensor) -> Tensor:
        found.append(tensor)
        return tensor

    map_tensors(tree, collect)
    yield from found


def named_tensors(tree: Any, name: str) -> Iterator[tuple[str, Tensor]]:
    """Yield (path, tensor) of a nest; paths begin with `name`: batch['input_ids'], batch[0]."""
    if isinstance(tree, Tensor):
        yield name, tree
    elif isinstance(tree, (tuple, list)):
        for index, member in enumerate(tree):
            yield from named_tensors(member, f"{name}[{index}]")
    elif isinstance(tree, Mapping):
        for key, member in tree.items():
            yield from named_tensors(member, f"{name}[{key!r}]")
