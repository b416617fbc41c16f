"""The fused path of decoding against torch in float64, and bit for bit against itself."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import attrs
import pytest
import torch
from random_decoders import FORMS, VOCABULARY, Form, make
from torch import Tensor, nn
from torch.nn import functional as F

from zengine.inference import fused
from zengine.inference.cache import KVCache, cache_bytes
from zengine.inference.decoder import DecoderPass
from zengine.inference.quantized import quantized
from zengine.inference.structure import MLP, Decoder, RotaryStyle
from zprecision.backends import native
from zprecision.decoding import run as fused_run
from zprecision.quant import Int4, Int8

LIBRARY = native.library()
needs_kernels = pytest.mark.skipif(LIBRARY is None, reason="the kernels are not built")
each_form = pytest.mark.parametrize("name", FORMS)
CAPACITY = 40


def tokens(length: int, seed: int = 0) -> Tensor:
    return torch.randint(0, VOCABULARY, (length,), generator=torch.Generator().manual_seed(seed))


def steps_of(decoder: Decoder, num_slots: int = 4, capacity: int = CAPACITY, **given: Any) -> DecoderPass:
    return DecoderPass(decoder, KVCache.create(decoder, num_slots, capacity, **given))


def decode(steps: DecoderPass, sequences: Sequence[Tensor], prompts: Sequence[int], slots: Sequence[int]) -> Tensor:
    """Compute a prompt of each sequence, then decode all to their ends together; (n, steps, vocabulary)."""
    for sequence, length, slot in zip(sequences, prompts, slots, strict=True):
        steps.cache.clear(slot)
        steps.forward(sequence[:length], slot)
    count = min(len(sequence) - length for sequence, length in zip(sequences, prompts, strict=True))
    rows = []
    for step in range(count):
        ids = torch.stack([sequence[length + step] for sequence, length in zip(sequences, prompts, strict=True)])
        rows.append(steps.forward_each(ids, slots))
    return torch.stack(rows, dim=1)


def exact(form: Form, sequence: Tensor) -> Tensor:
    """Logits after each token, in float64 by torch."""
    decoder = make(form, torch.float64)
    return DecoderPass(decoder, KVCache.create(decoder, 1, len(sequence))).forward_all(sequence, 0)


def error(found: Tensor, wanted: Tensor) -> float:
    return float((found - wanted).abs().max() / wanted.abs().max())


@pytest.fixture
def in_threads(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Small blocks get several threads, too."""
    monkeypatch.setattr(fused_run, "_THREAD_BYTES", 1)
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@needs_kernels
@each_form
def test_float32_is_within_1e5_of_float64(name: str) -> None:
    decoder, sequences = make(FORMS[name]), [tokens(21, 1), tokens(28, 2), tokens(17, 3)]
    steps = steps_of(decoder)
    assert steps.fused.reasons == {}
    found = decode(steps, sequences, [5, 12, 1], [2, 0, 3])
    for rows, sequence, length in zip(found, sequences, [5, 12, 1], strict=True):
        assert error(rows, exact(FORMS[name], sequence)[length : length + 16]) < 1e-5


@needs_kernels
@pytest.mark.parametrize("window", [0, 150])
def test_long_sequences_are_several_runs_of_attention(window: int) -> None:
    form = Form(window=window, kv_heads=1, size=24, rotary_size=24)
    sequence = tokens(300, 4)
    found = decode(steps_of(make(form), capacity=300), [sequence], [200], [1])[0]
    assert error(found, exact(form, sequence)[200:]) < 1e-5


