"""The tape: what is noted, in which order memory comes and goes."""

from __future__ import annotations

import torch

import zpartition
from zpartition.tape import Ref, key_of


def test_views_are_not_noted_but_seen_through() -> None:
    with zpartition.Init() as init:
        whole = torch.zeros(4, 6)
        whole.t()[1:3].fill_(2.0)
    delivered = {}
    init.tape.play(lambda key, content: delivered.update({key: content}), wanted=frozenset({key_of(whole)}))
    real = Ref.of(whole).seen_in(delivered[key_of(whole)])
    expected = torch.zeros(4, 6)
    expected.t()[1:3] = 2.0
    assert torch.equal(real, expected)
    assert [step.run.__name__ for step in init.tape.steps] == ["zeros.default", "fill_.Scalar"]


def test_a_real_tensor_is_a_constant_of_the_tape() -> None:
    given = torch.tensor([1.0, 2.0])
    with zpartition.Init() as init:
        made = torch.ones(2) + given
    given.zero_()
    delivered = {}
    init.tape.play(lambda key, content: delivered.update({key: content}), wanted=frozenset({key_of(made)}))
    assert delivered[key_of(made)].view(torch.float32).tolist() == [2.0, 3.0]


def test_a_storage_that_no_step_touches_is_delivered_too() -> None:
    with zpartition.Init() as init:
        made = torch.empty(3)
    delivered = {}
    init.tape.play(lambda key, content: delivered.update({key: content}), wanted=frozenset({key_of(made)}))
    assert delivered[key_of(made)].numel() == 12
