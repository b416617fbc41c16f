"""Generation of many samples over the slots of one cache.

A prompt is computed once, alone, for all its samples; a slot whose sample has ended takes the next one while the
others go on, so no slot waits for the longest sample.  Each sample is a function of weights, prompt, rule and seed
(decoder.py computes a row of its own for each sequence, sampling.py draws by seed and index).

Rejected: static batches (a batch waits for its longest sample: with a mean of 0.4 of the longest length, 60% of the
work is padding); left padding to a common length (positions of padding tokens need masks in every layer).
"""

from __future__ import annotations

import collections
from collections.abc import Generator, Iterator, Sequence
from typing import Protocol, final

import attrs
import torch

from zengine.inference.cache import Forgotten, KVCache
from zengine.inference.sampling import Sampling, choose, uniform
from zengine.inference.structure import Decoder
from zengine.inference.text import Decode, TextStream
from zengine.inference.tokenizers import Tokenizer

__all__ = [
    *("CachedPass", "FinishReason", "Request", "Sample", "TextEvent", "TokenEvent"),
    *("generate", "stream", "stream_text"),
]

FinishReason = str  # "length", "token" or "string"


class CachedPass(Protocol):
    """A pass over a cache: decoder.DecoderPass, or exact.steps.ExactPass."""

    @property
    def decoder(self) -> Decoder: ...
    @property
    def cache(self) -> KVCache: ...

    def forward(self, ids: torch.Tensor, slot: int) -> torch.Tensor:
        """Append (time,) tokens to a slot; return the logits after the last, (vocabulary,) float32."""
        ...

    def forward_each(self, ids: torch.Tensor, slots: Sequence[int]) -> torch.Tensor:
        """Append one token to each of several slots; return the logits after it, (n, vocabulary) float32."""
        ...


@attrs.frozen(kw_only=True)
class Request:
    """One prompt and what to make of it."""

    prompt: tuple[int, ...]  # token ids
    sampling: Sampling
    seeds: tuple[int, ...] = (0,)  # one for each sample

    def __attrs_post_init__(self) -> None:
        if not self.prompt:
            raise ValueError("a prompt has no tokens; give at least one (the model's begin-of-text token)")
        if not self.seeds:
            raise ValueError("a request has no seeds; give one for each sample")


@attrs.frozen(kw_only=True)
class TokenEvent:
    """One new token of a sample."""

    request: int  # index of its request
    sample: int  # index of its seed
    token: int
    log_prob: float  # under the model, before temperature and truncation
    finish: FinishReason = ""  # why the sample ends with it


@attrs.frozen(kw_only=True)
class Sample:
    """A finished sample."""

    tokens: tuple[int, ...]  # without the prompt
    log_probs: tuple[float, ...]
    finish: FinishReason


@final
@attrs.define(eq=False)
class _Running:
    """A sample in a slot."""

    request: Request
    request_index: int
    sample_index: int
    slot: int
    text: TextStream | None  # that finds stop strings; None: there are none
    tokens: list[int] = attrs.field(factory=list)

    def draw(self, logits: torch.Tensor) -> TokenEvent:
        """Choose the next token from (vocabulary,) logits."""
        rule = self.request.sampling
        seen = (*self.request.prompt, *self.tokens) if rule.repetition_penalty != 1.0 else ()
        number = 0.0 if rule.is_greedy else uniform(self.request.seeds[self.sample_index], len(self.tokens))
        token, log_prob = choose(logits, rule, seen, number)
        self.tokens.append(token)
        return TokenEvent(
            request=self.request_index,
            sample=self.sample_index,
            token=token,
            log_prob=log_prob,
            finish=self._finish(token, rule),
        )

    def _finish(self, token: int, rule: Sampling) -> FinishReason:
        if token in rule.stop_tokens:
            return "token"
        if self.text is not None:
            self.text.push(token)
            if self.text.is_stopped:
                return "string"
        return "length" if len(self.tokens) == rule.max_new_tokens else ""


def stream(
    steps: CachedPass,
    requests: Sequence[Request],
    decode: Decode | None = None,
    kept: Forgotten = Forgotten(),  # noqa: B008 - it has no state
) -> Generator[TokenEvent]:
    """Yield each token as it is chosen; samples take turns, and their slots are refilled.

    steps: its cache is used from empty, and is empty again afterwards, also if the caller stops early.
    decode: for stop strings.
    kept: what slots still have of the sequences of earlier streams; prompts that begin with one continue it.

    Raises ValueError, before any token, if a prompt and its answer do not fit into the cache, if a token is outside
    the vocabulary, or if stop strings lack `decode`; the first `next` raises RuntimeError if the cache is not empty.
    """
    _check(steps, requests, decode)
    return _Scheduler(steps, requests, decode, kept).events()


def generate(steps: CachedPass, requests: Sequence[Request], decode: Decode | None = None) -> list[list[Sample]]:
    """Return the samples of each request, in the order of its seeds.  Raises as `stream`."""
    events: dict[tuple[int, int], list[TokenEvent]] = collections.defaultdict(list)
    for event in stream(steps, requests, decode):
        events[event.request, event.sample].append(event)
    return [
        [_sample(events[index, sample]) for sample in range(len(request.seeds))]
        for index, request in enumerate(requests)
    ]


def _sample(events: Sequence[TokenEvent]) -> Sample:
    return Sample(
        tokens=tuple(event.token for event in events),
        log_probs=tuple(event.log_prob for event in events),
        finish=events[-1].finish,
    )


