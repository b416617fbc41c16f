import itertools

import pytest

from zckpt.storage.rename_marker import (
    AttemptFolder,
    MarkerChange,
    is_marker,
    parse_attempt_folder,
    plan_rename,
    tag_of,
    unfinished_folder,
    visible_names,
)

A, B = "00000000000000aa", "00000000000000bb"
MINE = AttemptFolder("step-1", A)


def test_a_home_says_tag_and_attempt() -> None:
    assert parse_attempt_folder(MINE.name) == MINE
    assert parse_attempt_folder(f"a@b@{A}") == AttemptFolder("a@b", A)
    assert [parse_attempt_folder(name) for name in ("step-1", f"@{A}", "x@00", f"x@{A.upper()}")] == [None] * 4
    assert unfinished_folder(f".tmp-step-1-{A}") == MINE
    assert unfinished_folder(f".old-step-1-{A}") is None
    assert [tag_of(name) for name in ("x", f".old-x-{A}", "latest", ".lock", f".latest-{A}")] == [
        "x",
        "x",
        "",
        "",
        "",
    ]
    assert [is_marker(name) for name in ("committed", f"aside-{B}", "manifest.json", "aside-1")] == [
        True,
        True,
        False,
        False,
    ]


def test_the_name_follows_from_the_markers() -> None:
    data = ["manifest.json", "rank00000.safetensors"]
    assert visible_names({MINE: data}) == {f".tmp-step-1-{A}": MINE}
    assert visible_names({MINE: [*data, "committed"]}) == {"step-1": MINE}
    assert visible_names({MINE: ["committed", f"aside-{B}"]}) == {f".old-step-1-{B}": MINE}
    assert visible_names({MINE: [f"aside-{B}"]}) == {f".tmp-step-1-{A}": MINE}


def test_of_two_committed_ones_each_order_of_the_listing_names_the_same() -> None:
    folders = {
        AttemptFolder("x", A): ["committed"],
        AttemptFolder("x", B): ["committed"],
        AttemptFolder("y", A): ["committed"],
    }
    for order in itertools.permutations(folders):
        found = visible_names({each: folders[each] for each in order})
        assert found == {"x": AttemptFolder("x", B), f".old-x-{B}": AttemptFolder("x", A), "y": AttemptFolder("y", A)}


@pytest.mark.parametrize(
    ("present", "new", "change"),
    [
        ([], "step-1", MarkerChange(("committed",), ())),
        (["committed"], f".old-step-1-{B}", MarkerChange((f"aside-{B}",), ())),
        (["committed", f"aside-{B}"], "step-1", MarkerChange((), (f"aside-{B}",))),
        (["committed"], f".tmp-step-1-{A}", MarkerChange((), ("committed",))),
        (["committed", f"aside-{B}"], f".tmp-step-1-{A}", MarkerChange((), ("committed", f"aside-{B}"))),
    ],
)
def test_each_renaming_gives_the_new_name_and_begins_with_one_decisive_change(
    present: list[str], new: str, change: MarkerChange
) -> None:
    assert plan_rename(MINE, present, new) == change
    after = {*present, *change.write} - set(change.remove)
    assert visible_names({MINE: after}) == {new: MINE}


def test_other_names_are_refused() -> None:
    for new in ("step-2", f".tmp-step-1-{B}", f".old-step-2-{B}", "latest"):
        assert plan_rename(MINE, ["committed"], new) is None
