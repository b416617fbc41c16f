"""Which ranks share a model, as the inference config says it: in sections, and by DeepSpeed's older names.

    {"tensor_parallel": {"tp_size": 2}, "moe": {"ep_size": 2}}          {"mp_size": 2, "ep_size": 2}

`read_sharing` tells all that is wrong with the words; numbers of ranks are looked at where ranks are (splitting.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import attrs
from torch import nn

from zengine.config import Problem
from zengine.config.grammar.suggest import nearest
from zpartition.tensor import TensorPlan

__all__ = ["KEYS", "NOBODY", "Sharing", "Wanted", "read_sharing"]

KEYS = (
    *("tensor_parallel", "tp", "mp_size", "mpu", "injection_policy"),
    *("moe", "ep_size", "ep_group", "ep_mp_group", "moe_experts", "moe_type"),
)

Policy = Mapping[type[nn.Module], tuple[str, ...]]  # class of blocks -> names, in them, of layers split by rows


@attrs.frozen
class Wanted:
    """Over which ranks something is shared out."""

    size: int = 0  # of a run of ranks; 0: not said
    group: Any = None  # a ProcessGroup that was given
    mpu: Any = None  # an object that was given, which knows the group
    key: str = ""  # of the config, that said so


NOBODY = Wanted()


@attrs.frozen(kw_only=True)
class Sharing:
    """What the config says about ranks."""

    tensor: Wanted = NOBODY
    experts: Wanted = NOBODY
    plan: TensorPlan | Mapping[str, Any] | None = None  # ours, or DeepSpeed's partition_config
    policy: Policy = attrs.field(factory=dict)  # DeepSpeed's injection_policy
    grain: int = 1  # columns without heads stay together by this many
    expert_counts: tuple[int, ...] = ()  # that the layers have, for who says so

    @property
    def is_idle(self) -> bool:
        """Return whether each rank has a whole model, or comes with its part."""
        wanted = (self.tensor, self.experts)
        return all(each.size <= 1 and each.group is None and each.mpu is None for each in wanted)


def read_sharing(given: Mapping[str, Any]) -> Sharing | list[Problem]:
    """Of a whole inference config: the keys in KEYS."""
    problems = [problem for key in KEYS if key in given for problem in _problems(key, given[key])]
    if problems:
        return problems
    tensor, moe = _tensor(given), _experts(given)
    sizes = _said(given, ("tensor_parallel", "tp"), "mp_size", tensor, "tp_size")
    expert_sizes = _said(given, ("moe",), "ep_size", moe, "ep_size")
    problems = [*_clash(sizes), *_clash(expert_sizes)]
    problems += [problem for said in _twice(given, tensor, moe) for problem in _clash(said)]
    if problems:
        return problems
    return Sharing(
        tensor=Wanted(
            max(sizes.values(), default=0),
            tensor.get("tp_group"),
            tensor.get("mpu") or given.get("mpu"),
            _first(sizes),
        ),
        experts=Wanted(
            max(expert_sizes.values(), default=0),
            _one(moe.get("ep_group") or given.get("ep_group")),
            None,
            _first(expert_sizes),
        ),
        plan=tensor.get("partition_config"),
        policy=_policy(given.get("injection_policy")),
        grain=tensor.get("tp_grain_size") or 1,
        expert_counts=tuple(_counts(moe.get("moe_experts", moe.get("num_experts", given.get("moe_experts"))))),
    )


def _tensor(given: Mapping[str, Any]) -> Mapping[str, Any]:
    """The section; one that is a number says the size alone."""
    section: Any = next((given[key] for key in ("tensor_parallel", "tp") if given.get(key)), {})
    section = section if isinstance(section, Mapping) else {"tp_size": section}
    return section if section.get("enabled", True) else {}


def _experts(given: Mapping[str, Any]) -> Mapping[str, Any]:
    section = given.get("moe")
    return section if isinstance(section, Mapping) and section.get("enabled", True) else {}


def _said(
    given: Mapping[str, Any], homes: tuple[str, ...], old: str, section: Mapping[str, Any], name: str
) -> dict[str, int]:
    """Sizes, by the key that says so."""
    home = next((key for key in homes if given.get(key)), homes[0])
    found = {f"{home}.{name}": section[name]} if section.get(name) else {}
    return {**found, **({old: given[old]} if given.get(old) else {})}


def _twice(
    given: Mapping[str, Any], tensor: Mapping[str, Any], moe: Mapping[str, Any]
) -> Iterator[Mapping[str, Any]]:
    """Return what has several places, of which one alone is read: values by key, where they are given."""
    groups = {"tensor_parallel.tp_group": tensor.get("tp_group"), "tensor_parallel.mpu": tensor.get("mpu")}
    experts = {"moe.moe_experts": moe.get("moe_experts"), "moe.num_experts": moe.get("num_experts")}
    plans = {"tensor_parallel.partition_config": tensor.get("partition_config")}
    for said in (
        {key: given.get(key) for key in ("tensor_parallel", "tp")},
        {**groups, "mpu": given.get("mpu")},
        {**plans, "injection_policy": _policy(given.get("injection_policy"))},
        {"moe.ep_group": _one(moe.get("ep_group")), "ep_group": _one(given.get("ep_group"))},
        {key: _counts(value) for key, value in {**experts, "moe_experts": given.get("moe_experts")}.items()},
    ):
        yield {key: value for key, value in said.items() if value}


def _clash(said: Mapping[str, Any]) -> Iterator[Problem]:
    values = list(said.values())
    if any(value != values[0] for value in values):
        are_sizes = all(isinstance(value, int) for value in values)
        told = " and ".join(f"{key} = {value}" if are_sizes else key for key, value in said.items())
        reason = f"{told} differ" if are_sizes else f"{told} are both given"
        yield Problem(key=next(iter(said)), reason=reason, suggestion="Keep one of them.")


def _first(sizes: Mapping[str, int]) -> str:
    return next(iter(sizes), "")


def _one(group: Any) -> Any:
    """DeepSpeed keeps a group for each number of experts."""
    return next(iter(group.values()), None) if isinstance(group, Mapping) else group


def _counts(value: Any) -> list[int]:
    counts = value if isinstance(value, (list, tuple)) else [value or 1]
    return [count for count in counts if count != 1]  # DeepSpeed's default is [1], for none


def _policy(value: Any) -> Policy:
    """Classes and names of layers; DeepSpeed's policies for kernels say nothing here."""
    found = {kind: (names,) if isinstance(names, str) else names for kind, names in (value or {}).items()}
    return {kind: tuple(names) for kind, names in found.items() if _is_names(kind, names)}


