"""Names of classes whose gradients are reduced in the lower dtype."""

from __future__ import annotations

import pytest
from torch import nn

import zengine
from zengine.build.trainable import check_class_names


class Own(nn.Linear):
    """A class of the script."""


@pytest.mark.parametrize("name", ["Linear", "Own", "torch.nn.Linear", "torch.nn.Conv3d", f"{__name__}.Own"])
def test_classes_of_the_model_and_any_that_can_be_imported_are_known(name: str) -> None:
    check_class_names([name], nn.Sequential(nn.Linear(1, 1), Own(1, 1)))


@pytest.mark.parametrize("name", ["torch.nn.Linaer", "nowhere.Linear", "linear", "torch.nn.functional.relu"])
def test_a_name_that_means_nothing_is_refused_before_anything_is_moved(name: str) -> None:
    model = nn.Sequential(nn.Linear(1, 1))
    config = {"train_batch_size": 1, "torch_autocast": {"enabled": True, "lower_precision_safe_modules": [name]}}
    with pytest.raises(ValueError, match=f"lower_precision_safe_modules names '{name}'"):
        zengine.initialize(model=model, config=config)


def test_the_nearest_class_is_suggested() -> None:
    with pytest.raises(ValueError, match=r"Did you mean 'torch.nn.Linear'\?"):
        check_class_names(["torch.nn.Linaer"], nn.Sequential(nn.Linear(1, 1)))
