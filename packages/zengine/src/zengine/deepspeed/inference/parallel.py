"""Parallelism of an inference config: in sections, and by DeepSpeed's older names.

    {"tensor_parallel": {"tp_size": 2}, "moe": {"ep_size": 2}}          {"mp_size": 2, "ep_size": 2}

`read_parallelism` checks the config alone; splitting.py checks numbers of ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import attrs
from torch import nn

from zengine.config import Problem
from zengine.config.grammar.suggest import nearest
from zpartition.tensor import TensorPlan

__all__ = ["KEYS", "NO_GROUP", "ParallelGroup", "Parallelism", "read_parallelism"]

KEYS = (
    *("tensor_parallel", "tp", "mp_size", "mpu", "injection_policy"),
    *("moe", "ep_size", "ep_group", "ep_mp_group", "moe_experts", "moe_type"),
)

Policy = Mapping[type[nn.Module], tuple[str, ...]]  # class of blocks -> names of their layers that are split by rows


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


def read_parallelism(given: Mapping[str, Any]) -> Parallelism | list[Problem]:
    """Read the keys in KEYS of a whole inference config; return all problems if there are any."""
    problems = [problem for key in KEYS if key in given for problem in _problems(key, given[key])]
    if problems:
        return problems
    tensor, moe = _tensor(given), _experts(given)
    sizes = _sizes_by_key(given, ("tensor_parallel", "tp"), "mp_size", tensor, "tp_size")
    expert_sizes = _sizes_by_key(given, ("moe",), "ep_size", moe, "ep_size")
    problems = [*_check_equal(sizes), *_check_equal(expert_sizes)]
    problems += [problem for values in _alternatives(given, tensor, moe) for problem in _check_equal(values)]
    if problems:
        return problems
    return Parallelism(
        tensor=ParallelGroup(
            max(sizes.values(), default=0),
            tensor.get("tp_group"),
            tensor.get("mpu") or given.get("mpu"),
            _first(sizes),
        ),
        experts=ParallelGroup(
            max(expert_sizes.values(), default=0),
            _first_group(moe.get("ep_group") or given.get("ep_group")),
            None,
            _first(expert_sizes),
        ),
        plan=tensor.get("partition_config"),
        policy=_policy(given.get("injection_policy")),
        grain=tensor.get("tp_grain_size") or 1,
        expert_counts=tuple(_counts(moe.get("moe_experts", moe.get("num_experts", given.get("moe_experts"))))),
    )


def _tensor(given: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the section; a number is its size."""
    section: Any = next((given[key] for key in ("tensor_parallel", "tp") if given.get(key)), {})
    section = section if isinstance(section, Mapping) else {"tp_size": section}
    return section if section.get("enabled", True) else {}


def _experts(given: Mapping[str, Any]) -> Mapping[str, Any]:
    section = given.get("moe")
    return section if isinstance(section, Mapping) and section.get("enabled", True) else {}


def _sizes_by_key(
    given: Mapping[str, Any], homes: tuple[str, ...], old: str, section: Mapping[str, Any], name: str
) -> dict[str, int]:
    """Return the sizes, by their keys."""
    home = next((key for key in homes if given.get(key)), homes[0])
    found = {f"{home}.{name}": section[name]} if section.get(name) else {}
    return {**found, **({old: given[old]} if given.get(old) else {})}


def _alternatives(
    given: Mapping[str, Any], tensor: Mapping[str, Any], moe: Mapping[str, Any]
) -> Iterator[Mapping[str, Any]]:
    """Yield the settings that have several keys, of which one may be given: the given values by key."""
    groups = {"tensor_parallel.tp_group": tensor.get("tp_group"), "tensor_parallel.mpu": tensor.get("mpu")}
    experts = {"moe.moe_experts": moe.get("moe_experts"), "moe.num_experts": moe.get("num_experts")}
    plans = {"tensor_parallel.partition_config": tensor.get("partition_config")}
    for values in (
        {key: given.get(key) for key in ("tensor_parallel", "tp")},
        {**groups, "mpu": given.get("mpu")},
        {**plans, "injection_policy": _policy(given.get("injection_policy"))},
        {"moe.ep_group": _first_group(moe.get("ep_group")), "ep_group": _first_group(given.get("ep_group"))},
        {key: _counts(value) for key, value in {**experts, "moe_experts": given.get("moe_experts")}.items()},
    ):
        yield {key: value for key, value in values.items() if value}


