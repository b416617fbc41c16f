from collections.abc import Callable
from typing import Any

import attrs
import pytest
import torch
from small_decoders import TIME, VOCABULARY, model

from zengine.inference.cache import KVCache, cache_bytes
from zengine.inference.decoder import DecoderPass
from zengine.inference.generation import Request, Sample, generate, stream
from zengine.inference.recognize import recognize
from zengine.inference.sampling import Sampling
from zengine.inference.structure import Decoder


@pytest.fixture(scope="module")
def decoder() -> Decoder:
    return recognize(model())


def steps_of(decoder: Decoder, num_slots: int = 3, capacity: int = TIME) -> DecoderPass:
    return DecoderPass(decoder, KVCache.create(decoder, num_slots, capacity))


def prompt(length: int, seed: int = 0) -> tuple[int, ...]:
    return tuple(torch.randint(0, VOCABULARY, (length,), generator=torch.Generator().manual_seed(seed)).tolist())


REQUESTS = [
    Request(
        prompt=prompt(length, length),
        sampling=Sampling(max_new_tokens=4 + 3 * length, stop_tokens=(5,), top_p=0.9),
        seeds=tuple(range(length, length + 4)),
    )
    for length in (3, 9, 1, 4)
]


def test_greedy_tokens_are_those_of_the_module(decoder: Decoder) -> None:
    subject, ids = model(), list(prompt(7))
    with torch.no_grad():
        for _ in range(12):
            ids.append(int(subject(torch.tensor([ids]))[0, -1].argmax()))
    rule = Sampling(max_new_tokens=12, temperature=0)
    ((found,),) = generate(steps_of(decoder), [Request(prompt=prompt(7), sampling=rule)])
    assert list(found.tokens) == ids[7:]
    assert found.finish == "length"


def test_log_probabilities_are_those_of_the_module(decoder: Decoder) -> None:
    rule = Sampling(max_new_tokens=9, temperature=0.7, top_k=5)
    ((found,),) = generate(steps_of(decoder), [Request(prompt=prompt(4), sampling=rule, seeds=(3,))])
    with torch.no_grad():
        rows = torch.log_softmax(model()(torch.tensor([[*prompt(4), *found.tokens]]))[0, 3:-1].double(), -1)
    wanted = rows[torch.arange(9), torch.tensor(found.tokens)]
    assert torch.allclose(torch.tensor(found.log_probs, dtype=torch.float64), wanted, atol=1e-5)


@pytest.mark.parametrize("num_slots", [2, 3, 5, 16])
def test_a_sample_does_not_depend_on_slots_and_neighbours(decoder: Decoder, num_slots: int) -> None:
    alone = [
        [generate(steps_of(decoder, 1), [attrs.evolve(each, seeds=(seed,))])[0][0] for seed in each.seeds]
        for each in REQUESTS
    ]
    together = generate(steps_of(decoder, num_slots), REQUESTS)
    assert together == alone, "tokens and log-probabilities, bit for bit"
    assert len({len(sample.tokens) for samples in together for sample in samples}) > 3, "slots were refilled"


def test_the_cache_is_empty_after_a_caller_stops_early(decoder: Decoder) -> None:
    steps = steps_of(decoder, 2)
    events = stream(steps, REQUESTS)
    for _ in range(5):
        next(events)
    events.close()
    assert steps.cache.lengths == [0, 0]
    assert generate(steps, REQUESTS) == generate(steps_of(decoder, 2), REQUESTS)


def test_a_second_stream_over_the_same_cache_is_refused_and_harms_nobody(decoder: Decoder) -> None:
    steps = steps_of(decoder)
    request = Request(prompt=prompt(3), sampling=Sampling(max_new_tokens=6), seeds=(1, 2))
    wanted = [event.token for event in stream(steps, [request])]
    first = stream(steps, [request])
    begun = [next(first).token]
    with pytest.raises(RuntimeError, match=r"the cache holds sequences of \[.*\] tokens: end the other stream first"):
        next(stream(steps, REQUESTS[1:2]))
    assert begun + [event.token for event in first] == wanted


