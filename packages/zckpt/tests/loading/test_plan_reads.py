import pytest
import torch

from zckpt import CheckpointInputError, CheckpointMismatch, Shard, whole
from zckpt.format.manifest import Manifest, Piece, TensorEntry
from zckpt.format.regions import Region
from zckpt.loading.plan_reads import check_problems, merge_plans, plan_read


def manifest(**tensors: tuple[torch.dtype, tuple[int, ...]]) -> Manifest:
    return Manifest(
        tag="t",
        step=0,
        attempt="0" * 16,
        world_size=1,
        tensors={
            name: TensorEntry(
                dtype,
                shape,
                tuple(
                    Piece("f", f"{name}{i}", Region(((0, shape[0]),), (i, i + 1)), 0, 4, 4096, "")
                    for i in range(shape[0])
                ),
            )
            for name, (dtype, shape) in tensors.items()
        },
        files={},
        objects={},
        rank_objects=({},),
        libraries={},
    )


def problems(stored: Manifest, *ranks: list[Shard], strict: bool = True, cast: bool = False) -> str:
    _, found = merge_plans([plan_read(stored, shards, cast=cast).as_json() for shards in ranks], stored)
    try:
        check_problems(found, strict=strict, where="checkpoint r/a")
    except CheckpointMismatch as error:
        return str(error)
    return ""


F = torch.float32


def test_the_plan_takes_only_the_pieces_that_are_touched() -> None:
    made = plan_read(manifest(w=(F, (5,))), [Shard("w", (5,), ((0, 5),), (1, 3), torch.zeros(2))], cast=False)
    assert [piece.key for piece in made.items[0].pieces] == ["w1", "w2"]


def test_every_kind_of_misfit_is_listed_at_once() -> None:
    text = problems(
        manifest(a=(F, (2,)), b=(F, (2,)), c=(torch.int64, (2,)), d=(F, (2,))),
        [
            whole("a", torch.zeros(3)),
            whole("b", torch.zeros(2)),
            whole("c", torch.zeros(2)),
            whole("x", torch.ones(4)),
        ],
    )
    assert text == (
        "checkpoint r/a does not match the tensors to load; nothing was loaded.\n"
        "1 missing (wanted, not in the checkpoint):\n  x: float32 (4,)\n"
        "1 extra (in the checkpoint, not wanted):\n  d: float32 (2,)\n"
        "1 of another shape:\n  a: wanted float32 (3,), stored (2,)\n"
        "1 of another dtype:\n  c: wanted float32 (2,), stored int64"
    )


def test_the_first_ten_of_many_are_shown() -> None:
    text = problems(manifest(), [whole(f"t{i:02d}", torch.zeros(1)) for i in range(13)])
    assert "13 missing" in text
    assert "t09" in text
    assert "t10" not in text
    assert "... and 3 more" in text
    assert text.endswith("strict=False loads the other names.")


def test_a_lenient_read_still_refuses_shapes_and_dtypes() -> None:
    stored = manifest(a=(F, (2,)), b=(F, (2,)))
    assert problems(stored, [whole("x", torch.zeros(1))], strict=False) == ""
    assert "of another shape" in problems(stored, [whole("a", torch.zeros(1))], strict=False)


@pytest.mark.parametrize(
    ("stored", "wanted", "cast", "fits"),
    [
        (F, torch.float32, False, True),
        (F, torch.bfloat16, False, False),
        (F, torch.bfloat16, True, True),
        (torch.int64, torch.int32, True, False),
        (torch.int64, torch.float32, True, False),
        (F, torch.int64, True, False),
    ],
)
def test_only_floats_are_converted_and_only_on_request(stored, wanted, cast: bool, fits: bool) -> None:
    text = problems(manifest(a=(stored, (2,))), [whole("a", torch.zeros(2, dtype=wanted))], cast=cast)
    assert (text == "") == fits
    hint = stored.is_floating_point and wanted.is_floating_point
    assert fits or ("cast=True converts" in text) == hint


def test_a_name_is_extra_only_if_no_rank_wants_it_and_problems_of_all_ranks_are_one_list() -> None:
    stored = manifest(a=(F, (2,)), b=(F, (2,)))
    a, b = [whole("a", torch.zeros(2))], [whole("b", torch.zeros(2))]
    assert problems(stored, a, b) == ""
    assert "extra" in problems(stored, a, a)
    report, _ = merge_plans([plan_read(stored, shards, cast=False).as_json() for shards in (a, b)], stored)
    assert (report.loaded, report.missing, report.extra) == (("a", "b"), (), ())
    assert "1 missing" in problems(stored, a, [*b, whole("x", torch.zeros(1))])


def test_a_malformed_shard_is_refused_first() -> None:
    class Bad:
        name, global_shape, box, span, tensor = "w", (2,), ((0, 2),), (0, 2), torch.zeros(3)

    with pytest.raises(CheckpointInputError, match="2 elements"):
        plan_read(manifest(), [Bad()], cast=False)
