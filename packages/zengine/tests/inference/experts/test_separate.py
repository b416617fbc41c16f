"""Stacked experts, cut into layers that are quantized, packed and loaded as others are."""

from __future__ import annotations

import copy
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers_models import MODELS, SIZES, model

import zengine.deepspeed as deepspeed
from zengine.inference.experts.separate import SeparateExperts, separate, separate_chosen, stacks_in
from zengine.inference.loading.load import load_model
from zengine.inference.loading.packed import save_packed
from zengine.inference.quantized_modules import QuantizedLinear, quantize_linears
from zprecision.backends import native
from zprecision.quant import Int4, Int8

transformers = pytest.importorskip("transformers")
needs_kernels = pytest.mark.skipif(native.library() is None, reason="the kernels are not built")
IDS = torch.tensor([[5, 9, 11, 3, 60, 7]])
MIXTURES = ["Mixtral", "Qwen2-MoE, shared expert", "OLMoE"]


def logits(subject: nn.Module) -> Tensor:
    with torch.no_grad():
        found: Tensor = subject(IDS).logits
    return found


@pytest.mark.parametrize("name", MIXTURES)
def test_separate_experts_compute_what_the_stack_computes(name: str) -> None:
    subject = model(name)
    wanted, stacks = logits(subject), [each for each, *_ in stacks_in(subject)]
    assert stacks == ["model.layers.0.mlp.experts", "model.layers.1.mlp.experts"]
    for each in stacks:
        assert separate(subject, each)
    assert list(stacks_in(subject)) == []
    torch.testing.assert_close(logits(subject), wanted, rtol=1e-5, atol=1e-5)


class Clamped(nn.Module):
    """Stacked experts that limit what they multiply."""

    def __init__(self, number: int, width: int, grown: int) -> None:
        super().__init__()
        self.num_experts = number
        self.gate_up_proj = nn.Parameter(torch.randn(number, 2 * grown, width) / 10)
        self.down_proj = nn.Parameter(torch.randn(number, width, grown) / 10)

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        out = torch.zeros_like(hidden_states)
        for row in range(len(hidden_states)):
            for expert, weight in zip(top_k_index[row], top_k_weights[row], strict=True):
                gate, up = (self.gate_up_proj[expert] @ hidden_states[row]).chunk(2)
                y = nn.functional.silu(gate.clamp(max=7)) * up.clamp(-7, 7)
                out[row] += weight * (self.down_proj[expert] @ y)
        return out


def test_experts_that_compute_something_else_stay() -> None:
    subject = nn.ModuleDict({"experts": Clamped(3, 32, 64)})
    assert [name for name, *_ in stacks_in(subject)] == ["experts"]
    assert not separate(subject, "experts")
    with torch.device("meta"):
        empty = nn.ModuleDict({"experts": Clamped(3, 32, 64)})
    assert not separate(empty, "experts")


@needs_kernels
@pytest.mark.parametrize("name", MIXTURES)
@pytest.mark.parametrize("bits", [8, 4])
def test_an_engine_quantizes_stacked_experts_and_fuses_them(
    name: str, bits: int, caplog: pytest.LogCaptureFixture
) -> None:
    subject: Any = model(name)
    dequantized = copy.deepcopy(subject)
    with caplog.at_level(logging.INFO, "zengine"):
        engine = deepspeed.init_inference(
            subject,
            dtype="fp32",
            quant={"weight": {"num_bits": bits}},
            replace_with_kernel_inject=True,
            max_out_tokens=24,
        )
    (line,) = [each for each in caplog.messages if f"quantized to int{bits}" in each]
    assert "experts" not in line.partition("not quantized:")[2]
    layers = {name: each for name, each in engine.module.named_modules() if isinstance(each, QuantizedLinear)}
    for stack, experts, order in stacks_in(dequantized):
        for each in order.names:
            values = getattr(experts, each)
            with torch.no_grad():
                for index in range(len(values)):
                    values[index] = layers[f"{stack}.{each}.{index}"].weight.dequantize()
    for layer, quantized in layers.items():
        if ".experts." not in layer:
            dequantized.get_submodule(layer).weight.data = quantized.weight.dequantize()
    error = (logits(engine.module) - logits(dequantized)).norm() / logits(dequantized).norm()
    assert float(error) < 0.03  # activations are rounded to 8 bits, and one may choose another expert
    found = engine.generate(IDS, max_new_tokens=6, do_sample=False)
    assert engine._fused is not None
    assert engine._fused.steps is not None
    assert engine._fused.steps.fused.reasons == {}
    assert found.shape == (1, 12)


@pytest.mark.parametrize("format", ["int8", "int4"])
def test_files_are_quantized_expert_by_expert(format: str, tmp_path: Path) -> None:
    wanted = model("Mixtral")
    wanted.save_pretrained(tmp_path)
    loaded = load_model(tmp_path, format=format)
    names = [row.name for row in loaded.report.layers]
    assert "model.layers.1.mlp.experts.gate_up_proj.4" in names
    kept = set(loaded.report.kept)
    separate_chosen(wanted, lambda _name: Int8())
    quantize_linears(wanted, lambda name: Int8() if format == "int8" or name in kept else Int4())
    assert torch.equal(logits(loaded.module), logits(wanted))
    assert loaded.decoder is not None, loaded.reason


def test_a_packed_model_keeps_its_experts(tmp_path: Path) -> None:
    model("Mixtral").save_pretrained(tmp_path / "plain")
    loaded = load_model(tmp_path / "plain", format="int4")
    save_packed(loaded.module, tmp_path / "packed")
    again = load_model(tmp_path / "packed")
    assert isinstance(again.module.model.layers[0].mlp.experts, SeparateExperts)
    assert torch.equal(logits(again.module), logits(loaded.module))
    kind, given = MODELS["Mixtral"]
    config = getattr(transformers, f"{kind}Config")(**{**SIZES, **given})
    with torch.device("meta"):
        empty = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    engine = deepspeed.init_inference(empty, dtype="fp32", checkpoint=str(tmp_path / "packed"))
    assert torch.equal(logits(engine.module), logits(loaded.module))
