"""Muon over ranks: cut matrices equal whole ones, with two messages, in every format."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import zoptim
from zoptim import Segment
from zoptim.shards import muon as muon_ranks

SHAPES = [(8, 5), (5, 8), (8, 5), (4, 2, 3), (16, 16)]  # 40 each, 24, 256
OPTIONS: dict[str, Any] = {"lr": 0.02, "weight_decay": 0.1}


def make(params: list[Tensor], **more: Any) -> zoptim.Muon:
    return zoptim.Muon([{"params": params, "use_muon": True}], **OPTIONS, **more)


def whole_of(lab: Any, steps: range, dtype: torch.dtype = torch.float32, **more: Any) -> Tensor:
    params = lab.make_params(SHAPES, dtype)
    lab.run(make(params, **more), params, steps, SHAPES)
    return torch.cat([param.detach().flatten() for param in params])


@pytest.mark.parametrize("cuts", [[0], [0, 100], [0, 20, 21, 300], [0, 0, 144]], ids=str)
@pytest.mark.parametrize(
    "more", [{}, {"ns_method": "gram", "adjust_lr": "match_rms_adamw", "nesterov": False}], ids=str
)
def test_cut_matrices_step_as_whole_ones(cuts: list[int], more: dict[str, Any], lab: Any, team: Any) -> None:
    crew = team(SHAPES, cuts)
    shards, optimizers = crew.train(lambda params: make(params, **more), range(5))
    lab.assert_near([torch.cat(shards)], [whole_of(lab, range(5), **more)], rtol=1e-5, atol=1e-6)
    for shard, optimizer in zip(shards, optimizers):
        assert optimizer.state[shard]["momentum_buffer"].shape == shard.shape, (
            "one value an element, as AdamW has two"
        )
    cut = any(len(tensor.parts) > 1 for tensor in optimizers[0]._shards.matrices[shards[0]].values())
    assert len(crew.exchanged) == (10 if cut else 0), "to the owners and back"
    assert sum(crew.exchanged[:2]) <= 2 * sum(torch.Size(shape).numel() for shape in SHAPES)


@pytest.mark.parametrize(
    ("dtype", "more", "rtol", "atol"),
    [
        (torch.float32, {"state_dtype": "bf16"}, 2**-7, 1e-3),
        (torch.float32, {"state_dtype": "8bit"}, 2**-5, 2e-2),
        (torch.bfloat16, {"split_master": True}, 2**-7, 1e-3),
        (torch.bfloat16, {}, 2**-6, 2e-2),
        (torch.float64, {}, 1e-12, 1e-12),
    ],
    ids=str,
)
def test_formats(dtype: torch.dtype, more: dict[str, Any], rtol: float, atol: float, lab: Any, team: Any) -> None:
    shards, _ = team(SHAPES, [0, 100]).train(lambda params: make(params, **more), range(4), dtype)
    lab.assert_near([torch.cat(shards)], [whole_of(lab, range(4), dtype, **more)], rtol=rtol, atol=atol)


def test_rounds_bound_the_messages_and_do_not_change_results(monkeypatch: pytest.MonkeyPatch, team: Any) -> None:
    def train(limit: int) -> tuple[list[Tensor], list[int]]:
        monkeypatch.setattr(muon_ranks, "ROUND_NUMEL", limit)
        crew = team([(8, 8)], [0, 30])
        shards = [[torch.ones(n, requires_grad=True) for _ in range(3)] for n in (30, 34)]
        layout = [[[Segment(0, (8, 8), i, (0, 30))], [Segment(0, (8, 8), i, (30, 64))]] for i in range(3)]

        def go(rank: int) -> None:
            optimizer = make(shards[rank])
            for bucket, shard in enumerate(shards[rank]):
                shard.grad = torch.randn(64, generator=torch.Generator().manual_seed(bucket))[
                    slice(*[(0, 30), (30, 64)][rank])
                ]
            optimizer.place_on_ranks(dict(zip(shards[rank], layout)), Member(crew, rank))
            optimizer.step()

        crew.together(go)
        return [shard.detach() for held in shards for shard in held], crew.exchanged

    def Member(crew: Any, rank: int) -> Any:  # noqa: N802 - stands for the class
        found: list[Any] = []
        taker = type("Taker", (), {"place_on_ranks": lambda self, segments, ranks: found.append(ranks)})()
        crew.place_segments(rank, taker, torch.zeros(1))
        return found[0]

    at_once, messages = train(2**26)
    in_rounds, more_messages = train(40)
    assert len(messages) == 2
    assert len(more_messages) == 6
    for a, b in zip(at_once, in_rounds):
        torch.testing.assert_close(a, b)


def test_the_adamw_half_and_signals_work_on_shards(lab: Any, team: Any) -> None:
    """Vectors in a shard of a group without matrices use AdamW; found_inf sends nothing; grad_scale divides."""
    crew = team(SHAPES, [0, 100])
    vector = [torch.ones(10, requires_grad=True) for _ in range(2)]

    def build(params: list[Tensor]) -> zoptim.Muon:
        optimizer = make(params)
        mine = vector.pop()
        mine.grad = torch.ones(10)
        optimizer.add_param_group({"params": [mine], "use_muon": False})
        optimizer.grad_scale = torch.tensor(8.0)
        return optimizer

    shards, optimizers = crew.train(build, range(2))
    params = lab.make_params(SHAPES)
    alone = make(params)
    alone.grad_scale = torch.tensor(8.0)
    lab.run(alone, params, range(2), SHAPES)
    lab.assert_near([torch.cat(shards)], [torch.cat([p.flatten() for p in params])], rtol=1e-5, atol=1e-6)
    for optimizer in optimizers:
        assert optimizer.param_groups[1]["params"][0].max() < 0.999
        optimizer.found_inf = torch.ones(())
    before, messages = [shard.detach().clone() for shard in shards], len(crew.exchanged)
    crew.go_on(shards, optimizers, range(2, 3))
    lab.assert_bitwise(shards, before)
    assert len(crew.exchanged) == messages


def test_shards_without_gradient_or_without_matrix_raise(team: Any) -> None:
    crew = team([(4, 4)], [0])
    shard = torch.zeros(16, requires_grad=True)
    optimizer = make([shard])
    crew.place_segments(0, optimizer, shard)
    with pytest.raises(ValueError, match=r"1 flat shards of Muon have no gradient \(the first has shape \(16,\)\)"):
        optimizer.step()
    with pytest.raises(ValueError, match=r"span=\(0, 16\)\) is no matrix; put it into a group with use_muon=False"):
        team([(16,)], [0]).place_segments(0, optimizer, shard)
    named = zoptim.Muon([("gain", torch.zeros(16, requires_grad=True))], use_muon=lambda name, param: True)
    with pytest.raises(ValueError, match=r"parameter 0 of group 0 \('gain'\) has shape \(16,\), which is no matrix"):
        named.check_cuts()
    with pytest.raises(ValueError, match="is a part of a tensor; give the segments of all ranks with place_on_ranks"):
        optimizer.place_segments({shard: [Segment(0, (8, 8), 0, (0, 16))]})


def test_segments_survive_loading_and_the_run_continues_bit_for_bit(lab: Any, team: Any) -> None:
    crew = team(SHAPES, [0, 100])
    shards, optimizers = crew.train(make, range(2))
    others, resumed = crew.train(make, range(1))
    for other, shard, theirs, ours in zip(others, shards, resumed, optimizers):
        other.data.copy_(shard.data)
        theirs.load_state_dict(ours.state_dict())
    crew.go_on(shards, optimizers, range(2, 4))
    crew.go_on(others, resumed, range(2, 4))
    lab.assert_bitwise(others, shards)