@needs_kernels
@each_form
@pytest.mark.parametrize("format", [None, Int4(), Int8(group=64)], ids=str)
def test_a_row_has_the_same_bits_in_any_company(name: str, format: Any, in_threads: None) -> None:
    decoder = make(FORMS[name]) if format is None else quantized(make(FORMS[name]), format)[0]
    sequences = [tokens(12, seed) for seed in range(7)]
    lengths = [1 + seed % 5 for seed in range(7)]
    torch.set_num_threads(1)
    alone = [decode(steps_of(decoder), [s], [k], [2])[0, :7] for s, k in zip(sequences, lengths, strict=True)]
    for threads in (1, 3):
        torch.set_num_threads(threads)
        together = decode(steps_of(decoder, 9), sequences, lengths, [8, 1, 0, 6, 3, 2, 5])
        assert all(torch.equal(row[:7], other) for row, other in zip(together, alone, strict=True))


@needs_kernels
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("cache_dtype", [torch.float32, torch.bfloat16, torch.float16, torch.int8], ids=str)
def test_every_instruction_set_gives_the_same_bits(dtype: torch.dtype, cache_dtype: torch.dtype) -> None:
    assert LIBRARY is not None
    plain = make(FORMS["norms of heads"], dtype)
    gelu = make(FORMS["grouped projection, parallel MLP"], dtype)
    mixed = make(FORMS["mixture with a gated shared expert, norms after"], dtype)
    plains, narrow = (plain, gelu, mixed), (Int4(), Int8(), Int4())
    for decoder in (*plains, *(quantized(each, form)[0] for each, form in zip(plains, narrow, strict=True))):
        steps = steps_of(decoder, dtype=cache_dtype)
        found = []
        for level in LIBRARY.levels:
            steps.cache.lengths[:] = [0] * 4
            with native.use_level(level):
                ids = [tokens(3, seed) for seed in range(9)]
                found.append(torch.stack([steps.forward_each(each, [0, 1, 3]) for each in ids]))
        assert all(torch.equal(each, found[0]) for each in found)


@needs_kernels
@each_form
@pytest.mark.parametrize("format", [Int8(), Int4(), Int4(scale="minmax"), Int8(group=None)], ids=str)
def test_quantized_weights_differ_from_the_torch_rule_by_rounded_activations(name: str, format: Any) -> None:
    decoder, _ = quantized(make(FORMS[name]), format)
    sequence = tokens(20, 1)
    found = decode(steps_of(decoder), [sequence], [4], [1])[0]
    with native.use_level("none"):
        steps = steps_of(decoder)
        assert steps.fused.fused == ()
        wanted = decode(steps, [sequence], [4], [1])[0]
    # an activation at the border of two codes may take the other: 1 / 254 of the largest of its block
    assert float((found - wanted).norm() / wanted.norm()) < 0.01


@needs_kernels
def test_bfloat16_weights_and_cache_are_read_where_they_lie() -> None:
    decoder, sequence = make(FORMS["seven to one"], torch.bfloat16), tokens(20, 1)
    steps = steps_of(decoder)
    assert steps.fused.reasons == {}
    assert steps.cache.keys[0].dtype == torch.bfloat16
    found = decode(steps, [sequence], [4], [1])[0]
    wide = make(FORMS["seven to one"], torch.bfloat16)
    rounded = DecoderPass(widened(wide), KVCache.create(widened(wide), 1, 20)).forward_all(sequence, 0)
    # only keys and values are rounded to 8 bits
    assert error(found, rounded[4:]) < 0.02


def widened(decoder: Decoder) -> Decoder:
    """The same values in float64."""

    def wide(value: Any) -> Any:
        if isinstance(value, Tensor):
            return value.double()
        if isinstance(value, tuple):
            return tuple(map(wide, value))
        if attrs.has(type(value)):
            return attrs.evolve(value, **{f.name: wide(getattr(value, f.name)) for f in attrs.fields(type(value))})
        return value

    found: Decoder = wide(decoder)
    return found


