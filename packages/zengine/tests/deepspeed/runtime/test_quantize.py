"""`deepspeed.runtime.quantize`: the law of MoQ by hand."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from zengine.deepspeed.runtime.quantize import Quantizer
from zprecision.quant import round_to_bits


def weight(start: int = 8, target: int = 4, period: int = 10) -> Any:
    made: Any = torch.nn.Parameter(torch.randn(4, 6, generator=torch.Generator().manual_seed(0)))
    made.start_bits, made.target_bits, made.q_period = start, target, period
    return made


def falls(quantizer: Quantizer, param: Any, steps: int, blocks: dict[int, tuple[float, int]] | None) -> list[int]:
    """Return the steps at which the weight has lost a bit."""
    found, bits = [], param.start_bits
    for step in range(1, steps + 1):
        quantizer.quantize([[param]], overflow=False, eigenvalue_enabled=False, block_eigenvalue=blocks)
        found += [step] * (bits - param.start_bits)
        bits = param.start_bits
    return found


def test_bits_fall_by_the_law_of_the_period() -> None:
    assert falls(Quantizer(q_type="symmetric"), weight(), 100, None) == [10, 20, 40, 80]
    curved = weight(target=5)
    assert falls(Quantizer(), curved, 1000, {id(curved): (1.0, 0)}) == [10, 100, 1000]


@pytest.mark.parametrize(("bits", "kind"), [(4, "symmetric"), (4, "asymmetric"), (2, "symmetric"), (1, "symmetric")])
def test_weights_are_rounded_as_by_our_quantizer(bits: int, kind: Any) -> None:
    param, vector = weight(bits, bits), weight(bits, bits)
    vector.data = torch.randn(5)
    before, untouched = param.detach().clone(), vector.detach().clone()
    Quantizer(q_groups=2, q_type=kind, q_rounding="nearest").quantize([[param], [vector]], False, False)
    assert torch.equal(param.detach(), round_to_bits(before, bits, groups=2, kind=kind))
    assert torch.equal(vector.detach(), untouched), "only matrices are rounded"


def test_the_share_of_full_precision_falls_and_returns_with_each_lost_bit() -> None:
    param, quantizer = weight(period=3), Quantizer(q_mixed_fp16=True, q_change_ratio=0.25)
    before = param.detach().clone()
    quantizer.quantize([[param]], False, False)
    mixed = 0.75 * before + 0.25 * round_to_bits(before, 8)
    assert torch.allclose(param.detach(), mixed, rtol=0, atol=1e-6)
    for _ in range(2):
        quantizer.quantize([[param]], False, False)
    assert (quantizer.quantize_real_ratio, param.start_bits) == (1.0, 7)


def test_an_overflow_counts_no_step() -> None:
    param, quantizer = weight(), Quantizer()
    before = param.detach().clone()
    quantizer.quantize([[param]], overflow=True, eigenvalue_enabled=False)
    assert (quantizer.qsteps, torch.equal(param.detach(), before)) == (0, True)
    assert quantizer.any_precision_switch()
    quantizer.quantize([[param]], overflow=True, eigenvalue_enabled=True)
    assert (quantizer.qsteps, quantizer.any_precision_switch()) == (1, False)
    assert Quantizer(layer_num=2).any_precision_switch()


def test_stochastic_rounding_is_right_on_average() -> None:
    values: Tensor = torch.full((2, 4000), 0.3)
    values[:, 0] = 1.0
    rounded = Quantizer(q_rounding="stochastic").quantize_highbit(values, 3)
    assert float(rounded[:, 1:].mean()) == pytest.approx(0.3, abs=0.01)
    assert len(set(rounded[:, 1:].flatten().tolist())) == 2


def test_settings_that_there_are_not_are_named() -> None:
    with pytest.raises(ValueError, match="q_type = 'log'; pass one of 'symmetric', 'asymmetric'"):
        Quantizer(q_type="log")
    with pytest.raises(ValueError, match="q_rounding = 2; pass one of 'nearest', 'nearest_neighbor', 'stochastic'"):
        Quantizer(q_rounding=2)
    with pytest.raises(ValueError, match="ternary weights are symmetric"):
        Quantizer(q_type=1).quantize([[weight(2, 2)]], False, False)
    with pytest.raises(ValueError, match="start_bits = 3 is below target_bits = 4"):
        Quantizer().quantize([[weight(3, 4)]], False, False)
