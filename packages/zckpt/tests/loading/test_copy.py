import math
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from zckpt.format.regions import Region, Runs, box_numel, intersect, whole_box
from zckpt.format.safetensors_layout import _NAMES
from zckpt.loading import copy as transfer
from zckpt.loading.copy import PieceSource, copy_runs, fill, windows
from zckpt.storage.storage import LOCAL


def runs_of(*triples: tuple[int, int, int]) -> Runs:
    target, source, length = (np.array(each, dtype=np.int64) for each in zip(*triples))
    return Runs(target=target, source=source, length=length)


def region(shape: tuple[int, ...], draw) -> Region:
    box = tuple(tuple(sorted((draw(st.integers(0, n)), draw(st.integers(0, n))))) for n in shape)
    box = tuple((0, n) if draw(st.booleans()) else side for n, side in zip(shape, box))
    ends = sorted((draw(st.integers(0, box_numel(box))), draw(st.integers(0, box_numel(box)))))
    return Region(box, (ends[0], ends[1]) if draw(st.booleans()) else (0, box_numel(box)))


def cut(numbers: torch.Tensor, where: Region) -> torch.Tensor:
    part = numbers[(*(slice(lo, hi) for lo, hi in where.box), ...)]
    return part.reshape(-1)[slice(*where.span)].clone()


@settings(max_examples=150, deadline=None)
@given(st.data(), st.sampled_from([16, 64, 1 << 23]), st.sampled_from([0, 8, 1 << 16]), st.sampled_from([0, 2048]))
def test_any_region_is_filled_from_any_other_through_any_window(data, window: int, gap: int, strided: int) -> None:
    """Against slicing a whole tensor, with windows and gaps small enough to cut everywhere."""
    shape = data.draw(st.lists(st.integers(1, 6), min_size=0, max_size=4).map(tuple))
    numbers = torch.arange(math.prod(shape), dtype=torch.int16).reshape(shape)
    wanted, stored = region(shape, data.draw), region(shape, data.draw)
    bytes_ = b"junk" + cut(numbers, stored).numpy().tobytes()

    class Memory:
        nbytes = len(bytes_)
        step_nbytes = 1 << 20

        def read_into(self, offset: int, buffer: memoryview) -> None:
            assert offset >= 4
            assert offset + len(buffer) <= len(bytes_)
            assert 0 < len(buffer) < 2 * window
            buffer[:] = bytes_[offset : offset + len(buffer)]

    target = torch.full((wanted.numel,), -1, dtype=torch.int16)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(transfer, "WINDOW_NBYTES", window)
        patch.setattr(transfer, "GAP_NBYTES", gap)
        patch.setattr(transfer, "_STRIDED_NUMEL", strided)
        fill(target, PieceSource(Memory(), 4, torch.int16), intersect(wanted, stored))  # type: ignore[arg-type]
    mine = cut(numbers, wanted)
    held = torch.isin(mine, cut(numbers, stored))
    assert target.equal(torch.where(held, mine, torch.tensor(-1, dtype=torch.int16)))


def test_windows_join_near_runs_and_split_long_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfer, "WINDOW_NBYTES", 100)
    monkeypatch.setattr(transfer, "GAP_NBYTES", 10)
    made = [each.source.tolist() for each in windows(runs_of((0, 0, 5), (5, 10, 5), (10, 60, 5), (15, 200, 250)), 1)]
    assert made == [[0, 10], [60], [200], [300], [400]]


def test_only_the_bytes_that_are_needed_are_read(tmp_path: Path) -> None:
    values = torch.arange(1_000_000, dtype=torch.float32)
    (tmp_path / "f").write_bytes(values.numpy().tobytes())
    shape = (1000, 1000)
    with LOCAL.open(tmp_path / "f") as reader:
        source = PieceSource(reader, 0, torch.float32)
        rows = Region(((10, 20), (0, 1000)), (0, 10_000))
        target = torch.zeros(10_000)
        assert fill(target, source, intersect(rows, Region(whole_box(shape), (0, 1_000_000)))) == 40_000
        assert target.equal(values[10_000:20_000])


@pytest.mark.parametrize("dtype", list(_NAMES))
@pytest.mark.parametrize("strided", [0, 2048])
def test_bits_are_copied_whatever_the_dtype(
    dtype: torch.dtype, strided: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transfer, "_STRIDED_NUMEL", strided)
    generator = torch.Generator().manual_seed(0)
    bits = torch.randint(0, 2 if dtype is torch.bool else 256, (200 * dtype.itemsize,), generator=generator)
    source = bits.to(torch.uint8).view(dtype)
    target = torch.zeros(200 * dtype.itemsize, dtype=torch.uint8).view(dtype)
    triples = [(3 * i, i * i % 150, 1 + i % 3) for i in range(40)]
    copy_runs(target, source, runs_of(*triples))
    expected = torch.zeros(200 * dtype.itemsize, dtype=torch.uint8).view(dtype)
    for into, take, length in triples:
        expected.view(torch.uint8)[into * dtype.itemsize : (into + length) * dtype.itemsize] = source.view(
            torch.uint8
        )[take * dtype.itemsize : (take + length) * dtype.itemsize]
    assert target.view(torch.uint8).equal(expected.view(torch.uint8))


def test_a_view_inside_a_larger_tensor_is_filled_in_place(tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(torch.arange(12, dtype=torch.float32).numpy().tobytes())
    large = torch.zeros(10)
    whole = Region(whole_box((4, 3)), (0, 12))
    with LOCAL.open(tmp_path / "f") as reader:
        fill(large[2:6], PieceSource(reader, 0, torch.float32), intersect(Region(((0, 4), (1, 2)), (0, 4)), whole))
    assert large.tolist() == [0, 0, 1, 4, 7, 10, 0, 0, 0, 0]


def test_floats_are_converted_when_the_target_is_another_float(tmp_path: Path) -> None:
    values = torch.rand(100)
    (tmp_path / "f").write_bytes(values.numpy().tobytes())
    target = torch.zeros(100, dtype=torch.bfloat16)
    whole = Region(((0, 100),), (0, 100))
    with LOCAL.open(tmp_path / "f") as reader:
        fill(target, PieceSource(reader, 0, torch.float32), intersect(whole, whole))
    assert target.equal(values.bfloat16())


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_gpu_tensor_is_filled(tmp_path: Path) -> None:
    values = torch.rand(64, 8)
    (tmp_path / "f").write_bytes(values.numpy().tobytes())
    target = torch.zeros(64 * 3, device="cuda")
    wanted, stored = Region(((0, 64), (2, 5)), (0, 192)), Region(whole_box((64, 8)), (0, 512))
    with LOCAL.open(tmp_path / "f") as reader:
        fill(target, PieceSource(reader, 0, torch.float32), intersect(wanted, stored))
    assert target.cpu().equal(values[:, 2:5].reshape(-1))
