"""stub"""
from __future__ import annotations
from collections.abc import Iterable, Mapping
from typing import Any
from torch import Tensor
from .shard import ShardLike, whole
Tensors = Any
def shards_of(tensors): 
    return [whole(n,t) for n,t in tensors.items()] if isinstance(tensors, Mapping) else list(tensors)
def described(objects, tensors): return objects
