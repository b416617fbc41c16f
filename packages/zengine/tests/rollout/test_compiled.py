"""Rollouts of an engine that is compiled."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tiny_lm import PROMPTS, TinyLM, engine_of, train

from zcomm.testing import run_ranks
from zengine.rollout import RolloutConfig, SamplingConfig

SAMPLING = SamplingConfig(max_new_tokens=6)
EXACT = RolloutConfig(exact=True, compare=6)


def _graphs(made: list[Any]) -> Any:
    """A backend that runs graphs as they are, and counts them."""

    def backend(graph: torch.fx.GraphModule, _: list[torch.Tensor]) -> Any:
        made.append(graph)
        return graph.forward

    return backend


def trained(engine: Any, rollout: Any) -> list[tuple[float, ...]]:
    """Log-probabilities of the samples by the engine's forward in train mode."""
    found = []
    for sample in rollout.samples:
        ids = torch.tensor([[*sample.prompt, *sample.tokens]])
        rows = torch.log_softmax(engine.train()(ids).float(), -1)[0, len(sample.prompt) - 1 : -1].detach()
        found.append(tuple(rows.gather(-1, torch.tensor(sample.tokens)[:, None])[:, 0].tolist()))
    return found


def _exact(stage: int, num_blocks: int, compiles_first: bool | None) -> list[Any]:
    torch._dynamo.reset()
    engine, made, found = engine_of(stage, TinyLM(num_blocks=num_blocks)), [], []
    if compiles_first:
        engine.compile(backend=_graphs(made))
        train(engine, 1)
        assert made
    else:
        train(engine, 1)
    for steps in (0, 2):
        train(engine, steps)
        rollout = engine.rollout(PROMPTS, n=2, sampling=SAMPLING, seed=1, config=EXACT)
        assert rollout.stats.max_delta_log_prob == 0.0
        if compiles_first is False and not engine.is_compiled:
            engine.compile(backend=_graphs(made))
        assert trained(engine, rollout) == [sample.log_probs for sample in rollout.samples]
        found.append([(sample.tokens, sample.log_probs) for sample in rollout.samples])
    if compiles_first is not None:
        assert bool(made) == compiles_first
        assert engine.rollout(PROMPTS, sampling=SAMPLING, config=RolloutConfig()).stats.max_delta_log_prob < 1e-5
        train(engine, 1)
        assert made, "rollouts that are not exact leave compiled training"
    engine.close()
    assert not any("forward" in vars(each) for each in engine.module.modules())
    return found


@pytest.mark.parametrize("num_blocks", [2, 1])  # blocks are compiled; the whole module
def test_exact_rollouts_of_a_compiled_engine_have_the_bits_of_one_that_is_not(num_blocks: int) -> None:
    (plain,) = run_ranks(_exact, 1, 0, num_blocks, None)
    for compiles_first in (True, False):
        for world, stage in ((1, 0), (2, 3)):
            found = run_ranks(_exact, world, stage, num_blocks, compiles_first)[0]
            assert found[0] != found[1]
            if world == 1 and not compiles_first:  # before the first compiled step, on the same data
                assert found[0] == plain[0]


def test_a_compiled_engine_rolls_out_and_generates(caplog: pytest.LogCaptureFixture) -> None:
    engine, made = engine_of(), []
    engine.compile(backend=_graphs(made))
    rollout = engine.rollout(PROMPTS, n=2, sampling=SAMPLING, config=RolloutConfig(compare=6))
    assert rollout.stats.max_delta_log_prob < 1e-5
    ids = torch.tensor([PROMPTS[0]])
    with torch.no_grad():
        expected = int(engine.eval()(ids)[0, -1].argmax())
    assert int(engine.generate(ids, max_new_tokens=1)[0, -1]) == expected
    for _ in range(2):
        engine.rollout(PROMPTS, sampling=SAMPLING, config=EXACT)
    assert caplog.text.count("TinyLM computes without compile() while rollouts are exact") == 1
    engine.close()


def test_own_forwards_of_blocks_come_back_through_both() -> None:
    model = TinyLM()

    def own(x: torch.Tensor) -> torch.Tensor:
        return type(model.blocks[0]).forward(model.blocks[0], x)

    model.blocks[0].forward = own  # type: ignore[method-assign]
    engine = engine_of(0, model)
    engine.rollout(PROMPTS, sampling=SAMPLING, config=EXACT)
    engine.compile(backend="eager")
    engine.rollout(PROMPTS, sampling=SAMPLING, config=EXACT)
    engine.close()
    assert model.blocks[0].forward is own
    assert "forward" not in vars(model.blocks[1])
