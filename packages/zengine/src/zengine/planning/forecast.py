"""Output of `zengine plan`: one frozen value, as text and as JSON."""

from __future__ import annotations

from typing import Any

import attrs

from zengine.config import Config, ConfigError, Facts, Plan, load, resolve
from zengine.planning.advice import with_changes
from zengine.planning.sizes import Peak, StageFit, Workload, best_fit, fit_stages, peak
from zengine.planning.tables import columns, gib, ranks, section

__all__ = ["Forecast", "forecast"]

USABLE = 0.92  # of a rank's memory; the rest is for kernels' scratch memory, the context and fragmentation


@attrs.frozen(kw_only=True)
class Forecast:
    """Peak of a plan, and the largest micro-batch that fits at each stage."""

    config: Config
    facts: Facts
    own: Peak  # of the plan as it is
    room_bytes: int  # of one rank
    stages: tuple[StageFit, ...]  # the largest micro-batch at each
    subject: str = ""  # the model, in words
    measured: tuple[int, int] = (0, 0)  # (measured, planned) peak of a single process; zeros: not measured

    @property
    def own_fits(self) -> bool:
        """True if the plan fits as it is."""
        return self.own.total <= self.usable_bytes

    @property
    def usable_bytes(self) -> int:
        """Usable memory of one rank."""
        return usable(self.room_bytes)

    @property
    def best(self) -> tuple[int, Peak] | None:
        """Stage with the least traffic per step of the same batch."""
        return best_fit(self.stages)

    def text(self) -> str:
        """Format sections."""
        device = "GPU" if self.facts.device_type == "cuda" else "CPU"
        head = f"{self.config.source}: {self.subject} on {ranks(self.facts.world_size)} ({device})"
        sections = [
            head,
            section(f"peak of one rank, micro-batch {self.own.micro_batch}", self._own_lines()),
            section("the largest micro-batch that fits", [*self._stage_lines(), *self._best_lines()]),
        ]
        if self.measured[0]:
            real, planned = self.measured
            text = f"{gib(real)} at the peak of a step, {gib(planned)} planned ({planned / real:.0%})"
            sections.append(section("measured, single process", [text]))
        return "\n\n".join(sections)

    def as_json(self) -> dict[str, Any]:
        """Return plain data."""
        best = self.best
        return {
            "config": self.config.source,
            "model": self.subject,
            "world_size": self.facts.world_size,
            "room_bytes": self.room_bytes,
            "usable_bytes": self.usable_bytes,
            "fits": self.own_fits,
            "own": _as_json(self.own),
            "stages": [
                {
                    "stage": each.stage,
                    "largest_micro_batch": each.largest,
                    **(_as_json(each.peak) if each.peak else {}),
                }
                for each in self.stages
            ],
            "best_stage": best[0] if best else None,
            "measured": {"peak_bytes": self.measured[0], "planned_bytes": self.measured[1]},
        }

    def _own_lines(self) -> list[str]:
        own, memory = self.own, self.own.sizes.memory
        rows = [
            ("between steps", gib(own.between_steps)),
            ("buckets and gathered weights", gib(memory.total_bytes - own.between_steps)),
            ("activations in forward", gib(own.activations.forward)),
            ("activations in backward", gib(own.activations.backward)),
            ("peak: all except the smaller activations", gib(own.total)),
            (f"usable ({USABLE:.0%} of {gib(self.room_bytes)})", gib(self.usable_bytes)),
        ]
        if own.switch:
            rows.insert(-2, ("weights of a rollout, without its cache", gib(own.switch)))
            rows[-2] = ("peak: of a step or of a switch to a rollout", gib(own.total))
        if memory.host_bytes:
            rows.insert(-2, ("host memory, for offload", gib(memory.host_bytes)))
        verdict = "it fits" if self.own_fits else f"it does not fit: {gib(own.total - self.usable_bytes)} over"
        if self.own.is_approximate:
            verdict += "; without a GPU here, activations are those of the CPU's kernels"
        return [*columns(rows, right=1), verdict]

    def _stage_lines(self) -> list[str]:
        has_phases = bool(self.own.sizes.traffic.compressed)  # of a compressed optimizer
        table = [("stage", "micro-batch", "accumulation", "peak", "sent in a step", "sent compressed")]
        for each in self.stages:
            if each.peak is None:
                table.append((str(each.stage), "none", "", "", "", ""))
                continue
            batch, traffic = each.peak.plan.batch, each.peak.sizes.traffic
            fits = f"{batch.micro_batch_size} (at most {each.largest})"
            sent = gib(traffic.total_bytes), gib(traffic.compressed_bytes) if traffic.compressed else "-"
            table.append((str(each.stage), fits, str(batch.accumulation), gib(each.peak.total), *sent))
        return columns(table if has_phases else [row[:-1] for row in table], right=-3 if has_phases else -2)

    def _best_lines(self) -> list[str]:
        if self.best is None:
            return ["no stage fits even one sample: use more ranks, offload, or activation checkpointing"]
        stage, each = self.best
        batch = each.plan.batch
        removals = [f"remove {key}" for key, value in self.best_changes().items() if value is None]
        return [
            f"stage {stage} sends least for a step of {batch.train_batch_size} samples; set",
            f'"zero_optimization": {{"stage": {stage}}}, "train_micro_batch_size_per_gpu": {batch.micro_batch_size}, '
            f'"gradient_accumulation_steps": {batch.accumulation}',
            *removals,
        ]

    def best_changes(self) -> dict[str, Any]:
        """Config changes for the best stage, by key; None removes a key that the stage would reject."""
        if self.best is None:
            return {}
        stage, each = self.best
        changes: dict[str, Any] = {
            "zero_optimization.stage": stage,
            "train_micro_batch_size_per_gpu": each.plan.batch.micro_batch_size,
            "gradient_accumulation_steps": each.plan.batch.accumulation,
        }
        for key in self.config.given:
            without = {**changes, key: None}
            if key.startswith("zero_optimization.") and key not in changes:
                changes = without if self._num_problems(without) < self._num_problems(changes) else changes
        return changes

    def _num_problems(self, changes: dict[str, Any]) -> int:
        """Count the problems for which the config is rejected with `changes`."""
        try:
            filled = {key: value for key, value in self.config.filled.items() if key not in changes}
            resolve(load(with_changes(self.config.document, changes), auto=filled), self.facts)
        except ConfigError as error:
            return len(error.problems)
        return 0


def forecast(config: Config, plan: Plan, facts: Facts, subject: Workload, *, room_bytes: int) -> Forecast:
    """Forecast `plan` for `subject`.  Raises CannotDryRun."""
    return Forecast(
        config=config,
        facts=facts,
        own=peak(subject, plan, plan.batch.micro_batch_size, plan.parallel.gradient_ranks),
        room_bytes=room_bytes,
        stages=tuple(fit_stages(subject, plan, plan.parallel.gradient_ranks, usable(room_bytes))),
    )


def usable(room_bytes: int) -> int:
    """Return the bytes of a rank's memory that a plan may fill."""
    return int(room_bytes * USABLE)


def _as_json(found: Peak) -> dict[str, Any]:
    return {
        "micro_batch": found.plan.batch.micro_batch_size,
        "accumulation": found.plan.batch.accumulation,
        "peak_bytes": found.total,
        "between_steps_bytes": found.between_steps,
        "activation_bytes": found.activations.peak,
        "switch_bytes": found.switch,
        "sent_bytes": found.sizes.traffic.total_bytes,
        "compressed_bytes": found.sizes.traffic.compressed_bytes,
    }
