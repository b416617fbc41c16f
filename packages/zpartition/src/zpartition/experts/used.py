"""How much of its experts a model uses for one token: what counts in arithmetic, where parameters count in memory."""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn

from zpartition.experts.bank import Experts
from zpartition.experts.foreign import is_dealt_foreign, is_foreign, number_of
from zpartition.experts.layer import MoE

__all__ = ["used_shares"]

_NAMES = ("top_k", "num_experts_per_tok", "k")  # of attributes that say how many experts a token goes to


def used_shares(model: nn.Module) -> Mapping[int, float]:
    """k / experts of every parameter (by id) of a stack of experts; what nobody says counts whole."""
    shares: dict[int, float] = {}
    for path, stack in model.named_modules():
        if not (isinstance(stack, Experts) or is_foreign(stack) or is_dealt_foreign(stack)):
            continue
        parent = model.get_submodule(path.rpartition(".")[0])
        k = parent.gate.rule.k if isinstance(parent, MoE) else _said(parent, stack)
        number = number_of(stack)
        shares.update({id(param): min(1.0, k / number) if k else 1.0 for param in stack.parameters()})
    return shares


def _said(parent: nn.Module, stack: nn.Module) -> int:
    """Experts of a token, as a block of another library says it; 0 if it does not."""
    for module in (parent, *parent.children(), stack):
        for name in _NAMES:
            found = getattr(module, name, None)
            if isinstance(found, int) and not isinstance(found, bool) and found > 0:
                return found
    return 0
