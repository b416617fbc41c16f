"""Linear layers with frozen, sharded or quantized weights, and adapters."""

from __future__ import annotations

import copy
import io
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import linear

import zengine.deepspeed as deepspeed
import zpartition
from zcomm.testing import run_ranks
from zengine.deepspeed.linear import Init, LoRAConfig, OptimizedLinear, QuantizationConfig, init_lora
from zengine.deepspeed.linear.optimized_linear import LoRAOptimizedLinear
from zengine.deepspeed.linear.quantization import FloatQuantizer, QuantizedLinear, QuantizedParameter

LORA = {"lora_r": 4, "lora_alpha": 8.0}


def test_without_configs_the_layer_is_torchs() -> None:
    layer = OptimizedLinear(input_dim=6, output_dim=3)
    assert type(layer) is nn.Linear
    assert layer.weight.dtype == torch.bfloat16
    assert layer.bias is None
    with pytest.raises(ValueError, match="expected a LoRAConfig and a QuantizationConfig, got dict"):
        OptimizedLinear(6, 3, lora_config={})  # type: ignore[arg-type]


def test_only_the_adapter_is_trained() -> None:
    layer = OptimizedLinear(6, 3, lora_config=LoRAConfig(**LORA), dtype=torch.float32)
    x = torch.randn(5, 6)
    assert torch.equal(layer(x), linear(x, layer.weight))  # the second adapter begins with zeros
    trained = {name for name, param in layer.named_parameters() if param.requires_grad}
    assert trained == {"lora_weight_1.weight", "lora_weight_2.weight"}
    with torch.no_grad():
        layer.lora_weight_2.weight.normal_()
    want = linear(x, layer.weight) + 2.0 * linear(linear(x, layer.lora_weight_1.weight), layer.lora_weight_2.weight)
    torch.testing.assert_close(layer(x), want)
    late = OptimizedLinear(6, 3, lora_config=LoRAConfig(**LORA, delay_lora_init=True))
    with pytest.raises(RuntimeError, match=r"call deepspeed.linear.init_lora"):
        late(x)
    init_lora(late)
    assert late(x.bfloat16()).shape == (5, 3)
    with pytest.raises(ValueError, match="has no bias"):
        OptimizedLinear(6, 3, bias=True, lora_config=LoRAConfig())


@pytest.mark.parametrize(("bits", "mantissa", "bound"), [(8, 3, 2.0**-4), (6, 2, 2.0**-3), (12, 7, 2.0**-8)])
def test_codes_are_the_nearest_ones(bits: int, mantissa: int, bound: float) -> None:
    """Compared with all values of a code: relative error at most half a step, for numbers that are not tiny."""
    quantizer = FloatQuantizer(QuantizationConfig(q_bits=bits, mantissa_bits=mantissa, group_size=64))
    x = torch.randn(5, 50, generator=torch.Generator().manual_seed(0))
    found = quantizer.dequantize(quantizer.quantize(x))
    assert found.shape == x.shape
    large = x.abs() > 0.1
    assert float(((found - x) / x)[large].abs().max()) <= bound
    codes = quantizer.quantize(x)
    every = torch.arange(2 ** (bits - 1)).to(codes.codes.dtype).view(1, -1)
    values = quantizer.dequantize(type(codes)(every, torch.ones(1, 1), torch.Size([every.numel()]), torch.float32))
    assert torch.equal(values.sort().values, values)  # the order of codes is that of numbers
    scaled = x.flatten()[:64].abs() / codes.scales[0]
    nearest = (scaled[:, None] - values[None]).abs().min(dim=1).values
    assert torch.allclose((found.flatten()[:64].abs() / codes.scales[0] - scaled).abs(), nearest, atol=1e-4)
    again = quantizer.dequantize(quantizer.quantize(found))
    torch.testing.assert_close(again, found, rtol=1e-6, atol=1e-7)


