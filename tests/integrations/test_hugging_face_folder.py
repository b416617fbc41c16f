"""Sharded Hugging Face folders load into models under every split; each rank reads its parts only."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import zengine
from zckpt import CheckpointError
from zcomm.testing import run_ranks
from zpartition.pipeline import LayerSpec, PipelineModule

IDS = torch.arange(12).view(2, 6) % 31


def llama() -> nn.Module:
    """Make a Llama with weights that no folder has."""
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"vocab_size": 31, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2}
    config = LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2, tie_word_embeddings=False)
    made: nn.Module = LlamaForCausalLM(config)
    with torch.no_grad():
        for param in made.parameters():
            param.fill_(7.0)
    return made


def config(stage: int, **more: Any) -> dict[str, Any]:
    zero = {"stage": stage, "stage3_param_persistence_threshold": 0, "stage3_unit_size": 900}
    optimizer = {"type": "AdamW", "params": {"lr": 0.01}}
    return {"train_micro_batch_size_per_gpu": 2, "optimizer": optimizer, "zero_optimization": zero, **more}


def losses(engine: zengine.Engine) -> list[float]:
    """Return the losses before and after a step, which depends on the masters."""
    found = []
    for _ in range(2):
        loss = engine(input_ids=IDS, labels=IDS).loss
        found.append(loss.item())
        engine.backward(loss)
        engine.step()
    return found


def _filled(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, stage, more in (
        ("stage 1", 1, {}),
        ("stage 3", 3, {}),
        ("tensor ranks", 0, {"tensor_parallel": {"autotp_size": 2}}),
        ("tensor ranks, stage 2", 2, {"tensor_parallel": {"autotp_size": 2}}),
    ):
        with zengine.initialize(model=llama(), config=config(stage, **more))[0] as engine:
            assert engine.dp_world_size == (1 if more else 2)
            engine.load_weights(folder)
            found[name] = losses(engine)
    with zengine.initialize(model=llama(), config=config(3))[0] as engine:
        missing = folder if torch.distributed.get_rank() else folder / "absent"
        with pytest.raises(CheckpointError, match="absent"):
            engine.load_weights(missing)
    return found


def test_a_folder_loads_into_split_models(tmp_path: Path) -> None:
    torch.manual_seed(1)
    whole = type(llama())(llama().config)
    whole.save_pretrained(tmp_path / "llama", max_shard_size="4KB")
    assert len(list((tmp_path / "llama").glob("*.safetensors"))) > 2
    optimizer = torch.optim.AdamW(whole.parameters(), lr=0.01, weight_decay=0.0)
    expected = []
    for _ in range(2):
        loss = whole(input_ids=IDS, labels=IDS).loss
        expected.append(loss.item())
        loss.backward()
        nn.utils.clip_grad_norm_(whole.parameters(), 1.0)
        optimizer.step()
    for rank in run_ranks(_filled, 2, tmp_path / "llama"):
        for name, curve in rank.items():
            assert curve == pytest.approx(expected, rel=1e-5), name


SIZES = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 8}
EXPERTS = {"expert_parallel": {"enabled": True, "autoep_size": 2}}
ATTENTION = {
    "use_default_specs": False,
    "layer_specs": [
        {"patterns": [r".*\.[qkv]_proj\.weight$"], "partition_type": "column"},
        {"patterns": [r".*\.o_proj\.weight$"], "partition_type": "row"},
    ],
}
RUNS: list[tuple[str, str, int, dict[str, Any]]] = [
    ("mixtral", "experts", 0, EXPERTS),
    ("mixtral", "experts", 3, EXPERTS),
    ("mixtral", "tensor ranks", 1, {"tensor_parallel": {"autotp_size": 2, "partition_config": ATTENTION}}),
    ("qwen3_moe", "experts", 2, EXPERTS),
    ("qwen3_moe", "no split", 3, {}),
]


def routed(name: str) -> nn.Module:
    """Make a model with stacked experts; its folder has each expert in separate tensors."""
    from transformers import AutoConfig, AutoModelForCausalLM

    experts = {"num_local_experts": 4} if name == "mixtral" else {"num_experts": 4, "moe_intermediate_size": 12}
    sizes = {**SIZES, **experts, "vocab_size": 31, "intermediate_size": 24, "num_experts_per_tok": 2}
    made: nn.Module = AutoModelForCausalLM.from_config(AutoConfig.for_model(name, **sizes))
    return made


def _counted(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Count the elements of each later read."""
    from zckpt.interchange import weights

    read: list[int] = []
    whole = weights.Slice.__getitem__

    def counted(self: weights.Slice, box: Any) -> torch.Tensor:
        found = whole(self, box)
        read.append(found.numel())
        return found

    monkeypatch.setattr(weights.Slice, "__getitem__", counted)
    return read


