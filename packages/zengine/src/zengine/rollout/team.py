"""Ranks that decode together, and what each brings.

A copy that is split for generation, and experts that are split by training, have prompts of each rank: all of them
are decoded together, and each rank returns its own samples.  Layers that training splits have the same data on all
their ranks, in rollouts as in training.
"""

from __future__ import annotations

import enum
import reprlib
from collections.abc import Sequence
from typing import Any, final

import attrs
from torch import nn

import zcomm
from zengine.inference.calls.path import deciding_ranks
from zengine.inference.generation import Request
from zpartition import ModelParallelGroup, model_parallel_group_of

__all__ = ["Split", "Team"]


_REMEDY = "give all of them the same prompts, seeds and sampling"


class Split(enum.Enum):
    """What the ranks of a team have parts of."""

    COPY = "copy"  # made for rollouts (hybrid_engine.inference_tp_size); of one rank: nothing is split
    LAYERS = "tensor"  # split by training: each rank asks for the same
    EXPERTS = "expert"  # split by training: each rank asks for its own


@final
@attrs.frozen(eq=False)
class Team:
    """Ranks that decode together."""

    ranks: ModelParallelGroup
    split: Split

    @classmethod
    def of(cls, module: nn.Module, copies: ModelParallelGroup) -> Team:
        """Return the team of a module whose training has begun; copies: ranks that split copies of it."""
        found = deciding_ranks(module)
        if copies.size > 1 or found.size == 1:
            return cls(copies, Split.COPY)
        return cls(found, Split.LAYERS if model_parallel_group_of(module).size > 1 else Split.EXPERTS)

    @property
    def is_of_training(self) -> bool:
        """Whether training has split the model."""
        return self.split is not Split.COPY

    def exchange(self, value: Any) -> list[Any]:
        """All-gather a value over the team."""
        return [value] if self.ranks.size == 1 else zcomm.all_gather_object(value, self.ranks.group)

    def exact_problem(self) -> str:
        """Return why rollouts cannot be exact; "" if they can be."""
        size, what = self.ranks.size, "RolloutConfig(exact=True) needs whole weights, and"
        if self.is_of_training:
            return (
                f"{what} the model is split over {size} {self.split.value} ranks, whose sums have another order: "
                "train without that split (ZeRO-3 shards weights and stays exact), or leave exact out"
            )
        return "" if size == 1 else f"{what} hybrid_engine.inference_tp_size is {size}: leave one of them out"

    def problem(self, mine: str, requests: Sequence[Request]) -> str:
        """Return a mistake of some rank, the same on all ranks of the team; "" if there is none.

        mine: that of this rank, or "".  requests: of this rank, which tensor ranks must share.
        """
        if not self.is_of_training:
            return mine
        told = [_told(each) for each in requests] if self.split is Split.LAYERS else []
        found = self.exchange((mine, told))
        for rank, (each, _) in enumerate(found):
            if each:
                return f"{self.split.value} rank {rank}: {each}"
        first = found[0][1]
        for rank, (_, other) in enumerate(found):
            if other != first:
                return (
                    f"the layers are split over {len(found)} tensor ranks, which decode together, and "
                    + _difference(rank, other, first)
                )
        return ""


def _told(request: Request) -> dict[str, Any]:
    return {"prompt": request.prompt, "seeds": request.seeds, "sampling": attrs.asdict(request.sampling)}


def _difference(rank: int, other: Sequence[dict[str, Any]], first: Sequence[dict[str, Any]]) -> str:
    what = f"rank {rank} has {len(other)} prompts, rank 0 {len(first)}"
    for index, (mine, theirs) in enumerate(zip(first, other)):
        for name in mine:
            if mine[name] != theirs[name]:
                left, right = reprlib.repr(theirs[name]), reprlib.repr(mine[name])
                return f"{name} {index} of rank {rank} is {left}, of rank 0 {right}: {_REMEDY}"
    return f"{what}: {_REMEDY}"
