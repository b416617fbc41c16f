"""The byte-level GPT of `tools/dev.py train`, read from its run: the shape from run.json, weights from a checkpoint.

The decoder is written out from the names of the tensors, so neither the code of the run nor Transformers is needed;
tests/main_job holds it equal to the module.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import attrs
import torch
from torch import Tensor

from zengine.commands import CommandError
from zengine.inference.matching import gelu_tanh
from zengine.inference.sizes import Header
from zengine.inference.structure import (
    MLP,
    Attention,
    Block,
    Decoder,
    Embedding,
    FusedQKV,
    Head,
    MLPInput,
    Norm,
    Projection,
    Rotary,
    RotaryStyle,
)

if TYPE_CHECKING:
    from zckpt import Checkpoint

__all__ = ["ByteGPTShape", "decoder_of", "find_run", "read_run_decoder", "read_shape", "run_headers"]

_RECIPE, _PREFIX = "run.json", "model."  # of the weights in an engine's checkpoint
_EPS = 1e-5  # of torch's LayerNorm
_MOST = 1 << 20  # of any size in a recipe


@attrs.frozen(kw_only=True)
class ByteGPTShape:
    """Sizes of the model, as run.json has them."""

    depth: int
    width: int
    heads: int
    context: int  # longest window, in bytes
    experts: int = 0


def find_run(path: Path) -> Path | None:
    """Return the folder of the run that `path` is, or is a checkpoint of; None if it is neither."""
    above = (path.parent, path.parent.parent) if _holds_checkpoints(path) else ()
    return next((each for each in (path, *above) if _is_run(each)), None)


def _holds_checkpoints(path: Path) -> bool:
    """Return whether a folder is a checkpoint of zckpt's, or the root of some; a model exported into a run is not."""
    return (path / "manifest.json").is_file() or any(path.glob("*/manifest.json"))


def _is_run(folder: Path) -> bool:
    try:
        return isinstance(json.loads((folder / _RECIPE).read_text("utf-8"))["shape"], dict)
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return False


def read_shape(run: Path) -> ByteGPTShape:
    """Return the shape of a run's model.  Raises CommandError for one that is not ours, or has experts."""
    recipe = run / _RECIPE
    try:
        shape = ByteGPTShape(**json.loads(recipe.read_text("utf-8"))["shape"])
    except TypeError as error:
        raise CommandError(f"{recipe}: the shape is not that of a byte-level GPT: {error}") from None
    bad = {
        name: value for name, value in attrs.asdict(shape).items() if type(value) is not int or not 0 <= value < _MOST
    }
    if bad or 0 in (shape.depth, shape.width, shape.heads, shape.context) or shape.width % (2 * shape.heads):
        raise CommandError(f"{recipe}: no model has the shape {attrs.asdict(shape)}")
    if shape.experts:
        raise CommandError(f"{run} is a mixture of experts, which this command does not read; train without --expert")
    return shape


def read_run_decoder(path: Path, run: Path, dtype: torch.dtype | None) -> tuple[Decoder, ByteGPTShape]:
    """Return the decoder of a run's newest checkpoint, or of the checkpoint `path`.

    dtype: of all weights; None keeps that of the checkpoint.  Raises CommandError, or zckpt's CheckpointError.
    """
    shape, checkpoint = read_shape(run), _checkpoint(path, run)
    weights = {name: checkpoint.tensor(_PREFIX + name) for name in _names(shape)}
    if wrong := [name for name, each in weights.items() if tuple(each.shape) != _shape_of(name, shape)]:
        raise CommandError(f"{checkpoint.path}: {wrong[0]} has another shape than {run / _RECIPE} says")
    return decoder_of({name: each.to(dtype or each.dtype) for name, each in weights.items()}, shape), shape


def run_headers(path: Path, run: Path) -> list[Header]:
    """Return shapes and dtypes of the weights of a run.  Raises as `read_run_decoder`."""
    stored = _checkpoint(path, run).manifest.tensors
    names = [name for name in stored if name.startswith(_PREFIX)]
    return [Header(name.removeprefix(_PREFIX), tuple(stored[name].shape), stored[name].dtype) for name in names]


def _checkpoint(path: Path, run: Path) -> Checkpoint:
    from zckpt import find, open_checkpoint

    if (path / "manifest.json").is_file():
        return open_checkpoint(path)
    root = run / "checkpoints" if path == run else path
    if not root.is_dir():
        raise CommandError(f"{run} has no checkpoint yet: {root} does not exist")
    return find(root)


def _shape_of(name: str, shape: ByteGPTShape) -> tuple[int, ...]:
    """Return the shape of a weight by its name in the module."""
    width, (_, layer, part) = shape.width, f"..{name}".rsplit(".", 2)
    rows = {"token_embedding": 256, "qkv": 3 * width, "mlp_in": 4 * width}.get(layer, width)
    if part == "bias" or "norm" in layer:
        return (rows,)
    return (rows, 4 * width if layer == "mlp_out" else width)


_LAYERS = ("attention_norm", "qkv", "attention_out", "mlp_norm", "mlp_in", "mlp_out")


def _names(shape: ByteGPTShape) -> list[str]:
    layers = [f"blocks.{i}.{layer}" for i in range(shape.depth) for layer in _LAYERS]
    return [
        "token_embedding.weight",
        *(f"{each}.{part}" for each in (*layers, "final_norm") for part in ("weight", "bias")),
    ]


def decoder_of(weights: Mapping[str, Tensor], shape: ByteGPTShape) -> Decoder:
    """Return the decoder with these weights, by their names in the module."""
    size = shape.width // shape.heads
    rotary = Rotary(style=RotaryStyle.HALVES, size=size, make_tables=functools.partial(_tables, size))

    def norm(name: str) -> Norm:
        return Norm(weight=weights[f"{name}.weight"], bias=weights[f"{name}.bias"], eps=_EPS, is_centered=True)

    def projection(name: str) -> Projection:
        return Projection(name, weights[f"{name}.weight"], weights[f"{name}.bias"])

    def block(name: str) -> Block:
        attention = Attention(
            projections=(projection(f"{name}.qkv"),),
            fused=FusedQKV.STACKED,
            out=projection(f"{name}.attention_out"),
            num_heads=shape.heads,
            num_kv_heads=shape.heads,
            head_size=size,
            rotary=rotary,
            scale=size**-0.5,
        )
        mlp = MLP(
            up=projection(f"{name}.mlp_in"),
            down=projection(f"{name}.mlp_out"),
            act=gelu_tanh,
        )
        return Block(
            name=name,
            attention_norm=norm(f"{name}.attention_norm"),
            attention=attention,
            mlp_input=MLPInput.RESIDUAL,
            mlp_norm=norm(f"{name}.mlp_norm"),
            mlp=mlp,
        )

    tokens = weights["token_embedding.weight"]
    return Decoder(
        embedding=Embedding(tokens=tokens),
        blocks=tuple(block(f"blocks.{i}") for i in range(shape.depth)),
        norm=norm("final_norm"),
        head=Head(projection=Projection("head", tokens)),
    )


def _tables(size: int, count: int) -> tuple[Tensor, Tensor]:
    """Return cosines and sines of the angles of `count` positions, (count, size / 2) each."""
    speeds = 10_000.0 ** -torch.arange(0, 1, 2 / size)
    angles = torch.outer(torch.arange(count), speeds)
    return angles.cos(), angles.sin()
