"""Comparison of a recognised decoder with its module: a whole prompt, and token by token over the cache.

Tokens go through `forward_each`, as in generation, so fused kernels are verified where they will run.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import attrs
import torch
from torch import Tensor, nn

from zengine.inference.cache import KVCache
from zengine.inference.decoder import DecoderPass
from zengine.inference.observe import uncompiled
from zengine.inference.quantized import projections
from zengine.inference.recognize import NotRecognized, fitting, learnt_positions, run_module
from zengine.inference.structure import Decoder

__all__ = ["Verified", "verify"]

LONG = 272  # tokens of the longest pass: above the usual windows of 256
_LAST = 4  # of them, that are decoded one by one

# Largest accepted difference of logits, relative to their largest magnitude.
TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-5, torch.bfloat16: 3e-2, torch.float16: 5e-3}
QUANTIZED_TOLERANCE = 3e-2  # activations are rounded to 8 bits, so that a last bit that differs may change a code


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
    longest: int = LONG,
    seed: int = 1,
) -> Verified:
    """Run both on random tokens and compare the logits of every position, also in one pass over `longest` tokens.

    Passes have at most as many tokens as the model has positions, or takes.

    Raises NotRecognized if they differ by more than the tolerance of the weights' dtype, or of quantized weights.
    """
    ids, wanted = _logits(decoder, model, run, num_tokens, seed)
    num_tokens = ids.shape[1]
    _verify_long(decoder, model, run, longest, seed)
    steps = DecoderPass(decoder, KVCache.create(decoder, 2, num_tokens))
    whole = steps.forward_all(ids[0], 0)
    alone = torch.cat([steps.forward_each(ids[0, at : at + 1], [1]) for at in range(num_tokens)])
    errors = [_error(found, wanted, decoder) for found in (whole, alone)]
    _check(max(errors), decoder, model, num_tokens)
    return Verified(prompt_error=errors[0], decode_error=errors[1])


def _verify_long(
    decoder: Decoder, model: nn.Module, run: Callable[[nn.Module, Tensor], Any], longest: int, seed: int
) -> None:
    """Compare a long prompt and the last tokens one by one: windows and positions may only show there."""
    ids, wanted = _logits(decoder, model, run, longest, seed)
    num_tokens = ids.shape[1]
    steps, start = DecoderPass(decoder, KVCache.create(decoder, 1, num_tokens)), max(1, num_tokens - _LAST)
    whole = steps.forward_all(ids[0, :start], 0)
    found = torch.cat([whole, *(steps.forward_each(ids[0, at : at + 1], [0]) for at in range(start, num_tokens))])
    _check(_error(found, wanted, decoder), decoder, model, num_tokens)


def _logits(
    decoder: Decoder, model: nn.Module, run: Callable[[nn.Module, Tensor], Any], num_tokens: int, seed: int
) -> tuple[Tensor, Tensor]:
    """Return (1, time) random tokens and the module's logits, (time, vocabulary) float64.

    time: `num_tokens`, or as many as the model has positions or takes.
    """
    vocabulary, device = decoder.embedding.vocabulary, decoder.embedding.tokens.device

    def attempt(count: int) -> tuple[Tensor, Tensor]:
        ids = torch.randint(0, vocabulary, (1, count), generator=torch.Generator().manual_seed(seed)).to(device)
        with torch.no_grad(), uncompiled():  # no graph for these lengths alone
            return ids, run(model, ids)[0].double()

    most = min(num_tokens, decoder.max_positions or num_tokens, learnt_positions(model) or num_tokens)
    return fitting(most, attempt)


def _error(found: Tensor, wanted: Tensor, decoder: Decoder) -> float:
    """Return the largest difference of logits, (time, vocabulary), over the largest magnitude.

    With 16-bit weights a router of experts may choose otherwise at a few positions; a tenth of them is left out.
    """
    by_position = (found - wanted).abs().amax(-1) / wanted.abs().max()
    may_route = decoder.chooses_experts and decoder.embedding.tokens.dtype.itemsize < 4
    return float(torch.quantile(by_position, 0.9) if may_route else by_position.max())


def _check(error: float, decoder: Decoder, model: nn.Module, num_tokens: int) -> None:
    is_quantized = any(not isinstance(each.weight, Tensor) for each in projections(decoder))
    most = QUANTIZED_TOLERANCE if is_quantized else TOLERANCE[decoder.embedding.tokens.dtype]
    if not error <= most:
        raise NotRecognized(
            f"the decoder made from {type(model).__name__} differs from it on {num_tokens} tokens: logits by "
            f"{error:.2g} of the largest, more than {most:.0e}"
        )
