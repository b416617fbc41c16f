"""Init recordings: recorded operations, and the order in which memory is allocated and freed."""

from __future__ import annotations

import unittest.mock
import weakref
from typing import Any

import torch

import zpartition
from zpartition.deferred.recording import Ref, key_of


def test_views_are_not_noted_but_seen_through() -> None:
    with zpartition.Init() as init:
        whole = torch.zeros(4, 6)
        whole.t()[1:3].fill_(2.0)
    delivered = {}
    init.recorded.replay(lambda key, content: delivered.update({key: content}), wanted=frozenset({key_of(whole)}))
    real = Ref.of(whole).seen_in(delivered[key_of(whole)])
    expected = torch.zeros(4, 6)
    expected.t()[1:3] = 2.0
    assert torch.equal(real, expected)
    assert [step.run.__name__ for step in init.recorded.steps] == ["zeros.default", "fill_.Scalar"]


def test_a_real_tensor_is_a_constant_of_the_tape() -> None:
    given = torch.tensor([1.0, 2.0])
    with zpartition.Init() as init:
        made = torch.ones(2) + given
    given.zero_()
    delivered = {}
    init.recorded.replay(lambda key, content: delivered.update({key: content}), wanted=frozenset({key_of(made)}))
    assert delivered[key_of(made)].view(torch.float32).tolist() == [2.0, 3.0]


def test_a_storage_that_no_step_touches_is_delivered_too() -> None:
    with zpartition.Init() as init:
        made = torch.empty(3)
    delivered = {}
    init.recorded.replay(lambda key, content: delivered.update({key: content}), wanted=frozenset({key_of(made)}))
    assert delivered[key_of(made)].numel() == 12


def test_what_is_noted_last_is_carried_out_when_what_it_works_on_is_there() -> None:
    with zpartition.Init() as init:
        layers = [torch.nn.Linear(8, 8, bias=False) for _ in range(5)]
        narrow = [layer.weight.to(torch.bfloat16) for layer in layers]
        halves = [weight[:4].clone() for weight in narrow]
    alive: list[int] = []
    delivered: list[int] = []
    made: list[weakref.ref[torch.Tensor]] = []
    original = torch.empty

    def counted(*args: Any, **kwargs: Any) -> torch.Tensor:
        found = original(*args, **kwargs)
        made.append(weakref.ref(found))
        alive.append(sum(each.numel() for reference in made if (each := reference()) is not None))
        return found

    with unittest.mock.patch.object(torch, "empty", counted):
        wanted = frozenset(map(key_of, halves))
        init.recorded.replay(lambda key, content: delivered.append(key), wanted=wanted)
    assert delivered == [key_of(half) for half in halves]
    assert max(alive) <= 8 * 8 * (4 + 2), "one layer, cast"


def test_a_number_that_was_drawn_seeds_what_is_drawn_inside() -> None:
    def drawn() -> list[torch.Tensor]:
        with zpartition.Init() as init:
            number = torch.randint(1000, ())
            with init.recorded.record_seeded(number, torch.manual_seed):
                inside = torch.rand(3)
            after = torch.rand(3)
        found: dict[int, torch.Tensor] = {}
        wanted = [number, inside, after]
        init.recorded.replay(lambda key, content: found.update({key: content}), wanted=frozenset(map(key_of, wanted)))
        return [Ref.of(each).seen_in(found[key_of(each)]) for each in wanted]

    torch.manual_seed(4)
    number, inside, after = drawn()
    following = torch.rand(3)
    torch.manual_seed(4)
    assert torch.equal(number, torch.randint(1000, ()))
    assert torch.equal(after, torch.rand(3))
    assert torch.equal(following, torch.rand(3))
    torch.manual_seed(int(number))
    assert torch.equal(inside, torch.rand(3))


def seeded_again() -> list[torch.Tensor]:
    """The same seed twice, and what goes on behind a seed that was put back."""
    made = []
    for _ in range(2):
        torch.manual_seed(3)
        made.append(torch.rand(2))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        made.append(torch.nn.init.trunc_normal_(torch.empty(2)))
    made.append(torch.rand(2))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        made.append(torch.rand(2))
    return made


def test_seeds_that_are_set_again_or_put_back_give_what_they_give_plainly() -> None:
    expected, following = seeded_again(), torch.rand(2)
    torch.manual_seed(8)
    with zpartition.Init() as init:
        made = seeded_again()
    found: dict[int, torch.Tensor] = {}
    init.recorded.replay(lambda key, content: found.update({key: content}), wanted=frozenset(map(key_of, made)))
    for each, value in zip(made, expected, strict=True):
        assert torch.equal(Ref.of(each).seen_in(found[key_of(each)]), value)
    assert torch.equal(torch.rand(2), following)


def test_recording_leaves_the_generator_and_the_seed_as_they_were() -> None:
    torch.manual_seed(3)
    before = torch.get_rng_state()
    with zpartition.Init():
        torch.rand(4)
        assert torch.initial_seed() == 3
    assert torch.equal(torch.get_rng_state(), before)
    own = torch.rand(())
    with zpartition.Init() as init:
        module = torch.nn.Linear(2, 2)
    after = torch.rand(())  # one number on, as recording is after its first
    with zpartition.recording(module):
        module.half()
    following = torch.rand(())
    torch.manual_seed(3)
    assert torch.equal(torch.stack([own, after, following]), torch.stack([torch.rand(()) for _ in range(3)]))
    state = torch.get_rng_state()
    init.recorded.replay(lambda key, content: None, wanted=frozenset())
    assert torch.equal(torch.get_rng_state(), state), "somebody has used it since"
