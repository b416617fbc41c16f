"""The drawn seed, and random numbers under seeds derived from it."""

from __future__ import annotations

import torch

from zpartition import Init
from zpartition.deferred.init import active_recording
from zpartition.deferred.recording import is_meta
from zpartition.experts.stacked import draw_seed, seed_scope


def test_seed_scope_depends_on_seed_and_index_and_restores_the_generator() -> None:
    torch.manual_seed(2)
    number = draw_seed()
    found = []
    for index in (0, 1, 0):
        with seed_scope(number, index):
            found.append(torch.rand(4))
    assert torch.equal(found[0], found[2])
    assert not torch.equal(found[0], found[1])
    following = torch.rand(4)
    torch.manual_seed(2)
    assert torch.equal(number, torch.randint(2**31, ()))
    assert torch.equal(following, torch.rand(4))


def test_draw_seed_has_a_value_on_the_meta_device_but_not_inside_init() -> None:
    with torch.device("meta"):
        assert int(draw_seed()) >= 0
    with Init() as init:
        number = draw_seed()
        assert is_meta(number)
        assert active_recording() is init.recorded
        before = torch.get_rng_state()
        with seed_scope(number, 3):
            torch.manual_seed(1)
        assert torch.equal(torch.get_rng_state(), before)
    assert active_recording() is None
