"""Compressed optimizers (1-bit Adam and its relatives): the engine's own reduction is off exactly when they say.

Such an optimizer begins with gradients that are means over ranks, as any other, and then takes this rank's own ones
and communicates itself.  `needs_local_gradients` says what its next step takes; the partition follows, between steps.

While gradients are local, so is what the engine knows of them: `grad_norm` is the root of the mean over ranks of
squared norms, which is the same number on all ranks, never below the norm of the mean, and what clipping uses.  A
non-finite gradient of any rank skips the update on all.

What belongs to one rank (compression errors; between synchronizations of 0/1 Adam also moments and weights) is in a
checkpoint as a tensor of each rank.  The same number of ranks, over the same buckets, continues bit for bit; another
one starts with errors of 0, which is logged.

In a pipeline the ranks of a stage average their momenta; a checkpoint holds the tensors of every stage.  Tensor
parallelism is rejected: copies on tensor ranks lie at other places of a message, so they would get other scales.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, final

import torch
from torch import Tensor

import zpartition
from zengine.engine.feature import Feature

if TYPE_CHECKING:
    from zengine.config import Plan
    from zengine.engine.clock import MicroStep
    from zengine.engine.parts import Run
    from zengine.step_report import StepReport

log = logging.getLogger("zengine")

ERRORS = ("worker_error", "server_error")  # beginnings of the names of errors

__all__ = ["CompressedOptimizer", "check_compressed_optimizer"]


def check_compressed_optimizer(optimizer: torch.optim.Optimizer, plan: Plan) -> None:
    """Raise ValueError if the plan cannot train with an optimizer that communicates itself; before any message."""
    name, zero, degrees = type(optimizer).__name__, plan.zero, plan.parallel.degrees
    splits = {axis: getattr(degrees, axis) for axis in ("tensor", "sequence", "expert")}
    reasons = {
        f"zero_optimization.stage = {zero.stage}: from stage 2 on no rank keeps its whole gradient": zero.stage > 1,
        "zero_optimization.stage = 1: between synchronizations every rank updates all weights by its own momenta": (
            zero.stage == 1 and getattr(optimizer, "keeps_whole_states", False)
        ),
        "zero_optimization.offload_optimizer: states are not on the device": zero.offload.moves_states,
        f"zero_optimization.shard_group_size = {zero.shard_group_size}: owners are all ranks": bool(
            zero.shard_group_size
        ),
        "verify_replicas_every: weights differ between synchronizations": bool(
            plan.verify_replicas_every and getattr(optimizer, "keeps_whole_states", False)
        ),
        "diloco: its groups exchange weights": bool(plan.diloco.sync_every),
        "zero_optimization.zero_quantized_gradients: gradients are compressed already": bool(zero.gradient_bits),
        "sparse_gradients: rows have no place in a message of signs": plan.zero.sparse_gradients.value != "dense",
        **{f"{axis} parallelism ({size}): ranks hold different weights": size > 1 for axis, size in splits.items()},
    }
    if found := [reason for reason, is_true in reasons.items() if is_true]:
        raise ValueError(
            f"{name} averages its momenta over all ranks in one bit an element, which excludes {'; '.join(found)}. "
            "Use ZeRO stage 0 or 1 with data parallelism or a pipeline, or AdamW."
        )


@final
class CompressedOptimizer(Feature):
    """Connects the optimizer to the ranks, and turns the reduction of gradients on and off."""

    partition: zpartition.Partition
    name = "compressed_optimizer"

    holders: Any  # the shards that the optimizer is connected to
    optimizer: Any  # one with `connect` and `needs_local_gradients`

    def __init__(self) -> None:
        self._expected: dict[str, int] = {}  # elements of this rank's tensors in the checkpoint that is loaded
        self._staged: dict[str, Tensor] = {}  # memory for them

    def attach(self, run: Run) -> None:
        """Connect.

        Raises:
            ValueError: this partition cannot keep gradients local.
        """
        self.partition, self.optimizer = run.parts.partition, run.optimizer
        zpartition.check_local_gradients(self.partition.policy, self.partition.layout)
        self._connect()
        self._follow()

    def backward_begin(self, micro: MicroStep, loss: Tensor) -> Tensor:
        """Follow a state that was loaded since the last step."""
        self._follow()
        return loss

    def step_end(self, report: StepReport) -> None:
        self._follow()

    def state_dict(self) -> Mapping[str, Any]:
        """Return what tells whether the tensors of a rank fit; of this rank's stage alone, see `merge_states`."""
        numels = {key: tensor.numel() for key, tensor in self.optimizer.rank_tensors().items()}
        stages = self.partition.pipeline_stages
        if stages.size == 1:
            return {"ranks": self._num_ranks, "numels": numels}
        return {"ranks": self._num_ranks, "numels": {}, "stages": {str(stages.rank): numels}}

    def merge_states(self, states: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
        """Return the state of all stages."""
        merged = {stage: numels for state in states for stage, numels in state.get("stages", {}).items()}
        return {**states[0], "stages": merged} if merged else states[0]

    def prepare_load(self, state: Mapping[str, Any]) -> Callable[[], None]:
        """Expect the tensors of this rank, if they fit; the result gives them to the optimizer."""
        stages, saved_stages = self.partition.pipeline_stages, state.get("stages", {})
        of_stage = saved_stages.get(str(stages.rank), {}) if stages.size > 1 else state["numels"]
        saved, numels = state["ranks"], {str(key): int(numel) for key, numel in of_stage.items()}
        errors = {key for key in self.optimizer.rank_tensors() if key.startswith(ERRORS)}
        fits = saved == self._num_ranks and errors <= numels.keys() and max(len(saved_stages), 1) == stages.size
        self._expected = numels if fits else {}
        if (state["numels"] or saved_stages) and not fits and self.partition.rank == 0:
            log.warning(
                "the checkpoint has compression errors of %d ranks, which do not fit this run of %d ranks and its "
                "buckets: they start from 0",
                saved,
                self._num_ranks,
            )
        return self._commit

    def tensors(self) -> Iterator[zpartition.Shard]:
        """Yield this rank's own tensors."""
        for key, tensor in self.optimizer.rank_tensors().items():
            yield self._shard(key, tensor.detach().reshape(-1))

    def tensors_to_fill(self, *, weights_only: bool) -> Iterator[zpartition.Shard]:
        """Yield memory for them."""
        expected, self._expected = {} if weights_only else self._expected, {}
        self._staged = {key: torch.zeros(numel, device=self.partition.device) for key, numel in expected.items()}
        for key, tensor in self._staged.items():
            yield self._shard(key, tensor)

    def reset_tensors(self) -> None:
        self.optimizer.reset_ranks()

    def _commit(self) -> None:
        """Copy the loaded tensors into place; the optimizer's state has been restored."""
        self.optimizer.follow_freeze_step()
        staged, self._staged = self._staged, {}
        if not staged:
            self.optimizer.reset_ranks()
        live = self.optimizer.rank_tensors()
        for key, tensor in staged.items():
            if key in live:
                live[key].view(-1).copy_(tensor)

    def _shard(self, key: str, tensor: Tensor) -> zpartition.Shard:
        stages = self.partition.pipeline_stages
        stage = f"stage{stages.rank}of{stages.size}." if stages.size > 1 else ""
        name = f"{stage}rank{self.partition.rank}of{self._num_ranks}.{self.name}.{key}"
        numel = tensor.numel()
        return zpartition.Shard(name, (numel,), ((0, numel),), (0, numel), tensor)

    @property
    def _num_ranks(self) -> int:
        return self.partition.layout.world_size

    def _connect(self) -> None:
        self.holders = self.partition.holders
        exchange = zpartition.BucketExchange(self.partition)
        self.optimizer.connect(exchange)
        ledger = weakref.WeakMethod(exchange.ledger)  # no cycle of references with the partition
        self.partition.held_beside = lambda: (ledger() or dict)()

    def _follow(self) -> None:
        if self.partition.holders is not self.holders:
            log.warning(
                "parameters were unfrozen: the compression errors of %s start anew", type(self.optimizer).__name__
            )
            self._connect()
        self.partition.reduce_gradients(not self.optimizer.needs_local_gradients)
