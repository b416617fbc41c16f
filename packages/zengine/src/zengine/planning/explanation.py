"""Output of `zengine explain`: one frozen value, as text and as JSON."""

from __future__ import annotations

from typing import Any

import attrs
import torch
from torch import nn

import zpartition
from zengine.config import Config, Facts, Plan
from zengine.config.plan.rows import text_of
from zengine.planning.advice import Case, advice_lines
from zengine.planning.sizes import Sizes, at_stage, switch_bytes
from zengine.planning.tables import columns, gib, ranks, section, wrapped

__all__ = ["Explanation", "explain"]

DEFAULT_FREEZE_STEP = 100_000  # of the compressed optimizers, as DeepSpeed's

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
            "compressed_traffic": [attrs.asdict(flow) for flow in self.sizes.traffic.compressed],
            "stages": [
                {
                    "stage": stage,
                    "memory_bytes": each.memory.total_bytes,
                    "sent_bytes": each.traffic.total_bytes,
                    "compressed_bytes": each.traffic.compressed_bytes,
                }
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
        if not traffic.compressed:
            return _flow_lines(traffic.flows, traffic.unit_bytes)
        before, after = compressed_phases(self.plan)
        return [
            f"{before}:",
            *_flow_lines(traffic.flows, traffic.unit_bytes),
            "",
            f"{after}:",
            *_flow_lines(traffic.compressed, traffic.unit_bytes),
        ]

    def _stage_lines(self) -> list[str]:
        head = ("stage", "model states", "buffers", "host and disk", "total on the device", "sent in a step")
        has_phases = bool(self.sizes.traffic.compressed)
        table: list[tuple[str, ...]] = [(*head, "sent compressed") if has_phases else head]
        for stage, each in enumerate(self.by_stage):
            memory = each.memory
            mark = f"{stage} *" if stage == self.plan.zero.stage else f"{stage}  "
            moving = memory.total_bytes - memory.model_states_bytes
            sizes_of = (memory.model_states_bytes, moving, memory.host_bytes + memory.disk_bytes, memory.total_bytes)
            compressed = gib(each.traffic.compressed_bytes) if each.traffic.compressed else "-"
            row = (mark, *map(gib, sizes_of), gib(each.traffic.total_bytes))
            table.append((*row, compressed) if has_phases else row)
        return columns(table, right=-6 if has_phases else -5)


def _flow_lines(flows: tuple[zpartition.Flow, ...], unit_bytes: int) -> list[str]:
    """Format messages and their total, in units of one all-reduce of all gradients (`unit_bytes`)."""
    table = [(flow.what, _messages(flow.num_messages), f"among {flow.among}", gib(flow.num_bytes)) for flow in flows]
    total = sum(flow.num_bytes for flow in flows)
    share = total / unit_bytes if unit_bytes else 0.0
    return columns([*table, ("total", "", f"{share:.2f} x one all-reduce of the gradients", gib(total))], right=3)


def _messages(count: int) -> str:
    return f"{count:,} message{'s' * (count != 1)}"


def compressed_phases(plan: Plan) -> tuple[str, str]:
    """Return when a compressed optimizer reduces gradients, and when it sends a bit an element, in words."""
    params = plan.optimizer.params
    if plan.optimizer.type.lower() == "zerooneadam":
        step = params.get("var_freeze_step", DEFAULT_FREEZE_STEP)
        return (
            f"steps that update second moments, ever more rarely until var_freeze_step = {step}",
            "other steps, and after the freeze those that synchronize (the rest of them send nothing)",
        )
    step = params.get("freeze_step", DEFAULT_FREEZE_STEP)
    until = "until second moments settle (freeze_step = auto)" if step == "auto" else f"until freeze_step = {step}"
    return f"warm-up, {until}", "compressed stage, from then on"


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
