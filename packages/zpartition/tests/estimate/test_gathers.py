"""Gather counts of units: by hand, on small chains."""

from __future__ import annotations

import attrs
import torch
from torch import nn

from zpartition import ZeroPolicy
from zpartition.estimate.traffic import count_gathers, embedding_only_units

CHAIN = {"a": 10, "b": 10, "c": 10, "d": 10}
ALL = ZeroPolicy(stage=3, max_live_numel=1000, max_reuse_numel=1000, prefetch_numel=0)


def counts(units: dict[str, int], policy: ZeroPolicy, once: tuple[str, ...] = ()) -> str:
    """The gathers of each unit, as digits."""
    found = count_gathers(units, policy, once, num_shards=4)
    return "".join(str(found[name]) for name in units)


def test_by_default_only_the_last_units_stay_for_backward() -> None:
    default = attrs.evolve(ALL, max_live_numel=None)
    assert counts(CHAIN, default) == "2221"
    assert counts(CHAIN, attrs.evolve(default, prefetch_numel=1)) == "2211"  # one unit is gathered ahead
    assert counts({"": 10, "a": 10, "b": 10}, default) == "121"


def test_what_may_stay_is_gathered_once_and_what_may_not_twice() -> None:
    assert counts(CHAIN, ALL) == "1111"
    assert counts(CHAIN, attrs.evolve(ALL, max_live_numel=0)) == "2222"


def test_of_a_model_over_the_limit_the_rest_is_gathered_twice() -> None:
    assert counts(CHAIN, attrs.evolve(ALL, max_live_numel=20)) == "1122"
    assert counts(CHAIN, attrs.evolve(ALL, max_live_numel=39)) == "1112"
    assert counts(CHAIN, attrs.evolve(ALL, max_live_numel=40)) == "1111"


def test_what_is_used_again_soon_stays() -> None:
    assert counts(CHAIN, attrs.evolve(ALL, max_reuse_numel=40)) == "2111"  # between: b c d, d c b
    assert counts(CHAIN, attrs.evolve(ALL, max_reuse_numel=0)) == "2221"


def test_what_is_gathered_ahead_takes_room() -> None:
    assert counts(CHAIN, attrs.evolve(ALL, max_live_numel=15)) == "1222"
    assert counts(CHAIN, attrs.evolve(ALL, max_live_numel=15, prefetch_numel=10)) == "2221"


def test_backward_needs_no_weights_of_a_lookup() -> None:
    assert counts(CHAIN, attrs.evolve(ALL, max_live_numel=0), ("a",)) == "1222"


def test_a_unit_around_others_is_whole_while_they_run_and_is_needed_first_in_backward() -> None:
    around = {"": 10, "a": 10, "b": 10}
    assert counts(around, attrs.evolve(ALL, max_live_numel=19)) == "122"
    assert counts(around, attrs.evolve(ALL, max_live_numel=20)) == "112"
    assert counts(around, attrs.evolve(ALL, max_live_numel=9)) == "222"


def test_units_of_lookups_hold_embeddings_that_no_other_module_has() -> None:
    with torch.device("meta"):
        model = nn.ModuleDict({"words": nn.Embedding(4, 4), "places": nn.Embedding(4, 4), "head": nn.Linear(4, 4)})
    unit_of = {"words.weight": "words", "places.weight": "places", "head.weight": "head"}
    assert embedding_only_units(model, unit_of) == {"words", "places"}
    model["head"].weight = model["words"].weight  # type: ignore[assignment]
    tied = {"words.weight": "", "places.weight": "places", "head.bias": ""}
    assert embedding_only_units(model, tied) == {"places"}
