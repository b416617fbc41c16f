from pathlib import Path

import pytest

from zckpt import CheckpointInputError
from zckpt.interchange import detect_format

FIXTURES = Path(__file__).resolve().parents[1] / "fixtures" / "deepspeed"


def test_each_kind_is_told_by_its_files(tmp_path: Path) -> None:
    assert detect_format(FIXTURES / "zero3_bf16") == "deepspeed"  # and not the pytorch_model.bin that lies in it
    assert detect_format(FIXTURES / "zero1_fp32" / "global_step3") == "deepspeed"
    assert detect_format(FIXTURES / "zero3_bf16" / "pytorch_model.bin") == "state_dict"
    for name in ("model.safetensors", "model.safetensors.index.json", "pytorch_model.bin.index.json"):
        folder = tmp_path / name.replace(".", "_")
        folder.mkdir()
        (folder / name).touch()
        assert detect_format(folder) == "huggingface"
    (tmp_path / ".metadata").touch()
    assert detect_format(tmp_path) == "dcp"


def test_anything_else_is_an_error_that_lists_what_is_read(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").touch()
    for path in (tmp_path, tmp_path / "notes.txt", tmp_path / "absent"):
        with pytest.raises(
            CheckpointInputError, match=r"a DeepSpeed checkpoint.*a torch distributed one.*Hugging Face"
        ):
            detect_format(path)
