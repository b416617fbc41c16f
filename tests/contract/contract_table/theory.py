"""The messages of a step, from a row and the buckets alone.

With P bytes of weights and W ranks an all-reduce moves 2 P (W - 1) / W bytes through each rank, a reduce-scatter or
an all-gather half of that.  In units of that all-reduce ("1x") stages 0, 1 and 2 move 1x and stage 3 moves 1.5x a
step (Rajbhandari et al. 2020, section 7), less what backward does not need: an embedding's weights.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from contract_table.rows import Messages
from contract_table.run import Outcome

WITHOUT_BACKWARD_WEIGHTS = frozenset({"embed"})  # units whose gradients need no weights

Sent = tuple[str, str, int]  # (collective, label, bytes)


def of_gradients(sent: Iterable[Sent]) -> list[Sent]:
    return [message for message in sent if message[1].startswith("gradients[")]


def of_weights(sent: Iterable[Sent]) -> list[Sent]:
    return [message for message in sent if message[1].startswith("weights")]


def expected_gradients(outcome: Outcome, messages: Messages) -> Counter[Sent]:
    """Return the messages of one reduction."""
    return Counter((messages.gradients, f"gradients[{index}]", size) for index, size, _ in outcome.buckets)


def expected_weights(outcome: Outcome, messages: Messages, accumulation: int) -> Counter[Sent]:
    """Return the all-gathers of a step."""
    found: Counter[Sent] = Counter()
    for index, size, unit in outcome.buckets:
        if not unit:
            found["all_gather", f"weights[{index}]", size] += 1 if messages.gradients == "reduce_scatter" else 0
            continue
        backward = 0 if unit in WITHOUT_BACKWARD_WEIGHTS else messages.weights_per_backward
        times = accumulation * (messages.weights_per_forward + backward)
        found["all_gather", f"weights of unit {unit!r}", size] += times
    return +found


def of_an_all_reduce(outcome: Outcome) -> tuple[float, float]:
    """Return a rank's bytes per step, in units of one all-reduce of all weights, and those that backward saves."""
    total = 2 * sum(size for _, size, _ in outcome.buckets)
    sent = [*of_gradients(outcome.sent), *of_weights(outcome.sent)]
    moved = sum((2 if op == "all_reduce" else 1) * size for op, _, size in sent)
    spared = sum(size for _, size, unit in outcome.buckets if unit in WITHOUT_BACKWARD_WEIGHTS)
    return moved / total, spared / total
