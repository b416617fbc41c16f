""" "auto": filled in by the caller, derived, or refused with who fills it in."""

from __future__ import annotations

from typing import Any

import pytest

from zengine.config import Config, ConfigError, Facts, Plan, load, resolve
from zengine.config.grammar.table import walk
from zengine.config.keys.root import ROOT
from zengine.config.reading.auto import AUTO

TRAINER: dict[str, Any] = {
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "fp16": {"enabled": "auto", "loss_scale": 0},
    "bf16": {"enabled": "auto"},
    "optimizer": {"type": "AdamW", "params": dict.fromkeys(("lr", "betas", "eps", "weight_decay"), "auto")},
    "scheduler": {
        "type": "WarmupLR",
        "params": dict.fromkeys(("warmup_min_lr", "warmup_max_lr", "warmup_num_steps"), "auto"),
    },
    "zero_optimization": {
        "stage": 3,
        "reduce_bucket_size": "auto",
        "stage3_prefetch_bucket_size": "auto",
        "stage3_param_persistence_threshold": "auto",
    },
}


def plan_of(config: Config) -> Plan:
    return resolve(config, Facts(world_size=4, replicas=4))


def test_a_trainers_config_resolves_by_itself() -> None:
    plan = plan_of(load(TRAINER))
    assert (plan.batch.train_batch_size, plan.batch.micro_batch_size, plan.batch.accumulation) == (32, 8, 1)
    assert dict(plan.optimizer.params) == {"lr": 5e-5, "betas": [0.9, 0.999], "eps": 1e-8, "weight_decay": 0.0}
    assert dict(plan.scheduler.params) == {"warmup_min_lr": 0, "warmup_num_steps": 0, "warmup_max_lr": 5e-5}
    assert plan.zero.bucket_numel == 0
    for key in (
        "train_batch_size",
        "gradient_clipping",
        "optimizer.params.lr",
        "zero_optimization.reduce_bucket_size",
    ):
        assert plan.origins[key] == "auto", key
    (notice,) = (notice for notice in plan.notices if '"auto" is replaced' in notice)
    assert "optimizer.params.lr = 5e-05 (--learning_rate)" in notice
    assert "train_micro_batch_size_per_gpu = 8 (--per_device_train_batch_size)" in notice


def test_the_caller_fills_in_what_it_knows() -> None:
    config = load(TRAINER, auto={"train_micro_batch_size_per_gpu": 2, "optimizer.params.lr": 0.5})
    plan = plan_of(config)
    assert (plan.batch.micro_batch_size, plan.batch.train_batch_size) == (2, 8)
    assert plan.optimizer.params["lr"] == plan.scheduler.params["warmup_max_lr"] == 0.5
    assert config.autos["optimizer.params.lr"] == "filled in by the caller"
    assert plan.origins["optimizer.params.lr"] == "auto"


def test_values_that_are_not_open_are_not_filled_in() -> None:
    assert load({"gradient_clipping": 0.5}, auto={"gradient_clipping": 2.0}).settings.gradient_clipping == 0.5


def test_the_length_of_a_run_cannot_be_guessed() -> None:
    source = {"scheduler": {"type": "WarmupDecayLR", "params": {"total_num_steps": "auto", "warmup_num_steps": 5}}}
    with pytest.raises(ConfigError) as caught:
        load(source)
    assert [str(problem) for problem in caught.value.problems] == [
        'scheduler.params.total_num_steps = "auto": Hugging Face\'s Trainer fills it in (--max_steps, or epochs x '
        "steps of an epoch), and no other key of this file determines it. Write the number of optimizer steps of the "
        "whole run."
    ]
    filled = load(source, auto={"scheduler.params.total_num_steps": 100})
    assert filled.settings.scheduler.params["total_num_steps"] == 100


@pytest.mark.parametrize("key", sorted(AUTO))
def test_every_key_of_the_table_is_known_and_takes_auto(key: str) -> None:
    known = {".".join(path): entry for path, entry in walk(ROOT)}
    section = known[key.partition(".params.")[0] + ".params" if ".params." in key else key.rpartition(".")[0] or key]
    assert section is not None
    source: Any = "auto"
    for part in reversed(key.split(".")):
        source = {part: source}
    if key.startswith("optimizer."):
        source["optimizer"]["type"] = "AdamW"
    if key.startswith("scheduler."):
        source["scheduler"]["type"] = "WarmupLR" if "total" not in key else "WarmupDecayLR"
    source.setdefault("train_batch_size", 4)
    config = load(source, auto={"scheduler.params.total_num_steps": 10})
    assert key in config.autos
    assert config.autos[key]
    plan = plan_of(config)
    if key in plan.origins and key != "zero_optimization.offload_optimizer.nvme_path":
        assert plan.origins[key] == "auto"


def test_auto_where_nobody_documents_it_is_an_error() -> None:
    with pytest.raises(ConfigError, match=r'prescale_gradients = "auto": "auto" must be resolved by the integration'):
        load({"prescale_gradients": "auto"})
    with pytest.raises(ConfigError, match=r'optimizer.params.amsgrad = "auto"'):
        load({"optimizer": {"type": "AdamW", "params": {"amsgrad": "auto"}}})


def test_values_of_a_file_keep_their_places() -> None:
    text = (
        '{"gradient_clipping": "auto",\n"train_batch_size": 8,\n'
        '"optimizer": {\n"type": "AdamW", "params": {"lr": "auto"}}}'
    )
    config = load(text)
    assert config.given["optimizer.params.lr"].line == 4
    assert config.origin("train_batch_size") == "<json>:2"
