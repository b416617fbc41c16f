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
from zengine.deepspeed.utils.bwc import bwc_tensor_model_parallel_world_size
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
    "set_tensor_model_parallel_rank",
    "set_tensor_model_parallel_world_size",
    "use",
]

mpu: Any = None  # of the last `initialize`; DeepSpeed has this name, too
mesh_device: Any = None  # DeviceMesh of the last `initialize`, likewise
_degrees = zcomm.Degrees()  # set until there is an engine
_tensor_position: dict[str, int] = {}  # "world_size" and "rank" that the caller set
_zero_param_size = 0  # of `_create_zero_param_parallel_group`; 0: not called


def _no_engine() -> Engine | None:
    return None


_latest_engine: Callable[[], Engine | None] = _no_engine  # the engine whose groups are returned, while it is alive


def initialize(ep_size: int = 1, mpu: Any = None) -> None:
    """Set groups until there is an engine.  Raises ValueError if `ep_size` does not divide the world size.

    An engine reads ep_size from the layers, not from here.
    """
    _set_degrees(zcomm.Degrees(expert=ep_size), mpu)


def _set_degrees(degrees: zcomm.Degrees, unit: Any) -> None:
    """Set groups until there is an engine.  Raises ValueError for sizes that do not multiply to the world size."""
    degrees.resolved(get_world_size())
    globals().update(mpu=unit, _degrees=degrees)


def use(engine: Engine) -> None:
    """Return the groups of `engine` from now on, while it is alive."""
    globals()["_latest_engine"] = weakref.ref(engine)


def _groups() -> Any:
    """Return a `zcomm.Groups`, or the mpu."""
    engine = _latest_engine()
    if engine is not None:
        return engine.parts.groups
    return _set_groups() if mpu is None else mpu


def _set_groups() -> zcomm.Groups:
    """Return the groups of the degrees that were set."""
    return zcomm.Groups.of(_degrees, get_world_size(), get_rank())


def _size(kind: str) -> int:
    groups = _groups()
    named = getattr(groups, f"get_{kind}_world_size", None)
    if named is not None:
        return int(named())
    return get_world_size(_group(kind))


def _rank(kind: str) -> int:
    groups = _groups()
    named = getattr(groups, f"get_{kind}_rank", None)
    if named is not None:
        return int(named())
    return get_rank(_group(kind))


def _group(kind: str) -> Any:
    getter = f"get_{kind}_group"
    found = getattr(_groups(), getter, None) or getattr(_set_groups(), getter)
    return found()


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
    return _tensor_position["world_size"] if "world_size" in _tensor_position else _size("model_parallel")


def get_model_parallel_rank() -> int:
    """Return this rank's index in that group."""
    return _tensor_position["rank"] if "rank" in _tensor_position else _rank("model_parallel")


def set_tensor_model_parallel_world_size(world_size: int | None) -> None:
    """Make the getters return `world_size`; None: the size of the group again."""
    _set_position("world_size", world_size)


def set_tensor_model_parallel_rank(rank: int | None) -> None:
    """Make the getters return `rank`; None: the index in the group again."""
    _set_position("rank", rank)


def _set_position(name: str, value: int | None) -> None:
    _tensor_position.pop(name, None)
    if value is not None:
        _tensor_position[name] = value


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


