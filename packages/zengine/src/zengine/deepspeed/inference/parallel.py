"""Parallelism of an inference config: the sections `tensor_parallel` and `moe`, with DeepSpeed's older names.

    {"tensor_parallel": {"tp_size": 2}, "moe": {"ep_size": 2}}          {"mp_size": 2, "ep_size": 2}

Sizes are compared with the ranks in splitting.py.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar, final

import attrs
from torch import nn

from zengine.config import Problem
from zengine.config.grammar.kinds import ANYTHING, TRUTH, Mismatch, ValueKind, choice, whole
from zengine.config.grammar.table import Key, Row, Section, Support, renamed
from zengine.deepspeed.section_model import SectionModel
from zpartition.tensor import TensorPlan

__all__ = [
    "MOE",
    "NO_GROUP",
    "OLD_NAMES",
    "TENSOR",
    "DeepSpeedMoEConfig",
    "DeepSpeedTPConfig",
    "ParallelGroup",
    "Parallelism",
    "conflicts",
    "honoured",
    "read_parallelism",
]

Policy = Mapping[type[nn.Module], tuple[str, ...]]  # class of blocks -> names of their layers that are split by rows
honoured = functools.partial(Key, support=Support.HONOURED)


@attrs.frozen
class ParallelGroup:
    """Ranks that a part of the model is split over, as given."""

    size: int = 0  # consecutive ranks; 0: not given
    group: Any = None  # ProcessGroup, if given
    mpu: Any = None  # object that knows the group, if given
    key: str = ""  # config key of the size


NO_GROUP = ParallelGroup()


@attrs.frozen(kw_only=True)
class Parallelism:
    """Tensor and expert parallelism of a config."""

    tensor: ParallelGroup = NO_GROUP
    experts: ParallelGroup = NO_GROUP
    plan: TensorPlan | Mapping[str, Any] | None = None  # ours, or DeepSpeed's partition_config
    policy: Policy = attrs.field(factory=dict)  # DeepSpeed's injection_policy
    grain: int = 1  # columns without heads are split in multiples of it
    expert_counts: tuple[int, ...] = ()  # expected number of experts per layer, if given

    @property
    def is_single_rank(self) -> bool:
        """True if no size above 1, group or mpu is given."""
        wanted = (self.tensor, self.experts)
        return all(each.size <= 1 and each.group is None and each.mpu is None for each in wanted)


# -- rows of the two sections --------------------------------------------------------------------


def _read_plan(value: object) -> object:
    if isinstance(value, (Mapping, TensorPlan)):
        return value
    raise Mismatch('must be a mapping with "layer_specs", or a zpartition.tensor.TensorPlan')


def _read_counts(value: object) -> list[int]:
    counts = value if isinstance(value, (list, tuple)) else [value]
    return [whole(1).read(count) for count in counts]


_COUNTS = ValueKind("a whole number >= 1, or a list of them", _read_counts)
TENSOR: dict[str, Row] = {
    "enabled": honoured(kind=TRUTH, default=True),
    "tp_size": honoured(kind=whole(1), default=1),
    "tp_grain_size": honoured(kind=whole(1), default=1),  # DeepSpeed's default is 64
    "mpu": honoured(),
    "tp_group": honoured(),
    "partition_config": honoured(kind=ValueKind("a plan", _read_plan)),
}
MOE: dict[str, Row] = {
    "enabled": honoured(kind=TRUTH, default=True),
    "ep_size": honoured(kind=whole(1), default=1),
    "moe_experts": honoured(kind=_COUNTS, default=[1]),
    "num_experts": renamed(_COUNTS, "moe_experts"),
    "type": honoured(kind=choice("standard", "residual"), default="standard"),  # layers define it themselves
    "ep_group": honoured(),
    "expert_group": renamed(ANYTHING, "ep_group"),
    "ep_mp_group": Key(support=Support.REJECTED, why="must be removed: tensor ranks have whole experts"),
}
OLD_NAMES: dict[str, Row] = {  # beside the sections
    "tp": renamed(ANYTHING, "tensor_parallel", what="another name"),
    "mp_size": renamed(whole(1), "tensor_parallel", "tp_size"),
    "mpu": renamed(ANYTHING, "tensor_parallel", "mpu"),
    "ep_size": renamed(whole(1), "moe", "ep_size"),
    "moe_experts": renamed(_COUNTS, "moe", "moe_experts"),
    "moe_type": renamed(ANYTHING, "moe", "type"),
    **dict.fromkeys(("ep_group", "expert_group"), renamed(ANYTHING, "moe", "ep_group")),
    **dict.fromkeys(("ep_mp_group", "expert_mp_group"), renamed(ANYTHING, "moe", "ep_mp_group")),
}


@final
class DeepSpeedTPConfig(SectionModel):
    """Section `tensor_parallel`."""

    rows = Section(keys=TENSOR)
    title: ClassVar[str] = "tensor_parallel"
    enabled: bool
    tp_size: int


@final
class DeepSpeedMoEConfig(SectionModel):
    """Section `moe`."""

    rows = Section(keys=MOE)
    title: ClassVar[str] = "moe"
    enabled: bool
    ep_size: int
    moe_experts: list[int]


# -- reading -------------------------------------------------------------------------------------


def read_parallelism(tensor: DeepSpeedTPConfig, moe: DeepSpeedMoEConfig, policy: Any = None) -> Parallelism:
    """Return the parallelism of the two sections and of an injection_policy; a section that is off is empty."""
    given, experts = (each.given() if each.enabled else {} for each in (tensor, moe))
    return Parallelism(
        tensor=_group(given, "tensor_parallel.tp_size", given.get("tp_group"), given.get("mpu")),
        experts=_group(experts, "moe.ep_size", _first_group(experts.get("ep_group"))),
        plan=given.get("partition_config"),
        policy=_policy(policy),
        grain=given.get("tp_grain_size", 1),
        expert_counts=tuple(count for count in experts.get("moe_experts", ()) if count != 1),  # [1]: no experts
    )


def _group(given: Mapping[str, Any], key: str, group: Any, mpu: Any = None) -> ParallelGroup:
    size = given.get(key.partition(".")[2], 0)
    return ParallelGroup(size, group, mpu, key if size else "")


def conflicts(tensor: DeepSpeedTPConfig, policy: Any = None) -> Iterator[Problem]:
    """Yield a problem for each setting that is given by two keys."""
    group, plan = "tensor_parallel.tp_group", "tensor_parallel.partition_config"
    for key, value, other, other_value in (
        (group, tensor.tp_group, "mpu", tensor.mpu),
        (plan, tensor.partition_config, "injection_policy", _policy(policy) or None),
    ):
        if value is not None and other_value is not None:
            yield Problem(key=key, reason=f"{key} and {other} are both given", suggestion="Keep one of them.")


def _first_group(group: Any) -> Any:
    """Return the group; DeepSpeed keeps one for each number of experts, in a mapping."""
    return next(iter(group.values()), None) if isinstance(group, Mapping) else group


def _policy(value: Any) -> Policy:
    """Return classes and names of layers; ignore DeepSpeed's kernel policies."""
    found = {kind: (names,) if isinstance(names, str) else names for kind, names in (value or {}).items()}
    return {kind: tuple(names) for kind, names in found.items() if _is_names(kind, names)}


def _is_names(kind: Any, names: Any) -> bool:
    is_list = isinstance(names, (list, tuple)) and all(isinstance(name, str) for name in names)
    return isinstance(kind, type) and bool(names) and is_list
