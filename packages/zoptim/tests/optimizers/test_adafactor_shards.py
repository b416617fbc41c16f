"""Adafactor on flat shards: segments that are whole tensors, their state, and errors."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor

import zoptim
from zoptim import Segment

SHAPES = [(8, 5), (7,), (), (3, 4, 6), (16, 16)]
STARTS = [0, 40, 48, 49, 128]  # two gaps: 47 and 121 to 127 are padding
NUMEL = 400  # and the end
SEGMENTS = [Segment(start, shape, i) for i, (start, shape) in enumerate(zip(STARTS, SHAPES))]
OPTIONS: dict[str, Any] = {"lr": 0.05, "weight_decay": 0.1}


def flat_of(tensors: list[Tensor]) -> Tensor:
    """A shard of `tensors`; padding is 3."""
    made = torch.full((NUMEL,), 3.0)
    for segment, tensor in zip(SEGMENTS, tensors):
        made[segment.row] = tensor.detach().flatten()
    return made


def make(shard: Tensor, **more: Any) -> zoptim.Adafactor:
    optimizer = zoptim.Adafactor([shard], **OPTIONS, **more)
    optimizer.place_segments({shard: SEGMENTS})
    return optimizer


def train(optimizer: torch.optim.Optimizer, shard: Tensor, steps: range, lab: Any) -> None:
    for step in steps:
        shard.grad = flat_of(lab.make_grads(step, SHAPES))
        optimizer.step()


@pytest.mark.parametrize("foreach", [None, True, False], ids=["default", "foreach", "for"])
@pytest.mark.parametrize("scale", [None, 8.0])
def test_a_shard_equals_whole_tensors_bit_for_bit(foreach: bool | None, scale: float | None, lab: Any) -> None:
    whole = lab.make_params(SHAPES)
    shard = flat_of(whole).requires_grad_()
    ours, theirs = make(shard, foreach=foreach), zoptim.Adafactor(whole, **OPTIONS, foreach=foreach)
    for optimizer in (ours, theirs):
        optimizer.grad_scale = None if scale is None else torch.tensor(scale)
    lab.run(theirs, whole, range(6), SHAPES)
    train(ours, shard, range(6), lab)
    lab.assert_bitwise([shard], [flat_of(whole)])
    state = ours.state[shard]
    assert state["step"].tolist() == [6] * len(SHAPES)
    for key in ("row_var", "col_var", "variance"):
        kept = [theirs.state[param][key].flatten() for param in whole if key in theirs.state[param]]
        lab.assert_bitwise([state[key]], [torch.cat(kept)])


def test_a_matrix_in_a_shard_costs_its_rows_plus_its_columns(lab: Any) -> None:
    shard = torch.ones(20_000, requires_grad=True)
    shard.grad = torch.ones(20_000)
    optimizer = zoptim.Adafactor([shard])
    optimizer.place_segments({shard: [Segment(0, (100, 200))]})
    optimizer.step()
    assert sum(value.numel() for key, value in optimizer.state[shard].items() if key != "step") == 300


def test_resuming_is_bit_for_bit(lab: Any) -> None:
    straight = flat_of(lab.make_params(SHAPES)).requires_grad_()
    moved = straight.detach().clone().requires_grad_()
    train(make(straight), straight, range(6), lab)
    first, second = make(moved), make(moved)
    train(first, moved, range(3), lab)
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    train(second, moved, range(3, 6), lab)
    lab.assert_bitwise([moved], [straight])


def test_found_inf_leaves_a_shard_untouched(lab: Any) -> None:
    shard = flat_of(lab.make_params(SHAPES)).requires_grad_()
    optimizer = make(shard)
    train(optimizer, shard, range(2), lab)
    before = lab.snapshot(optimizer, [shard])
    optimizer.found_inf = torch.ones(())
    train(optimizer, shard, range(2, 3), lab)
    lab.assert_bitwise(lab.snapshot(optimizer, [shard]), before)


def test_a_copy_steps_once_its_segments_are_set(lab: Any) -> None:
    shard = flat_of(lab.make_params(SHAPES)).requires_grad_()
    optimizer = make(shard)
    train(optimizer, shard, range(2), lab)
    twin = pickle.loads(pickle.dumps(optimizer))
    other = twin.param_groups[0]["params"][0]
    other.grad = torch.ones(NUMEL)
    with pytest.raises(
        ValueError, match="parameter 0 of group 0 is that of a flat shard; give the positions of its tensors with"
    ):
        twin.step()
    with pytest.raises(ValueError, match=r"row_var .* has shape \(36,\), but \(4,\) belongs to its segments"):
        twin.place_segments({other: [Segment(0, (4, 5))]})
    twin.place_segments({other: SEGMENTS})
    train(twin, other, range(2, 4), lab)
    train(optimizer, shard, range(2, 4), lab)
    lab.assert_bitwise([other], [shard])


def test_segments_that_do_not_fit_raise() -> None:
    shard = torch.zeros(40, requires_grad=True)
    optimizer = zoptim.Adafactor([shard])
    with pytest.raises(ValueError, match="disjoint"):
        optimizer.place_segments({shard: [Segment(0, (4, 5)), Segment(10, (4, 5))]})
    with pytest.raises(ValueError, match="end at element 50; the shard has 40"):
        optimizer.place_segments({shard: [Segment(0, (5, 10))]})
    with pytest.raises(ValueError, match=r"shape \(25,\) is not a parameter of this Adafactor"):
        optimizer.place_segments({torch.zeros(25): [Segment(0, (5, 5))]})


def test_state_of_whole_tensors_raises_for_a_shard() -> None:
    shard = torch.zeros(40, requires_grad=True)
    shard.grad = torch.ones(40)
    optimizer = zoptim.Adafactor([("shard", shard)])
    optimizer.step()
    with pytest.raises(ValueError, match=r"state of parameter 0 of group 0 \('shard'\) lacks row_var"):
        optimizer.place_segments({shard: [Segment(0, (5, 8))]})
