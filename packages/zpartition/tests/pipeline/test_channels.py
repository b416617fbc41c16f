from collections.abc import Sequence
from typing import Any

import pytest
import torch

import zcomm
from zcomm.testing import RankFailed, run_ranks
from zpartition import ModelParallelGroup
from zpartition.pipeline.channels import Channels, PendingReceive

SENT = [
    torch.arange(6.0).reshape(2, 3).requires_grad_(),
    (torch.ones(3, dtype=torch.bfloat16), None, torch.tensor(4), torch.zeros(0, 2), torch.tensor([True])),
]


def exchange() -> list[str]:
    rank, cpu, errors = torch.distributed.get_rank(), torch.device("cpu"), []
    channels = Channels(None, cpu)
    for edge, message in enumerate(SENT * 2):
        if rank == 0:
            channels.send(message, 1, edge % 2)
            continue
        got: Any = channels.receive(0, edge % 2)
        assert isinstance(got, tuple) == isinstance(message, tuple)
        for mine, its in zip(
            got if isinstance(got, tuple) else [got], message if isinstance(got, tuple) else [message]
        ):
            assert (mine is None) == (its is None)
            if mine is not None:
                assert (mine.dtype, mine.requires_grad, mine.is_leaf) == (its.dtype, its.requires_grad, True)
                assert torch.equal(mine, its)
    if rank == 0:
        for bad in (torch.zeros(1), [torch.zeros(1)], (torch.zeros(1, dtype=torch.complex64),), (None,) * 17):
            with pytest.raises((TypeError, ValueError)) as caught:
                channels.send(bad, 1, 0)
            errors.append(str(caught.value))
    channels.flush()
    channels.forget_shapes()
    if rank == 0:
        channels.send(torch.zeros(1), 1, 0)
    else:
        assert channels.receive(0, 0).shape == (1,)
    channels.flush()
    return errors


def test_messages_arrive_as_they_were_sent() -> None:
    errors = run_ranks(exchange, 2)[0]
    assert errors[0] == (
        "a pipeline stage sends [1] torch.float32 after [2, 3] torch.float32: micro-batches of different shapes need "
        "PipelineModule(dynamic_shape=True)"
    )
    assert errors[1].endswith("got a list among them")
    assert errors[2] == "a pipeline stage returns torch.complex64 of 1 dims: it cannot be sent"
    assert errors[3].endswith("got a tuple of 17")


def _crossing() -> list[list[float]]:
    """Both ranks send to each other in one exchange, twice; shapes travel with the first message of an edge."""
    rank, channels, launched = torch.distributed.get_rank(), Channels(None, torch.device("cpu")), []
    post, found = torch.distributed.batch_isend_irecv, []

    def noted(posted: list[Any]) -> list[Any]:
        launched.append(sorted((each.op.__name__, each.tensor.numel()) for each in posted))
        return post(posted)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.distributed, "batch_isend_irecv", noted)
        for number in range(2):
            values = [torch.full((3,), 10.0 * rank + number), torch.full((3,), 10.0 * rank + number + 5)]
            sends = [channels.prepare(value, 1 - rank, edge=2 + rank) for value in values]
            receives = [PendingReceive(channels, 1 - rank, edge=3 - rank) for _ in values]
            channels.exchange(sends, receives)
            found += [each.wait().tolist() for each in receives]
    channels.flush()
    data = [("irecv", 3)] * 2 + [("isend", 3)] * 2
    assert launched == [[("irecv", 2 + 16 * 11), ("isend", 2 + 16 * 11)], data, data]
    return found


def test_crossing_messages_are_launched_as_one() -> None:
    assert run_ranks(_crossing, 2) == [
        [[10.0] * 3, [15.0] * 3, [11.0] * 3, [16.0] * 3],
        [[0.0] * 3, [5.0] * 3, [1.0] * 3, [6.0] * 3],
    ]


