"""Which tensors of a model stay in float32 while the others become narrower.

Some numbers do not survive 8 significant bits: the routing bias of a mixture of experts, whose values differ by less
than a bf16 step; rotary frequencies, whose error grows with the position; a layer whose sums leave float16's range.
Who knows them is the person (patterns of names) or the model itself: models of Hugging Face Transformers list
them in two attributes, `_keep_in_fp32_modules_strict` for every narrow dtype and `_keep_in_fp32_modules` for float16.
Their code is also written for buffers that are not saved (`persistent=False`) to stay as they were made, so those of
such a model do.

A pattern is matched as Transformers and DeepSpeed do it: anywhere in the full name of a parameter or buffer, with `*`
for any characters.  "norm" keeps "blocks.0.norm1.weight", "blocks.*.router" the router of each block.

Rejected: module classes in place of names (`nn.LayerNorm` would be every one of them, and a bare parameter has none).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Set

import attrs
import torch
from torch import Tensor, nn

from zprecision._compat import unsaved_buffers
from zprecision.buffers import is_castable

__all__ = ["Keep"]

Matches = Callable[[str], object]

_EVERY_NARROW, _FLOAT16 = "_keep_in_fp32_modules_strict", "_keep_in_fp32_modules"


def _as_tuple(patterns: Iterable[str]) -> tuple[str, ...]:
    names = () if isinstance(patterns, str) else tuple(patterns)
    if isinstance(patterns, str) or not all(isinstance(name, str) and name for name in names):
        raise TypeError(f"Keep(patterns={patterns!r}): give a list of names, such as ['norm', 'blocks.*.router']")
    return names


@attrs.frozen(kw_only=True)
class Keep:
    """What stays in float32. `Keep()` asks the model alone; of a plain torch model that is nothing."""

    patterns: tuple[str, ...] = attrs.field(default=(), converter=_as_tuple)  # anywhere in a full name; * is anything
    as_listed: bool = attrs.field(default=True, validator=attrs.validators.instance_of(bool))  # what the model lists

    def names(self, module: nn.Module, dtype: torch.dtype | None) -> frozenset[str]:
        """Full names of the floating parameters and buffers of `module` that stay when the rest becomes `dtype`.

        A tensor with several names is named by each if any of them matches.  Empty for a dtype that is not narrower
        than float32, and for None, where nothing is cast.
        """
        if dtype is None or torch.promote_types(dtype, torch.float32) == dtype:
            return frozenset()
        listed = set(_listed(module, dtype)) if self.as_listed else set()
        return _with_aliases(module, self.asked(module) | listed)

    def asked(self, module: nn.Module) -> frozenset[str]:
        """Full names that match a pattern, with the other names of the same tensors."""
        matches = _matcher(self.patterns)
        return _with_aliases(module, {name for name, _ in tensors(module) if matches(name)})

    def unmatched(self, module: nn.Module) -> tuple[str, ...]:
        """The patterns that match no floating tensor of `module`: misspelt, or meant for another model."""
        names = [name for name, _ in tensors(module)]
        return tuple(each for each in self.patterns if not any(map(_matcher([each]), names)))


def tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """(full name, tensor) of every floating parameter and buffer, once for each of its names."""
    named = (module.named_parameters(remove_duplicate=False), module.named_buffers(remove_duplicate=False))
    yield from ((name, tensor) for some in named for name, tensor in some if is_castable(tensor))


def _listed(module: nn.Module, dtype: torch.dtype) -> Iterator[str]:
    """What models inside `module` (it itself, or wrapped ones) say of their own tensors."""
    for path, child in module.named_modules():
        if not hasattr(child, _FLOAT16):
            continue
        lists = [_EVERY_NARROW, *([_FLOAT16] if dtype == torch.float16 else [])]
        matches = _matcher([name for each in lists for name in getattr(child, each, None) or ()])
        unsaved = set(_unsaved_buffers(child))
        prefix = f"{path}." if path else ""
        yield from (prefix + name for name, _ in tensors(child) if matches(name) or name in unsaved)


def _unsaved_buffers(module: nn.Module) -> Iterator[str]:
    for path, child in module.named_modules():
        yield from (f"{path}.{name}" if path else name for name in unsaved_buffers(child))


def _matcher(patterns: Iterable[str]) -> Matches:
    parts = [".*".join(map(re.escape, pattern.split("*"))) for pattern in patterns]
    return re.compile("|".join(parts)).search if parts else lambda name: None


def _with_aliases(module: nn.Module, names: Set[str]) -> frozenset[str]:
    if not names:
        return frozenset()
    kept = {id(tensor) for name, tensor in tensors(module) if name in names}
    return frozenset(name for name, tensor in tensors(module) if id(tensor) in kept)
