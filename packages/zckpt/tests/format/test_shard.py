from collections import namedtuple

import pytest
import torch

from zckpt import CheckpointInputError, Shard, whole
from zckpt.format.shard import check_shard, check_shard_again

Other = namedtuple("Other", "name global_shape box span tensor")


def test_whole_shares_the_memory_of_the_tensor() -> None:
    tensor = torch.zeros(2, 3, requires_grad=True)
    shard = whole("w", tensor)
    assert (shard.box, shard.span, shard.tensor.shape) == (((0, 2), (0, 3)), (0, 6), (6,))
    shard.tensor[4] = 1
    assert tensor[1, 1] == 1


def test_a_scalar_and_an_empty_tensor_have_addresses() -> None:
    assert (whole("s", torch.tensor(1.0)).box, whole("s", torch.tensor(1.0)).span) == ((), (0, 1))
    assert whole("e", torch.zeros(0, 3)).span == (0, 0)


def test_a_tensor_whose_memory_cannot_be_shared_is_refused() -> None:
    with pytest.raises(CheckpointInputError, match=r"'w' of shape \(3, 2\).*not contiguous"):
        whole("w", torch.zeros(2, 3).t())


def test_foreign_shards_need_only_the_five_attributes() -> None:
    check_shard(Other("w", torch.Size([2, 3]), [[0, 1], [0, 3]], [0, 3], torch.zeros(3)))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"name": ""}, "1 to 1024 characters"),
        ({"name": "a\nb"}, "control characters"),
        ({"name": "__metadata__"}, "reserved by the safetensors format"),
        ({"name": 3}, "must be a str"),
        ({"span": (0, 5)}, "5 elements, the length of span"),
        ({"span": (0, 7)}, "span 0:7 is outside"),
        ({"span": 3}, "must be a tuple"),
        ({"box": ((0, 2),)}, "1 dims, the tensor 2"),
        ({"box": ((0, 2), (0,))}, "must be a tuple"),
        ({"tensor": torch.zeros(2, 3)}, r"1-D.*given shape \(2, 3\)"),
        ({"tensor": torch.zeros(12)[::2]}, r"contiguous.*strides \(2,\)"),
        ({"tensor": torch.zeros(6, device="meta")}, "meta device"),
        ({"tensor": torch.zeros(6).to_sparse()}, "plain strided"),
        ({"tensor": [0] * 6}, "not list"),
        ({"tensor": torch.zeros(6, dtype=torch.complex128)}, "complex128 cannot be stored"),
    ],
)
def test_an_address_that_does_not_fit_its_tensor_is_refused(change: dict[str, object], words: str) -> None:
    fields = {
        "name": "w",
        "global_shape": (2, 3),
        "box": ((0, 2), (0, 3)),
        "span": (0, 6),
        "tensor": torch.zeros(6),
    }
    with pytest.raises(CheckpointInputError, match=words):
        Shard(**{**fields, **change})


def test_a_shard_whose_tensor_changed_since_it_was_made_is_refused_again() -> None:
    shard = whole("w", torch.zeros(2, 3))
    check_shard_again(shard)
    shard.tensor.resize_(5)
    with pytest.raises(CheckpointInputError, match=r"'w'.* of 6 elements.*given shape \(5,\)"):
        check_shard_again(shard)
    foreign = Other("w", (4,), ((0, 5),), (0, 4), torch.zeros(4))
    with pytest.raises(CheckpointInputError, match="'w'"):
        check_shard_again(foreign)
