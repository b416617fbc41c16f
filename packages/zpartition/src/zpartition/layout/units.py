"""Units: which parameters are gathered together at stage 3, and when; a pure plan over a module tree.

Problem.  Gathering each parameter by itself costs a message each; gathering the model at once costs its memory.  A
grouping in between must follow the calls of the model, because a call is when a module's weights are needed.

Design.  A *unit* is a module: everything below it is unsharded when it is called and resharded when it returns.  From
the root down, the first modules that are small enough (or declared leaves) become units.  Parameters of a larger
module that are not below a unit belong to that module, whose call encloses the others.  A parameter of several units
(tied weights) belongs to the innermost module that encloses them all.  Modules that are never called (ModuleList and
similar) are no units.  A module with a child named "experts" is a leaf: the experts that are called depend on data,
and ranks that gather different ones would deadlock.

Small parameters (norms, biases) are not sharded: gathering them costs more than they weigh.

Rejected.  Asking the user to wrap modules (plain modules have no wrappers, and users forget them); a unit for each
parameter (as DeepSpeed, with bookkeeping per parameter in every forward and backward).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from torch import nn

from zpartition.layout.expert_lists import ShardedExpertList
from zpartition.layout.layout import mean_numel
from zpartition.layout.model_parallel import addresses_of, expert_shards_of
from zpartition.layout.policy import ZeroPolicy

__all__ = ["encloses", "matches", "nested_numel", "persistent_names", "plan_units"]

_NEVER_CALLED = (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)
_DATA_DEPENDENT = "experts"  # the name of a child that makes its parent a leaf
_DERIVED_MIN_NUMEL, _DERIVED_MAX_NUMEL, _DERIVED_UNITS = 1 << 16, 1 << 27, 8


def plan_units(module: nn.Module, policy: ZeroPolicy) -> dict[str, str | None]:
    """Return the unit of each parameter of `module`, by name: a module path ("": the root), or None: not sharded.

    Raises:
        ValueError: a leaf of the policy matches no module.
    """
    params = dict(module.named_parameters())
    _check_leaves(module, policy.leaves)
    limit = policy.unit_numel or derive_unit_numel(sum(param.numel() for param in params.values()))
    unit_of = _units_of_modules(module, limit, policy.leaves)
    holders = _holders(module)
    persistent = persistent_names(module, policy)
    return {
        name: None if name in persistent else _common(unit_of, {unit_of[path] for path in holders[id(param)]})
        for name, param in params.items()
    }


def encloses(outer: str, inner: str) -> bool:
    """Return whether the unit `outer` is `inner`, or its call encloses that of `inner`."""
    return outer in ("", inner) or inner.startswith(f"{outer}.")


def nested_numel(units: Mapping[str, int]) -> int:
    """Return the most elements of units whose calls enclose each other; `units`: elements by name."""
    chains = (sum(numel for outer, numel in units.items() if encloses(outer, name)) for name in units)
    return max(chains, default=0)


def derive_unit_numel(total_numel: int) -> int:
    """Return the largest unit for a model of `total_numel` parameters: an eighth, within bounds.

    Below 2^16 elements latency dominates; above 2^27 the buffer costs too much memory.
    """
    return min(max(total_numel // _DERIVED_UNITS, _DERIVED_MIN_NUMEL), _DERIVED_MAX_NUMEL)


def matches(pattern: str, name: str) -> bool:
    """Return whether `pattern` matches all of the module path `name`.

    `*` matches one component or a part of it, `**` any number of components.
    """
    parts = re.split(r"(\*\*|\*)", pattern)
    expression = "".join({"**": ".*", "*": "[^.]*"}.get(part, re.escape(part)) for part in parts)
    return re.fullmatch(expression, name) is not None


def _units_of_modules(root: nn.Module, limit: int, leaves: Iterable[str]) -> dict[str, str]:
    """Return the unit path of every module path (each path of a shared module)."""
    unit_of: dict[str, str] = {}
    wanted = frozenset(leaves)

    def visit(path: str, module: nn.Module, enclosing: str) -> None:
        called = path == "" or not isinstance(module, _NEVER_CALLED)
        own = path if called else enclosing
        if called and (_is_leaf(path, module, wanted) or (path and _numel(module) <= limit)):
            for below, _ in module.named_modules(remove_duplicate=False):
                unit_of[_join(path, below)] = path
            return
        unit_of[path] = own
        for name, child in module.named_children():
            visit(_join(path, name), child, own)

    visit("", root, "")
    for path, module in root.named_modules(remove_duplicate=False):  # second paths of shared children
        if path not in unit_of:
            unit_of[path] = _common(unit_of, {unit_of[p] for p in unit_of if root.get_submodule(p) is module} or {""})
    return unit_of


def _is_leaf(path: str, module: nn.Module, wanted: frozenset[str]) -> bool:
    has_experts = any(name == _DATA_DEPENDENT for name, _ in module.named_children())
    has_experts = has_experts or isinstance(module, ShardedExpertList)
    return not any(module.children()) or has_experts or any(_names(leaf, path, module) for leaf in wanted)


def _names(leaf: str, path: str, module: nn.Module) -> bool:
    kind = type(module)
    if leaf.startswith("*"):
        return path.endswith(leaf[1:])
    return leaf in (path, kind.__name__, f"{kind.__module__}.{kind.__qualname__}")


def _numel(module: nn.Module) -> int:
    return sum(param.numel() for param in module.parameters())


def _holders(module: nn.Module) -> dict[int, set[str]]:
    """Return id of each parameter -> paths of the modules that hold it directly."""
    found: dict[int, set[str]] = {}
    for path, child in module.named_modules(remove_duplicate=False):
        for param in child._parameters.values():
            if param is not None:
                found.setdefault(id(param), set()).add(path)
    return found


def _common(unit_of: Mapping[str, str], units: set[str]) -> str:
    """Return the innermost called module that encloses all `units`."""
    if len(units) == 1:
        return next(iter(units))
    split = [unit.split(".") if unit else [] for unit in units]
    shared: list[str] = []
    for parts in zip(*split):
        if len(set(parts)) > 1:
            break
        shared.append(parts[0])
    path = ".".join(shared)
    return unit_of.get(path, path)


def _mean_numels(module: nn.Module) -> dict[str, int]:
    """Return the elements of each parameter, by name, in the mean over expert-parallel ranks, where they differ."""
    addresses, experts = addresses_of(module), expert_shards_of(module)
    return {
        name: mean_numel(param.numel(), addresses[name], experts[name].size if name in experts else 1)
        for name, param in module.named_parameters()
    }


def persistent_names(module: nn.Module, policy: ZeroPolicy) -> frozenset[str]:
    """Return the parameters that are not sharded: small ones, in order, while their sum allows it."""
    chosen, total = set(), 0
    for name, numel in _mean_numels(module).items():
        if numel < policy.persist_numel and total + numel <= policy.persist_total_numel:
            chosen.add(name)
            total += numel
    return frozenset(chosen)


def _check_leaves(module: nn.Module, leaves: Iterable[str]) -> None:
    modules = list(module.named_modules())
    for leaf in leaves:
        if not any(_names(leaf, path, child) for path, child in modules):
            raise ValueError(
                f'leaves contains {leaf!r}, but no module has this class or path ("*end" matches the end of a path). '
                f"Top-level modules: {', '.join(name for name, _ in module.named_children())}."
            )


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path and name else path or name