def _check_equal(values: Mapping[str, Any]) -> Iterator[Problem]:
    """Yield a problem if the values, by key, differ."""
    found = list(values.values())
    if any(value != found[0] for value in found):
        are_sizes = all(isinstance(value, int) for value in found)
        names = " and ".join(f"{key} = {value}" if are_sizes else key for key, value in values.items())
        reason = f"{names} differ" if are_sizes else f"{names} are both given"
        yield Problem(key=next(iter(values)), reason=reason, suggestion="Keep one of them.")


def _first(sizes: Mapping[str, int]) -> str:
    return next(iter(sizes), "")


def _first_group(group: Any) -> Any:
    """Return the group; DeepSpeed keeps one for each number of experts, in a mapping."""
    return next(iter(group.values()), None) if isinstance(group, Mapping) else group


def _counts(value: Any) -> list[int]:
    counts = value if isinstance(value, (list, tuple)) else [value or 1]
    return [count for count in counts if count != 1]  # DeepSpeed's default is [1]: no experts


def _policy(value: Any) -> Policy:
    """Return classes and names of layers; ignore DeepSpeed's kernel policies."""
    found = {kind: (names,) if isinstance(names, str) else names for kind, names in (value or {}).items()}
    return {kind: tuple(names) for kind, names in found.items() if _is_names(kind, names)}


def _is_names(kind: Any, names: Any) -> bool:
    is_list = isinstance(names, (list, tuple)) and all(isinstance(name, str) for name in names)
    return isinstance(kind, type) and bool(names) and is_list


def _problems(key: str, value: Any) -> Iterator[Problem]:
    """Yield the problems of one key of KEYS and of the keys in it."""
    if key in _SECTIONS and isinstance(value, Mapping):
        checks = _SECTIONS[key]
        for name, inner in value.items():
            full = f"{key}.{name}"
            if name not in checks:
                close = nearest(name, list(checks))
                hint = f"Did you mean {close[0]}?" if close else "Remove it."
                yield Problem(key=full, reason=f"is not a key of {key}", suggestion=hint)
            else:
                yield from _check_value(full, inner, *checks[name])
    else:
        yield from _check_value(key, value, *_PLAIN[key])


def _check_value(key: str, value: Any, is_good: Callable[[Any], bool], allowed: str) -> Iterator[Problem]:
    if value is not None and not is_good(value):
        yield Problem(key=key, given=value, reason=f"must be {allowed}")


Check = tuple[Callable[[Any], bool], str]


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


_COUNT: Check = (_is_count, "an integer >= 1")
_TRUTH: Check = (lambda value: isinstance(value, bool), "true or false")
_ANY: Check = (lambda value: True, "")
_COUNTS: Check = (
    lambda value: _is_count(value) or (isinstance(value, (list, tuple)) and all(map(_is_count, value))),
    "an integer >= 1, or a list of them",
)
_KIND: Check = (
    lambda value: value in ("standard", "residual"),
    '"standard" or "residual"; layers define it themselves',
)
_NONE: Check = (lambda value: not value, "removed: tensor ranks have whole experts")
_PLAN: Check = (
    lambda value: isinstance(value, (Mapping, TensorPlan)),
    'a mapping with "layer_specs", or a zpartition.tensor.TensorPlan',
)
_POLICY: Check = (
    lambda value: isinstance(value, Mapping),
    "a mapping from classes of blocks to names of layers in them",
)
_TENSOR: dict[str, Check] = {
    "enabled": _TRUTH,
    "tp_size": _COUNT,
    "tp_grain_size": _COUNT,
    "mpu": _ANY,
    "tp_group": _ANY,
    "partition_config": _PLAN,
}
_MOE: dict[str, Check] = {
    "enabled": _TRUTH,
    "ep_size": _COUNT,
    "moe_experts": _COUNTS,
    "num_experts": _COUNTS,
    "type": _KIND,
    "ep_group": _ANY,
    "ep_mp_group": _NONE,
}
_SECTIONS: dict[str, dict[str, Check]] = {"tensor_parallel": _TENSOR, "tp": _TENSOR, "moe": _MOE}
_PLAIN: dict[str, Check] = {
    "tensor_parallel": _COUNT,
    "tp": _COUNT,
    "mp_size": _COUNT,
    "mpu": _ANY,
    "injection_policy": _POLICY,
    "moe": _TRUTH,
    "ep_size": _COUNT,
    "ep_group": _ANY,
    "ep_mp_group": _NONE,
    "moe_experts": _COUNTS,
    "moe_type": _KIND,
}