@needs_kernels
@pytest.mark.parametrize("name", ["seven to one", "wide heads", "stacked projection, biases, LayerNorm"])
def test_an_int8_cache_is_within_its_rounding(name: str) -> None:
    decoder, sequence = make(FORMS[name]), tokens(30, 1)
    steps = steps_of(decoder, dtype=torch.int8)
    found = decode(steps, [sequence], [4], [1])[0]
    with native.use_level("none"):
        slow = steps_of(decoder, dtype=torch.int8)
        by_torch = decode(slow, [sequence], [4], [1])[0]
    wide = steps_of(decoder)
    wanted = decode(wide, [sequence], [4], [1])[0]
    assert 1e-7 < error(found, wanted) < 0.05
    assert error(by_torch, wanted) < 0.05
    for quick, exactly in ((steps.cache, wide.cache), (slow.cache, wide.cache)):
        for rows, others in zip(quick.read(0, 1, 30), exactly.read(0, 1, 30), strict=True):
            bound = others.abs().amax(-1, keepdim=True) / 254 * 1.001 + 1e-5
            assert ((rows - others).abs() <= bound).all()
    held = (*steps.cache.keys, *steps.cache.values, *steps.cache.key_scales, *steps.cache.value_scales)
    assert cache_bytes(decoder, 4, CAPACITY, torch.int8) == sum(each.nbytes for each in held)


def test_a_copied_prefix_has_its_scales() -> None:
    decoder, sequence = make(FORMS["seven to one"]), tokens(9, 1)
    steps = steps_of(decoder, dtype=torch.int8)
    steps.forward(sequence, 0)
    steps.cache.copy_prefix(0, 2, 9)
    one, other = (steps.forward_each(sequence[:1], [slot]) for slot in (0, 2))
    assert torch.equal(one, other)


# -- what is not fused -----------------------------------------------------------------------


def test_without_kernels_torch_decodes() -> None:
    decoder, sequence = make(FORMS["seven to one"]), tokens(12, 1)
    with native.use_level("none"):
        steps = steps_of(decoder)
        assert steps.fused.fused == ()
        assert steps.fused.reasons["blocks.0"] == "no kernels: the kernels are switched off"
        found = decode(steps, [sequence, sequence], [4, 4], [1, 3])
    wanted = exact(FORMS["seven to one"], sequence)[4:]
    assert error(found[0], wanted) < 1e-5
    assert torch.equal(found[0], found[1])


@needs_kernels
def test_a_decoder_of_which_nothing_is_fused_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    fused._log_once.cache_clear()  # other tests may have told it
    for _ in range(2):
        assert steps_of(make(Form(), torch.float64)).fused.fused == ()
    assert caplog.text.count("no part of the decoder is fused, so torch decodes") == 1
    assert "the model computes in float64" in caplog.text


