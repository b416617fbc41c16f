"""Largest eigenvalues of block Hessians against known spectra."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from zprecision import Eigenvalue, PowerIteration, block_eigenvalues, hessian_product, relative_eigenvalues

EXACT = PowerIteration(max_iter=2000, tol=1e-9, stability=1e-12)


def quadratic(spectrum: list[float], dtype: torch.dtype = torch.float64) -> tuple[Tensor, nn.Parameter]:
    """Return a loss x . Q diag(spectrum) Q' x / 2 at a random x, and x."""
    draws = torch.Generator().manual_seed(3)
    basis, _ = torch.linalg.qr(torch.randn(len(spectrum), len(spectrum), generator=draws, dtype=torch.float64))
    hessian = (basis @ torch.diag(torch.tensor(spectrum, dtype=torch.float64)) @ basis.T).to(dtype)
    x = nn.Parameter(torch.randn(len(spectrum), generator=draws, dtype=torch.float64).to(dtype))
    return (x @ hessian @ x) / 2, x


@pytest.mark.parametrize(
    ("spectrum", "largest"),
    [([5.0, 3.0, 1.0, 0.5], 5.0), ([-7.0, 3.0, 1.0, 0.5], -7.0), ([2e-4, 1e-4, 5e-5, 0.0], 2e-4)],
)
def test_a_quadratic_loss_has_the_eigenvalue_of_largest_magnitude(spectrum: list[float], largest: float) -> None:
    loss, x = quadratic(spectrum)
    (found,) = block_eigenvalues(loss, [[x]], EXACT)
    assert found.converged
    assert found.value == pytest.approx(largest, rel=1e-6)


def test_the_default_rule_stops_within_its_tolerance() -> None:
    loss, x = quadratic([5.0, *(0.05 * number for number in range(20))], torch.float32)
    (found,) = block_eigenvalues(loss, [[x]])
    assert found.value == pytest.approx(5.0, rel=2e-2)
    assert 2 <= found.iterations < 30


DRAWS = torch.Generator().manual_seed(1)
INPUTS = torch.randn(8, 4, generator=DRAWS, dtype=torch.float64)
LABELS = torch.randn(8, 2, generator=DRAWS, dtype=torch.float64)


def two_layers() -> tuple[Tensor, list[nn.Linear]]:
    torch.manual_seed(1)
    layers = [nn.Linear(4, 5, dtype=torch.float64), nn.Linear(5, 2, dtype=torch.float64)]
    return (layers[1](torch.tanh(layers[0](INPUTS))) - LABELS).square().mean(), layers


def test_blocks_of_two_layers_have_the_eigenvalues_of_torchs_hessians() -> None:
    loss, layers = two_layers()

    def loss_of(number: int, flat: Tensor) -> Tensor:
        weights = [(each.weight.detach(), each.bias.detach()) for each in layers]
        shape = layers[number].weight.shape
        weights[number] = (flat[: shape.numel()].view(shape), flat[shape.numel() :])
        hidden = torch.tanh(INPUTS @ weights[0][0].T + weights[0][1])
        return (hidden @ weights[1][0].T + weights[1][1] - LABELS).square().mean()

    found = block_eigenvalues(loss, [list(each.parameters()) for each in layers], EXACT)
    for number, layer in enumerate(layers):
        point = torch.cat([layer.weight.detach().reshape(-1), layer.bias.detach()])
        hessian = torch.autograd.functional.hessian(lambda flat, n=number: loss_of(n, flat), point)
        spectrum = torch.linalg.eigvalsh(hessian)
        assert found[number].value == pytest.approx(float(spectrum[spectrum.abs().argmax()]), rel=1e-6)
        vector = torch.randn(point.numel(), dtype=torch.float64)
        gradients = torch.autograd.grad(loss, list(layer.parameters()), create_graph=True)
        product = hessian_product(gradients, list(layer.parameters()))
        torch.testing.assert_close(product(vector), hessian @ vector, rtol=1e-10, atol=1e-12)


def test_the_graph_of_the_loss_stays_and_no_random_number_is_used() -> None:
    loss, layers = two_layers()
    before = torch.get_rng_state()
    block_eigenvalues(loss, [list(each.parameters()) for each in layers])
    assert torch.equal(torch.get_rng_state(), before)
    assert all(param.grad is None for each in layers for param in each.parameters())
    loss.backward()
    assert all(param.grad is not None for each in layers for param in each.parameters())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_loss_scale_and_narrow_weights_change_the_result_by_their_rounding(dtype: torch.dtype) -> None:
    x = nn.Parameter(torch.tensor([1.0, -2.0, 0.5, 1.0], dtype=dtype))
    loss = (torch.tensor([4.0, 1.0, 0.5, 0.25], dtype=dtype) * x.square()).sum() / 2
    (found,) = block_eigenvalues(loss * 64, [[x]], scale=64.0)
    assert found.value == pytest.approx(4.0, rel=2e-2)


def test_the_mean_over_ranks_decides_for_all_of_them() -> None:
    halves = [quadratic([4.0, 2.0, 1.0, 0.0]), quadratic([2.0, 2.0, 3.0, 0.0])]
    products = [hessian_product(torch.autograd.grad(loss, x, create_graph=True), [x]) for loss, x in halves]
    sizes = []

    def mean(message: Tensor) -> None:  # the other rank has the same vector, since it got the same messages
        sizes.append(message.numel())
        vector = state["vector"]
        other = products[1](vector)
        theirs = torch.cat([other, torch.stack([vector @ other, vector @ vector])])
        message.copy_((message + theirs) / 2)
        state["vector"] = EXACT.normalized(message[:4])

    state = {"vector": EXACT.start(4, torch.float64, torch.device("cpu"))}
    (found,) = block_eigenvalues(halves[0][0], [[halves[0][1]]], EXACT, mean=mean)
    assert found.value == pytest.approx(3.0, rel=1e-6)  # of the mean spectrum 3, 2, 2, 0
    assert set(sizes) == {6}
    assert len(sizes) == found.iterations


def test_parts_without_second_derivative_add_zeros_and_an_unknown_block_counts_as_one() -> None:
    x, linear, unused = (nn.Parameter(torch.ones(3)) for _ in range(3))
    loss = (x.square() * torch.tensor([1.0, 2.0, 3.0])).sum() + linear.sum()
    first, second, third = block_eigenvalues(loss, [[x, linear], [linear, unused], [unused]], EXACT)
    assert first.value == pytest.approx(6.0, rel=1e-5)
    assert second == third == Eigenvalue(0.0, 1, converged=True)
    assert relative_eigenvalues([first.value, second.value, -3.0]) == pytest.approx((1.0, 1.0, 0.5), rel=1e-5)
    assert relative_eigenvalues([0.0, 0.0]) == (1.0, 1.0)
    assert relative_eigenvalues([]) == ()


def test_errors_name_the_block_and_the_value() -> None:
    frozen = nn.Parameter(torch.ones(2), requires_grad=False)
    x = nn.Parameter(torch.ones(2))
    with pytest.raises(ValueError, match="block 1 has no parameter that requires a gradient"):
        block_eigenvalues(x.square().sum(), [[x], [frozen]])
    with pytest.raises(RuntimeError, match="reaches no parameter of the blocks"):
        block_eigenvalues(nn.Parameter(torch.ones(2)).sum(), [[x]])
    with pytest.raises(ValueError, match="max_iter = 0 must be > 0"):
        PowerIteration(max_iter=0)
