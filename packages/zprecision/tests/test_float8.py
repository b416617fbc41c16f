"""Linear layers in 8-bit floats, with torch's CPU product and with one that follows the definition."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from zprecision import Float8, Float8Linear, KeepInFp32, has_float8
from zprecision.float8 import quantized

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


class ByDefinition(Float8Linear):
    """Products of decoded codes, in float32: what 8-bit hardware is to give."""

    @staticmethod
    def matmul(left: Tensor, right: Tensor, scales: tuple[Tensor, Tensor], dtype: torch.dtype) -> Tensor:
        with torch.autocast("cpu", enabled=False):
            return ((left.float() @ right.float()) * (scales[0] * scales[1])).to(dtype)


class OnCpu(Float8Linear):
    """torch's own product, which a CPU carries out without matrix units."""


def network() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 16), nn.Linear(16, 5))


def decoded(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    codes, scale = quantized(tensor, dtype)
    return codes.float() * scale


@pytest.mark.parametrize(("dtype", "bits"), [(E4M3, 3), (E5M2, 2)])
def test_codes_are_off_by_half_a_step_and_the_largest_is_exact(dtype: torch.dtype, bits: int) -> None:
    torch.manual_seed(0)
    x = torch.randn(1000) * torch.logspace(-2, 3, 1000)
    error = (decoded(x, dtype) - x).abs()
    normal = x.abs() > x.abs().max() / torch.finfo(dtype).max * torch.finfo(dtype).smallest_normal
    assert bool((error[normal] <= x.abs()[normal] * 2.0 ** -(bits + 1) * 1.001).all())
    assert decoded(x, dtype)[x.abs().argmax()] == pytest.approx(x[x.abs().argmax()].item(), rel=1e-6)


@pytest.mark.parametrize("value", [0.0, 1e-44, 3e38])
def test_no_magnitude_is_too_small_or_too_large(value: float) -> None:
    found = decoded(torch.full((4,), value), E4M3)
    assert bool(torch.isfinite(found).all())
    assert found[0].item() == pytest.approx(value, rel=1e-6, abs=1e-38)


@pytest.mark.parametrize("bad", [torch.inf, torch.nan])
def test_what_is_not_finite_is_seen_behind_the_product(bad: float) -> None:
    x = torch.ones(16, 32)
    x[0, 0] = bad
    with Float8.convert(layer := nn.Linear(32, 16), device="cpu", kind=OnCpu):
        assert not bool(torch.isfinite(layer(x)[0]).all())


@pytest.mark.parametrize("rows", [16, 7])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_forward_and_backward_are_products_of_codes(rows: int, dtype: torch.dtype) -> None:
    torch.manual_seed(2)
    layer = nn.Linear(32, 48).to(dtype)
    x = torch.randn(rows, 32, dtype=dtype, requires_grad=True)
    grad = torch.randn(rows, 48, dtype=dtype)
    with Float8.convert(layer, device="cpu", kind=OnCpu):
        output = layer(x)
        output.backward(grad)
    codes = decoded(x.detach(), E4M3), decoded(layer.weight.detach(), E4M3), decoded(grad, E5M2)
    x8, w8, g8 = codes
    close = {"rtol": 2e-2, "atol": 2e-2} if dtype == torch.bfloat16 else {"rtol": 1e-5, "atol": 1e-5}
    torch.testing.assert_close(output.float(), x8 @ w8.t() + layer.bias.float(), **close)
    torch.testing.assert_close(x.grad.float(), g8 @ w8, **close)
    torch.testing.assert_close(layer.weight.grad.float(), g8.t() @ x8, **close)
    torch.testing.assert_close(layer.bias.grad.float(), grad.float().sum(0), **close)
    assert output.dtype == x.grad.dtype == layer.weight.grad.dtype == dtype


def test_tensors_that_lie_otherwise_in_memory_give_the_same() -> None:
    seen: list[bool] = []

    class Watching(OnCpu):
        @staticmethod
        def matmul(left: Tensor, right: Tensor, scales: tuple[Tensor, Tensor], dtype: torch.dtype) -> Tensor:
            seen.append(left.is_contiguous() and right.t().is_contiguous())  # what the hardware asks for
            return OnCpu.matmul(left, right, scales, dtype)

    torch.manual_seed(3)
    layer = nn.Linear(32, 16)
    x, grad = torch.randn(32, 24).t().requires_grad_(), torch.randn(16, 24).t()
    with Float8.convert(layer, device="cpu", kind=Watching):
        output = layer(x)
        output.backward(grad)
        assert torch.equal(output, layer(x.detach().contiguous()))
    assert seen == [True] * 4


def test_torchs_product_and_the_definition_train_alike_and_near_float32() -> None:
    losses = []
    for kind in (OnCpu, ByDefinition, None):
        model = network()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        if kind is not None:
            Float8.convert(model, device="cpu", kind=kind)
        generator = torch.Generator().manual_seed(3)
        for _ in range(30):
            x = torch.randn(24, 32, generator=generator)
            loss = nn.functional.cross_entropy(model(x), x[:, :5].argmax(1))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[0] == pytest.approx(losses[1], rel=1e-2)
    assert losses[0] == pytest.approx(losses[2], abs=0.15)
    assert losses[0] < 1.2


def test_inside_autocast_the_output_has_its_dtype_and_weights_stay() -> None:
    layer = nn.Linear(32, 16)
    with Float8.convert(layer, device="cpu", kind=OnCpu), torch.autocast("cpu", dtype=torch.bfloat16):
        output = layer(torch.randn(2, 3, 32))
    output.float().sum().backward()
    assert (output.dtype, output.shape) == (torch.bfloat16, (2, 3, 16))
    assert layer.weight.dtype == layer.weight.grad.dtype == torch.float32


def test_a_second_derivative_is_rejected_and_evaluation_keeps_nothing() -> None:
    layer = nn.Linear(32, 16)
    x = torch.randn(4, 32, requires_grad=True)
    with Float8.convert(layer, device="cpu", kind=OnCpu):
        (first,) = torch.autograd.grad(layer(x).square().sum(), x, create_graph=True)
        with pytest.raises(RuntimeError, match="once_differentiable"):
            first.sum().backward()
        with torch.no_grad():
            assert not layer(x).requires_grad


def test_layers_are_chosen_by_name_and_size_and_given_back() -> None:
    model = network()
    before, names = copy.deepcopy(model.state_dict()), [type(module) for module in model]
    chosen = Float8.convert(model, device="cpu", kind=OnCpu, but=KeepInFp32(patterns=("2",), as_listed=False))
    assert list(chosen.layers) == ["0"]  # "3" has 5 outputs
    assert isinstance(model[0], nn.Linear)
    chosen.close()
    chosen.close()
    assert [type(module) for module in model] == names
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_what_cannot_be_done_is_rejected_by_name() -> None:
    assert has_float8("cpu") is False
    with pytest.raises(ValueError, match=r"8-bit products need an NVIDIA GPU.*but this is a cpu: keep"):
        Float8.convert(network(), device="cpu")
    with pytest.raises(
        ValueError, match=r"no layer can be converted.*2 nn.Linear layers.*\(0, 2\).*\['head'\].*select none"
    ):
        Float8.convert(network(), device="cpu", kind=OnCpu, only=KeepInFp32(patterns=("head",)))
