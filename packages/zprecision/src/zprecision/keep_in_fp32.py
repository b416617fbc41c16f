"""Selection of tensors that stay in float32 while the rest of the model becomes narrower.

Some values do not survive 8 significant bits: the routing bias of a mixture of experts, whose values differ by less
than a bf16 step; rotary frequencies, whose error grows with the position; a layer whose sums leave float16's range.
The user names them by patterns, or the model lists them: Hugging Face Transformers models do in two
attributes, `_keep_in_fp32_modules_strict` for every narrow dtype and `_keep_in_fp32_modules` for float16.  The code
of these models also expects non-persistent buffers to keep their dtype, so those of such a model do.

A pattern matches as in Transformers and DeepSpeed: anywhere in the full name of a parameter or buffer, with `*` for
any characters.  "norm" keeps "blocks.0.norm1.weight"; "blocks.*.router" keeps the router of each block.

Rejected: module classes instead of names (`nn.LayerNorm` would select all of them, and a bare parameter has none).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Set

import attrs
import torch
from torch import Tensor, nn

from zprecision._compat import unsaved_buffers
from zprecision.casting import is_castable

__all__ = ["KeepInFp32"]

Matches = Callable[[str], object]

_EVERY_NARROW, _FLOAT16 = "_keep_in_fp32_modules_strict", "_keep_in_fp32_modules"


def _as_tuple(patterns: Iterable[str]) -> tuple[str, ...]:
    names = () if isinstance(patterns, str) else tuple(patterns)
    if isinstance(patterns, str) or not all(isinstance(name, str) and name for name in names):
        raise TypeError(
            f"KeepInFp32(patterns={patterns!r}): pass a list of names, such as ['norm', 'blocks.*.router']"
        )
    return names


@attrs.frozen(kw_only=True)
class KeepInFp32:
    """Tensors to keep in float32. `KeepInFp32()` keeps those that the model lists; a plain torch model lists none."""

    # match anywhere in a full name; * is any text
    patterns: tuple[str, ...] = attrs.field(default=(), converter=_as_tuple)
    # also keep what the model lists
    as_listed: bool = attrs.field(default=True, validator=attrs.validators.instance_of(bool))

    def names(self, module: nn.Module, dtype: torch.dtype | None) -> frozenset[str]:
        """Full names of the floating parameters and buffers of `module` that stay when the rest becomes `dtype`.

        A tensor with several names is kept, under all of them, if any one matches.  Empty for a dtype that is not
        narrower than float32, and for None, which casts nothing.
        """
        if dtype is None or torch.promote_types(dtype, torch.float32) == dtype:
            return frozenset()
        listed = set(_listed(module, dtype)) if self.as_listed else set()
        return _with_aliases(module, self.matching(module) | listed)

    def matching(self, module: nn.Module) -> frozenset[str]:
        """Full names that match a pattern, with all aliases of the same tensors."""
        matches = _matcher(self.patterns)
        return _with_aliases(module, {name for name, _ in tensors(module) if matches(name)})

    def unmatched(self, module: nn.Module) -> tuple[str, ...]:
        """Patterns that match no floating tensor of `module`: misspelt, or for another model."""
        names = [name for name, _ in tensors(module)]
        return tuple(each for each in self.patterns if not any(map(_matcher([each]), names)))


def tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield (full name, tensor) of every floating parameter and buffer, once for each of its names."""
    named = (module.named_parameters(remove_duplicate=False), module.named_buffers(remove_duplicate=False))
    yield from ((name, tensor) for some in named for name, tensor in some if is_castable(tensor))


def _listed(module: nn.Module, dtype: torch.dtype) -> Iterator[str]:
    """Names that models inside `module` (itself or wrapped) list for float32."""
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
