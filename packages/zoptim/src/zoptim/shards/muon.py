"""Muon on shards: each cut matrix has an owner rank, which orthogonalizes it and sends it back.

See [Note: cut tensors] in ranks.py.  Momentum is elementwise, so every rank updates that of its own shard, in any
format.  Ranks send the direction to the matrix's owner, in the dtype of the iteration (float32; bf16 on GPUs), and
receive the result: two messages a round.  With W ranks a rank sends at most its share of the matrices, 1/W of them,
each way (of a GPT-2 with 124M parameters a tenth of the share on 4 ranks, half on 8); ZeRO's reduce-scatter and
all-gather each move all of them.  A round takes whole shards up to `ROUND_NUMEL` elements of this rank, and needs
memory for about four copies of these elements.

Owners are chosen among the ranks that hold a part, such that the arithmetic is balanced; a matrix that lies whole on
one rank stays there.

Rejected: gathering on all ranks and iterating everywhere (W times the traffic and the arithmetic); a layout whose
cuts avoid matrices (spans would not be equal on all ranks, and bucket, checkpoint and stage would depend on the
optimizer).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import attrs
import torch
from torch import Tensor

from zoptim.backends.signals import Signals, signals_on
from zoptim.rules.muon import compute_format, momentum_rule, muon_scale, orthogonalize
from zoptim.shards.ranks import CutTensor, Layout, Ranks, gather_cut, own_segments, plan_owners, scatter_cut
from zoptim.shards.segments import Segment
from zoptim.states.formats import seed_of
from zoptim.states.spec import StateSpec
from zoptim.updates.fallback import next_step, unscale_gradient
from zoptim.updates.plan import Entry

__all__ = ["MuonShards", "Shard", "matrix_shape"]

BUFFER = "momentum_buffer"
ROUND_NUMEL = 2**26  # most elements of this rank's shards in one round, unless one shard has more
STACK_NUMEL = 2**26  # most elements in one batched iteration, unless one matrix has more


@attrs.frozen(eq=False)
class Shard:
    """A flat shard in a step."""

    entry: Entry  # weight, gradient and state of the whole shard
    group: Mapping[str, Any]  # its options
    spec: StateSpec  # the format of its state


@attrs.frozen(eq=False)
class MuonShards:
    """Parts and owners of all matrices, and the ranks."""

    ranks: Ranks
    segments: dict[Tensor, tuple[Segment, ...]]  # of this rank's shards
    matrices: dict[Tensor, dict[int, CutTensor]]  # of each shard and its counterparts, by index

    @classmethod
    def make(cls, layout: Layout, ranks: Ranks) -> MuonShards:
        """Plan the owners.  Raises ValueError for segments that are no matrices, overlap or lie outside."""
        segments = own_segments(layout, ranks)
        for shard, parts in segments.items():
            Segment.check(parts, shard)
        for part in (part for by_rank in layout.values() for parts in by_rank for part in parts):
            if len(part.shape) < 2:
                raise ValueError(f"{part} is no matrix; put it into a group with use_muon=False.")
        owned = plan_owners(layout.values(), _cost, ranks.world_size)
        return cls(ranks, segments, dict(zip(layout, owned)))

    def update(self, shards: Mapping[Tensor, Shard], signals: Signals) -> None:
        """Update all shards, in rounds that are the same on all ranks.

        Raises ValueError for a shard without a gradient, before any message.
        """
        if missing := [tuple(param.shape) for param in self.matrices if param not in shards]:
            raise ValueError(
                f"{len(missing)} flat shards of Muon have no gradient (the first has shape {missing[0]}); the other "
                "ranks would wait for them. Give every shard a gradient, of zeros if necessary."
            )
        for members in self._rounds():
            self._update_round([(param, shards[param]) for param in members], signals)

    def _rounds(self) -> Iterator[list[Tensor]]:
        taken: list[Tensor] = []
        numel = 0
        for param, matrices in self.matrices.items():
            more = sum(matrix.numel for matrix in matrices.values()) // self.ranks.world_size
            if taken and numel + more > ROUND_NUMEL:
                yield taken
                taken, numel = [], 0
            taken.append(param)
            numel += more
        if taken:
            yield taken

    def _update_round(self, members: Sequence[tuple[Tensor, Shard]], signals: Signals) -> None:
        """Phases: momentum, matrices to their owners, Newton-Schulz, matrices back, weights."""
        home = {index: (param, shard) for param, shard in members for index in self.matrices[param]}
        matrices = {index: self.matrices[param][index] for index, (param, _) in home.items()}
        here = signals_on(signals, members[0][0].device)
        directions = {param: compute_format(_update_momentum(shard, here)) for param, shard in members}
        like = directions[members[0][0]]

        def part_of(segment: Segment) -> Tensor:
            return directions[home[segment.index][0]][segment.row]

        whole = gather_cut(matrices, self.ranks, part_of, like)
        for shape, group, alike in _stacks(
            whole, {index: (matrices[index], home[index][1].group) for index in whole}
        ):
            stack = torch.stack([whole.pop(index).view(shape) for index in alike])
            updates = orthogonalize(stack, group["ns_steps"], group["ns_method"])
            whole.update(zip(alike, updates.flatten(1).unbind()))
        weights = {param: shard.spec.read_weight(shard.entry.param, shard.entry.state) for param, shard in members}
        for segment, part in scatter_cut(matrices, self.ranks, whole, like):
            param, shard = home[segment.index]
            _step(weights[param][segment.row], part, shard.group, matrices[segment.index])
        for param, shard in members:
            entry, weight = shard.entry, weights[param]
            shard.spec.write_weight(entry.param, entry.state, weight, seed_of(next_step(entry), 0))
            if entry.copy is not None:
                entry.copy.detach().copy_(weight)


def matrix_shape(shape: Sequence[int]) -> tuple[int, int]:
    """Return (rows, cols) of a tensor of two or more dims as a matrix: the first dim, the product of the others."""
    return shape[0], math.prod(shape) // max(1, shape[0])


def _cost(tensor: CutTensor) -> float:
    """Return the number of multiplications in one iteration."""
    short, long = sorted(matrix_shape(tensor.shape))
    return short * short * (2 * long + short)


def _update_momentum(shard: Shard, signals: Signals) -> Tensor:
    """Update the momentum of a shard; return the direction, flat."""
    entry, spec, group = shard.entry, shard.spec, shard.group
    grad = unscale_gradient(entry, torch.promote_types(entry.param.dtype, torch.float32), signals)
    options = {name: group[name] for name in ("momentum", "nesterov", "maximize")}
    direction, buffer = momentum_rule(grad, spec.read(entry.state, BUFFER), **options)
    spec.write(entry.state, BUFFER, buffer, seed_of(next_step(entry), 1))
    return direction


def _stacks(
    whole: Mapping[int, Tensor], about: Mapping[int, tuple[CutTensor, Mapping[str, Any]]]
) -> Iterator[tuple[tuple[int, int], Mapping[str, Any], list[int]]]:
    """Yield (shape, group, indices) of matrices with one shape and group, in stacks of bounded size."""
    alike: dict[tuple[int, tuple[int, int]], list[int]] = {}
    for index in whole:
        tensor, group = about[index]
        if tensor.numel:
            alike.setdefault((id(group), matrix_shape(tensor.shape)), []).append(index)
    for (_, shape), indices in alike.items():
        most = max(1, STACK_NUMEL // math.prod(shape))
        for start in range(0, len(indices), most):
            yield shape, about[indices[start]][1], indices[start : start + most]


def _step(weight: Tensor, update: Tensor, group: Mapping[str, Any], tensor: CutTensor) -> None:
    """Update a part of a matrix in place.  weight, update: flat."""
    lr, scale = float(group["lr"]), muon_scale(*matrix_shape(tensor.shape), group["adjust_lr"])
    weight.copy_(weight * (1 - lr * group["weight_decay"]) - lr * scale * update.to(weight.dtype))
