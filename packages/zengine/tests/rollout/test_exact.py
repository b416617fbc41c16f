"""Exact rollouts: log-probabilities of `engine.rollout` are those of `engine(batch)`, bit for bit."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from tiny_lm import PROMPTS, Block, TinyLM, engine_of, train
from torch import Tensor, nn
from torch.nn import functional as F

from zcomm.testing import run_ranks
from zengine.adapters import LoRAConfig, add_lora
from zengine.rollout import RolloutConfig, SamplingConfig

SAMPLING = SamplingConfig(max_new_tokens=12, stop_tokens=(3,))
DTYPES: dict[str, dict[str, Any]] = {
    "fp32": {},
    "bf16": {"bf16": {"enabled": True}},
    "fp16": {"fp16": {"enabled": True, "initial_scale_power": 8}},
}
EXACT = RolloutConfig(exact=True, num_slots=3, compare=2)


def trained(engine: Any, rollout: Any) -> list[tuple[float, ...]]:
    """Log-probabilities of the samples by one forward of the engine, in train mode, in one padded batch."""
    rows = [(*sample.prompt, *sample.tokens) for sample in rollout.samples]
    ids = torch.zeros(len(rows), max(map(len, rows)), dtype=torch.int64)
    for index, row in enumerate(rows):
        ids[index, : len(row)] = torch.tensor(row)
    logits = engine.train()(ids)
    assert logits.requires_grad
    found = torch.log_softmax(logits.float(), -1)[:, :-1].gather(-1, ids[:, 1:, None])[..., 0].detach()
    return [
        tuple(found[index, len(sample.prompt) - 1 : len(rows[index]) - 1].tolist())
        for index, sample in enumerate(rollout.samples)
    ]


def _rollouts(stage: int, dtype: str, with_adapters: bool) -> list[Any]:
    model = TinyLM()
    if with_adapters:
        add_lora(model, LoRAConfig(lora_r=2, target_mods=["q", "v"]))
    engine = engine_of(stage, model, **DTYPES[dtype])
    made = []
    for steps in (0, 3):
        if steps:
            train(engine, steps)
        rollout = engine.rollout(PROMPTS, n=4, sampling=SAMPLING, seed=steps, config=EXACT)
        assert rollout.stats.kl == rollout.stats.max_delta_log_prob == 0.0
        assert trained(engine, rollout) == [sample.log_probs for sample in rollout.samples], "bit for bit"
        assert engine.log_probs(rollout.samples) == [sample.log_probs for sample in rollout.samples]
        other = RolloutConfig(exact=True, num_slots=7)
        assert engine.rollout(PROMPTS, n=4, sampling=SAMPLING, seed=steps, config=other).samples == rollout.samples
        made.append([(sample.prompt, sample.tokens, sample.log_probs) for sample in rollout.samples])
    if with_adapters:
        reference = engine.log_probs(rollout.samples, reference=True)
        assert reference != [sample.log_probs for sample in rollout.samples]
    engine.close()
    assert not any("forward" in vars(each) for each in model.modules())
    return made


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("with_adapters", [False, True])
def test_a_rollout_has_the_bits_of_the_trainer(dtype: str, with_adapters: bool) -> None:
    first = run_ranks(_rollouts, 1, 0, dtype, with_adapters)[0]
    assert first[0] != first[1]
    rows = ((2, 0), (4, 3)) if with_adapters else ((2, 0), (2, 1), (2, 2), (1, 3), (2, 3), (4, 3))
    for world, stage in rows:
        for found in run_ranks(_rollouts, world, stage, dtype, with_adapters):
            assert found[0] == first[0], f"world {world}, stage {stage}: of weights, prompt and seed alone"


def _experts(stage: int) -> list[Any]:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.MixtralConfig(
        vocab_size=29,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        num_local_experts=4,
        max_position_embeddings=48,
        initializer_range=0.3,
    )
    model = transformers.MixtralForCausalLM(config)
    engine, ids = engine_of(stage, model), torch.arange(24).view(2, 12) % 29
    made = []
    for steps in (0, 2):
        for _ in range(steps):
            engine.backward(engine(ids, labels=ids).loss)
            engine.step()
        rollout = engine.rollout(PROMPTS, n=3, sampling=SAMPLING, seed=steps, config=EXACT)
        assert rollout.stats.kl == rollout.stats.max_delta_log_prob == 0.0
        for sample in rollout.samples:  # in train mode, one by one
            tokens = torch.tensor([[*sample.prompt, *sample.tokens]])
            rows = torch.log_softmax(engine.train()(tokens).logits.float(), -1)[0, len(sample.prompt) - 1 : -1]
            assert tuple(rows.gather(-1, torch.tensor(sample.tokens)[:, None])[:, 0].tolist()) == sample.log_probs
        made.append([(sample.tokens, sample.log_probs) for sample in rollout.samples])
    engine.close()
    return made


def test_experts_have_the_bits_of_the_trainer_at_every_stage() -> None:
    pytest.importorskip("transformers")
    first = run_ranks(_experts, 1, 0)[0]
    assert first[0] != first[1]
    for world, stage in ((2, 1), (2, 3)):
        for found in run_ranks(_experts, world, stage):
            assert found[0] == first[0]


class Expert(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up, self.down = (nn.Linear(*shape, bias=False) for shape in ((16, 24), (16, 24), (24, 16)))

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.down(F.silu(self.gate(x)) * self.up(x))
        return found


class ListedExperts(nn.Module):
    """Two of four experts in a list, each called with the tokens that chose it."""

    def __init__(self) -> None:
        super().__init__()
        self.router, self.top_k = nn.Linear(16, 4, bias=False), 2
        self.experts = nn.ModuleList(Expert() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        flat = x.flatten(0, 1)
        weights, chosen = self.router(flat).softmax(-1).topk(self.top_k)
        weights = weights / weights.sum(-1, keepdim=True)
        total = torch.zeros_like(flat)
        for index, expert in enumerate(self.experts):
            rows, places = (chosen == index).nonzero(as_tuple=True)
            total = total.index_add(0, rows, expert(flat[rows]) * weights[rows, places, None])
        return total.view_as(x)


class ListedBlock(Block):
    def __init__(self) -> None:
        super().__init__()
        del self.grow, self.shrink
        self.mixture = ListedExperts()

    def forward(self, x: Tensor) -> Tensor:
        y = self.one(x)
        query, key, value = (each(y).unflatten(-1, (2, -1)).transpose(1, 2) for each in (self.q, self.k, self.v))
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        added: Tensor = x + self.mixture(self.two(x))
        return added


def _listed_experts(stage: int, unit_size: int) -> list[Any]:
    model = TinyLM()
    model.blocks = nn.ModuleList(ListedBlock() for _ in range(2))
    zero = {"stage": stage, "stage3_unit_size": unit_size, "stage3_param_persistence_threshold": 0}
    engine = engine_of(stage, model, zero_optimization=zero if stage == 3 else {"stage": stage})
    made = []
    for steps in (0, 2):
        train(engine, steps)
        rollout = engine.rollout(PROMPTS, n=3, sampling=SAMPLING, seed=steps, config=EXACT)
        assert rollout.stats.kl == rollout.stats.max_delta_log_prob == 0.0
        assert trained(engine, rollout) == [sample.log_probs for sample in rollout.samples], "bit for bit"
        made.append([(sample.tokens, sample.log_probs) for sample in rollout.samples])
    engine.close()
    return made


@pytest.mark.parametrize("unit_size", [100, 10_000])  # a linear layer each; a block each
def test_listed_experts_have_the_bits_of_the_trainer_at_every_stage(unit_size: int) -> None:
    first = run_ranks(_listed_experts, 1, 0, unit_size)[0]
    assert first[0] != first[1]
    for world, stage in ((2, 1), (1, 3), (2, 3)):
        for found in run_ranks(_listed_experts, world, stage, unit_size):
            assert found[0] == first[0]


def test_a_rollout_that_is_not_exact_gives_the_module_its_own_forward_back() -> None:
    engine, ids = engine_of(), torch.tensor([PROMPTS[2]])
    plain = engine(ids)
    engine.rollout(PROMPTS, n=1, sampling=SAMPLING, config=EXACT)
    assert any("forward" in vars(each) for each in engine.module.modules())
    engine.rollout(PROMPTS, n=1, sampling=SAMPLING, config=RolloutConfig())
    assert not any("forward" in vars(each) for each in engine.module.modules())
    assert torch.equal(engine(ids), plain)
    engine.close()


def test_a_copy_of_an_exact_module_computes_with_its_own_weights() -> None:
    engine, ids = engine_of(), torch.tensor([PROMPTS[2]])
    engine.rollout(PROMPTS, n=1, sampling=SAMPLING, config=EXACT)
    copied = copy.deepcopy(engine.module)
    with torch.no_grad():
        copied.norm.weight.mul_(2)
        copied.blocks[0].q.weight.zero_()
    expected = TinyLM()
    expected.load_state_dict(copied.state_dict())
    assert torch.equal(copied(ids), expected(ids))
    engine.close()


def test_a_model_that_is_not_exact_says_which_block_and_why() -> None:
    model = TinyLM()
    model.blocks[1].shrink = torch.nn.Sequential(torch.nn.Linear(32, 16), torch.nn.Dropout(0.1))
    engine = engine_of(0, model)
    with pytest.raises(ValueError, match=r"blocks\.1\.shrink\.1\.p is 0\.1"):
        engine.rollout(PROMPTS, n=1, sampling=SAMPLING, config=EXACT)
    assert not any("forward" in vars(each) for each in model.modules())
    engine.close()


def test_autocast_is_in_the_distance_and_is_not_exact() -> None:
    autocast = {"torch_autocast": {"enabled": True, "dtype": "bfloat16"}}
    engine, ids = engine_of(0, **autocast), torch.tensor([PROMPTS[2]])
    rollout = engine.rollout(PROMPTS, n=1, sampling=SAMPLING, config=RolloutConfig(compare=3))
    apart = [
        abs(one - other)
        for row, sample in zip(trained(engine, rollout), rollout.samples)
        for one, other in zip(row, sample.log_probs)
    ]
    assert rollout.stats.max_delta_log_prob == pytest.approx(max(apart), rel=1e-3)
    assert max(apart) > 1e-4
    with pytest.raises(ValueError, match=r"torch_autocast casts to torch\.bfloat16"):
        engine.rollout(PROMPTS, n=1, sampling=SAMPLING, config=EXACT)
    engine.close()
    engine = engine_of()
    engine.rollout(PROMPTS, n=1, sampling=SAMPLING, config=EXACT)
    with torch.autocast("cpu", dtype=torch.bfloat16), pytest.raises(ValueError, match=r"torch\.autocast is on"):
        engine(ids)
    engine.close()


def test_weights_that_training_rounds_are_not_exact() -> None:
    zero = {"stage": 3, "zero_quantized_weights": True, "stage3_param_persistence_threshold": 0}
    engine = engine_of(3, zero_optimization=zero)
    with pytest.raises(ValueError, match="zero_quantized_weights rounds the weights of training"):
        engine.rollout(PROMPTS, n=1, sampling=SAMPLING, config=EXACT)
    engine.close()
