"""Random-LTD: tokens that layers process and bypass; nothing else changes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import zengine
from zcomm.testing import end_ranks, run_ranks
from zengine.features import random_ltd
from zengine.features.random_ltd import RandomLtd, find_layers
from zpartition.pipeline import LayerSpec, PipelineModule, TiedLayerSpec


class Block(nn.Module):
    """Adds one to the tokens it sees; notes how many, and the mask."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))
        self.seen: list[tuple[int, ...]] = []
        self.masks: list[tuple[int, ...]] = []

    def forward(self, hidden: torch.Tensor, mask: torch.Tensor, where: torch.Tensor | None = None) -> Any:
        self.seen.append(tuple(hidden.shape))
        self.masks.append(tuple(mask.shape))
        if where is not None:
            assert where.shape[:2] == hidden.shape[:2]
        return hidden + self.scale, "state"


class Stack(nn.Module):
    def __init__(self, recompute: bool = False) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block() for _ in range(4)])
        self.recompute = recompute
        self.last = torch.empty(0)

    def forward(self, hidden: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        where = torch.arange(hidden.shape[1]).expand(hidden.shape[0], -1)
        for block in self.blocks:
            if self.recompute:
                hidden, _ = checkpoint(block, hidden, mask=mask, where=where, use_reentrant=False)
            else:
                hidden, _ = block(hidden, mask=mask, where=where)
        self.last = hidden
        return hidden.square().mean()


def ltd(**changes: Any) -> dict[str, Any]:
    section = {
        "enabled": True,
        "total_layer_num": 4,
        "random_ltd_layer_num": 2,
        "random_ltd_layer_id": [1, 2],
        "model_mask_name": "mask",
        "random_ltd_schedule": {
            "min_value": 4,
            "max_value": 12,
            "schedule_type": "fixed_linear",
            "schedule_config": {"require_steps": 4, "seq_per_step": 2},
        },
        **changes,
    }
    return {"data_efficiency": {"enabled": True, "data_routing": {"enabled": True, "random_ltd": section}}}


def engine_of(model: nn.Module | None = None, **config: Any) -> zengine.Engine:
    base = {
        "train_micro_batch_size_per_gpu": 3,
        "optimizer": {"type": "SGD", "params": {"lr": 0.01}},
        "gradient_clipping": 0,
    }
    return zengine.initialize(model=model or Stack(), config={**base, **config})[0]


MASK = torch.zeros(3, 1, 10, 10)


def train(engine: zengine.Engine, steps: int) -> list[float]:
    losses = []
    for step in range(steps):
        hidden = torch.linspace(0, 1, 3 * 10 * 2).reshape(3, 10, 2) + step
        engine.backward(engine(hidden, MASK))
        losses.append(engine.step().loss)
    return losses


def test_named_layers_see_as_many_tokens_as_the_schedule_says_and_the_others_all() -> None:
    """floor(t/4 * 8 + 4), down to even: 4 6 8 10 12; sequences have 10."""
    engine = engine_of(**ltd())
    train(engine, 5)
    for place, block in enumerate(engine.module.blocks):
        lengths = [4, 6, 8, 10, 10] if place in (1, 2) else [10] * 5
        assert block.seen == [(3, length, 2) for length in lengths]
        assert block.masks == [(3, 1, length, length) for length in lengths]
    state = next(f for f in engine._features if f.name == "random_ltd").state_dict()
    assert state == {"layer_tokens": 2 * 3 * (4 + 6 + 8 + 10 + 10)}
    engine.eval()
    engine(torch.zeros(3, 10, 2), MASK)
    assert engine.module.blocks[1].seen[-1] == (3, 10, 2)


def test_tokens_that_were_not_drawn_go_around_unchanged_and_gradients_follow() -> None:
    engine = engine_of(**ltd())
    hidden = torch.zeros(3, 10, 2, requires_grad=True)
    engine.backward(engine(hidden, MASK))
    added = engine.module.last[:, :, 0]
    assert set(added.flatten().tolist()) <= {2.0, 3.0, 4.0}
    assert added.sum(dim=1).tolist() == [2 * 10 + 2 * 4] * 3
    assert torch.allclose(hidden.grad, engine.module.last.detach() * 2 / hidden.numel())


def test_off_is_absent_and_at_full_length_no_bit_changes() -> None:
    def run(**config: Any) -> tuple[list[float], torch.Tensor]:
        torch.manual_seed(5)
        losses = train(engine_of(**config), 4)
        return losses, torch.get_rng_state()

    plain, state = run()
    for config in (
        ltd(enabled=False),
        ltd(random_ltd_schedule=_schedule(10)),
        ltd(random_ltd_schedule=_schedule(50)),
    ):
        losses, after = run(**config)
        assert losses == plain
        assert torch.equal(after, state)
    assert run(**ltd())[0] != plain


def _schedule(low: int) -> dict[str, Any]:
    return {"min_value": low, "max_value": 50, "schedule_config": {"require_steps": 10**6}}


def test_a_resumed_run_draws_the_same_tokens(tmp_path: Path) -> None:
    torch.manual_seed(3)
    first = engine_of(**ltd())
    train(first, 1)
    first.save_checkpoint(tmp_path)
    ahead = train(first, 3)
    second = engine_of(**ltd())
    second.load_checkpoint(tmp_path)
    assert train(second, 3) == ahead
    tokens = [next(f for f in e._features if f.name == "random_ltd").state_dict() for e in (first, second)]
    assert tokens[0] == tokens[1]


def test_activation_checkpointing_replays_the_draw() -> None:
    torch.manual_seed(3)
    plain = train(engine_of(Stack(), **ltd()), 3)
    torch.manual_seed(3)
    engine = engine_of(Stack(recompute=True), **ltd())
    assert train(engine, 3) == plain
    assert len(engine.module.blocks[1].seen) == 6
    assert engine._features[-1].state_dict() == {"layer_tokens": 2 * 3 * (4 + 6 + 8)}


def test_the_tokens_of_a_step_are_charted(tmp_path: Path) -> None:
    monitor = {"jsonl_monitor": {"enabled": True, "output_path": str(tmp_path), "job_name": "a"}}
    engine = engine_of(**ltd(), **monitor)
    train(engine, 3)
    engine.close()
    lines = [json.loads(line)["values"] for line in (tmp_path / "a" / "events.jsonl").read_text().splitlines()]
    assert [values["data/random_ltd_tokens"] for values in lines if "data/random_ltd_tokens" in values] == [4, 6, 8]


def test_names_of_parameters_stay_and_closing_takes_the_hooks_away() -> None:
    engine = engine_of(**ltd())
    assert list(engine.module.state_dict()) == list(Stack().state_dict())
    engine.close()
    assert all(not block._forward_pre_hooks and not block._forward_hooks for block in engine.module.blocks)
    engine.module(torch.zeros(3, 10, 2), MASK)
    assert engine.module.blocks[1].seen == [(3, 10, 2)]


@pytest.mark.parametrize(
    ("shape", "model_type", "becomes"),
    [
        ((10, 10), "decoder", (4, 4)),
        ((1, 1, 10, 10), "decoder", (1, 1, 4, 4)),
        ((10, 10), "encoder", (3, 1, 4, 4)),
        ((3, 10), "encoder", (3, 4)),
        ((1, 10), "decoder", (3, 4)),
        ((3, 2, 10, 10), "decoder", (3, 2, 4, 4)),
    ],
)
def test_masks_of_every_shape_are_cut(shape: tuple[int, ...], model_type: str, becomes: tuple[int, ...]) -> None:
    engine = engine_of(**ltd(model_type=model_type))
    engine(torch.zeros(3, 10, 2), torch.zeros(shape))
    assert engine.module.blocks[1].masks == [becomes]
    assert engine.module.blocks[0].masks == [shape]


def test_arguments_by_position_are_known_by_their_names() -> None:
    class Torch(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(
                [nn.TransformerEncoderLayer(4, 1, 4, dropout=0.0, batch_first=True) for _ in range(4)]
            )

        def forward(self, hidden: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
            for layer in self.layers:
                hidden = layer(hidden, mask)
            return hidden.mean()

    engine = engine_of(Torch(), **ltd(model_mask_name="src_mask"))
    causal = torch.triu(torch.ones(10, 10, dtype=torch.bool), 1)
    engine.backward(engine(torch.randn(3, 10, 4), causal))
    assert engine._features[-1].state_dict() == {"layer_tokens": 2 * 3 * 4}


def test_a_mask_is_cut_at_the_tokens_that_were_drawn() -> None:
    class Reading(Block):
        def forward(self, hidden: torch.Tensor, mask: torch.Tensor, where: torch.Tensor | None = None) -> Any:
            self.read = (hidden[..., 0], mask, where)
            return super().forward(hidden, mask, where)

    model = Stack()
    model.blocks[1] = Reading()
    engine = engine_of(model, **ltd())
    places = torch.arange(10.0)
    engine(places.expand(3, 10)[..., None].expand(3, 10, 2), (places[:, None] * 100 + places).expand(3, 1, 10, 10))
    seen, mask, where = model.blocks[1].read
    seen = seen - 1  # the layer before added one
    assert torch.equal(seen, where.float())
    assert torch.equal(seen, seen.sort(dim=1).values)
    assert torch.equal(mask[:, 0], seen[:, :, None] * 100 + seen[:, None, :])
    assert not torch.equal(seen[0], seen[1])


def test_sequence_first_models_are_cut_along_the_first_axis() -> None:
    class Plain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.Sequential(*(nn.Linear(2, 2) for _ in range(2)))
            self.lengths: list[int] = []
            self.layers[1].register_forward_pre_hook(lambda _, args: self.lengths.append(tuple(args[0].shape)))

        def forward(self, hidden: torch.Tensor) -> torch.Tensor:
            return self.layers(hidden).sum()

    section = ltd(
        total_layer_num=2,
        random_ltd_layer_id=[1],
        random_ltd_layer_num=1,
        hidden_state_order="seq_batch_dim",
        model_mask_name=None,
    )
    engine = engine_of(Plain(), **section)
    calls: list[tuple[int, ...]] = []
    engine.module.layers[1].register_forward_hook(lambda _, args, out: calls.append(tuple(args[0].shape)))
    engine(torch.zeros(10, 3, 2))
    assert calls == [(4, 3, 2)]


def test_a_model_without_the_list_is_told_of_those_it_has() -> None:
    with pytest.raises(ValueError, match=r"total_layer_num = 5: the model has 0 lists .* blocks \(4\)"):
        engine_of(**ltd(total_layer_num=5))
    twice = nn.ModuleDict({"a": nn.ModuleList([Block()]), "b": nn.ModuleList([Block()])})
    with pytest.raises(ValueError, match="has 2 lists of 1 layers"):
        find_layers(twice, 1)


def test_a_layer_that_does_not_fit_is_told_of() -> None:
    with pytest.raises(ValueError, match=r'model_mask_name = "mak": Block\.forward takes hidden, mask, where'):
        engine_of(**ltd(model_mask_name="mak"))

    class Odd(nn.Module):
        def forward(self, hidden: Any) -> dict[str, Any]:
            return {"hidden": hidden}

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([Odd(), Odd()])
            self.weight = nn.Parameter(torch.ones(()))

        def forward(self, hidden: Any) -> Any:
            return self.layers[1](hidden)

    section = ltd(total_layer_num=2, random_ltd_layer_id=[1], random_ltd_layer_num=1, model_mask_name=None)
    engine = engine_of(Model(), **section)
    with pytest.raises(TypeError, match="the first argument of Odd must be the hidden state"):
        engine("text")
    with pytest.raises(TypeError, match=r"Odd must return the hidden state, .* returned dict"):
        engine(torch.zeros(3, 10, 2))


def _on_two_ranks() -> tuple[list[float], float]:
    torch.manual_seed(torch.distributed.get_rank())
    engine = engine_of(**ltd(), zero_optimization={"stage": 3})
    losses = train(engine, 3)
    feature = next(f for f in engine._features if isinstance(f, RandomLtd))
    return losses, feature.state_dict()["layer_tokens"]


def test_ranks_draw_their_own_tokens_and_step_together_at_stage_3() -> None:
    left, right = run_ranks(_on_two_ranks, 2)
    assert left == right


class Plainly(nn.Module):
    """A layer of a pipeline: one tensor in, one out, no two tokens alike."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden + torch.tanh(self.linear(hidden)).cumsum(1)


class Tower(nn.Module):
    """The same layers as one model."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Plainly() for _ in range(4))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            hidden = block(hidden)
        return hidden.square().mean()


def the_last(self: Any, hidden: torch.Tensor, num_tokens: int) -> torch.Tensor:
    """Places that depend on nothing, in place of those that are drawn."""
    return torch.arange(hidden.shape[1])[-num_tokens:].expand(hidden.shape[0], -1)


def data(step: int) -> list[torch.Tensor]:
    return [torch.linspace(0, 1, 60).reshape(3, 10, 2) + step + micro for micro in range(4)]


def whole_model(drops: bool) -> list[float]:
    random_ltd._TokenSelection.choose = the_last
    torch.manual_seed(0)
    engine = engine_of(Tower(), gradient_accumulation_steps=4, **ltd(model_mask_name="", enabled=drops))
    found = []
    for step in range(5):
        for hidden in data(step):
            engine.backward(engine(hidden))
            report = engine.step()
        found += [report.loss, report.grad_norm]
    return found


def in_stages(num_stages: int, **options: Any) -> tuple[list[float], int]:
    random_ltd._TokenSelection.choose = the_last
    torch.manual_seed(0)
    layers = [torch.clone, *(LayerSpec(Plainly) for _ in range(4)), lambda hidden: hidden.square().mean()]
    model = PipelineModule(layers, num_stages, **options)
    engine = engine_of(model, gradient_accumulation_steps=4, **ltd(model_mask_name=""))
    found = []
    for step in range(5):
        engine.train_batch(iter([(hidden, ()) for hidden in data(step)]))
        found += [engine.last_report.loss, engine.last_report.grad_norm]
    return found, next(f for f in engine._features if f.name == "random_ltd").state_dict()["layer_tokens"]


def test_the_layers_of_a_pipeline_skip_tokens_on_their_stages() -> None:
    expected, plain = (run_ranks(whole_model, 1, drops)[0] for drops in (True, False))
    assert [one != pytest.approx(other, rel=1e-3) for one, other in zip(expected, plain)][:6] == [True] * 6
    seen = 4 * 3 * (4 + 6 + 8 + 10 + 10)  # by each of the two layers: micro-batches, samples, tokens of each step
    for num_stages, options, tokens in (
        (2, {"partition_method": "uniform"}, [seen, seen]),
        (2, {"partition_method": "type:plainly", "activation_checkpoint_interval": 1}, [seen, seen]),
        (4, {"partition_method": "type:plainly"}, [0, seen, seen, 0]),
    ):
        ranks = run_ranks(in_stages, num_stages, num_stages, **options)
        for losses, _ in ranks:
            assert losses == pytest.approx(expected, rel=1e-5)
        assert [layer_tokens for _, layer_tokens in ranks] == tokens
    end_ranks()  # their layers no longer draw


def tied() -> str:
    specs = [LayerSpec(Plainly), LayerSpec(Plainly), TiedLayerSpec("both", Plainly), TiedLayerSpec("both", Plainly)]
    with pytest.raises(ValueError) as caught:
        engine_of(PipelineModule(specs, 2, partition_method="uniform"), **ltd(model_mask_name=""))
    return str(caught.value)


def test_layers_of_a_pipeline_that_several_places_use_are_refused_on_all_ranks() -> None:
    assert all("names layers [2] of Plainly, which are functions or TiedL" in text for text in run_ranks(tied, 2))


def test_layers_of_a_pipeline_are_told_apart_by_their_class() -> None:
    model = PipelineModule([nn.Linear(2, 2), nn.Linear(2, 2), torch.tanh, nn.LayerNorm(2)], 1)
    assert find_layers(model, 2) == ("Linear", {0: model.calls[0], 1: model.calls[1]})
    with pytest.raises(ValueError, match=r"2 classes of 1 layers.* Linear \(2\), tanh \(1\), LayerNorm \(1\)"):
        find_layers(model, 1)
