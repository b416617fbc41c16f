"""What users look up on an engine: getters with the names that DeepSpeed scripts and integrations use."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.distributed import ProcessGroup

from zengine.exporting import EngineExports
from zengine.feeding import EngineData
from zengine.getters import EngineGetters
from zengine.phases import EnginePhases
from zengine.precision_facts import PrecisionFacts

if TYPE_CHECKING:
    from zengine.clock import Clock
    from zengine.config import Plan
    from zengine.parts import Parts, TelemetrySlot
    from zengine.report import StepReport
    from zpartition.activations import Checkpointing


class EngineFacts(PrecisionFacts, EngineGetters, EnginePhases, EngineData, EngineExports):
    """Read-only answers from the plan, the clock and the last report; mixed into `Engine`."""

    if TYPE_CHECKING:
        module: nn.Module
        parts: Parts
        plan: Plan
        clock: Clock
        last_report: StepReport | None

    # -- where we are ----------------------------------------------------------------------------

    @property
    def global_steps(self) -> int:
        """Boundaries so far, skipped ones included."""
        return self.clock.steps

    @property
    def applied_steps(self) -> int:
        """Boundaries that changed the weights."""
        return self.clock.applied_steps

    @property
    def skipped_steps(self) -> int:
        """Boundaries that did not."""
        return self.clock.skipped_steps

    @property
    def micro_steps(self) -> int:
        """`step` calls so far."""
        return self.clock.micro_steps

    @property
    def global_samples(self) -> int:
        """Samples of all complete steps, over all replicas."""
        return self.clock.samples

    def was_step_applied(self) -> bool:
        """Whether the last boundary changed the weights."""
        return bool(self.last_report)

    def get_global_grad_norm(self) -> float | None:
        """Norm of the averaged gradients at the last boundary, before clipping, unscaled; None before the first."""
        return None if self.last_report is None else self.last_report.grad_norm

    def paused(self) -> AbstractContextManager[None]:
        """Around what is not training (validation, sampling): its time is left out of the throughput."""
        return self.parts.telemetry.paused()

    def span(self, name: str) -> AbstractContextManager[None]:
        """Time what happens inside as a phase: `with engine.span("data"): batch = next(batches)`."""
        return self.parts.telemetry.span(name)

    @property
    def activation_checkpointing(self) -> Checkpointing:
        """Runs a block so that its activations are computed again in backward, as the config's section says."""
        return self.parts.checkpointing()

    def report_tokens(self, num_tokens: int) -> None:
        """Tokens of this rank in the step under way, where what forward gets would mislead; they add up."""
        self.parts.telemetry.report_tokens(num_tokens)

    @property
    def monitor(self) -> TelemetrySlot:
        """Charts of your own (rank 0): `engine.monitor.write_events([("eval/loss", 1.5, engine.global_samples)])`."""
        return self.parts.telemetry

    @property
    def bench_done(self) -> bool:
        """Whether the steps that the config's `bench_steps` asks for are measured; the same on all ranks."""
        return self.parts.telemetry.bench_done

    # -- what was decided ------------------------------------------------------------------------

    @property
    def config(self) -> Plan:
        """The resolved plan: `print(engine.config)` lists every value with its origin (the module's own `config`,
        where it has one, is `engine.module.config`)."""
        return self.plan

    def get_batch_info(self) -> tuple[int, int, int]:
        """(train batch size, micro-batch size, accumulation)."""
        batch = self.plan.batch
        return batch.train_batch_size, batch.micro_batch_size, batch.accumulation

    # -- who we are ------------------------------------------------------------------------------

    @property
    def world(self) -> Any:
        """This process's place in the run (`zcomm.World`)."""
        return self.parts.world

    @property
    def device(self) -> torch.device:
        """Where the module lives."""
        return self.parts.world.device

    @property
    def global_rank(self) -> int:
        """Rank of this process."""
        return self.parts.world.rank

    @property
    def local_rank(self) -> int:
        """Rank within this host."""
        return self.parts.world.local_rank

    @property
    def world_size(self) -> int:
        """Number of processes."""
        return self.parts.world.world_size

    @property
    def dp_world_size(self) -> int:
        """Data-parallel replicas."""
        return self.plan.batch.replicas

    @property
    def sequence_parallel_size(self) -> int:
        """Ranks that share the tokens of each sample."""
        return self.plan.parallel.degrees.sequence

    @property
    def seq_parallel_group(self) -> ProcessGroup | None:
        """Those of this one's samples, in the order of their tokens."""
        return self.parts.groups.sequence()

    def get_sequence_parallel_group(self) -> ProcessGroup | None:
        """The same."""
        return self.seq_parallel_group

    # -- the parts that users hold ---------------------------------------------------------------

    @property
    def optimizer(self) -> torch.optim.Optimizer | None:
        """The optimizer, its groups rebound onto this rank's shards."""
        return self.parts.optimizer.optimizer

    @property
    def lr_scheduler(self) -> Any:
        """The learning-rate schedule; None without one."""
        return self.parts.client_scheduler

    @property
    def training_dataloader(self) -> Any:
        """The loader made from training_data; None without it."""
        return self.parts.loader

    def get_lr(self) -> list[float]:
        """Learning rate of each parameter group."""
        return list(self.parts.optimizer.lr())

    def set_lr(self, lr: float) -> None:
        """Another learning rate for all groups, from the next update on; a schedule sets its own after that."""
        for group in self._groups():
            group["lr"] = lr

    def get_mom(self) -> list[Any]:
        """Momentum of each parameter group, or the betas of those that have betas; 0 for neither."""
        return [group.get("betas", group.get("momentum", 0.0)) for group in self._groups()]

    def get_type(self) -> list[Any]:
        """What each parameter group calls its "type" (DeepSpeed's Muon does); 0 for none."""
        return [group.get("type", 0.0) for group in self._groups()]

    def _groups(self) -> list[dict[str, Any]]:
        return [] if self.optimizer is None else self.optimizer.param_groups

    @property
    def loss_scale(self) -> float:
        """The factor that the next loss is multiplied by."""
        return float(self.parts.scaler.factor)

    def __getattr__(self, name: str) -> Any:
        """Anything else is the module's own (`engine.generate`, ...)."""
        if name == "module":
            return nn.Module.__getattr__(self, name)  # type: ignore[arg-type]
        try:
            return nn.Module.__getattr__(self, name)  # type: ignore[arg-type]
        except AttributeError:
            pass
        try:
            return getattr(self.module, name)
        except AttributeError as error:
            raise AttributeError(
                f"neither the engine nor its module ({type(self.module).__name__}) has an attribute {name!r}"
            ) from error
