"""Quality of changed weights: what a quantized decoder loses, over a text, against the one that it came from.

Bits per byte compare models with different tokenizers.  A text is cut into windows of tokens that overlap by one, or
begin with the model's begin-of-text token, so every token is predicted once, and the bytes are those of the text.
Each window is predicted from an empty cache, by whole passes: the arithmetic of prompts.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import final

import attrs
import numpy as np
import torch
from torch import Tensor

from zengine.inference.cache import KVCache
from zengine.inference.decoder import DecoderPass
from zengine.inference.structure import Decoder
from zengine.inference.tokenizers import Tokenizer

__all__ = ["Quality", "TextWindows", "compare", "text_windows"]

_BROKEN = "\N{REPLACEMENT CHARACTER}"
_CHUNK_NUMEL = 1 << 21  # logits that are widened to float64 at once


@attrs.frozen(kw_only=True)
class Quality:
    """Differences over a text, each position once."""

    num_tokens: int  # that were predicted
    bits: float  # per token, of the changed decoder (cross entropy, base 2)
    reference_bits: float  # of the other
    top_1: float  # share of positions at which both find the same token likeliest
    kl_mean: float  # nats: KL(reference || changed) of a position (Kullback and Leibler 1951)
    kl_high: float  # its 99.9th percentile

    @property
    def bits_change(self) -> float:
        """Change of the bits, relative: 0.01 is one percent worse."""
        return self.bits / self.reference_bits - 1 if self.reference_bits else math.inf

    def bits_per_byte(self, num_bytes: int) -> tuple[float, float]:
        """Return the bits per byte of the changed decoder and of the other; num_bytes: of the predicted text."""
        return self.bits * self.num_tokens / num_bytes, self.reference_bits * self.num_tokens / num_bytes


@final
@attrs.frozen(eq=False)
class TextWindows:
    """A text as windows of tokens, made as they are asked for."""

    tokens: Tensor  # (n,) int64
    begin: int | None  # first token of each window; None: windows overlap by one
    context: int  # tokens of a window that are read
    num_bytes: int  # of the tokens that are predicted

    def __iter__(self) -> Iterator[Tensor]:
        """Yield (time,) int64 tokens, of which the first is not predicted."""
        size = self.context if self.begin is None else self.context - 1
        for start in range(0, self.tokens.numel() - (self.begin is None), size):
            if self.begin is None:
                yield self.tokens[start : start + size + 1]
            else:
                yield torch.cat((torch.tensor([self.begin]), self.tokens[start : start + size]))

    def __len__(self) -> int:
        """Return the number of windows."""
        size = self.context if self.begin is None else self.context - 1
        return -(-(self.tokens.numel() - (self.begin is None)) // size)


def text_windows(text: str, tokenizer: Tokenizer, context: int) -> TextWindows:
    """Cut a text.  context: tokens that a window reads, at least 2.

    Raises ValueError if the text has fewer than two tokens.
    """
    if context < 2:
        raise ValueError(f"a context of {context} tokens predicts nothing; pass at least 2")
    tokens, begin = torch.tensor(tokenizer.encode(text), dtype=torch.int64), tokenizer.begin
    if tokens.numel() < 2:
        raise ValueError(f"the text has {tokens.numel()} tokens; at least 2 are needed")
    first = "" if begin is not None else tokenizer.decode(tokens[:1].tolist())
    unseen = len(first.replace(_BROKEN, "?").encode())  # a part of a character is a byte
    return TextWindows(tokens, begin, context, max(1, len(text.encode()) - unseen))


@torch.no_grad()
def compare(changed: Decoder, reference: Decoder, windows: Iterable[Tensor]) -> Quality:
    """Predict the tokens of each window with both decoders.

    windows: (time,) int64 each, at least two tokens; the first of a window is not predicted.

    Raises ValueError if there are none, or for a token outside of the vocabulary.
    """
    vocabulary = min(each.embedding.tokens.shape[0] for each in (changed, reference))
    tested, full = _Scorer(changed), _Scorer(reference)
    bits = reference_bits = 0.0
    kls: list[Tensor] = []
    same = 0
    for window in windows:
        if not 0 <= int(window.min()) <= int(window.max()) < vocabulary:
            raise ValueError(
                f"the text has token {int(window.max())}; the vocabulary has {vocabulary}: is it another model's "
                "tokenizer?"
            )
        logits, wanted, targets = tested.logits(window[:-1]), full.logits(window[:-1]), window[1:]
        rows = max(1, _CHUNK_NUMEL // logits.shape[-1])
        given = (logits, wanted, targets.to(logits.device))
        for parts in zip(*(torch.split(each, rows) for each in given), strict=True):
            found = _differences(*parts)
            bits, reference_bits = bits + found[0], reference_bits + found[1]
            kls.append(found[2])
            same += found[3]
    if not kls:
        raise ValueError("compare() got no windows: the text is shorter than one window")
    kl = torch.cat(kls).numpy()
    return Quality(
        num_tokens=len(kl),
        bits=bits / len(kl),
        reference_bits=reference_bits / len(kl),
        top_1=same / len(kl),
        kl_mean=float(kl.mean()),
        kl_high=float(np.quantile(kl, 0.999)),
    )


def _differences(logits: Tensor, wanted: Tensor, targets: Tensor) -> tuple[float, float, Tensor, int]:
    """Return the bits of both, KL of each position, and the number of equal choices.

    logits, wanted: (rows, vocabulary) of the changed decoder and of the other; targets: (rows,) int64.
    """
    found, full = (torch.log_softmax(each.double(), -1) for each in (logits, wanted))
    at = targets[:, None]
    bits = [-float(each.gather(1, at).sum()) / math.log(2) for each in (found, full)]
    kl = (full.exp() * (full - found)).sum(-1).cpu()
    return bits[0], bits[1], kl, int((logits.argmax(-1) == wanted.argmax(-1)).sum())


@final
@attrs.define(eq=False)
class _Scorer:
    """A decoder with a cache that grows to the longest window."""

    decoder: Decoder
    steps: DecoderPass | None = None

    def logits(self, ids: Tensor) -> Tensor:
        """Return (time, vocabulary) logits after each of the (time,) ids."""
        if self.steps is None or self.steps.cache.capacity < len(ids):
            self.steps = DecoderPass(self.decoder, KVCache.create(self.decoder, 1, len(ids)))
        try:
            return self.steps.forward_all(ids.to(self.decoder.embedding.tokens.device), 0)
        finally:
            self.steps.cache.clear(0)
