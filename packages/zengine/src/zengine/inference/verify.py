"""Comparison of a recognised decoder with its module: a whole prompt, and token by token over the cache."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import attrs
import torch
from torch import Tensor, nn

from zengine.inference.cache import KVCache
from zengine.inference.decoder import DecoderPass
from zengine.inference.recognize import NotRecognized, run_module
from zengine.inference.structure import Decoder

__all__ = ["Verified", "verify"]

# Largest accepted difference of logits, relative to their largest magnitude.
TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-5, torch.bfloat16: 3e-2, torch.float16: 5e-3}


@attrs.frozen(kw_only=True)
class Verified:
    """Largest differences of logits, relative to the largest magnitude of the module's."""

    prompt_error: float  # of one pass over all tokens
    decode_error: float  # of one token at a time


def verify(
    decoder: Decoder,
    model: nn.Module,
    run: Callable[[nn.Module, Tensor], Any] = run_module,
    *,
    num_tokens: int = 24,
    seed: int = 1,
) -> Verified:
    """Run both on random tokens and compare the logits of every position.

    Raises NotRecognized if they differ by more than the tolerance of the weights' dtype.
    """
    vocabulary, device = decoder.embedding.tokens.shape[0], decoder.embedding.tokens.device
    ids = torch.randint(0, vocabulary, (1, num_tokens), generator=torch.Generator().manual_seed(seed)).to(device)
    with torch.no_grad():
        wanted = run(model, ids)[0].double()
    steps = DecoderPass(decoder, KVCache.create(decoder, 2, num_tokens))
    whole = steps.forward_all(ids[0], 0)
    alone = torch.stack([steps.forward(ids[0, at : at + 1], 1) for at in range(num_tokens)])
    largest = wanted.abs().max()
    errors = [((found - wanted).abs().max() / largest).item() for found in (whole, alone)]
    most = TOLERANCE[decoder.embedding.tokens.dtype]
    if not max(errors) <= most:
        raise NotRecognized(
            f"the decoder made from {type(model).__name__} differs from it: logits by {max(errors):.2g} of the "
            f"largest, more than {most:.0e}"
        )
    return Verified(prompt_error=errors[0], decode_error=errors[1])
