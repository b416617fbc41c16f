"""Matching of observed numbers with what a decoder's parts compute.

Each function tries the forms that models have, computes each from the observed input, and returns the one that gives
the observed output; the closest wins, if it is close enough for the dtype.  Constants that a form needs (a scale, a
soft cap, a base) are taken from attributes of the modules and of `model.config`, under whatever name they stand.

Rejected: tables of model classes (a new model is unknown until somebody writes its row), and names of submodules
(equal names compute different things: Gemma's norms add one to their weights).
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeVar

import attrs
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from zengine.adapters.merging import computed_weight
from zengine.inference.attend import attend, causal_mask
from zengine.inference.observe import Call
from zengine.inference.quantized_modules import QuantizedLinear
from zengine.inference.structure import (
    MLP,
    Attention,
    FusedQKV,
    Norm,
    Over,
    Projection,
    Ranks,
    Rotary,
    RotaryStyle,
    Unary,
)
from zpartition import tensor

__all__ = [
    *("ACTIVATIONS", "Constants", "closest", "equal", "match_activation", "match_attention", "match_mlp"),
    *("match_norm", "projection"),
]

T = TypeVar("T")

_TOLERANCE = {torch.float64: 1e-7, torch.float32: 1e-4, torch.bfloat16: 3e-2, torch.float16: 5e-3}
_EPS_NAMES = ("eps", "variance_epsilon", "norm_eps", "epsilon", "layer_norm_eps", "rms_norm_eps")
_MOST_HEAD_SIZE = 1024
_GUESSED_SIZES = (64, 128, 32, 16, 8, 80, 96, 48, 256, 160, 192, 24, 12, 20, 40)  # of heads, if no attribute fits
_BASES = (10_000.0, 1_000_000.0, 500_000.0)  # of rotary tables, if no attribute fits


def relative_error(found: Tensor, wanted: Tensor) -> float:
    """Return |found - wanted| / |wanted|, Euclidean; infinite for other shapes."""
    if found.shape != wanted.shape:
        return math.inf
    size = float(wanted.double().norm())
    return float((found.double() - wanted.double()).norm()) / (size or 1.0)


def equal(found: Tensor, wanted: Tensor) -> bool:
    """Return whether two tensors have the same values but for rounding; their shapes may differ in ones."""
    if found.numel() != wanted.numel():
        return False
    return relative_error(found.reshape(-1), wanted.reshape(-1)) < _TOLERANCE[wanted.dtype]


def closest(wanted: Tensor, forms: Iterable[tuple[T, Callable[[], Tensor]]]) -> T | None:
    """Return the form whose result is closest to `wanted`; None if none is within the tolerance of its dtype.

    A form that is exact but for a hundredth of the tolerance ends the search.
    """
    best, least = None, _TOLERANCE[wanted.dtype]
    for form, compute in forms:
        error = relative_error(compute().reshape(wanted.shape), wanted)
        if error < least:
            best, least = form, error
        if least < _TOLERANCE[wanted.dtype] / 100:
            break
    return best


@attrs.frozen(eq=False)
class Constants:
    """Numbers among the attributes of modules and of the model's config, by parts of their names."""

    found: tuple[tuple[str, float], ...]
    windows: tuple[int, ...]  # that attention may have, the likely one first; 0: none

    @classmethod
    def of(cls, modules: Iterable[object], config: object) -> Constants:
        """Collect int and float attributes; those of modules come first."""
        own = [row for owner in modules for row in vars(owner).items()]
        general = list(getattr(config, "__dict__", {}).items())
        general += [row for _, value in general if isinstance(value, dict) for row in value.items()]
        rows = [(str(name).lower(), value) for name, value in (*own, *general)]
        numbers = tuple(
            (name, value) for name, value in rows if isinstance(value, (int, float)) and value is not True
        )
        # a layer without a window says so by None, where other layers of the model have one
        said: list[Any] = [
            value or 0 for name, value in own if "window" in name and isinstance(value, (int, type(None)))
        ]
        windows: list[Any] = said or [value for name, value in numbers if "window" in name and value > 1]
        return cls(numbers, tuple(dict.fromkeys((*map(int, windows), *(() if said else (0,))))))

    def named(self, *parts: str) -> list[float]:
        """Return the values whose names contain one of `parts`, each once."""
        return list(dict.fromkeys(value for name, value in self.found if any(part in name for part in parts)))


