"""Hugging Face's expert stacks, recognized by shape and signature.

Tensor plans leave these modules whole, and expert parallelism shards them (experts/huggingface.py).
"""

from __future__ import annotations

import inspect

from torch import nn

__all__ = ["ShardedHFExperts", "choice_of", "is_hf_experts", "is_sharded_hf_experts"]

# Arguments of forward after the tokens, by the names in use: chosen experts and their weights, (tokens, k).
_CHOICES = (("top_k_index", "top_k_weights"), ("router_indices", "routing_weights"))


class ShardedHFExperts(nn.Module):
    """Base of stacks that are sharded over expert-parallel ranks."""


def is_hf_experts(module: nn.Module) -> bool:
    """Check if `module` is an expert stack that can be sharded."""
    number = getattr(module, "num_experts", None)
    params = list(module.parameters())
    if isinstance(module, ShardedHFExperts) or not isinstance(number, int) or not params:
        return False
    if any(param.dim() < 2 or param.shape[0] != number for param in params):
        return False
    return choice_of(type(module)) in _CHOICES


def is_sharded_hf_experts(module: nn.Module) -> bool:
    """Check if `module` is such a stack and is sharded already."""
    return isinstance(module, ShardedHFExperts)


def choice_of(kind: type[nn.Module]) -> tuple[str, ...]:
    """Return the names of the second and third argument of its forward; empty if it is no expert stack."""
    _, tokens, *others = (*inspect.signature(kind.forward).parameters, "", "")
    return tuple(others[:2]) if tokens == "hidden_states" else ()
