"""Lists of experts: an `nn.ModuleList` of equal modules inside a MoE layer, as Transformers had before version 5.

Expert parallelism shards them (experts/module_list.py): every rank keeps all names, and the weights of its own
experts; those of the others are empty on it.
"""

from __future__ import annotations

import re

from torch import nn

__all__ = ["ShardedExpertList", "is_expert_list", "is_sharded_list"]

_NAME = re.compile(r"experts?(_list)?$")
_ROUTERS = ("gate", "router", "wg", "gating")  # names of children of a module that has experts


class ShardedExpertList(nn.Module):
    """Base of layers whose list of experts is sharded over expert-parallel ranks."""

    shared_experts: tuple[nn.ModuleList]  # the list; in a tuple, since it is another child already


def is_expert_list(name: str, child: nn.Module, parent: nn.Module) -> bool:
    """Check if `child`, called `name` in `parent`, is a list of experts that can be sharded.

    That is a list of several modules of one class, called "experts" or beside a router.
    """
    if not isinstance(child, nn.ModuleList) or len(child) < 2 or isinstance(parent, ShardedExpertList):
        return False
    has_router = any(router in dict(parent.named_children()) for router in _ROUTERS)
    is_called = type(parent) is not nn.ModuleList and not isinstance(parent, nn.ModuleDict)
    kinds = {type(expert) for expert in child}
    has_weights = all(any(True for _ in expert.parameters()) for expert in child)
    return is_called and bool(has_router or _NAME.search(name)) and len(kinds) == 1 and has_weights


def is_sharded_list(child: nn.Module, parent: nn.Module) -> bool:
    """Check if `child` is the list of experts of `parent` and is sharded already."""
    return isinstance(parent, ShardedExpertList) and child is parent.shared_experts[0]
