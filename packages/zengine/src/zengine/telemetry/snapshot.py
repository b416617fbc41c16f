"""Everything that one boundary has to say, as a value, and the names of its charts.

The tags `Train/Samples/...` are DeepSpeed's, so existing dashboards keep working; the x axis of every chart
is the number of samples seen by all ranks, so runs with different batch sizes can be laid over each other.
"""

from __future__ import annotations

from collections.abc import Mapping

import attrs

from zengine.report import StepReport
from zengine.telemetry.comms import Tally
from zengine.telemetry.spans import MICRO
from zengine.telemetry.throughput import Rate

TRAIN = "Train/Samples/"
TIME = "Train/Samples/elapsed_time_ms_"
THROUGHPUT = "Throughput/"
MEMORY = "Memory/"
COMMUNICATION = "Communication/"


@attrs.frozen(kw_only=True)
class Snapshot:
    """One boundary: what the engine reports, and what telemetry measured around it."""

    report: StepReport
    rate: Rate = attrs.field(factory=Rate)  # this step; falsy while not measured
    phase_ms: Mapping[str, float] = attrs.field(factory=dict)  # totals by timer; empty without breakdown
    micro_ms: Mapping[str, float] = attrs.field(factory=dict)  # the same for the last micro-step
    memory: Mapping[str, int] = attrs.field(factory=dict)  # bytes by name
    comms: Mapping[str, Tally] = attrs.field(factory=dict)  # collectives of this step, by operation

    def scalars(self) -> dict[str, float]:
        """Every number of this boundary by its tag. What was not measured is absent, not zero."""
        return {
            **{TRAIN + name: value for name, value in _training(self.report).items()},
            **{TIME + timer: ms for timer, ms in self.phase_ms.items()},
            **{TIME + timer + MICRO: ms for timer, ms in self.micro_ms.items()},
            **{THROUGHPUT + name: value for name, value in _throughput(self.rate).items()},
            **{f"{MEMORY}{name}_bytes": float(nbytes) for name, nbytes in self.memory.items()},
            **{f"{COMMUNICATION}{op}_bytes": float(tally.nbytes) for op, tally in self.comms.items()},
            **{f"{COMMUNICATION}{op}_ms": tally.ms for op, tally in self.comms.items()},
        }


def _training(report: StepReport) -> dict[str, float]:
    """`lr` is that of the first parameter group; the others follow as `lr_group_1`, `lr_group_2`, ..."""
    names = ["lr", *(f"lr_group_{i}" for i in range(1, len(report.lr)))]
    return {
        "train_loss": report.loss,
        **dict(zip(names, report.lr)),
        "grad_norm": report.grad_norm,
        "loss_scale": report.loss_scale,
        "skipped_steps": float(report.skipped_steps),
    }


def _throughput(rate: Rate) -> dict[str, float]:
    return {"samples_per_s": rate.samples_per_s, "step_ms": rate.step_ms} if rate else {}
