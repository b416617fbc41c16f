"""`config_version`: keys that are left out are as they were in the release that the file names."""

from __future__ import annotations

from typing import Any

import pytest

from zengine.config import ConfigError, Facts, Plan, load, resolve
from zengine.config.grammar.table import Key, walk
from zengine.config.keys.root import ROOT
from zengine.config.reading.versions import CHANGED

FULL = {
    "train_batch_size": 8,
    "bf16": {"enabled": True},
    "zero_optimization": {"offload_optimizer": {"device": "cpu"}},
}


def plan_of(**source: Any) -> Plan:
    return resolve(load({**FULL, **source}), Facts(world_size=1, replicas=1, device_type="cuda"))


def test_an_old_release_brings_its_defaults_and_says_so() -> None:
    plan = plan_of(config_version="deepspeed-0.14")
    assert (plan.clip_norm, plan.skip_nonfinite, plan.telemetry.steps_per_print) == (0.0, False, 10)
    assert plan.zero.offload.pin is False
    changed = ("gradient_clipping", "bf16.check_grad_overflow", "steps_per_print")
    assert {plan.origins[key] for key in changed} == {"deepspeed-0.14"}
    (notice,) = (notice for notice in plan.notices if "config_version" in notice)
    assert "gradient_clipping = 0.0 (now 1.0)" in notice
    assert "bf16.check_grad_overflow = false (now true)" in notice


@pytest.mark.parametrize(
    ("version", "clip", "every"),
    [("deepspeed-0.18.9", 0.0, 0), ("DeepSpeed 0.19.2", 0.0, 0), ("deepspeed-0.19", 1.0, 0), ("zengine-0.2", 1.0, 0)],
)
def test_a_default_holds_until_the_release_that_changed_it(version: str, clip: float, every: int) -> None:
    plan = plan_of(config_version=version)
    assert (plan.clip_norm, plan.telemetry.steps_per_print) == (clip, every)


def test_what_is_written_is_never_overruled() -> None:
    plan = plan_of(config_version="deepspeed-0.14", gradient_clipping=0.5)
    assert (plan.clip_norm, plan.origins["gradient_clipping"]) == (0.5, "dict")


def test_a_section_that_is_absent_or_off_is_not_touched() -> None:
    config = load({"config_version": "deepspeed-0.14", "bf16": {"enabled": False}})
    assert set(config.pinned) == {"gradient_clipping", "steps_per_print"}
    assert set(config.given) == {"config_version", "bf16.enabled"}


def test_without_a_version_the_defaults_that_moved_are_told_and_with_ours_nothing_is() -> None:
    told = [notice for notice in plan_of().notices if "before DeepSpeed" in notice]
    assert [notice.split()[0] for notice in told] == [
        "gradient_clipping",
        "bf16.check_grad_overflow",
        "zero_optimization.offload_optimizer.pin_memory",
    ]
    assert 'to restore that, write "gradient_clipping": 0.0, or set "config_version"' in told[0]
    assert not any("before DeepSpeed" in notice for notice in plan_of(config_version="zengine-0.2").notices)


@pytest.mark.parametrize(
    ("version", "reason"),
    [
        ("0.18", "not the name of a release"),
        (3, "not the name of a release"),
        ("deepspeed-0.20", "the newest known release is deepspeed-0.19.8"),
        ("zengine-9.0", "the newest known release is zengine-0.2"),
    ],
)
def test_a_release_that_is_not_known_is_refused_with_those_that_are(version: object, reason: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load({"config_version": version})
    problem = caught.value.problems[0]
    assert problem.reason.startswith(reason)
    assert '"deepspeed-0.18" up to "deepspeed-0.19.8", or "zengine-0.2"' in problem.suggestion


def test_the_table_names_keys_of_ours_with_their_present_defaults() -> None:
    known = {".".join(path): entry for path, entry in walk(ROOT)}
    for change in CHANGED:
        entry = known[change.key]
        assert isinstance(entry, Key)
        assert entry.default == change.now, change.key
        assert entry.kind.read(change.before) == change.before, change.key
