"""Version differences and private API of torch, all in this file.

torch 2.13 renames the flat collectives (`all_gather_into_tensor` became `all_gather_single`) and warns about the old
names; torch 2.6 to 2.12 have only the old ones.  The choice is made once, at import, so no call pays for it and no
other file tests versions.  `group_timeout_s` reads a private attribute; without it the caller's default is returned,
and a test fails when a new torch moves it.

[Note: group names]  The members of a group that not all ranks make find each other by its name.  torch makes the name
from the ranks and the number of groups that the process has made before, so members that differ in the latter wait
forever, for example a pipeline stage with two groups of its own and one with three.  Here the name is made from the
ranks and the number of earlier groups of the same ranks, counted in the store; no rank begins the next such group
before all have joined this one.
"""

from __future__ import annotations

import contextlib
import hashlib
import inspect
import threading
from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

all_gather_flat: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_flat: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

# Public classes that are missing from torch's export list.
FileStore: Any = dist.FileStore  # type: ignore[attr-defined,unused-ignore]
HashStore: Any = dist.HashStore  # type: ignore[attr-defined,unused-ignore]
Store: Any = dist.Store  # type: ignore[attr-defined,unused-ignore]
ProcessGroup: Any = (
    dist.ProcessGroup
)  # as a base class: torch calls its methods with other signatures than it declares
PrefixStore: Any = dist.PrefixStore  # type: ignore[attr-defined,unused-ignore]
rendezvous: Any = dist.rendezvous  # type: ignore[attr-defined,unused-ignore]


def group_timeout_s(group: Any, device: Any, default: float) -> float:
    """Time limit in seconds of `group`'s collectives on `device`, or `default` if torch does not expose it."""
    try:
        timeout = group._get_backend(device).options._timeout
    except (AttributeError, RuntimeError):
        return default
    return timeout.total_seconds() if isinstance(timeout, timedelta) else default


def backend_of(group: Any = None) -> str:
    """Back end of `group`, or several as "cpu:gloo,cuda:nccl"; works for groups made without a named back end too.

    torch.distributed.get_backend returns "undefined" for those.
    """
    named = str(dist.get_backend(group))
    if named != "undefined":
        return named
    chosen: str = dist.get_backend_config(group)
    kinds = {each.partition(":")[2] for each in chosen.split(",")}
    return kinds.pop() if len(kinds) == 1 else chosen


_KEEPS_ORDER = "sort_ranks" in inspect.signature(dist.new_group).parameters


_chosen = threading.local()  # .name: of the group that this thread is making


def _chosen_or(theirs: Any) -> Any:
    def name_of(*args: Any, **kwargs: Any) -> Any:
        return getattr(_chosen, "name", None) or theirs(*args, **kwargs)

    return name_of


_NAMES_GROUPS = "_process_group_name"
if hasattr(dist.distributed_c10d, _NAMES_GROUPS):
    setattr(dist.distributed_c10d, _NAMES_GROUPS, _chosen_or(getattr(dist.distributed_c10d, _NAMES_GROUPS)))


@contextlib.contextmanager
def _named_by(ranks: Sequence[int]) -> Iterator[None]:
    """Name the groups made inside by `ranks`, see [Note: group names]; torch's names if it exposes no store."""
    store = default_store()
    if store is not None:
        key = hashlib.sha1(" ".join(map(str, ranks)).encode(), usedforsecurity=False).hexdigest()
        _chosen.name = f"{key} {(store.add(f'zcomm groups {key}', 1) - 1) // len(ranks)}"
    try:
        yield
    finally:
        _chosen.name = None


PLAYED, PLAYED_HOST = "played", "played_host"  # back ends of zcomm.groups.played


def new_group(ranks: Sequence[int], backend: str | None = None) -> Any:
    """Make a group of these global ranks, in this order: a collective of these ranks alone.

    A group of all ranks is a collective of the world.  Raises ValueError for ranks that do not ascend if this torch
    would sort them.
    """
    ordered, size = sorted(ranks), dist.get_world_size()
    options: dict[str, Any] = {}
    if backend is not None and backend_of() == PLAYED:
        backend = PLAYED_HOST
    if list(ranks) != ordered:
        if not _KEEPS_ORDER:
            raise ValueError(
                f"a group cannot be made of ranks {list(ranks)} in this order: torch {torch.__version__} sorts them. "
                "Start from a group whose ranks ascend."
            )
        options["sort_ranks"] = False
    if len(ranks) == size:
        return dist.new_group(list(ranks) if options else None, backend=backend, **options)
    with _named_by(ranks):
        return dist.new_group(list(ranks), backend=backend, use_local_synchronization=True, **options)


