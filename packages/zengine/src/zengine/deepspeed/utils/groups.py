"""`deepspeed.utils.groups`: which ranks do what together.

DeepSpeed keeps one set of groups for a process.  Here groups are an engine's own (`engine.parts.groups`, a
`zcomm.Groups`), so these functions need to know whose they are to tell.  The rule: those of the engine that
`deepspeed.initialize` made last, as long as it lives; before there is one, of the `mpu` that was announced; else all
ranks are data-parallel replicas.  Whoever has several engines calls `use(engine)`, or asks the engine.

A kind of group that nothing is split over has this rank alone, and never None, which torch takes for all ranks.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import zcomm
from zengine.deepspeed.comm.world import get_rank, get_world_size

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

mpu: Any = None  # what was announced last, as DeepSpeed has it here
_expert = 1  # the same of experts


def _no_engine() -> Engine | None:
    return None


_newest: Callable[[], Engine | None] = _no_engine  # the engine whose groups are told, while it lives


def initialize(ep_size: int = 1, mpu: Any = None) -> None:
    """Announce groups before there is an engine.  ValueError, with numbers, if `ep_size` does not divide the ranks.

    Layers say their own ep_size to the engine; this one only answers for it until then.
    """
    zcomm.Degrees(expert=ep_size).resolved(get_world_size())
    globals().update(mpu=mpu, _expert=ep_size)


def use(engine: Engine) -> None:
    """Tell of `engine` from now on, as long as it lives."""
    globals()["_newest"] = weakref.ref(engine)


def _groups() -> Any:
    """A `zcomm.Groups`, or the mpu."""
    engine = _newest()
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


def _place(kind: str) -> int:
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
    """The ranks that see different samples."""
    return _group("data_parallel")


def get_data_parallel_world_size() -> int:
    """How many they are."""
    return _size("data_parallel")


def get_data_parallel_rank() -> int:
    """Return which of them this is."""
    return _place("data_parallel")


def get_model_parallel_group() -> Any:
    """The ranks that hold parts of the same layers."""
    return _group("model_parallel")


def get_model_parallel_world_size() -> int:
    """How many they are."""
    return _size("model_parallel")


def get_model_parallel_rank() -> int:
    """Return which of them this is."""
    return _place("model_parallel")


def get_tensor_model_parallel_src_rank() -> int:
    """The rank in the world of the first of them."""
    return get_rank() if get_model_parallel_world_size() == 1 else int(_first(get_model_parallel_group()))


def get_sequence_parallel_group() -> Any:
    """The ranks that hold parts of the same samples."""
    return _group("sequence_parallel")


def get_sequence_parallel_world_size() -> int:
    """How many they are."""
    return _size("sequence_parallel")


def get_sequence_parallel_rank() -> int:
    """Return which of them this is."""
    return _place("sequence_parallel")


def _sequence_data_parallel_group() -> Any:
    """The ranks that sum gradients."""
    return _group("sequence_data_parallel" if hasattr(_groups(), "get_sequence_data_parallel_group") else _DATA)


def _sequence_data_parallel_world_size() -> int:
    return get_data_parallel_world_size() * get_sequence_parallel_world_size()


def _sequence_data_parallel_rank() -> int:
    return get_rank(_sequence_data_parallel_group())


def _get_expert_parallel_group(group_name: str = "") -> Any:
    """The ranks that share the experts of a layer out; `group_name`, "ep_size_N" there, is that of the only ones."""
    return _group("expert_parallel")


def _get_expert_parallel_world_size(group_name: str = "") -> int:
    return _size("expert_parallel")


def _get_expert_parallel_rank(group_name: str = "") -> int:
    return _place("expert_parallel")


def _get_expert_data_parallel_group(group_name: str = "") -> Any:
    """The ranks that hold the same experts."""
    return _group("expert_data_parallel")


def _get_expert_data_parallel_world_size(group_name: str = "") -> int:
    return _size("expert_data_parallel")


def _get_expert_data_parallel_rank(group_name: str = "") -> int:
    return _place("expert_data_parallel")


def _first(group: Any) -> int:
    from torch.distributed import get_global_rank

    return get_global_rank(group, 0)


_DATA = "data_parallel"
get_tensor_model_parallel_group = get_model_parallel_group
get_tensor_model_parallel_world_size = get_model_parallel_world_size
get_tensor_model_parallel_rank = get_model_parallel_rank

# The underscored spellings are the ones that DeepSpeed's users and Transformers call.
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
