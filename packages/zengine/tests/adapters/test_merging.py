"""Merged weights, and adapters switched off; ours, PEFT's and OptimizedLinear's, at every ZeRO stage."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from small_nets import Net, config, filled, net
from torch import Tensor, nn

import zengine
from zcomm.testing import run_ranks
from zengine.adapters import (
    adapters_disabled,
    add_lora,
    merge_lora,
    merged_weight,
    merged_weights,
    quantize_base,
)
from zengine.adapters.merging import computed_weight, dense_sizes
from zengine.deepspeed.linear import LoRAConfig, OptimizedLinear


def adapted_net(dtype: torch.dtype = torch.float32) -> Net:
    model = net().to(dtype)
    add_lora(model, config("q_proj", "fc"))
    filled(model)
    return model


def peft_net(**options: Any) -> Any:
    peft = pytest.importorskip("peft")
    model = net()
    made = peft.get_peft_model(
        model, peft.LoraConfig(r=3, lora_alpha=6.0, target_modules=["q_proj", "fc"], **options)
    )
    filled(made)
    return made


def exact(weight: Tensor, down: Tensor, up: Tensor, scale: float) -> Tensor:
    """Sum in float64, and round once."""
    return (weight.double() + scale * (up.double() @ down.double())).to(weight.dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_a_merged_weight_is_rounded_once_and_in_new_memory(dtype: torch.dtype) -> None:
    model = adapted_net(dtype)
    base = {name: param.clone() for name, param in model.named_parameters()}
    for name, weight in merged_weights(model):
        layer: Any = model.get_submodule(name)
        assert torch.equal(weight, exact(layer.weight, layer.lora_A, layer.lora_B, 2.0))
        assert weight.dtype == dtype
    assert all(torch.equal(param, base[name]) for name, param in model.named_parameters())


def test_large_weights_are_merged_in_parts() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(1024, 3000))
    add_lora(model, config("0"))
    filled(model)
    layer: Any = model[0]
    assert torch.equal(merged_weight(layer), exact(layer.weight, layer.lora_A, layer.lora_B, 2.0))


def test_a_hundred_switches_leave_every_bit() -> None:
    model, x = adapted_net(torch.bfloat16), torch.randn(4, 12, dtype=torch.bfloat16)
    before, out = {name: param.clone() for name, param in model.named_parameters()}, model(x)
    merged = dict(merged_weights(model))
    for _ in range(100):
        with adapters_disabled(model):
            model(x)
        assert all(torch.equal(weight, merged[name]) for name, weight in merged_weights(model))
    assert all(torch.equal(param, before[name]) for name, param in model.named_parameters())
    assert torch.equal(model(x), out)


def test_without_adapters_a_model_computes_its_base() -> None:
    model, x = adapted_net(), torch.randn(4, 12)
    for subject in (model, peft_net()):
        trained = [param.requires_grad for param in subject.parameters()]
        with adapters_disabled(subject):
            with adapters_disabled(subject):
                assert torch.equal(subject(x), net()(x))
            assert torch.equal(subject(x), net()(x))
            if subject is model:
                assert torch.equal(merged_weight(subject.fc), subject.fc.weight)
        assert not torch.equal(subject(x), net()(x))
        with pytest.raises(KeyError), adapters_disabled(subject):
            raise KeyError
        assert not torch.equal(subject(x), net()(x))
        assert [param.requires_grad for param in subject.parameters()] == trained


def test_pefts_adapters_merge_as_ours() -> None:
    subject = peft_net()
    found = dict(merged_weights(subject))
    assert sorted(found) == ["base_model.model.fc", "base_model.model.q_proj"]
    for name, weight in found.items():
        layer = subject.get_submodule(name)
        down, up = (each["default"].weight for each in (layer.lora_A, layer.lora_B))
        assert torch.equal(weight, exact(layer.base_layer.weight, down, up, 2.0))
    subject.merge_adapter()
    assert torch.equal(merged_weight(subject.base_model.model.fc), subject.base_model.model.fc.base_layer.weight)
    with pytest.raises(ValueError, match=r"call model.unmerge_adapter\(\) first"), adapters_disabled(subject):
        pass


def test_what_is_no_update_of_the_weight_is_rejected() -> None:
    with pytest.raises(ValueError, match="PEFT's adapter 'default' has DoraLinearVariant, which is no update"):
        dict(merged_weights(peft_net(use_dora=True)))
    with pytest.raises(ValueError, match="Net has no adapters: call add_lora"):
        dict(merged_weights(net()))
    with pytest.raises(ValueError, match="Net has no adapters"), adapters_disabled(net()):
        pass
    with pytest.raises(ValueError, match="Linear has no adapters, so nothing is merged"):
        merged_weight(nn.Linear(2, 2))


def test_an_optimized_linear_is_switched_and_merged_too() -> None:
    torch.manual_seed(0)
    layer: Any = OptimizedLinear(6, 4, lora_config=LoRAConfig(lora_r=2, lora_alpha=4.0), dtype=torch.float32)
    with torch.no_grad():
        layer.lora_weight_2.weight.normal_()
    x = torch.randn(3, 6)
    with adapters_disabled(layer):
        assert torch.equal(layer(x), x @ layer.weight.t())
    found = exact(layer.weight, layer.lora_weight_1.weight, layer.lora_weight_2.weight, 2.0)
    assert torch.equal(merged_weight(layer), found)
    torch.testing.assert_close(layer(x), x @ found.t())


def test_merging_for_good_gives_the_plain_model_back() -> None:
    model, x = adapted_net(), torch.randn(4, 12)
    merged, wanted = dict(merged_weights(model)), model(x)
    assert merge_lora(model) == ["q_proj", "fc"]
    assert [type(each) for each in model.children()] == [nn.Linear, nn.Linear]
    assert all(torch.equal(model.get_submodule(name).weight, weight) for name, weight in merged.items())  # type: ignore[arg-type]
    assert sorted(model.state_dict()) == sorted(net().state_dict())
    torch.testing.assert_close(model(x), wanted)
    with pytest.raises(ValueError, match="has no adapters"):
        merge_lora(model)


def _train(stage: int, kind: str, folder: str) -> dict[str, Any]:
    """Train at a stage; return losses and merged weights, of before and after a hundred switches."""
    model: Any = adapted_net() if kind == "ours" else peft_net()
    zero: dict[str, Any] = {"stage": stage, **({"stage3_param_persistence_threshold": 0} if stage == 3 else {})}
    settings = {
        "train_micro_batch_size_per_gpu": 4,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.05}},
        "zero_optimization": zero,
    }
    trained = [param for param in model.parameters() if param.requires_grad]
    engine = zengine.initialize(model=model, model_parameters=trained, config=settings)[0]
    rank = torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
    losses = []
    for step in range(3):
        x = torch.randn(4, 12, generator=torch.Generator().manual_seed(2 * step + rank))
        engine.backward(engine(x).square().mean())
        losses.append(engine.step().loss)
        with torch.no_grad(), adapters_disabled(engine.module):
            assert torch.equal(engine(x), net()(x))
    engine.save_checkpoint(folder)
    merged = dict(merged_weights(engine.module))
    for _ in range(100):
        again = dict(merged_weights(engine.module))
    assert all(torch.equal(again[name], weight) for name, weight in merged.items())
    engine.load_checkpoint(folder)
    assert all(torch.equal(again[name], weight) for name, weight in merged_weights(engine.module))
    engine.close()
    return {"losses": losses, "merged": {name.removeprefix("base_model.model."): w for name, w in merged.items()}}


@pytest.mark.parametrize("kind", ["ours", "peft"])
def test_all_stages_train_and_merge_the_same_bits(tmp_path: Path, kind: str) -> None:
    if kind == "peft":
        pytest.importorskip("peft")
    found = [run_ranks(_train, 2, stage, kind, str(tmp_path / f"{stage}")) for stage in range(4)]
    for per_rank in found:
        for each in per_rank:
            assert each["losses"] == found[0][0]["losses"]
            assert all(torch.equal(each["merged"][name], w) for name, w in found[0][0]["merged"].items())
    assert len({each["losses"][0] for each in (found[0][0], found[3][0])}) == 1
    assert found[0][0]["losses"][2] < found[0][0]["losses"][0]


@pytest.mark.parametrize("format", ["", "nf4"])
def test_dense_sizes_are_those_of_the_computed_weights(format: str) -> None:
    model = nn.Sequential(nn.Linear(64, 128), nn.Linear(128, 64), nn.Linear(64, 64))
    if format:
        quantize_base(model, format, ["0", "2"])
    add_lora(model, LoRAConfig(lora_r=2, target_mods=["0", "1"]))
    dense = [each for layer in model if (each := computed_weight(layer, torch.float32)) is not None]
    found = dense_sizes(model)
    assert len(dense) == (3 if format else 2)
    assert found.total == sum(each.nbytes for each in dense)
    assert found.largest == 64 * 128 * 4
    assert found.scratch == 64 * 128 * 8 + (found.largest if format else 0)
    layers = [layer for layer in model if computed_weight(layer, torch.float32) is not None]
    assert found.sources == sum(param.nbytes for each in layers for param in each.parameters() if param.dim() > 1)
    assert dense_sizes(nn.Linear(4, 4)).total == 0
