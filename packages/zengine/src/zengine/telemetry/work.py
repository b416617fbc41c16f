"""How much work a step is: tokens, and FLOPs by the formula of a transformer.

    FLOPs of a sequence of s tokens = 2 f N s + 4 f L h s^2

N parameters, L layers of width h; f = 3 (a forward costs 2 FLOPs a parameter and token, a backward twice that), f = 4
where backward computes the activations of all layers again, and between them where of some.  The second term is the
attention's two matrix products; it is left out, and said, where L and h are unknown.  The MFU takes f = 3 in any
case: it counts what the mathematics needs (Chowdhery et al. 2022, appendix B).

Tokens are counted from the first integer tensor of two dimensions among the arguments of forward, which is read for
its shape only, so nothing waits for the device; padding counts.  Who knows better says so: `engine.report_tokens(n)`
in a step, or `tokens_per_sample` in the config.  Rank 0's numbers stand for all replicas.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, final

import attrs
import torch
from torch import Tensor

from zengine.telemetry.throughput import Work

_INTEGERS = (torch.int64, torch.int32, torch.int16, torch.uint8)
_FIRST = ("input_ids", "tokens")  # arguments that are what is looked for, if they are there


@attrs.frozen(kw_only=True)
class Formula:
    """A transformer, as the formula sees it."""

    num_parameters: int  # of the whole model
    num_layers: int = 0  # 0: unknown, and the attention's term is left out
    hidden_size: int = 0  # the same

    def flops(self, tokens: float, squares: float, coefficient: float) -> float:
        """For sequences of `tokens` tokens in all, whose lengths have squares that add up to `squares`."""
        linear = 2 * coefficient * self.num_parameters * tokens
        return linear + 4 * coefficient * self.num_layers * self.hidden_size * squares


@final
@attrs.define(eq=False)
class Meter:
    """Adds up what forward is given, on one rank, between two boundaries."""

    replicas: int  # ranks that do the same with other data, or with other tokens
    pieces: int = 1  # ranks that share each sequence: it is as many times as long as what forward is given
    tokens_per_sample: int = 0  # 0: counted
    formula: Formula = Formula(num_parameters=0)
    coefficient: float = 3  # 4 where all activations are computed again
    flops_per_sample: float = 0.0  # counted once; 0: not
    tokens: int = 0  # of this rank since the boundary
    squares: int = 0  # squares of the lengths of its sequences
    told: int = 0  # tokens that the caller knows of, which count in place of those
    last_samples: int = 0  # sample counter at the last boundary

    def forward(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """A training forward begins."""
        for batch, length in shapes_of_tokens(args, kwargs):
            self.tokens += batch * length
            self.squares += batch * length * length * self.pieces

    def tell(self, num_tokens: int) -> None:
        """Tokens of this rank in this step, which replace what would be counted."""
        self.told += num_tokens

    def step_end(self, samples: int) -> Work:
        """The step that ends at `samples` samples of all ranks."""
        tokens, squares = self._lengths((samples - self.last_samples) / self.replicas)
        counted = self.flops_per_sample * (samples - self.last_samples)
        self.reset(samples)
        return Work(
            tokens=round(tokens * self.replicas),
            flops=self.formula.flops(tokens, squares, self.coefficient) * self.replicas,
            useful_flops=self.formula.flops(tokens, squares, 3) * self.replicas,
            counted_flops=counted,
        )

    def reset(self, samples: int) -> None:
        """Begin a step at that many samples."""
        self.tokens = self.squares = self.told = 0
        self.last_samples = samples

    def _lengths(self, samples: float) -> tuple[float, float]:
        """Tokens of this rank, and the sum of the squares of its sequences' lengths."""
        if self.told:
            return self.told, self.told**2 / samples if samples else 0.0  # samples are pieces, too
        if self.tokens_per_sample:
            return samples * self.tokens_per_sample, samples * self.tokens_per_sample**2
        return self.tokens, self.squares


def shapes_of_tokens(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Iterator[tuple[int, int]]:
    """(batch, length) of the first integer tensor [batch, length] among the arguments; nothing if there is none.

    `input_ids` comes first by name; then positions, then the other names; batches that are a dict or a list are
    looked into, one level deep.
    """
    named = [kwargs[name] for name in _FIRST if name in kwargs]
    for value in _flat([*named, *args, *kwargs.values()]):
        if isinstance(value, Tensor) and value.dim() == 2 and value.dtype in _INTEGERS:
            yield value.shape[0], value.shape[1]
            return


def _flat(values: list[Any]) -> Iterator[Any]:
    for value in values:
        if isinstance(value, Mapping):
            yield from [value[name] for name in _FIRST if name in value]
            yield from value.values()
        elif isinstance(value, (list, tuple)):
            yield from value
        else:
            yield value
