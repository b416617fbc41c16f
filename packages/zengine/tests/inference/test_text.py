import random
from collections.abc import Sequence

import pytest
import torch
from small_decoders import TIME, VOCABULARY, model

from zengine.inference.cache import KVCache
from zengine.inference.decoder import DecoderPass
from zengine.inference.generation import Request, generate, stream_text
from zengine.inference.recognize import recognize
from zengine.inference.sampling import Sampling
from zengine.inference.text import TextStream
from zengine.inference.tokenizers import ByteTokenizer

LETTERS = ["a", "b", "é", "日本", "🙂", "\N{REPLACEMENT CHARACTER}", " ", "\n", "STOP"]


def decode_bytes(tokens: Sequence[int]) -> str:
    return bytes(tokens).decode(errors="replace")


def decode_each_byte(tokens: Sequence[int]) -> str:
    """As tokenizers with byte fallback do: one U+FFFD for each byte of what is no character."""
    text, rest = "", bytes(tokens)
    while rest:
        size = next((n for n in range(1, 5) if is_character(rest[:n])), 0)
        text += rest[:size].decode() if size else "\N{REPLACEMENT CHARACTER}"
        rest = rest[size or 1 :]
    return text


def is_character(raw: bytes) -> bool:
    try:
        return len(raw.decode()) == 1
    except UnicodeDecodeError:
        return False


def decode_words(tokens: Sequence[int]) -> str:
    """As SentencePiece does: every token begins with a space, which is dropped at the beginning."""
    return "".join(f" w{token}" for token in tokens).removeprefix(" ")


def pieces(stream: TextStream, tokens: Sequence[int]) -> list[str]:
    return [*(stream.push(token) for token in tokens), stream.finish()]


@pytest.mark.parametrize("decode", [decode_bytes, decode_each_byte])
@pytest.mark.parametrize("seed", range(30))
def test_the_pieces_together_are_the_text_and_never_change(decode, seed: int) -> None:
    draw = random.Random(seed)
    text = "".join(draw.choices(LETTERS, k=draw.randrange(60)))
    found = pieces(TextStream(decode), text.encode())
    assert "".join(found) == text
    whole = [piece for piece in found[:-1] if piece]
    assert all("\N{REPLACEMENT CHARACTER}" in text for piece in whole if "\N{REPLACEMENT CHARACTER}" in piece)


@pytest.mark.parametrize("seed", range(20))
def test_bytes_that_are_no_text_come_out_as_the_decoder_has_them(seed: int) -> None:
    raw = random.Random(seed).randbytes(100)
    assert "".join(pieces(TextStream(decode_bytes), raw)) == decode_bytes(raw)


def test_spaces_between_the_windows_are_kept() -> None:
    tokens = list(range(200))
    stream = TextStream(decode_words)
    assert "".join(pieces(stream, tokens)) == decode_words(tokens)
    assert stream.window == []


def test_a_character_is_held_back_until_its_last_byte() -> None:
    stream = TextStream(decode_bytes)
    assert [stream.push(byte) for byte in "a🙂b".encode()] == ["a", "", "", "", "🙂", "b"]


def test_the_beginning_of_a_stop_string_is_held_back_and_the_text_ends_before_it() -> None:
    stream = TextStream(decode_bytes, stop_strings=("</end>", "]]"))
    assert "".join(stream.push(byte) for byte in b"x < y </en y </en") == "x < y </en y "
    assert [stream.push(byte) for byte in b"d>more"] == [""] * 6
    assert stream.is_stopped
    assert stream.finish() == ""


@pytest.mark.parametrize("seed", range(30))
def test_the_text_ends_before_the_first_stop_string_wherever_its_tokens_end(seed: int) -> None:
    draw = random.Random(seed)
    stops = ("aab", "ba", "b b")
    text = "".join(draw.choices("ab ", k=25))
    first = min((text.find(stop) for stop in stops if stop in text), default=len(text))
    assert "".join(pieces(TextStream(decode_bytes, stops), text.encode())) == text[:first]


def test_the_rest_is_not_held_when_a_sample_ends() -> None:
    assert pieces(TextStream(decode_bytes, ("xyz",)), b"axy") == ["a", "", "", "xy"]
    assert pieces(TextStream(decode_bytes), "é".encode()[:1]) == ["", "\N{REPLACEMENT CHARACTER}"]


def test_text_and_tokens_of_a_stream_are_those_of_generate() -> None:
    class Letters(ByteTokenizer):
        def decode(self, tokens: Sequence[int]) -> str:
            return "".join(chr(97 + token % 26) for token in tokens)

    decoder, tokenizer = recognize(model()), Letters()
    steps = DecoderPass(decoder, KVCache.create(decoder, 2, TIME))
    free = Request(prompt=(1, 2, 3), sampling=Sampling(max_new_tokens=20), seeds=(0, 1))
    plain = [tokenizer.decode(sample.tokens) for sample in generate(steps, [free])[0]]
    stop = plain[0][8:10]
    requests = [
        free,
        Request(prompt=(1, 2, 3), sampling=Sampling(max_new_tokens=20, stop_strings=(stop,)), seeds=(0,)),
        Request(prompt=(1, 2, 3), sampling=Sampling(max_new_tokens=20, stop_tokens=tuple(range(VOCABULARY)))),
    ]
    texts: dict[tuple[int, int], str] = {}
    finishes = {}
    for event in stream_text(steps, tokenizer, requests):
        key = event.token.request, event.token.sample
        texts[key] = texts.get(key, "") + event.text
        finishes[key] = event.token.finish
    assert [texts[0, 0], texts[0, 1]] == plain
    assert texts[1, 0] == plain[0][: plain[0].find(stop)]
    assert texts[2, 0] == "", "a stop token has no text"
    assert finishes == {(0, 0): "length", (0, 1): "length", (1, 0): "string", (2, 0): "token"}
    with pytest.raises(ValueError, match="the cache holds"):
        stream_text(steps, tokenizer, [Request(prompt=(1,) * TIME, sampling=Sampling())])
    assert torch.equal(torch.tensor(steps.cache.lengths), torch.tensor([0, 0]))


def test_stop_strings_cost_a_window_for_each_token_and_end_at_the_token_of_the_whole_text() -> None:
    decoder = recognize(model())
    steps = DecoderPass(decoder, KVCache.create(decoder, 1, 120))
    longest = 0

    def text_of(tokens: Sequence[int]) -> str:
        nonlocal longest
        longest = max(longest, len(tokens))
        return decode_words(tokens)

    rule = Sampling(max_new_tokens=100, stop_strings=("never",))
    ((free,),) = generate(steps, [Request(prompt=(1, 2), sampling=rule)], text_of)
    assert len(free.tokens) == 100
    assert longest <= 25
    for at in (0, 30, 77):
        parts = decode_words(free.tokens[at : at + 3])
        stop = parts[1:-1]  # begins and ends within tokens
        ends = next(end for end in range(101) if stop in decode_words(free.tokens[:end]))
        stopped = Sampling(max_new_tokens=100, stop_strings=("never", stop))
        ((found,),) = generate(steps, [Request(prompt=(1, 2), sampling=stopped)], text_of)
        assert (found.tokens, found.finish) == (free.tokens[:ends], "string")
