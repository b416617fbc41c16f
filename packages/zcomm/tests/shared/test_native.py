"""The extension of the shared-memory transport: its loader, its numbers, its arithmetic."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from zcomm.shared import native
from zcomm.shared.native import DTYPES, REDUCTIONS

needs_extension = pytest.mark.skipif(bool(native.unavailable_reason()), reason=native.unavailable_reason())


@pytest.fixture
def reloaded() -> Any:
    """Loading starts anew in the test, and after it."""
    native._load.cache_clear()
    yield
    native._load.cache_clear()


@needs_extension
def test_a_checkout_rejects_an_extension_older_than_its_sources(
    reloaded: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(native, "_checkout", lambda: Path("somewhere"))
    monkeypatch.setattr(native, "source_hash", lambda folder: "0" * 16)
    assert "is older than its sources in somewhere (run python3 tools/dev.py build)" in native.unavailable_reason()
    with pytest.raises(ImportError, match="older than its sources"):
        native.library()


def test_without_the_extension_the_reason_names_the_remedy(reloaded: None, monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(name: str) -> Any:
        raise ImportError(f"No module named {name!r}", name=name)

    monkeypatch.setattr(native.importlib, "import_module", absent)
    monkeypatch.setattr(native, "_checkout", lambda: None)
    assert "is not built (reinstall zcomm-torch with a C compiler on PATH)" in native.unavailable_reason()


def test_an_extension_that_does_not_load_is_a_reason_too(reloaded: None, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(name: str) -> Any:
        raise ImportError("libc is too old", name="_cffi_backend")

    monkeypatch.setattr(native.importlib, "import_module", broken)
    assert "does not load (libc is too old)" in native.unavailable_reason()


def test_other_systems_get_a_reason(reloaded: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native.sys, "platform", "darwin")
    assert native.unavailable_reason() == "it requires Linux, and this is darwin"


HEADER = Path(native.__file__).parent.parent / "csrc" / "zs_api.h"


def enumerated(first: str) -> list[str]:
    """The names of the C enumeration that begins with `first`, in its order."""
    found = re.search(rf"enum {{ ({first}[^}}]*) }}", HEADER.read_text())
    assert found is not None
    return found.group(1).replace("ZS_", "").lower().split(", ")


def test_operations_and_reductions_are_numbered_as_in_c() -> None:
    assert enumerated("ZS_ALL_REDUCE") == list(native.OPS)
    assert enumerated("ZS_SUM")[:-1] == list(native.REDUCTIONS)


def test_dtypes_that_can_be_reduced_are_numbered_as_in_c() -> None:
    codes = enumerated("ZS_FLOAT32")
    assert codes.pop() == "reducible"
    assert [native.dtype_name(code) for code in range(native.NUM_REDUCIBLE)] == codes


@needs_extension
def test_c_counts_as_many_reducible_dtypes() -> None:
    assert native.library().lib.zs_num_reducible() == native.NUM_REDUCIBLE


def test_a_dtype_can_be_moved_but_not_reduced_or_neither() -> None:
    assert native.is_supported(torch.float32, reduced=True)
    assert native.is_supported(torch.int16, reduced=False)
    assert not native.is_supported(torch.int16, reduced=True)
    assert not native.is_supported(torch.quint8, reduced=False)
    assert native.dtype_name(-1) == "nothing"


LEVELS = (0, 1, 2)  # plain, AVX2, AVX-512; on other processors the best below


def reduced(dtype: torch.dtype, op: str, sources: list[torch.Tensor], level: int, is_fresh: int = 0) -> torch.Tensor:
    """Sum of the sources in C at an instruction set, in two equal copies."""
    ffi, lib = native.library().ffi, native.library().lib
    outputs = [torch.empty_like(sources[0]) for _ in range(2)]
    places = [ffi.new("void *[]", [ffi.cast("void *", t.data_ptr()) for t in many]) for many in (sources, outputs)]
    lib.zs_set_level(level)
    try:
        numbers = DTYPES[dtype], REDUCTIONS.index(op)
        lib.zs_reduce(*numbers, len(sources), places[0], 2, places[1], sources[0].numel(), is_fresh)
    finally:
        lib.zs_set_level(LEVELS[-1])
    assert outputs[0].view(torch.uint8).equal(outputs[1].view(torch.uint8))
    return outputs[0]


TORCH = {"sum": torch.add, "max": torch.maximum, "min": torch.minimum}


@needs_extension
@pytest.mark.parametrize("op", REDUCTIONS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_every_16_bit_float_is_reduced_as_torch_does_it_at_every_level(dtype: torch.dtype, op: str) -> None:
    every = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(dtype)
    shuffled = every[torch.randperm(1 << 16, generator=torch.Generator().manual_seed(0))]
    for other in (shuffled, every, torch.zeros_like(every)):
        expected = TORCH[op](every.float(), other.float()).to(dtype)
        for level in LEVELS:
            found = reduced(dtype, op, [every, other], level)
            assert found.isnan().equal(expected.isnan())
            assert torch.where(found.isnan(), 0, found).equal(torch.where(found.isnan(), 0, expected))
        ways = [
            reduced(dtype, op, [every, other], level, is_fresh).view(torch.int16)
            for level in LEVELS
            for is_fresh in (0, 1)
        ]
        assert all(way.equal(ways[0]) for way in ways)


@needs_extension
@pytest.mark.parametrize("op", ["max", "min"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_maximum_keeps_nan_from_either_side(dtype: torch.dtype, op: str) -> None:
    values = torch.tensor([1.0, float("nan"), float("inf"), -float("inf"), -0.0, 3.0, 2.0], dtype=dtype)
    left, right = values.repeat_interleave(7), values.repeat(7)
    for sources in ([left, right], [left, right, left], [right, left, left]):
        found, expected = reduced(dtype, op, sources, 1), TORCH[op](left, right)
        assert found.isnan().equal(expected.isnan())
        assert found.nan_to_num(9.0).equal(expected.nan_to_num(9.0))


@needs_extension
def test_a_level_has_a_name() -> None:
    assert native.library().level() in ("base", "avx2", "avx512")


@needs_extension
@pytest.mark.parametrize("nbytes", [0, 1, 255, 256, 320, 1000, 4097])
@pytest.mark.parametrize("offset", [0, 1, 31, 63])
def test_a_copy_past_the_caches_is_a_copy(nbytes: int, offset: int) -> None:
    ffi, lib = native.library().ffi, native.library().lib
    source, target = torch.randint(256, (5000,)).to(torch.uint8), torch.full((5000,), 7, dtype=torch.uint8)
    before, place = target.clone(), slice(offset, offset + nbytes)
    lib.zs_stream(*(ffi.cast("void *", t.data_ptr() + offset) for t in (target, source)), nbytes)
    assert target[place].equal(source[place])
    target[place] = 7
    assert target.equal(before)
