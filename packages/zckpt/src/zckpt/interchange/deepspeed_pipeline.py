"""Pipelines in DeepSpeed's files: layers by number, stages by model-parallel rank.

DeepSpeed names a parameter by its layer (`3.weight`) or its tied module (`tied_modules.embed.weight`); zpartition's
PipelineModule has `layers.3.weight` and `tied.embed.weight`.  Masters and states come from the optimizer shards of
each stage, everything else from the files of the layers.

A layer's file does not say whether the layer is tied, and stage 0 saves states by number only.  Both follow from the
files: the weights of a tied layer equal the tied masters; the layers of a stage are consecutive, and their shapes
must be those of its optimizer's states.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations
from typing import Any

import torch
from torch import Tensor

from zckpt.errors import CheckpointInputError
from zckpt.interchange.deepspeed_files import DeepSpeedFiles, TensorParallelRank
from zckpt.interchange.deepspeed_tensors import (
    MASTER,
    StatePart,
    check_masters,
    check_replicas,
    optimizer_parts,
    state_of,
    state_shape,
    states_by_number,
    whole_part,
)

TIED = "tied_modules."
Shapes = dict[str, tuple[int, ...]]


def engine_name(name: str) -> str:
    """DeepSpeed's name of a pipeline's parameter -> zpartition's."""
    return re.sub(r"^tied_modules\.", "tied.", re.sub(r"^(\d+)\.", r"layers.\1.", name))


def deepspeed_name(name: str) -> str:
    """zpartition's name of a pipeline's parameter -> DeepSpeed's."""
    return re.sub(r"^tied\.", TIED, re.sub(r"^layers\.(\d+)\.", r"\1.", name))


def pipeline_parts(files: DeepSpeedFiles, tied_layers: Mapping[str, int]) -> list[list[StatePart]]:
    """Everything that each tensor-parallel rank saved, under DeepSpeed's names.

    tied_layers: key of a TiedLayerSpec -> number of its first layer; needed at stage 0 only.
    """
    stages, tensor = files.degrees
    found = []
    for rank in range(tensor):
        ranks = [files.tp_ranks[stage * tensor + rank] for stage in range(stages)]
        layers = {
            f"{layer}.{name}": value
            for layer, by_rank in files.layers.items()
            for name, value in by_rank[min(rank, len(by_rank) - 1)].items()
            if isinstance(value, Tensor)
        }
        found.append(_parts(ranks, layers, tied_layers))
    return found


def _parts(
    stages: Sequence[TensorParallelRank], layers: Mapping[str, Tensor], tied_layers: Mapping[str, int]
) -> list[StatePart]:
    if stages[0].shards:
        optimized = list(_unique(optimizer_parts(stage) for stage in stages))
        tied = _tied_by_value(optimized, layers)
    else:
        tied = {layer: f"{TIED}{key}" for key, layer in tied_layers.items()}
    named: dict[str, Tensor] = {}
    for name, value in layers.items():
        layer, _, rest = name.partition(".")
        named.setdefault(f"{tied[int(layer)]}.{rest}" if int(layer) in tied else name, value)
    if not stages[0].shards:
        optimized = list(_unique(_numbered_parts(stages, named)))
    masters = {part.name for part in optimized if part.key == MASTER}
    check_masters(optimized, named)
    return optimized + [whole_part(name, value) for name, value in named.items() if name not in masters]


def _unique(stages: Iterator[Iterator[StatePart]]) -> Iterator[StatePart]:
    """Parts of all stages; a tied weight, which several stages hold, is that of the first."""
    held: dict[tuple[str, str], list[StatePart]] = {}
    for stage in stages:
        mine: dict[tuple[str, str], list[StatePart]] = {}
        for part in stage:
            if (part.name, part.key) in held:
                check_replicas(part, held[part.name, part.key], "stages of the pipeline")
                continue
            mine.setdefault((part.name, part.key), []).append(part)
            yield part
        held.update(mine)


