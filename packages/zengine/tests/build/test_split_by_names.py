"""Layers split by their names, without a sample: equal to one process, and verified at the first batch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zcomm
import zengine
import zpartition
from zcomm.testing import run_ranks
from zpartition.tensor import ColumnLinear
from zpartition.testing.tensor_models import Blocked, Grouped

WIDTH, STEPS = 24, 3


class FeedForward(nn.Module):
    """Columns fc1 and a row fc2, with an operation between them."""

    def __init__(self, between: nn.Module) -> None:
        super().__init__()
        self.fc1, self.between, self.fc2 = nn.Linear(WIDTH, 40), between, nn.Linear(40, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.fc2(self.between(self.fc1(x)))
        return y


class Decoder(nn.Module):
    """Two layers, one with a fused projection; (batch, length, WIDTH) -> a loss."""

    def __init__(self, between: nn.Module | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(
            nn.ModuleDict(
                {"attention": kind(), "norm": nn.LayerNorm(WIDTH), "mlp": FeedForward(between or nn.GELU())}
            )
            for kind in (Grouped, Blocked)
        )

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            parts: Any = layer
            x = x + parts["attention"](parts["norm"](x))
            x = x + parts["mlp"](x)
        return x.square().mean()


def samples(step: int) -> Tensor:
    return torch.randn(2, 3, WIDTH, generator=torch.Generator().manual_seed(step))


def config(stage: int, world_size: int) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 2 // (world_size // 2),
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        "gradient_clipping": 0.0,
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        "tensor_parallel": {"autotp_size": 2},
    }


def _train(stage: int, world_size: int, *, is_deferred: bool) -> tuple[list[float], list[str], int]:
    if is_deferred:
        with zpartition.Init():
            model = Decoder()
    else:
        model = Decoder()
    engine, *_ = zengine.initialize(model=model, config=config(stage, world_size))
    replicas = world_size // 2
    mine = slice(None) if replicas == 1 else slice(zcomm.group_rank() // 2, zcomm.group_rank() // 2 + 1)
    losses = []
    with torch.no_grad():
        engine.eval()(samples(0)[mine])  # verified without gradients, and again with them
    engine.train()
    for step in range(STEPS):
        engine.backward(engine(samples(step)[mine]))
        losses.append(engine.step().loss)
    hooks = sum(len(child._forward_pre_hooks) for child in model.modules() if isinstance(child, FeedForward))
    columns = [name for name, child in model.named_modules() if isinstance(child, ColumnLinear)]
    engine.close()
    assert not any(child._forward_pre_hooks for child in model.modules())
    return losses, columns, hooks


def alone() -> list[float]:
    model = Decoder()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    found = []
    for step in range(STEPS):
        loss = model(samples(step))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return found


@pytest.mark.parametrize(("stage", "world_size"), [(0, 2), (1, 4), (2, 4), (3, 2), (3, 4)])
def test_layers_split_by_names_train_as_one_process(stage: int, world_size: int) -> None:
    for losses, columns, hooks in run_ranks(_train, world_size, stage, world_size, is_deferred=False):
        assert losses == pytest.approx(alone(), rel=1e-5)
        assert columns[:3] == [f"layers.0.attention.{name}_proj" for name in "qkv"]
        assert "layers.1.attention.qkv" in columns
        assert hooks == 0 or stage == 3, "a verified block has no hook"


def test_a_model_without_memory_is_split_by_names() -> None:
    for losses, _, _ in run_ranks(_train, 2, 3, 2, is_deferred=True):
        assert losses == pytest.approx(alone(), rel=1e-5)


def _mixing(stage: int, *, is_known: bool) -> str:
    """A softmax over the columns of all ranks: an MLP by its names, but none by what it computes."""
    settings = config(stage, 2)
    if is_known:
        skip = {"patterns": [r".*(fc1|fc2)\.weight"], "partition_type": "skip"}
        settings["tensor_parallel"]["partition_config"] = {"layer_specs": [skip]}
    engine, *_ = zengine.initialize(model=Decoder(nn.Softmax(-1)), config=settings)
    found = []
    for _ in range(2):  # a loop that goes on after an error meets it again
        try:
            found.append(str(engine(samples(0)).item()))
        except ValueError as error:
            found.append(str(error))
    engine.close()
    assert found[0] == found[1]
    return found[0]


@pytest.mark.parametrize("stage", [0, 3])
def test_a_block_that_its_names_do_not_describe_is_rejected_at_the_first_batch(stage: int) -> None:
    for message in run_ranks(_mixing, 2, stage, is_known=False):
        assert message.startswith(
            "the split of layers.0.mlp by the names of its layers (layers.0.mlp.fc1, layers.0.mlp.fc2) is wrong: "
        )
        assert r'{"patterns": [".*(fc1|fc2)\\.weight"], "partition_type": "skip"}' in message
    expected = Decoder(nn.Softmax(-1))(samples(0)).item()
    assert [float(loss) for loss in run_ranks(_mixing, 2, stage, is_known=True)] == pytest.approx([expected] * 2)
