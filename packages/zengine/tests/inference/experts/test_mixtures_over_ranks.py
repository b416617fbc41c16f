"""Mixtures of Transformers in each dtype and over each split: logits of the module's own forward on one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers_models import OTHERS, model

import zengine.deepspeed as deepspeed
from zcomm.testing import run_ranks
from zengine.inference.quantized_modules import QuantizedLinear
from zengine.inference.recognize import NotRecognized, recognize
from zprecision.backends import native

pytest.importorskip("transformers")
pytestmark = pytest.mark.skipif(native.library() is None, reason="the kernels are not built")
IDS = torch.tensor([[5, 9, 11, 3, 60, 7, 8, 2, 33, 21, 90, 14], [60, 7, 8, 2, 5, 9, 11, 3, 44, 51, 71, 6]])
NAMES = ["Mixtral of eight", "Qwen3-MoE", "Qwen2-MoE, shared expert", "gpt-oss, attention sinks"]
KINDS: dict[str, dict[str, Any]] = {
    "fp32": {"dtype": "fp32"},
    "bf16": {"dtype": "bf16"},
    "int8": {"dtype": "fp32", "quant": {"weight": {"num_bits": 8}}},
    "int4": {"dtype": "fp32", "quant": {"weight": {"num_bits": 4}}},
}
TENSOR, EXPERT = {"tensor_parallel": {"tp_size": 2}}, {"moe": {"ep_size": 2}}
SPLITS: dict[str, dict[str, Any]] = {"none": {}, "tensor": TENSOR, "expert": EXPERT, "both": {**TENSOR, **EXPERT}}


def _with_values_of(engine: Any, name: str) -> nn.Module:
    """The plain model with the values that the engine's codes stand for."""
    plain = model(name)
    for path, layer in engine.module.named_modules():
        if isinstance(layer, QuantizedLinear):
            owner, _, last = path.rpartition(".")
            held = plain.get_submodule(owner.rpartition(".")[0]) if last.isdecimal() else None
            stack = None if held is None else getattr(held, owner.rpartition(".")[2])
            target = plain.get_submodule(path).weight if stack is None else stack[int(last)]
            target.data.copy_(layer.weight.dequantize())
    return plain


def _error(found: Tensor, wanted: Tensor) -> float:
    return float((found.float() - wanted.float()).norm() / wanted.float().norm())


@torch.no_grad()
def _errors(name: str, kind: str) -> dict[str, tuple[float, float, bool]]:
    """By split: errors of the module's forward and, if there is one, of the fused one; whether it is there."""
    found: dict[str, tuple[float, float, bool]] = {}
    plain = model(name, torch.bfloat16 if kind == "bf16" else torch.float32)
    for split, given in SPLITS.items():
        subject: Any = model(name)
        config = {**KINDS[kind], **given, "max_out_tokens": 32, "replace_with_kernel_inject": True}
        engine = deepspeed.init_inference(subject, config)
        if split == "none" and kind.startswith("int"):
            plain = _with_values_of(engine, name)
        wanted = plain(IDS).logits
        error = fused = _error(engine.module(IDS).logits, wanted)
        if engine._fused is not None:
            with engine._fused.empty_steps(2) as steps:
                made = [steps.forward_each(IDS[:, at], [0, 1]) for at in range(IDS.shape[1])]
            fused = _error(torch.stack(made, 1), wanted)
        found[split] = error, fused, engine._fused is not None
    return found


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", NAMES)
def test_each_split_has_the_logits_of_the_module(name: str, kind: str) -> None:
    for found in run_ranks(_errors, 2, name, kind):
        whole = found["none"][0]
        for split, (error, fused, is_fused) in found.items():
            assert is_fused is (name not in OTHERS), split
            assert max(error, fused) < {"fp32": 1e-5, "bf16": 0.02}.get(kind, 0.03), split  # activations are rounded
            if kind.startswith("int"):
                assert error == pytest.approx(whole, abs=1e-5), "ranks have the codes of one"


def _reason() -> str:
    subject: Any = model("gpt-oss, attention sinks")
    engine = deepspeed.init_inference(subject, {"dtype": "fp32", **TENSOR})
    with pytest.raises(NotRecognized) as raised:
        recognize(engine.module)
    return str(raised.value)


def test_an_attention_that_every_rank_computes_whole_is_named() -> None:
    wanted = "model.layers.0: each tensor rank cuts its part of what model.layers.0.self_attn.o_proj reads"
    assert all(reason.startswith(wanted) for reason in run_ranks(_reason, 2))
