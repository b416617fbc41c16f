"""Phases of the compressed all-reduce in C, against those with torch's operations."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from zcomm.collectives import sign_kernels
from zcomm.collectives.sign_kernels import KernelPhases, phases_for
from zcomm.collectives.sign_layout import SignLayout
from zcomm.collectives.sign_phases import SignPhases, TorchPhases
from zcomm.shared import native

LEVELS = (0, 1, 2)  # plain, AVX2, AVX-512; on other processors the best below
CPU = torch.device("cpu")
BUFFERS = [(98304, [(0, 5), (8, 40_000), (40_000, 40_000), (40_008, 98_301)]), (96, [(0, 3), (16, 96)]), (96, [])]
LAYOUTS = [
    SignLayout.of_buffers(BUFFERS, 3),
    SignLayout.packed([5, 0, 17, 30_000], 2),
    SignLayout.packed([5, 0, 17, 30_000], 4, fused=True),
    SignLayout.by_tensor([5, 17, 3000], 2),
    SignLayout.by_tensor([5, 17], 2, padded=True),
]

needs_extension = pytest.mark.skipif(bool(native.unavailable_reason()), reason=native.unavailable_reason())


class Float64Phases(TorchPhases):
    """torch's phases with the kernel's sums of squares, in float64."""

    def _squares(self, pieces: list[Tensor]) -> Tensor:
        sums = [piece.double().square().sum() for piece in pieces]
        return torch.stack(sums) if sums else torch.zeros(0, dtype=torch.float64)


@pytest.fixture(params=LEVELS)
def level(request: pytest.FixtureRequest) -> Iterator[int]:
    lib = native.library().lib
    lib.zs_set_level(request.param)
    yield request.param
    lib.zs_set_level(LEVELS[-1])


def _values(layout: SignLayout, seed: int) -> list[Tensor]:
    """Buffers with zeros of both signs, and padding of 0."""
    generator, buffers = torch.Generator().manual_seed(seed), []
    for index, buffer in enumerate(layout.buffers):
        flat = torch.zeros(buffer.numel)
        for lo, hi in buffer.parts:
            flat[lo:hi] = torch.randn(hi - lo, generator=generator) * 10 ** (index - 1)
            flat[lo:hi:7], flat[lo:hi:11] = 0.0, -0.0
        buffers.append(flat)
    return buffers


def _call(phases: SignPhases, values: list[Tensor]) -> list[Tensor]:
    """One call in which all ranks send what this one sends; returns messages, their answer and the result."""
    size, rank = phases.layout.size, phases.rank
    sent = torch.zeros(size, phases.message_bytes, dtype=torch.uint8)
    phases.encode_worker(values, sent)
    received, own = torch.stack([sent[rank]] * size), sent[rank].clone()
    phases.encode_server(received, own)
    answers = sent.clone()  # of other owners: what was sent to them
    answers[rank] = own
    buffers = [torch.full_like(buffer, 7.0) for buffer in values]
    phases.decode(answers, buffers)
    rows = phases.layout.span_numel // 8
    return [sent[:, : phases.header_bytes + rows], own[: phases.header_bytes + rows], *buffers]


@needs_extension
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("threads", [1, 2])
def test_messages_results_and_errors_are_torchs_bit_for_bit(layout: SignLayout, threads: int, level: int) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        for rank in (0, layout.size - 1):
            ours, rule = KernelPhases(layout, rank, CPU), Float64Phases(layout, rank, CPU)
            for call in range(4):
                values = _values(layout, call)
                for found, wanted in zip(_call(ours, values), _call(rule, values), strict=True):
                    assert torch.equal(found.view(torch.uint8), wanted.view(torch.uint8))
                if call == 1:
                    continue  # errors of the last call enter the next one without having been written
                ours.settle()
                assert torch.equal(ours.worker, rule.worker)
                assert torch.equal(ours.server, rule.server)
    finally:
        torch.set_num_threads(before)


@needs_extension
@pytest.mark.parametrize("layout", LAYOUTS)
def test_scales_are_those_of_torch_to_the_rounding_of_its_sums(layout: SignLayout) -> None:
    ours, rule = KernelPhases(layout, 0, CPU), TorchPhases(layout, 0, CPU)
    values = _values(layout, 1)
    (sent, own, *_), (rule_sent, rule_own, *_) = _call(ours, values), _call(rule, values)
    for message, wanted in ((sent[0], rule_sent[0]), (own, rule_own)):
        scales, expected = ours.scales_of(message, 0), rule.scales_of(wanted, 0)
        assert torch.allclose(scales, expected, rtol=2e-5, atol=0)
        assert torch.equal(scales == 0, expected == 0)
    assert torch.equal(sent[:, ours.header_bytes :], rule_sent[:, ours.header_bytes :])


@needs_extension
def test_other_dtypes_are_copied() -> None:
    layout = SignLayout.packed([300, 9], 2)
    wide, half = KernelPhases(layout, 0, CPU), KernelPhases(layout, 0, CPU)
    values = [each.bfloat16() for each in _values(layout, 3)]
    for found, wanted in zip(_call(half, values), _call(wide, [each.float() for each in values]), strict=True):
        assert torch.equal(found.float(), wanted.to(found.dtype).float())


@needs_extension
def test_a_nan_is_negative_as_in_torch() -> None:
    layout = SignLayout.packed([16], 2)
    values = torch.zeros(layout.buffers[0].numel)
    values[3] = torch.nan
    ours, rule = (_call(each(layout, 0, CPU), [values]) for each in (KernelPhases, TorchPhases))
    assert torch.equal(ours[0][0, -1:], rule[0][0, -1:])


def test_without_the_extension_and_on_other_devices_torch_encodes(monkeypatch: pytest.MonkeyPatch) -> None:
    layout = SignLayout.packed([16], 2)
    for device in ("meta", "cuda"):
        if device == "meta" or torch.cuda.is_available():
            assert type(phases_for(layout, 0, torch.device(device))) is TorchPhases
    assert type(phases_for(SignLayout.packed([16], 1), 0, CPU)) is TorchPhases
    monkeypatch.setattr(sign_kernels.native, "unavailable_reason", lambda: "it is not built")
    assert type(phases_for(layout, 0, CPU)) is TorchPhases
