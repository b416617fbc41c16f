"""Weights out of files, also for models that have no memory yet."""

from __future__ import annotations

from pathlib import Path

import pytest
import safetensors.torch
import torch
from torch import Tensor, nn

from zengine.inference.loading import weights

CPU = torch.device("cpu")


class Rotary(nn.Module):
    """Frequencies, indices and a mask that no file has."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("frequencies", torch.arange(3.0), persistent=False)
        self.register_buffer("indices", torch.arange(3), persistent=False)
        self.register_buffer("mask", torch.ones(3, 3, dtype=torch.bool).tril(), persistent=False)


class Resetting(Rotary):
    def reset_parameters(self) -> None:
        self.frequencies.copy_(torch.arange(3.0))
        self.indices.copy_(torch.arange(3))
        self.mask.copy_(torch.ones(3, 3, dtype=torch.bool).tril())


class Net(nn.Module):
    def __init__(self, rotary: type[Rotary] = Resetting) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(5, 4), nn.Linear(4, 5, bias=False)
        self.head.weight = self.embed.weight
        self.head.weight.kind = "tied"  # type: ignore[attr-defined]
        self.rotary, self.norm = rotary(), nn.BatchNorm1d(4)
        self.embed.weight.requires_grad_(False)


class OfTransformers(Net):
    """Makes its buffers as those models do."""

    def __init__(self) -> None:
        super().__init__(Rotary)

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, Rotary):
            Resetting.reset_parameters(module)  # type: ignore[arg-type]


class Silent(Net):
    def __init__(self) -> None:
        super().__init__(Rotary)


def on_meta(kind: type[Net]) -> Net:
    with torch.device("meta"):
        return kind()


@pytest.mark.parametrize("kind", [Net, OfTransformers])
def test_a_model_without_memory_gets_it_and_what_no_file_has(kind: type[Net], tmp_path: Path):
    source, model = Net(), on_meta(kind)
    state = {name: value for name, value in source.state_dict().items() if name != "head.weight"}
    safetensors.torch.save_file(state, tmp_path / "a.safetensors")
    assert weights.is_on_meta(model)
    weights.materialize(model, CPU)
    weights.load(model, str(tmp_path / "a.safetensors"))
    assert not weights.is_on_meta(model)
    assert model.head.weight is model.embed.weight
    assert (model.head.weight.kind, model.head.weight.requires_grad) == ("tied", False)  # type: ignore[attr-defined]
    expected = [*source.state_dict().values(), *source.rotary.buffers()]
    found: list[Tensor] = [*model.state_dict().values(), *model.rotary.buffers()]
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_buffers_that_nobody_makes_are_named():
    told = r"not persistent.*rotary\.frequencies, rotary\.indices, rotary\.mask.*include_buffers=False"
    with pytest.raises(ValueError, match=told):
        weights.materialize(on_meta(Silent), CPU)


def test_a_model_with_memory_stays_as_it_is():
    model = Net()
    before = [*model.parameters(), *model.buffers()]
    weights.materialize(model, CPU)
    assert all(a is b for a, b in zip(before, [*model.parameters(), *model.buffers()], strict=True))


def test_what_does_not_fit_is_told_with_the_file(tmp_path: Path):
    path = str(tmp_path / "a.safetensors")
    safetensors.torch.save_file({"weight": torch.ones(3, 2)}, path)
    for told in (r"a\.safetensors does not fit Linear", "missing: bias", r"weight has shape \(3, 2\)"):
        with pytest.raises(ValueError, match=told):
            weights.check_fits(nn.Linear(2, 2), path)
