"""Batches are nests of tensors: tuples, lists, named tuples, mappings.  One walk over all of them."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, MutableMapping
from typing import Any

from torch import Tensor


def mapped(tree: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """The same nest with changed tensors.  What is neither a container nor a tensor passes."""
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
    """The tensors of a nest, in order."""
    found: list[Tensor] = []

    def note(tensor: Tensor) -> Tensor:
        found.append(tensor)
        return tensor

    mapped(tree, note)
    yield from found
