"""A pipeline equals the same layers in one process, under every schedule."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import zcomm
from zcomm.testing import run_ranks
from zpartition.pipeline import Action, LayerSpec, PipelineModule, PipelineRunner, ScheduleError, TiedLayerSpec

WIDTH, MICRO, TOKENS = 8, 4, 11


class Split(nn.Module):
    """One tensor in, two out."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return value * self.scale, value.detach().argmax(-1), value.sin()


class Join(nn.Module):
    def forward(self, parts: tuple[torch.Tensor, torch.Tensor, torch.Tensor]) -> torch.Tensor:
        value, index, other = parts
        return value + other * index.unsqueeze(-1).to(value.dtype)


class Checkpointed(nn.Module):
    """Checkpoints a part of itself, as user code does."""

    def __init__(self) -> None:
        super().__init__()
        self.inside = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH))

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        return value + checkpoint(self.inside, value, use_reentrant=False)


def as_logits(embedding: nn.Module, value: torch.Tensor) -> torch.Tensor:
    return value @ embedding.weight.t()


def loss_of(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


def layers() -> list[Any]:
    block = [LayerSpec(nn.Linear, WIDTH, WIDTH), torch.tanh, LayerSpec(nn.LayerNorm, WIDTH)]
    return [
        TiedLayerSpec("embedding", nn.Embedding, TOKENS, WIDTH),
        *block,
        LayerSpec(Split),
        LayerSpec(Join),
        LayerSpec(Checkpointed),
        *block,
        LayerSpec(nn.Linear, WIDTH, WIDTH, bias=False),
        TiedLayerSpec("embedding", nn.Embedding, TOKENS, WIDTH, forward_fn=as_logits),
    ]


def batches(step: int, lengths: tuple[int, ...] = (5, 5, 5, 5)) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(step)
    return [tuple(torch.randint(TOKENS, (2, length), generator=generator) for _ in "xy") for length in lengths]  # type: ignore[misc]


def trained(runner: PipelineRunner, steps: int = 3, **options: Any) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Return losses, and the weights of this rank by the names of the whole model."""
    unused = nn.Parameter(torch.zeros(()))  # a stage may hold no parameter of its own
    optimizer = torch.optim.SGD([*runner.module.parameters(), unused], lr=0.3)
    losses = []
    for step in range(steps):
        data = batches(step, **options)
        losses.append(runner.train_batch(iter(data), len(data)).item())
        optimizer.step()
        optimizer.zero_grad()
    losses.append(runner.eval_batch(iter(batches(99)), MICRO).item())
    return losses, {name: param.detach().clone() for name, param in runner.module.named_parameters()}


def alone(**options: Any) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Train the same layers in one process, by a plain loop."""
    torch.manual_seed(0)
    model = PipelineModule(layers(), num_stages=1, loss_fn=loss_of)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    losses = []
    for step in range(3):
        parts = [loss_of(model(x), y) for x, y in batches(step, **options)]
        (sum(parts) / len(parts)).backward()  # type: ignore[union-attr]
        optimizer.step()
        optimizer.zero_grad()
        losses.append(sum(part.item() for part in parts) / len(parts))
    with torch.no_grad():
        losses.append(sum(loss_of(model(x), y).item() for x, y in batches(99)) / MICRO)
    return losses, {name: param.detach().clone() for name, param in model.named_parameters()}


def in_stages(schedule: str, module_options: dict[str, Any], options: dict[str, Any]) -> Any:
    torch.manual_seed(0)
    count = module_options.pop("num_stages", torch.distributed.get_world_size())
    model = PipelineModule(layers(), num_stages=count, loss_fn=loss_of, **module_options)
    seen: list[Action] = []
    times: list[float] = []
    runner = PipelineRunner.over(model, schedule)
    losses, weights = trained(runner, **options)
    runner.train_batch(
        iter(batches(0)),
        MICRO,
        observe=lambda action, start, stop: seen.append(action) or times.extend((start, stop)),
    )
    assert tuple(seen) == runner.schedule(MICRO).ranks[model.pipeline_position.rank]
    assert times == sorted(times)
    assert not runner.in_flight
    assert not runner.p2p.channels.in_flight
    return losses, weights, model.bounds


@pytest.mark.parametrize(
    ("world", "schedule", "module_options"),
    [
        (2, "gpipe", {}),
        (2, "1f1b", {"partition_method": "uniform"}),
        (2, "zero_bubble", {"partition_method": "type:linear"}),
        (2, "interleaved", {"stages_per_rank": 2, "partition_method": "uniform"}),
        (2, "1f1b", {"activation_checkpoint_interval": 2}),
        (2, "zero_bubble", {"activation_checkpoint_interval": 3, "checkpointable_layers": ["Linear"]}),
        (4, "1f1b", {}),
        (4, "zero_bubble", {}),
    ],
)
def test_a_pipeline_equals_one_process(world: int, schedule: str, module_options: dict[str, Any]) -> None:
    losses, weights = alone()
    found = run_ranks(in_stages, world, schedule, module_options, {})
    for rank_losses, _, _ in found:
        assert rank_losses == pytest.approx(losses, rel=1e-6)
    together = {name: value for _, part, _ in found for name, value in part.items()}
    assert sum(len(part) for _, part, _ in found) == len(weights)  # each once, the tied one too
    assert together.keys() == weights.keys()
    for name, value in weights.items():
        torch.testing.assert_close(together[name], value, rtol=1e-5, atol=1e-6)


def test_micro_batches_of_different_shapes_raise_without_dynamic_shape() -> None:
    lengths = {"lengths": (3, 7, 5, 4)}
    losses, _ = alone(**lengths)
    for rank_losses, _, _ in run_ranks(in_stages, 2, "1f1b", {"dynamic_shape": True}, lengths):
        assert rank_losses == pytest.approx(losses, rel=1e-6)


def in_agreed_order(schedule: str, module_options: dict[str, Any], options: dict[str, Any]) -> Any:
    """Train as on a device that executes messages in the order of their launches."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(zcomm, "runs_in_order", lambda device, group=None: True)
        losses, weights, _ = in_stages(schedule, dict(module_options), options)
    return losses, weights


@pytest.mark.parametrize(
    ("world", "schedule", "module_options", "options"),
    [
        (4, "gpipe", {}, {}),
        (4, "1f1b", {}, {}),
        (2, "interleaved", {"stages_per_rank": 2, "partition_method": "uniform"}, {}),
        (4, "zero_bubble", {}, {}),
        (2, "1f1b", {"dynamic_shape": True}, {"lengths": (3, 7, 5, 4)}),
        (2, "interleaved", {"stages_per_rank": 2, "dynamic_shape": True}, {"lengths": (3, 7, 5, 4)}),
    ],
)
def test_messages_in_the_agreed_order_give_the_same_bits(
    world: int, schedule: str, module_options: dict[str, Any], options: dict[str, Any]
) -> None:
    independent = run_ranks(in_stages, world, schedule, dict(module_options), options)
    for found, (losses, weights, _) in zip(
        run_ranks(in_agreed_order, world, schedule, module_options, options), independent, strict=True
    ):
        assert found[0] == losses
        assert all(torch.equal(found[1][name], value) for name, value in weights.items())


def mistakes() -> list[str]:
    torch.manual_seed(0)
    model, errors = PipelineModule(layers(), num_stages=1, loss_fn=loss_of), []
    runner = PipelineRunner.over(model)
    for act in (
        lambda: runner.train_batch(iter(batches(0)[:2]), MICRO),
        lambda: PipelineRunner.over(PipelineModule(layers(), num_stages=1)).train_batch(iter(batches(0)), MICRO),
        lambda: PipelineRunner.over(model, "1f2b"),
    ):
        with pytest.raises(ValueError) as caught:
            act()
        errors.append(str(caught.value))
    return errors


def test_mistakes_raise() -> None:
    ended, no_loss, unknown = mistakes()
    assert ended.startswith("the data ended after 2 micro-batches")
    assert no_loss == "the last layer (there is no loss_fn) returned Tensor; a pipeline needs a scalar loss"
    assert "1f2b" in unknown
    assert issubclass(ScheduleError, ValueError)


def test_eval_batch_returns_outputs_without_a_loss() -> None:
    torch.manual_seed(0)
    model = PipelineModule(layers(), num_stages=1, loss_fn=loss_of)
    outputs = PipelineRunner.over(model).eval_batch(iter(batches(0)), MICRO, compute_loss=False)
    assert [tuple(each.shape) for each in outputs] == [(2, 5, TOKENS)] * MICRO
    assert torch.equal(outputs[0], model(batches(0)[0][0]))


def test_a_failed_batch_leaves_no_state() -> None:
    torch.manual_seed(0)
    model = PipelineModule(layers(), num_stages=1, loss_fn=loss_of)
    runner = PipelineRunner.over(model)
    expected = runner.eval_batch(iter(batches(0)), MICRO)
    with pytest.raises(ValueError, match="the data ended after 2"):
        runner.train_batch(iter(batches(0)[:2]), MICRO)
    assert not runner.in_flight
    model.zero_grad()
    assert runner.train_batch(iter(batches(0)), MICRO) == expected