def _is_names(kind: Any, names: Any) -> bool:
    is_list = isinstance(names, (list, tuple)) and all(isinstance(name, str) for name in names)
    return isinstance(kind, type) and bool(names) and is_list


def _problems(key: str, value: Any) -> Iterator[Problem]:
    """Return what is wrong with one key of KEYS, and with the keys in it."""
    if key in _SECTIONS and isinstance(value, Mapping):
        checks = _SECTIONS[key]
        for name, inner in value.items():
            full = f"{key}.{name}"
            if name not in checks:
                close = nearest(name, list(checks))
                hint = f"Did you mean {close[0]}?" if close else "Remove it."
                yield Problem(key=full, reason=f"is no key of {key}", suggestion=hint)
            else:
                yield from _wrong(full, inner, *checks[name])
    else:
        yield from _wrong(key, value, *_PLAIN[key])


def _wrong(key: str, value: Any, is_good: Callable[[Any], bool], allowed: str) -> Iterator[Problem]:
    if value is not None and not is_good(value):
        yield Problem(key=key, given=value, reason=f"must be {allowed}")


Check = tuple[Callable[[Any], bool], str]


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


_COUNT: Check = (_is_count, "a whole number of 1 or more")
_TRUTH: Check = (lambda value: isinstance(value, bool), "true or false")
_ANY: Check = (lambda value: True, "")
_COUNTS: Check = (
    lambda value: _is_count(value) or (isinstance(value, (list, tuple)) and all(map(_is_count, value))),
    "a whole number of 1 or more, or a list of those",
)
_KIND: Check = (lambda value: value in ("standard", "residual"), '"standard" or "residual"; layers say it themselves')
_NONE: Check = (lambda value: not value, "left out: tensor ranks have whole experts here")
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
