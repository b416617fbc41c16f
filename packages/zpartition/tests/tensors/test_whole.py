"""State dicts of split models equal those of unsplit ones."""

from __future__ import annotations

import torch

from zcomm.testing import run_ranks
from zpartition.tensor import parallelize, whole_state_dict
from zpartition.testing.tensor_models import PLAN, Language


def _names_and_bits() -> tuple[list[str], bool]:
    model = Language()
    expected = model.state_dict()
    expected = {name: value.clone() for name, value in expected.items()}
    parallelize(model, PLAN)
    state = whole_state_dict(model)
    return list(state), all(torch.equal(state[name], value) for name, value in expected.items())


def test_uneven_parts_of_three_ranks_are_joined_under_all_names() -> None:
    for names, is_same in run_ranks(_names_and_bits, 3):
        assert is_same
        assert names == list(Language().state_dict())  # the tied head too
