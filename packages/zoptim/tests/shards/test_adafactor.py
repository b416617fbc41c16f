"""Adafactor over ranks: cut tensors equal whole ones, with two all-reduces per step."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import zoptim
from zoptim import Segment
from zoptim.shards.adafactor import Frame

SHAPES = [(8, 5), (7,), (), (3, 4, 6), (16, 16)]  # 40, 7, 1, 72, 256
OPTIONS: dict[str, Any] = {"lr": 0.05, "weight_decay": 0.1}
NUM_SUMS = {0: 8 + 5 + 1, 1: 1, 3: 3 * (4 + 6) + 1, 4: 16 + 16 + 1}  # what a cut tensor adds up
CUTS = [[0], [0, 43], [0, 12, 13, 90, 200], [0, 0, 120]]


def make(params: list[Tensor], **more: Any) -> zoptim.Adafactor:
    return zoptim.Adafactor(params, **OPTIONS, **more)


@pytest.mark.parametrize("cuts", CUTS, ids=str)
@pytest.mark.parametrize("more", [{}, {"maximize": True, "eps": (1e-6, 1e-2), "d": 2.0}], ids=str)
def test_cut_tensors_step_as_whole_ones_with_the_same_state(
    cuts: list[int], more: dict[str, Any], lab: Any, team: Any
) -> None:
    crew = team(SHAPES, cuts)
    shards, optimizers = crew.train(lambda params: make(params, **more), range(5))
    whole = lab.make_params(SHAPES)
    theirs = make(whole, **more)
    lab.run(theirs, whole, range(5), SHAPES)
    lab.assert_near([torch.cat(shards)], [torch.cat([p.flatten() for p in whole])], rtol=1e-5, atol=1e-6)
    for shard, optimizer, segments in zip(shards, optimizers, crew.segments()):
        for segment, part in zip(segments, optimizer.segment_states(shard, optimizer.state[shard])):
            expected = theirs.state[whole[segment.index]]
            assert part.keys() == expected.keys()
            assert part["step"] == 5
            for key in ("row_var", "col_var"):
                if key in part:
                    torch.testing.assert_close(part[key], expected[key], rtol=1e-5, atol=1e-12)
            if "variance" in part:
                torch.testing.assert_close(part["variance"], expected["variance"].flatten()[slice(*segment.range)])
    cut = [index for index in NUM_SUMS if sum(s.index == index for held in crew.segments() for s in held) > 1]
    assert crew.reduced == [sum(NUM_SUMS[index] for index in cut), len(cut)] * 5 * bool(cut)


def test_ranks_agree_to_the_bit_however_tensors_are_cut(lab: Any, team: Any) -> None:
    found = [torch.cat(team(SHAPES, cuts).train(make, range(5))[0]) for cuts in CUTS]
    lab.assert_bitwise(found[1:], found[:1] * 3)


def test_low_precision_weights_and_a_divisor(lab: Any, team: Any) -> None:
    def scaled(params: list[Tensor]) -> zoptim.Adafactor:
        optimizer = make(params, eps=(1e-8, 1e-3))  # None is the epsilon of the dtype
        optimizer.grad_scale = torch.tensor(8.0)
        return optimizer

    whole = lab.make_params(SHAPES)
    lab.run(scaled(whole), whole, range(4), SHAPES)
    expected = torch.cat([param.flatten() for param in whole])
    for dtype, tolerance in ((torch.float32, 1e-5), (torch.bfloat16, 2**-5), (torch.float64, 1e-5)):
        shards, _ = team(SHAPES, [0, 43]).train(scaled, range(4), dtype)
        lab.assert_near([torch.cat(shards)], [expected], rtol=tolerance, atol=tolerance)


def test_found_inf_sends_nothing_and_changes_nothing(lab: Any, team: Any) -> None:
    crew = team(SHAPES, [0, 43])
    shards, optimizers = crew.train(make, range(2))
    before = [lab.snapshot(optimizer, [shard]) for optimizer, shard in zip(optimizers, shards)]
    messages = len(crew.reduced)
    for optimizer in optimizers:
        optimizer.found_inf = torch.ones(())
    crew.go_on(shards, optimizers, range(2, 3))
    for optimizer, shard, kept in zip(optimizers, shards, before):
        lab.assert_bitwise(lab.snapshot(optimizer, [shard]), kept)
    assert len(crew.reduced) == messages


def test_state_moves_to_new_shards_by_segment(lab: Any, team: Any) -> None:
    """As a checkpoint does it, between two partitions."""
    first, second = team(SHAPES, [0, 43]), team(SHAPES, [0, 12, 13, 90, 200])
    shards, optimizers = first.train(make, range(3))
    straight = [torch.cat(first.train(make, range(5))[0])]
    flat = torch.cat([shard.detach() for shard in shards])
    new = [flat[slice(*bound)].clone().requires_grad_() for bound in second.bounds]
    resumed = [make([shard]) for shard in new]
    kept: dict[tuple[int, str], Any] = {}
    for shard, optimizer, held in zip(shards, optimizers, first.segments()):
        for segment, part in zip(held, optimizer.segment_states(shard, optimizer.state[shard])):
            for key, value in part.items():
                where = segment.range if key == "variance" else (0, value.numel())
                kept.setdefault((segment.index, key), torch.zeros(300))[slice(*where)] = value.flatten()
    for rank, (shard, optimizer) in enumerate(zip(new, resumed)):
        second.place_segments(rank, optimizer, shard)
        blank = optimizer.new_state(shard)
        for segment, part in zip(second.segments()[rank], optimizer.segment_states(shard, blank)):
            for key, value in part.items():
                where = segment.range if key == "variance" else (0, value.numel())
                value.copy_(kept[segment.index, key][slice(*where)].view(value.shape))
        optimizer.load_portable_state(shard, {key: value.double() for key, value in blank.items()})
        assert all(value.dtype is torch.float32 for value in optimizer.state[shard].values())
    second.go_on(new, resumed, range(3, 5))
    lab.assert_bitwise([torch.cat(new)], straight)


def test_other_parameters_have_no_segments_and_a_shard_needs_a_gradient(team: Any) -> None:
    crew = team([(4, 4)], [0])
    shard, other = torch.zeros(16, requires_grad=True), torch.zeros(4, requires_grad=True)
    optimizer = make([shard, other])
    crew.place_segments(0, optimizer, shard)
    assert optimizer.new_state(other) is None
    assert optimizer.segment_states(other, {}) is None
    with pytest.raises(ValueError, match="parameter 0 of group 0 is a shard of cut tensors and has no gradient"):
        optimizer.step()
    with pytest.raises(ValueError, match=r"the loaded state of parameter 0 of group 0 lacks row_var"):
        optimizer.load_portable_state(shard, {"variance": torch.zeros(16)})
    with pytest.raises(ValueError, match="is a part of a tensor; give the segments of all ranks with place_on_ranks"):
        optimizer.place_segments({shard: [Segment(0, (8, 8), 0, (0, 16))]})


@pytest.mark.parametrize(
    ("shape", "span", "framed"),
    [
        ((8, 5), (0, 40), (1, 8, 5)),
        ((8, 5), (7, 13), (1, 2, 5)),
        ((8, 5), (6, 8), (1, 1, 5)),
        ((3, 4, 6), (20, 30), (2, 4, 6)),
    ],
)
def test_a_frame_is_the_smallest_stack_of_full_rows_around_a_part(shape: Any, span: Any, framed: Any) -> None:
    frame = Frame.around(Segment(0, shape, 0, span))
    whole = torch.arange(1.0, 1 + torch.Size(shape).numel())
    part = whole[slice(*span)]
    embedded = frame.embed(part)
    assert tuple(embedded.shape) == framed
    assert embedded.count_nonzero() == part.numel()
    assert torch.equal(frame.extract(embedded, part.numel()), part)
    rows = (whole * ((whole > span[0]) & (whole <= span[1]))).view(-1, shape[-1]).sum(1)
    assert torch.equal(embedded.sum(2).flatten(), rows[frame.rows])
