"""Sequence parallelism for models whose attention is looked up by name, as those of Transformers.

Such a function is called `attention(module, query, key, value, mask, **options)` with (batch, heads, tokens, width)
and returns (output (batch, tokens, heads, width), weights or None).  `ModelAttention` is one, around another one: put
it where the name is looked up, and a model whose inputs are pieces of sequences trains as one with the whole.

    ALL_ATTENTION_FUNCTIONS["sdpa"] = ModelAttention(ALL_ATTENTION_FUNCTIONS["sdpa"], "sdpa", group)

The mask that the model made is for its piece.  It is only asked for padding; what the whole needs is made from the
positions of all tokens (masks.py), which therefore have to be given to the model, and from the layer's window.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, final

import attrs
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from zpartition.cells import Cell
from zpartition.sequence.masks import Looks, Tokens, Trait, padding_of
from zpartition.sequence.shares import HeadShares
from zpartition.sequence.streams import own_stream
from zpartition.sequence.trading import Dims
from zpartition.sequence.ulysses import heads_to_tokens, shares_of, tokens_to_heads

__all__ = ["ModelAttention"]

_IN, _OUT = Dims(heads=1, tokens=2), Dims(heads=2, tokens=1)


@attrs.frozen(eq=False)
class _Seen:
    """Positions of a piece, and all tokens of that batch, as a layer has asked for them."""

    positions: weakref.ref[Tensor]
    tokens: Tokens
    layer: int  # its number; later ones of the same forward need not ask again


@final
@attrs.define(eq=False)
class ModelAttention:
    """`core` over sequences of which each rank of `cell` has an equal run of tokens."""

    core: Callable[..., Any]
    name: str  # by which the model knows `core`: "sdpa", "flex_attention", "flash_attention_2", ...
    cell: Cell
    disable_in_eval: bool = False  # modules that do not train get whole sequences
    seen: _Seen | None = None  # layers of one forward share their positions

    @classmethod
    def over(
        cls, core: Callable[..., Any], name: str, group: ProcessGroup | None, *, disable_in_eval: bool = False
    ) -> ModelAttention:
        """Around `core`, or around what `core` itself is around."""
        inner = core.core if isinstance(core, ModelAttention) else core
        return cls(inner, name, Cell.of(group), disable_in_eval)

    def __call__(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Any,
        **kwargs: Any,
    ) -> tuple[Tensor, Any]:
        """(output (batch, tokens of this rank, heads, width), None).  Collective of the cell.

        Raises:
            ValueError: no positions are given, heads cannot be shared out, or an option is made for a piece.
        """
        if self.cell.size == 1 or (self.disable_in_eval and not module.training):
            found: tuple[Tensor, Any] = self.core(module, query, key, value, attention_mask, **kwargs)
            return found
        shares = shares_of(query, key, value, _IN, self.cell)
        tokens = self._tokens(module, query, attention_mask, kwargs)
        kwargs = {**kwargs, "position_ids": tokens.positions, **self._per_head(shares, kwargs)}
        mask = self._mask(tokens, _looks(module, kwargs))
        q, k, v = tokens_to_heads(query, key, value, shares, _IN, self.cell)
        drawing = own_stream(self.cell, q.device) if kwargs.get("dropout") else nullcontext()
        with drawing, _groups_of(module, q.shape[1] // k.shape[1]):
            out, _weights = self.core(module, q, k, v, mask, **kwargs)
        return heads_to_tokens(out, shares, _OUT, self.cell), None

    def _tokens(self, module: nn.Module, query: Tensor, mask: Any, kwargs: dict[str, Any]) -> Tokens:
        """All tokens of this batch; gathered by the first layer of a forward."""
        positions: Any = kwargs.get("position_ids")
        if positions is None:
            raise ValueError(
                f"the attention {self.name!r} of pieces of sequences needs position_ids, where each token is in its "
                "whole sequence: pass those that SequenceBatches (or UlyssesSPDataLoaderAdapter) puts into a batch."
            )
        layer, seen = getattr(module, "layer_idx", None), self.seen
        number = layer if isinstance(layer, int) else -1
        if seen is not None and seen.positions() is positions and number > seen.layer >= 0:
            tokens = seen.tokens
        else:  # another forward, maybe with other padding: every rank sees that alike
            rows = positions.expand(query.shape[0], query.shape[2])
            tokens = Tokens.gathered(rows, padding_of(mask, rows), self.cell)
        self.seen = _Seen(weakref.ref(positions), tokens, number)
        return tokens

    def _mask(self, tokens: Tokens, looks: Looks) -> Any:
        """As `core` takes it, for all tokens."""
        if "flash" in self.name:  # finds documents by their positions, and windows by its options
            return tokens.is_valid if tokens.traits & Trait.PADDED else None
        if self.name == "flex_attention":
            return tokens.blocks(looks)
        return tokens.dense(looks) if tokens.needs_mask(looks) else None

    def _per_head(self, shares: HeadShares, kwargs: dict[str, Any]) -> dict[str, Any]:
        """Options that have a number for each head, for this rank's."""
        if kwargs.get("position_bias") is not None:
            raise ValueError(
                "position_bias is made for pairs of a piece's tokens, and cannot be used over whole sequences: use "
                "a model with rotary or absolute positions."
            )
        sinks = kwargs.get("s_aux")
        mine = shares.query(self.cell.rank)
        return {} if sinks is None else {"s_aux": sinks[mine.start : mine.stop]}


def _looks(module: nn.Module, kwargs: dict[str, Any]) -> Looks:
    """What a layer says of itself."""
    told = kwargs.get("is_causal")
    window = kwargs.get("sliding_window") or getattr(module, "sliding_window", None) or 0
    return Looks(bool(getattr(module, "is_causal", True) if told is None else told), int(window))


@contextmanager
def _groups_of(module: nn.Module, num_groups: int) -> Iterator[None]:
    """Inside, `module` says that so many queries share a key, if it says anything: attentions repeat keys by that."""
    before: Any = getattr(module, "num_key_value_groups", num_groups)
    if before == num_groups:
        yield
        return
    module.num_key_value_groups = num_groups  # type: ignore[assignment]
    try:
        yield
    finally:
        module.num_key_value_groups = before
