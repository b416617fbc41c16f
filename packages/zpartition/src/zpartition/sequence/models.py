"""Sequence parallelism for models that look up their attention by name, as in Transformers.

Such a function is called `attention(module, query, key, value, mask, **options)` with (batch, heads, tokens, width)
and returns (output (batch, tokens, heads, width), weights or None).  `ModelAttention` wraps one: registered under its
name, it lets a model whose inputs are pieces of sequences train as with the whole.

    ALL_ATTENTION_FUNCTIONS["sdpa"] = ModelAttention(ALL_ATTENTION_FUNCTIONS["sdpa"], "sdpa", group)

The model's mask is for its piece.  Only padding is read from it; the mask of the whole is built from the positions of
all tokens (masks.py), which must be passed to the model, and from the layer's window.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, final

import attrs
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from zpartition.layout.model_parallel import ModelParallelGroup
from zpartition.sequence.head_all_to_all import Dims, HeadAssignment
from zpartition.sequence.masks import BatchTrait, MaskKind, Tokens, padding_of
from zpartition.sequence.random_state import rank_random_state
from zpartition.sequence.ulysses import assign_heads, heads_to_tokens, tokens_to_heads

__all__ = ["ModelAttention"]

_IN, _OUT = Dims(heads=1, tokens=2), Dims(heads=2, tokens=1)


@attrs.frozen(eq=False)
class _SeenPositions:
    """Positions of a piece, and all tokens of that batch, as a layer requested them."""

    positions: weakref.ref[Tensor]
    tokens: Tokens
    layer: int  # its number; later layers of the same forward reuse the tokens


@final
@attrs.define(eq=False)
class ModelAttention:
    """`core` over sequences of which each rank of `mp_group` has an equal run of tokens."""

    core: Callable[..., Any]
    name: str  # by which the model knows `core`: "sdpa", "flex_attention", "flash_attention_2", ...
    mp_group: ModelParallelGroup
    disable_in_eval: bool = False  # modules in evaluation mode get whole sequences
    seen: _SeenPositions | None = None  # layers of one forward share their positions

    @classmethod
    def over(
        cls, core: Callable[..., Any], name: str, group: ProcessGroup | None, *, disable_in_eval: bool = False
    ) -> ModelAttention:
        """Wrap `core`, or the function that `core` itself wraps."""
        inner = core.core if isinstance(core, ModelAttention) else core
        return cls(inner, name, ModelParallelGroup.of(group), disable_in_eval)

    def __call__(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Any,
        **kwargs: Any,
    ) -> tuple[Tensor, Any]:
        """(output (batch, tokens of this rank, heads, width), None).  Collective of the group.

        Raises:
            ValueError: no positions are given, heads cannot be split, or an option applies to a piece only.
        """
        if self.mp_group.size == 1 or (self.disable_in_eval and not module.training):
            found: tuple[Tensor, Any] = self.core(module, query, key, value, attention_mask, **kwargs)
            return found
        assignment = assign_heads(query, key, value, _IN, self.mp_group)
        tokens = self._tokens(module, query, attention_mask, kwargs)
        kwargs = {**kwargs, "position_ids": tokens.positions, **self._slice_per_head(assignment, kwargs)}
        mask = self._mask(tokens, _mask_kind_of(module, kwargs))
        q, k, v = tokens_to_heads(query, key, value, assignment, _IN, self.mp_group)
        drawing = rank_random_state(self.mp_group, q.device) if kwargs.get("dropout") else nullcontext()
        with drawing, _override_num_groups(module, q.shape[1] // k.shape[1]):
            out, _weights = self.core(module, q, k, v, mask, **kwargs)
        return heads_to_tokens(out, assignment, _OUT, self.mp_group), None

    def _tokens(self, module: nn.Module, query: Tensor, mask: Any, kwargs: dict[str, Any]) -> Tokens:
        """Return all tokens of this batch; the first layer of a forward gathers them."""
        positions: Any = kwargs.get("position_ids")
        if positions is None:
            raise ValueError(
                f"the attention {self.name!r} over split sequences needs position_ids, the position of each token in "
                "its whole sequence: pass those that SequenceBatches (or UlyssesSPDataLoaderAdapter) adds to a batch."
            )
        layer, seen = getattr(module, "layer_idx", None), self.seen
        number = layer if isinstance(layer, int) else -1
        if seen is not None and seen.positions() is positions and number > seen.layer >= 0:
            tokens = seen.tokens
        else:  # another forward, perhaps with other padding; all ranks agree on that
            rows = positions.expand(query.shape[0], query.shape[2])
            tokens = Tokens.gather(rows, padding_of(mask, rows), self.mp_group)
        self.seen = _SeenPositions(weakref.ref(positions), tokens, number)
        return tokens

    def _mask(self, tokens: Tokens, mask_kind: MaskKind) -> Any:
        """Build the mask that `core` takes, for all tokens."""
        if "flash" in self.name:  # finds documents by their positions, and windows by its options
            return tokens.is_valid if tokens.traits & BatchTrait.PADDED else None
        if self.name == "flex_attention":
            return tokens.blocks(mask_kind)
        return tokens.dense(mask_kind) if tokens.needs_mask(mask_kind) else None

    def _slice_per_head(self, assignment: HeadAssignment, kwargs: dict[str, Any]) -> dict[str, Any]:
        """Return this rank's part of options with one number per head."""
        if kwargs.get("position_bias") is not None:
            raise ValueError(
                "position_bias covers pairs of a piece's tokens and cannot be used over whole sequences: use a model "
                "with rotary or absolute positions."
            )
        sinks = kwargs.get("s_aux")
        mine = assignment.query(self.mp_group.rank)
        return {} if sinks is None else {"s_aux": sinks[mine.start : mine.stop]}


def _mask_kind_of(module: nn.Module, kwargs: dict[str, Any]) -> MaskKind:
    """Read the mask kind of a layer."""
    given = kwargs.get("is_causal")
    window = kwargs.get("sliding_window") or getattr(module, "sliding_window", None) or 0
    return MaskKind(bool(getattr(module, "is_causal", True) if given is None else given), int(window))


@contextmanager
def _override_num_groups(module: nn.Module, num_groups: int) -> Iterator[None]:
    """Set `num_key_value_groups` of `module` inside, if it has one: attentions repeat keys by it."""
    before: Any = getattr(module, "num_key_value_groups", num_groups)
    if before == num_groups:
        yield
        return
    module.num_key_value_groups = num_groups  # type: ignore[assignment]
    try:
        yield
    finally:
        module.num_key_value_groups = before
