"""Replica check: bitwise comparison of everything that data-parallel ranks hold twice ("verify_replicas_every").

Problem.  Replicas that drift apart raise no error: a bit flips in memory, code under `if rank == 0` changes a weight,
a buffer or a learning rate, a kernel is not deterministic.  The losses look normal, and a checkpoint has one rank's
values.

Design.  Each rank makes a list of what it holds: masters or weights, optimizer state, buffers, working weights
beside masters, and scalars (options of the optimizer, schedule, loss scale, counters).  A tensor's key is its name
with its global address, so tensors are replicas exactly if their keys are equal, at any stage: at stage 0 everything,
at stages 1 to 3 what is not sharded, with groups of shards the shards themselves.  Each rank hashes every element on
its device, and all ranks exchange (key, hash) pairs; all draw the same conclusion, and all raise, or none.  Then the
ranks that hold the first differing tensor exchange hashes of ever smaller parts of it, down to one element.

The comparison runs at a boundary before the update, on what forward and backward have used: the update makes working
weights and buffers equal again (all-gather, broadcast of rank 0's buffers), though the gradients were wrong already.

Cost: a few passes over the state and a message of some tens of bytes a tensor every N steps; state on disk is read
from there.
Not compared: random states, which differ by design, and the running statistics of batch normalization without
synchronization, which each rank computes from its own data.

Rejected: a sum of the weights (differences cancel, and rounding hides them); the sampled hash that compares batches
at every step (digest.py), which misses single elements.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, final

import attrs
import torch
from torch import Tensor, nn

import zcomm
import zpartition
from zengine.engine.drift import RanksDisagree
from zengine.engine.feature import Feature

if TYPE_CHECKING:
    from zengine.engine.parts import Run

__all__ = ["VerifyReplicas", "hash_bits"]

_CHUNK_NUMEL = 1 << 20  # elements hashed at once
_SEARCH_NUMEL = (1 << 20, 1 << 10, 1)  # elements of the parts that are compared to find the first difference
_ADVICE = (
    "Weights, optimizer state or options changed on some ranks only: look for code under `if rank == ...`, an update "
    "outside the engine, a module that draws random numbers into a buffer, or faulty memory. This step was not "
    "applied. Load the newest checkpoint from before the change on all ranks (engine.load_checkpoint)."
)


@attrs.frozen(eq=False)
class Replica:
    """Tensor that other ranks may hold as well."""

    title: str  # "weight body.weight"
    address: str  # part of the global tensor, as text; "" for all of it
    shape: tuple[int, ...]  # for the index of an element; () if `tensor` is a part
    tensor: Tensor

    @property
    def key(self) -> str:
        return f"{self.title}{self.address} {str(self.tensor.dtype).removeprefix('torch.')} {self.tensor.numel()}"


@final
class VerifyReplicas(Feature):
    """Compares replicas in every `every`-th step, before its update."""

    run: Run

    def __init__(self, every: int) -> None:
        self.every = every

    def attach(self, run: Run) -> None:
        self.run = run

    def step_begin(self) -> None:
        """Compare.

        Raises:
            RanksDisagree: on every rank; names the first difference, its ranks and values.
        """
        step = self.run.clock.steps + 1
        if step % self.every == 0:
            self.verify(step)

    def verify(self, step: int) -> None:
        """See `step_begin`; `step` is for the message.

        Raises RanksDisagree on all ranks, with the first difference.
        """
        replicas = {each.key: each for each in _replicas(self.run)}
        hashes = _hashes(list(replicas.values()))
        scalars = _scalars(self.run)
        groups = self.run.parts.groups
        world, peers = groups.world(), zlib.crc32(repr(groups.gradient_ranks()).encode())
        everyone = zcomm.all_gather_object([peers, scalars, dict(zip(replicas, hashes))], world)
        names = {name: "missing" for theirs in everyone for name in theirs[1]}
        if differing := _differing([[theirs[0], {**names, **theirs[1]}] for theirs in everyone]):
            raise RanksDisagree(self._text(step, _scalar_text(differing[0], everyone), len(differing)))
        if differing := _differing([[theirs[0], theirs[2]] for theirs in everyone]):
            peers_of, key = differing[0]
            own = replicas.get(key) if peers_of == peers else None
            raise RanksDisagree(self._text(step, _element_text(own, key, world), len(differing)))

    def _text(self, step: int, difference: str, count: int) -> str:
        more = f" ({count} values differ in all)" * (count > 1)
        return f"verify_replicas_every = {self.every}: in step {step}, {difference}{more}. {_ADVICE}"


# -- what a rank holds -----------------------------------------------------------------------------


def _replicas(run: Run) -> Iterator[Replica]:
    """Yield the tensors of this rank."""
    partition, skipped = run.parts.partition, _own_statistics(run.module)
    buffers = {name for name, _ in run.module.named_buffers()}
    seen = set()
    for shard in partition.shards():
        if shard.name not in skipped:
            seen.add(shard.name)
            yield _of_shard("buffer" if shard.name in buffers else "weight", shard)
    if run.optimizer is not None:
        for key, shard in zpartition.state_shards(run.optimizer, partition.holders):
            yield _of_shard(f"optimizer state {key} of", shard)
    for name, tensor in run.module.named_buffers():
        if name not in seen and name not in skipped:  # not saved with the module
            yield Replica(f"buffer {name}", "", tuple(tensor.shape), tensor)
    for name, param in partition.params.items():
        if partition.has_values(param) and param.numel():
            yield Replica(f"working copy of weight {name}", "", tuple(param.shape), param)


def _of_shard(kind: str, shard: zpartition.Shard | Any) -> Replica:
    tensor = shard.tensor
    is_whole = tensor.numel() == torch.Size(shard.global_shape).numel()
    address = "" if is_whole else f"[box {shard.box}, elements {shard.span}]"
    return Replica(f"{kind} {shard.name}", address, tuple(shard.global_shape) if is_whole else (), tensor)


def _own_statistics(module: nn.Module) -> set[str]:
    """Return the buffers that each rank computes from its own data."""
    return {
        f"{name}.{buffer}".lstrip(".")
        for name, each in module.named_modules()
        if isinstance(each, nn.modules.batchnorm._BatchNorm) and not isinstance(each, nn.SyncBatchNorm)
        for buffer in ("running_mean", "running_var", "num_batches_tracked")
    }


def _scalars(run: Run) -> dict[str, str]:
    """Return the scalars as text, by name."""
    parts = run.parts
    groups = [] if run.optimizer is None else run.optimizer.param_groups
    options = {
        f"param_groups[{index}][{key!r}]": value
        for index, group in enumerate(groups)
        for key, value in group.items()
        if key not in ("params", "param_names")
    }
    states = {
        "scheduler": parts.scheduler.state_dict(),
        "loss scale": parts.scaler.state_dict(),
        "counter": run.clock.state_dict(),
    }
    named = {f"{title} {key!r}": value for title, state in states.items() for key, value in state.items()}
    return {name: _plain(value) for name, value in {**options, **named}.items()}


def _plain(value: Any) -> str:
    if isinstance(value, Tensor):
        return repr(value.tolist())
    simple = isinstance(value, (int, float, str, bool, tuple, list, dict, type(None)))
    return repr(value) if simple else type(value).__name__


# -- hashes ------------------------------------------------------------------------------------------


def hash_bits(tensor: Tensor) -> Tensor:
    """Return a hash of the bits of all elements in their order: () int64 on the device."""
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    for begin, chunk in _chunks(tensor):
        words = _words(chunk)
        positions = torch.arange(begin, begin + words.numel(), device=words.device)
        words = (words ^ positions.mul_(-7046029254386353131)).mul_(-4658895280553007687)
        total = total + (words ^ (words >> 31)).mul_(-7723592293110705685).sum()
    return total


def _chunks(tensor: Tensor) -> Iterator[tuple[int, Tensor]]:
    flat = tensor.detach().reshape(-1)
    for begin in range(0, flat.numel(), _CHUNK_NUMEL):
        yield begin, flat[begin : begin + _CHUNK_NUMEL]


def _words(flat: Tensor) -> Tensor:
    """Return an int64 for each element: its bits."""
    if flat.is_complex():
        real, imaginary = torch.view_as_real(flat).unbind(-1)
        return _words(real.contiguous()) ^ _words(imaginary.contiguous()).mul_(31)
    if flat.dtype == torch.bool:
        return flat.long()
    kinds = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return flat.contiguous().view(kinds[flat.element_size()]).long()


def _hashes(replicas: Sequence[Replica]) -> list[int]:
    """Return the hash of each, with one read of each device."""
    found = [hash_bits(each.tensor) for each in replicas]
    devices = {each.device: None for each in found}
    by_device = {
        device: torch.stack([each for each in found if each.device == device]).tolist() for device in devices
    }
    rows = {device: iter(values) for device, values in by_device.items()}
    return [int(next(rows[each.device])) for each in found]


# -- differences -------------------------------------------------------------------------------------


def _differing(everyone: Sequence[Sequence[Any]]) -> list[tuple[int, str]]:
    """Return (peers, name) of the values that are not equal on all ranks of a group that have them."""
    first: dict[tuple[int, str], Any] = {}
    bad: dict[tuple[int, str], None] = {}
    for peers, values in everyone:
        for name, value in values.items():
            if first.setdefault((peers, name), value) != value:
                bad[(peers, name)] = None
    return list(bad)


def _scalar_text(differing: tuple[int, str], everyone: Sequence[Sequence[Any]]) -> str:
    peers, name = differing
    found: dict[str, list[int]] = {}
    for rank, theirs in enumerate(everyone):
        if theirs[0] == peers:
            found.setdefault(theirs[1].get(name, "missing"), []).append(rank)
    return f"{name} differs between data-parallel ranks: {_by_ranks(found)}"


def _element_text(own: Replica | None, key: str, world: Any) -> str:
    """Describe the first differing element of the tensor `key`.  A collective of all ranks; `own`: this rank's."""
    position = 0
    flat: Any = None if own is None else own.tensor.detach().reshape(-1)
    for numel in _SEARCH_NUMEL:  # narrow the search to one part of this size
        parts = [] if flat is None else [int(hash_bits(part)) for part in torch.split(flat, numel)]
        found = [each for each in zcomm.all_gather_object(parts, world) if each]
        number = next(index for index, column in enumerate(zip(*found)) if len(set(column)) > 1)
        position += number * numel
        flat = None if flat is None else torch.split(flat, numel)[number]
    mine = None if flat is None else [repr(flat[0].item()), list(_index(own, position))]
    values: dict[str, list[int]] = {}
    index: list[int] = []
    for rank, theirs in enumerate(zcomm.all_gather_object(mine, world)):
        if theirs is not None:
            values.setdefault(theirs[0], []).append(rank)
            index = theirs[1]
    title = key.rsplit(" ", 2)[0]
    place = ", ".join(map(str, index))
    return f"{title} differs between data-parallel ranks, first in element [{place}]: {_by_ranks(values)}"


def _index(own: Replica | None, position: int) -> tuple[int, ...]:
    if own is None or not own.shape:
        return (position,)
    index = []
    for size in reversed(own.shape):
        position, rest = divmod(position, size)
        index.append(rest)
    return tuple(reversed(index))


def _by_ranks(found: Mapping[str, Sequence[int]]) -> str:
    return ", ".join(
        f"{value} on rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}" for value, ranks in found.items()
    )
