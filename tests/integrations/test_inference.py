"""Inference with Transformers' models on two ranks, through DeepSpeed's calls."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

import zcomm
from zcomm.testing import run_ranks
from zpartition import tensor

transformers = pytest.importorskip("transformers")

TOKENS = torch.arange(2, 16).view(2, 7)
WORDS = {"vocab_size": 64, "bos_token_id": 1, "eos_token_id": None, "pad_token_id": 0}
SIZES = {
    "hidden_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,  # odd, so two ranks cannot split it evenly
    "intermediate_size": 48,
    "max_position_embeddings": 32,
    **WORDS,
}
SMALL = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 32, **WORDS}
MIXED = {**SIZES, "num_local_experts": 4}
BOUND = 1e-6  # bound on logits, which are about 0.1


def make(kind: str, sizes: dict[str, Any]) -> nn.Module:
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(**sizes)
    name = "GPT2LMHeadModel" if kind == "GPT2" else f"{kind}ForCausalLM"
    model: nn.Module = getattr(transformers, name)(config)
    return model


def numel_of(model: nn.Module) -> int:
    return sum(param.numel() for param in model.parameters())


def planned_numel(model: nn.Module) -> int:
    """Return the elements that the plan keeps on this rank."""
    plan = tensor.read_tp_plan(model.tp_plan, model)  # type: ignore[arg-type]
    cuts = tensor.resolve(plan, model, zcomm.group_size(), zcomm.group_rank())
    own = {f"{cut.module}.{name}": address for cut in cuts for name, address in cut.addresses.items()}
    named = model.named_parameters()
    return sum(torch.Size(own[name].shape).numel() if name in own else param.numel() for name, param in named)


def compared(engine: Any, whole: Any) -> tuple[bool, float]:
    """Return True if greedy tokens equal those of one process, and the difference of logits."""
    options = {"max_new_tokens": 6, "do_sample": False, "attention_mask": torch.ones_like(TOKENS)}
    logits = engine(TOKENS).logits - whole(TOKENS).logits
    same = torch.equal(engine.generate(TOKENS, **options), whole.generate(TOKENS, **options))
    return same, float(logits.abs().max())


def _llama(folder: str) -> dict[str, Any]:
    """Load a Llama from a folder without full memory, counting reads."""
    import zengine.deepspeed as deepspeed
    from zckpt.interchange.weights import Slice

    whole = transformers.LlamaForCausalLM.from_pretrained(folder).eval()
    with deepspeed.OnDevice(dtype=torch.float32, device="meta"):
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES))
    plan = planned_numel(model)
    torch.manual_seed(zcomm.group_rank())  # later random numbers are equal nevertheless
    read, plain = [], Slice.__getitem__

    def counted(self: Any, rows: Any) -> Tensor:
        found = plain(self, rows)
        read.append(found.numel())
        return found

    with mock.patch.object(Slice, "__getitem__", counted):
        given = {"tensor_parallel": {"tp_size": 2}, "checkpoint": folder, "replace_with_kernel_inject": True}
        engine = deepspeed.init_inference(model, dtype=torch.float32, **given)
    with torch.no_grad():
        same, apart = compared(engine, whole)
    drawn = engine.generate(TOKENS, max_new_tokens=6, do_sample=True, attention_mask=torch.ones_like(TOKENS))
    return {
        "same": same,
        "apart": apart,
        "held": (numel_of(engine.module), plan),
        "read": sum(read),
        "drawn": drawn.tolist(),
    }


def test_a_llama_is_read_from_a_folder_and_answers_as_in_one_process(tmp_path: Path) -> None:
    make("Llama", SIZES).save_pretrained(tmp_path)  # type: ignore[operator]
    first, second = run_ranks(_llama, 2, str(tmp_path))
    for found in (first, second):
        assert found["same"]
        assert found["apart"] < BOUND
        assert found["held"][0] == found["held"][1] == found["read"]
    assert first["drawn"] == second["drawn"]


def _mixtral(folder: str) -> dict[str, Any]:
    """Load separate experts of a folder into stacked, sharded experts."""
    import zengine.deepspeed as deepspeed

    whole = transformers.MixtralForCausalLM.from_pretrained(folder).eval()
    with deepspeed.OnDevice(dtype=torch.float32, device="meta"):
        model = transformers.MixtralForCausalLM(transformers.MixtralConfig(**MIXED))
    given = {"tensor_parallel": {"tp_size": 2}, "moe": {"ep_size": 2}, "checkpoint": folder}
    engine = deepspeed.init_inference(model, dtype=torch.float32, **given)
    with torch.no_grad():
        same, apart = compared(engine, whole)
    return {"same": same, "apart": apart, "share": numel_of(engine.module) / numel_of(whole)}


def test_experts_are_read_from_a_folder_each_rank_its_own(tmp_path: Path) -> None:
    make("Mixtral", MIXED).save_pretrained(tmp_path)  # type: ignore[operator]
    for found in run_ranks(_mixtral, 2, str(tmp_path)):
        assert found["same"]
        assert found["apart"] < BOUND
        assert found["share"] < 0.56


def _others() -> dict[str, tuple[bool, float, float]]:
    """Return True if tokens are equal, the difference of logits, and the fraction of weights on this rank."""
    import zengine.deepspeed as deepspeed

    block = transformers.models.gpt2.modeling_gpt2.GPT2Block
    mixtral = ("Mixtral", MIXED)
    rows: dict[str, tuple[tuple[str, dict[str, Any]], dict[str, Any]]] = {
        "found out": (("GPT2", SMALL), {"mp_size": 2}),
        "policy": (("GPT2", SMALL), {"mp_size": 2, "injection_policy": {block: ("attn.c_proj", "mlp.c_proj")}}),
        "experts": (mixtral, {"moe": {"ep_size": 2}}),
        "both": (mixtral, {"tensor_parallel": {"tp_size": 2}, "ep_size": 2, "moe_experts": [4]}),
    }
    found = {}
    for what, (made, given) in rows.items():
        whole = make(*made).eval()
        engine = deepspeed.init_inference(make(*made), dtype=torch.float32, **given)
        with torch.no_grad():
            found[what] = (*compared(engine, whole), numel_of(engine.module) / numel_of(whole))
    return found


def test_fused_weights_and_experts_answer_as_in_one_process() -> None:
    for found in run_ranks(_others, 2):
        for what, (same, apart, share) in found.items():
            assert same, what
            assert apart < BOUND, what
            assert share < (0.66 if what != "both" else 0.56), what
