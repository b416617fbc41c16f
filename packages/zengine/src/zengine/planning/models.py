"""Models and batches for planning: from a user's factory, or of a given size.

Models are built on the "meta" device (`zpartition.on_meta`).  A `Batch` maps the size of a micro-batch to the
model's argument.
"""

from __future__ import annotations

import importlib
import inspect
import math
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs
import torch
from torch import Tensor, nn
from torch.nn import functional

import zpartition

__all__ = [
    "Batch",
    "NotAFactory",
    "Shape",
    "Transformer",
    "build_model",
    "factory_batches",
    "load_factory",
    "shape_of",
    "shaped_batches",
    "token_batches",
]

VOCABULARY = 32_000
_HEAD_WIDTH = 64
_ASPECT = 85  # width / layers of published models: 50 to 130


class NotAFactory(ValueError):
    """Name that is not `module:factory` of a callable."""


def load_factory(name: str) -> Callable[..., Any]:
    """Import the callable `package.module:name`; the working directory is searched too.

    Raises NotAFactory with the names that the module has.
    """
    place, colon, attribute = name.partition(":")
    if not colon or not place or not attribute:
        raise NotAFactory(f'"{name}" is not of the form module:factory, for example "train:make_model"')
    if str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    try:
        found: Any = importlib.import_module(place)
    except ModuleNotFoundError as error:
        raise NotAFactory(f'"{name}": {error} (working directory: {Path.cwd()})') from None
    for part in attribute.split("."):
        if not hasattr(found, part):
            near = [known for known in vars(found) if not known.startswith("_") and callable(getattr(found, known))]
            raise NotAFactory(
                f'"{name}": {place} has no "{part}". It has {", ".join(sorted(near)[:8]) or "nothing"}.'
            )
        found = getattr(found, part)
    if not callable(found):
        raise NotAFactory(f'"{name}" is a {type(found).__name__}; it must be callable without arguments')
    return found  # type: ignore[no-any-return]


def build_model(name: str) -> nn.Module:
    """Build the model of a factory on the meta device."""
    made = zpartition.on_meta(load_factory(name))
    if not isinstance(made, nn.Module):
        raise NotAFactory(f'"{name}" returned a {type(made).__name__}; it must return a torch.nn.Module')
    return made


@attrs.frozen(kw_only=True)
class Shape:
    """Size of a decoder-only transformer with tied embeddings."""

    layers: int
    width: int
    vocabulary: int = VOCABULARY

    @property
    def numel(self) -> int:
        """Parameters: 12 h^2 + 13 h per layer, the embedding, the last norm."""
        return self.layers * (12 * self.width**2 + 13 * self.width) + (self.vocabulary + 2) * self.width

    def __str__(self) -> str:
        return f"a transformer of {self.layers} layers of width {self.width}, {self.numel / 1e6:,.0f}M parameters"


def shape_of(numel: float = 0, *, width: int = 0, layers: int = 0, vocabulary: int = VOCABULARY) -> Shape:
    """Return the shape nearest to `numel` parameters; given values are kept."""
    if width and layers:
        return Shape(layers=layers, width=width, vocabulary=vocabulary)
    widths = [width] if width else [_HEAD_WIDTH * k for k in range(1, 513)]

    def shape(candidate: int) -> Shape:
        left = numel - (vocabulary + 2) * candidate
        count = layers or max(1, round(left / (12 * candidate**2 + 13 * candidate)))
        return Shape(layers=count, width=candidate, vocabulary=vocabulary)

    def misfit(found: Shape) -> float:
        slender = 0 if layers or width else abs(math.log(found.width / found.layers / _ASPECT))
        return abs(math.log(found.numel / numel)) * 20 + slender

    return min(map(shape, widths), key=misfit)


class Layer(nn.Module):
    """Pre-norm attention and MLP."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.heads = max(1, width // _HEAD_WIDTH)
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Map (batch, tokens, width) to the same shape."""
        parts = self.qkv(self.norm1(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(parts[0], parts[1], parts[2], is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        widened: Tensor = x + self.down(functional.gelu(self.up(self.norm2(x))))
        return widened


class Transformer(nn.Module):
    """Token ids (batch, tokens) -> mean cross entropy of each next token."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.embed = nn.Embedding(shape.vocabulary, shape.width)
        self.layers = nn.ModuleList(Layer(shape.width) for _ in range(shape.layers))
        self.norm = nn.LayerNorm(shape.width)
        self.head = nn.Linear(shape.width, shape.vocabulary, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the loss, ()."""
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        logits = self.head(self.norm(x))
        return functional.cross_entropy(logits[:, :-1].flatten(0, 1).float(), tokens[:, 1:].flatten())


Batch = Callable[[int], Any]  # size of a micro-batch -> the model's argument


def token_batches(length: int) -> Batch:
    """Return batches of `length` token ids: (micro-batch, length) int64."""

    def make(micro_batch: int) -> Tensor:
        return torch.zeros(micro_batch, length, dtype=torch.long)

    return make


def shaped_batches(text: str, dtype: torch.dtype) -> Batch:
    """Return batches of a shape, "3x224x224" or "512": (micro-batch, *shape) of `dtype`.

    Raises ValueError for another text.
    """
    if not re.fullmatch(r"[1-9]\d*(x[1-9]\d*)*", text):
        raise ValueError(f'"{text}" is not the shape of a sample; write, for example, 3x224x224 or 512')
    shape = tuple(map(int, text.split("x")))

    def make(micro_batch: int) -> Tensor:
        return torch.zeros(micro_batch, *shape, dtype=dtype)

    return make


def factory_batches(name: str) -> Batch:
    """Return batches of `module:factory`, called with the micro-batch size.

    Raises NotAFactory if it takes no argument.
    """
    make = load_factory(name)
    try:
        inspect.signature(make).bind(1)
    except TypeError:
        raise NotAFactory(
            f'"{name}" takes no argument; it must take the micro-batch size and return the model\'s argument'
        ) from None
    except ValueError:  # a builtin without a signature
        pass
    return make
