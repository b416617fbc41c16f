import pytest
import torch
from safetensors.torch import save as safetensors_save

from zckpt import CheckpointInputError
from zckpt.format import canonical
from zckpt.format.safetensors_layout import _NAMES, dtype_name, dtype_of


@pytest.mark.parametrize("dtype", list(_NAMES))
def test_names_are_those_of_the_safetensors_library(dtype: torch.dtype) -> None:
    data = safetensors_save({"x": torch.zeros(2, dtype=torch.uint8).repeat(16).view(dtype)})
    header = canonical.load(data[8 : 8 + int.from_bytes(data[:8], "little")])
    assert header["x"]["dtype"] == dtype_name(dtype)
    assert dtype_of(dtype_name(dtype)) is dtype


def test_a_dtype_without_a_name_is_refused_with_the_list() -> None:
    with pytest.raises(CheckpointInputError, match=r"complex128 cannot be stored.*bfloat16"):
        dtype_name(torch.complex128)
    assert dtype_of("F128") is None
