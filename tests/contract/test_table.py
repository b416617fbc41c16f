"""Contract: every row of the table trains like one process, sends the predicted messages and holds the planned bytes.

Tolerances, relative, on the mean loss of each step and on one evaluation at the end:
- fp64: 1e-12, for the reasons of fp32.
- fp32: 2e-6. Sums over ranks and micro-steps have another order than those over one batch, and losses are sums of a
  few dozen float32 logarithms: about 8 units of 2^-23 = 1e-6.
- bf16 and fp16: the oracle rounds to the model's dtype where the engine does, so masters differ by fp32 rounding
only.
  If that moves a weight across a boundary of its dtype, the weight changes by a whole unit (2^-8, 2^-11); a gradient
  near 0 that changes its sign moves Adam by twice its step. Few of two thousand weights do.
  Four steps of Adam do not detect a wrong factor (the scenarios with momentum do: 0.12 for a doubled mean), nor that
  masters are fp32 (the comparison of bytes with the plan does).
"""

from __future__ import annotations

import itertools
from collections import Counter

import pytest
import torch
from contract_table.oracle import curve
from contract_table.rows import ROWS, Row
from contract_table.run import DTYPES, NUM_STEPS, Case, Outcome, run_cases
from contract_table.scenarios import SCENARIOS
from contract_table.theory import expected_gradients, expected_weights, of_an_all_reduce, of_gradients, of_weights

from zcomm.testing import run_ranks

TOLERANCE = {torch.float64: 1e-12, torch.float32: 2e-6, torch.bfloat16: 4e-3, torch.float16: 5e-4}
ACCUMULATIONS = (1, 3)
AT_MOST = (
    "buckets",
    "gathered units",
    "staging",
)  # owners for which the plan gives an upper bound; the others are exact
OF_WHAT_IS_USED = ("states", "rollback")  # and those that hold nothing for unused parameters

# All combinations but three: scenarios that depend on the policy alone run on the rows that differ by policy, float64
# runs in the scenarios in which a dtype could be lost, and on four ranks each 16-bit dtype has an accumulation of its
# own (both have both on one and two ranks, and float32 everywhere).
OF_POLICIES = ("unused, momentum", "torch style", "refused load", "buffers")
POLICIES = ("replicated", "stage 1", "stage 2", "stage 3, strict", "stage 1, states on disk")
IN_FLOAT64 = ("plain", "unused", "unfrozen later", "buffers")
ON_FOUR_RANKS = {torch.float16: (1,), torch.bfloat16: (3,)}


def is_selected(row: Row, scenario: str, dtype: torch.dtype) -> bool:
    return (scenario not in OF_POLICIES or row.name in POLICIES) and (
        dtype != torch.float64 or scenario in IN_FLOAT64
    )


def accumulations(world_size: int, dtype: torch.dtype) -> tuple[int, ...]:
    return ON_FOUR_RANKS.get(dtype, ACCUMULATIONS) if world_size == 4 else ACCUMULATIONS


TABLES = [
    pytest.param(*table, accumulation, id=f"{table[0]}-{str(table[1])[6:]}-{accumulation}")
    for table in itertools.product((1, 2, 4), DTYPES)
    for accumulation in accumulations(*table)
]


@pytest.mark.parametrize(("world_size", "dtype", "accumulation"), TABLES)
def test_every_row_keeps_the_contract(world_size: int, dtype: torch.dtype, accumulation: int) -> None:
    cases = [
        Case(row, scenario, dtype, accumulation)
        for row in ROWS
        if world_size in row.worlds
        for scenario in SCENARIOS
        if is_selected(row, scenario, dtype)
    ]
    failures = compare(cases, run_ranks(run_cases, world_size, cases))
    assert not failures, "\n".join([f"{len(failures)} of {len(cases)} combinations:", *failures])


