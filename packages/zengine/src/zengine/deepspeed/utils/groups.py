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
from zengine.deepspeed.accelerator.real_accelerator import get_accelerator
from zengine.deepspeed.comm.world import (
    get_all_ranks_from_group,
    get_rank,
    get_world_group,
    get_world_size,
    new_group,
)
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
    expert_parallel_size_: int,
    mp_size: int | None = None,
    pp_size: int | None = None,
    mp_mode: str = "tp",
    use_data_before_expert_parallel_: bool = False,
    folding_spec: Any = None,
) -> None:
    """Set groups until there is an engine, as `initialize(ep_size=...)` does.

    Raises ValueError for other ranks than consecutive ones.
    """
    if use_data_before_expert_parallel_ or (mp_size or 1) > 1 or (pp_size or 1) > 1 or folding_spec is not None:
        raise ValueError(
            "_create_expert_and_data_parallel() shards experts over consecutive ranks: pass expert_parallel_size_ "
            'alone, and other parallelism in the config ("tensor_parallel", "pipeline")'
        )
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


def _ensure_divisibility(numerator: int, denominator: int) -> None:
    """Raise AssertionError (DeepSpeed's) unless `denominator` divides `numerator`."""
    assert numerator % denominator == 0, f"{numerator} is not divisible by {denominator}"


def _get_expert_parallel_ranks(
    world_size: int,
    tensor_parallel_size_: int,
    expert_parallel_size_: int,
    pipeline_parallel_size_: int = 1,
    use_data_before_expert_parallel_: bool = False,
) -> tuple[list[list[int]], list[list[int]]]:
    """Return the ranks of the expert-parallel groups, and of those with the same experts.

    Tensor ranks are neighbours.  use_data_before_expert_parallel_: ranks with the same experts are nearer than those
    that share an expert-parallel group.  Raises AssertionError (DeepSpeed's) for sizes that do not divide.
    """
    _ensure_divisibility(world_size, tensor_parallel_size_ * pipeline_parallel_size_)
    stage_size = world_size // pipeline_parallel_size_
    replicas = stage_size // tensor_parallel_size_
    _ensure_divisibility(replicas, expert_parallel_size_)
    copies = replicas // expert_parallel_size_
    expert_groups: list[list[int]] = []
    data_groups: list[list[int]] = []
    for start in range(0, world_size, stage_size):
        for tensor_rank in range(tensor_parallel_size_):
            data = list(range(start + tensor_rank, start + stage_size, tensor_parallel_size_))
            if use_data_before_expert_parallel_:
                members = [data[first::copies] for first in range(copies)]
            else:
                members = [data[i : i + expert_parallel_size_] for i in range(0, replicas, expert_parallel_size_)]
            expert_groups += members
            data_groups += [list(ranks) for ranks in zip(*members)]
    return expert_groups, data_groups


def _create_model_parallel(model_parallel_size_: int) -> tuple[Any, Any]:
    """Return new groups of this rank: data-parallel, and of `model_parallel_size_` neighbours.

    All ranks must call.
    """
    size = min(model_parallel_size_, get_world_size())
    _ensure_divisibility(get_world_size(), size)
    found: Any = zcomm.Groups.of(zcomm.Degrees(tensor=size), get_world_size(), get_rank())
    return found.data(), found.tensor()


def _clone_world_group() -> Any:
    """Return the group of all ranks."""
    return get_world_group()


def _get_data_parallel_group_ranks() -> list[int]:
    """Return the global ranks of the data-parallel group."""
    return get_all_ranks_from_group(get_data_parallel_group())


def _get_broadcast_src_rank() -> int:
    """Return the global rank of the first rank of the group that sums gradients."""
    return _first(_sequence_data_parallel_group())


def _get_expert_broadcast_src_rank(group_name: str = "") -> int:
    """Return the global rank of the first rank that holds the same experts."""
    return _first(_get_expert_data_parallel_group(group_name))


def _get_expert_parallel_src_rank(group_name: str = "") -> int:
    """Return the global rank of the first rank of the expert-parallel group."""
    return _first(_get_expert_parallel_group(group_name))


def _get_expert_parallel_group_ranks(group_name: str = "") -> list[int]:
    """Return the global ranks of the expert-parallel group."""
    return get_all_ranks_from_group(_get_expert_parallel_group(group_name))


def _get_expert_data_parallel_group_ranks(group_name: str = "") -> list[int]:
    """Return the global ranks that hold the same experts."""
    return get_all_ranks_from_group(_get_expert_data_parallel_group(group_name))


def _get_max_expert_size() -> int:
    """Return the expert-parallel size; an engine has one."""
    return _get_expert_parallel_world_size()


def _get_max_expert_size_name() -> str:
    """Return DeepSpeed's name of the expert-parallel group."""
    return f"ep_size_{_get_max_expert_size()}"


def _get_local_all_to_all_group() -> dict[str, Any]:
    """Return new groups for an all-to-all in two steps: "local_H" of each host, "global_D" of each device index.

    All ranks must call.  On one host only "local_0".
    """
    world, devices = get_world_size(), min(get_accelerator().device_count(), get_world_size())
    _ensure_divisibility(world, devices)
    hosts = world // devices
    found = {f"local_{host}": list(range(host * devices, (host + 1) * devices)) for host in range(hosts)}
    if hosts > 1:
        found |= {f"global_{index}": list(range(index, world, devices)) for index in range(devices)}
    return {name: new_group(ranks) for name, ranks in found.items()}


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
