"""World: initializes the default process group, once, under any launcher.

`init()` detects the launch (`launch.detect`), selects NCCL with a GPU and Gloo without, meets the other ranks at one
address, and returns a `World`.  Every layer that needs a world may call it: the first call does the work, later calls
return the same object.  A default group that was made elsewhere is adopted and never destroyed.

A world of one is a real process group (Gloo over a store in memory: no port, no name look-up), so meshes and
collectives need no second path.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from contextlib import ExitStack
from datetime import timedelta
from types import TracebackType
from typing import final

import attrs
import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from zcomm import compat
from zcomm.groups.launch import SINGLE, Launch, detect
from zcomm.groups.rendezvous import rendezvous_failed, rendezvous_store
from zcomm.hangs import detector
from zcomm.shared import registry

__all__ = ["World", "init"]

_DEFAULT_TIMEOUT_S = 600.0
_BACKENDS = ("gloo", "nccl", "cpu:gloo,cuda:nccl")


@final
@attrs.define(eq=False)
class World:
    """Processes of one run, as this rank sees them.  A context manager that closes itself.

    Invariant: `group` is torch.distributed's default group until `close()`, then None.
    """

    launch: Launch  # rank, world size and address
    backend: str  # of the default group: one of "gloo", "nccl", "cpu:gloo,cuda:nccl" unless adopted
    device: torch.device  # of this rank
    group: ProcessGroup | None  # the default group
    timeout_s: float  # time limit of the rendezvous and of each collective
    _resources: ExitStack = attrs.field(factory=ExitStack, repr=False)  # made by init(); empty for an adopted group

    @property
    def rank(self) -> int:
        return self.launch.rank

    @property
    def world_size(self) -> int:
        return self.launch.world_size

    @property
    def local_rank(self) -> int:
        return self.launch.local_rank

    def close(self) -> None:
        """Destroy the default group if init() made it.  May be called again."""
        self._resources.close()
        self.group = None

    def is_current(self) -> bool:
        """True while our group is torch's default group: not closed, and not destroyed elsewhere."""
        return self.group is not None and dist.is_initialized() and dist.group.WORLD is self.group

    def __enter__(self) -> World:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trail: TracebackType | None
    ) -> None:
        self.close()


_current: World | None = None  # of the last init(); torch's default group is one per process as well


def init(
    *,
    backend: str | None = None,
    device: torch.device | str | None = None,
    timeout_s: float | None = None,
    environ: Mapping[str, str] | None = None,
) -> World:
    """Join the other processes of this run and return the `World`.  Idempotent.

    backend: "nccl", "gloo" or "cpu:gloo,cuda:nccl"; by default NCCL with a GPU and Gloo without.
    device: device of this rank; by default the GPU number local_rank, or the CPU.  A GPU becomes the current CUDA
        device.
    timeout_s: for the rendezvous and for every collective; by default ZCOMM_TIMEOUT_S (seconds), else
        DEEPSPEED_TIMEOUT (minutes), else 600.
    environ: read instead of os.environ.

    Raises RendezvousFailed if the ranks do not meet in time, ValueError for an environment or an argument that
    contradicts itself, the machine, or the existing world.

    >>> import zcomm
    >>> world = zcomm.init(device="cpu")
    >>> world.rank, zcomm.group_size()
    (0, 1)
    >>> world.close()
    """
    global _current
    env = os.environ if environ is None else environ
    limit_s = resolve_timeout_s(timeout_s, env)
    wanted = None if device is None else torch.device(device)
    if _current is None or not _current.is_current():
        make = _adopt if dist.is_initialized() else _create
        _current = make(backend, wanted, limit_s, env)
    _check_agreement(_current, backend, wanted)
    return _current


def install(world: World) -> World:
    """Make `world`, around torch's present default group, the one that `init` returns."""
    global _current
    _current = world
    return world


def resolve_timeout_s(given_s: float | None, env: Mapping[str, str]) -> float:
    """Time limit in seconds from the argument, ZCOMM_TIMEOUT_S, DEEPSPEED_TIMEOUT (minutes) or the default."""
    sources = (
        ("timeout_s", given_s, "seconds"),
        ("ZCOMM_TIMEOUT_S", env.get("ZCOMM_TIMEOUT_S") or None, "seconds"),
        ("DEEPSPEED_TIMEOUT", env.get("DEEPSPEED_TIMEOUT") or None, "minutes"),
        ("the default", _DEFAULT_TIMEOUT_S, "seconds"),
    )
    name, value, unit = next(source for source in sources if source[1] is not None)
    try:
        limit_s = float(value or 0) * {"seconds": 1, "minutes": 60}[unit]
    except ValueError:
        limit_s = 0.0
    if not 0 < limit_s < 1e8:  # also rejects nan
        raise ValueError(f"{name}={value!r} must be a positive number of {unit}.")
    return limit_s


