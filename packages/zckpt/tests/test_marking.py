import itertools

import pytest

from zckpt.marking import Home, Remark, home, is_marker, named, remark, tag_of, unfinished

A, B = "00000000000000aa", "00000000000000bb"
MINE = Home("step-1", A)


def test_a_home_says_tag_and_attempt() -> None:
    assert home(MINE.name) == MINE
    assert home(f"a@b@{A}") == Home("a@b", A)
    assert [home(name) for name in ("step-1", f"@{A}", "x@00", f"x@{A.upper()}")] == [None] * 4
    assert unfinished(f".tmp-step-1-{A}") == MINE
    assert unfinished(f".old-step-1-{A}") is None
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
    assert named({MINE: data}) == {f".tmp-step-1-{A}": MINE}
    assert named({MINE: [*data, "committed"]}) == {"step-1": MINE}
    assert named({MINE: ["committed", f"aside-{B}"]}) == {f".old-step-1-{B}": MINE}
    assert named({MINE: [f"aside-{B}"]}) == {f".tmp-step-1-{A}": MINE}


def test_of_two_committed_ones_each_order_of_the_listing_names_the_same() -> None:
    homes = {Home("x", A): ["committed"], Home("x", B): ["committed"], Home("y", A): ["committed"]}
    for order in itertools.permutations(homes):
        found = named({each: homes[each] for each in order})
        assert found == {"x": Home("x", B), f".old-x-{B}": Home("x", A), "y": Home("y", A)}


@pytest.mark.parametrize(
    ("present", "new", "change"),
    [
        ([], "step-1", Remark(("committed",), ())),
        (["committed"], f".old-step-1-{B}", Remark((f"aside-{B}",), ())),
        (["committed", f"aside-{B}"], "step-1", Remark((), (f"aside-{B}",))),
        (["committed"], f".tmp-step-1-{A}", Remark((), ("committed",))),
        (["committed", f"aside-{B}"], f".tmp-step-1-{A}", Remark((), ("committed", f"aside-{B}"))),
    ],
)
def test_each_renaming_gives_the_new_name_and_begins_with_one_decisive_change(
    present: list[str], new: str, change: Remark
) -> None:
    assert remark(MINE, present, new) == change
    after = {*present, *change.write} - set(change.remove)
    assert named({MINE: after}) == {new: MINE}


def test_other_names_are_refused() -> None:
    for new in ("step-2", f".tmp-step-1-{B}", f".old-step-2-{B}", "latest"):
        assert remark(MINE, ["committed"], new) is None
