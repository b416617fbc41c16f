"""The memory of a case: lists of tensors by name, made on first use and shared by all contenders.

At 100M parameters a private copy for each of eight contenders would need 13 GB.  Sharing is harmless: the time of a
step does not depend on values, as long as they stay normal numbers, and they do.
"""

from __future__ import annotations

import attrs
import torch
from torch import Tensor

__all__ = ["SHAPES", "Arena", "numels_of"]

BLOCK_NUMEL = 256  # elements that share a scale of an 8-bit state
PATTERN_NUMEL = 2**20  # length of the random pattern that repeats along a tensor


def _gpt2_medium() -> list[int]:
    """Numbers of elements of the 292 parameters of GPT-2 with 24 layers (355M), in the order of the model."""
    width = 1024
    norm = [width, width]
    layer = [*norm, 3 * width * width, 3 * width, width * width, width, *norm]
    layer += [4 * width * width, 4 * width, 4 * width * width, width]
    return [50257 * width, 1024 * width, *(layer * 24), *norm]


SHAPES = {"flat": [1], "gpt2": _gpt2_medium()}


def numels_of(shape: str, total: int) -> tuple[int, ...]:
    """The tensors of a shape, scaled to `total` elements; at least one element each."""
    whole = SHAPES[shape]
    scaled = [max(1, part * total // sum(whole)) for part in whole]
    scaled[0] = max(1, scaled[0] + total - sum(scaled))
    return tuple(scaled)


@attrs.define(eq=False)
class Arena:
    """Lists of tensors by (name, dtype); all tensors are one-dimensional and own their memory.

    "weight" and "master" begin as the same values, "grad" as normal numbers, everything else as zeros.
    """

    numels: tuple[int, ...]
    device: torch.device
    _lists: dict[tuple[str, torch.dtype], list[Tensor]] = attrs.field(factory=dict, init=False)

    @property
    def total(self) -> int:
        """Elements of all tensors."""
        return sum(self.numels)

    def get(self, name: str, dtype: torch.dtype = torch.float32) -> list[Tensor]:
        """Return the tensors of one stream; those with a name in "_scale" have one element per 256."""
        key = (name, dtype)
        if key not in self._lists:
            sizes = [-(-n // BLOCK_NUMEL) if name.endswith("_scale") else n for n in self.numels]
            self._lists[key] = [torch.zeros(size, dtype=dtype, device=self.device) for size in sizes]
            if name in ("weight", "master", "grad"):
                self._fill(self._lists[key], seed=1 if name == "grad" else 0, width=1.0 if name == "grad" else 0.02)
        return self._lists[key]

    def parameters(self, name: str, dtype: torch.dtype = torch.float32) -> list[torch.nn.Parameter]:
        """New leaves over the memory of a stream: every optimizer has its own `.grad` and state on them."""
        return [torch.nn.Parameter(tensor) for tensor in self.get(name, dtype)]

    def with_grads(
        self, name: str, grads: str, dtype: torch.dtype = torch.float32, grad_dtype: torch.dtype = torch.float32
    ) -> list[torch.nn.Parameter]:
        """New leaves whose gradients are the stream `grads`."""
        leaves = self.parameters(name, dtype)
        for leaf, grad in zip(leaves, self.get(grads, grad_dtype)):
            leaf.grad = grad
        return leaves

    def _fill(self, tensors: list[Tensor], seed: int, width: float) -> None:
        size = min(max(self.numels), PATTERN_NUMEL)
        pattern = torch.randn(size, generator=torch.Generator().manual_seed(seed)).mul_(width)
        for tensor in tensors:
            # The upper half of the float32 bits for bf16: a split master must agree with its remainder of 0.
            for start in range(0, tensor.numel(), size):
                piece = tensor[start : start + size]
                piece.copy_(pattern[: piece.numel()].bfloat16())
