"""Choice of the next token from logits, by a rule and a number in [0, 1).

The order is that of Transformers: repetition penalty, temperature, top-k, top-p.  The number comes from a counter-
based generator (Philox; Salmon et al. 2011) keyed by the sample's seed, at the token's index, so a sample does not
depend on its batch, its slot or the samples before it, and continues anywhere without stored state.
"""

from __future__ import annotations

from collections.abc import Sequence

import attrs
import numpy as np
import torch
from torch import Tensor

__all__ = ["Sampling", "choose", "uniform"]


def _check(condition: bool, name: str, value: object, allowed: str) -> None:
    if not condition:
        raise ValueError(f"sampling: {name} is {value!r}; it must be {allowed}")


@attrs.frozen(kw_only=True)
class Sampling:
    """How tokens are chosen, and when a sample ends."""

    max_new_tokens: int = 128
    temperature: float = 1.0  # 0: the most likely token
    top_k: int = 0  # the k most likely tokens only; 0: all
    top_p: float = 1.0  # the likeliest tokens that together have this probability (Holtzman et al. 2020)
    repetition_penalty: float = 1.0  # divides positive logits of tokens seen, multiplies negative ones (CTRL, 2019)
    stop_tokens: tuple[int, ...] = ()  # end a sample, of which they are the last token
    stop_strings: tuple[str, ...] = ()  # end a sample whose text contains one; need a tokenizer

    def __attrs_post_init__(self) -> None:
        _check(self.max_new_tokens >= 1, "max_new_tokens", self.max_new_tokens, "at least 1")
        _check(self.temperature >= 0, "temperature", self.temperature, "0 (greedy) or more")
        _check(self.top_k >= 0, "top_k", self.top_k, "0 (all) or more")
        _check(0 < self.top_p <= 1, "top_p", self.top_p, "above 0, at most 1")
        _check(self.repetition_penalty > 0, "repetition_penalty", self.repetition_penalty, "above 0")
        _check(all(self.stop_strings), "stop_strings", self.stop_strings, "strings that are not empty")

    @property
    def is_greedy(self) -> bool:
        """Whether the seed has no effect."""
        return self.temperature == 0 or self.top_k == 1


def uniform(seed: int, index: int) -> float:
    """Return the number in [0, 1) of token `index` of the sample with this seed."""
    key, counter = seed % (1 << 128), index
    return float(np.random.Generator(np.random.Philox(key=key, counter=counter)).random())


def choose(logits: Tensor, rule: Sampling, seen: Sequence[int], number: float) -> tuple[int, float]:
    """Return the next token, and its log-probability under the model (before rule and temperature).

    The log-probability has the bits of `torch.log_softmax(logits.float(), -1)`, as a trainer computes it.

    logits: (vocabulary,) floating.  seen: tokens of prompt and sample so far, for the repetition penalty.
    number: in [0, 1); unused if the rule is greedy.

    Raises ValueError if a logit is NaN or infinite; -infinity excludes a token, but not all.
    """
    logits = logits.detach()
    log_probs = torch.log_softmax(logits.to(torch.promote_types(logits.dtype, torch.float32)), -1)
    logits = logits.to("cpu", torch.float64)
    if torch.isnan(logits).any() or not torch.isfinite(logits.max()):
        raise ValueError("the model's logits contain NaN or infinity, or are all -infinity: no token can be chosen")
    token = _choose(logits, rule, seen, number)
    return token, log_probs[token].item()


def _choose(logits: Tensor, rule: Sampling, seen: Sequence[int], number: float) -> int:
    if rule.repetition_penalty != 1.0 and seen:
        at = torch.tensor(sorted(set(seen)))
        penalized = torch.where(
            logits[at] < 0, logits[at] * rule.repetition_penalty, logits[at] / rule.repetition_penalty
        )
        logits = logits.index_copy(0, at, penalized)
    if rule.is_greedy:
        return int(logits.argmax())
    ordered, tokens = torch.sort((logits - logits.max()) / rule.temperature, descending=True, stable=True)
    if rule.top_k:
        ordered = ordered[: rule.top_k]
    cumulated = torch.softmax(ordered, 0).cumsum(0)
    if rule.top_p < 1:
        kept = 1 + int((cumulated[:-1] < rule.top_p).sum())
        cumulated = torch.softmax(ordered[:kept], 0).cumsum(0)
    return int(tokens[min(int((cumulated <= number * cumulated[-1]).sum()), len(cumulated) - 1)])
