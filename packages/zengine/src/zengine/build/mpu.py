"""A model that Megatron-style code has split itself, which `initialize(mpu=...)` takes over.

The mpu gives the groups (`build/groups.py`), and marks on parameters say how the model is split
(`zpartition.tensor.marked`).  From then on it is treated like a model that the config has split: gradients are
reduced over the mpu's data-parallel group, norms and overflow checks cover all tensor ranks, and checkpoints have
global tensors.  Messages inside the layers, and random numbers, stay the model's own.

A parameter without a mark is whole on every tensor rank, counts once in the norm, and is saved once.  So its values
must be equal on these ranks.  DeepSpeed neither compares nor broadcasts them; here different values raise an error
that names the parameter: each rank has drawn it by its own random numbers, or its mark was forgotten.

Rejected: broadcasting from the first tensor rank, which would destroy a slice whose mark was forgotten.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import attrs
from torch import nn

import zcomm
import zpartition
from zengine.config.plan.parallel import TENSOR_KEYS
from zengine.engine.digest import fingerprint
from zengine.imports import is_imported

if TYPE_CHECKING:
    from zengine.build.groups import ProcessLayout
    from zengine.config import Plan

__all__ = ["check_copies", "groups_for_model"]

log = logging.getLogger("zengine")

_NAMED = 10  # tensors that an error lists


def groups_for_model(model: nn.Module, plan: Plan, layout: ProcessLayout) -> zcomm.Groups:
    """Return the groups of the plan's degrees; adopt the model's split over the tensor ranks of an mpu.

    A collective of these ranks, if there is an mpu.

    Raises:
        ValueError: the model has no marks, is not split by zpartition, and the config does not ask to split it; marks
            do not fit; or experts are marked whose ranks the mpu does not give.
    """
    groups = layout.make(plan.parallel.degrees)
    if plan.parallel.independent_replicas:
        groups = attrs.evolve(groups, independent=True)
    if layout.source == "mpu=":
        _check_experts(model, plan)
        _adopt(model, plan, groups)
    return groups


def _adopt(model: nn.Module, plan: Plan, groups: zcomm.Groups) -> None:
    num_ranks = plan.parallel.degrees.tensor
    if num_ranks == 1 or zpartition.model_parallel_group_of(model).size > 1:
        return
    from zpartition.tensor import adopt_marked_split

    is_asked = any(plan.origins.get(key, "default") != "default" for key in TENSOR_KEYS)
    has_experts = is_imported("zpartition.experts") and _has_expert_layers(model)
    if adopt_marked_split(model, groups.tensor(), accepts_copies=has_experts and not is_asked):
        _warn_sequence_parallel(model)
    elif not is_asked:
        raise ValueError(
            f"mpu= has {num_ranks} tensor ranks, and no parameter of {type(model).__name__} is marked as split. If "
            f'the model is whole, write "tensor_parallel": {{"autotp_size": {num_ranks}}} to split it. If its own '
            "layers hold slices, mark their parameters as Megatron does: param.tensor_model_parallel = True, and "
            "param.partition_dim = the sliced dimension."
        )


def _has_expert_layers(model: nn.Module) -> bool:
    """Return True for a model with MoE layers: its other layers may be few, and whole on the tensor ranks."""
    from zpartition.experts import MoE

    return any(isinstance(child, MoE) for child in model.modules())


def check_copies(partition: zpartition.Partition, groups: zcomm.Groups) -> None:
    """Check that tensors which tensor ranks hold whole are equal on them.  A collective of the tensor ranks.

    Compares weights (samples of large ones) after the broadcast over the data-parallel ranks.

    Raises:
        ValueError: on every tensor rank; names the tensors.
    """
    mine = {
        f"{shard.name} {shard.span}": int(fingerprint(shard.tensor, shard.name))
        for shard in partition.shards()
        if shard.box == tuple((0, size) for size in shard.global_shape)
    }
    everyone = zcomm.all_gather_object(mine, groups.tensor())
    keys = [key for key, own in everyone[0].items() if any(rank.get(key, own) != own for rank in everyone)]
    names = list(dict.fromkeys(key.rpartition(" (")[0] for key in keys))
    if not names:
        return
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    are_buffers = {name for name, _ in partition.module.named_buffers()}.issuperset(names)
    mark = "register_buffer(..., persistent=False)" if are_buffers else "param.tensor_model_parallel = True"
    raise ValueError(
        f"tensor ranks {list(groups.ranks('tensor'))} have different values of {', '.join(names[:_NAMED])}{more}, "
        "which is whole on each of them unless it is marked: the norm counts it once, and a checkpoint has one copy. "
        f"If it is a slice, mark it ({mark}); otherwise initialize it equally on these ranks, by the same seed or a "
        "broadcast."
    )


def _check_experts(model: nn.Module, plan: Plan) -> None:
    """Raise ValueError for parameters that DeepSpeed reduces over ranks which the mpu does not give."""
    if plan.parallel.gradient_ranks == 1:
        return
    ours = zpartition.expert_shards_of(model)
    marked = [n for n, p in model.named_parameters() if not getattr(p, "allreduce", True) and n not in ours]
    if marked:
        raise ValueError(
            f"{marked[0]} ({len(marked)} in all) is marked allreduce=False, like experts that only some "
            "data-parallel ranks hold, and mpu= gives no groups of such ranks. Use deepspeed.moe.layer.MoE (or "
            "zpartition.experts.MoE), which need no mark, or drop the mark from parameters that all ranks hold."
        )


def _warn_sequence_parallel(model: nn.Module) -> None:
    marked = [name for name, param in model.named_parameters() if getattr(param, "sequence_parallel", False)]
    if marked and zcomm.detect().rank == 0:
        log.warning(
            "%s (%d in all) is marked sequence_parallel: as in DeepSpeed the mark has no effect, and the model's own "
            "code sums these gradients over the tensor ranks",
            marked[0],
            len(marked),
        )
