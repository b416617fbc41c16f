"""Selection of tensors that stay in float32."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from zprecision import BF16, FP16, FP32, KeepInFp32, Precision


class Router(nn.Module):
    """A bias that is a buffer, as in mixtures of experts."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(4, 4, bias=False)
        self.register_buffer("correction_bias", torch.full((4,), 5.001))


class Listing(nn.Module):
    """As a model of Transformers: it lists what stays, and has a buffer that is not saved."""

    _keep_in_fp32_modules_strict = frozenset({"correction_bias"})
    _keep_in_fp32_modules = ("wo",)

    def __init__(self) -> None:
        super().__init__()
        self.router = Router()
        self.wo = nn.Linear(4, 4)
        self.out = nn.Linear(4, 4)
        self.register_buffer("inv_freq", torch.tensor([0.1234567]), persistent=False)
        self.register_buffer("scale", torch.ones(1))


def kept(model: nn.Module, keep: KeepInFp32, dtype: torch.dtype = torch.bfloat16) -> set[str]:
    return set(keep.names(model, dtype))


def test_a_pattern_matches_anywhere_in_a_full_name() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.LayerNorm(2), Router())
    assert kept(model, KeepInFp32(patterns=("1.",))) == {"1.weight", "1.bias"}
    assert kept(model, KeepInFp32(patterns=("2*bias", "0.w"))) == {"2.correction_bias", "0.weight"}
    assert kept(model, KeepInFp32(patterns=("1+",))) == set()  # no regular expression but for *
    assert kept(model, KeepInFp32()) == set()


def test_patterns_that_match_nothing_are_listed() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.LayerNorm(2))
    assert KeepInFp32(patterns=("0.", "nrom", "1.weight")).unmatched(model) == ("nrom",)
    assert KeepInFp32().unmatched(model) == ()


def test_a_tied_tensor_stays_under_all_of_its_names() -> None:
    model = nn.ModuleDict({"embed": nn.Embedding(3, 4), "head": nn.Linear(4, 3, bias=False)})
    model["head"].weight = model["embed"].weight
    assert kept(model, KeepInFp32(patterns=("embed",))) == {"embed.weight", "head.weight"}
    BF16.cast_module(model)
    assert model["head"].weight.dtype == torch.bfloat16
    Precision(param=torch.bfloat16, keep=KeepInFp32(patterns=("embed",))).cast_module(model)
    assert model["head"].weight is model["embed"].weight
    assert model["head"].weight.dtype == torch.float32


def test_a_listing_model_is_asked_also_inside_another() -> None:
    strict = {"router.correction_bias", "inv_freq"}
    assert kept(Listing(), KeepInFp32()) == strict
    assert kept(Listing(), KeepInFp32(), torch.float16) == {*strict, "wo.weight", "wo.bias"}
    assert kept(Listing(), KeepInFp32(), torch.float32) == set()
    assert kept(Listing(), KeepInFp32(as_listed=False)) == set()
    wrapped = nn.ModuleDict({"wo": nn.Linear(4, 4), "model": Listing()})
    assert kept(wrapped, KeepInFp32(), torch.float16) == {
        *("model.router.correction_bias", "model.inv_freq", "model.wo.weight", "model.wo.bias")
    }


def test_casting_leaves_what_stays_as_it_was_to_the_last_bit() -> None:
    model = FP16.cast_module(Listing())
    assert model.router.correction_bias.tolist() == [torch.tensor(5.001).item()] * 4
    assert model.wo.weight.dtype == model.inv_freq.dtype == torch.float32
    assert model.out.weight.dtype == model.router.gate.weight.dtype == torch.float16
    assert FP32.cast_module(model).out.weight.dtype == torch.float32


def test_buffers_have_a_dtype_of_their_own_when_asked() -> None:
    for dtype in (torch.bfloat16, torch.float32):
        model = Precision(param=torch.bfloat16, buffer=dtype, keep=KeepInFp32(as_listed=False)).cast_module(Listing())
        assert {buffer.dtype for buffer in model.buffers()} == {dtype}
        assert {param.dtype for param in model.parameters()} == {torch.bfloat16}


@pytest.mark.parametrize("patterns", ["norm", [1], [""]])
def test_patterns_are_names(patterns: object) -> None:
    with pytest.raises(TypeError, match=r"KeepInFp32\(patterns=.*pass a list of names"):
        KeepInFp32(patterns=patterns)  # type: ignore[arg-type]


def test_a_precision_with_a_strange_keep_or_buffer_is_rejected() -> None:
    with pytest.raises(TypeError, match="keep"):
        Precision(keep=["norm"])  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"buffer=torch.int8"):
        Precision(buffer=torch.int8)
