"""Weights of a folder by the names and shapes of a Transformers model, where its folders have others.

Transformers writes the experts of a layer one by one, as ever, and since version 5 has them stacked in memory; some
models join query, key and value.  It knows how to get from one to the other, model by model, in a list of renamings
and conversions that are written for tensors.  Here that list is carried out on `zckpt.interchange.Patchwork`s, which
stand for tensors of the files: what comes out tells where each element of the module's tensors is, and each rank
reads its own.  So there is no list of models here, and none of operations.

Nothing is imported: a module can only be one of Transformers' if somebody has imported that.

Rejected: `from_pretrained`, then a split (every rank holds the model); converting the files once (disk for a copy).
"""

from __future__ import annotations

import copy
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, final

import attrs
import torch

if TYPE_CHECKING:
    from zckpt.interchange import Patchwork

__all__ = ["as_module_has_them"]

Shapes = Mapping[str, tuple[int, ...]]
Named = Mapping[str, Any]  # what zpartition.load_slices takes: tensors of files, by name


def as_module_has_them(weights: Named, model: Any, shapes: Shapes) -> Named:
    """`weights` by the names of `model`, if it is one of Transformers whose folders have others; else as they are.

    shapes: of the whole model's tensors, by all of their names; `model` itself may be on meta, or have parts alone.
    What fits no name of the model keeps that of the file, and what the model says it ignores is left out.

    Raises CheckpointInputError for a conversion that needs values, not places.
    """
    if not _is_transformers(model):
        return weights
    try:
        from transformers import core_model_loading as core
        from transformers.conversion_mapping import get_model_conversion_mapping
    except ImportError:  # version 4 has in memory what folders have
        return weights
    conversion = _Conversion.of(get_model_conversion_mapping(model), _Stand(model, shapes), core)
    found: dict[str, Any] = {}
    for name, tensor in conversion(weights):
        found.setdefault(name, tensor)  # of several that are renamed to one, the first, as Transformers does
    return found


def _is_transformers(module: Any) -> bool:
    modeling: Any = sys.modules.get("transformers.modeling_utils")
    return modeling is not None and isinstance(module, modeling.PreTrainedModel)


@final
class _Stand:
    """What a conversion asks of a model, told of the whole one: the module's parameters may be parts."""

    def __init__(self, model: Any, shapes: Shapes) -> None:
        self.config, self.base_model_prefix = model.config, model.base_model_prefix
        self.shapes = shapes
        self.ignored = [re.compile(each) for each in model._keys_to_ignore_on_load_unexpected or ()]

    def get_parameter(self, name: str) -> torch.Tensor:
        return torch.empty(self.shapes[name], device="meta")

    def ignores(self, name: str) -> bool:
        return name not in self.shapes and any(pattern.search(name) for pattern in self.ignored)


@final
@attrs.frozen(eq=False)
class _Conversion:
    """One model's renamings and conversions."""

    renamings: list[Any]
    converters: list[Any]
    model: _Stand
    core: Any  # transformers.core_model_loading

    @classmethod
    def of(cls, mapping: Iterable[Any], model: _Stand, core: Any) -> _Conversion:
        each = list(mapping)
        renamings = [one for one in each if isinstance(one, core.WeightRenaming)]
        return cls(renamings, [one for one in each if isinstance(one, core.WeightConverter)], model, core)

    def __call__(self, weights: Named) -> Iterator[tuple[str, Any]]:
        """(name, tensor), in the order of the names."""
        from zckpt.interchange import Patchwork

        by_pattern = {pattern: each for each in self.converters for pattern in each.source_patterns}
        collected: dict[str, Any] = {}
        for given in sorted(weights, key=self.core.dot_natural_key):
            name, pattern = self._renamed(given)
            if self.model.ignores(name):
                continue
            if pattern is None or name not in self.model.shapes:
                yield name if name in self.model.shapes else given, weights[given]
                continue
            converter = collected.get(name) or copy.deepcopy(by_pattern[pattern])
            converter.add_tensor(name, given, pattern, Patchwork.over(weights[given]))
            collected[name] = converter
        for name, converter in collected.items():
            yield from self._converted(name, converter)

    def _renamed(self, given: str) -> tuple[str, str | None]:
        """(name in the module, the pattern of the conversion that makes it)."""
        names, prefix = self.model.shapes, self.model.base_model_prefix
        name, pattern = self.core.rename_source_key(given, self.renamings, self.converters, prefix, names)
        if name not in names and given in names:
            return given, None
        return name, pattern

    def _converted(self, name: str, converter: Any) -> Iterator[tuple[str, Patchwork]]:
        from zckpt import CheckpointInputError
        from zckpt.interchange import Patchwork

        try:
            made = converter.convert(name, model=self.model, config=self.model.config)
            found = {each: value[0] if isinstance(value, list) else value for each, value in made.items()}
            if strays := [each for each, value in found.items() if not isinstance(value, Patchwork)]:
                raise TypeError(f"{strays[0]} is read whole")
        except Exception as error:  # of Transformers' code, which was written for tensors
            steps = ", ".join(type(each).__name__ for each in converter.operations)
            raise CheckpointInputError(
                f"{name} is made of {', '.join(converter.source_patterns)} by {steps}, which each rank cannot do for "
                f"its own part alone ({error}): fill the model with from_pretrained before initialize"
            ) from error
        yield from found.items()
