"""Dry runs count exactly what real operations hold, and say why a model cannot be run dry."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from zengine._compat import watching
from zengine.planning.activations import Activations, CannotDryRun, MemoryTracker, dry_run, loss_of
from zengine.planning.models import Shape, Transformer

SMALL = Shape(layers=3, width=128, vocabulary=500)


class Checkpointed(nn.Module):
    """Blocks whose activations are made again in backward."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(64, 512), nn.GELU(), nn.Linear(512, 64)) for _ in range(6)
        )

    def forward(self, x: Tensor, again: bool = True) -> Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if again else block(x)
        return x.square().mean()


def tokens() -> Tensor:
    return torch.zeros(2, 64, dtype=torch.long)


def real(model: nn.Module) -> Activations:
    """The same count over real tensors."""
    for param in model.parameters():
        param.register_post_accumulate_grad_hook(lambda param: setattr(param, "grad", None))
    mark = MemoryTracker(list(model.parameters()))
    given = tokens()
    with watching(mark.count):
        loss = model(given)
        forward, saved = mark.peak, mark.current
        mark.reset()
        loss.backward()
    return Activations(forward=forward, backward=mark.peak, saved=saved)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_dry_run_counts_what_a_real_one_holds(dtype: torch.dtype) -> None:
    with torch.device("meta"):
        dry = dry_run(Transformer(SMALL).to(dtype), tokens, device="cpu")
    assert dry == real(Transformer(SMALL).to(dtype))
    assert dry.peak >= dry.saved > 0


def test_checkpointing_saves_less() -> None:
    def ran(again: bool) -> Activations:
        return dry_run(Checkpointed(), lambda: {"x": torch.ones(512, 64), "again": again}, device="cpu")

    assert ran(True).saved < ran(False).saved / 5
    assert ran(True).peak < ran(False).peak / 2


def test_autocast_holds_casted_weights_and_narrow_activations() -> None:
    plain = dry_run(Transformer(SMALL), tokens, device="cpu")
    cast = dry_run(Transformer(SMALL), tokens, device="cpu", autocast=torch.bfloat16)
    weights = sum(param.numel() for param in Transformer(SMALL).parameters() if param.dim() > 1)
    assert 0 < cast.saved - 2 * weights < plain.saved


def test_the_model_is_left_as_it_is() -> None:
    model = Transformer(SMALL)
    before = {name: param.clone() for name, param in model.named_parameters()}
    dry_run(model.eval(), tokens, device="cpu")
    assert all(torch.equal(param, before[name]) for name, param in model.named_parameters())
    assert not model.training
    assert all(param.grad is None for param in model.parameters())


class Looks(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return x * float(self.weight.detach().sum())


def test_a_model_that_looks_at_values_is_told_to_measure() -> None:
    with pytest.raises(CannotDryRun, match=r"a dry run of the model failed with \w+: .* measure instead"):
        dry_run(Looks(3, 3), lambda: torch.ones(3), device="cpu")


def test_the_loss_is_found_in_what_models_return() -> None:
    loss = torch.tensor(2.0)
    output = type("Output", (), {"loss": loss})()
    for form in (loss, (loss, 3), {"loss": loss, "logits": 1}, {"first": loss}, output):
        assert loss_of(form) is loss
    assert loss_of(torch.ones(3)) == 1
    with pytest.raises(CannotDryRun, match="returned a int without a loss"):
        loss_of(3)
