"""`zengine generate MODEL --prompt TEXT`: sample text from a local model.

Text goes to standard output, as it comes; what was loaded and how fast it went goes to standard error.  Several
samples are computed together and printed one after the other: the first streams, and the others are held until it
has ended.  With --json each sample is one line, in the order of the prompts.

A sample depends on weights, prompt, options and its seed only: `--samples 3 --seed 5` has the seeds 5, 6 and 7 for
each prompt.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, final

import attrs

from zengine.commands import CommandError
from zengine.commands.models import find_model, load, open_tokenizer_of, parse_dtype, parse_format
from zengine.inference.cache import KVCache, cache_bytes
from zengine.inference.decoder import DecoderPass
from zengine.inference.generation import Request, TextEvent, TokenEvent, stream_text
from zengine.inference.quantized import QuantizationReport
from zengine.inference.sampling import Sampling
from zengine.inference.sizes import available_bytes, gigabytes
from zengine.inference.structure import Decoder
from zengine.inference.tokenizers import Message, Tokenizer, TokenizerError

__all__ = ["run"]

_NEW_TOKENS = 128  # of a sample, unless --max-new-tokens says so
_SLOTS = 8  # samples that are computed together, at most
_INTERRUPTED = 130  # exit status after Ctrl-C


@attrs.frozen(kw_only=True)
class Prompt:
    """One prompt: its text or conversation, and its tokens."""

    text: str
    tokens: tuple[int, ...]


def run(arguments: argparse.Namespace) -> int:
    """Generate and print.  Raises CommandError for what cannot be loaded, read or generated."""
    format = parse_format(arguments.quant)
    rule = _rule(arguments, arguments.max_new_tokens or _NEW_TOKENS)
    given = _conversations(arguments)
    source = find_model(Path(arguments.model), parse_dtype(arguments.dtype))
    tokenizer = open_tokenizer_of(source, arguments.tokenizer)
    prompts = [_encode(messages, tokenizer, is_chat=arguments.chat) for messages in given]
    _capacity(prompts, arguments, source.max_positions)  # what cannot fit is told before weights are read
    started = time.perf_counter()
    model = load(source, format)
    decoder = model.decoder
    print(_loaded(arguments.model, model.report, decoder, time.perf_counter() - started), file=sys.stderr)
    capacity = _capacity(prompts, arguments, model.max_positions)
    rule = attrs.evolve(rule, stop_tokens=() if arguments.ignore_eos else tokenizer.stop_tokens)
    seeds = tuple(range(arguments.seed, arguments.seed + arguments.samples))
    requests = [
        Request(
            prompt=each.tokens, sampling=attrs.evolve(rule, max_new_tokens=_room(each, rule, capacity)), seeds=seeds
        )
        for each in prompts
    ]
    steps = _steps(decoder, min(_SLOTS, len(requests) * arguments.samples), capacity)
    output = _Output(prompts=prompts, seeds=seeds, tokenizer=tokenizer, arguments=arguments)
    try:
        output.print_all(stream_text(steps, tokenizer, requests))
    except KeyboardInterrupt:
        print()
        return _INTERRUPTED
    except ValueError as error:  # logits that are no numbers, a token outside of the vocabulary
        raise CommandError(f"{arguments.model}: {error}") from error
    return 0


def _rule(arguments: argparse.Namespace, max_new_tokens: int) -> Sampling:
    try:
        return Sampling(
            max_new_tokens=max_new_tokens,
            temperature=arguments.temperature,
            top_k=arguments.top_k,
            top_p=arguments.top_p,
            repetition_penalty=arguments.repetition_penalty,
            stop_strings=tuple(arguments.stop),
        )
    except ValueError as error:
        raise CommandError(str(error)) from None


def _loaded(name: str, report: QuantizationReport | None, decoder: Decoder, seconds: float) -> str:
    """Say what was loaded."""
    text = f"{name}: loaded in {seconds:.1f} s, {len(decoder.blocks)} blocks"
    if report is not None:
        formats = ", ".join(sorted({layer.format for layer in report.layers}))
        text += f", {len(report.layers)} matrices of {formats} in {gigabytes(report.nbytes)}"
        text += f"; {len(report.kept)} keep 8 bits" if report.kept else ""
    if decoder.opaque:
        text += f"; as their modules: {', '.join(decoder.opaque[:3])}{', ...' if len(decoder.opaque) > 3 else ''}"
    return text


# -- prompts -------------------------------------------------------------------------------------


def _conversations(arguments: argparse.Namespace) -> list[list[Message]]:
    """Return the prompts as conversations; without --chat each has one message."""
    texts = [sys.stdin.read() if text == "-" else text for text in arguments.prompt]
    found: list[list[Message]] = [[{"role": "user", "content": text}] for text in texts]
    if arguments.prompts is not None:
        found += _read_prompts(arguments.prompts, is_chat=arguments.chat)
    if not found:
        raise CommandError("there is no prompt: pass --prompt TEXT (- for standard input), or --prompts FILE")
    if arguments.system and not arguments.chat:
        raise CommandError("--system belongs to a conversation: pass --chat, too")
    system: list[Message] = [{"role": "system", "content": arguments.system}] if arguments.system else []
    return [[*system, *messages] for messages in found]


def _read_prompts(path: Path, *, is_chat: bool) -> list[list[Message]]:
    """Read a file: one prompt a line, or for .jsonl a string, {"prompt": ...} or {"messages": [...]} a line."""
    try:
        lines = [line for line in path.read_text("utf-8").splitlines() if line.strip()]
    except OSError as error:
        raise CommandError(f"--prompts {path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise CommandError(f"--prompts {path}: the file is not UTF-8") from None
    if path.suffix != ".jsonl":
        return [[{"role": "user", "content": line}] for line in lines]
    return [
        _parse_line(line, f"--prompts {path}, prompt {number}", is_chat=is_chat) for number, line in enumerate(lines)
    ]


def _parse_line(line: str, where: str, *, is_chat: bool) -> list[Message]:
    try:
        value = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise CommandError(f"{where}: no JSON: {error}") from None
    if isinstance(value, dict) and isinstance(value.get("messages"), list):
        messages = value["messages"]
        is_whole = all(isinstance(m, dict) and {"role", "content"} <= m.keys() for m in messages) and messages
        if not is_whole or not is_chat:
            need = "each needs a role and a content" if is_chat else "a conversation needs --chat"
            raise CommandError(f"{where}: {need}")
        return [{"role": str(m["role"]), "content": str(m["content"])} for m in messages]
    text = value.get("prompt") if isinstance(value, dict) else value
    if not isinstance(text, str):
        raise CommandError(f'{where}: write a string, {{"prompt": "..."}} or {{"messages": [...]}}')
    return [{"role": "user", "content": text}]


def _encode(messages: list[Message], tokenizer: Tokenizer, *, is_chat: bool) -> Prompt:
    text = messages[-1]["content"]
    if is_chat:
        try:
            return Prompt(text=text, tokens=tuple(tokenizer.encode_chat(messages)))
        except TokenizerError as error:
            raise CommandError(str(error)) from None
    begin = () if tokenizer.begin is None else (tokenizer.begin,)
    tokens = (*begin, *tokenizer.encode(text))
    if not tokens:
        raise CommandError("a prompt is empty, and this model has no begin-of-text token: write some text")
    return Prompt(text=text, tokens=tokens)


# -- room ----------------------------------------------------------------------------------------


def _capacity(prompts: Sequence[Prompt], arguments: argparse.Namespace, max_positions: int | None) -> int:
    """Return the tokens of a slot.  Raises CommandError if a prompt, or what was asked for after it, does not fit."""
    limit: int | None = arguments.max_out_tokens or max_positions
    if limit is not None and max_positions is not None and limit > max_positions:
        raise CommandError(f"--max-out-tokens {limit}: the model was made for {max_positions} tokens")
    name = "--max-out-tokens" if arguments.max_out_tokens else "the model's positions"
    asked: int = arguments.max_new_tokens or 1  # without the option, as many as fit are enough
    for number, prompt in enumerate(prompts):
        length = len(prompt.tokens)
        if limit is not None and length + asked - 1 > limit:
            room = limit - length + 1
            advice = f"ask for at most {room} new tokens" if room > 0 else f"shorten it to {limit} tokens"
            raise CommandError(
                f"prompt {number} has {length} tokens and may get {asked} more; {name} hold {limit} together: "
                f"{advice}"
            )
    wanted = max(len(prompt.tokens) for prompt in prompts) + (arguments.max_new_tokens or _NEW_TOKENS) - 1
    return wanted if limit is None else min(wanted, limit)


def _room(prompt: Prompt, rule: Sampling, capacity: int) -> int:
    """Return the new tokens that fit after a prompt, at most those of the rule."""
    return min(rule.max_new_tokens, capacity - len(prompt.tokens) + 1)


def _steps(decoder: Decoder, num_slots: int, capacity: int) -> DecoderPass:
    """Return the decoder with its cache, of fewer slots if memory is short."""
    room = available_bytes()
    fitting = next((n for n in range(num_slots, 0, -1) if cache_bytes(decoder, n, capacity) < room), 0)
    if not fitting:
        per_token = cache_bytes(decoder, 1, 1)
        raise CommandError(
            f"a cache of {capacity} tokens needs {gigabytes(capacity * per_token)}, and {gigabytes(room)} are "
            f"available: pass --max-out-tokens {room // per_token} or less"
        )
    try:
        return DecoderPass(decoder, KVCache.create(decoder, fitting, capacity))
    except ValueError as error:
        raise CommandError(str(error)) from None


# -- output --------------------------------------------------------------------------------------


@final
@attrs.define(eq=False)
class _Printed:
    """A sample so far."""

    text: str = ""
    shown: int = -1  # characters of `text` that are on standard output; -1: nor is the line above it
    events: list[TokenEvent] = attrs.field(factory=list)

    @property
    def is_ended(self) -> bool:
        return bool(self.events) and bool(self.events[-1].finish)


@final
@attrs.frozen(kw_only=True, eq=False)
class _Output:
    """Prints samples in the order of prompts and seeds."""

    prompts: Sequence[Prompt]
    seeds: Sequence[int]
    tokenizer: Tokenizer
    arguments: argparse.Namespace

    def print_all(self, events: Iterator[TextEvent]) -> None:
        """Print the samples, then a line about speed on standard error."""
        order = [(request, sample) for request in range(len(self.prompts)) for sample in range(len(self.seeds))]
        samples = {key: _Printed() for key in order}
        begin, first = time.perf_counter(), 0.0
        count = position = 0
        for event in events:
            first, count = first or time.perf_counter() - begin, count + 1
            sample = samples[event.token.request, event.token.sample]
            sample.events.append(event.token)
            sample.text += event.text
            while position < len(order):
                self._show(order[position], samples[order[position]])
                if not samples[order[position]].is_ended:
                    break
                position += 1
        seconds = time.perf_counter() - begin
        rate = (count - 1) / (seconds - first) if seconds > first else 0.0
        print(
            f"{count} tokens in {seconds:.2f} s: the first after {first:.2f} s, then {rate:.1f} a second",
            file=sys.stderr,
        )

    def _show(self, key: tuple[int, int], sample: _Printed) -> None:
        """Print what is new of the sample whose turn it is."""
        if self.arguments.json:
            if sample.is_ended:
                print(json.dumps(self._as_json(key, sample), ensure_ascii=False), flush=True)
            return
        if not self.arguments.stream and not sample.is_ended:
            return
        if sample.shown < 0:
            self._print_head(key)
        print(sample.text[max(sample.shown, 0) :], end="", flush=True)
        sample.shown = len(sample.text)
        if sample.is_ended:
            print()
            if self.arguments.log_probs:
                self._print_log_probs(sample)

    def _print_head(self, key: tuple[int, int]) -> None:
        """Print a line above a sample, if there are several."""
        request, index = key
        if len(self.prompts) * len(self.seeds) > 1:
            print(f"--- prompt {request}, seed {self.seeds[index]}")

    def _print_log_probs(self, sample: _Printed) -> None:
        for event in sample.events:
            print(f"{event.log_prob:10.4f}  {event.token:8}  {self.tokenizer.decode([event.token])!r}")
        total = sum(event.log_prob for event in sample.events)
        print(f"{total:10.4f}  {len(sample.events)} tokens")

    def _as_json(self, key: tuple[int, int], sample: _Printed) -> dict[str, Any]:
        request, index = key
        found = {
            "prompt": request,
            "seed": self.seeds[index],
            "text": sample.text,
            "tokens": [event.token for event in sample.events],
            "finish": sample.events[-1].finish,
        }
        if self.arguments.log_probs:
            found["log_probs"] = [event.log_prob for event in sample.events]
        return found
