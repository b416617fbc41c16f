"""Error feedback of quantized sums: its law, and that the mean of many sums is exact in the limit."""

from __future__ import annotations

import pytest
import torch

import zcomm
from zcomm import BlockCode, ErrorFeedback
from zcomm.testing import run_ranks

NUMEL, BETA = 520, 0.8  # of a slice: two blocks and a tail
CODE, STORED = BlockCode(bits=4), BlockCode(bits=8)


def gradient(rank: int, step: int, size: int) -> torch.Tensor:
    """Return values of which most are small beside the largest of their block."""
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(size * NUMEL, generator=generator) ** 5


def through(code: BlockCode, values: torch.Tensor) -> torch.Tensor:
    return code.decode(code.encode(values), torch.empty_like(values))


def sums(num_steps: int, reset_every: int, changes: bool = True) -> list[torch.Tensor]:
    size, rank = zcomm.group_size(), zcomm.group_rank()
    feedback = ErrorFeedback(beta=BETA, reset_every=reset_every)
    found = []
    for step in range(num_steps):
        output = torch.empty(NUMEL)
        values = gradient(rank, step if changes else 0, size)
        handle = zcomm.reduce_scatter_quantized(output, values, code=CODE, feedback=feedback, async_op=True)
        handle.wait()
        found.append(output)
    assert feedback.num_bytes == (size - 1) * STORED.num_bytes(NUMEL) == (size - 1) * feedback.stored_bytes(NUMEL)
    return found


def test_sums_follow_the_law_bit_for_bit() -> None:
    """A plain form of LoCo's algorithm, for every sender and receiver."""
    size, num_steps, reset_every = 3, 7, 4
    found = run_ranks(sums, size, num_steps, reset_every)
    errors = torch.zeros(size, size, NUMEL)
    for step in range(num_steps):
        if step % reset_every == 0:
            errors.zero_()
        for receiver in range(size):
            expected = torch.zeros(NUMEL)
            for sender in range(size):
                part = gradient(sender, step, size)[receiver * NUMEL :][:NUMEL]
                if sender == receiver:
                    expected += part
                    continue
                sent = part + errors[sender, receiver]
                received = through(CODE, sent)
                expected += received
                average = errors[sender, receiver].mul(BETA).add(sent - received, alpha=1 - BETA)
                errors[sender, receiver] = through(STORED, average)
            assert torch.equal(found[receiver][step], expected)


def mean_errors(num_steps: int, hops: bool) -> tuple[float, float]:
    """Return the largest error of the mean of so many sums of one gradient, with and without feedback."""
    size, rank = zcomm.group_size(), zcomm.group_rank()
    groups = (zcomm.consecutive_group(2), zcomm.strided_group(2)) if hops else None
    exact = torch.stack([gradient(r, 0, size) for r in range(size)]).double().sum(0)[rank * NUMEL :][:NUMEL]
    found = []
    for feedback in (ErrorFeedback(beta=BETA), None):
        total = torch.zeros(NUMEL, dtype=torch.float64)
        for _ in range(num_steps):
            output = torch.empty(NUMEL)
            zcomm.reduce_scatter_quantized(
                output, gradient(rank, 0, size), groups=groups, code=CODE, feedback=feedback
            )
            total += output
        found.append(float((total / num_steps - exact).abs().max()))
    return found[0], found[1]


@pytest.mark.parametrize("hops", [False, True])
def test_the_error_of_the_mean_falls_with_the_number_of_sums(hops: bool) -> None:
    few, many = (run_ranks(mean_errors, 4, num_steps, hops) for num_steps in (8, 128))
    for (short, plain), (long, also_plain) in zip(few, many):
        assert plain == pytest.approx(also_plain, rel=1e-6)  # without feedback the same error comes each time
        assert long < short / 4
        assert long < plain / 10


def test_an_infinity_is_seen_and_leaves_no_error() -> None:
    feedback = ErrorFeedback()
    values, message = gradient(0, 0, 1), torch.empty(CODE.num_bytes(NUMEL), dtype=torch.uint8)
    feedback.encode(values, message, CODE, hop=0, receiver=1)
    overflown = values.clone()
    overflown[3] = torch.inf
    feedback.encode(overflown, message, CODE, hop=0, receiver=1)
    assert not CODE.decode(message, torch.empty(NUMEL))[:256].isfinite().any()
    feedback.encode(values, message, CODE, hop=0, receiver=1)
    assert CODE.decode(message, torch.empty(NUMEL)).isfinite().all()


def test_errors_scale_with_the_values_and_are_cleared() -> None:
    scaled, plain = ErrorFeedback(), ErrorFeedback()
    values = gradient(0, 0, 1)
    messages = torch.empty(2, CODE.num_bytes(NUMEL), dtype=torch.uint8)
    for feedback, message in zip((scaled, plain), messages):
        feedback.encode(values, message, CODE, hop=0, receiver=1)
    scaled.scale(4.0)
    scaled.encode(4 * values, messages[0], CODE, hop=0, receiver=1)
    plain.encode(values, messages[1], CODE, hop=0, receiver=1)
    first, second = (CODE.decode(message, torch.empty(NUMEL)) for message in messages)
    assert torch.equal(first, 4 * second)
    plain.reset()
    assert plain.num_bytes == 0
    plain.encode(values, messages[1], CODE, hop=0, receiver=1)
    assert torch.equal(CODE.decode(messages[1], torch.empty(NUMEL)), through(CODE, values))


@pytest.mark.parametrize(("options", "message"), [({"beta": 1.0}, "beta = 1.0"), ({"reset_every": 0}, "reset_every")])
def test_options_are_checked(options: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ErrorFeedback(**options)  # type: ignore[arg-type]