def _tied_by_value(optimized: Sequence[StatePart], layers: Mapping[str, Tensor]) -> dict[int, str]:
    """Layer -> prefix of its tied module, for the layers whose weights are not among the masters themselves."""
    masters: dict[str, list[StatePart]] = {}
    for part in optimized:
        if part.key == MASTER:
            masters.setdefault(part.name, []).append(part)
    prefixes: dict[str, set[str]] = {}
    for name in masters:
        if name.startswith(TIED):
            key, _, rest = name.removeprefix(TIED).partition(".")
            prefixes.setdefault(TIED + key, set()).add(rest)
    names: dict[int, set[str]] = {}
    for name in layers:
        layer, _, rest = name.partition(".")
        names.setdefault(int(layer), set()).add(rest)
    found: dict[int, str] = {}
    for number, mine in names.items():
        if any(f"{number}.{rest}" in masters for rest in mine):
            continue
        for prefix, rests in prefixes.items():
            if rests <= mine and all(_rounds(masters[f"{prefix}.{r}"], layers[f"{number}.{r}"]) for r in rests):
                found[number] = prefix
    return found


def _rounds(master: Sequence[StatePart], weight: Tensor) -> bool:
    flat = weight.reshape(-1)
    return all(
        part.shape == tuple(weight.shape) and torch.equal(part.tensor.to(weight.dtype), flat[slice(*part.span)])
        for part in master
    )


# -- stage 0 -------------------------------------------------------------------------------------


def _numbered_parts(
    stages: Sequence[TensorParallelRank], named: Mapping[str, Tensor]
) -> Iterator[Iterator[StatePart]]:
    """States of each stage: its layers are those whose shapes are the shapes of its states."""
    buffers = {str(name) for stage in stages for name in stage.model.get("buffer_names") or ()}
    shapes = {name: tuple(value.shape) for name, value in named.items() if name not in buffers}
    saved = [stage.model.get("optimizer") for stage in stages]
    if not all(isinstance(each, dict) and isinstance(each.get("state"), dict) for each in saved):
        return
    ways = list(_assignments([_shapes_of(each) for each in saved], shapes, _layers_of(shapes)))
    if len(ways) != 1:
        raise CheckpointInputError(
            f"stage 0 saves the optimizer's state of a pipeline by number, and {len(ways)} assignments of layers to "
            "stages have the shapes of the states. A tied layer must be named: tied_layers={'embed': 0}, key of its "
            "TiedLayerSpec and number of its first layer (--tied-layer embed=0). Otherwise save at ZeRO stage 1"
        )
    for each, mine in zip(saved, ways[0]):
        assert isinstance(each, dict)
        groups = each["param_groups"]
        yield (part for group in groups for part in states_by_number(each, group["params"], mine))


def _shapes_of(saved: Any) -> tuple[int, Counter[tuple[int, ...]]]:
    """Number of parameters, and shapes of those that have a state."""
    states = [state_of(saved, number) for group in saved.get("param_groups") or () for number in group["params"]]
    return len(states), Counter(state_shape(state) for state in states if state)


def _layers_of(shapes: Shapes) -> list[int]:
    return sorted({int(name.partition(".")[0]) for name in shapes if not name.startswith(TIED)})


def _assignments(
    wanted: Sequence[tuple[int, Counter[tuple[int, ...]]]], shapes: Shapes, left: list[int]
) -> Iterator[list[Shapes]]:
    """Ways to give each stage some tied modules and the next layers, so that their shapes are those wanted."""
    if not wanted:
        if not left:
            yield []
        return
    keys = sorted({name.removeprefix(TIED).partition(".")[0] for name in shapes if name.startswith(TIED)})
    for count in range(len(left) + 1):
        for size in range(len(keys) + 1):
            for tied in combinations(keys, size):
                prefixes = (*(f"{TIED}{key}." for key in tied), *(f"{layer}." for layer in left[:count]))
                ordered = sorted(shapes.items(), key=lambda item: not item[0].startswith(TIED))
                mine = {name: shape for name, shape in ordered if name.startswith(prefixes)} if prefixes else {}
                if len(mine) == wanted[0][0] and Counter(mine.values()) >= wanted[0][1]:
                    yield from ([mine, *rest] for rest in _assignments(wanted[1:], shapes, left[count:]))
