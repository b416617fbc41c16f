"""Work of a step: tokens, FLOPs by the formula of a transformer, and the peak FLOPS of devices.

    FLOPs of a sequence of s tokens = 2 f N s + 4 f L h s^2

N parameters, L layers of width h; f = 3 (a forward costs 2 FLOPs per parameter and token, a backward twice that),
f = 4 if backward recomputes all activations, and in between if it recomputes some.  The second term is the
attention's two matrix products; it is omitted, with a warning, if L and h are unknown.  MFU always uses f = 3: it
counts the operations that the mathematics needs (Chowdhery et al. 2022, appendix B).

Tokens are counted from the shape of the first two-dimensional integer tensor among the arguments of forward, so
nothing waits for the device; padding counts.  `engine.report_tokens(n)` in a step, or `tokens_per_sample` in the
config, overrides the count.  Rank 0's numbers stand for all replicas.

Peaks, the denominator of the model FLOPs utilisation (MFU), are the vendors' figures for dense bf16 matrix products
(fp16 where a device lacks bf16), without sparsity.  Unlisted devices, including every CPU, report no MFU unless the
config sets the peak ("timers": {"throughput": {"peak_tflops": ...}}).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, final

import attrs
import torch
from torch import Tensor

from zengine.telemetry.throughput import Work

_INTEGERS = (torch.int64, torch.int32, torch.int16, torch.uint8)
_FIRST = ("input_ids", "tokens")  # arguments to look at first

# TFLOPS of one device.  Longer names first where one is part of another: the first that the device's name contains
# counts.
PEAK_TFLOPS = {
    "GB300": 2500.0,
    "B300": 2250.0,
    "GB200": 2500.0,
    "B200": 2250.0,
    "GH200": 989.4,
    "H200 NVL": 835.5,
    "H200": 989.4,
    "H100 NVL": 835.5,
    "H100 PCIe": 756.0,
    "H100": 989.4,
    "H800": 989.4,
    "H20": 148.0,
    "A100": 312.0,
    "A800": 312.0,
    "L40S": 362.0,
    "L40": 181.0,
    "L4": 121.0,
    "A40": 149.7,
    "A30": 165.0,
    "A10G": 70.0,
    "A10": 125.0,
    "V100": 125.0,
    "T4": 65.0,
    "RTX 6000 Ada": 364.2,
    "RTX A6000": 154.8,
    "RTX 5090": 209.5,
    "RTX 4090": 165.2,
    "RTX 3090": 71.0,
    "MI325X": 1307.4,
    "MI300X": 1307.4,
    "MI250X": 383.0,
}


@attrs.frozen(kw_only=True)
class Formula:
    """Transformer dimensions of the FLOPs formula."""

    num_parameters: int  # of the whole model
    num_layers: int = 0  # 0: unknown; the attention's term is omitted
    hidden_size: int = 0  # 0: as for num_layers

    def flops(self, tokens: float, squares: float, coefficient: float) -> float:
        """Return FLOPs of sequences with `tokens` tokens in total and `squares` as the sum of squared lengths."""
        linear = 2 * coefficient * self.num_parameters * tokens
        return linear + 4 * coefficient * self.num_layers * self.hidden_size * squares


@final
@attrs.define(eq=False)
class Meter:
    """Sums the input tokens of one rank between two boundaries."""

    replicas: int  # ranks with other samples or other tokens
    pieces: int = 1  # ranks that share each sequence; a sequence is this many times as long as forward's input
    tokens_per_sample: int = 0  # 0: counted
    formula: Formula = Formula(num_parameters=0)
    coefficient: float = 3  # 4 if all activations are recomputed
    flops_per_sample: float = 0.0  # counted; 0: not counted
    tokens: int = 0  # of this rank since the boundary
    squares: int = 0  # squares of the lengths of its sequences
    reported: int = 0  # tokens reported by the caller, which replace the counted ones
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


@attrs.frozen(kw_only=True)
class Fleet:
    """Devices that train together."""

    num_devices: int = 1  # ranks that train together, one device each
    peak_tflops: float = 0.0  # of one of them; 0: unknown


def peak_of(device: torch.device) -> float:
    """Return the peak TFLOPS of `device`; 0 if it is not in the table."""
    return peak_by_name(torch.cuda.get_device_name(device)) if device.type == "cuda" else 0.0


def peak_by_name(name: str) -> float:
    """Return the peak TFLOPS of a device name such as "NVIDIA H100 80GB HBM3"; 0 if unknown."""
    words = name.replace("-", " ").split()
    return next((peak for known, peak in PEAK_TFLOPS.items() if _holds(words, known.split())), 0.0)


def _holds(words: list[str], known: list[str]) -> bool:
    """Return True if all words of a table entry occur ("A10" does not match "NVIDIA A100", nor "L4" "L40")."""
    return all(word in words for word in known)
