"""The hybrid engine: generation and rollouts with the weights that are trained, at every ZeRO stage."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from tiny_lm import PROMPTS, TinyLM, config, engine_of, train
from torch import nn

import zengine
from zcomm.testing import run_ranks
from zengine.adapters import LoRAConfig, add_lora
from zengine.deepspeed.runtime.hybrid_engine import DeepSpeedHybridEngine
from zengine.inference.calls.transformers_style import lengths_asked
from zengine.rollout import RolloutConfig, SamplingConfig
from zpartition.pipeline import LayerSpec, PipelineModule

SAMPLING = SamplingConfig(max_new_tokens=9)


def oracle(module: nn.Module, rollout: Any) -> float:
    """Return the largest difference of the rollout's log-probabilities from those of the module's forward."""
    worst = 0.0
    with torch.no_grad():
        for sample in rollout.samples:
            ids = torch.tensor([[*sample.prompt, *sample.tokens]])
            rows = torch.log_softmax(module(ids)[0].double(), -1)
            for at, (token, found) in enumerate(zip(sample.tokens, sample.log_probs)):
                worst = max(worst, abs(float(rows[len(sample.prompt) - 1 + at, token]) - found))
    return worst


def _rollout(stage: int, steps: int = 3) -> dict[str, Any]:
    engine = engine_of(stage)
    assert isinstance(engine, DeepSpeedHybridEngine)
    losses = train(engine, steps)
    rollout = engine.rollout(PROMPTS, n=3, sampling=SAMPLING, seed=1)
    again = engine.rollout(PROMPTS[::-1], n=3, sampling=SAMPLING, seed=1, config=RolloutConfig(num_slots=2))
    losses += train(engine, 2)
    with engine.opened():
        later = engine.rollout(PROMPTS, n=1, sampling=SAMPLING)
        worst = oracle(engine.module, later)
    found = {
        "samples": [(sample.prompt, sample.tokens, sample.log_probs) for sample in rollout.samples],
        "again": [(sample.prompt, sample.tokens, sample.log_probs) for sample in again.samples],
        "losses": losses,
        "worst": worst,
        "stats": rollout.stats,
        "later": [sample.tokens for sample in later.samples],
    }
    engine.close()
    return found


def _plain_losses(stage: int) -> list[float]:
    engine = engine_of(stage, hybrid_engine={"enabled": False})
    losses = train(engine, 3) + train(engine, 2)
    engine.close()
    return losses


@pytest.mark.parametrize("world", [1, 2])
def test_a_rollout_is_that_of_the_trained_weights_at_every_stage(world: int) -> None:
    by_stage = [run_ranks(_rollout, world, stage) for stage in range(4)]
    first = by_stage[0][0]
    for ranks in by_stage:
        for found in ranks:
            assert found["samples"] == first["samples"]  # of weights, prompt and seed alone
            assert sorted(found["again"]) == sorted(first["samples"])  # not of order and slots
            assert found["worst"] < 1e-5
            assert found["later"] != [tokens for _, tokens, _ in first["samples"]][::3]
            assert found["stats"].kl < 1e-9
            assert found["stats"].max_delta_log_prob < 1e-5
    plain = run_ranks(_plain_losses, world, 0)
    for rank in range(world):
        assert all(ranks[rank]["losses"] == plain[rank] for ranks in by_stage)  # training is undisturbed


def test_samples_of_a_prompt_differ_and_a_prompt_given_twice_has_others() -> None:
    engine = engine_of()
    rollout = engine.rollout([[1, 2], [1, 2]], n=4, sampling=SAMPLING)
    assert len({sample.tokens for sample in rollout.samples}) == 8
    assert [len(each) for each in rollout.by_prompt()] == [4, 4]
    chosen = engine.rollout([[1, 2]], n=2, sampling=SAMPLING, seeds=[[5, 5]])
    assert chosen.samples[0].tokens == chosen.samples[1].tokens
    engine.close()


def test_each_call_draws_new_samples_and_a_seed_the_same() -> None:
    engine, other = engine_of(), engine_of()
    rows = [engine.rollout([[1, 2], [3]], n=2, sampling=SAMPLING) for _ in range(3)]
    assert len({sample.tokens for row in rows for sample in row.samples}) == 12
    at_once = other.rollout([[3], [1, 2], [1, 2]], n=2, sampling=SAMPLING)  # in another order, and call
    assert at_once.samples[0].tokens == rows[0].samples[2].tokens
    assert [each.tokens for each in at_once.samples[2:]] == [
        each.tokens for row in rows[:2] for each in row.samples[:2]
    ]
    fixed = [engine.rollout([[1, 2]], n=2, sampling=SAMPLING, seed=seed).samples for seed in (5, 5, 6)]
    assert fixed[0] == fixed[1] != fixed[2]
    assert other.rollout([[1, 2]], n=2, sampling=SAMPLING).samples == rows[2].samples[:2]  # a seed counts nothing
    for each in (engine, other):
        train(each, 1)
    later = [each.rollout([[1, 2]], n=2, sampling=SAMPLING).samples for each in (engine, other)]
    assert later[0] == later[1]
    engine.close()
    other.close()


def _drawn(folder: str, world: int) -> list[Any]:
    engine = engine_of(1)
    if world:
        engine.load_checkpoint(folder)
    else:
        engine.rollout([[1, 2]], n=2, sampling=SAMPLING)
        with pytest.raises(ValueError, match="prompt 1 has no tokens"):
            engine.rollout([[1, 2], []], n=2, sampling=SAMPLING)  # draws nothing
        engine.save_checkpoint(folder)
    found = [each.tokens for each in engine.rollout([[1, 2]], n=2, sampling=SAMPLING).samples]
    engine.close()
    return found


def test_a_resumed_run_draws_what_it_would_have_drawn(tmp_path: Any) -> None:
    expected = run_ranks(_drawn, 2, str(tmp_path), 0)[0]
    for world in (1, 2):
        assert run_ranks(_drawn, world, str(tmp_path), world) == [expected] * world


def test_slots_are_refilled_as_samples_end() -> None:
    """Samples that end early make room: steps are near the mean length, not the longest."""
    engine = engine_of(hybrid_engine={"enabled": True, "max_out_tokens": 48})
    rule = SamplingConfig(max_new_tokens=40, stop_tokens=tuple(range(2)))
    rollout = engine.rollout([[3]] * 32, n=1, sampling=rule, config=RolloutConfig(num_slots=4, compare=0))
    lengths = [len(sample.tokens) for sample in rollout.samples]
    static_steps = sum(max(lengths[at : at + 4]) - 1 for at in range(0, 32, 4))
    assert sum(lengths) / len(lengths) < 0.5 * max(lengths)
    assert static_steps / rollout.stats.num_decode_steps > 1.5
    assert rollout.stats.num_decode_steps >= (sum(lengths) - 32) / 4
    engine.close()


def test_a_prompt_is_computed_once_for_its_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    from zengine.inference.decoder import DecoderPass

    engine = engine_of()
    engine.rollout([[1]], n=1, sampling=SAMPLING)
    lengths: list[int] = []
    plain = DecoderPass.forward

    def counted(self: DecoderPass, ids: torch.Tensor, slot: int) -> torch.Tensor:
        lengths.append(len(ids))
        return plain(self, ids, slot)

    monkeypatch.setattr(DecoderPass, "forward", counted)
    engine.rollout([[1, 2, 3, 4, 5, 6, 7]], n=8, sampling=SAMPLING)
    assert lengths.count(7) == 1
    engine.close()


def test_no_weight_is_copied_at_stage_0() -> None:
    engine = engine_of()
    engine.rollout([[1]], n=1, sampling=SAMPLING)
    addresses = {param.data_ptr() for param in engine.module.parameters()}
    decoder = engine._rollouts.weights.decoder
    for block in decoder.blocks:
        for projection in (*block.attention.projections, block.attention.out, block.mlp.up, block.mlp.down):
            assert projection.weight.data_ptr() in addresses
    engine.close()


def _switches(stage: int) -> tuple[bool, float]:
    model = TinyLM()
    add_lora(model, LoRAConfig(lora_r=2, target_mods=["q", "v"]))
    engine = engine_of(stage, model)
    train(engine, 2)
    before = {name: value.clone() for name, value in engine.module.state_dict().items()}
    for _ in range(100):
        engine.rollout([[1, 2]], n=1, sampling=SamplingConfig(max_new_tokens=2), config=RolloutConfig(compare=0))
    after = engine.module.state_dict()
    is_equal = all(torch.equal(before[name], after[name]) for name in before)
    with engine.opened():
        worst = oracle(engine.module, engine.rollout(PROMPTS, n=2, sampling=SAMPLING))
    engine.close()
    return is_equal, worst


def test_weights_are_bit_equal_after_100_rollouts_with_adapters() -> None:
    for stage in (0, 3):
        for is_equal, worst in run_ranks(_switches, 2, stage):
            assert is_equal
            assert worst < 1e-5


def test_reference_log_probs_are_those_of_the_base() -> None:
    model = TinyLM()
    add_lora(model, LoRAConfig(lora_r=2, target_mods=["q", "v"]))
    engine = engine_of(0, model)
    samples = engine.rollout(PROMPTS, n=1, sampling=SAMPLING).samples
    before = sum(engine.log_probs(samples), ())
    train(engine, 3)
    assert sum(engine.log_probs(samples, reference=True), ()) == pytest.approx(before, abs=1e-6)
    assert sum(engine.log_probs(samples), ()) != pytest.approx(before, abs=1e-3)
    engine.close()


def test_a_quantized_copy_says_how_far_it_is() -> None:
    engine = engine_of()
    exact = engine.rollout(PROMPTS, n=2, sampling=SAMPLING).stats
    rounded = engine.rollout(PROMPTS, n=2, sampling=SAMPLING, config=RolloutConfig(quantize="int8", compare=6)).stats
    assert exact.max_delta_log_prob < 1e-5 < rounded.max_delta_log_prob < 0.2
    assert 0 < rounded.kl < 0.01
    engine.close()


def test_optimizer_states_rest_on_the_host_meanwhile() -> None:
    engine, plain = engine_of(1), engine_of(1)
    for each in (engine, plain):
        train(each, 2)
    engine.rollout(PROMPTS, n=1, sampling=SAMPLING, config=RolloutConfig(offload_states=True))
    assert train(engine, 2) == train(plain, 2)
    engine.close()
    plain.close()


def test_the_cache_is_given_back_if_wanted() -> None:
    for releases in (True, False):
        section = {"enabled": True, "max_out_tokens": 40, "release_inference_cache": releases}
        engine = engine_of(hybrid_engine=section)
        engine.rollout(PROMPTS, n=1, sampling=SAMPLING)
        assert (engine._rollouts.weights.cache is None) == releases
        engine.close()


def test_generate_of_a_module_without_one_and_modes_are_kept() -> None:
    model = TinyLM()
    engine = engine_of(0, model)
    model.blocks[1].eval()
    ids = torch.tensor([[1, 2, 3], [4, 5, 6]])
    first = engine.generate(ids, max_new_tokens=5)
    assert first.shape == (2, 8)
    assert torch.equal(model.generate(ids, max_new_tokens=5), first)  # as DeepSpeed-Chat calls it
    assert torch.equal(engine.generate(ids[:1], max_new_tokens=5), first[:1])  # no batch size is kept
    assert model.training
    assert not model.blocks[1].training
    with torch.no_grad():
        assert int(model(ids)[0, -1].argmax()) == int(first[0, 3])
    with pytest.raises(RuntimeError, match=r"exceeds maximum length of 40: .* hybrid_engine\.max_out_tokens"):
        engine.generate(torch.ones(1, 41, dtype=torch.long))
    engine.close()
    assert not hasattr(model, "generate")


def test_a_copy_of_the_module_generates_by_itself() -> None:
    engine = engine_of(0, Prints())
    copied = copy.deepcopy(engine.module)
    engine.close()
    assert copied.generate("ab") == "abab"
    engine = engine_of()
    copied = copy.deepcopy(engine.module)
    with pytest.raises(AttributeError, match=r"TinyLM has no generate\(\): this is a copy"):
        copied.generate(torch.ones(1, 2, dtype=torch.long))
    engine.close()


def test_transformers_generate_has_the_tokens_of_the_model(caplog: pytest.LogCaptureFixture) -> None:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    small = transformers.LlamaConfig(
        vocab_size=40,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
    )
    model = transformers.LlamaForCausalLM(small).eval()
    ids = torch.randint(0, 40, (2, 5))
    expected = model.generate(ids, max_new_tokens=8, do_sample=False)
    own = model.generate
    engine = engine_of(0, model)
    for _ in range(2):
        assert torch.equal(engine.generate(ids, max_new_tokens=8, do_sample=False), expected)
    assert torch.equal(engine.module.generate(ids, max_new_tokens=8, do_sample=False), expected)
    assert torch.equal(engine.generate(ids, max_new_tokens=8, do_sample=False, synced_gpus=True), expected)
    assert "generates by its own forward" not in caplog.text
    engine.generate(ids, max_new_tokens=8, num_beams=2)
    assert "the fused path cannot do num_beams" in caplog.text
    engine.close()
    assert model.generate == own


class Strange(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x)


class Prints(Strange):
    def generate(self, text: str) -> str:
        return text * 2


def test_what_cannot_generate_is_told(caplog: pytest.LogCaptureFixture) -> None:
    engine = engine_of(0, Strange())
    with pytest.raises(
        AttributeError, match=r"Strange has no generate\(\) and is no decoder .* no embedding of tokens"
    ):
        engine.generate(torch.ones(1, 3, dtype=torch.long))
    with pytest.raises(ValueError, match="Strange has no embedding of tokens"):
        engine.rollout([[1]], sampling=SAMPLING)
    engine.close()
    engine = engine_of(0, Prints())
    assert engine.generate("ab") == "abab"
    assert caplog.text.count("Prints is not accelerated, and its own forward generates") == 1
    engine.close()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            {"prompts": [[1] * 35]},
            r"prompt 0 has 35 tokens and may get 9 more; a sequence may have 41 \(hybrid_engine",
        ),
        ({"prompts": [[1], []]}, "prompt 1 has no tokens"),
        ({"prompts": "hello"}, r"each the token ids of one: .* it is 'hello'\. Encode text by the tokenizer first"),
        ({"prompts": [1, 2]}, r"it is \[1, 2\]\. .* put one prompt into a list"),
        ({"prompts": [[1]], "n": 0}, "n = 0; ask for at least 1 sample"),
        ({"prompts": [[1]], "n": 2, "seeds": [[1]]}, r"seeds must be 2 numbers for each of the 1 prompts"),
        ({"prompts": [[1]], "seed": 3, "seeds": [[1]]}, r"got seed=3 and seeds: pass one number"),
        ({"prompts": [[99]]}, "prompt 0 has token 99; the vocabulary has 29"),
    ],
)
def test_a_wrong_request_is_told_by_its_numbers(arguments: dict[str, Any], message: str) -> None:
    engine = engine_of()
    with pytest.raises(ValueError, match=message):
        engine.rollout(**{"sampling": SAMPLING, **arguments})
    engine.close()


def _one_rank_is_wrong() -> str:
    engine = engine_of(3)
    prompts = [[1] * 35] if engine.global_rank == 1 else [[1]]
    with pytest.raises(ValueError) as caught:
        engine.rollout(prompts, sampling=SAMPLING)
    with pytest.raises(RuntimeError, match="rank 1: Input with size 43 exceeds maximum length of 40"):
        engine.generate(torch.ones(1, 3 + 40 * engine.global_rank, dtype=torch.int64))
    engine.rollout([[1]], sampling=SAMPLING)  # all go on
    engine.close()
    return str(caught.value)


def test_a_wrong_request_of_one_rank_is_told_on_all() -> None:
    assert all(text.startswith("rank 1: prompt 0 has 35 tokens") for text in run_ranks(_one_rank_is_wrong, 2))


def _one_rank_asks_for_too_many() -> list[str]:
    engine, found = engine_of(3), []
    wrong, prompt = engine.global_rank == 1, torch.ones(1, 30, dtype=torch.int64)
    gathers: list[int] = []
    opened = engine._rollouts.weights.hold
    engine._rollouts.weights.hold = lambda: (gathers.append(1), opened())[1]
    for _ in range(2):
        with pytest.raises(RuntimeError) as caught:
            engine.generate(prompt, max_new_tokens=12 if wrong else 11)
        found.append(f"{len(gathers)}: {caught.value}")
    with pytest.raises(RuntimeError, match=r"rank 1: a prompt of 30 tokens and 13 new ones exceed"):
        engine.generate(prompt, max_length=43 if wrong else 41)
    mask = torch.ones_like(prompt)
    mask[:, :5] = 0  # padding needs no room
    assert len(gathers) == 1
    assert engine.generate(prompt, attention_mask=mask, max_new_tokens=16).shape == (1, 46)
    engine.close()
    return found


def test_new_tokens_that_do_not_fit_are_told_on_all_ranks_before_weights_move() -> None:
    message = (
        "rank 1: a prompt of 30 tokens and 12 new ones exceed max_out_tokens = 40: raise it in "
        "hybrid_engine.max_out_tokens, or ask for at most 11 new tokens."
    )
    for found in run_ranks(_one_rank_asks_for_too_many, 2):
        assert found == [f"1: {message}", f"1: {message}"]  # the first gather recognizes the module


def test_the_limits_of_a_generation_config_are_those_that_somebody_set() -> None:
    transformers = pytest.importorskip("transformers")
    module, ids = nn.Module(), torch.ones(2, 4, dtype=torch.int64)
    module.generation_config = transformers.GenerationConfig()  # type: ignore[assignment]
    assert lengths_asked(module, {"inputs": ids}) == (4, 0)
    module.generation_config = transformers.GenerationConfig(max_length=9)  # type: ignore[assignment]
    assert lengths_asked(module, {"inputs": ids}) == (4, 5)
    own = transformers.GenerationConfig(max_new_tokens=7)
    assert lengths_asked(module, {"input_ids": ids, "generation_config": own}) == (4, 7)
    assert lengths_asked(module, {"input_ids": ids, "generation_config": own, "max_new_tokens": 3}) == (4, 3)
    assert lengths_asked(module, {"inputs": "text", "max_new_tokens": 3}) == (0, 0)


def _one_rank_asks_for_no_number() -> str:
    engine, prompt = engine_of(3), torch.ones(1, 30, dtype=torch.int64)
    engine.generate(prompt, max_new_tokens=2)  # recognizes the module
    try:
        found = str(engine.generate(prompt, max_new_tokens="many" if engine.global_rank == 1 else 2).shape)
    except (TypeError, ValueError) as error:
        found = type(error).__name__
    assert engine.generate(prompt, max_new_tokens=2).shape == (1, 32), "all ranks go on"
    engine.close()
    return found


def test_a_limit_that_is_no_number_fails_on_its_rank_alone() -> None:
    first, second = run_ranks(_one_rank_asks_for_no_number, 2)
    assert first == "torch.Size([1, 32])"
    assert second in ("TypeError", "ValueError")


def _limits(**given: int) -> list[dict[str, int]]:
    """No limit, either, and both."""
    names = ("max_new_tokens", "max_length")
    return [{}, *({name: given[name]} for name in names), given]


def test_new_tokens_asked_for_are_those_that_transformers_prepares() -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {"n_layer": 1, "n_head": 2, "n_embd": 16, "vocab_size": 32, "n_positions": 64}
    module, ids = transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes)), torch.ones(1, 6, dtype=torch.int64)
    prepared: list[int] = []

    def loop(_: Any, input_ids: torch.Tensor, *, generation_config: Any, **__: Any) -> torch.Tensor:
        prepared.append(generation_config.max_length - input_ids.shape[1])
        return input_ids

    for own in _limits(max_new_tokens=5, max_length=30):
        module.generation_config = transformers.GenerationConfig(**own)
        for other in _limits(max_new_tokens=6, max_length=31):
            for given in _limits(max_new_tokens=7, max_length=32):
                asked = {"input_ids": ids, "generation_config": transformers.GenerationConfig(**other), **given}
                module.generate(**asked, custom_generate=loop)
                expected = prepared[-1] if own or other or given else 0
                assert lengths_asked(module, asked) == (6, expected), (own, other, given)


class Configured(TinyLM):
    """Generates in its own way, with a config that is not Transformers'."""

    class Config:
        def __init__(self, length: int) -> None:
            self.max_length = length

    def __init__(self) -> None:
        super().__init__()
        self.generation_config = self.Config(500)

    def generate(self, input_ids: torch.Tensor) -> torch.Tensor:
        return torch.cat([input_ids, self(input_ids)[:, -1:].argmax(-1)], dim=1)


