"""Memory layout of tensors."""

from __future__ import annotations

import torch

from zoptim.backends.memory import as_dense, is_dense, match_layout, memory_view


def test_a_tensor_is_copied_only_when_its_layout_differs() -> None:
    like = torch.ones(2, 3)
    assert match_layout(like, like) is like
    turned = torch.arange(6.0).view(3, 2).t()
    laid = match_layout(turned, like)
    assert (laid.stride(), torch.equal(laid, turned)) == (like.stride(), True)
    one = torch.ones(3, 1)
    assert match_layout(one.t().contiguous().t(), one).stride() in {(1, 1), (1, 3)}


def test_dense_means_without_holes_in_any_order() -> None:
    assert [is_dense(t) for t in (torch.ones(2, 3).t(), torch.ones(4)[::2], torch.ones(()), torch.ones(0))] == [
        True, False, True, True
    ]  # fmt: skip


def test_only_holes_are_closed_by_a_copy() -> None:
    turned, holed = torch.arange(6.0).view(2, 3).t(), torch.arange(6.0)[::2]
    assert as_dense(turned) is turned
    assert torch.equal(as_dense(holed), holed)
    assert is_dense(as_dense(holed))


def test_elements_in_the_order_of_memory_are_a_view() -> None:
    turned = torch.arange(6.0).view(2, 3).t()
    assert memory_view(turned).tolist() == [0, 1, 2, 3, 4, 5]
    memory_view(turned)[1] = 7.0
    assert turned[1, 0] == 7.0
