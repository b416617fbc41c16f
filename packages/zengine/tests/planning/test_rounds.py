"""Rounds of local steps in the plan: memory as the ledger of a live engine has it, bytes as the wire sees them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import zengine
from zcomm.testing import recorded, run_ranks
from zengine.config import Facts, load, resolve
from zengine.planning.explanation import explain
from zengine.planning.sizes import Sizes, sizes

EVERY = 6
OUTER = ("outer weights", "outer momentum", "outer gradient")


class Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(32, 32)
        self.blocks = nn.ModuleList(nn.Linear(32, 32) for _ in range(5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = torch.tanh(block(x))
        return x.square().mean()


def config(stage: int, **diloco: Any) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
        "zero_optimization": {"stage": stage},
        "diloco": {"sync_every": EVERY, **diloco},
    }


def planned(source: dict[str, Any], ranks: int) -> Sizes:
    plan = resolve(load(source), Facts(world_size=ranks, replicas=ranks))
    with torch.device("meta"):
        module = Stack()
    return sizes(module, plan, world_size=plan.parallel.gradient_ranks, device="cpu")


def _live(source: dict[str, Any]) -> tuple[dict[str, int], list[float]]:
    """Return the ledger, and the bytes that a ring sends for outer gradients in each step of a round."""
    torch.manual_seed(1)
    engine = zengine.initialize(model=Stack(), config=source)[0]
    sent = []
    share = {"all_reduce": 2.0, "reduce_scatter": 1.0, "all_gather": 1.0, "all_to_all": 1.0}
    for _ in range(EVERY):
        with recorded() as log:
            engine.backward(engine(torch.randn(2, 32)))
            engine.step()
        found = [record for record in log.records if record.label.startswith("outer gradient")]
        sent.append(sum(share[r.op] * r.nbytes * (r.group_size - 1) / r.group_size for r in found))
    ledger = dict(engine.parts.partition.ledger())
    engine.close()
    return ledger, sent


CASES = [
    (2, config(0)),
    (2, config(1, fragments=3)),
    (2, config(0, fragments=2, quantize_bits=4)),
    (4, config(3, fragments=2, groups=2)),
]


@pytest.mark.parametrize(("ranks", "source"), CASES)
def test_memory_and_bytes_are_those_of_a_run(ranks: int, source: dict[str, Any]) -> None:
    found = planned(source, ranks)
    ledger, sent = run_ranks(_live, ranks, source)[0]
    for owner in OUTER:
        assert found.memory.ledger()[owner] == ledger[owner] > 0
    (flow,) = [flow for flow in found.traffic.flows if flow.what.startswith("outer gradients")]
    assert flow.among == 2
    assert flow.num_bytes * EVERY == pytest.approx(sum(sent), rel=0.001)
    assert found.memory.extra_bytes == sum(ledger[owner] for owner in OUTER)


def test_without_the_section_there_is_nothing_of_it() -> None:
    source = config(0)
    del source["diloco"]
    found = planned(source, 2)
    assert not found.memory.outer
    assert not [flow for flow in found.traffic.flows if "outer" in flow.what]
    ledger, sent = run_ranks(_live, 2, source)[0]
    assert not [owner for owner in ledger if "outer" in owner]
    assert sum(sent) == 0


def test_explain_prints_them() -> None:
    source = config(0, fragments=2, groups=4)
    facts = Facts(world_size=8, replicas=8)
    plan = resolve(load(source), facts)
    with torch.device("meta"):
        module = Stack()
    text = explain(load(source), plan, facts, module, "a stack").text()
    assert "outer momentum" in text
    assert f"outer gradients, mean of {EVERY} steps" in text
    flat = " ".join(text.split())
    assert "to the other groups in a step, once in 3 steps" in flat
    rounds = sizes(module, plan, world_size=2, device="cpu")
    gradients, outer = rounds.traffic.flows
    assert (gradients.among, outer.among) == (2, 4)