def default_store() -> Any:
    """Store of the default group's rendezvous, or None if torch does not expose it."""
    get = getattr(dist.distributed_c10d, "_get_default_store", None)
    try:
        return None if get is None else get()
    except (KeyError, ValueError):
        return None


def clone_store(store: Any) -> Any:
    """Another connection to the same keys, usable while `store` is busy; before torch 2.8 the store itself."""
    clone = getattr(store, "clone", None)
    return store if clone is None else clone()


def open_gloo_link(key: str, rank: int, size: int, *, connect_s: float, timeout_s: float) -> Any:
    """Open a Gloo back end outside torch's table of groups: it ends with its last reference.

    A collective of `size` processes that meet at `key` in the default group's store.  It returns when all are
    connected, so a process that drops its link at once does not close it on a peer that is still connecting.  Raises
    RuntimeError after `connect_s` if they do not meet; messages have `timeout_s`.  A torch that cannot change the
    limit uses the latter for both.
    """
    store = default_store()
    if store is None:
        raise RuntimeError("this version of torch does not expose the default group's store")
    make: Any = getattr(dist, "ProcessGroupGloo", None)
    if make is None:
        raise RuntimeError("this version of torch has no Gloo")
    is_changeable = hasattr(make, "set_timeout")
    limit_s = connect_s if is_changeable else timeout_s
    link = make(PrefixStore(key, store), rank, size, timeout=timedelta(seconds=limit_s))
    link_barrier(link).wait()
    if is_changeable:
        link.set_timeout(timedelta(seconds=timeout_s))
    return link


def link_broadcast(link: Any, tensor: Any, root: int) -> Any:
    """Start a broadcast over a link; return its Work."""
    options = _options("BroadcastOptions")
    options.rootRank, options.rootTensor = root, 0
    return link.broadcast([tensor], options)


def link_barrier(link: Any) -> Any:
    """Start a barrier over a link; return its Work."""
    return link.barrier(_options("BarrierOptions"))


def break_link(link: Any, peer: int) -> None:
    """Close the connections of a link at once: every wait for it, here or on another rank, raises.

    `abort` does nothing in Gloo; a receive that times out closes all connections of its link.
    """
    tensor = torch.empty(1, dtype=torch.uint8, device="cpu")
    with contextlib.suppress(RuntimeError):
        link.recv([tensor], peer, _UNUSED_TAG).wait(timedelta(milliseconds=1))


def close_group(group: Any, rank: int) -> None:
    """End all waits of this process in `group`, of which it is `rank`; nothing can be sent over it afterwards.

    Closes Gloo's connections, which the other ranks notice; aborts the work in a GPU's queue.
    """
    size = dist.get_world_size(group)
    if "gloo" in backend_of(group) and size > 1:
        break_link(group, (rank + 1) % size)
    abort_queue(group)


def abort_queue(group: Any) -> None:
    """Abort what `group` has under way in a GPU's queue, where it has NCCL."""
    if "nccl" in backend_of(group) and hasattr(group, "abort"):
        with contextlib.suppress(RuntimeError):
            group.abort()


NUM_LINK_TAGS = 1_000_000  # tags of messages: 0 to this
_UNUSED_TAG = 1_000_003  # no message has it


def work_of(future: Any) -> Any:
    """Return the Work of a torch future; the future itself, which can be waited for, if torch does not expose it."""
    make = getattr(getattr(getattr(torch, "_C", None), "_distributed_c10d", None), "_create_work_from_future", None)
    return future if make is None else make(future)


_foreach_norm: Any = getattr(torch, "_foreach_norm", None)
_foreach_add_: Any = getattr(torch, "_foreach_add_", None)
_foreach_copy_: Any = getattr(torch, "_foreach_copy_", None)


def foreach_norm(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """L2 norm of each tensor, () each; one call, if torch has it."""
    if _foreach_norm is None:
        return [torch.linalg.vector_norm(tensor) for tensor in tensors]
    return list(_foreach_norm(tensors))


def foreach_add_(tensors: list[torch.Tensor], others: list[torch.Tensor]) -> None:
    """Add to each tensor; one call, if torch has it."""
    if _foreach_add_ is None:
        for tensor, other in zip(tensors, others):
            tensor.add_(other)
    elif tensors:
        _foreach_add_(tensors, others)


def foreach_copy_(tensors: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
    """Copy into each tensor; one call, if torch has it."""
    if _foreach_copy_ is None:
        for tensor, source in zip(tensors, sources):
            tensor.copy_(source)
    elif tensors:
        _foreach_copy_(tensors, sources)


def _options(name: str) -> Any:
    return getattr(dist, name)()
