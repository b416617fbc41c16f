"""Work of a step: tokens, and FLOPs by the formula of a transformer.

    FLOPs of a sequence of s tokens = 2 f N s + 4 f L h s^2

N parameters, L layers of width h; f = 3 (a forward costs 2 FLOPs per parameter and token, a backward twice that),
f = 4 if backward recomputes all activations, and in between if it recomputes some.  The second term is the
attention's two matrix products; it is omitted, with a warning, if L and h are unknown.  MFU always uses f = 3: it
counts the operations that the mathematics needs (Chowdhery et al. 2022, appendix B).

Tokens are counted from the shape of the first two-dimensional integer tensor among the arguments of forward, so
nothing waits for the device; padding counts.  `engine.report_tokens(n)` in a step, or `tokens_per_sample` in the
config, overrides the count.  Rank 0's numbers stand for all replicas.
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
    """Transformer dimensions of the FLOPs formula."""

    num_parameters: int  # of the whole model
    num_layers: int = 0  # 0: unknown, and the attention's term is left out
    hidden_size: int = 0  # the same

    def flops(self, tokens: float, squares: float, coefficient: float) -> float:
        """Return FLOPs of sequences with `tokens` tokens in total and `squares` as the sum of squared lengths."""
        linear = 2 * coefficient * self.num_parameters * tokens
        return linear + 4 * coefficient * self.num_layers * self.hidden_size * squares


@final
@attrs.define(eq=False)
class Meter:
    """Sums the input tokens of one rank between two boundaries."""

    replicas: int  # ranks that do the same with other data, or with other tokens
    pieces: int = 1  # ranks that share each sequence: it is as many times as long as what forward is given
    tokens_per_sample: int = 0  # 0: counted
    formula: Formula = Formula(num_parameters=0)
    coefficient: float = 3  # 4 where all activations are computed again
    flops_per_sample: float = 0.0  # counted once; 0: not
    tokens: int = 0  # of this rank since the boundary
    squares: int = 0  # squares of the lengths of its sequences
    reported: int = 0  # tokens that the caller knows of, which count in place of those
    last_samples: int = 0  # sample counter at the last boundary

    def forward(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Count the tokens of a training forward."""
        for batch, length in shapes_of_tokens(args, kwargs):
            self.tokens += batch * length
            self.squares += batch * length * length * self.pieces

    def report_tokens(self, num_tokens: int) -> None:
        """Add tokens of this rank in this step; they replace the counted ones."""
        self.reported += num_tokens

    def step_end(self, samples: int) -> Work:
        """Return the work of the step that ends at `samples` samples of all ranks."""
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
        """Begin a step at `samples` samples."""
        self.tokens = self.squares = self.reported = 0
        self.last_samples = samples

    def _lengths(self, samples: float) -> tuple[float, float]:
        """Return this rank's tokens and the sum of its squared sequence lengths."""
        if self.reported:
            return self.reported, self.reported**2 / samples if samples else 0.0  # samples are pieces, too
        if self.tokens_per_sample:
            return samples * self.tokens_per_sample, samples * self.tokens_per_sample**2
        return self.tokens, self.squares


def shapes_of_tokens(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Iterator[tuple[int, int]]:
    """Yield (batch, length) of the first integer tensor [batch, length] among the arguments, if any.

    `input_ids` comes first, then positional arguments, then other keywords; dicts and lists are searched one level
    deep.
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
