import pytest
import torch

from zckpt import CheckpointInputError, Shard, whole
from zckpt.saving import plan as planning
from zckpt.saving.plan import SavePlan, SaveRequest, ShardSlice, drop_objects, merge_proposals, propose


def shard(name: str, shape: tuple[int, ...], box, span, dtype=torch.float32) -> Shard:
    return Shard(name, shape, box, span, torch.zeros(span[1] - span[0], dtype=dtype))


def plan(*ranks: list[Shard], objects=({},), rank_objects=({},), requests=({},)) -> SavePlan:
    """One list of shards a rank; the other arguments repeat."""
    proposals = []
    for rank, shards in enumerate(ranks):
        request = SaveRequest(
            **{"tag": "a", "step": 1, "latest": True, "overwrite": "refuse", **requests[rank % len(requests)]}
        )
        proposal = propose(request, f"{rank:016x}", shards, objects[rank % len(objects)], rank_objects[0])
        proposals.append(drop_objects(proposal, rank))
    return merge_proposals(proposals)


def test_the_plan_is_rank_zeros_attempt_and_every_ranks_shards() -> None:
    w = [whole("w", torch.zeros(2, 3)), whole("e", torch.zeros(0))]
    made = plan(w, [whole("b", torch.zeros(3))])
    assert made.attempt == "0" * 16
    assert made.tensors == {"w": (torch.float32, (2, 3)), "e": (torch.float32, (0,)), "b": (torch.float32, (3,))}
    assert [[part.name for part in file.layout.parts] for file in made.files] == [["w"], ["b"]]
    assert [file.sources for file in made.files] == [(ShardSlice(0, 0, 6),), (ShardSlice(0, 0, 3),)]
    assert [file.name for file in made.files] == ["rank00000.safetensors", "rank00001.safetensors"]


