"""Adapters in PEFT's format: PEFT reads ours, we read PEFT's, at every ZeRO stage."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from small_nets import config, filled, net
from torch import Tensor, nn

import zengine
from zcomm.testing import run_ranks
from zengine.adapters import LoRAConfig, adapters_disabled, add_lora, load_adapters, save_adapters


def ours(seed: int = 1) -> Any:
    model = net()
    add_lora(model, config("q_proj", "fc"))
    filled(model, seed)
    return model


def theirs(**options: Any) -> Any:
    peft = pytest.importorskip("peft")
    made = peft.get_peft_model(
        net(), peft.LoraConfig(**{"r": 3, "lora_alpha": 6.0, "target_modules": ["q_proj", "fc"], **options})
    )
    filled(made)
    return made


def test_peft_loads_what_we_save(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    model, x = ours(), torch.randn(3, 12)
    save_adapters(model, tmp_path, base_model="some/base")
    assert sorted(each.name for each in tmp_path.iterdir()) == ["adapter_config.json", "adapter_model.safetensors"]
    loaded = peft.PeftModel.from_pretrained(net(), tmp_path)
    assert torch.equal(loaded(x), model(x))
    assert loaded.peft_config["default"].base_model_name_or_path == "some/base"
    assert loaded.peft_config["default"].target_modules == {"q_proj", "fc"}


def test_we_load_what_peft_saves(tmp_path: Path) -> None:
    model, x = theirs(rank_pattern={"fc": 2}, alpha_pattern={"fc": 5}), torch.randn(3, 12)
    model.save_pretrained(tmp_path)
    plain: Any = net()
    assert load_adapters(plain, tmp_path) == ["fc", "q_proj"]
    assert (plain.fc.rank, plain.fc.scale, plain.q_proj.scale) == (2, 2.5, 2.0)
    assert torch.equal(plain(x), model(x))
    assert [name for name, param in plain.named_parameters() if param.requires_grad] == [
        f"{layer}.lora_{side}" for layer in ("q_proj", "fc") for side in "AB"
    ]
    save_adapters(plain, tmp_path / "again")  # patterns survive
    again = net()
    load_adapters(again, tmp_path / "again")
    assert torch.equal(again(x), plain(x))


def test_rank_stabilized_adapters_keep_their_factor(tmp_path: Path) -> None:
    model, x, plain = theirs(use_rslora=True), torch.randn(3, 12), net()
    model.save_pretrained(tmp_path)
    load_adapters(plain, tmp_path)
    torch.testing.assert_close(plain(x), model(x), rtol=1e-6, atol=1e-6)  # alpha / sqrt(r) * r / r


def test_pefts_own_layers_are_saved_and_loaded(tmp_path: Path) -> None:
    model, x = theirs(), torch.randn(3, 12)
    save_adapters(model, tmp_path)
    other = theirs()
    with torch.no_grad():
        other.base_model.model.fc.lora_B["default"].weight.zero_()
    assert not torch.equal(other(x), model(x))
    assert load_adapters(other, tmp_path) == ["fc", "q_proj"]
    assert torch.equal(other(x), model(x))


def test_targets_are_whole_paths_where_an_end_means_more(tmp_path: Path) -> None:
    def two() -> nn.ModuleDict:
        torch.manual_seed(0)
        return nn.ModuleDict({each: nn.ModuleDict({"fc": nn.Linear(4, 4)}) for each in "ab"})

    model = two()
    add_lora(model, LoRAConfig(lora_r=2, target_mods=["b.fc"]))
    save_adapters(model, tmp_path)
    assert json.loads((tmp_path / "adapter_config.json").read_text())["target_modules"] == ["b.fc"]
    assert load_adapters(two(), tmp_path) == ["b.fc"]


def test_files_that_do_not_fit_are_rejected_before_anything_changes(tmp_path: Path) -> None:
    save_adapters(ours(), tmp_path / "good")
    theirs(use_dora=True).save_pretrained(tmp_path / "dora")
    small = net()
    add_lora(small, config("fc"))
    other = nn.ModuleDict({"fc": nn.Linear(8, 5), "q_proj": nn.Linear(12, 8)})
    wider = net()
    add_lora(wider, LoRAConfig(lora_r=3, lora_alpha=1.0, target_mods=["q_proj", "fc"]))
    disabled = ours()
    for model, folder, message in (
        (net(), "none", r"has no adapter_config\.json: pass a folder that PEFT's save_pretrained\(\)"),
        (net(), "dora", "has use_dora: only plain LoRA can be loaded here"),
        (small, "good", r"the file has an adapter for q_proj, the module none \(2 layers in the file, 1 in"),
        (
            other,
            "good",
            r"fc: the file has .* \(3, 8\) and lora_B \(6, 3\), and the module \(3, 8\) and \(5, 3\)",
        ),
        (
            nn.ModuleDict({"up": nn.Linear(2, 2)}),
            "good",
            "adapter for fc .2 such layers., and ModuleDict",
        ),
        (wider, "good", r"the file's update has the factor 2\.0, the module's 0\.333"),
    ):
        before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        with pytest.raises(ValueError, match=message):
            load_adapters(model, tmp_path / folder)
        after = model.state_dict()
        assert sorted(after) == sorted(before)
        assert all(torch.equal(after[name], tensor) for name, tensor in before.items())
    with pytest.raises(ValueError, match="adapters that are disabled"), adapters_disabled(disabled):
        save_adapters(disabled, tmp_path / "bad")
    with pytest.raises(ValueError, match="Net has no adapters"):
        save_adapters(net(), tmp_path / "bad")


def _through_an_engine(stage: int, folder: str) -> tuple[Tensor, Tensor, list[str]]:
    """Load into a trained engine, train a step, save; return outputs after loading and after the step."""
    settings = {
        "train_micro_batch_size_per_gpu": 4,
        "bf16": {"enabled": stage == 3},
        "optimizer": {"type": "SGD", "params": {"lr": 0.5}},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
    }
    model = ours(seed=5)
    trained = [param for param in model.parameters() if param.requires_grad]
    engine = zengine.initialize(model=model, model_parameters=trained, config=settings)[0]
    load_adapters(engine.module, f"{folder}/start")
    x = torch.randn(4, 12, generator=torch.Generator().manual_seed(0))
    x = x.bfloat16() if stage == 3 else x
    first = engine(x).detach().clone()
    engine.backward(engine(x).square().mean())
    engine.step()
    save_adapters(engine.module, f"{folder}/end-{stage}")
    engine.save_checkpoint(f"{folder}/checkpoint-{stage}", exclude_frozen_parameters=True)
    second = engine(x).detach().clone()
    engine.load_checkpoint(f"{folder}/checkpoint-{stage}", load_module_strict=False)
    assert torch.equal(engine(x), second)
    engine.close()
    names = sorted(name for name, param in model.named_parameters() if param.requires_grad)
    return first, second, names


@pytest.mark.parametrize("stage", range(4))
def test_engines_load_and_save_adapters(tmp_path: Path, stage: int) -> None:
    start, x = ours(), torch.randn(4, 12, generator=torch.Generator().manual_seed(0))
    save_adapters(start, tmp_path / "start")
    dtype = torch.bfloat16 if stage == 3 else torch.float32
    for first, second, _ in run_ranks(_through_an_engine, 2, stage, str(tmp_path)):
        assert torch.equal(first, start.to(dtype)(x.to(dtype)))
        end = net().to(dtype)
        load_adapters(end, tmp_path / f"end-{stage}")
        assert torch.equal(second, end(x.to(dtype)))
        assert not torch.equal(first, second)
