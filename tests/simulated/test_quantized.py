"""Quantized weights on the device: the GPU kernels' bits are those of the CPU, without a wait, in any stream."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import zprecision
from simulated_cuda.library import host_waits
from zprecision.backends.gpu import launch

DEVICE = torch.device("cuda", 0)
FORMATS = ("int4", "int8", "int8-g64-minmax", "int4-row", "q4_0")


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The kernels that are launched."""
    names: list[str] = []
    plain = launch.CupyLauncher.launch

    def note(self: launch.CupyLauncher, program: launch.Program, num_blocks: int, args: bytes) -> None:
        names.append(program.kernel)
        plain(self, program, num_blocks, args)

    monkeypatch.setattr(launch.CupyLauncher, "launch", note)
    return names


@pytest.mark.parametrize("name", FORMATS)
def test_codes_values_and_products_have_the_bits_of_the_cpu(name: str, launched: list[str]) -> None:
    weight, bias, x = drawn(24, 160), drawn(24, seed=1), drawn(3, 160, seed=2)
    here, there = zprecision.quantize(weight, name), zprecision.quantize(weight.to(DEVICE), name)
    assert there.device == DEVICE
    assert all(torch.equal(part, there.parts()[part_name].cpu()) for part_name, part in here.parts().items())
    assert torch.equal(there.dequantize(torch.bfloat16).cpu(), here.dequantize(torch.bfloat16))
    product = zprecision.linear(x.to(DEVICE), there, bias.to(DEVICE))
    assert product.device == DEVICE
    if zprecision.kernels().levels:
        assert torch.equal(product.cpu(), zprecision.linear(x, here, bias))
    torch.testing.assert_close(product.cpu(), zprecision.linear(x, here, bias))
    assert launched == ["zq_quantize", "zq_dequantize", "zq_activations", "zq_products"]


def test_one_launch_multiplies_by_several_weights(launched: list[str]) -> None:
    weights = [zprecision.quantize(drawn(rows, 64, seed=rows).to(DEVICE), "int4") for rows in (48, 16, 16)]
    x = drawn(1, 1, 64, seed=9).to(DEVICE, torch.bfloat16)
    launched.clear()
    together = zprecision.linear_many(x, weights)
    assert launched == ["zq_products"]
    assert [each.dtype for each in together] == [torch.bfloat16] * 3
    assert all(
        torch.equal(each, zprecision.linear(x, weight)) for each, weight in zip(together, weights, strict=True)
    )


def test_many_tokens_are_multiplied_by_values_in_their_dtype(launched: list[str]) -> None:
    weight, x = zprecision.quantize(drawn(24, 64).to(DEVICE), "int4"), drawn(40, 64, seed=1).to(DEVICE)
    launched.clear()
    product = zprecision.linear(x, weight)
    assert launched == ["zq_dequantize"]
    torch.testing.assert_close(product, x @ weight.dequantize().T)


def test_weights_move_to_the_device_in_rows_which_its_kernels_read(launched: list[str]) -> None:
    quantized, x = zprecision.quantize(drawn(24, 64), "int8"), drawn(1, 64, seed=1)
    packed = zprecision.pack(quantized)
    assert isinstance(packed, zprecision.PackedTensor)
    moved = packed.to(DEVICE)
    assert isinstance(moved, zprecision.QuantizedTensor)
    assert zprecision.pack(moved) is moved
    assert torch.equal(moved.codes.cpu(), quantized.codes)
    product = zprecision.linear(x.to(DEVICE), moved)
    torch.testing.assert_close(product.cpu(), zprecision.linear(x, quantized))
    assert launched == ["zq_products"]


def test_products_never_wait_for_the_device() -> None:
    weight, x = zprecision.quantize(drawn(24, 64).to(DEVICE), "int4"), drawn(2, 64, seed=1).to(DEVICE)
    before = host_waits()
    for tokens in (1, 2):
        zprecision.linear(x[:tokens], weight)
    assert host_waits() == before


def test_a_product_is_captured_and_replayed_with_another_activation() -> None:
    weight = zprecision.quantize(drawn(24, 64).to(DEVICE), "int4")
    x, other = drawn(1, 64, seed=1).to(DEVICE), drawn(1, 64, seed=2).to(DEVICE)
    zprecision.linear(x, weight)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        product = zprecision.linear(x, weight)
    x.copy_(other)
    graph.replay()
    assert torch.equal(product, zprecision.linear(other, weight))


def test_a_product_on_another_stream_follows_what_is_before_it_there() -> None:
    weight, x = zprecision.quantize(drawn(24, 64).to(DEVICE), "int4"), drawn(1, 64, seed=1).to(DEVICE)
    expected = zprecision.linear(2 * x, weight)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        x.mul_(2)
        product = zprecision.linear(x, weight)
    torch.cuda.current_stream().wait_stream(side)
    assert torch.equal(product, expected)


def test_values_that_are_not_finite_are_rejected() -> None:
    weight = drawn(3, 64).to(DEVICE)
    weight[1, 5] = torch.inf
    with pytest.raises(ValueError, match="infinite or NaN values"):
        zprecision.quantize(weight, "int4")


def test_gradients_pass_through_products() -> None:
    weight, x = zprecision.quantize(drawn(24, 64).to(DEVICE), "int4"), drawn(2, 64, seed=1).to(DEVICE)
    x.requires_grad_()
    zprecision.linear(x, weight).sum().backward()
    assert x.grad is not None
    torch.testing.assert_close(x.grad, weight.dequantize().sum(0).expand(2, 64))


def test_the_kernels_in_use_are_shown() -> None:
    assert zprecision.kernels().gpu.startswith("cupy ")
