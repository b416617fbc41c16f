"""Output of `zengine explain`: one frozen value, as text and as JSON."""

from __future__ import annotations

from typing import Any

import attrs
import torch
from torch import nn

from zengine.config import Config, Facts, Plan
from zengine.config.plan.rows import text_of
from zengine.planning.advice import Case, advice_lines
from zengine.planning.sizes import Sizes, at_stage, switch_bytes
from zengine.planning.tables import columns, gib, ranks, section, wrapped

__all__ = ["Explanation", "explain"]

_BATCH = (
    ("train_batch_size", "", "train_batch_size"),
    ("= micro", "train_micro_batch_size_per_gpu", "micro_batch_size"),
    ("x accumulation", "gradient_accumulation_steps", "accumulation"),
    ("x replicas", "data_parallel_size", "replicas"),
)


@attrs.frozen(kw_only=True)
class Explanation:
    """Plan, sizes and advice for a config, a world and a model."""

    config: Config
    plan: Plan
    facts: Facts
    subject: str  # the model, in words
    sizes: Sizes  # under the plan's own stage
    by_stage: tuple[Sizes, ...]  # 0 to 3
    advice: tuple[str, ...]

    def text(self, *, everything: bool = False) -> str:
        """Format sections; `everything` includes values at their defaults."""
        device = "GPU" if self.facts.device_type == "cuda" else "CPU"
        sections = [
            f"{self.config.source} on {ranks(self.facts.world_size)} ({device})",
            section("batch", [self.equation()]),
            section("plan", self._value_lines(everything)),
            section(f"one rank holds, for {self.subject}, without activations", self._memory_lines()),
            section("one rank sends, in an optimizer step", self._traffic_lines()),
            section("the same model at each stage", self._stage_lines()),
            section("worth knowing", [line for each in self.advice for line in wrapped(each)]),
        ]
        return "\n\n".join(sections)

    def equation(self) -> str:
        """Format the batch sizes with their origins."""
        batch, terms = self.plan.batch, []
        for word, key, name in _BATCH:
            word = "in shares of at most" if batch.uneven and key == "train_micro_batch_size_per_gpu" else word
            origin = self.plan.origins.get(key or "train_batch_size", "default")
            terms.append(f"{word} {getattr(batch, name)} ({origin})")
        return " ".join(terms)

    def as_json(self) -> dict[str, Any]:
        """Return plain data."""
        return {
            "config": self.config.source,
            "world_size": self.facts.world_size,
            "device": self.facts.device_type,
            "batch": attrs.asdict(self.plan.batch),
            "plan": [[key, _plain(value), self._origin(key)] for key, value in self.plan.rows()],
            "model": self.subject,
            "memory_bytes": self.sizes.memory.ledger() | {"total": self.sizes.memory.total_bytes},
            "switch_bytes": switch_bytes(self.sizes, self.plan),
            "traffic": [attrs.asdict(flow) for flow in self.sizes.traffic.flows],
            "stages": [
                {"stage": stage, "memory_bytes": each.memory.total_bytes, "sent_bytes": each.traffic.total_bytes}
                for stage, each in enumerate(self.by_stage)
            ],
            "worth_knowing": list(self.advice),
        }

    def _origin(self, key: str) -> str:
        return self.plan.origins.get(key, "default")

    def _value_lines(self, everything: bool) -> list[str]:
        table = [(key, text_of(value), self._origin_text(key)) for key, value in self.plan.rows()]
        shown = [row for row in table if everything or row[2] != "default"]
        lines = columns(shown)
        hidden = len(table) - len(shown)
        return [*lines, f"... and {hidden} keys at their defaults (--all shows them)"] if hidden else lines

    def _origin_text(self, key: str) -> str:
        how = self.config.autos.get(key, "")
        origin = self._origin(key)
        return f"auto: {how}" if how and origin == "auto" else origin

    def _memory_lines(self) -> list[str]:
        memory = self.sizes.memory
        owners = [(owner, gib(size)) for owner, size in memory.ledger().items() if size]
        total = "total on the device" if memory.elsewhere else "total"
        rows = [*owners, (total, gib(memory.total_bytes))]
        if switch := switch_bytes(self.sizes, self.plan):
            rows.append(("weights of a rollout, meanwhile", gib(switch)))
        return columns(rows, right=1)

    def _traffic_lines(self) -> list[str]:
        traffic = self.sizes.traffic
        if not traffic.flows:
            return ["nothing: there is only one rank"]
        table = [
            (flow.what, f"{flow.num_messages:,} messages", f"among {flow.among}", gib(flow.num_bytes))
            for flow in traffic.flows
        ]
        return columns(
            [
                *table,
                ("total", "", f"{traffic.share:.2f} x one all-reduce of the gradients", gib(traffic.total_bytes)),
            ],
            right=3,
        )

    def _stage_lines(self) -> list[str]:
        head = ("stage", "model states", "buffers", "host and disk", "total on the device", "sent in a step")
        table: list[tuple[str, ...]] = [head]
        for stage, each in enumerate(self.by_stage):
            memory = each.memory
            mark = f"{stage} *" if stage == self.plan.zero.stage else f"{stage}  "
            moving = memory.total_bytes - memory.model_states_bytes
            sizes_of = (memory.model_states_bytes, moving, memory.host_bytes + memory.disk_bytes, memory.total_bytes)
            table.append((mark, *map(gib, sizes_of), gib(each.traffic.total_bytes)))
        return columns(table, right=-5)


def explain(config: Config, plan: Plan, facts: Facts, module: nn.Module, subject: str) -> Explanation:
    """Explain `plan` for `module`, which is on the meta device; casts it to the plan's dtype in place."""
    module = plan.precision.cast_module(module)
    case = Case(config=config, plan=plan, facts=facts, module=module)
    own = case.sizes
    stages = tuple(own if stage == plan.zero.stage else case.of(at_stage(plan, stage)) for stage in range(4))
    return Explanation(
        config=config,
        plan=plan,
        facts=facts,
        subject=subject,
        sizes=own,
        by_stage=stages,
        advice=advice_lines(case),
    )


def _plain(value: object) -> object:
    return str(value).removeprefix("torch.") if isinstance(value, torch.dtype) else value