def _in_parts(is_cut: bool, differs: bool) -> tuple[list[int], list[torch.Tensor]]:
    """Ranks 0 and 1 send to 2 and 3; returns elements of each receive, and what came."""
    groups = zcomm.Groups.of(zcomm.Degrees(pipeline=2, tensor=2))
    tensor = ModelParallelGroup.of(groups.tensor()) if is_cut else None
    channels, stage = Channels(groups.pipeline(), torch.device("cpu")), torch.distributed.get_rank() // 2
    sizes: list[int] = []
    post = Channels.post_receives

    def noted(self: Channels, pending: PendingReceive, made: Sequence[torch.Tensor]) -> None:
        sizes.extend(data.numel() for data in made)
        post(self, pending, made)

    generator, got = torch.Generator().manual_seed(1), []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Channels, "post_receives", noted)
        for _ in range(3):
            wide, odd = torch.randn(4, 6, generator=generator), torch.randn(5, generator=generator)
            wide += differs * torch.distributed.get_rank()
            message = (wide.requires_grad_(), odd, torch.arange(8))
            if stage == 0:
                channels.send(message, 1, 0, tensor)
            else:
                found = channels.expect_receive(0, 0, tensor).wait()
                assert [part.requires_grad for part in found] == [True, False, False]
                assert all(torch.equal(*pair) for pair in zip(found, message, strict=True))
                got += found
        channels.flush()
    return sizes, got


def test_tensor_ranks_send_their_parts_of_what_divides() -> None:
    header = 2 + 16 * 11
    whole = run_ranks(_in_parts, 4, False, False)
    parts = run_ranks(_in_parts, 4, True, False)
    for rank in (2, 3):
        assert whole[rank][0] == [header, *[24, 5, 8] * 3]
        assert parts[rank][0] == [header, *[12, 5, 8] * 3], "an odd size and whole numbers are sent whole"


def test_tensor_ranks_with_different_activations_raise_before_anything_is_sent() -> None:
    with pytest.raises(RankFailed, match=r"the 2 tensor ranks of a pipeline stage hand on different tensors"):
        run_ranks(_in_parts, 4, True, True)


def _later_message(dynamic: bool, batches: int, wrong: str) -> None:
    """Ranks 0 and 1 send two messages in each batch; the last one of rank 1 has another shape, dtype or value."""
    groups = zcomm.Groups.of(zcomm.Degrees(pipeline=2, tensor=2))
    tensor, rank = ModelParallelGroup.of(groups.tensor()), torch.distributed.get_rank()
    channels = Channels(groups.pipeline(), torch.device("cpu"), dynamic)
    changes = {"shape": torch.zeros(2, 6), "dtype": torch.zeros(4, 6).double(), "value": torch.ones(4, 6)}
    for batch in range(batches):
        channels.forget_shapes()
        for number in range(2):
            if rank >= 2:
                assert channels.expect_receive(0, 0, tensor).wait().shape == (4, 6)
                continue
            is_last = batch == batches - 1 and (number == 1) is dynamic
            channels.send(changes[wrong] if is_last and rank == 1 else torch.zeros(4, 6), 1, 0, tensor)
    channels.flush()


@pytest.mark.parametrize(
    ("dynamic", "batches", "wrong", "told"),
    [
        (True, 1, "shape", r"different shapes or dtypes \(rank 0: \[4, 6\] torch.float32; rank 1: \[2, 6\]"),
        (True, 1, "dtype", r"rank 1: \[4, 6\] torch.float64\), so each of them cannot send a part"),
        (False, 2, "shape", "hand on tensors of different shapes or dtypes"),
        (False, 2, "value", r"hand on different tensors of shape \(4, 6\)"),
    ],
)
def test_later_messages_of_tensor_ranks_are_compared_too(dynamic: bool, batches: int, wrong: str, told: str) -> None:
    with pytest.raises(RankFailed, match=told):
        run_ranks(_later_message, 4, dynamic, batches, wrong)
