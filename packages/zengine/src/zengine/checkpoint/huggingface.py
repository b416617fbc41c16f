"""Hugging Face weights under the names and shapes of a Transformers model, if its folders have others.

Transformers writes the experts of a layer one by one, and since version 5 stacks them in memory; some models fuse
query, key and value.  For each model it has a list of renamings and conversions, written for tensors.  Here that list
runs on `zckpt.interchange.Patchwork` objects, which stand for tensors of the files: the result says where each
element of the module's tensors is stored, and each rank reads its own.  So no list of models or operations is needed
here.

Transformers is not imported: a module can be one of its models only if it already is.

Rejected: `from_pretrained` followed by a split (every rank holds the model); converting the files once (needs disk
space for a copy).
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

__all__ = ["to_module_names"]

Shapes = Mapping[str, tuple[int, ...]]
Named = Mapping[str, Any]  # tensors of files by name, for zpartition.load_slices


def to_module_names(weights: Named, model: Any, shapes: Shapes) -> Named:
    """Return `weights` under the names of `model`, converted if it is a Transformers model with other names in files.

    shapes: shapes of the whole model's tensors, by all their names; `model` may be on meta, or hold only parts.
    Tensors without a name in the model keep that of the file; tensors that the model ignores are omitted.

    Raises:
        CheckpointInputError: a conversion reads values.
    """
    if not _is_transformers(model):
        return weights
    try:
        from transformers import core_model_loading as core
        from transformers.conversion_mapping import get_model_conversion_mapping
    except ImportError:  # version 4 has equal names in files and in memory
        return weights
    conversion = _Conversion.of(get_model_conversion_mapping(model), _ModelView(model, shapes), core)
    found: dict[str, Any] = {}
    for name, tensor in conversion(weights):
        found.setdefault(name, tensor)  # the first of several with one name, as in Transformers
    return found


def _is_transformers(module: Any) -> bool:
    modeling: Any = sys.modules.get("transformers.modeling_utils")
    return modeling is not None and isinstance(module, modeling.PreTrainedModel)


@final
class _ModelView:
    """Whole model, as conversions query it; the module itself may hold only parts."""

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
    """Renamings and conversions of one model."""

    renamings: list[Any]
    converters: list[Any]
    model: _ModelView
    core: Any  # transformers.core_model_loading

    @classmethod
    def of(cls, mapping: Iterable[Any], model: _ModelView, core: Any) -> _Conversion:
        each = list(mapping)
        renamings = [one for one in each if isinstance(one, core.WeightRenaming)]
        return cls(renamings, [one for one in each if isinstance(one, core.WeightConverter)], model, core)

    def __call__(self, weights: Named) -> Iterator[tuple[str, Any]]:
        """Yield (name, tensor), in order of the names."""
        from zckpt.interchange import Patchwork

        by_pattern = {pattern: each for each in self.converters for pattern in each.source_patterns}
        collected: dict[str, Any] = {}
        for given in sorted(weights, key=self.core.dot_natural_key):
            name, pattern = self._rename(given)
            if self.model.ignores(name):
                continue
            if pattern is None or name not in self.model.shapes:
                yield name if name in self.model.shapes else given, weights[given]
                continue
            converter = collected.get(name) or copy.deepcopy(by_pattern[pattern])
            converter.add_tensor(name, given, pattern, Patchwork.over(weights[given]))
            collected[name] = converter
        for name, converter in collected.items():
            yield from self._convert(name, converter)

    def _rename(self, given: str) -> tuple[str, str | None]:
        """Return the name in the module and the pattern of the conversion that makes it."""
        names, prefix = self.model.shapes, self.model.base_model_prefix
        name, pattern = self.core.rename_source_key(given, self.renamings, self.converters, prefix, names)
        if name not in names and given in names:
            return given, None
        return name, pattern

    def _convert(self, name: str, converter: Any) -> Iterator[tuple[str, Patchwork]]:
        from zckpt import CheckpointInputError
        from zckpt.interchange import Patchwork

        try:
            made = converter.convert(name, model=self.model, config=self.model.config)
            found = {each: value[0] if isinstance(value, list) else value for each, value in made.items()}
            if strays := [each for each, value in found.items() if not isinstance(value, Patchwork)]:
                raise TypeError(f"{strays[0]} is read whole")
        except Exception as error:  # of Transformers' code, which expects tensors
            steps = ", ".join(type(each).__name__ for each in converter.operations)
            raise CheckpointInputError(
                f"{name} is made of {', '.join(converter.source_patterns)} by {steps}, which a rank cannot do for "
                f"its own part alone ({error}): load the model with from_pretrained before initialize"
            ) from error
        yield from found.items()
