"""Join of the stages' profiles."""

from zengine.flops.profile import FlopsProfile, ModuleCost
from zengine.flops.stage_feature import join_stages, per_micro_batch, stage_lines

FIRST = FlopsProfile(
    modules=(
        ModuleCost(path="", kind="PipelineModule", params=12, flops=40, ms=2.0, calls=4),
        ModuleCost(path="layers", kind="ModuleDict", params=12, flops=40, ms=2.0),
        ModuleCost(path="layers.0", kind="Linear", params=12, flops=40, ms=2.0, calls=4),
    ),
    operations={"mm": 40},
    backward_flops=80,
    recompute_factor=1.0,
)
SECOND = FlopsProfile(
    modules=(
        ModuleCost(path="", kind="PipelineModule", params=3, flops=20, ms=1.0, calls=4),
        ModuleCost(path="layers", kind="ModuleDict", params=3, flops=20, ms=1.0),
        ModuleCost(path="layers.1", kind="Linear", params=3, flops=20, ms=1.0, calls=4),
    ),
    operations={"mm": 12, "bmm": 8},
    backward_flops=40,
    recompute_factor=1.0,
)


def test_rows_of_stages_follow_each_other_and_what_they_share_is_added() -> None:
    whole = join_stages([FIRST, SECOND])
    assert [cost.path for cost in whole.modules] == ["", "layers", "layers.0", "layers.1"]
    assert [(cost.params, cost.flops, cost.ms, cost.calls) for cost in whole.modules] == [
        (15, 60, 3.0, 4), (15, 60, 3.0, 0), (12, 40, 2.0, 4), (3, 20, 1.0, 4),
    ]  # fmt: skip
    assert whole.operations == {"mm": 52, "bmm": 8}
    assert (whole.backward_flops, whole.recompute_factor) == (120, 1.0)


def test_one_of_several_micro_batches() -> None:
    one = per_micro_batch(FIRST, 4)
    assert (one.total.flops, one.total.ms, one.total.calls, one.total.params) == (10, 0.5, 1, 12)
    assert (one.operations, one.backward_flops) == ({"mm": 10}, 20)


def test_a_line_for_each_rank_says_who_has_more_than_its_share() -> None:
    _, first, second = stage_lines([FIRST, SECOND]).splitlines()
    assert " ".join(first.split()) == "0 12 parameters 40 FLOPs + 80 FLOPs 2.00 ms forward 1.33 of the mean"
    assert second.endswith("0.67 of the mean")