def projection(call: Call) -> Projection | None:
    """Return the projection that a call computes; None if its module is no linear layer."""
    if isinstance(call.module, tensor.SplitLayer):
        return _split_projection(call.name, call.module)
    weight, bias = (getattr(call.module, name, None) for name in ("weight", "bias"))
    if (dense := computed_weight(call.module, call.input.dtype)) is not None:
        return Projection(call.name, dense, bias if isinstance(bias, Tensor) else None)
    if isinstance(call.module, QuantizedLinear):
        return Projection(call.name, call.module.weight, call.module.bias)
    if not isinstance(weight, Tensor) or weight.dim() != 2 or isinstance(call.module, nn.Embedding):
        return None
    if any(True for name, _ in call.module.named_parameters() if name not in ("weight", "bias")):
        return None  # what the others add may be zero now
    width_in, width_out = call.input.shape[-1], call.output.shape[-1]
    for matrix in (weight, weight.t()):  # Transformers' Conv1D has (in, out)
        if tuple(matrix.shape) == (width_out, width_in):
            found = Projection(call.name, matrix, bias if isinstance(bias, Tensor) else None)
            if equal(found(call.input.to(weight.dtype)), call.output):
                return found
    return None


def _split_projection(name: str, layer: tensor.SplitLayer) -> Projection | None:
    """Return the projection of a layer that is split over ranks; None if it cuts its own inputs."""
    held: Any = layer
    kernel, placement = getattr(layer, "kernel", None), layer.placement
    weight, bias = (kernel() if callable(kernel) else held.weight), getattr(layer, "bias", None)
    ranks: Ranks | None = None
    if isinstance(layer, tensor.ColumnForward):
        if placement.is_joined:
            ranks = Ranks(Over.OUTPUTS, layer.mp_group, output_sizes=placement.sizes)
    elif placement.is_joined:
        return None
    elif isinstance(layer, tensor.RowForward):
        ranks = Ranks(Over.COLUMNS, layer.mp_group, placement.sizes)
    elif isinstance(layer, tensor.GatheredForward):
        ranks = Ranks(Over.ROWS, layer.mp_group, placement.sizes, placement.output_sizes)
    else:
        return None
    return Projection(name, weight, bias, ranks)


def match_norm(call: Call) -> Norm | None:
    """Return the norm that a call computes."""
    vectors = {name: value for name, value in call.module.named_parameters(recurse=False) if value.dim() == 1}
    if list(call.module.children()) or len(vectors) > 2 or call.input.shape != call.output.shape:
        return None
    bias = vectors.pop("bias", None)
    weight = next(iter(vectors.values()), None)
    if weight is not None and weight.numel() != call.input.shape[-1]:
        return None
    given = [value for name in _EPS_NAMES if isinstance(value := getattr(call.module, name, None), float)]
    forms = [
        Norm(weight=weight, bias=bias, eps=eps, is_centered=is_centered, offset=offset, name=call.name)
        for eps in dict.fromkeys([*given[:1], 1e-5, 1e-6, 1e-12, 1e-8])
        for is_centered in (False, True)
        for offset in ((0.0, 1.0) if weight is not None else (0.0,))
    ]
    if given:
        forms = [form for form in forms if form.eps == given[0]]
    return closest(call.output, ((form, functools.partial(form, call.input)) for form in forms))


def gelu_tanh(x: Tensor) -> Tensor:
    """GELU by tanh (Hendrycks and Gimpel 2016)."""
    return F.gelu(x, approximate="tanh")


def quick_gelu(x: Tensor) -> Tensor:
    """x sigmoid(1.702 x), an approximation of GELU (Hendrycks and Gimpel 2016)."""
    return x * torch.sigmoid(1.702 * x)


def squared_relu(x: Tensor) -> Tensor:
    """ReLU, squared (So et al. 2021)."""
    return F.relu(x).square()


ACTIVATIONS: tuple[Unary, ...] = (F.silu, F.gelu, gelu_tanh, F.relu, quick_gelu, squared_relu, torch.tanh)


def match_activation(before: Tensor, after: Tensor, factor: Tensor | None = None) -> Unary | None:
    """Return the function f with `after` = f(before), or f(before) * factor."""

    def compute(act: Unary) -> Tensor:
        return act(before) if factor is None else act(before) * factor

    return closest(after, ((act, functools.partial(compute, act)) for act in ACTIVATIONS))