def _trained(model: nn.Module, settings: dict[str, Any], folder: Path | None = None) -> dict[str, Any]:
    """Load from `folder`, if given; return exports before and after training."""
    found: dict[str, Any] = {}
    with zengine.initialize(model=model, config=settings)[0] as engine, pytest.MonkeyPatch.context() as patch:
        read = _counted(patch)
        if folder is not None:
            engine.load_weights(folder)
        found["read"] = sum(read)
        found["weights"] = engine.module_state_dict()
        found["losses"] = losses(engine)
        found["after"] = engine.module_state_dict()
        if folder is not None:
            engine.save_16bit_model(str(folder.with_name("again")), "model.safetensors")
    return found


def _routed(folder: Path) -> list[dict[str, Any]]:
    from transformers import AutoModelForCausalLM

    answers = []
    for name, how, stage, more in RUNS:
        settings = config(stage, **more)
        found = _trained(routed(name), settings, folder / name)
        given = AutoModelForCausalLM.from_pretrained(folder / name)
        config_of, model_losses = given.config, _trained(given, settings)["losses"]
        assert found["losses"] == model_losses, (name, how, stage)
        if torch.distributed.get_rank() == 0:
            config_of.save_pretrained(folder / "again")
            back = AutoModelForCausalLM.from_pretrained(folder / "again").state_dict()
            assert all(torch.equal(back[each], tensor) for each, tensor in found["after"].items()), (name, how, stage)
        answers.append(found)
    return answers


def test_separate_experts_of_a_folder_load_into_split_stacks(tmp_path: Path) -> None:
    """Compare with `from_pretrained` before the split, bit for bit, and export again."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(3)
    for name in ("mixtral", "qwen3_moe"):
        routed(name).save_pretrained(tmp_path / name)
    ranks = run_ranks(_routed, 2, tmp_path)
    for (name, how, stage, _), *found in zip(RUNS, *ranks):
        expected = AutoModelForCausalLM.from_pretrained(tmp_path / name).state_dict()
        for rank in found:
            assert rank["weights"].keys() == expected.keys()
            for each, tensor in rank["weights"].items():
                assert torch.equal(tensor, expected[each]), (name, how, stage, each)
        total, read = sum(tensor.numel() for tensor in expected.values()), [rank["read"] for rank in found]
        assert sum(read) == total if stage == 3 else max(read) < total, "no rank reads what another has"


def _staged(folder: Path) -> list[str]:
    """Make two stages whose layers have the names of a Transformers model."""
    from torch.nn import functional
    from transformers import AutoModelForCausalLM
    from transformers.models.mixtral.modeling_mixtral import MixtralDecoderLayer, MixtralRMSNorm

    with torch.device("meta"):
        like: Any = routed("mixtral")
    sizes = like.config
    layers = [
        LayerSpec(nn.Embedding, sizes.vocab_size, sizes.hidden_size),
        *(LayerSpec(MixtralDecoderLayer, sizes, index) for index in range(2)),
        LayerSpec(MixtralRMSNorm, sizes.hidden_size),
        LayerSpec(nn.Linear, sizes.hidden_size, sizes.vocab_size, bias=False),
    ]
    names = ["model.embed_tokens", "model.layers.0", "model.layers.1", "model.norm", "lm_head"]
    module = PipelineModule(layers, 2, loss_fn=functional.cross_entropy, names=names)
    with zengine.initialize(model=module, config=config(1))[0] as engine:
        with pytest.raises(ValueError, match=r"unexpected: .*experts.0.w1.weight"):
            engine.load_weights(folder)
        engine.load_weights(folder, like=like)
        state = dict(module.state_dict())
    expected = AutoModelForCausalLM.from_pretrained(folder).state_dict()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in state.items())
    return list(state)


def test_pipeline_stages_load_from_the_folder_of_a_whole_model(tmp_path: Path) -> None:
    torch.manual_seed(4)
    whole = routed("mixtral")
    whole.save_pretrained(tmp_path / "mixtral")  # type: ignore[operator]
    first, last = run_ranks(_staged, 2, tmp_path / "mixtral")
    assert sorted(first + last) == sorted(whole.state_dict())
    assert "model.layers.0.mlp.experts.gate_up_proj" in first
    assert "model.layers.1.mlp.experts.gate_up_proj" in last
