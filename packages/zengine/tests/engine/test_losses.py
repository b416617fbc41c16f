"""Losses that `backward` accepts."""

from __future__ import annotations

import pytest
import torch

from zengine.engine.loss_weighting import check_loss


@pytest.mark.parametrize(
    ("loss", "error", "message"),
    [
        (3.0, TypeError, "needs the loss tensor, got float"),
        ((torch.ones(1), 2), TypeError, "got tuple"),
        (torch.ones(2, 3, requires_grad=True), ValueError, r"scalar loss, got shape \(2, 3\)"),
        (torch.ones(()), ValueError, "without a graph"),
    ],
)
def test_what_cannot_be_differentiated_is_refused(loss, error, message):
    with pytest.raises(error, match=message):
        check_loss(loss)


def test_scalars_of_any_shape_pass():
    for loss in (torch.ones((), requires_grad=True), torch.ones(1, 1, requires_grad=True)):
        check_loss(loss)