def match_mlp(calls: Sequence[Call], x: Tensor) -> MLP | None:
    """Return the MLP of two or three linear calls on x, in any order of gate and up."""
    linear = [(call, made) for call in calls if (made := projection(call)) is not None]
    reading = [each for each in linear if equal(each[0].input, x)]
    rest = [each for each in linear if each not in reading]
    if len(rest) != 1 or len(reading) not in (1, 2):
        return None
    (_down_call, down), wanted = rest[0], rest[0][0].input
    if len(reading) == 2:
        for (one, gate), (other, up) in (reading, reading[::-1]):
            if (
                act := match_activation(one.output.view_as(wanted), wanted, other.output.view_as(wanted))
            ) is not None:
                return MLP(up=up, down=down, act=act, gate=gate)
        return None
    ((call, up),) = reading
    if call.output.shape[-1] == 2 * wanted.shape[-1]:
        gate_out, up_out = (part.reshape(wanted.shape) for part in call.output.chunk(2, dim=-1))
        act = match_activation(gate_out, wanted, up_out)
        return None if act is None else MLP(up=up, down=down, act=act, is_fused=True)
    if call.output.numel() != wanted.numel():
        return None
    act = match_activation(call.output.reshape(wanted.shape), wanted)
    return None if act is None else MLP(up=up, down=down, act=act)


@attrs.frozen(eq=False)
class RotaryTables:
    """Observed cosines and sines, and how to make more."""

    cos: Tensor  # (time, size / 2)
    sin: Tensor
    make: Callable[[int], tuple[Tensor, Tensor]]


def half_tables(cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor] | None:
    """Return the tables with one column a pair, (time, size / 2); None if these are no tables of angles."""
    cos, sin = (table.reshape(-1, table.shape[-1]) for table in (cos, sin))
    if cos.shape != sin.shape or not cos.is_floating_point():
        return None
    squares = cos.double().square() + sin.double().square()
    if (squares - squares[0, 0]).abs().max() > 0.05 or squares[0, 0] < 0.1 or sin[0].abs().max() > 1e-3:
        return None
    half = cos.shape[-1] // 2
    if cos.shape[-1] % 2 == 0 and cos.shape[0] > 1:
        if torch.equal(sin[:, :half], sin[:, half:]):
            return cos[:, :half], sin[:, :half]
        if torch.equal(sin[:, ::2], sin[:, 1::2]):
            return cos[:, ::2], sin[:, ::2]
    return cos, sin


def bases(constants: Constants) -> list[float]:
    """Return the bases that rotary angles may have, the likely ones first."""
    return list(dict.fromkeys([*(value for value in constants.named("theta", "base") if value > 1), *_BASES]))


def rotary_sizes(constants: Constants) -> list[int]:
    """Return how many features of a head may be rotated, by the names of attributes."""
    return [int(each) for each in constants.named("rotary", "head_dim", "head_size") if each >= 2 and each % 2 == 0]


def guessed_rotary_sizes(width: int) -> list[int]:
    """Return the sizes of heads that may be rotated where no attribute tells: all of a head's features.

    width: features of all heads.
    """
    return [size for size in _GUESSED_SIZES if width % size == 0]


