"""`parallelize`: split the layers of a model over tensor ranks by a plan, in place."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

import zcomm
from zpartition.deferred.init import recording_if_deferred, recordings_of, share_random_numbers, wire_device
from zpartition.layout.model_parallel import ModelParallelGroup
from zpartition.ownership import reclaim_weights
from zpartition.tensor.heads import set_local_counts
from zpartition.tensor.layer_split import LayerSplit, linear_kind
from zpartition.tensor.layers import LayerPlacement, gather_output, scatter_output, sum_gradients
from zpartition.tensor.parallel_region import ParallelRegion
from zpartition.tensor.plan import TensorPlan, resolve
from zpartition.tensor.quantized import cut_weight, quantized_parts
from zpartition.tensor.random_state import agree_on_random_numbers
from zpartition.tensor.styles import Column, Gather, NormShard, Row, Scatter, Vocabulary
from zpartition.tensor.vocabulary import vocabulary_class
from zpartition.tensors.whole import part_of

__all__ = ["apply_splits", "enclosing_block", "parallelize"]


def parallelize(model: nn.Module, plan: TensorPlan, group: ProcessGroup | None = None) -> list[LayerSplit]:
    """Split `model` over the ranks of `group` by `plan`, in place; returns the split of each module.

    Every rank of the group calls it with a whole model; the weights of rank 0 are used.  Afterwards ranks that get
    the same inputs compute the same outputs together, forward and backward.  Parameters keep their names and
    identities, and `zpartition.shard` and its checkpoints know their addresses in the whole.  Existing gradients are
    dropped.  All ranks continue with rank 0's random state: dropout of whole activations is equal on all ranks, and
    between column and row layers each rank draws its own (random_state.py).  A model built inside `Init` is split
    before `shard` materializes it.

    Raises:
        ValueError: the plan does not fit the model (see `resolve`), before anything is sent or changed; or the model
            is partitioned, split or under construction.
    """
    reclaim_weights(model)
    mp_group = ModelParallelGroup.of(group)
    splits = resolve(plan, model, mp_group.size, mp_group.rank)
    _broadcast_weights(model, group)
    for recorded in recordings_of(model):
        share_random_numbers(recorded, group)
    agree_on_random_numbers(mp_group, _device(model, group))
    with recording_if_deferred(model):
        apply_splits(model, splits, ParallelRegion(mp_group, plan.sequence_dim))
    return splits


def apply_splits(model: nn.Module, splits: Sequence[LayerSplit], parallel_region: ParallelRegion) -> None:
    """Apply `splits` without communication; `parallel_region` leads to the ranks with the other parts."""
    modules = dict(model.named_modules())
    done: set[int] = set()
    for split in splits:
        _shard_parameters(modules[split.module], split, done)
        _convert(modules[split.module], split, parallel_region)
    _localize_head_counts(modules, splits)
    enclosing = _enclosing_modules(splits) if parallel_region.sequence_dim < 0 else [""]
    for name in enclosing if parallel_region.mp_group.size > 1 else ():
        parallel_region.random_state.restore_after(modules[name])


def _enclosing_modules(splits: Sequence[LayerSplit]) -> list[str]:
    """Return the nearest module around each column layer and its row layer: in it activations are split and joined.

    The model itself is one, for columns without a row layer and tokens that are not joined.
    """
    rows = [split.module for split in splits if isinstance(split.style, Row)]
    found = {""}
    found.update(enclosing_block(split.module, rows) for split in splits if isinstance(split.style, Column))
    return sorted(found)


def enclosing_block(column: str, rows: Sequence[str]) -> str:
    """Return the path of the nearest module around a column layer that has one of the row layers, too."""
    path = column
    while path and not any(row.startswith(f"{path}.") for row in rows):
        path = path.rpartition(".")[0]
    return path


def _device(model: nn.Module, group: ProcessGroup | None) -> torch.device:
    return next((param.device for param in model.parameters() if not param.is_meta), wire_device(group))


def _broadcast_weights(model: nn.Module, group: ProcessGroup | None) -> None:
    """Broadcast weights, also quantized ones, and buffers of rank 0."""
    with torch.no_grad():
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            if not tensor.is_meta:
                tensor.data = tensor.data.contiguous()
                zcomm.broadcast(tensor.data, group, source=0, label=name)
        for name, part in quantized_parts(model):
            zcomm.broadcast(part, group, source=0, label=name)


def _shard_parameters(module: nn.Module, split: LayerSplit, done: set[int]) -> None:
    for key, address in split.addresses.items():
        param = getattr(module, key)
        if not isinstance(param, Tensor):
            setattr(module, key, cut_weight(param, address))
        elif id(param) not in done:  # tied weights appear twice
            done.add(id(param))
            param.grad = None
            param.data = part_of(param.data, address)


def _convert(module: nn.Module, split: LayerSplit, parallel_region: ParallelRegion) -> None:
    """Set the module's new class and its local sizes."""
    style, layer = split.style, _untyped(module)
    if isinstance(style, NormShard):
        sum_gradients(module, parallel_region, style.gathers)
    elif isinstance(style, Scatter):
        scatter_output(module, parallel_region)
    elif isinstance(style, Gather):
        gather_output(module, parallel_region)
    elif isinstance(style, Vocabulary):
        kind_in_parts = vocabulary_class(module)
        assert kind_in_parts is not None
        _set_class(
            module, kind_in_parts, LayerPlacement(parallel_region, split.addresses, split.sizes, style.scatters)
        )
        layer.num_embeddings = layer.weight.shape[0]
    elif isinstance(style, Column | Row):
        kind = linear_kind(module)
        assert kind is not None
        is_joined = style.gathers if isinstance(style, Column) else style.takes_part
        own = {key: at for key, at in split.addresses.items() if isinstance(getattr(module, key), Tensor)}
        placement = LayerPlacement(parallel_region, own, split.sizes, is_joined, split.output_sizes)
        _set_class(module, kind.class_of(style), placement)
        name, side = kind.local_size(style)
        setattr(layer, name, kind.shape(module)[side])


def _set_class(module: nn.Module, kind: type[nn.Module], placement: LayerPlacement) -> None:
    module.__class__ = kind
    _untyped(module).placement = placement


def _untyped(module: nn.Module) -> Any:
    """Return the module, to set plain attributes."""
    return module


def _localize_head_counts(modules: dict[str, nn.Module], splits: Sequence[LayerSplit]) -> None:
    """Set head counts to this rank's in modules that hold column layers with split outputs."""
    by_parent: dict[str, list[LayerSplit]] = {}
    for split in splits:
        if isinstance(split.style, Column) and not split.style.gathers:
            by_parent.setdefault(split.module.rpartition(".")[0], []).append(split)
    for parent, columns in by_parent.items():
        widths = [size for split in columns for size in (sum(split.sizes), *getattr(split.style, "blocks", ()))]
        set_local_counts(modules[parent], columns[0].num_units, columns[0].own_units, widths)