def _create_expert_data_and_model_parallel(
    expert_parallel_size_: int, mpu: Any, use_data_before_expert_parallel_: bool = False
) -> None:
    """Set groups of experts beside the tensor ranks of `mpu`, until there is an engine.

    Raises ValueError for other ranks than consecutive ones, AssertionError (DeepSpeed's) for wrong sizes.
    """
    if use_data_before_expert_parallel_:
        raise ValueError("experts are sharded over consecutive ranks: leave use_data_before_expert_parallel_ out")
    tensor = bwc_tensor_model_parallel_world_size(mpu)
    _ensure_divisibility(get_world_size(), tensor)
    _ensure_divisibility(get_world_size() // tensor, expert_parallel_size_)
    _set_degrees(zcomm.Degrees(expert=expert_parallel_size_, tensor=tensor), mpu)


def _init_tp_mesh_device(
    tensor_model_parallel_size: int = 1, data_parallel_size: int | None = None
) -> tuple[Any, Any] | None:
    """Do as `_init_tp_groups_with_new_group`, unless tensor groups are set already: then return None."""
    is_set = _degrees.tensor > 1
    return None if is_set else _init_tp_groups_with_new_group(tensor_model_parallel_size, data_parallel_size)


def _init_tp_groups_with_new_group(
    tensor_model_parallel_size: int = 1, data_parallel_size: int | None = None
) -> tuple[Any, Any]:
    """Set tensor-parallel groups of neighbours until there is an engine; return (data group, tensor group).

    All ranks must call.  Raises AssertionError (DeepSpeed's) for sizes that do not multiply to the world size.
    """
    _ensure_divisibility(get_world_size(), tensor_model_parallel_size)
    data = get_world_size() // tensor_model_parallel_size
    assert data_parallel_size in (None, data), (
        f"data_parallel_size ({data_parallel_size}) * tensor_model_parallel_size ({tensor_model_parallel_size}) must "
        f"equal world_size ({get_world_size()})"
    )
    _set_degrees(zcomm.Degrees(tensor=tensor_model_parallel_size), mpu)
    found = _set_groups()
    return found.data(), found.tensor()


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


def _get_expert_parallel_group_dict() -> dict[str, Any]:
    """Return {DeepSpeed's name: expert-parallel group}; an engine has one."""
    return {_get_max_expert_size_name(): _get_expert_parallel_group()}


def _get_expert_data_parallel_group_dict() -> dict[str, Any]:
    """Return {DeepSpeed's name: group of the ranks that hold the same experts}."""
    return {_get_max_expert_size_name(): _get_expert_data_parallel_group()}


def _create_zero_param_parallel_group(group_size: int) -> None:
    """Set the ranks among which weights have a second copy: `group_size` neighbours; an engine has its own.

    All ranks must call.  Raises AssertionError (DeepSpeed's) if it is set already, or if the size does not divide.
    """
    assert not _zero_param_size, "ZeRO parameter intra parallel group is already initialized"
    size = min(group_size, get_world_size())
    _ensure_divisibility(get_world_size(), size)
    zcomm.consecutive_group(size)
    globals().update(_zero_param_size=size)


def _get_zero_param_intra_parallel_group() -> Any:
    """Return the ranks among which weights have a second copy (zero_hpz_partition_size); None without them."""
    engine = _latest_engine()
    size = _zero_param_size if engine is None else engine.plan.zero.secondary_group_size
    copy = None if engine is None else engine.parts.groups.gradient()
    return (zcomm.consecutive_group(size, copy) or get_world_group()) if size else None


def _zero_param_parallel_is_initialized() -> bool:
    """Return True if weights have a second copy."""
    return _get_zero_param_intra_parallel_group() is not None


def _get_zero_param_intra_parallel_rank_in_mygroup() -> int:
    return get_rank(_get_zero_param_intra_parallel_group())


def _get_zero_param_intra_parallel_group_world_size() -> int:
    return get_world_size(_get_zero_param_intra_parallel_group())


def _get_zero_param_intra_parallel_group_ranks() -> list[int]:
    """Return the global ranks of that group."""
    return get_all_ranks_from_group(_get_zero_param_intra_parallel_group())


def _release_process_group_references(group: Any = None) -> None:
    """Forget what was set here, and the latest engine, once the groups are destroyed; for a `group`, nothing."""
    if group is None:
        _tensor_position.clear()
        values = {"mpu": None, "mesh_device": None, "_degrees": zcomm.Degrees(), "_zero_param_size": 0}
        globals().update(values, _latest_engine=_no_engine)


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
