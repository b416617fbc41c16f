"""`deepspeed.utils.groups`: process groups of each kind of parallelism.

DeepSpeed keeps one set of groups per process.  Here each engine has its own (`engine.parts.groups`, a
`zcomm.Groups`).  These functions read the engine that `deepspeed.initialize` made last, while it is alive; before
that, the `mpu` passed to `initialize`; otherwise all ranks are data-parallel replicas.  With several engines, call
`use(engine)` or read the engine's groups.

A kind of parallelism that is off has a group of this rank alone, never None, which torch takes for all ranks.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import zcomm
from zengine.deepspeed.comm.world import get_rank, get_world_size
from zpartition.experts import MoE

if TYPE_CHECKING:
    from zengine.engine.engine import Engine

__all__ = [
    "get_data_parallel_group",
    "get_data_parallel_rank",
    "get_data_parallel_world_size",
    "get_model_parallel_group",
    "get_model_parallel_rank",
    "get_model_parallel_world_size",
    "get_sequence_parallel_group",
    "get_sequence_parallel_rank",
    "get_sequence_parallel_world_size",
    "get_tensor_model_parallel_group",
    "get_tensor_model_parallel_rank",
    "get_tensor_model_parallel_src_rank",
    "get_tensor_model_parallel_world_size",
    "initialize",
    "use",
]

mpu: Any = None  # of the last `initialize`; DeepSpeed has this name, too
_expert = 1  # expert-parallel size of the last `initialize`


def _no_engine() -> Engine | None:
    return None


_latest_engine: Callable[[], Engine | None] = _no_engine  # the engine whose groups are returned, while it is alive


def initialize(ep_size: int = 1, mpu: Any = None) -> None:
    """Set groups until there is an engine.  Raises ValueError if `ep_size` does not divide the world size.

    An engine reads ep_size from the layers, not from here.
    """
    zcomm.Degrees(expert=ep_size).resolved(get_world_size())
    globals().update(mpu=mpu, _expert=ep_size)


def use(engine: Engine) -> None:
    """Return the groups of `engine` from now on, while it is alive."""
    globals()["_latest_engine"] = weakref.ref(engine)


def _groups() -> Any:
    """Return a `zcomm.Groups`, or the mpu."""
    engine = _latest_engine()
    if engine is not None:
        return engine.parts.groups
    return zcomm.Groups.of(zcomm.Degrees(expert=_expert), get_world_size(), get_rank()) if mpu is None else mpu


def _size(kind: str) -> int:
    groups = _groups()
    named = getattr(groups, f"get_{kind}_world_size", None)
    if named is not None:
        return int(named())
    group = getattr(groups, f"get_{kind}_group", None)
    return 1 if group is None else get_world_size(group())


def _rank(kind: str) -> int:
    groups = _groups()
    named = getattr(groups, f"get_{kind}_rank", None)
    if named is not None:
        return int(named())
    group = getattr(groups, f"get_{kind}_group", None)
    return 0 if group is None else get_rank(group())


def _group(kind: str) -> Any:
    found = getattr(_groups(), f"get_{kind}_group", None)
    return zcomm.Groups.of(zcomm.Degrees(), get_world_size(), get_rank()).tensor() if found is None else found()


def get_data_parallel_group() -> Any:
    """Return the group of the ranks that see different samples."""
    return _group("data_parallel")


def get_data_parallel_world_size() -> int:
    """Return the size of that group."""
    return _size("data_parallel")


def get_data_parallel_rank() -> int:
    """Return this rank's index in that group."""
    return _rank("data_parallel")


def get_model_parallel_group() -> Any:
    """Return the group of the ranks that split the same layers."""
    return _group("model_parallel")


def get_model_parallel_world_size() -> int:
    """Return the size of that group."""
    return _size("model_parallel")


def get_model_parallel_rank() -> int:
    """Return this rank's index in that group."""
    return _rank("model_parallel")


def get_tensor_model_parallel_src_rank() -> int:
    """Return the global rank of the first rank of that group."""
    return get_rank() if get_model_parallel_world_size() == 1 else int(_first(get_model_parallel_group()))


def get_sequence_parallel_group() -> Any:
    """Return the group of the ranks that split the same samples."""
    return _group("sequence_parallel")


def get_sequence_parallel_world_size() -> int:
    """Return the size of that group."""
    return _size("sequence_parallel")


def get_sequence_parallel_rank() -> int:
    """Return this rank's index in that group."""
    return _rank("sequence_parallel")


def _sequence_data_parallel_group() -> Any:
    """Return the group of the ranks that sum gradients."""
    return _group("sequence_data_parallel" if hasattr(_groups(), "get_sequence_data_parallel_group") else _DATA)


def _sequence_data_parallel_world_size() -> int:
    return get_data_parallel_world_size() * get_sequence_parallel_world_size()


def _sequence_data_parallel_rank() -> int:
    return get_rank(_sequence_data_parallel_group())


def _get_expert_parallel_group(group_name: str = "") -> Any:
    """Return the group of the ranks that shard the experts; `group_name` (DeepSpeed's "ep_size_N") is ignored."""
    return _group("expert_parallel")


def _create_expert_and_data_parallel(
    expert_parallel_size_: int, use_data_before_expert_parallel_: bool = False
) -> None:
    """Set groups until there is an engine, as `initialize(ep_size=...)` does."""
    initialize(ep_size=expert_parallel_size_, mpu=mpu)


def _get_max_expert_parallel_group() -> Any:
    """Return the largest group of ranks that shard experts."""
    return _get_expert_parallel_group()


def _get_expert_parallel_world_size(group_name: str = "") -> int:
    return _size("expert_parallel")


def _get_expert_parallel_rank(group_name: str = "") -> int:
    return _rank("expert_parallel")


def _get_expert_data_parallel_group(group_name: str = "") -> Any:
    """Return the group of the ranks that hold the same experts."""
    return _group("expert_data_parallel")


def _get_expert_data_parallel_world_size(group_name: str = "") -> int:
    return _size("expert_data_parallel")


def _get_expert_data_parallel_rank(group_name: str = "") -> int:
    return _rank("expert_data_parallel")


def _get_expert_model_parallel_world_size() -> int:
    """Return the number of tensor ranks that split each expert of the latest engine's MoE layers; 1 if whole."""
    engine = _latest_engine()
    layers = () if engine is None else engine.module.modules()
    return max((layer.experts.mp_group.size for layer in layers if isinstance(layer, MoE)), default=1)


def _first(group: Any) -> int:
    from torch.distributed import get_global_rank

    return get_global_rank(group, 0)


_DATA = "data_parallel"
get_tensor_model_parallel_group = get_model_parallel_group
get_tensor_model_parallel_world_size = get_model_parallel_world_size
get_tensor_model_parallel_rank = get_model_parallel_rank

# DeepSpeed's users and Transformers call the underscored names.
_get_data_parallel_group = get_data_parallel_group
_get_data_parallel_world_size = get_data_parallel_world_size
_get_data_parallel_rank = get_data_parallel_rank
_get_model_parallel_group = get_model_parallel_group
_get_model_parallel_world_size = get_model_parallel_world_size
_get_model_parallel_rank = get_model_parallel_rank
_get_sequence_parallel_group = get_sequence_parallel_group
_get_sequence_parallel_world_size = get_sequence_parallel_world_size
_get_sequence_parallel_rank = get_sequence_parallel_rank
_get_sequence_data_parallel_group = _sequence_data_parallel_group
_get_sequence_data_parallel_world_size = _sequence_data_parallel_world_size
_get_sequence_data_parallel_rank = _sequence_data_parallel_rank
