from pathlib import Path

import pytest
import torch

from zengine.inference.sizes import Header, ModelSizes, available_bytes, bits_per_weight, check_memory, gigabytes
from zprecision.quant import Int4, Int8

HALF = torch.bfloat16
LLAMA = [
    Header("model.embed_tokens.weight", (1000, 64), HALF),
    Header("model.layers.0.self_attn.q_proj.weight", (64, 64), HALF),
    Header("model.layers.0.mlp.down_proj.weight", (64, 256), HALF),
    Header("model.layers.0.input_layernorm.weight", (64,), HALF),
    Header("model.rope.inverse", (32,), torch.int64),
]
HEAD = Header("lm_head.weight", (1000, 64), HALF)


def test_matrices_embeddings_and_a_tied_head_are_counted_apart() -> None:
    own, tied = ModelSizes.of([*LLAMA, HEAD]), ModelSizes.of(LLAMA)
    matrices = 64 * 64 + 64 * 256 + 64_000
    assert (own.matrix_numel, own.other_numel, own.tied_numel) == (matrices, 64_064, 0)
    assert (tied.matrix_numel, tied.other_numel, tied.tied_numel) == (matrices, 64_064, 64_000)
    assert (own.numel, tied.numel) == (matrices + 64_064, matrices + 64)
    assert own.nbytes(HALF) == 2 * own.numel
    assert own.nbytes(torch.float32, Int4()) == pytest.approx(matrices * 4.5 / 8 + 4 * 64_064, abs=1)
    assert own.dtype == HALF
    with pytest.raises(ValueError, match="no weights of floating point"):
        ModelSizes.of([LLAMA[-1]])


def test_matrices_that_are_codes_already_keep_their_size() -> None:
    plain = 2 * (64_000 + 64 * 64 + 64 * 256 + 64) + 8 * 32
    sizes = ModelSizes.of(LLAMA, coded_numel=10_000, file_nbytes=plain + 7000)
    assert (sizes.coded_nbytes, sizes.numel) == (7000, ModelSizes.of(LLAMA).numel + 10_000)
    for format in (None, Int8()):
        assert sizes.nbytes(HALF, format) == ModelSizes.of(LLAMA).nbytes(HALF, format) + 7000


def test_bits_are_those_of_the_formats() -> None:
    assert [bits_per_weight(each) for each in (Int8(), Int4(), Int4(scale="minmax"))] == [8.5, 4.5, 5.0]


def test_a_model_too_large_is_told_what_fits() -> None:
    sizes = ModelSizes(matrix_numel=10**9, other_numel=10**8, tied_numel=0, dtype=HALF)
    formats = (Int8(), Int4())

    def check(room_bytes: float) -> None:
        check_memory(sizes.nbytes(HALF), int(room_bytes), "gpt in bfloat16", sizes, HALF, formats)

    check(3e9)
    with pytest.raises(
        ValueError, match=r"gpt in bfloat16 needs 2.2 GB, and 1.5 GB .* available; --quant int8 needs"
    ):
        check(1.5e9)
    with pytest.raises(ValueError, match=r"available; --quant int4 needs 0.762 GB$"):
        check(1e9)
    with pytest.raises(ValueError, match=r"even int4 needs 0.762 GB: use a smaller model"):
        check(5e8)
    with pytest.raises(ValueError, match="available; use a smaller model"):
        check_memory(10, 1, "x", sizes, HALF, ())


def test_pages_of_files_in_a_control_group_are_available(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("zengine.inference.sizes._CGROUP", tmp_path)
    (tmp_path / "memory.max").write_text("10000000\n")
    (tmp_path / "memory.current").write_text("9000000\n")
    assert available_bytes() == 1_000_000
    (tmp_path / "memory.stat").write_text("anon 2000000\nfile 7000000\ninactive_file 4000000\nactive_file 2500000\n")
    assert available_bytes() == 7_500_000
    (tmp_path / "memory.max").write_text("max\n")
    assert available_bytes() > 7_500_000


def test_available_memory_is_between_nothing_and_a_petabyte() -> None:
    assert 1e6 < available_bytes() < 1e15
    assert [gigabytes(n) for n in (123_456, 62_000_000, 1.234e11)] == ["0.12 MB", "0.062 GB", "123 GB"]
