"""Compressed optimizers in the plan: memory and traffic of both phases, as a live engine has them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import zcomm
import zengine
import zoptim
import zpartition
from zcomm.testing import run_ranks
from zengine.config import Facts, load, resolve
from zengine.planning.explanation import explain
from zengine.planning.sizes import Sizes, sizes

EXACT = ("compression errors", "compressed momenta", "states", "parameters", "masters")
OPTIONS: dict[str, dict[str, Any]] = {
    "OneBitAdam": {"freeze_step": 3},
    "OneBitLamb": {"freeze_step": 3},
    "ZeroOneAdam": {"var_freeze_step": 2, "local_step_scaler": 100},
}
CASES = [("OneBitAdam", 0), ("OneBitAdam", 1), ("OneBitLamb", 0), ("OneBitLamb", 1), ("ZeroOneAdam", 0)]


class Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(65, 65) for _ in range(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = torch.tanh(block(x))
        return x.float().square().mean()


def config(name: str, stage: int, micro: int = 1, **changes: Any) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": micro,
        "optimizer": {"type": name, "params": {"lr": 0.01, **OPTIONS[name]}},
        "zero_optimization": {"stage": stage, "reduce_bucket_size": 9_000},
        **changes,
    }


def planned(source: dict[str, Any], num_ranks: int) -> Sizes:
    plan = resolve(load(source), Facts(world_size=num_ranks, replicas=num_ranks))
    return sizes(Stack().to(plan.precision.param), plan, world_size=num_ranks, device="cpu")


def live(source: dict[str, Any]) -> dict[str, int]:
    engine = zengine.initialize(model=Stack(), config=source)[0]
    dtype, most_buffers = next(engine.parameters()).dtype, 0
    for step in range(6):
        for _ in range(engine.gradient_accumulation_steps()):
            x = torch.randn(2, 65, generator=torch.Generator().manual_seed(10 * step + engine.global_rank))
            engine.backward(engine(x.to(dtype)))
            most_buffers = max(most_buffers, engine.parts.partition.ledger()["buckets"])
            engine.step()
    assert engine.optimizer.needs_local_gradients
    found = engine.parts.partition.ledger()
    engine.close()
    return {**found, "buckets": most_buffers}


@pytest.mark.parametrize(("narrow", "micro"), [(False, 1), (False, 2), (True, 1)])
@pytest.mark.parametrize(("name", "stage"), CASES)
def test_the_plan_has_what_a_rank_holds_in_the_compressed_stage(
    name: str, stage: int, narrow: bool, micro: int
) -> None:
    source = config(name, stage, micro, **({"bf16": {"enabled": True}} if narrow else {}))
    own = planned(source, 2).memory.ledger()
    for found in run_ranks(live, 2, source):
        assert {owner: found.get(owner, 0) for owner in EXACT} == {owner: own.get(owner, 0) for owner in EXACT}
        assert found["buckets"] <= own["buckets"]
        assert set(found) <= set(own)


def test_errors_are_as_large_as_the_momenta_and_a_span() -> None:
    (found, *_) = run_ranks(live, 4, config("OneBitAdam", 0, zero_optimization={"stage": 0}))
    numel = sum(param.numel() for param in Stack().parameters())
    whole = found["compression errors"] / 4 / (1 + 1 / 4)
    assert numel <= whole <= 1.15 * numel  # the bucket is padded
    assert numel / 8 < found["compressed momenta"] < 1.2 * numel / 8


def test_one_rank_and_other_optimizers_hold_none() -> None:
    assert not planned(config("OneBitAdam", 0), 1).memory.compression
    plain = {**config("OneBitAdam", 0), "optimizer": {"type": "AdamW", "params": {"lr": 0.01}}}
    assert not planned(plain, 2).memory.compression


def test_the_plan_of_a_run_names_the_errors() -> None:
    source, facts = load(config("OneBitAdam", 1)), Facts(world_size=2, replicas=2)
    assert "compression errors" in explain(source, resolve(source, facts), facts, Stack(), "a stack").text()


# -- traffic -----------------------------------------------------------------------------------------

SENT = {"all_reduce": 2, "reduce_scatter": 1, "all_gather": 1, "all_to_all": 1}  # times the payload, on a ring
SMALL = 1024  # bytes: norms, flags and sums of single tensors


def sent_in_steps(source: dict[str, Any], steps: int) -> list[tuple[int, int]]:
    """Return messages and bytes through this rank of each step, small ones left out."""
    engine, found = zengine.initialize(model=Stack(), config=source)[0], []
    for step in range(steps):
        records: list[zcomm.Record] = []
        with zcomm.traced(records.append):
            for part in range(engine.gradient_accumulation_steps()):
                x = torch.randn(2, 65, generator=torch.Generator().manual_seed(10 * step + part + engine.global_rank))
                engine.backward(engine(x))
                engine.step()
        large = [each for each in records if each.nbytes > SMALL]
        through = sum(SENT[each.op] * each.nbytes * (each.group_size - 1) // each.group_size for each in large)
        found.append((len(large), through))
    engine.close()
    return found


def counted(flows: tuple[Any, ...]) -> tuple[int, int]:
    return sum(flow.num_messages for flow in flows), sum(flow.num_bytes for flow in flows)


@pytest.mark.parametrize("num_ranks", [2, 4])
@pytest.mark.parametrize(("name", "stage"), CASES)
def test_a_live_step_of_each_phase_sends_what_the_plan_says(name: str, stage: int, num_ranks: int) -> None:
    source = config(name, stage)
    traffic = planned(source, num_ranks).traffic
    for found in run_ranks(sent_in_steps, num_ranks, source, 6):
        assert found[1] == counted(traffic.flows)  # the second step of the warm-up
        assert found[5] == counted(traffic.compressed)  # the third of the compressed stage


def test_accumulation_does_not_multiply_compressed_momenta() -> None:
    source = config("OneBitAdam", 1, micro=2)
    (found, *_) = run_ranks(sent_in_steps, 2, source, 6)
    assert found[5] == counted(planned(source, 2).traffic.compressed)


def test_the_groups_without_compression_are_counted_exactly() -> None:
    with torch.device("meta"):
        exact, *rest = (nn.Linear(512, 512) for _ in range(4))

    def optimizer(_: Any) -> torch.optim.Optimizer:
        others = [param for layer in rest for param in layer.parameters()]
        return zoptim.OneBitAdam([{"params": list(exact.parameters()), "non_freeze": True}, {"params": others}])

    traffic = zpartition.plan_traffic(
        nn.Sequential(exact, *rest), policy=zpartition.ZeroPolicy(stage=0), world_size=4, optimizer=optimizer
    )
    flows = {flow.what: flow.num_bytes for flow in traffic.compressed}
    numel = 512 * 513
    assert flows["exact means of gradients, all-reduce"] == pytest.approx(2 * 3 / 4 * 4 * numel, rel=0.02)
    assert flows["compressed momenta, all-to-all"] == pytest.approx(3 / 4 * 3 * numel / 8, rel=0.02)


def test_other_optimizers_stages_and_one_rank_have_one_phase() -> None:
    plain = {**config("OneBitAdam", 0), "optimizer": {"type": "AdamW", "params": {"lr": 0.01}}}
    assert not planned(plain, 2).traffic.compressed
    assert not planned(config("OneBitAdam", 0), 1).traffic.compressed
    assert planned(plain, 2).traffic.compressed_bytes == 0


@pytest.mark.parametrize(
    ("name", "options", "said"),
    [
        ("OneBitAdam", {"freeze_step": 7}, "warm-up, until freeze_step = 7:"),
        ("OneBitLamb", {}, "warm-up, until freeze_step = 100000:"),
        ("OneBitAdam", {"freeze_step": "auto"}, "warm-up, until second moments settle (freeze_step = auto):"),
        ("ZeroOneAdam", {"var_freeze_step": 9}, "ever more rarely until var_freeze_step = 9:"),
    ],
)
def test_the_explanation_shows_both_phases(name: str, options: dict[str, Any], said: str) -> None:
    given = {**config(name, 0), "optimizer": {"type": name, "params": {"lr": 0.01, **options}}}
    source, facts = load(given), Facts(world_size=2, replicas=2)
    found = explain(source, resolve(source, facts), facts, Stack(), "a stack")
    text = found.text()
    assert said in text
    assert text.index("gradients, all-reduce") < text.index("compressed momenta, all-to-all")
    assert "sent compressed" in text
    stages = found.as_json()["stages"]
    assert 0 < stages[0]["compressed_bytes"] < stages[0]["sent_bytes"] / 20
    assert found.as_json()["compressed_traffic"][0]["what"] == "compressed momenta, all-to-all"
