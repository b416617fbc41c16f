"""The parts of torch's private API that zpartition uses: a failure means that a new torch changed them."""

from __future__ import annotations

import sys
import types
import weakref
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint

import zpartition
from zpartition._compat import (
    TO_NUMBER,
    any_requires_grad,
    draw_one,
    grouped_mm,
    has_grouped_mm,
    is_in_backward,
    is_unreferenced,
    outer_saved_tensor_hooks,
    parameters_of,
    run_backward,
    running_node,
    swap,
    truncated_normal_through,
    uncompiled,
    version,
)


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


def test_one_of_many_requires_a_gradient() -> None:
    frozen = [torch.nn.Parameter(torch.empty(1), requires_grad=False) for _ in range(3)]
    assert not any_requires_grad(*frozen)
    assert not any_requires_grad()
    frozen[1].requires_grad_(True)
    assert any_requires_grad(*frozen)


def test_tensors_swap_what_they_are_even_if_referred_to_weakly() -> None:
    tensor, other = torch.nn.Parameter(torch.empty(2, device="meta")), torch.nn.Parameter(torch.ones(2))
    reference = weakref.ref(tensor)
    swap(tensor, other)
    assert (tensor.device.type, other.device.type, reference() is tensor) == ("cpu", "meta", True)
    tensor.sum().backward()
    assert tensor.grad is not None


def test_truncated_normals_go_through_a_function_of_ours_inside_the_block() -> None:
    seen = []
    with truncated_normal_through(lambda function, tensor, *args, **kwargs: seen.append(tensor) or tensor):
        torch.nn.init.trunc_normal_(torch.zeros(3))
    assert [tensor.shape for tensor in seen] == [(3,)]
    filled = torch.nn.init.trunc_normal_(torch.zeros(3))
    assert bool(filled.any())


def test_a_running_backward_is_seen() -> None:
    weight, seen = torch.ones(1, requires_grad=True), []
    product = weight * 2
    product.register_hook(lambda _: seen.append(is_in_backward()))
    product.backward()
    assert (seen, is_in_backward()) == ([True], False)


def test_the_node_that_unpacks_is_told_from_others() -> None:
    seen: list[int | None] = []

    def unpack(tensor: torch.Tensor) -> torch.Tensor:
        seen.append(running_node())
        return tensor

    weight = torch.ones(2, 2, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, unpack):
        product = (weight @ weight) @ weight
    product.sum().backward()
    assert [type(number) for number in seen] == [int] * 4
    assert [seen.count(number) for number in dict.fromkeys(seen)] == [2, 2], "two nodes that unpack two tensors each"
    assert running_node() is None


def test_a_write_into_a_tensor_or_a_view_of_it_is_counted() -> None:
    tensor = torch.zeros(4)
    before = version(tensor)
    tensor[1:].add_(1)
    assert version(tensor) > before


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


def test_parameters_of_all_submodules_are_found() -> None:
    shared = torch.nn.Linear(2, 2)
    model = torch.nn.Sequential(shared, torch.nn.ModuleList([shared, torch.nn.Linear(2, 1, bias=False)]))
    model[1].back = model  # a circle
    model[1].register_parameter("absent", None)
    assert {id(param) for param in parameters_of(model)} == {id(param) for param in model.parameters()}


def test_item_is_one_operation_that_has_a_name() -> None:
    assert TO_NUMBER(torch.tensor(2.5)) == 2.5


def test_one_kernel_multiplies_runs_of_rows() -> None:
    """As the kernel of GPUs is called; a CPU computes it too, but a loop over experts is as fast there."""
    x, weight = torch.randn(6, 8), torch.randn(3, 16, 8)
    assert not has_grouped_mm(x, weight)
    y = grouped_mm(x, weight.transpose(1, 2), torch.tensor([2, 2, 6], dtype=torch.int32))
    torch.testing.assert_close(y, torch.cat([x[:2] @ weight[0].t(), x[2:] @ weight[2].t()]))


@pytest.mark.parametrize(
    ("version", "capability", "expected"),
    [("2.8.0", (9, 0), True), ("2.8.0", (8, 0), False), ("2.8.0", (10, 0), False), ("2.11.0+cu130", (10, 0), True)],
)
def test_grouped_products_are_used_where_torch_has_a_kernel(
    monkeypatch: pytest.MonkeyPatch, version: str, capability: tuple[int, int], expected: bool
) -> None:
    monkeypatch.setattr(torch, "__version__", version)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _device: capability)
    rows = types.SimpleNamespace(
        is_cuda=True, dtype=torch.bfloat16, shape=(4, 16), element_size=lambda: 2, device=torch.device("cuda", 0)
    )
    weight = types.SimpleNamespace(dtype=torch.bfloat16, shape=(2, 8, 16))
    assert has_grouped_mm(rows, weight) is expected  # type: ignore[arg-type]


def test_modes_stay_in_force_in_a_backward() -> None:
    seen = []

    class Mode(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(func)
            return func(*args, **(kwargs or {}))

    value = torch.ones(2, requires_grad=True)
    output = checkpoint(torch.tanh, value, use_reentrant=False)
    with Mode():
        run_backward([output], [torch.ones(2)])
    assert torch.tanh in seen  # computed again inside of it
    assert torch.autograd.backward not in seen
    assert value.grad is not None


def test_a_number_is_drawn_whatever_modes_are_on() -> None:
    torch.manual_seed(1)
    expected = (torch.rand(()), torch.rand(()))[1]
    torch.manual_seed(1)
    with zpartition.Init() as init, torch.device("meta"):
        draw_one()
    assert not init.recorded.steps
    assert torch.equal(torch.rand(()), expected)


def test_a_storage_tells_whether_tensors_have_it() -> None:
    tensor = torch.empty(4, device="meta")
    storage = tensor.untyped_storage()
    view = tensor[1:]
    del tensor
    assert not is_unreferenced(storage)
    del view
    assert is_unreferenced(storage)


def test_a_function_is_apart_from_graphs_without_importing_the_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[object] = []
    monkeypatch.setattr(torch.compiler, "disable", lambda function: asked.append(function) or function)
    monkeypatch.delitem(sys.modules, "torch._dynamo", raising=False)
    hook = uncompiled(lambda x: x + 1)
    assert (hook(1), hook(2), asked) == (2, 3, [])
    assert "torch._dynamo" not in sys.modules
    monkeypatch.setitem(
        sys.modules, "torch._dynamo", types.ModuleType("torch._dynamo")
    )  # from now on graphs are made
    assert (hook(1), hook(2), len(asked)) == (2, 3, 1)