def choose_device(
    backend: str | None, device: torch.device | None, launch: Launch, num_gpus: int
) -> tuple[str, torch.device]:
    """Choose back end and device of a rank on a machine with `num_gpus` visible GPUs.  Pure.

    A rank that sees one GPU takes it whatever its local rank, because schedulers hide the GPUs of other ranks.
    """
    if backend is not None and backend not in _BACKENDS:
        raise ValueError(f"backend {backend!r} is unknown; allowed: {', '.join(map(repr, _BACKENDS))}.")
    wants_gpu = device.type == "cuda" if device is not None else num_gpus > 0 and backend != "gloo"
    if not wants_gpu:
        if backend not in (None, "gloo"):
            reason = f"device is {device}" if device is not None else "no GPU is visible"
            raise ValueError(f"backend {backend!r} needs a GPU, but {reason}. Use backend='gloo'.")
        return "gloo", device or torch.device("cpu")
    default_index = 0 if num_gpus == 1 else launch.local_rank
    index = default_index if device is None or device.index is None else device.index
    if index >= num_gpus:
        raise ValueError(
            f"rank {launch.rank} (local rank {launch.local_rank}) needs GPU {index}, but the visible "
            f"GPUs number {num_gpus}. Start fewer processes here, set LOCAL_RANK, or pass device='cpu'."
        )
    return backend or "nccl", torch.device("cuda", index)


def _create(backend: str | None, device: torch.device | None, limit_s: float, env: Mapping[str, str]) -> World:
    """Make the default group: detect, choose, meet, connect."""
    launch = detect(env)
    chosen, where = choose_device(backend, device, launch, torch.cuda.device_count())
    with ExitStack() as undo:
        _prefer_loopback(launch, undo)
        if where.type == "cuda":
            torch.cuda.set_device(where)
        try:
            dist.init_process_group(
                chosen,
                store=rendezvous_store(launch, limit_s),
                rank=launch.rank,
                world_size=launch.world_size,
                timeout=timedelta(seconds=limit_s),
                device_id=where if "nccl" in chosen else None,
            )
        except (RuntimeError, TimeoutError) as error:
            raise rendezvous_failed(launch, limit_s, error) from error
        undo.callback(_destroy, dist.group.WORLD)
        undo.callback(detector.stop)
        detector.start()
        return World(launch, chosen, where, dist.group.WORLD, limit_s, undo.pop_all())


def _destroy(group: ProcessGroup | None) -> None:
    """Destroy the default group, unless it is gone or has been replaced."""
    registry.close_all()
    if dist.is_initialized() and dist.group.WORLD is group:
        dist.destroy_process_group()


def _adopt(_: str | None, device: torch.device | None, limit_s: float, env: Mapping[str, str]) -> World:
    """Make a World around an existing default group."""
    rank, world_size, backend, group = dist.get_rank(), dist.get_world_size(), compat.backend_of(), dist.group.WORLD
    try:
        launch = detect(env)
    except ValueError:  # the group may have been made without these variables
        launch = SINGLE
    if (launch.rank, launch.world_size) != (rank, world_size):
        launch = Launch(rank, world_size, rank, world_size, SINGLE.address, SINGLE.port, "adopted")
    on_gpu = "nccl" in backend and torch.cuda.is_available()
    own = torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")
    timeout_s = compat.group_timeout_s(group, own, default=limit_s)
    detector.start()  # ends with the group, which is not ours to destroy
    return World(launch, backend, own if device is None else device, group, timeout_s)


def _check_agreement(world: World, backend: str | None, device: torch.device | None) -> None:
    """Raise if the existing world differs from the requested one."""
    if backend not in (None, world.backend):
        raise ValueError(
            f"init(backend={backend!r}): this process already has a default group, with backend {world.backend!r}. "
            "Leave backend out to use it, or close that world first."
        )
    if device is None:
        return
    if device.type != world.device.type or device.index not in (None, world.device.index):
        raise ValueError(f"init(device={str(device)!r}): this process already uses {world.device}.")


def _prefer_loopback(launch: Launch, undo: ExitStack) -> None:
    """Keep Gloo on the loopback interface if all ranks meet there, so that no host name is looked up.

    Groups made later read the variable again, so it stays until the world is closed.
    """
    names = {name for _, name in socket.if_nameindex()} & {"lo", "lo0"}
    if launch.meets_on_loopback and names and "GLOO_SOCKET_IFNAME" not in os.environ:
        os.environ["GLOO_SOCKET_IFNAME"] = names.pop()
        undo.callback(os.environ.pop, "GLOO_SOCKET_IFNAME", None)