def test_a_quantized_parameter_is_copied_saved_and_moved_as_codes() -> None:
    x = torch.randn(16, 16)
    param = QuantizedParameter(x, quantization_config=QuantizationConfig(group_size=32))
    assert param.dtype == torch.uint8
    assert not param.requires_grad
    values = param.dequantized()
    assert float((values - x).abs().max()) < 0.2
    file = io.BytesIO()
    torch.save(param, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    for other in (copy.copy(param), copy.deepcopy(param), param.to("cpu"), param.to(torch.float32), loaded):
        assert isinstance(other, QuantizedParameter)
        assert torch.equal(other.dequantized(), values)
    with pytest.raises(ValueError, match="quantized weights are frozen"):
        QuantizedParameter(x, requires_grad=True)
    with pytest.raises(ValueError, match="q_bits must be 6, 8 or 12"):
        FloatQuantizer(QuantizationConfig(q_bits=7))


def test_a_state_dict_holds_the_weight_itself() -> None:
    config = QuantizationConfig(group_size=8)
    for layer in (
        QuantizedLinear(8, 4, quantization_config=config),
        LoRAOptimizedLinear(8, 4, lora_config=LoRAConfig(**LORA, target_mods=["0"]), quantization_config=config),
    ):
        model = nn.Sequential(layer)
        state = {name: value.clone() for name, value in model.state_dict().items()}
        assert state["0.weight"].shape == (4, 8)
        assert state["0.weight"].dtype == torch.bfloat16
        state["0.weight"] *= 2
        model.load_state_dict(state)
        torch.testing.assert_close(model.state_dict()["0.weight"], state["0.weight"], rtol=0.01, atol=0.01)
        assert model(torch.ones(2, 8, dtype=torch.bfloat16)).shape == (2, 4)


def test_layers_outside_of_the_targets_load_as_ordinary_ones() -> None:
    model = nn.ModuleDict(
        {name: LoRAOptimizedLinear(4, 4, lora_config=LoRAConfig(**LORA, delay_lora_init=True)) for name in "ab"}
    )
    model["a"].lora_config.target_mods = model["b"].lora_config.target_mods = ["a"]
    whole = torch.eye(4, dtype=torch.bfloat16)
    model.load_state_dict({"a.weight": whole, "b.weight": whole}, strict=False)
    init_lora(model)
    assert [name for name, param in model.named_parameters() if param.requires_grad] == [
        "a.lora_weight_1.weight",
        "a.lora_weight_2.weight",
    ]
    assert torch.equal(model["b"](whole), whole)


def test_models_of_transformers_are_built_with_adapters() -> None:
    transformers = pytest.importorskip("transformers")
    sizes: dict[str, Any] = {"hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2, "vocab_size": 32}
    plain, make = nn.Linear, transformers.AutoModelForCausalLM.from_config
    with Init(lora_config=LoRAConfig(**LORA)):
        assert torch.nn.Linear is not plain
        model = make(transformers.LlamaConfig(num_hidden_layers=1, num_key_value_heads=2, **sizes))
        init_lora(model)
        built = transformers.AutoModelForCausalLM.from_config(
            transformers.LlamaConfig(num_hidden_layers=1, num_key_value_heads=2, **sizes)
        )
    assert torch.nn.Linear is plain
    assert make == transformers.AutoModelForCausalLM.from_config
    for each in (model, built):
        found = {name for name, child in each.named_modules() if isinstance(child, LoRAOptimizedLinear)}
        assert {"lm_head", "model.layers.0.self_attn.q_proj"} < found
        ids = torch.arange(8)[None]
        each(ids, labels=ids).loss.backward()
        assert all("lora_weight" in name for name, param in each.named_parameters() if param.grad is not None)


def _sharded() -> None:
    torch.manual_seed(0)
    layer = OptimizedLinear(6, 4, lora_config=LoRAConfig(**LORA, base_weight_sharding=2), dtype=torch.float32)
    assert layer.weight.shape == (12,)
    torch.manual_seed(0)
    whole = OptimizedLinear(6, 4, lora_config=LoRAConfig(**LORA), dtype=torch.float32)
    x = torch.randn(3, 6)
    assert torch.equal(layer.full_weight(), whole.weight)
    assert torch.equal(layer(x), whole(x))
    layer.lora_config.target_mods = [""]
    layer.load_state_dict({"weight": torch.arange(24.0).view(4, 6)}, strict=False)
    assert torch.equal(layer.full_weight(), torch.arange(24.0).view(4, 6))
    with pytest.raises(ValueError, match="must be 1 or the number of ranks, 2, and divide the input size, 6"):
        OptimizedLinear(6, 4, lora_config=LoRAConfig(base_weight_sharding=3))
    assert deepspeed.comm.get_world_size() == 2


def test_a_sharded_base_weight_is_gathered() -> None:
    run_ranks(_sharded, 2)


def _engine_of_sharded_bases(stage: int, folder: str) -> tuple[list[float], torch.Tensor]:
    """Train adapters over bases of which each rank holds half; return losses and a whole base."""
    rank = torch.distributed.get_rank()
    torch.manual_seed(rank)  # ranks draw different bases: rank 0's part is of its own draw
    lora = LoRAConfig(**LORA, base_weight_sharding=2)
    model = nn.Sequential(*(OptimizedLinear(6, 6, lora_config=lora, dtype=torch.float32) for _ in range(2)))
    before = model[0].full_weight().clone()
    zero = {"stage": stage, "stage3_param_persistence_threshold": 0}
    settings = {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.1}},
        "zero_optimization": zero,
    }
    trained = [param for param in model.parameters() if param.requires_grad]
    engine, *_ = deepspeed.initialize(model=model, model_parameters=trained, config=settings)
    losses = []
    for step in range(3):
        engine.backward(engine(torch.randn(2, 6, generator=torch.Generator().manual_seed(step))).square().mean())
        losses.append(engine.step().loss)
        if step == 1:
            engine.save_checkpoint(folder)
    with zpartition.gathered(model, modifier_rank=0), torch.no_grad():
        model[0].weight.zero_()
    engine.load_checkpoint(folder)
    with zpartition.gathered(model):
        assert torch.equal(model[0].full_weight(), before)
    engine.destroy()
    return losses, before


@pytest.mark.parametrize("stage", range(4))
def test_engines_leave_the_parts_of_a_sharded_base_alone(tmp_path: Path, stage: int) -> None:
    (losses, base), (other_losses, other_base) = run_ranks(_engine_of_sharded_bases, 2, stage, str(tmp_path))
    assert torch.equal(base, other_base)
    assert losses == other_losses
    assert losses[2] < losses[0]
