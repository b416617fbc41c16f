"""Elementwise functions of the kernels against float64, and the same bits on every instruction set."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from zprecision.backends import native
from zprecision.decoding import Activation, activate

LIBRARY = native.library()
pytestmark = pytest.mark.skipif(LIBRARY is None, reason="the kernels are not built")

WANTED: dict[Activation, Callable[[Tensor], Tensor]] = {
    Activation.SILU: F.silu,
    Activation.GELU: F.gelu,
    Activation.GELU_TANH: lambda x: F.gelu(x, approximate="tanh"),
    Activation.RELU: F.relu,
    Activation.QUICK_GELU: lambda x: x * torch.sigmoid(1.702 * x),
    Activation.SQUARED_RELU: lambda x: F.relu(x).square(),
    Activation.TANH: torch.tanh,
    Activation.EXP: torch.exp,
    Activation.ERF: torch.erf,
}


def computed(act: Activation, x: Tensor, factors: Tensor | None = None) -> Tensor:
    found = activate(act, x, factors)
    assert found is not None
    return found


def ulps(found: Tensor, wanted: Tensor) -> Tensor:
    """Errors in units in the last place of the float32 next to the wanted value."""
    size = wanted.abs().float()
    return (found.double() - wanted).abs() / (torch.nextafter(size, torch.tensor(math.inf)) - size).double()


@pytest.mark.parametrize(
    ("act", "most", "low"),
    [(Activation.EXP, 1.1, -86.0), (Activation.TANH, 1.4, -12.0), (Activation.ERF, 1.5, -6.0)],
    ids=lambda value: str(value),
)
def test_functions_are_within_two_units_in_the_last_place(act: Activation, most: float, low: float) -> None:
    small = torch.logspace(-30, 0, 20_000)
    x = torch.cat([torch.linspace(low, min(-low, 88.7), 400_001), small, -small])
    assert float(ulps(computed(act, x), WANTED[act](x.double())).max()) < most


@pytest.mark.parametrize("act", WANTED, ids=lambda act: act.name)
def test_activations_are_those_of_torch(act: Activation) -> None:
    x = torch.linspace(-20, 20, 100_003)
    wanted = WANTED[act](x.double())
    error = (computed(act, x).double() - wanted).abs()
    assert float((error / (wanted.abs() + 1e-2 * x.abs() + 1e-6)).max()) < 1e-5
    factors = torch.linspace(-3, 2, 100_003)
    assert torch.equal(computed(act, x, factors), computed(act, x) * factors)


@pytest.mark.parametrize("act", WANTED, ids=lambda act: act.name)
def test_every_level_has_the_same_bits_and_nan_stays(act: Activation) -> None:
    assert LIBRARY is not None
    x = torch.cat([torch.linspace(-100, 100, 10_007), torch.tensor([0.0, -0.0, 1e-40, 3e38, -3e38])])
    found = []
    for level in LIBRARY.levels:
        with native.use_level(level):
            found.append(computed(act, x))
            assert computed(act, torch.full((19,), torch.nan)).isnan().all()
    assert all(torch.equal(each.view(torch.int32), found[0].view(torch.int32)) for each in found)
    assert found[0].isfinite().all() or act in (Activation.EXP, Activation.SQUARED_RELU)


def test_the_ends_of_exp() -> None:
    x = torch.tensor([-torch.inf, -200.0, -87.34, 0.0, 88.72, 88.73, 100.0, torch.inf])
    found = computed(Activation.EXP, x)
    assert found[[0, 1, 2, 3]].tolist() == [0, 0, 0, 1]
    assert 3.3e38 < found[4] < torch.inf
    assert found[5:].isinf().all()


def test_other_tensors_are_rejected() -> None:
    x = torch.zeros(4, 6)
    for wrong, factors in ((x.bfloat16(), None), (x.t(), None), (x.to("meta"), None), (x, x[:2]), (x, x.double())):
        with pytest.raises(ValueError, match=r"activate\(\) needs contiguous float32"):
            activate(Activation.SILU, wrong, factors)
