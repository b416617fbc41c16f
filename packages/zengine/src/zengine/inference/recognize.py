"""Recognition of a decoder by what it computes.

Problem.  `init_inference` runs models that nobody has listed, and a decoder written anew for decoding must compute
what the module computes.

Design.  The module runs once on a few tokens while every call is observed (observe.py).  The blocks are the
longest list of modules that hand a tensor on.  In each block the linear calls are sorted by what they read: the first
ones share the attention's input, the next reads what the attention mixed, and so on; matching.py finds the form that
turns what was read into what was written.  Residual sums are found by adding: the input plus what the attention
wrote must be what the MLP's norm read.  The result is a `Decoder` over the module's own weights.

A mixture of experts is matched as a whole (experts/match.py).  An MLP of another kind is called as it is, if it
treats each position by itself.  All else that does not match raises `NotRecognized`, with the place and what was
tried; `verify` compares whole passes.

Rejected: a table of model classes (see matching.py); torch.fx and torch.export, whose graphs lose what a
constant means, and which fail on control flow that depends on data.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeVar, final

import attrs
import torch
from torch import Tensor, nn

from zengine.adapters.foreign import parts_of_adapters
from zengine.inference import matching
from zengine.inference.experts.match import match_mixture
from zengine.inference.matching import Constants, RotaryTables, closest, equal, match_norm, projection
from zengine.inference.observe import Call, observe, tensors_in
from zengine.inference.quantized_modules import QuantizedLinear
from zengine.inference.structure import (
    MLP,
    Attention,
    Block,
    Decoder,
    Embedding,
    Head,
    Mixture,
    MLPInput,
    Norm,
    vocabulary_of,
)
from zengine.pages import Page, explained
from zpartition import tensor

__all__ = ["NotRecognized", "fitting", "recognize", "run_module"]

_PROBE_NUMEL = 24  # tokens of the observed pass, at least, unless the model takes fewer
_FEWEST = 4  # tokens with which a pass is tried
_TOO_LONG = (AssertionError, IndexError, RuntimeError, ValueError)  # what models raise for a sequence too long
_MOST_WINDOW = 256  # up to which the observed pass is longer than an attention window

_T = TypeVar("_T")


@explained(Page.DECODERS)
class NotRecognized(ValueError):
    """The module is no decoder of a known form.  The message says at which module, and what was compared."""


def run_module(model: nn.Module, ids: Tensor) -> Tensor:
    """Return the logits that `model` computes for ids, (batch, time) int64."""
    return next(tensors_in(model(ids)))


def learnt_positions(model: nn.Module) -> int:
    """Return the longest sequence by the model's config; 0 if it says nothing."""
    return int(getattr(getattr(model, "config", None), "max_position_embeddings", 0) or 0)


