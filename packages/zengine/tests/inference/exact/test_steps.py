import functools

import pytest
import torch
from random_decoders import FORMS, VOCABULARY, Form, make
from torch import Tensor

from zengine.inference.cache import KVCache
from zengine.inference.decoder import DecoderPass
from zengine.inference.exact.attention import attend_sequences
from zengine.inference.exact.blocks import (
    HeadRule,
    PositionTables,
    WeightParts,
    embed,
    logits_of,
    rule_of,
    run_block,
)
from zengine.inference.exact.products import Products
from zengine.inference.exact.steps import ExactPass
from zengine.inference.structure import Attention, Decoder

both = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
DENSE = {name: form for name, form in FORMS.items() if not form.experts}  # exact rejects mixtures
each_form = pytest.mark.parametrize("form", DENSE.values(), ids=list(DENSE))


class Subject:
    """A decoder with what its passes share."""

    def __init__(self, decoder: Decoder) -> None:
        self.decoder, self.products, self.tables = decoder, Products(), PositionTables()
        self.parts = WeightParts(self.products)

    def steps(self, num_slots: int = 3, capacity: int = 160) -> ExactPass:
        cache = KVCache.create(self.decoder, num_slots, capacity)
        return ExactPass(self.decoder, cache, self.parts, products=self.products, tables=self.tables)

    def whole(self, ids: Tensor) -> Tensor:
        """Logits of whole sequences, as training computes them: (batch, time, vocabulary)."""
        x = embed(self.parts, self.decoder.embedding, ids, torch.arange(ids.shape[1])[None])
        for block in self.decoder.blocks:
            x = run_block(self.parts, block, x, functools.partial(self._attend, block.attention))
        return logits_of(self.parts, self.decoder, HeadRule(), x)

    def _attend(self, attention: Attention, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        if attention.rotary is not None:
            cos, sin = (each[: query.shape[1]][None] for each in self.tables.of(attention.rotary, query.shape[1]))
            query, key = attention.rotary.rotate(query, cos, sin), attention.rotary.rotate(key, cos, sin)
        return attend_sequences(self.products, rule_of(attention), query, key, value)


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randint(0, VOCABULARY, shape, generator=torch.Generator().manual_seed(seed))


@both
@each_form
def test_generation_has_the_bits_of_whole_sequences(form: Form, dtype: torch.dtype) -> None:
    subject, ids = Subject(make(form, dtype)), draw(3, 140)
    wanted, steps = subject.whole(ids), subject.steps()
    lengths = {2: 125, 0: 3, 1: 60}
    for row, (slot, length) in enumerate(lengths.items()):
        assert torch.equal(steps.forward_all(ids[row, :length], slot), wanted[row, :length])
    for at in range(8):
        last = torch.stack([ids[row, length + at] for row, length in enumerate(lengths.values())])
        found = steps.forward_each(last, list(lengths))
        for row, length in enumerate(lengths.values()):
            assert torch.equal(found[row], wanted[row, length + at]), f"slot {row}, token {at}"


@each_form
def test_logits_are_those_of_the_plain_pass(form: Form) -> None:
    decoder, ids = make(form), draw(40)
    wanted = DecoderPass(decoder, KVCache.create(decoder, 1, 64)).forward_all(ids, 0)
    found = Subject(decoder).steps().forward_all(ids, 0)
    assert (found - wanted).abs().max() / wanted.abs().max() < 1e-5


@both
@pytest.mark.parametrize("num_slots", [1, 2, 7, 16])
def test_a_token_does_not_depend_on_slots_and_neighbours(num_slots: int, dtype: torch.dtype) -> None:
    subject, prompts = Subject(make(FORMS["soft caps, window, norms after, offsets"], dtype)), draw(num_slots, 20)
    steps, alone = subject.steps(num_slots), subject.steps(num_slots)
    for slot in range(num_slots):
        steps.forward(prompts[slot, : 3 + slot], slot)
    at = num_slots // 2
    alone.forward(prompts[at, : 3 + at], num_slots - 1)
    order = list(range(num_slots))[::-1]
    for token in range(5):
        found = steps.forward_each(draw(num_slots, seed=token), order)
        given = draw(num_slots, seed=token)[[order.index(at)]]
        assert torch.equal(alone.forward_each(given, [num_slots - 1])[0], found[order.index(at)])


def test_a_slot_is_reused_and_a_prompt_copied() -> None:
    subject, ids = Subject(make(Form())), draw(2, 40)
    steps, wanted = subject.steps(2), subject.whole(ids)
    steps.forward(draw(100, seed=3), 1)  # leaves keys behind
    steps.cache.clear(1)
    steps.forward(ids[0, :9], 0)
    steps.cache.copy_prefix(0, 1, 9)
    for at in range(9, 20):
        found = steps.forward_each(ids[[0, 0], at], [0, 1])
        assert torch.equal(found[0], wanted[0, at])
        assert torch.equal(found[1], wanted[0, at])


def test_a_turn_continues_on_the_cache() -> None:
    subject, ids = Subject(make(Form())), draw(1, 150)
    steps, wanted = subject.steps(2), subject.whole(ids)[0]
    steps.forward(ids[0, :50], 1)
    steps.forward_each(ids[0, 50:51], [1])
    assert torch.equal(steps.forward_all(ids[0, 51:140], 1), wanted[51:140])


def test_wrong_slots_and_caches_are_errors() -> None:
    subject = Subject(make(Form()))
    steps = subject.steps(2, 8)
    with pytest.raises(ValueError, match="pass one for each"):
        steps.forward_each(draw(2), [1, 1])
    with pytest.raises(ValueError, match="do not fit into a cache of 8"):
        steps.forward(draw(9), 0)
    with pytest.raises(ValueError, match="slot 2: the cache has 2"):
        steps.forward_each(draw(1), [2])
    assert steps.cache.lengths == [0, 0]
    codes = KVCache.create(subject.decoder, 1, 8, torch.int8)
    with pytest.raises(ValueError, match=r"cache of torch\.int8 for weights of torch\.float32"):
        ExactPass(subject.decoder, codes, subject.parts, products=subject.products, tables=subject.tables)


def test_rows_of_a_table_stay_when_it_grows() -> None:
    rotary = make(Form()).blocks[0].attention.rotary
    assert rotary is not None
    tables = PositionTables()
    before = tables.of(rotary, 5)
    assert before[0].shape[0] == 2048
    after = tables.of(rotary, 2049)
    assert after[0].shape[0] == 4096
    assert torch.equal(after[0][:2048], before[0])
    assert tables.of(rotary, 9)[0] is after[0]