class Doubling(nn.Module):
    """An MLP of another kind."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x) * 2


def with_block(decoder: Decoder, index: int, **changes: Any) -> Decoder:
    blocks = list(decoder.blocks)
    blocks[index] = attrs.evolve(blocks[index], **changes)
    return attrs.evolve(decoder, blocks=tuple(blocks))


@needs_kernels
@pytest.mark.parametrize("index", [0, 1, 2])
def test_blocks_with_other_mlps_run_between_fused_ones(index: int) -> None:
    form = Form(blocks=3)
    decoder = with_block(make(form), index, mlp=Doubling())
    wide = with_block(make(form, torch.float64), index, mlp=Doubling())
    steps, sequences = steps_of(decoder), [tokens(12, 1), tokens(12, 2)]
    assert steps.fused.reasons == {f"blocks.{index}": "its MLP is called as it is (Doubling)"}
    assert len(steps.fused.fused) == 3
    assert str(steps.fused).startswith("3 of 4 parts are fused; ")
    found = decode(steps, sequences, [3, 5], [2, 1])
    for rows, sequence, length in zip(found, sequences, [3, 5], strict=True):
        wanted = DecoderPass(wide, KVCache.create(wide, 1, 12)).forward_all(sequence, 0)[length : length + 7]
        assert error(rows, wanted) < 1e-5


@needs_kernels
def test_reasons_name_what_has_no_kernel() -> None:
    decoder = make(Form())
    mlp = decoder.blocks[0].mlp
    assert isinstance(mlp, MLP)
    other = with_block(decoder, 0, mlp=attrs.evolve(mlp, act=F.mish))
    assert steps_of(other).fused.reasons == {"blocks.0": "no kernel for the activation 'mish'"}
    spread = torch.zeros(*mlp.up.weight.shape, 2)[..., 0]
    other = with_block(decoder, 1, mlp=attrs.evolve(mlp, up=attrs.evolve(mlp.up, weight=spread)))
    reason = "up projection: neither its rows nor its columns are contiguous"
    assert steps_of(other).fused.reasons == {"blocks.1": reason}
    wide = steps_of(make(Form(), torch.float64)).fused
    assert set(wide.reasons.values()) == {"the model computes in float64"}
    assert steps_of(make(Form(), torch.float16)).fused.reasons == {}
    assert steps_of(quantized(make(Form(), torch.float16), Int8())[0]).fused.reasons == {}


# -- weights and slots -----------------------------------------------------------------------


@needs_kernels
def test_changed_weights_show_at_once() -> None:
    decoder, sequence = make(Form()), tokens(8, 1)
    steps = steps_of(decoder)
    before = decode(steps, [sequence], [3], [0])
    out = decoder.blocks[1].attention.out.weight
    assert isinstance(out, Tensor)
    out.mul_(2)
    changed = decode(steps, [sequence], [3], [0])
    assert not torch.equal(changed, before)
    out.data = out / 2  # other memory
    assert torch.equal(decode(steps, [sequence], [3], [0]), before)


def test_slots_are_checked_before_anything_is_written() -> None:
    steps = steps_of(make(Form()), capacity=5)
    steps.forward(tokens(5), 1)
    with pytest.raises(ValueError, match="do not fit into a cache of 5"):
        steps.forward_each(tokens(2), [0, 1])
    with pytest.raises(ValueError, match=r"2 tokens for the slots \[0, 0\]"):
        steps.forward_each(tokens(2), [0, 0])
    for wrong in (-1, 4):  # -1 is no name of the last one: C would write before the cache
        with pytest.raises(ValueError, match=f"slot {wrong}: the cache has 4, counted from 0"):
            steps.forward_each(tokens(2), [0, wrong])
        with pytest.raises(ValueError, match=f"slot {wrong}: the cache has 4"):
            steps.forward(tokens(2), wrong)
    assert steps.cache.lengths == [0, 5, 0, 0]


@needs_kernels
@pytest.mark.parametrize("cache_dtype", [torch.float32, torch.int8], ids=str)
def test_torchs_default_dtype_and_device_change_nothing(
    cache_dtype: torch.dtype,
) -> None:
    """C writes float32 into memory of the CPU, whatever torch.empty would allocate."""
    decoder, ids = make(Form()), tokens(3)
    wanted = steps_of(decoder, dtype=cache_dtype).forward_each(ids, [0, 1, 3])
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        steps = steps_of(decoder, dtype=cache_dtype)
        with torch.device("meta"):
            found = steps.forward_each(ids, [0, 1, 3])
    finally:
        torch.set_default_dtype(before)
    assert found.dtype == torch.float32
    assert torch.equal(found, wanted)


@needs_kernels
def test_more_sequences_than_one_call_takes() -> None:
    decoder = make(Form(rotary=RotaryStyle.NEIGHBOURS))
    steps, ids = steps_of(decoder, 35), tokens(35)
    found = steps.forward_each(ids, list(range(35)))
    alone = steps_of(decoder, 1)
    assert found.shape == (35, VOCABULARY)
    assert torch.equal(found[33], alone.forward_each(ids[33:34], [0])[0])


@needs_kernels
def test_infinite_weights_give_nan_not_a_token() -> None:
    decoder = make(Form())
    weight = decoder.blocks[0].attention.out.weight
    assert isinstance(weight, Tensor)
    weight[3, 5] = torch.inf
    assert steps_of(decoder).forward_each(tokens(2), [0, 1]).isnan().all()
