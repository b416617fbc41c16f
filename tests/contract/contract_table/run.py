"""One rank of a run: the engine, a row of the table, a scenario."""

from __future__ import annotations

import hashlib
import importlib
import tempfile
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import attrs
import pytest
import torch
from torch import nn

import zcomm
import zengine
import zoptim
import zpartition
from contract_table.oracle import CLIP_NORM
from contract_table.rows import BUCKET_NUMEL, Row
from contract_table.scenarios import NUM_STEPS, SCENARIOS, Incident, Scenario, batches, last_batch

DTYPES = {
    torch.float64: {},  # the model's own; the config sets none
    torch.float32: {},
    torch.bfloat16: {"bf16": {"enabled": True}},
    torch.float16: {"fp16": {"enabled": True, "loss_scale": 256.0}},
}


@attrs.frozen
class Case:
    """One combination on one row."""

    row: Row
    scenario: str
    dtype: torch.dtype
    accumulation: int

    @property
    def combination(self) -> tuple[str, torch.dtype, int]:
        """Settings under which rows are compared."""
        return self.scenario, self.dtype, self.accumulation

    @property
    def rounds(self) -> int:
        """Reductions of the gradients of a step."""
        return 1 if self.row.reduces_once else self.accumulation

    def __str__(self) -> str:
        return f"{self.row.name} | {self.scenario} | {str(self.dtype)[6:]} | accumulation {self.accumulation}"


@attrs.frozen(kw_only=True)
class Outcome:
    """Results of a case on one rank."""

    losses: tuple[float, ...]  # this rank's losses of each step, and of the last batch
    weights: str  # digest of the final state dict
    sent: tuple[tuple[str, str, int], ...]  # (collective, label, bytes) of the last step, in order
    buckets: tuple[tuple[int, int, str], ...]  # (index, bytes of the weights, unit or "") of each bucket
    ledger: dict[str, int]  # bytes by owner after the last step
    planned: dict[str, int]  # the same before the first
    peak_bytes: int  # of gathered units
    level: float  # the buffer of that name after training; 0 without one


def run_cases(cases: list[Case]) -> list[Outcome | str]:
    """Return the outcome of each case up to the first that fails, and the error of that one."""
    outcomes: list[Outcome | str] = []
    for case in cases:
        try:
            outcomes.append(run_case(case))
        except (Exception, pytest.fail.Exception) as error:
            outcomes.append(f"{type(error).__name__}: {error}")
            break  # recovery from a failed run has tests of its own
    return outcomes


def run_case(case: Case) -> Outcome:
    """Train and evaluate, with the disk tier in a temporary folder; return the outcome."""
    with tempfile.TemporaryDirectory() as own:
        folder = zcomm.all_gather_object(own)[0]
        outcome = _run_case(attrs.evolve(case, row=case.row.writing_to(folder)))
        zcomm.barrier()
        left = sorted(path.name for path in Path(folder).iterdir())
        assert not left, f"left on disk: {left}"
        zcomm.barrier()  # the folder can be removed
        return outcome


def _run_case(case: Case) -> Outcome:
    scenario = SCENARIOS[case.scenario]
    model = scenario.model()
    if case.dtype is torch.float64:
        model.double()
    with _offloading(case.row.offload):
        engine, *_ = zengine.initialize(model=model, config=_config(case, scenario))
    partition, device = engine.parts.partition, engine.parts.world.device
    planned = zpartition.plan(
        model if not partition.unsharder.units else scenario.cast(scenario.model(), case.dtype),
        policy=engine.plan.zero,
        world_size=zcomm.group_size(),
        num_backwards=case.accumulation * scenario.num_losses,
        device=device.type,
        optimizer=lambda params: zoptim.make_optimizer(
            scenario.optimizer["type"], params, scenario.optimizer["params"]
        ),
    )
    losses, log = [], []
    for step, data in enumerate(batches(zcomm.group_size(), case.accumulation)):
        scenario.prepare(model, step)
        scenario.before(engine, step)
        log.clear()
        with zcomm.traced(log):
            losses.append(_step(engine, scenario, data[:, zcomm.group_rank()].to(device), step))
    ledger, peak = partition.ledger(), partition.unsharder.peak_numel * case.dtype.itemsize
    sizes = [(b.index, b.numel * b.dtype.itemsize, b.unit or "") for b in partition.layout.buckets]
    with torch.no_grad():
        losses.append(engine(last_batch().to(device)).item())
    outcome = Outcome(
        losses=tuple(losses),
        weights=_digest(engine),
        sent=tuple((r.op, r.label, r.nbytes) for r in sorted(log, key=lambda record: record.index)),
        buckets=tuple(sizes),
        ledger=ledger,
        planned=planned.ledger(),
        peak_bytes=peak,
        level=float(getattr(model, "level", 0.0)),
    )
    engine.close()
    return outcome


def _offloading(offload: zpartition.Offload | None) -> AbstractContextManager[object]:
    """Make engines with `offload` instead of their configs' offload, inside the block."""
    if offload is None:
        return nullcontext()
    place = importlib.import_module("zengine.initialize")
    make_engine = place.make_engine

    def made(model: nn.Module, client: Any, plan: Any, *rest: Any) -> zengine.Engine:
        zero = attrs.evolve(plan.zero, offload=offload)
        engine: zengine.Engine = make_engine(model, client, attrs.evolve(plan, zero=zero), *rest)
        return engine

    return mock.patch.object(place, "make_engine", made)


def _config(case: Case, scenario: Scenario) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": case.accumulation,
        "gradient_clipping": CLIP_NORM,
        "optimizer": scenario.optimizer,
        "zero_optimization": {"reduce_bucket_size": BUCKET_NUMEL, **case.row.zero},
        **DTYPES[case.dtype],
        **case.row.config,
    }


def _step(engine: zengine.Engine, scenario: Scenario, data: torch.Tensor, step: int) -> float:
    """Run one step of this rank, with its incidents; return its mean loss."""
    incident = scenario.incident(step)
    total = 0.0
    done = 0
    if incident.error is not None:
        total = sum(_micro_step(engine, scenario, tokens, step) for tokens in data[:-1])
        _fail(engine, scenario, data[-1], step, incident)
        total, done = (0.0, 0) if incident.restarts else (total, len(data) - 1)
    for tokens in data[done:]:
        total += _micro_step(engine, scenario, tokens, step)
    return total / len(data)


def _micro_step(engine: zengine.Engine, scenario: Scenario, tokens: torch.Tensor, step: int) -> float:
    total = 0.0
    for loss, again in scenario.losses(engine, tokens, step):
        engine.backward(loss, retain_graph=again)
        total += loss.item()
    scenario.end_micro_step(engine)
    return total


def _fail(engine: zengine.Engine, scenario: Scenario, tokens: torch.Tensor, step: int, incident: Incident) -> None:
    assert incident.error is not None
    with pytest.raises(incident.error, match=incident.match), incident.armed(engine.module):
        _micro_step(engine, scenario, tokens, step)


def _digest(engine: nn.Module) -> str:
    found = hashlib.sha256()
    for name, tensor in engine.state_dict().items():
        found.update(name.encode())
        found.update(tensor.cpu().reshape(-1).contiguous().view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


__all__ = ["NUM_STEPS", "Case", "Outcome", "run_case", "run_cases"]
