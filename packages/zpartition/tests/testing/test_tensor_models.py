"""The tensor-parallel models have the properties that tests rely on."""

from __future__ import annotations

import torch

from zpartition.tensor import resolve
from zpartition.testing.tensor_models import GATHERED, PLAN, SEQUENCE, Language


def test_the_plans_fit_the_model_and_differ_in_their_regions() -> None:
    model = Language()
    numbers = [len(resolve(plan, model, 2, 0)) for plan in (PLAN, SEQUENCE, GATHERED)]
    assert numbers == [19, 27, 26]
    assert model.head.weight is model.embed.weight
    assert model(torch.zeros(1, 3, dtype=torch.long)).dtype == torch.float64
