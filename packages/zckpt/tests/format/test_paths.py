from pathlib import Path

import pytest

from zckpt import CheckpointInputError
from zckpt.format.paths import AttemptPaths, Leftover, LeftoverKind, check_tag, parse_leftover, tag_problem


@pytest.mark.parametrize("tag", ["step-100", "global_step12", "a b", "best (epoch 3)", "ü", "a" * 200, "v1.0"])
def test_names_of_one_folder_are_tags(tag: str) -> None:
    assert check_tag(tag) == tag


@pytest.mark.parametrize(
    "tag", ["", ".", "..", "../x", "/etc", "a/b", "a\\b", ".tmp-x", "latest", "a\n", " a", "a\0", "a" * 201, 7, None]
)
def test_everything_else_is_refused(tag: object) -> None:
    assert tag_problem(tag)
    with pytest.raises(CheckpointInputError, match="tag"):
        check_tag(tag)


def test_every_name_an_attempt_makes_is_recognised_as_its_remain() -> None:
    place = AttemptPaths(Path("/r"), "a-b", "0123456789abcdef")
    assert parse_leftover(place.folder.name) == Leftover(
        place.folder.name, LeftoverKind.UNFINISHED, "a-b", place.attempt
    )
    assert parse_leftover(place.aside.name) == Leftover(place.aside.name, LeftoverKind.ASIDE, "a-b", place.attempt)
    assert parse_leftover(place.new_latest.name) == Leftover(
        place.new_latest.name, LeftoverKind.POINTER, "", place.attempt
    )


@pytest.mark.parametrize(
    "name", ["latest", ".lock", "a", ".tmp-a-xyz", ".tmp", ".git", ".tmp-0123456789abcdef", "x.tmp"]
)
def test_names_of_others_are_not_ours_to_sweep(name: str) -> None:
    assert parse_leftover(name) is None
