"""Quality of changed weights: what a quantized decoder loses, over a text, against the one that it came from."""

from __future__ import annotations

import math
from collections.abc import Iterable

import attrs
import torch
from torch import Tensor

from zengine.inference.cache import KVCache
from zengine.inference.decoder import DecoderPass
from zengine.inference.structure import Decoder

__all__ = ["Quality", "compare"]


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
        return self.bits / self.reference_bits - 1


@torch.no_grad()
def compare(changed: Decoder, reference: Decoder, windows: Iterable[Tensor]) -> Quality:
    """Predict the tokens of each window with both decoders.

    windows: (time,) int64 each, at least two tokens; the first of a window is not predicted.

    Raises ValueError if there are none.
    """
    losses: list[Tensor] = []
    reference_losses: list[Tensor] = []
    kls: list[Tensor] = []
    same = 0
    for window in windows:
        logs = [torch.log_softmax(_logits(each, window[:-1]).double(), -1) for each in (changed, reference)]
        found, wanted = logs
        at = window[1:, None]
        losses.append(-found.gather(1, at))
        reference_losses.append(-wanted.gather(1, at))
        kls.append((wanted.exp() * (wanted - found)).sum(-1))
        same += int((found.argmax(-1) == wanted.argmax(-1)).sum())
    if not losses:
        raise ValueError("compare() got no windows: the text is shorter than one window")
    count, kl = sum(each.numel() for each in kls), torch.cat(kls)
    return Quality(
        num_tokens=count,
        bits=float(torch.cat(losses).mean()) / math.log(2),
        reference_bits=float(torch.cat(reference_losses).mean()) / math.log(2),
        top_1=same / count,
        kl_mean=float(kl.mean()),
        kl_high=float(torch.quantile(kl, 0.999)),
    )


def _logits(decoder: Decoder, ids: Tensor) -> Tensor:
    return DecoderPass(decoder, KVCache.create(decoder, 1, len(ids))).forward_all(ids, 0)
