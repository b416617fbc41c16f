"""The rows of precision in the plan's table (that every key has one: test_describe.py)."""

from __future__ import annotations

from typing import Any

from zengine.config import Facts, load, resolve


def shown(**source: Any) -> dict[str, Any]:
    facts = Facts(world_size=1, replicas=1, device_type="cuda")
    return dict(resolve(load({"train_batch_size": 1, **source}), facts).rows())


def test_narrow_masters_and_states_are_shown() -> None:
    low = {"enabled": True, "bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}
    rows = shown(bf16=low, optimizer={"type": "AdamW"})
    assert rows["bf16.bf16_master_weights_and_grads"] is rows["bf16.bf16_optimizer_states"] is True
    rows = shown(bf16={"enabled": True}, optimizer={"type": "AdamW"})
    assert rows["bf16.bf16_master_weights_and_grads"] is rows["bf16.bf16_optimizer_states"] is False


def test_autocast_and_amp_are_shown_with_what_they_became() -> None:
    rows = shown(amp={"enabled": True, "opt_level": "O2", "loss_scale": 4})
    assert (rows["amp.opt_level"], rows["amp.loss_scale"], rows["torch_autocast.enabled"]) == ("O2", 4.0, True)
    assert rows["torch_autocast.lower_precision_safe_modules"].startswith("torch.nn.Linear, ")


def test_what_stays_wide_is_shown() -> None:
    assert shown()["data_types.keep_in_fp32_modules"] == "(what the model lists)"
    kept = shown(bf16={"enabled": True}, data_types={"keep_in_fp32_modules": ["norm", "head"]})
    assert kept["data_types.keep_in_fp32_modules"] == "norm, head"
    assert shown(data_types={"keep_in_fp32_modules": []})["data_types.keep_in_fp32_modules"] == "(none)"
