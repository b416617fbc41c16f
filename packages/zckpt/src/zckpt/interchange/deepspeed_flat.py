"""Parameter offsets in DeepSpeed's flat buffers: pure arithmetic on sizes.

Stages 1 and 2 concatenate the parameters of a group and split the whole evenly; a rank's part may start and end
inside a parameter.  Stage 3 splits every parameter evenly, pads each part to the same size, and concatenates the
parts in *sub-groups*, whose borders are borders of parameters.  Both become the same list of fragments.

The order of parameters is that of `param_shapes`.  DeepSpeed also saves `param_slice_mappings`, a table of names and
offsets.  It is not used: with round_robin_gradients its order differs from the order in the buffers (seen with
0.19.8; DeepSpeed's own zero_to_fp32 does not read it either).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence

import attrs

from zckpt.errors import CheckpointCorrupt
from zckpt.format.regions import Span

Shapes = Mapping[str, tuple[int, ...]]  # parameter -> shape, in the order of the buffer


@attrs.frozen
class Fragment:
    """Part of a parameter in one rank's flat buffer."""

    name: str
    shape: tuple[int, ...]  # of the parameter, as this tensor-parallel rank has it
    span: Span  # of the flattened parameter
    rank: int  # data-parallel
    group: int  # index of the rank's buffer
    start: int  # offset in that buffer


def fragments_of_groups(
    groups: Sequence[Shapes], lengths: Sequence[Sequence[int]], paddings: Sequence[Sequence[int]]
) -> list[Fragment]:
    """Fragments at stages 1 and 2.

    groups: parameters of each group.  lengths: for each rank, the elements of each of its buffers.
    paddings: for each group, the padding elements after each parameter ([] for none).
    Raises CheckpointCorrupt if the buffers are shorter than the parameters.
    """
    made = []
    for group, shapes in enumerate(groups):
        starts = [0]
        for mine in lengths:
            starts.append(starts[-1] + mine[group])
        position = 0
        for index, (name, shape) in enumerate(shapes.items()):
            numel = math.prod(shape)
            if position + numel > starts[-1]:
                raise CheckpointCorrupt(
                    f"group {group} has {starts[-1]:,} elements over all ranks, and parameter {name!r} of shape "
                    f"{shape} ends at {position + numel:,}: files of different runs, or of an unknown layout"
                )
            for rank, (lo, hi) in enumerate(itertools.pairwise(starts)):
                first, last = max(lo, position), min(hi, position + numel)
                if first < last:
                    made.append(Fragment(name, shape, (first - position, last - position), rank, group, first - lo))
            position += numel + (paddings[group][index] if paddings and paddings[group] else 0)
    return made


def fragments_of_parts(groups: Sequence[Shapes], lengths: Sequence[Sequence[int]]) -> list[Fragment]:
    """Fragments at stage 3: each rank has ceil(numel / ranks) elements per parameter, the last may be padding."""
    every = {name: shape for shapes in groups for name, shape in shapes.items()}
    made, buffer, start = [], 0, 0
    for name, shape in every.items():
        numel = math.prod(shape)
        part = -(-numel // len(lengths))
        while buffer < len(lengths[0]) and start == lengths[0][buffer]:
            buffer, start = buffer + 1, 0
        if buffer == len(lengths[0]) or start + part > min(mine[buffer] for mine in lengths):
            raise CheckpointCorrupt(
                f"the buffers of stage 3 hold {[list(mine) for mine in lengths[:2]]} elements, and parameter "
                f"{name!r} of shape {shape} needs {part:,} from {start:,} in buffer {buffer}: files of different "
                "runs, or of an unknown layout"
            )
        made += [
            Fragment(name, shape, span, rank, buffer, start)
            for rank, span in enumerate(part_spans(numel, len(lengths)))
            if span[0] < span[1]
        ]
        start += part
    return made


def part_spans(numel: int, world_size: int) -> list[Span]:
    """Spans of one parameter at stage 3, one per rank."""
    part = -(-numel // world_size)
    return [(min(numel, rank * part), min(numel, (rank + 1) * part)) for rank in range(world_size)]
