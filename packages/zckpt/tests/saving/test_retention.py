import math
import random

import pytest

from zckpt import Best, CheckpointInputError, Retention
from zckpt.saving.retention import KEEP_ALL, Candidate, KeepAlso, decide, metrics_of


def run(*losses: float) -> list[Candidate]:
    """Checkpoints of steps 100, 200, ... with these losses."""
    return [
        Candidate(f"step-{100 * i}", 100 * i, {} if math.isinf(loss) else {"loss": loss})
        for i, loss in enumerate(losses, 1)
    ]


def kept(keep: Retention, found: list[Candidate], *pointed: str) -> list[int]:
    random.Random(len(found)).shuffle(found)
    return [verdict.candidate.step for verdict in decide(keep, found, pointed) if not verdict.is_removed]


def test_the_last_by_step_are_kept() -> None:
    assert kept(Retention(), run(1, 2, 3)) == [300]
    assert kept(Retention(last=2), run(1, 2, 3)) == [300, 200]
    assert kept(Retention(last=9), run(1, 2)) == [200, 100]
    assert decide(Retention(), [], ["gone"]) == []


def test_rules_add_up_and_each_says_why() -> None:
    found = [*run(5, 1, 3, 4, 2, 6), Candidate("release-1", 50, {}), Candidate("final", 60, {})]
    keep = Retention(last=1, every=300, best=("loss", "min"), tags="release-*")
    assert kept(keep, found) == [600, 300, 200, 50]
    reasons = {each.candidate.tag: each.reason for each in decide(keep, found, ["final"])}
    assert reasons == {
        "step-600": "one of the last 1",
        "step-300": "step divisible by 300",
        "step-200": "min loss",
        "release-1": "tag matches 'release-*'",
        "final": "`latest` names it",
        "step-500": "",
        "step-400": "",
        "step-100": "",
    }


def test_best_takes_either_end_and_the_newer_of_equals_and_ignores_what_has_no_number() -> None:
    found = run(2, 1, 1, math.nan, math.inf, 9)
    assert kept(Retention(best=("loss", "min")), found) == [600, 300]
    assert kept(Retention(best=("loss", "max", 2)), found) == [600, 100]
    assert kept(Retention(best=[Best("loss"), ("loss", "max", 2)]), found) == [600, 300, 100]
    assert kept(Retention(best="accuracy"), found) == [600]


def test_a_best_in_one_word() -> None:
    assert Best.parse("loss") == Best("loss", "min", 1)
    assert Best.parse("f1:max:3") == Best("f1", "max", 3)
    with pytest.raises(CheckpointInputError, match="'x' is not a number"):
        Best.parse("f1:max:x")


def test_the_one_that_latest_names_and_the_newest_are_kept_whatever_the_policy_says() -> None:
    class Nothing:
        def wants(self, found: object) -> dict[str, str]:
            return {}

    assert kept(Nothing(), run(1, 2, 3), "step-100") == [300, 100]  # type: ignore[arg-type]


def test_everything_keeps_everything() -> None:
    assert kept(KEEP_ALL, run(1, 2, 3)) == [300, 200, 100]  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"last": 0}, "last must be an int of at least 1, given 0"),
        ({"last": True}, "given True"),
        ({"every": -1}, "every must be an int of at least 0"),
        ({"best": ("loss", "low")}, "mode must be 'min' or 'max', given 'low'"),
        ({"best": ("loss", "min", 0)}, "count must be an int of at least 1"),
        ({"best": ("", "min")}, "metric must be the name of a metric"),
        ({"best": 3}, r"best must be \(metric, 'min' or 'max'\)"),
    ],
)
def test_what_makes_no_sense_is_refused_when_the_policy_is_made(options: dict[str, object], words: str) -> None:
    with pytest.raises(CheckpointInputError, match=words):
        Retention(**options)  # type: ignore[arg-type]


def test_metrics_are_the_numbers_under_their_key() -> None:
    assert metrics_of({"metrics": {"loss": 2, "f1": 0.5, "note": "x", "flag": True}}) == {"loss": 2.0, "f1": 0.5}
    assert metrics_of({"metrics": 3}) == metrics_of({}) == {}
    assert metrics_of({"metrics": {"loss": 10**400, "f1": 1}}) == {"f1": 1.0}


def test_the_one_that_was_saved_just_now_stays_whatever_its_step() -> None:
    found = run(1, 2, 3)
    assert kept(KeepAlso(Retention(), "step-100"), found) == [300, 100]  # type: ignore[arg-type]