def _check(steps: CachedPass, requests: Sequence[Request], decode: Decode | None) -> None:
    capacity, vocabulary = steps.cache.capacity, steps.decoder.embedding.vocabulary
    for index, request in enumerate(requests):
        length, new = len(request.prompt), request.sampling.max_new_tokens
        if length + new - 1 > capacity:
            raise ValueError(
                f"prompt {index} has {length} tokens and may get {new} more; the cache holds {capacity}. Raise "
                f"max_out_tokens, shorten the prompt, or ask for at most {max(capacity - length + 1, 0)} new tokens"
            )
        if strange := [token for token in request.prompt if not 0 <= token < vocabulary]:
            raise ValueError(f"prompt {index} has token {strange[0]}; the vocabulary has {vocabulary}")
        if request.sampling.stop_strings and decode is None:
            raise ValueError("stop_strings need a tokenizer: pass one, or use stop_tokens")


@final
@attrs.define(eq=False)
class _Scheduler:
    """Assigns samples to slots.

    Invariant: a slot is in `free`, or one sample in `running` has it; the first positions of a slot in `holds` are
    the prompt of that request, also after its sample has ended.
    """

    steps: CachedPass
    requests: Sequence[Request]
    decode: Decode | None
    kept: Forgotten
    waiting: collections.deque[tuple[int, int]] = attrs.field(factory=collections.deque)  # (request, sample)
    free: list[int] = attrs.field(factory=list)
    running: list[_Running] = attrs.field(factory=list)
    holds: dict[int, int] = attrs.field(factory=dict)  # slot -> request whose prompt it begins with
    first_logits: dict[int, torch.Tensor] = attrs.field(factory=dict)  # by request: (vocabulary,) after its prompt

    def events(self) -> Generator[TokenEvent]:
        """Alternate: fill free slots with samples that wait, then one token for every running sample."""
        cache = self.steps.cache
        if any(cache.lengths):
            raise RuntimeError(
                f"the cache holds sequences of {cache.lengths} tokens: end the other stream first (close() it), or "
                "clear() the slots"
            )
        self.free = list(range(cache.num_slots))[::-1]
        order = self.kept.begin([each.prompt for each in self.requests])
        self.waiting.extend((index, sample) for index in order for sample in range(len(self.requests[index].seeds)))
        try:
            while self.waiting or self.running:
                while self.waiting and self.free:
                    started = self._start()
                    yield self._draw(started, self.first_logits[started.request_index])
                running = tuple(self.running)
                if not running:
                    continue
                last = self._on_device([each.tokens[-1] for each in running])
                logits = self.steps.forward_each(last, [each.slot for each in running])
                for each, row in zip(running, logits, strict=True):
                    yield self._draw(each, row)
        finally:
            for each in self.running:
                self._keep(each)
            for slot in range(cache.num_slots):
                cache.clear(slot)

    def _start(self) -> _Running:
        """Put the next sample into a slot: what a slot has of its prompt is copied, and the rest computed."""
        index, sample = self.waiting.popleft()
        prompt, cache = self.requests[index].prompt, self.steps.cache
        sources = [slot for slot, held in self.holds.items() if held == index]
        source, length = (sources[0], len(prompt)) if sources else self.kept.source(index)
        slot = next((slot for slot in sources if slot in self.free), None)
        slot = self.kept.choose(self.free, source) if slot is None else slot
        self.free.remove(slot)
        self.kept.write(slot, ())  # until the whole prompt is there
        if length:
            cache.copy_prefix(slot if slot in sources else source, slot, length)
        if not sources:
            self.first_logits = {index: self.steps.forward(self._on_device(prompt[length:]), slot)}
        self.holds[slot] = index
        self.kept.write(slot, prompt)
        stops = self.requests[index].sampling.stop_strings
        text = TextStream(self.decode, stops) if stops and self.decode is not None else None
        started = _Running(self.requests[index], index, sample, slot, text)
        self.running.append(started)
        return started

    def _keep(self, sample: _Running) -> None:
        """Record the tokens whose keys and values are written: all but the last, as a rule."""
        tokens = (*sample.request.prompt, *sample.tokens)
        self.kept.write(sample.slot, tokens[: self.steps.cache.lengths[sample.slot]])

    def _on_device(self, tokens: Sequence[int]) -> torch.Tensor:
        return torch.tensor(tokens, device=self.steps.cache.keys[0].device)

    def _draw(self, sample: _Running, logits: torch.Tensor) -> TokenEvent:
        event = sample.draw(logits)
        if event.finish:
            self.running.remove(sample)
            self._keep(sample)
            self.steps.cache.clear(sample.slot)
            self.free.append(sample.slot)
        return event


# -- text ----------------------------------------------------------------------------------------


@attrs.frozen(kw_only=True)
class TextEvent:
    """One new token of a sample, and the text that became certain with it."""

    token: TokenEvent
    text: str  # may be ""; without stop strings and stop tokens


def stream_text(steps: CachedPass, tokenizer: Tokenizer, requests: Sequence[Request]) -> Iterator[TextEvent]:
    """Yield the tokens of `stream` with their text.  Raises as `stream`, before any token."""
    return _with_text(stream(steps, requests, tokenizer.decode), tokenizer, requests)


def _with_text(
    events: Iterator[TokenEvent], tokenizer: Tokenizer, requests: Sequence[Request]
) -> Iterator[TextEvent]:
    texts: dict[tuple[int, int], TextStream] = {}
    for event in events:
        key = event.request, event.sample
        stops = requests[event.request].sampling.stop_strings
        text = texts.setdefault(key, TextStream(tokenizer.decode, stops))
        piece = "" if event.finish == "token" else text.push(event.token)
        if event.finish:
            piece += texts.pop(key).finish()
        yield TextEvent(token=event, text=piece)
