"""Transformers' conversions, on names and places of tensors in a folder."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from zckpt import CheckpointInputError
from zengine.checkpoint.huggingface import to_module_names

transformers = pytest.importorskip("transformers", minversion="5")
core = pytest.importorskip("transformers.core_model_loading")
known = pytest.importorskip("transformers.conversion_mapping")


def model() -> Any:
    sizes = {"hidden_size": 8, "intermediate_size": 12, "num_attention_heads": 2, "num_hidden_layers": 1}
    with torch.device("meta"):
        return transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=10, **sizes))


def shapes(of: nn.Module) -> dict[str, tuple[int, ...]]:
    return {name: tuple(tensor.shape) for name, tensor in of.state_dict().items()}


def converted(weights: dict[str, Tensor], of: Any, *mapping: Any) -> dict[str, Any]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(known, "get_model_conversion_mapping", lambda given: list(mapping))
        return dict(to_module_names(weights, of, shapes(of)))


def test_other_models_and_names_that_fit_are_left_as_they_are() -> None:
    weights = {"a.weight": torch.ones(2)}
    assert to_module_names(weights, nn.Linear(2, 2), {"weight": (2, 2), "bias": (2,)}) is weights
    of = model()
    own = {name: torch.empty(shape) for name, shape in shapes(of).items()}
    found = to_module_names(own, of, shapes(of))
    assert found.keys() == own.keys()
    assert all(found[name] is tensor for name, tensor in own.items())


def test_one_tensor_becomes_several_after_its_name_was_changed() -> None:
    qkv = torch.randn(24, 8)
    parts = [f"self_attn.{part}_proj" for part in "qkv"]
    found = converted(
        {"layers.0.self_attn.fused.weight": qkv, "layers.0.other.weight": qkv, "body.norm.weight": torch.ones(8)},
        model(),
        core.WeightRenaming(r"^body\.", "model."),
        core.WeightConverter("self_attn.fused", parts, [core.Chunk(dim=0)]),
    )
    stem = "model.layers.0.self_attn"  # of the model that has a head, the folder's is the one without
    assert set(found) == {
        "model.norm.weight",
        "layers.0.other.weight",
        *(f"{stem}.{each}_proj.weight" for each in "qkv"),
    }
    for part, expected in zip("qkv", qkv.chunk(3)):
        assert torch.equal(found[f"{stem}.{part}_proj.weight"][2:5], expected[2:5])


def test_parts_that_are_sized_by_the_model_take_the_whole_ones_sizes() -> None:
    of = model()
    found = converted(
        {"model.layers.0.mlp.both": torch.arange(192.0).view(24, 8)},
        of,
        core.WeightConverter("mlp.both", ["mlp.gate_proj.weight", "mlp.up_proj.weight"], [core.Split(dim=0)]),
    )
    assert {name: tuple(each.get_shape()) for name, each in found.items()} == {
        f"model.layers.0.mlp.{part}_proj.weight": (12, 8) for part in ("gate", "up")
    }


def test_what_a_model_says_that_it_ignores_is_left_out() -> None:
    of = model()
    of._keys_to_ignore_on_load_unexpected = {r"\.mtp\.", "norm"}
    given = {"model.mtp.weight": torch.ones(1), "model.norm.weight": torch.ones(8), "model.more": torch.ones(1)}
    assert sorted(converted(given, of)) == ["model.more", "model.norm.weight"]


@pytest.mark.parametrize("kind", ["PermuteForRope", "Interleave"])
def test_a_conversion_that_mixes_rows_is_refused_by_name(kind: str) -> None:
    wanted = (
        rf"model.layers.0.self_attn.q_proj.weight is made of attention.wq.weight by {kind}, which a rank cannot "
        r"do for its own part alone .*: load the model with from_pretrained before initialize"
    )
    with pytest.raises(CheckpointInputError, match=wanted):
        converted(
            {"model.layers.0.attention.wq.weight": torch.randn(8, 8)},
            model(),
            core.WeightConverter("attention.wq.weight", "self_attn.q_proj.weight", [getattr(core, kind)()]),
        )


def test_experts_of_which_one_is_missing_are_told_by_shape() -> None:
    config = transformers.MixtralConfig(
        vocab_size=8,
        hidden_size=8,
        intermediate_size=6,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_local_experts=4,
    )
    with torch.device("meta"):
        of = transformers.MixtralForCausalLM(config)
    stem = "model.layers.0.block_sparse_moe.experts"
    given = {f"{stem}.{expert}.w2.weight": torch.full((8, 6), float(expert)) for expert in (0, 1, 3)}
    ((name, found),) = to_module_names(given, of, shapes(of)).items()
    assert name == "model.layers.0.mlp.experts.down_proj"
    assert found.get_shape() == [3, 8, 6]