def test_a_config_of_another_kind_sets_no_limit() -> None:
    engine, ids = engine_of(0, Configured()), torch.tensor([PROMPTS[2]])
    with torch.no_grad():
        expected = engine.module.generate(ids)
    for _ in range(2):  # the first call recognizes the module
        assert torch.equal(engine.generate(ids), expected)
    engine.close()


def test_no_prompts_are_no_samples() -> None:
    engine = engine_of()
    rollout = engine.rollout([], sampling=SAMPLING)
    assert rollout.samples == ()
    with pytest.raises(ValueError, match="this rank gave no prompts"):
        rollout.batch()
    engine.close()


def test_a_plain_engine_says_how_to_get_rollouts() -> None:
    engine = engine_of(hybrid_engine={"enabled": False})
    with pytest.raises(AttributeError, match=r'write "hybrid_engine": \{"enabled": true\} in the config'):
        engine.rollout([[1]])
    engine.close()


def test_generate_that_leads_to_the_engine_hides_nothing(caplog: pytest.LogCaptureFixture) -> None:
    engine_of().close()
    assert "are hidden by attributes of the engine" not in caplog.text


def test_a_key_without_effect_is_told(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", "zengine"):
        RolloutConfig(use_graph_capture=True)
    assert "use_graph_capture has no effect" in caplog.text


def test_wrong_configs() -> None:
    for wrong, message in (
        ({"engine": "vllm"}, "there is 'hybrid_engine'"),
        ({"num_slots": 0}, "num_slots = 0 must be at least 1"),
        ({"exact": True, "quantize": "int4"}, "rounds the weights, so exact=True cannot hold"),
        ({"quantize": "int3"}, "int3"),
    ):
        with pytest.raises(ValueError, match=message):
            RolloutConfig(**wrong)
    model = PipelineModule([LayerSpec(nn.Linear, 4, 4)], num_stages=1)
    with pytest.raises(zengine.config.ConfigError, match="a PipelineModule has its layers on several ranks"):
        zengine.initialize(model=model, config=config())


def test_charts(tmp_path: Any) -> None:
    engine = engine_of(csv_monitor={"enabled": True, "output_path": str(tmp_path), "job_name": "job"})
    train(engine, 1)
    engine.rollout(PROMPTS, n=1, sampling=SAMPLING)
    train(engine, 1)
    engine.close()
    names = {path.stem for path in tmp_path.rglob("*.csv") if "rollout" in path.name}
    assert len(names) == 4, names


class ChatLoRA(nn.Module):
    """A layer with an adapter as DeepSpeed-Chat has it."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.weight, self.bias, self.lora_scaling, self.fuse_lora = layer.weight, layer.bias, 0.5, False
        self.lora_right_weight = nn.Parameter(torch.randn(layer.in_features, 4))
        self.lora_left_weight = nn.Parameter(torch.zeros(4, layer.out_features))
        self.weight.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        update = (x @ self.lora_right_weight @ self.lora_left_weight) * self.lora_scaling
        return nn.functional.linear(x, self.weight, self.bias) + update


class OwnLoRA(nn.Module):
    """A layer with an adapter of the user's own, of children."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.base = layer.requires_grad_(False)
        self.down, self.up = nn.Linear(layer.in_features, 4, bias=False), nn.Linear(4, layer.out_features, bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + self.up(self.down(x))


def _adapters_that_stay_zero(kind: type[nn.Module], stage: int, tp: int) -> list[tuple[bool, float]]:
    """Train steps of a learning rate of zero first; return whether rollouts are possible, and how far they are."""
    model = TinyLM()
    for block in model.blocks:
        block.q, block.grow = kind(block.q), kind(block.grow)  # type: ignore[call-arg]
    optimizer = torch.optim.SGD([each for each in model.parameters() if each.requires_grad], lr=0.0)
    section = {"enabled": True, "max_out_tokens": 40, "inference_tp_size": tp}
    settings = {**config(stage, hybrid_engine=section), "optimizer": None}
    del settings["optimizer"]
    engine, *_ = zengine.initialize(model=model, optimizer=optimizer, config=settings)
    found = []
    for rate in (0.0, 0.0, 5.0):
        for group in engine.optimizer.param_groups:
            group["lr"] = rate
        train(engine, 1)
        try:
            rollout = engine.rollout(PROMPTS, n=1, sampling=SAMPLING, config=RolloutConfig(compare=3))
            found.append((True, rollout.stats.max_delta_log_prob))
        except ValueError:
            found.append((False, 0.0))
            continue
        ids = torch.tensor([PROMPTS[2]])
        with torch.no_grad():
            expected = engine.eval()(ids)[0, -1].argmax()
        engine.train()
        assert engine.generate(ids, max_new_tokens=1)[0, -1] == expected
    engine.close()
    return found


@pytest.mark.parametrize(("stage", "tp", "world"), [(1, 1, 1), (3, 1, 2), (3, 2, 2)])
def test_adapters_of_deepspeed_chat_are_merged(stage: int, tp: int, world: int) -> None:
    for found in run_ranks(_adapters_that_stay_zero, world, ChatLoRA, stage, tp):
        assert all(can and far < 1e-5 for can, far in found)


def test_adapters_that_are_zero_at_first_are_not_overlooked_later() -> None:
    (found,) = run_ranks(_adapters_that_stay_zero, 1, OwnLoRA, 1, 1)
    assert not found[-1][0]
