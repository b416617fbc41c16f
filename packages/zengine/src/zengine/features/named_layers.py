"""Layers of a model by the name of their list, for features that act on layers.

In a plain module the name is the path of a module list (`transformer.h`); in a pipeline it is the class of the
layers, which are numbered over all stages.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import attrs
from torch import nn

import zcomm
from zengine.imports import is_pipeline

if TYPE_CHECKING:
    from zpartition import ModelParallelGroup
    from zpartition.pipeline import PipelineModule


@attrs.frozen(kw_only=True, eq=False)
class NamedLayers:
    """Layers of one list."""

    path: str  # as the user gave it
    count: int  # layers of the whole model
    own: Mapping[int, nn.Module]  # number -> layer, of this rank

    def absent(self, stages: ModelParallelGroup, wanted: Sequence[int] | None = None) -> list[int]:
        """Return the numbers of `wanted` (default: all) that are a module on no stage; a collective in a pipeline."""
        numbers = set(range(self.count)) if wanted is None else set(wanted)
        present = sorted(numbers & set(self.own))
        everywhere = [present] if stages.size == 1 else zcomm.all_gather_object(present, stages.group)
        return sorted(numbers - {number for some in everywhere for number in some})


def find_named_layers(module: nn.Module, path: str, key: str) -> NamedLayers:
    """Return the layers of the list at `path`; for a pipeline, of the class of that name.

    key: the key of the config that holds `path`, for messages.

    Raises:
        ValueError: there is no such list (or class), or it is empty.
    """
    if is_pipeline(module):
        return _find_in_pipeline(module, path, key)
    lists = {
        name: part
        for name, part in module.named_modules()
        if name and isinstance(part, (nn.ModuleList, nn.Sequential)) and len(part)
    }
    if path in lists:
        return NamedLayers(path=path, count=len(lists[path]), own=dict(enumerate(lists[path])))
    ending = [name for name in lists if name.endswith(f".{path}")]
    near = ending or difflib.get_close_matches(path, lists, n=1)
    hint = f"; did you mean {near[0]!r}?" if near else "."
    lengths = ", ".join(f"{name} ({len(part)})" for name, part in lists.items())
    lengths = lengths or "none. Put the layers in an nn.ModuleList that is an attribute of the model, and name that"
    raise ValueError(
        f"{key} = {path!r} is not a list of layers of {type(module).__name__}{hint} Its lists (nn.ModuleList, "
        f"nn.Sequential), with their lengths: {lengths}"
    )


def _find_in_pipeline(module: PipelineModule, name: str, key: str) -> NamedLayers:
    places = [index for index, each in enumerate(module.class_names) if each == name]
    if not places:
        raise ValueError(
            f"{key} = {name!r} is not a class of this pipeline's layers; give one of "
            f"{', '.join(dict.fromkeys(module.class_names))}"
        )
    return NamedLayers(path=name, count=len(places), own=own_layers(module, places))


def own_layers(module: PipelineModule, places: Sequence[int]) -> dict[int, nn.Module]:
    """Return the layers at those places of a pipeline that are modules of this rank and used once, by number."""
    own = [layer for layer in module.own_layers() if not any(layer is tied for tied in module.owned.values())]
    calls = {number: module.calls.get(index) for number, index in enumerate(places)}
    return {number: call for number, call in calls.items() if isinstance(call, nn.Module) and call in own}
