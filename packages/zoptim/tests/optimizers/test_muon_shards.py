"""Muon on flat shards: segments that are whole matrices, and errors."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

import zoptim
from zoptim import Segment

OPTIONS: dict[str, Any] = {"lr": 0.02, "weight_decay": 0.1}


def random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


@pytest.mark.parametrize("form", [None, "bf16"])
def test_segments_of_a_flat_shard_equal_whole_matrices_bit_for_bit(form: str | None, lab: Any) -> None:
    shapes = [(8, 5), (5, 8), (8, 5), (16, 16)]
    whole = lab.make_params(shapes)
    flat = torch.cat([param.detach().flatten() for param in whole]).requires_grad_()
    starts = [0, 40, 80, 120]
    optimizer = zoptim.Muon([{"params": [flat], "use_muon": True}], **OPTIONS, state_dtype=form)
    optimizer.place_segments(
        {flat: [Segment(start, shape, i) for i, (start, shape) in enumerate(zip(starts, shapes))]}
    )
    lab.run(zoptim.Muon(whole, **OPTIONS, state_dtype=form), whole, range(5), shapes)
    for step in range(5):
        flat.grad = torch.cat([grad.flatten() for grad in lab.make_grads(step, shapes)])
        optimizer.step()
    lab.assert_bitwise([flat], [torch.cat([param.detach().flatten() for param in whole])])


def test_a_layout_survives_loading_state(lab: Any) -> None:
    flat = random(40, dtype=torch.float32).requires_grad_()
    optimizer = zoptim.Muon([{"params": [flat], "use_muon": True}], **OPTIONS)
    optimizer.place_segments({flat: [Segment(0, (8, 5))]})
    matrix = flat.detach().clone().view(8, 5).requires_grad_()
    other = zoptim.Muon([matrix], **OPTIONS)
    for step in range(4):
        flat.grad = random(40, seed=step, dtype=torch.float32)
        matrix.grad = flat.grad.view(8, 5).clone()
        optimizer.step()
        other.step()
        optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    lab.assert_bitwise([flat.view(8, 5)], [matrix])


def test_a_segment_that_is_no_matrix_raises(lab: Any) -> None:
    flat = torch.zeros(40, requires_grad=True)
    optimizer = zoptim.Muon([{"params": [flat], "use_muon": True}])
    with pytest.raises(ValueError, match=r"Segment\(start=0, shape=\(40,\), index=0, span=None\) is no matrix"):
        optimizer.place_segments({flat: [Segment(0, (40,))]})
    with pytest.raises(ValueError, match="disjoint"):
        optimizer.place_segments({flat: [Segment(0, (4, 5)), Segment(10, (4, 5))]})


def test_a_vector_under_muon_without_segments_raises_with_its_name(lab: Any) -> None:
    flat = torch.zeros(40, requires_grad=True)
    flat.grad = torch.ones(40)
    optimizer = zoptim.Muon([{"params": [("shard", flat)], "use_muon": True}])
    with pytest.raises(ValueError, match=r"parameter 0 of group 0 \('shard'\).*place_segments"):
        optimizer.step()
    assert not flat.any()


def test_8_bit_states_need_aligned_segments() -> None:
    flat = torch.zeros(600, requires_grad=True)
    flat.grad = torch.ones(600)
    optimizer = zoptim.Muon([{"params": [("shard", flat)], "use_muon": True}], state_dtype="8bit")
    optimizer.place_segments({flat: [Segment(0, (10, 10)), Segment(100, (10, 10))]})
    with pytest.raises(
        ValueError, match=r"\('shard'\) has a segment that starts at 100 and 8-bit states.*Align .* to 256"
    ):
        optimizer.step()
    optimizer.place_segments({flat: [Segment(0, (10, 10)), Segment(256, (10, 10))]})
    optimizer.step()
    moved = flat.detach() != 0
    covered = torch.zeros(600, dtype=torch.bool)
    covered[:100] = covered[256:356] = True
    assert torch.equal(moved, covered), "padding stays as it is"


def test_a_shard_that_is_no_parameter_raises() -> None:
    optimizer = zoptim.Muon([torch.zeros(4, 4, requires_grad=True)])
    with pytest.raises(ValueError, match=r"shape \(25,\) is not a parameter of this Muon"):
        optimizer.place_segments({torch.zeros(25): [Segment(0, (5, 5))]})
