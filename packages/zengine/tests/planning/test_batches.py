"""What a model is given, by shape or by factory."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from zengine.planning.models import NotAFactory, factory_batches, shaped_batches, token_batches


def test_ids_and_inputs_have_the_size_of_the_micro_batch_first() -> None:
    assert (token_batches(7)(3).shape, token_batches(7)(3).dtype) == ((3, 7), torch.long)
    assert (shaped_batches("3x5x5", torch.bfloat16)(2).shape, shaped_batches("9", torch.bfloat16)(2).dtype) == (
        (2, 3, 5, 5),
        torch.bfloat16,
    )


@pytest.mark.parametrize("text", ["", "3x", "ax2", "0x3", "3,4"])
def test_other_text_is_no_shape(text: str) -> None:
    with pytest.raises(ValueError, match="is not the shape of a sample; write, for example, 3x224x224 or 512"):
        shaped_batches(text, torch.float32)


def test_a_factory_takes_the_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "my_batch_file.py").write_text("def good(size):\n    return [0] * size\n\ndef bad():\n    return 0\n")
    assert factory_batches("my_batch_file:good")(3) == [0, 0, 0]
    with pytest.raises(NotAFactory, match="must take the micro-batch size"):
        factory_batches("my_batch_file:bad")