def test_replicas_are_written_once_and_spread_by_bytes() -> None:
    sizes = [8, 7, 6, 5, 4, 3, 2, 1]
    shards = [whole(f"t{n}", torch.zeros(n)) for n in sizes]
    made = plan(shards, list(reversed(shards)), shards)
    written = [[part.name for part in file.layout.parts] for file in made.files]
    assert sorted(name for names in written for name in names) == sorted(f"t{n}" for n in sizes)
    loads = [sum(part.nbytes for part in file.layout.parts) // 4 for file in made.files]
    assert max(loads) <= 13  # 12 would be perfect
    for file, mine in zip(made.files, (shards, shards[::-1], shards)):
        assert [mine[source.index].name for source in file.sources] == [part.name for part in file.layout.parts]


def test_a_rank_with_much_of_its_own_writes_fewer_replicas() -> None:
    shared = [whole(f"s{i}", torch.zeros(2)) for i in range(4)]
    made = plan([*shared, whole("own", torch.zeros(100))], shared)
    assert [part.name for part in made.files[0].layout.parts] == ["own"]


def test_zero_spans_and_tensor_parallel_boxes_make_a_whole() -> None:
    left, right = ((0, 4), (0, 3)), ((0, 4), (3, 6))
    made = plan(
        [shard("w", (4, 6), left, (0, 5))],
        [shard("w", (4, 6), left, (5, 12))],
        [shard("w", (4, 6), right, (0, 12))],
        [shard("w", (4, 6), right, (12, 12))],
    )
    assert [(file.rank, len(file.layout.parts)) for file in made.files] == [(0, 1), (1, 1), (2, 1)]


def test_parts_of_a_file_lie_by_falling_itemsize() -> None:
    dtypes = [torch.bool, torch.float64, torch.bfloat16, torch.float32]
    made = plan([whole(str(dtype), torch.zeros(1, dtype=dtype)) for dtype in dtypes])
    assert [part.dtype.itemsize for part in made.files[0].layout.parts] == [8, 4, 2, 1]


def test_a_tensor_too_large_to_balance_is_cut_and_each_writer_has_a_file(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planning, "_MIN_NBYTES", 64)
    mine = [whole("big", torch.zeros(10, 101)), whole("small", torch.zeros(16))]
    made = plan(mine, mine, requests=[{"writers": 3}])
    names = ["rank00000", "rank00000-1", "rank00000-2", "rank00001", "rank00001-1", "rank00001-2"]
    assert [file.name for file in made.files] == [f"{name}.safetensors" for name in names]
    sizes = [sum(part.nbytes for part in file.layout.parts) for file in made.files]
    assert sum(sizes) == 4 * (1010 + 16)
    assert max(sizes) <= 1.25 * sum(sizes) / 6
    for file in made.files:
        for part, source in zip(file.layout.parts, file.sources):
            assert part.region.span == (source.start, source.stop)
            assert part.nbytes <= 4 * 1026 // 12


def test_no_cut_is_made_for_little_and_few_bytes_are_one_file() -> None:
    made = plan([whole("w", torch.zeros(1000)), whole("v", torch.zeros(1))], requests=[{"writers": 8}])
    assert [len(file.layout.parts) for file in made.files] == [2]


@pytest.mark.parametrize("writers", [0, 65, True, 1.0])
def test_the_number_of_writers_is_bounded(writers: object) -> None:
    with pytest.raises(CheckpointInputError, match="writers"):
        plan(W, requests=[{"writers": writers}])


W = [shard("w", (4,), ((0, 4),), (0, 4))]


@pytest.mark.parametrize(
    ("ranks", "words"),
    [
        (
            [[shard("w", (4,), ((0, 4),), (0, 2))], []],
            r"'w', float32 \(4,\), do not cover it exactly once: pieces cover 2 of 4",
        ),
        (
            [[shard("w", (4,), ((0, 4),), (0, 3))], [shard("w", (4,), ((0, 4),), (2, 4))]],
            "pieces overlap: .*0:3.*2:4",
        ),
        ([W, [shard("w", (5,), ((0, 5),), (0, 5))]], r"float32 \(4,\) on rank 0 and float32 \(5,\) on rank 1"),
        ([W, [shard("w", (4,), ((0, 4),), (0, 4), torch.float16)]], r"on rank 0 and float16 \(4,\) on rank 1"),
        ([[*W, *W]], "rank 0 passed tensor 'w' .* twice"),
    ],
)
def test_shards_that_do_not_make_their_tensors_are_refused(ranks: list[list[Shard]], words: str) -> None:
    with pytest.raises(CheckpointInputError, match=words):
        plan(*ranks)


@pytest.mark.parametrize(
    ("requests", "words"),
    [
        (({"tag": "a"}, {"tag": "b"}), r"disagree on tag \(save arguments\): 'a' \(rank 0, 2\), 'b' \(rank 1\)"),
        (({}, {"step": 2}), r"disagree on step .*1 \(rank 0, 2\), 2 \(rank 1\)"),
        (({}, {"overwrite": "replace"}), "disagree on overwrite"),
        (({}, {"latest": False}), "disagree on latest"),
    ],
)
def test_ranks_that_disagree_are_told_who_said_what(requests, words: str) -> None:
    with pytest.raises(CheckpointInputError, match=words):
        plan(W, W, W, requests=requests)


def test_objects_are_rank_zeros_and_others_give_the_same_or_none() -> None:
    assert plan(W, W, objects=({"a": 1}, {})).objects == {"a": 1}
    assert plan(W, W, objects=({"a": (1,)}, {"a": [1]})).objects == {"a": [1]}
    for other in ({"a": 2}, {"a": 1, "b": 1}, {"b": 1}):
        with pytest.raises(CheckpointInputError, match=r"objects\['[ab]'\] of rank 1 differs.*rank_objects"):
            plan(W, W, objects=({"a": 1}, other))


@pytest.mark.parametrize("step", [-1, 1.0, True, None, 2**62])
def test_a_step_is_a_whole_number(step: object) -> None:
    with pytest.raises(CheckpointInputError, match="step"):
        plan(W, requests=({"step": step},))


def test_the_same_proposals_give_the_same_plan() -> None:
    shards = [[whole(f"t{i}", torch.zeros(3)) for i in order] for order in ([0, 1, 2], [2, 1, 0])]
    assert plan(*shards) == plan(*shards)