def fitting(num_tokens: int, attempt: Callable[[int], _T]) -> _T:
    """Return attempt(num_tokens), or that of half as many as often as it fails: a model may take no more.

    Raises the first error if none succeeds.
    """
    try:
        return attempt(num_tokens)
    except _TOO_LONG as error:
        if num_tokens // 2 < _FEWEST:
            raise
        with contextlib.suppress(*_TOO_LONG):
            return fitting(num_tokens // 2, attempt)
        raise error from None


Hold = Callable[[Sequence[nn.Module]], AbstractContextManager[None]]


def _held_already(_modules: Sequence[nn.Module]) -> AbstractContextManager[None]:
    return nullcontext()


@torch.no_grad()
def recognize(
    model: nn.Module,
    run: Callable[[nn.Module, Tensor], Any] = run_module,
    *,
    num_tokens: int = _PROBE_NUMEL,
    hold: Hold = _held_already,
) -> Decoder:
    """Return the decoder that `model` computes, over its own weights.

    model: in eval mode, on one device, with weights.
    run: calls the model with (1, time) int64 token ids; its first tensor are the logits, (1, time, vocabulary).
    num_tokens: length of the observed pass.
    hold: gives a context in which modules have whole weights, if they do not have them all the time (ZeRO stage 3);
        one part of the model is held at a time.

    Raises NotRecognized.
    """
    if model.training:
        raise ValueError("recognize() needs a model in eval mode: call model.eval() first")
    config = getattr(model, "config", None)
    windows = Constants.of((), config).windows
    num_tokens = max((num_tokens, *(window + 8 for window in windows if window <= _MOST_WINDOW)))
    num_tokens = min(num_tokens, learnt_positions(model) or num_tokens)
    embedding = next((module for module in model.modules() if isinstance(module, nn.Embedding)), None)
    if embedding is None:
        raise NotRecognized(f"{type(model).__name__} has no embedding of tokens")
    vocabulary, device = vocabulary_of(embedding, embedding.weight), embedding.weight.device
    ids = torch.empty(0)

    def observed(count: int) -> tuple[list[Call], Tensor]:
        nonlocal ids
        generator = torch.Generator().manual_seed(0)
        ids = torch.randint(0, vocabulary, (1, count), generator=generator).to(device)
        return observe(model, lambda: run(model, ids))

    if not learnt_positions(model):
        num_tokens = _within_tables(model, embedding, observed, num_tokens)
    calls, logits = fitting(num_tokens, observed)
    parts = parts_of_adapters(model)  # a layer with adapters is one projection, with the merged weight
    calls = [call for call in calls if call.name not in parts]
    return _Recognition(model, config, calls, ids, hold).decoder(logits)


def _within_tables(
    model: nn.Module, tokens: nn.Embedding, observed: Callable[[int], tuple[list[Call], Tensor]], num_tokens: int
) -> int:
    """Return `num_tokens`, or fewer if a table of learnt positions has fewer rows.

    A pass of two tokens tells which tables are read by position: on a GPU a row beyond the end cannot be tried.
    """
    tables = [each for each in model.modules() if isinstance(each, nn.Embedding) and each is not tokens]
    if not any(each.num_embeddings < num_tokens + _FEWEST for each in tables):
        return num_tokens
    for call in observed(2)[0]:
        if isinstance(call.module, nn.Embedding) and call.module is not tokens:
            first, *others = call.input.flatten().tolist()
            if others == [first + 1]:
                num_tokens = min(num_tokens, call.module.num_embeddings - first)
    return num_tokens


@final
@attrs.frozen(eq=False)
class _Recognition:
    """One observed pass, and the search in it."""

    model: nn.Module
    config: object
    calls: list[Call]  # in order of their start
    ids: Tensor  # (1, time) int64
    hold: Hold
    tables: list[RotaryTables] = attrs.field(factory=list)  # found so far, shared by the blocks

    def decoder(self, logits: Tensor) -> Decoder:
        """Return the whole decoder."""
        blocks = self._blocks()
        first, last = blocks[0], blocks[-1]
        before = [call for call in self.calls if call.order < first.order and not first.is_inside(call.name)]
        with self.hold([call.module for call in before]):
            embedding = self._embedding(first)
        made = tuple(map(self._block_of, blocks))
        after = [call for call in self.calls if call.order > last.order and not call.is_inside(last.name)]
        with self.hold([call.module for call in after]):
            norm_call = next((call for call in after if equal(call.input, last.output) and match_norm(call)), None)
            norm = None if norm_call is None else match_norm(norm_call)
            hidden = last.output if norm_call is None else norm_call.output
            head = self._head(after, hidden, logits)
        return Decoder(embedding=embedding, blocks=made, norm=norm, head=head)

    def _block_of(self, call: Call) -> Block:
        with self.hold([call.module]):
            return self._block(call)

    # -- the whole -------------------------------------------------------------------------------

    def _blocks(self) -> list[Call]:
        """Return the calls of the longest list of modules of which each hands its output to the next."""
        by_module = {id(call.module): call for call in self.calls}
        best: list[Call] = []
        for container in self.model.modules():
            if not isinstance(container, (nn.ModuleList, nn.Sequential)):
                continue
            called = [by_module[id(child)] for child in container if id(child) in by_module]
            # an MLP may be a longer list, of other widths; experts read (tokens, width)
            keep = all(call.input.dim() == 3 and call.input.shape == call.output.shape for call in called)
            if (
                keep
                and len(called) == len(container) > len(best)
                and all(equal(other.input, one.output) for one, other in itertools.pairwise(called))
            ):
                best = called
        if not best:
            raise NotRecognized(
                f"{type(self.model).__name__} has no list of blocks that hand on (batch, time, width) tensors"
            )
        return best

    def _embedding(self, first: Call) -> Embedding:
        before = [call for call in self.calls if call.order < first.order]
        called = [call for call in before if isinstance(call.module, nn.Embedding)]
        tokens = [call for call in called if call.input.shape == self.ids.shape and torch.equal(call.input, self.ids)]
        if not tokens:
            raise NotRecognized("no embedding reads the token ids before the first block")
        weight: Tensor = tokens[0].module.weight  # type: ignore[assignment]
        lookup = tokens[0].module if isinstance(tokens[0].module, tensor.SplitLayer) else None
        rows = weight[self.ids] if lookup is None else tokens[0].output
        positions = torch.arange(self.ids.shape[1], device=self.ids.device).unsqueeze(0)
        norms = [None, *(made for call in before if (made := match_norm(call)) is not None)]
        factors = dict.fromkeys([1.0, *_ratios(first.input, rows), *_ratios(tokens[0].output, rows)])
        learnt = [(None, 0), *(place for call in called if call is not tokens[0] for place in _places(call))]
        forms = [
            Embedding(tokens=weight, lookup=lookup, factor=factor, positions=table, offset=offset, norm=norm)
            for (table, offset), factor, norm in itertools.product(learnt, factors, norms)
        ]
        found = closest(first.input, ((form, functools.partial(form, self.ids, positions)) for form in forms))
        if found is None:
            raise NotRecognized(
                f"the input of {first.name} is no sum of embeddings ({', '.join(call.name for call in called)}); "
                "learnt positions are known as an nn.Embedding that is read by position"
            )
        return found

    def _head(self, after: Sequence[Call], hidden: Tensor, logits: Tensor) -> Head:
        for call in after:
            made = projection(call)
            if made is None or call.output.shape[-1] != logits.shape[-1] or not equal(call.input, hidden):
                continue
            constants = Constants.of((), self.config)
            caps = [0.0, *(each for each in constants.named("softcap") if each > 0)]
            factors = dict.fromkeys([1.0, *_ratios(logits, call.output)])
            forms = [Head(projection=made, factor=f, softcap=cap) for cap in caps for f in factors]
            made_logits = ((form, functools.partial(_rounded, form, call.input, logits.dtype)) for form in forms)
            if (found := closest(logits, made_logits)) is not None:
                return found
        raise NotRecognized("no linear layer after the last block gives the logits")

    # -- a block ---------------------------------------------------------------------------------

    def _block(self, block: Call) -> Block:
        inside = [call for call in self.calls if call.is_inside(block.name) and call.name != block.name]
        x = block.input
        unit = self._mlp_unit(inside, block)
        loose = [call for call in inside if unit is None or not call.is_inside(unit.name)]
        _check_attention(block)
        linear = [call for call in loose if projection(call) is not None]
        if len(linear) < 2:
            raise NotRecognized(f"{block.name} has {len(linear)} linear layers outside its MLP")
        qkv = _leading(linear)
        rest = linear[len(qkv) :]
        if not rest:
            raise NotRecognized(f"{block.name}: {_no_output(loose)}")
        out, source = rest[0], qkv[0].input
        attention = self._attention(block, qkv, out, loose)
        norms = [(call, made) for call in loose if (made := match_norm(call)) is not None]
        attention_norm = _norm_from(
            norms, x, source, f"the input of {qkv[0].name} is not that of {block.name}, normed"
        )
        written, attention_out_norm = _post_norm(norms, out.output)
        mlp_calls = [call for call in inside if call.is_inside(unit.name)] if unit is not None else rest[1:]
        if not mlp_calls:
            raise NotRecognized(f"{block.name}: no linear layer after {out.name}")
        mlp_in = unit.input if unit is not None else mlp_calls[0].input
        mlp = self._mlp(block, unit, mlp_calls, mlp_in)
        mlp_written, mlp_out_norm = _post_norm(norms, unit.output if unit is not None else mlp_calls[-1].output)
        attention_factor, mlp_factor = self._factors(block, x, written, mlp_written)
        kind, mlp_norm = _mlp_input(norms, mlp_in, x + attention_factor * written.view_as(x), x, source, block.name)
        return Block(
            name=block.name,
            attention_norm=attention_norm,
            attention=attention,
            attention_out_norm=attention_out_norm,
            mlp_input=kind,
            mlp_norm=mlp_norm,
            mlp=mlp,
            mlp_out_norm=mlp_out_norm,
            attention_factor=attention_factor,
            mlp_factor=mlp_factor,
        )

    def _mlp(self, block: Call, unit: Call | None, calls: Sequence[Call], x: Tensor) -> MLP | Mixture | nn.Module:
        """Return the MLP of these calls on x; if they have no known form, the module that contains them."""
        found = matching.match_mlp(calls, x)
        if found is not None:
            return found
        if unit is None:
            raise NotRecognized(f"{block.name}: {', '.join(call.name for call in calls)} are no MLP of a known form")
        return match_mixture(unit, [call for call in calls if call is not unit], self.config) or unit.module

    def _mlp_unit(self, inside: Sequence[Call], block: Call) -> Call | None:
        """Return the call of a child with weights that treats each position by itself, if there is one."""
        for call in inside:
            is_child = call.name.count(".") == block.name.count(".") + 1
            holds = _has_matrices(call.module)
            same = call.input.shape == block.input.shape == call.output.shape
            if is_child and holds and same and projection(call) is None and _is_by_position(call):
                return call
        return None

    def _attention(self, block: Call, qkv: Sequence[Call], out: Call, loose: Sequence[Call]) -> Attention:
        between = [call for call in loose if qkv[0].order < call.order < out.order and call not in qkv]
        norms = [call for call in between if match_norm(call) is not None]
        owners = [call.module for call in loose if qkv[0].is_inside(call.name)] + [block.module]
        constants = Constants.of(owners, self.config)
        tables = self._tables(block, loose, constants)
        found = matching.match_attention(qkv, out, norms, tables, constants)
        if found is None and not tables:  # code of the block itself may rotate
            sizes = matching.guessed_rotary_sizes(math.prod(out.input.shape[2:]))
            found = matching.match_attention(qkv, out, norms, self._closed_tables(sizes, constants), constants)
        if found is None:
            names = ", ".join(call.name for call in qkv)
            raise NotRecognized(
                f"{block.name}: what {out.name} reads is no causal attention of what {names} wrote (tried: sizes, "
                "orders of a fused projection, rotary positions, scales, windows, soft caps; biases of the scores, "
                "such as ALiBi's, and attention sinks have no form)"
            )
        return found

    def _tables(self, block: Call, loose: Sequence[Call], constants: Constants) -> list[RotaryTables]:
        """Return the rotary tables that the block was given; if none, those of a closed form."""
        found: list[RotaryTables] = []
        for one, other in itertools.pairwise((*block.inputs, *(each for call in loose for each in call.inputs))):
            made = matching.half_tables(one, other)
            if made is None or made[0].shape[0] != self.ids.shape[1]:
                continue
            table = self._new_tables(made, (one, other), constants)
            if table is not None and table not in found:
                found.append(table)
        return found or self._closed_tables(matching.rotary_sizes(constants), constants)

    def _closed_tables(self, sizes: Sequence[int], constants: Constants) -> list[RotaryTables]:
        return [
            self._known(matching.tables_of(base, size, self.ids))
            for size, base in itertools.product(sizes, matching.bases(constants))
        ]

    def _new_tables(
        self, made: tuple[Tensor, Tensor], given: tuple[Tensor, Tensor], constants: Constants
    ) -> RotaryTables | None:
        source = next((call for call in self.calls if _gives(call, *given)), None)
        make = matching.closed_tables(*made, constants) if source is None else functools.partial(_called, source)
        return None if make is None else self._known(RotaryTables(*made, make))

    def _known(self, table: RotaryTables) -> RotaryTables:
        """Return the table that the blocks share."""
        for each in self.tables:
            if torch.equal(each.cos, table.cos) and torch.equal(each.sin, table.sin):
                return each
        self.tables.append(table)
        return table

    def _factors(self, block: Call, x: Tensor, written: Tensor, mlp_written: Tensor) -> tuple[float, float]:
        """Return the factors of both sums: 1, or the model's residual multiplier."""
        constants = Constants.of((block.module,), self.config)
        pairs = [(1.0, 1.0), *((each, each) for each in constants.named("residual_multiplier", "residual_scale"))]

        def compute(pair: tuple[float, float]) -> Tensor:
            return x + pair[0] * written.view_as(x) + pair[1] * mlp_written.view_as(x)

        found = closest(block.output, ((pair, functools.partial(compute, pair)) for pair in pairs))
        if found is None:
            raise NotRecognized(f"{block.name} does not return the sum of its input, attention and MLP")
        return found


def _no_output(inside: Sequence[Call]) -> str:
    """Return the reason why no linear call reads what attention mixed."""
    split = (call for call in inside if isinstance(call.module, tensor.SplitLayer))
    cutting = [call.name for call in split if projection(call) is None]
    if not cutting:
        return "all its linear layers read one tensor; none reads what attention mixed"
    names = ", ".join(cutting)
    return f"each tensor rank cuts its part of what {names} reads, since the attention before it is computed whole"


def _check_attention(block: Call) -> None:
    """Raise NotRecognized if the block has torch's attention, whose projections are no calls of layers."""
    for name, child in block.module.named_modules():
        if isinstance(child, nn.MultiheadAttention):
            raise NotRecognized(
                f"{block.name}.{name} is an nn.MultiheadAttention, as in nn.TransformerEncoderLayer: it has queries, "
                "keys and values in one parameter, in_proj_weight, and calls no layer for them. Blocks of nn.Linear "
                "layers with torch.nn.functional.scaled_dot_product_attention are recognized"
            )


def _leading(linear: Sequence[Call]) -> list[Call]:
    """Return the first calls that read the same tensor, at most three."""
    first = linear[0]
    return list(itertools.takewhile(lambda call: equal(call.input, first.input), linear[:3]))


def _norm_from(norms: Sequence[tuple[Call, Norm]], x: Tensor, wanted: Tensor, problem: str) -> Norm | None:
    """Return the norm that turns x into `wanted`; None if they are equal."""
    if equal(wanted, x):
        return None
    for call, made in norms:
        if equal(call.input, x) and equal(call.output, wanted):
            return made
    raise NotRecognized(problem)


def _post_norm(norms: Sequence[tuple[Call, Norm]], written: Tensor) -> tuple[Tensor, Norm | None]:
    """Return what is added to the residual, and the norm that `written` goes through before, if one does."""
    for call, made in norms:
        if equal(call.input, written):
            return call.output, made
    return written, None


def _mlp_input(
    norms: Sequence[tuple[Call, Norm]], wanted: Tensor, residual: Tensor, x: Tensor, source: Tensor, name: str
) -> tuple[MLPInput, Norm | None]:
    for kind, value in ((MLPInput.RESIDUAL, residual), (MLPInput.BLOCK, x)):
        for call, made in norms:
            if equal(call.input, value) and equal(call.output, wanted) and not equal(wanted, source):
                return kind, made
    if equal(wanted, source):
        return MLPInput.ATTENTION, None
    if equal(wanted, residual):
        return MLPInput.RESIDUAL, None
    raise NotRecognized(
        f"{name}: its MLP reads neither the sum of input and attention, nor the block's input, normed"
    )


def _has_matrices(module: nn.Module) -> bool:
    is_quantized = any(isinstance(child, QuantizedLinear) for child in module.modules())
    return is_quantized or any(param.dim() > 1 for param in module.parameters())


def _is_by_position(call: Call) -> bool:
    """Return whether a module gives each position what it gives that position alone."""
    x = call.input[:, 1:2]
    try:
        with torch.no_grad():
            alone = next(tensors_in(call.module(x)), None)
    except Exception:  # it needs more than one argument, or more than one position
        return False
    return alone is not None and equal(alone, call.output[:, 1:2])


def _rounded(head: Head, x: Tensor, dtype: torch.dtype) -> Tensor:
    return head(x).to(dtype)


def _ratios(total: Tensor, part: Tensor) -> list[float]:
    """Return the factor between two tensors, if there is one."""
    if total.shape != part.shape:
        return []
    at = part.double().abs().argmax()
    return [(total.double().reshape(-1)[at] / part.double().reshape(-1)[at]).item()]


def _places(call: Call) -> Iterator[tuple[Tensor, int]]:
    """Yield (table, offset) if rows offset, offset + 1, ... of an embedding were read."""
    weight: Tensor = call.module.weight  # type: ignore[assignment]
    wanted = call.output.reshape(-1, call.output.shape[-1])
    first = (weight == wanted[0]).all(dim=-1).nonzero().flatten().tolist()
    for offset in first:
        if torch.equal(weight[offset : offset + wanted.shape[0]], wanted):
            yield weight, offset


def _gives(call: Call, cos: Tensor, sin: Tensor) -> bool:
    pairs = itertools.pairwise(call.outputs)
    return any(one.shape == cos.shape and torch.equal(one, cos) and torch.equal(two, sin) for one, two in pairs)


def _called(source: Call, count: int) -> tuple[Tensor, Tensor]:
    """Return the tables of `count` positions from the module that made the observed ones."""

    def extended(value: Any) -> Any:
        if isinstance(value, Tensor) and not value.is_floating_point():
            return torch.arange(count, device=value.device).expand(*value.shape[:-1], count)
        return value

    args, kwargs = source.arguments
    with torch.no_grad():
        made = source.module(*map(extended, args), **{name: extended(value) for name, value in kwargs.items()})
    cos, sin = itertools.islice(tensors_in(made), 2)
    tables = matching.half_tables(cos, sin)
    assert tables is not None
    return tables
