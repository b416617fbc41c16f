"""Models of 16 bits with wider buffers."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from zprecision import BF16, FP16, KeepInFp32, Precision, WideBuffers

BF = torch.bfloat16


class Positions(nn.Module):
    """Added to what comes in, as in torch's tutorial."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.register_buffer("table", torch.linspace(0, 1, 7 * width).view(7, width))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.table


class Attention(nn.Module):
    """Scores with a mask of float32 times values of bf16: an operation that no hook can mend."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.register_buffer("mask", torch.zeros(7, 7))

    def forward(self, x: Tensor) -> Tensor:
        x = self.linear(x)
        return (x @ x.transpose(-1, -2) + self.mask).softmax(-1) @ x


def hooked(model: nn.Module, policy: Precision = BF16) -> WideBuffers:
    assert policy.param is not None
    return WideBuffers.install(policy.cast_module(model), keep=policy.keep, param=policy.param)


def _first(out: Tensor | tuple[Tensor, ...]) -> Tensor:
    return (out if isinstance(out, Tensor) else out[0]).float()


LAYERS: dict[str, Callable[[], nn.Module]] = {
    "linear": lambda: nn.Linear(8, 8),
    "convolution": lambda: nn.Conv1d(7, 3, 3),
    "transposed": lambda: nn.ConvTranspose1d(7, 3, 3),
    "layer norm": lambda: nn.LayerNorm(8),
    "group norm": lambda: nn.GroupNorm(7, 7),
    "prelu": lambda: nn.PReLU(),
    "lstm": lambda: nn.LSTM(8, 8),
    "encoder": lambda: nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True),
    "encoder, norm first": lambda: nn.TransformerEncoderLayer(
        8, 2, 16, dropout=0.0, norm_first=True, batch_first=True
    ),
}


@pytest.mark.parametrize("is_training", [True, False])
@pytest.mark.parametrize("policy", [BF16, FP16])
@pytest.mark.parametrize("name", LAYERS)
def test_layers_of_torch_take_what_a_wide_buffer_was_added_to(
    name: str, policy: Precision, is_training: bool
) -> None:
    model = nn.Sequential(Positions(8), LAYERS[name]()).train(is_training)
    x = torch.zeros(2, 7, 8, dtype=policy.param)
    with hooked(model, policy) as wide:
        assert wide.names == ("0.table",)
        out = model(x)
        expected = model[1](model[0](x).to(policy.param))
        torch.testing.assert_close(_first(out), _first(expected), rtol=0, atol=0 if "encoder" not in name else 0.06)
    with pytest.raises((RuntimeError, ValueError), match=r"(?i)type"):
        model(x)


def test_functions_that_reject_two_dtypes_name_the_buffers_and_the_fix() -> None:
    model = Attention()
    with hooked(model) as wide, pytest.raises(RuntimeError, match="type") as caught, wide.explain_errors():
        model(torch.zeros(2, 7, 8, dtype=BF))
    (note,) = caught.value.__notes__
    assert "these buffers keep a wider dtype: mask." in note
    assert '"data_types": {"buffer_dtype": "bfloat16"}' in note
    asked = Precision(param=BF, buffer=BF)
    assert not hooked(model, asked).names
    model(torch.zeros(2, 7, 8, dtype=BF))


def test_other_errors_are_as_they_were() -> None:
    with (
        hooked(Attention()) as wide,
        pytest.raises(RuntimeError, match="no such thing") as caught,
        wide.explain_errors(),
    ):
        raise RuntimeError("no such thing")
    assert not hasattr(caught.value, "__notes__")


def test_models_without_such_buffers_get_no_hooks() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 8))
    model.register_buffer("steps", torch.tensor(0))
    wide = hooked(model)
    assert (wide.names, wide.handles) == ((), [])


def test_what_the_model_or_the_person_keeps_is_theirs() -> None:
    model = nn.Sequential(Positions(8), nn.Linear(8, 8))
    assert not hooked(model, Precision(param=BF, keep=KeepInFp32(patterns=("table",)))).names


def test_under_autocast_torch_casts() -> None:
    model = nn.Sequential(Positions(8), nn.Linear(8, 8))
    x = torch.zeros(2, 7, 8, dtype=BF)
    with torch.autocast("cpu", dtype=BF):
        expected = BF16.cast_module(model)(x)
        with hooked(model):
            out = model(x)
    assert torch.equal(out, expected)