def compare(cases: list[Case], by_rank: list[list[Outcome | str]], slack: float = 1.0) -> list[str]:
    """Return what is wrong with the outcomes of all ranks; losses may be off by `slack` times the tolerance."""
    reference: dict[object, list[Outcome]] = {}
    failures: list[str] = []
    for index, case in enumerate(cases):
        found = [outcomes[index] if index < len(outcomes) else "not run" for outcomes in by_rank]
        whole = [outcome for outcome in found if isinstance(outcome, Outcome)]
        if len(whole) < len(by_rank):
            failures.append(f"{case}: {'; '.join(sorted({str(o) for o in found if isinstance(o, str)}))}")
            continue
        told = reference.setdefault((*case.combination, case.rounds if len(by_rank) > 1 else 0), whole)
        checks = [*check_curve(case, whole, slack), *check_bits(case, whole, told), *check_memory(case, whole)]
        checks += [*check_buffers(case, whole), *check_messages(case, whole)]
        failures += [f"{case}: {fault}" for fault in checks]
    return failures


def check_curve(case: Case, found: list[Outcome], slack: float) -> list[str]:
    expected = curve(case.scenario, case.dtype, len(found), case.accumulation)
    mean = [sum(losses) / len(found) for losses in zip(*(outcome.losses for outcome in found))]
    if mean == pytest.approx(expected, rel=slack * (case.row.tolerance or TOLERANCE[case.dtype])):
        return []
    return [f"losses {mean} instead of {list(expected)}"]


def check_buffers(case: Case, found: list[Outcome]) -> list[str]:
    """Check that a buffer updated by training equals a float32 or float64 sum bit for bit."""
    dtype = torch.promote_types(case.dtype, torch.float32)
    level = torch.zeros((), dtype=dtype)
    for _ in range(NUM_STEPS if case.scenario == "buffers" else 0):
        level += 0.1 * (100.3 - level)
    return [f"buffer {outcome.level} instead of {float(level)}" for outcome in found if outcome.level != float(level)]


def check_bits(case: Case, found: list[Outcome], first: list[Outcome]) -> list[str]:
    """Check that ranks agree with each other and with the first row that reduces as often."""
    faults = [] if len({outcome.weights for outcome in found}) == 1 else ["ranks have different weights"]
    if case.row.same_bits:
        same = all(a.losses == b.losses and a.weights == b.weights for a, b in zip(found, first))
        faults += [] if same else ["other bits than the first row's"]
    return faults


def check_memory(case: Case, found: list[Outcome]) -> list[str]:
    faults = []
    is_complete = SCENARIOS[case.scenario].is_complete
    at_most = AT_MOST if is_complete else (*AT_MOST, *OF_WHAT_IS_USED)
    for outcome in found if SCENARIOS[case.scenario].is_planned else ():
        for owner, planned in outcome.planned.items():
            held = outcome.ledger.get(owner, 0) if owner.endswith("staging") else outcome.ledger[owner]
            if owner == "buckets" and not is_complete:
                continue  # an unused parameter keeps later buckets waiting, which a plan cannot predict
            if held > planned if owner.endswith(at_most) else held != planned:
                faults.append(f"{owner}: {held} bytes, planned {planned}")
        if outcome.peak_bytes > outcome.planned["gathered units"]:
            faults.append(f"{outcome.peak_bytes} bytes gathered at once, planned {outcome.planned['gathered units']}")
    return sorted(set(faults))


def check_messages(case: Case, found: list[Outcome]) -> list[str]:
    """Check the last step's messages: number, kind, order."""
    messages = case.row.messages
    if messages is None or case.scenario != "plain":
        return []
    if len(found) == 1:
        return [f"alone, but sent {found[0].sent}"] if found[0].sent else []
    faults = []
    gradients, weights = ([kind(outcome.sent) for outcome in found] for kind in (of_gradients, of_weights))
    if any(kind[0] != other for kind in (gradients, weights) for other in kind):
        faults.append("ranks sent in different orders")
    one_round = expected_gradients(found[0], messages)
    first = gradients[0][: one_round.total()]
    if Counter(first) != one_round or gradients[0] != first * case.rounds:
        faults.append(f"gradients {gradients[0]} instead of {case.rounds} times {one_round}")
    gathers = expected_weights(found[0], messages, case.accumulation)
    if Counter(weights[0]) != gathers:
        faults.append(f"weights {weights[0]} instead of {gathers}")
    if not messages.weights_per_forward and weights[0] and found[0].sent[-len(weights[0]) :] != tuple(weights[0]):
        faults.append("weights were gathered before all gradients had gone")
    share, slack = of_an_all_reduce(found[0])
    if case.accumulation == 1 and not messages.share - slack <= share <= messages.share:
        faults.append(f"{share} of an all-reduce of the weights, the theory says {messages.share}")
    return faults
