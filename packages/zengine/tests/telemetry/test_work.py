"""Tokens and FLOPs of a step."""

import pytest
import torch

from zengine.telemetry.work import Formula, Meter, shapes_of_tokens

IDS = torch.zeros(2, 8, dtype=torch.int64)
FORMULA = Formula(num_parameters=100, num_layers=3, hidden_size=5)


def shapes(*args, **kwargs):
    return list(shapes_of_tokens(args, kwargs))


def test_the_first_integer_matrix_is_the_tokens():
    mask, image = torch.ones(4, 4, dtype=torch.bool), torch.zeros(2, 3)
    assert shapes(image, mask, IDS, IDS[:1]) == [(2, 8)]
    assert shapes({"pixels": image, "labels": IDS}) == [(2, 8)]
    assert shapes((image, IDS)) == [(2, 8)]
    assert shapes(position_ids=IDS[:1], input_ids=IDS) == [(2, 8)]
    assert shapes({"position_ids": IDS[:1], "input_ids": IDS}) == [(2, 8)]
    assert shapes(IDS.to(torch.uint8)) == [(2, 8)]


@pytest.mark.parametrize("batch", [torch.zeros(2, 8), torch.zeros(3, dtype=torch.int64), "text", None])
def test_what_has_no_tokens_is_not_counted(batch):
    assert shapes(batch) == []
    meter = Meter(replicas=2, formula=FORMULA)
    meter.forward((batch,), {})
    work = meter.step_end(8)
    assert (work.tokens, work.flops, work.useful_flops, work.counted_flops) == (0, 0, 0, 0)


@pytest.mark.parametrize("coefficient", [3, 4])
def test_the_formula_is_that_of_the_literature(coefficient):
    """2 f N s + 4 f L h s^2 for each of two sequences of eight, on each of two ranks."""
    meter = Meter(replicas=2, formula=FORMULA, coefficient=coefficient)
    meter.forward((IDS,), {})
    work = meter.step_end(4)
    sequence = {f: 2 * f * 100 * 8 + 4 * f * 3 * 5 * 64 for f in (3, 4)}
    assert work.tokens == 32
    assert work.flops == 4 * sequence[coefficient]
    assert work.useful_flops == 4 * sequence[3]


def test_sequences_in_pieces_count_as_whole_ones():
    """The same two sequences of eight on each of two data ranks, by two sequence ranks with four tokens of each."""
    whole, pieces = Meter(replicas=2, formula=FORMULA), Meter(replicas=4, pieces=2, formula=FORMULA)
    whole.forward((IDS,), {})
    pieces.forward((IDS[:, :4],), {})
    expected = whole.step_end(4)
    assert pieces.step_end(4) == expected
    pieces.report_tokens(8)
    assert pieces.step_end(8) == expected


def test_lengths_may_differ_between_micro_steps():
    meter = Meter(replicas=1, formula=FORMULA)
    for length in (8, 4):
        meter.forward((IDS[:, :length],), {})
    work = meter.step_end(4)
    assert work.tokens == 24
    assert work.flops == 6 * 100 * 24 + 12 * 3 * 5 * (2 * 64 + 2 * 16)
    assert meter.step_end(8).tokens == 0


def test_what_the_caller_tells_counts_in_place_of_what_was_seen():
    meter = Meter(replicas=2, formula=FORMULA)
    meter.forward((IDS,), {})
    meter.report_tokens(6)
    meter.report_tokens(4)
    work = meter.step_end(4)  # two samples of this rank: ten tokens, five each
    assert work.tokens == 20
    assert work.flops == 2 * (6 * 100 * 10 + 12 * 3 * 5 * 2 * 25)


def test_a_fixed_length_comes_from_the_config():
    meter = Meter(replicas=2, tokens_per_sample=16, formula=FORMULA)
    meter.step_end(100)
    assert meter.step_end(104).tokens == 64


def test_counted_operations_go_with_the_samples():
    meter = Meter(replicas=2, flops_per_sample=7.0)
    meter.step_end(100)
    assert meter.step_end(104).counted_flops == 28


def test_without_layers_the_attention_is_left_out():
    assert Formula(num_parameters=10).flops(2, 4, 3) == 120
