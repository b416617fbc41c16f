import pickle
from collections import OrderedDict
from typing import Any

import pytest
import torch

from zckpt import CheckpointCorrupt
from zckpt.containers.torch_file import find_global
from zckpt.containers.unpickler import Constructor, DataUnpickler, Record

STORAGE = torch.arange(12.0)


def rebuild(*args: Any) -> torch.Tensor:
    made = find_global("torch._utils _rebuild_tensor_v2").make(*args)
    assert isinstance(made, torch.Tensor)
    return made


def test_a_tensor_is_a_view_of_its_storage() -> None:
    made = rebuild(STORAGE, 2, (2, 3), (1, 2), False, OrderedDict())
    assert made.tolist() == [[2, 4, 6], [3, 5, 7]]
    assert made.data_ptr() == STORAGE.data_ptr() + 8
    assert rebuild(STORAGE, 12, (0, 5), (5, 1)).shape == (0, 5)
    assert rebuild(STORAGE, 11, (), ()).item() == 11


@pytest.mark.parametrize(
    "args",
    [
        (STORAGE, 0, (13,), (1,)),
        (STORAGE, 1, (12,), (1,)),
        (STORAGE, 0, (2, 2), (11, 1)),
        (STORAGE, -1, (2,), (1,)),
        (STORAGE, 0, (2,), (-1,)),
        (STORAGE, 0, (2**61, 2**61), (2**61, 1)),
        (STORAGE, 0, (10**9,), (0,)),
        (STORAGE, 0, (2,), (1, 1)),
        (STORAGE, 0, (6, 6), (1, 1)),
        (STORAGE, 0, (True,), (1,)),
        (STORAGE, 0, ("2",), (1,)),
        (STORAGE.view(3, 4), 0, (2,), (1,)),
        ("storage", 0, (2,), (1,)),
        ([1.0, 2.0], 0, (2,), (1,)),
        (STORAGE, 0, (1,) * 65, (1,) * 65),
    ],
)
def test_a_tensor_that_reaches_outside_its_storage_is_refused(args: tuple[Any, ...]) -> None:
    with pytest.raises((ValueError, TypeError)):
        rebuild(*args)


def test_dtypes_without_storages_come_as_bytes() -> None:
    make = find_global("torch._utils _rebuild_tensor_v3").make
    data = torch.arange(8, dtype=torch.uint8)
    assert make(data, 1, (2,), (1,), False, {}, torch.uint16).tolist() == [0x0302, 0x0504]
    with pytest.raises(ValueError):
        make(data, 0, (5,), (1,), False, {}, torch.uint16)
    with pytest.raises(TypeError):
        make(STORAGE, 0, (1,), (1,), False, {}, torch.uint16)


def test_classes_of_deepspeed_are_data() -> None:
    made = find_global("deepspeed.runtime.fp16.loss_scaler DynamicLossScaler").make()
    assert isinstance(made, Record)
    assert made.kind == "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler"
    assert find_global("deepspeed.runtime.zero.config ZeroStageEnum").make(2).args == (2,)


@pytest.mark.parametrize(
    "name",
    ["os system", "posix system", "builtins eval", "builtins getattr", "torch load", "torch.hub load", "torch._C x",
     "torch.storage _load_from_bytes", "deepspeedy x", "collections namedtuple", "functools partial", "numpy load",
     "torch nn", "torch.nn Linear", "torch  float32"],
)  # fmt: skip
def test_everything_else_is_an_error_with_its_name(name: str) -> None:
    with pytest.raises(CheckpointCorrupt, match="not allowed"):
        find_global(name)


def test_a_parameter_and_a_tensor_with_attributes_are_their_tensor() -> None:
    inner = find_global("torch._utils _rebuild_tensor_v2")
    wrap, parameter = (
        find_global("torch._tensor _rebuild_from_type_v2").make,
        find_global("torch._utils _rebuild_parameter").make,
    )
    assert wrap(inner, None, (STORAGE, 0, (2,), (1,)), {}).tolist() == [0, 1]
    assert parameter(STORAGE, True, {}) is STORAGE
    for wrong in (Constructor("collections OrderedDict", dict), find_global("torch._tensor _rebuild_from_type_v2")):
        with pytest.raises(TypeError):
            wrap(wrong, None, (), {})
    with pytest.raises(TypeError):
        parameter([1])


def test_small_values_of_torch_have_plain_forms() -> None:
    value = [torch.Size([2, 3]), torch.float16, torch.device("cpu"), torch.bfloat16, {1, 2}]
    made = DataUnpickler(find_global, lambda told: told).run(pickle.dumps(value, 2))
    assert made == [(2, 3), torch.float16, "cpu", torch.bfloat16, {1, 2}]