def tables_of(base: float, size: int, ids: Tensor) -> RotaryTables:
    """Return the tables of angles position * base ** (-2 i / size) for the positions of ids, (1, time)."""
    make = functools.partial(_closed_tables, base, size // 2, ids.device)
    return RotaryTables(*make(ids.shape[1]), make)


def _closed_tables(base: float, half: int, device: torch.device, count: int) -> tuple[Tensor, Tensor]:
    speeds = base ** -torch.arange(0, 1, 1 / half, dtype=torch.float32, device=device)[:half]
    angles = torch.outer(torch.arange(count, device=device), speeds)
    return angles.cos(), angles.sin()


def closed_tables(cos: Tensor, sin: Tensor, constants: Constants) -> Callable[[int], tuple[Tensor, Tensor]] | None:
    """Return a maker of tables of angles position * base ** (-2 i / size) that gives these; None if no base does."""
    time, half = cos.shape

    def compute(base: float) -> Tensor:
        return torch.cat(_closed_tables(base, half, cos.device, time), dim=-1).to(cos.dtype)

    forms = ((base, functools.partial(compute, base)) for base in bases(constants))
    base = closest(torch.cat((cos, sin), dim=-1), forms)
    return None if base is None else functools.partial(_closed_tables, base, half, cos.device)


def match_attention(
    qkv: Sequence[Call], out: Call, norms: Sequence[Call], tables: Sequence[RotaryTables], constants: Constants
) -> Attention | None:
    """Return the attention between the projections `qkv` of one tensor, and `out`.

    norms: calls between them, of queries and keys.  tables: those that the block could have used.
    """
    projections = tuple(each for call in qkv if (each := projection(call)) is not None)
    out_projection, wanted = projection(out), out.input
    if out_projection is None or len(projections) != len(qkv) or any(each.ranks for each in projections):
        return None
    wanted = wanted.reshape(qkv[0].output.shape[0], qkv[0].output.shape[1], -1)
    matched_norms = [made for call in norms if (made := match_norm(call)) is not None]
    forms = _attention_forms(projections, out_projection, wanted.shape[-1], matched_norms, tables, constants)
    x, time = qkv[0].input, wanted.shape[1]
    positions = torch.arange(time, device=wanted.device)

    def compute(form: Attention, table: RotaryTables | None) -> Tensor:
        query, key, value = form.project(x)
        if form.rotary is not None and table is not None:
            cos, sin = table.cos.unsqueeze(0), table.sin.unsqueeze(0)
            query, key = form.rotary.rotate(query, cos, sin), form.rotary.rotate(key, cos, sin)
        mask = causal_mask(positions, positions, form.window).unsqueeze(0)
        return attend(query, key, value, mask, scale=form.scale, softcap=form.softcap)

    return closest(wanted, ((form, functools.partial(compute, form, table)) for form, table in forms))


def _attention_forms(
    projections: tuple[Projection, ...],
    out: Projection,
    width: int,
    norms: Sequence[Norm],
    tables: Sequence[RotaryTables],
    constants: Constants,
) -> Iterator[tuple[Attention, RotaryTables | None]]:
    """Yield the forms of attention that fit the shapes, the likely ones first.

    width: features of all heads.
    """
    query_norm, key_norm = norms if len(norms) == 2 else (None, None)
    make = functools.partial(Attention, projections=projections, out=out, query_norm=query_norm, key_norm=key_norm)
    softcaps = [
        each for each in constants.named("attn_logit_softcapping", "attention_softcap", "softcap") if each > 0
    ]
    for (fused, kv_width), size in itertools.product(
        _layouts(projections, width), _head_sizes(projections, width, constants)
    ):
        if kv_width % size or width % size or (width // size) % (kv_width // size):
            continue
        if not all(_is_normed(norm, size, whole) for norm, whole in ((query_norm, width), (key_norm, kv_width))):
            continue
        rotaries: list[tuple[Rotary | None, RotaryTables | None]] = [
            (Rotary(style=style, size=2 * table.cos.shape[-1], make_tables=table.make), table)
            for table in tables
            if 2 * table.cos.shape[-1] <= size
            for style in RotaryStyle
        ]
        scales = dict.fromkeys([*constants.named("scaling", "scale"), size**-0.5, 1.0])
        for window, softcap, (rotary, table), scale in itertools.product(
            constants.windows, (*softcaps, 0.0), (*rotaries, (None, None)), scales
        ):
            yield (
                make(
                    fused=fused,
                    num_heads=width // size,
                    num_kv_heads=kv_width // size,
                    head_size=size,
                    rotary=rotary,
                    scale=scale,
                    softcap=softcap,
                    window=window,
                ),
                table,
            )


def _is_normed(norm: Norm | None, size: int, width: int) -> bool:
    """Return whether a norm is over a head of `size` features, or over all heads; or if there is none."""
    return norm is None or norm.weight is None or norm.weight.numel() in (size, width)


def _layouts(projections: tuple[Projection, ...], width: int) -> list[tuple[FusedQKV | None, int]]:
    """Return (order of a fused projection, features of all key heads)."""
    if len(projections) == 3:
        query, key, value = (each.weight.shape[0] for each in projections)
        return [(None, key)] if query == width and key == value else []
    kv_width, rest = divmod(projections[0].weight.shape[0] - width, 2)
    fits = len(projections) == 1 and kv_width > 0 and not rest
    return [(order, kv_width) for order in FusedQKV] if fits else []


def _head_sizes(projections: tuple[Projection, ...], width: int, constants: Constants) -> list[int]:
    """Return the sizes that a head may have, the likely ones first."""
    named = [int(each) for each in constants.named("head") if each > 0]
    likely = [size for each in named for size in (each, width // each) if size]
    return [
        size for size in dict.fromkeys((*likely, *_GUESSED_SIZES)) if size <= _MOST_HEAD_SIZE and width % size == 0
    ]
