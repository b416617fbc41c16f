"""What zpartition relies on in torch's private API: a failure here means that a new torch changed it."""

from __future__ import annotations

from typing import Any

import torch

from zpartition.compat import is_in_backward, outer_saved_tensor_hooks


def test_the_innermost_hooks_are_told() -> None:
    assert outer_saved_tensor_hooks() is None

    def pack(tensor: torch.Tensor) -> Any:
        return tensor

    def unpack(packed: Any) -> Any:
        return packed

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        found = outer_saved_tensor_hooks()
        assert found is not None
        assert found == (pack, unpack)
    assert outer_saved_tensor_hooks() is None


def test_a_running_backward_is_seen() -> None:
    weight, seen = torch.ones(1, requires_grad=True), []
    product = weight * 2
    product.register_hook(lambda _: seen.append(is_in_backward()))
    product.backward()
    assert (seen, is_in_backward()) == ([True], False)


def test_parameters_are_read_through_the_modules_dict() -> None:
    class Noticing(dict):  # type: ignore[type-arg]
        def __getitem__(self, name: str) -> Any:
            seen.append(name)
            return super().__getitem__(name)

    seen: list[str] = []
    module = torch.nn.Linear(2, 2)
    module._parameters = Noticing(module._parameters)
    module(torch.ones(1, 2))
    assert sorted(set(seen)) == ["bias", "weight"]