def counted(steps: DecoderPass) -> list[int]:
    """Record the tokens of each forward pass."""
    found: list[int] = []
    inner: Callable[..., Any] = steps.forward

    def forward(ids: torch.Tensor, slot: int) -> torch.Tensor:
        found.append(len(ids))
        return inner(ids, slot)

    each: Callable[..., Any] = steps.forward_each

    def forward_each(ids: torch.Tensor, slots: Any) -> torch.Tensor:
        found.extend([1] * len(ids))
        return each(ids, slots)

    steps.forward = forward  # type: ignore[method-assign]
    steps.forward_each = forward_each  # type: ignore[method-assign]
    return found


def test_a_prompt_is_computed_once_for_all_its_samples(decoder: Decoder) -> None:
    steps = steps_of(decoder, 2)
    passes = counted(steps)
    many = Request(prompt=prompt(9), sampling=Sampling(max_new_tokens=6), seeds=tuple(range(7)))
    found = generate(steps, [many, attrs.evolve(many, prompt=prompt(5))])
    assert sorted(passes, reverse=True)[:3] == [9, 5, 1]
    assert len(passes) == 2 + sum(len(sample.tokens) - 1 for samples in found for sample in samples)


def test_stop_tokens_and_strings_end_a_sample(decoder: Decoder) -> None:
    def text_of(tokens: Any) -> str:
        return "".join(chr(97 + token % 26) for token in tokens)

    rule = Sampling(max_new_tokens=40)
    ((free,),) = generate(steps_of(decoder), [Request(prompt=prompt(3), sampling=rule)])
    at = 10
    token = free.tokens[at]
    first = free.tokens.index(token)
    stopped = attrs.evolve(rule, stop_tokens=(token,))
    ((found,),) = generate(steps_of(decoder), [Request(prompt=prompt(3), sampling=stopped)])
    assert found == Sample(tokens=free.tokens[: first + 1], log_probs=free.log_probs[: first + 1], finish="token")
    string = text_of(free.tokens[at : at + 3])
    end = text_of(free.tokens).index(string) + 3
    stopped = attrs.evolve(rule, stop_strings=(string,))
    ((found,),) = generate(steps_of(decoder), [Request(prompt=prompt(3), sampling=stopped)], text_of)
    assert found == Sample(tokens=free.tokens[:end], log_probs=free.log_probs[:end], finish="string")


def test_what_cannot_be_made_is_said_before_any_token(decoder: Decoder) -> None:
    rule = Sampling(max_new_tokens=10)
    long = Request(prompt=prompt(60), sampling=rule)
    with pytest.raises(
        ValueError, match=r"prompt 0 has 60 tokens and may get 10 more; the cache holds 64.*at most 5"
    ):
        stream(steps_of(decoder), [long])
    with pytest.raises(ValueError, match="prompt 0 has token 37; the vocabulary has 37"):
        stream(steps_of(decoder), [Request(prompt=(37,), sampling=rule)])
    with pytest.raises(ValueError, match="stop_strings need a tokenizer"):
        stream(steps_of(decoder), [Request(prompt=(1,), sampling=Sampling(max_new_tokens=9, stop_strings=("x",)))])
    with pytest.raises(ValueError, match="a prompt has no tokens"):
        Request(prompt=(), sampling=rule)
    with pytest.raises(ValueError, match="a request has no seeds"):
        Request(prompt=(1,), sampling=rule, seeds=())


def test_the_bytes_of_a_cache_are_those_it_holds(decoder: Decoder) -> None:
    cache = KVCache.create(decoder, 3, 20, torch.bfloat16)
    held = sum(each.untyped_storage().nbytes() for each in (*cache.keys, *cache.values))
    assert held == cache_bytes(decoder, 3, 20, torch.bfloat16) == 3 * 20 * 2 * 2 * 24 * 2
