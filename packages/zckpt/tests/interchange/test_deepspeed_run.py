from pathlib import Path
from typing import Any

import pytest

from zckpt.containers.unpickler import Record
from zckpt.interchange.deepspeed_files import DeepSpeedFiles, TensorParallelRank
from zckpt.interchange.deepspeed_run import ClassNames, run_objects

INFERRED = ClassNames()
GROUP = {"lr": 0.1, "betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": 0.0, "params": [0], "foreach": None}


def objects(
    model: dict[str, Any], shard: dict[str, Any] | None = None, class_names: ClassNames = INFERRED
) -> dict[str, Any]:
    tp_rank = TensorParallelRank(({"module": {}, **model},), (shard,) if shard is not None else ())
    return run_objects(DeepSpeedFiles(Path(), "t", (tp_rank,), ()), class_names)


def test_counters_and_the_callers_state() -> None:
    made = objects(
        {"global_steps": 7, "skipped_steps": 2, "global_samples": 56, "ds_config": {"gradient_accumulation_steps": 4},
         "epoch": 3, "best": (1, 2), "ds_version": "0.19.8", "object": Record("deepspeed.x.Y")}
    )  # fmt: skip
    assert made["clock"] == {"steps": 7, "skipped_steps": 2, "applied_steps": 5, "samples": 56, "micro_steps": 28}
    assert made["client_state"] == {"epoch": 3, "best": {"$tuple": [1, 2]}, "object": None}
    assert made["imported"]["left_out"] == ["client_state.object"]
    assert made["imported"]["version"] == "0.19.8"


@pytest.mark.parametrize(
    ("section", "kind"),
    [
        ({"type": "AdamW"}, "AdamW"),
        ({"type": "Adam", "params": {"lr": 1}}, "AdamW"),
        ({"type": "Adam", "params": {"adam_w_mode": False}}, "Adam"),
        ({"type": "Lamb"}, "LAMB"),
        ({"type": "Mine"}, "Mine"),
        (None, "AdamW"),
    ],
)
def test_the_optimizers_class_follows_from_the_configuration_or_the_state(section: Any, kind: str) -> None:
    state = {0: {"exp_avg": 0, "exp_avg_sq": 0, "step": 1}}
    shard = {"zero_stage": 2, "base_optimizer_state": {"state": state, "param_groups": [GROUP]}}
    told = {"ds_config": {"optimizer": section} if section else {}}
    made = objects(told, shard)
    wanted = {"lr": 0.1, "betas": {"$tuple": [0.9, 0.99]}, "eps": 1e-8, "weight_decay": 0.0}
    assert made["optimizer"] == {"kind": kind, "groups": [wanted]}
    assert objects(told, shard, ClassNames(optimizer="Own"))["optimizer"]["kind"] == "Own"


def test_the_schedule() -> None:
    state = {"last_batch_iteration": 4}
    named = {"lr_scheduler": state, "ds_config": {"scheduler": {"type": "WarmupLR"}}}
    assert objects(named)["scheduler"] == {"kind": "WarmupLR", "state": state}
    assert objects({"lr_scheduler": None})["scheduler"] == {"kind": "ConstantRate", "state": {}}
    assert objects({"lr_scheduler": state})["scheduler"]["kind"] == "an unnamed schedule of the caller"
    assert (
        objects({"lr_scheduler": state}, class_names=ClassNames(scheduler="LambdaLR"))["scheduler"]["kind"]
        == "LambdaLR"
    )


def dynamic(trace: str, window: int, hysteresis: int) -> dict[str, Any]:
    """DeepSpeed's counters after a trace of clean (g) and overflowing (o) steps, by its own law."""
    scale, last, left = 16.0, -1, hysteresis
    for i, step in enumerate(trace):
        if step == "o":
            scale, left, last = (scale / 2, left, i) if left == 1 else (scale, left - 1, i)
        elif (stable := i - last - 1) > 0 and stable % window == 0:
            scale, left = scale * 2, hysteresis
    return {"dynamic": True, "cur_scale": scale, "cur_iter": len(trace), "last_overflow_iter": last,
            "scale_window": window, "cur_hysteresis": left}  # fmt: skip


def test_the_loss_scale_goes_on_in_the_same_window() -> None:
    """Every prefix of a trace: the next steps of both laws grow at the same ones."""
    trace, window, hysteresis = "gggggggoggggoooggggggg", 3, 2
    factor, clean, left = 16.0, 0, hysteresis
    for done, step in enumerate(trace):
        told = {"zero_stage": 2, "loss_scaler": Record("x", (), dynamic(trace[:done], window, hysteresis))}
        state = objects({}, told)["scaler"]["state"]
        assert state == {"factor": factor, "clean_steps": clean, "hysteresis_left": left}, f"after {trace[:done]}"
        if step == "o":  # this side's law: the window is counted in clean steps, and goes on from 1 after growing
            factor, left, clean = (factor / 2, 1, 0) if left == 1 else (factor, left - 1, 0)
        else:
            clean += 1
            if clean > window:
                factor, left, clean = factor * 2, hysteresis, 1


def test_a_static_scale_and_none() -> None:
    def scaler(**state: Any) -> Any:
        return objects({}, {"zero_stage": 1, "loss_scaler": Record("x", (), state)})["scaler"]

    assert scaler(dynamic=False, cur_scale=128.0) == {"kind": "StaticScaler", "state": {"static_factor": 128.0}}
    assert scaler(dynamic=False, cur_scale=1.0) == {"kind": "NoScaling", "state": {}}
    assert objects({})["scaler"] == {"kind": "NoScaling", "state": {}}
