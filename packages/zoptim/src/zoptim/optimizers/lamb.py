"""LAMB (You et al. 2020, "Large Batch Optimization for Deep Learning", algorithm 2), on tensors and on flat shards.

LAMB scales Adam's step of each tensor by ||weight|| / ||direction||, so it needs tensor boundaries: `place_segments`
gives the positions of tensors in flat shards and the all-reduce for tensors that are cut.  `place_on_ranks` is the
form that all shape-aware optimizers share.

The kernel makes two passes: moments and both sums of squares, then the weights, with the direction recomputed from
the moments.  Rejected: storing the direction (4 more bytes per element written and read, against one division).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, cast

import attrs
import torch
from torch import Tensor

from zoptim.backends.contract import BLOCK_NUMEL, Flag, Hyper, flags_of
from zoptim.backends.memory import copy_to
from zoptim.backends.signals import Signals, is_skipped, signals_on
from zoptim.checks import flag, number
from zoptim.optimizers.base import Params, check_betas, check_common
from zoptim.optimizers.flat import FlatOptimizer
from zoptim.rules.elementwise import AdamMoments, lamb_rule
from zoptim.shards.lamb import LambJob, TorchLambJob
from zoptim.shards.ranks import Layout, Ranks, own_segments
from zoptim.shards.segments import Segment
from zoptim.states.formats import StateFormat
from zoptim.states.spec import StateSpec
from zoptim.updates.plan import Batch, Entry, UpdatePath

__all__ = ["LAMB"]

AllReduce = Callable[[Tensor], object]


@attrs.frozen(eq=False)
class LambLayout:
    """Positions of tensors in flat shards, and the reduction over ranks for tensors that are cut."""

    segments: Mapping[Tensor, tuple[Segment, ...]] = attrs.field(factory=dict)
    num_tensors: int = 0
    all_reduce: AllReduce | None = None  # None: every segment is a whole tensor


class LAMB(FlatOptimizer):
    """LAMB (You et al. 2020): lr >= 0; betas in [0, 1); eps >= 0; weight_decay >= 0, part of the direction.

    The trust ratio lies in [min_coeff, max_coeff], and is 1 if a norm is zero.  `eps_inside_sqrt` and
    `bias_correction` as in DeepSpeed.  For `state_dtype`, `split_master`, `fused` and `foreach` see FlatOptimizer.

    State of a parameter: `step` () float32; `exp_avg`, `exp_avg_sq` of its shape and device, float32 for float16
    parameters too unless state_dtype is set ("fp16" raises: it would round small second moments to 0).

    Raises ValueError or TypeError naming the argument that is out of range.
    """

    _rule = "lamb"
    elementwise: ClassVar[bool] = False

    def __init__(
        self,
        params: Params,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        *,
        bias_correction: bool = True,
        eps_inside_sqrt: bool = False,
        min_coeff: float = 0.01,
        max_coeff: float = 10.0,
        maximize: bool = False,
        foreach: bool | None = None,
        fused: bool | None = None,
        state_dtype: torch.dtype | str | None = None,
        split_master: bool = False,
    ) -> None:
        defaults = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "bias_correction": bias_correction,
            "eps_inside_sqrt": eps_inside_sqrt,
            "min_coeff": min_coeff,
            "max_coeff": max_coeff,
            "maximize": maximize,
            "foreach": foreach,
            "fused": fused,
            "state_dtype": state_dtype,
            "split_master": split_master,
        }
        super().__init__(params, defaults)

    def place_segments(
        self,
        segments: Mapping[Tensor, Sequence[Segment]],
        *,
        num_tensors: int = 0,
        all_reduce: AllReduce | None = None,
    ) -> None:
        """Set the positions of tensors in flat shards: `segments[shard]` lists the parts that the shard holds.

        A cut tensor has a segment on each rank that holds a part, with the same `index` < num_tensors; `all_reduce`
        sums a (num_tensors, 2) float64 tensor over these ranks in place, once a step on every rank (no call if
        found_inf is set and on the CPU).  Without `all_reduce`, every segment is a whole tensor.

        Raises ValueError for segments that overlap, lie outside, or do not suit 8-bit states.
        """
        if all_reduce is None:
            Segment.check_whole(segments)
        elif len({shard.device for shard in segments}) > 1:
            raise ValueError("the shards of cut tensors must be on one device, where LAMB sums their squares.")
        for shard, parts in segments.items():
            Segment.check(parts, shard)
            for part in parts:
                if all_reduce is not None and not 0 <= part.index < num_tensors:
                    raise ValueError(
                        f"a segment has index {part.index}; num_tensors={num_tensors} allows [0, {num_tensors})."
                    )
        self._layout: LambLayout = LambLayout(
            {s: tuple(parts) for s, parts in segments.items()}, num_tensors, all_reduce
        )
        self.clear_plans()

    def place_on_ranks(self, segments: Layout, ranks: Ranks) -> None:
        """Set the cuts of tensors over `ranks`, see [Note: cut tensors] in ranks.py; each step makes one all-reduce.

        Raises ValueError as `place_segments` does, and for 8-bit states, whose blocks the cuts would divide.
        """
        self.check_cuts()
        own = own_segments(segments, ranks)
        num_tensors = 1 + max((s.index for found in segments.values() for parts in found for s in parts), default=-1)
        self.place_segments(
            own, num_tensors=num_tensors, all_reduce=ranks.all_reduce if ranks.world_size > 1 else None
        )

    def check_cuts(self) -> None:
        """Raise ValueError if a group has 8-bit states.  Callers check before they cut tensors."""
        for index, group in enumerate(self.param_groups):
            if StateFormat.parse(group["state_dtype"]) is StateFormat.INT8:
                raise ValueError(
                    f'parameter group {index} of LAMB has state_dtype="8bit", which needs a scale for every '
                    f"{BLOCK_NUMEL} elements of one tensor, but ZeRO cuts tensors anywhere. "
                    'Use state_dtype="bf16", or keep tensors whole (ZeRO stage 0 in fp32).'
                )

    def _set_up(self) -> None:
        super()._set_up()
        self._layout = self.__dict__.get("_layout", LambLayout())  # kept when state is loaded

    def _check_options(self, options: Mapping[str, Any]) -> None:
        check_lamb(options)

    def _state_spec(self, group: Mapping[str, Any]) -> StateSpec:
        # float16 rounds second moments below 6e-8 to 0; the second pass would divide by eps alone.
        narrow = frozenset({torch.float16})
        squares = frozenset({"exp_avg_sq"})
        return self._make_state_spec(
            group, ("exp_avg", "exp_avg_sq"), squares=squares, counts=True, too_narrow=narrow
        )

    def _flags(self, group: Mapping[str, Any]) -> int:
        chosen = {
            Flag.MAXIMIZE: group["maximize"],
            Flag.EPS_INSIDE: group["eps_inside_sqrt"],
            Flag.NO_CORRECTION: not group["bias_correction"],
        }
        return flags_of(chosen)

    def _hyper(self, group: Mapping[str, Any]) -> Hyper:
        beta1, beta2 = group["betas"]
        return Hyper(
            lr=group["lr"],
            beta1=beta1,
            beta2=beta2,
            eps=group["eps"],
            weight_decay=group["weight_decay"],
            min_ratio=group["min_coeff"],
            max_ratio=group["max_coeff"],
        )

    def _rows(self, index: int, entry: Entry) -> Iterator[Entry]:
        segments = self._layout.segments.get(entry.param)
        yield from super()._rows(index, entry) if segments is None else self._cut(index, entry, segments)

    def _update_all(self, work: Sequence[tuple[Mapping[str, Any], Batch]], signals: Signals) -> None:
        def is_cut(batch: Batch) -> bool:
            return self._layout.all_reduce is not None and any(entry.part for entry in batch.entries)

        if self._layout.all_reduce is not None and self._layout.segments:
            self._update_cut([(group, batch) for group, batch in work if is_cut(batch)], signals)
        super()._update_all([(group, batch) for group, batch in work if not is_cut(batch)], signals)

    def _update_cut(self, work: Sequence[tuple[Mapping[str, Any], Batch]], signals: Signals) -> None:
        """Phases: moments and sums of squares of every batch; one all-reduce, even without a batch; weights."""
        found_inf = signals.found_inf
        is_on_host = found_inf is not None and found_inf.device.type == "cpu"
        if (is_on_host or any(batch.path is UpdatePath.TORCH for _, batch in work)) and is_skipped(signals):
            return  # on every rank: they share found_inf
        device = next(iter(self._layout.segments)).device
        totals = torch.zeros(self._layout.num_tensors, 2, dtype=torch.float64, device=device)
        jobs = []
        for group, batch in work:
            in_torch = batch.path is UpdatePath.TORCH
            job = (
                TorchLambJob(group, self._state_spec(group), batch.entries) if in_torch else cast(LambJob, batch.job)
            )
            sums = job.sums(self._hyper(group), signals_on(signals, device))
            parts = [(row, entry.part.tensor) for row, entry in enumerate(batch.entries) if entry.part]
            rows, tensors = copy_to(device, torch.tensor(parts)).unbind(1)
            assert sums is not None
            totals.index_add_(0, tensors, sums[rows])
            jobs.append((job, sums, rows, tensors))
        cast(AllReduce, self._layout.all_reduce)(totals)
        for job, sums, rows, tensors in jobs:
            sums[rows] = totals[tensors]
            job.apply()

    def _evaluate(
        self, group: Mapping[str, Any], param: Tensor, grad: Tensor, moments: dict[str, Tensor], step: int
    ) -> tuple[Tensor, dict[str, Tensor]]:
        new, after = lamb_rule(
            param,
            grad,
            AdamMoments(step=step - 1, **moments),
            lr=float(group["lr"]),
            betas=group["betas"],
            eps=group["eps"],
            weight_decay=group["weight_decay"],
            bias_correction=group["bias_correction"],
            eps_inside_sqrt=group["eps_inside_sqrt"],
            min_coeff=group["min_coeff"],
            max_coeff=group["max_coeff"],
            maximize=group["maximize"],
        )
        return new, {name: getattr(after, name) for name in moments}


def check_lamb(options: Mapping[str, Any]) -> None:
    """Check the options of LAMB (one merged parameter group)."""
    check_common(options)
    check_betas(options)
    number("eps", options["eps"], 0)
    for name in ("bias_correction", "eps_inside_sqrt"):
        flag(name, options[name])
    if StateFormat.parse(options["state_dtype"]) is StateFormat.FP16:
        raise ValueError(
            "state_dtype is fp16; LAMB accepts fp32, bf16 and 8bit, because float16 rounds small second moments to 0."
        )
    low = number("min_coeff", options["min_coeff"], 0)
    if number("max_coeff", options["max_coeff"], 0) < low:
        raise ValueError(f"max_coeff is {options['max_coeff']!r}; it must be at least min_coeff, {low:g}.")
