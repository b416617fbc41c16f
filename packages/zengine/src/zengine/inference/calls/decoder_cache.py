"""A cache of Transformers over the static cache of an engine, for loops that call the model themselves.

    cache = engine.static_cache(batch_size=2)
    model(ids, past_key_values=cache)              # and on, a token of each row at a time
    model.generate(ids, num_beams=4)               # beam search, by the same way

A forward with such a cache runs the fused decoder for all layers at once; every other one is the module's own.
Padding is left out, so rows have lengths of their own, and `reorder_cache` copies whole slots.

Rejected: a cache that layers update one by one (each would be called from Python, and none of their work is fused).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, final

import attrs
import torch
from torch import Tensor, nn

from zengine.inference.cache import KVCache
from zengine.inference.calls.path import FusedPath
from zengine.inference.decoder import DecoderPass

__all__ = ["ModuleForward", "decoder_cache", "is_decoder_cache", "search"]

# Arguments of a forward that change nothing about the logits, or that the rows' lengths and masks say already.
_IDLE = ("position_ids", "cache_position", "use_cache", "return_dict", "token_type_ids", "next_sequence_length")
_KNOWN = ("input_ids", "attention_mask", "past_key_values", "logits_to_keep")


@final
@attrs.define(eq=False)
class Rows:
    """Sequences in the first slots of a pass.  Invariant: `width` is the longest one, with its padding."""

    path: FusedPath
    steps: DecoderPass
    number: int
    width: int = 0  # tokens of a row so far, padding included

    @torch.no_grad()
    def advance(self, ids: Tensor, mask: Tensor | None, num_kept: int) -> Tensor:
        """Append (rows, time) ids to the rows; return logits of the last `num_kept` positions, 0: of all.

        mask: (rows, all tokens so far) of 0 and 1; None: no padding.  Logits of padding are zeros.
        A call that fails leaves all rows as they were.
        """
        if ids.shape[0] != self.number:
            raise ValueError(f"the cache has {self.number} rows, and input_ids {ids.shape[0]}: make one for as many")
        if mask is not None and mask.dim() != 2:
            raise ValueError(f"attention_mask must be (rows, tokens) for a fused decoder; it is {tuple(mask.shape)}")
        seen = torch.ones_like(ids, dtype=torch.bool) if mask is None else mask[:, -ids.shape[1] :].bool()
        rows, lengths = [row[kept] for row, kept in zip(ids, seen)], self.steps.cache.lengths
        before = lengths[:]
        try:
            logits = self._logits(rows, seen, num_kept)
        except BaseException:
            lengths[:] = before  # some rows may have advanced
            raise
        self.width += ids.shape[1]
        return logits.to(ids.device)

    def _logits(self, rows: list[Tensor], seen: Tensor, num_kept: int) -> Tensor:
        """Return the logits of `advance`, of rows without padding; seen: (rows, time) bool, False for padding."""
        is_one = num_kept == 1 or seen.shape[1] == 1
        if is_one and all(len(row) == 1 for row in rows):
            return self.steps.forward_each(torch.cat(rows).to(self._device), range(self.number))[:, None]
        if num_kept == 1 and not any(self.steps.cache.lengths[: self.number]):
            return self.path.prefill(self.steps, [row.to(self._device) for row in rows])[:, None]
        return self._each_position(rows, seen, num_kept)

    @property
    def _device(self) -> torch.device:
        return self.steps.cache.keys[0].device

    def _each_position(self, rows: list[Tensor], seen: Tensor, num_kept: int) -> Tensor:
        whole = torch.zeros(*seen.shape, self.steps.decoder.embedding.vocabulary, device=seen.device)
        for slot, row in enumerate(rows):
            if len(row):
                whole[slot, seen[slot]] = self.steps.forward_all(row.to(self._device), slot).to(seen.device)
        return whole[:, -num_kept:] if num_kept else whole

    def reorder(self, chosen: Tensor) -> None:
        """Replace row i by row chosen[i]."""
        cache, order = self.steps.cache, chosen.tolist()
        longest = max(cache.lengths[: self.number])
        for each in (*cache.keys, *cache.values, *cache.key_scales, *cache.value_scales):
            each[: self.number, :, :longest] = each[order, :, :longest]
        cache.lengths[: self.number] = [cache.lengths[row] for row in order]

    def clear(self) -> None:
        """Forget all rows."""
        for slot in range(self.number):
            self.steps.cache.clear(slot)
        self.width = 0


def decoder_cache(path: FusedPath, number: int) -> Any:
    """Return an empty `transformers.Cache` of `number` rows, with memory of its own."""
    steps = DecoderPass(path.decoder, KVCache.create(path.decoder, number, path.capacity))
    return _cache_class()(Rows(path, steps, number))


def is_decoder_cache(given: object) -> bool:
    """Return whether this is a cache of `decoder_cache`."""
    return isinstance(getattr(given, "rows", None), Rows)


def search(path: FusedPath, module: nn.Module, given: Mapping[str, Any], make: Callable[..., Any]) -> Any:
    """Search with beams: Transformers' loop, and a row of the fused decoder for each beam.

    make: the module's own `generate`; given: its arguments, by name.
    """
    config = given.get("generation_config") or module.generation_config
    prompts: Any = given.get("inputs", given.get("input_ids"))
    number = len(prompts) * int(given.get("num_beams") or getattr(config, "num_beams", None) or 1)
    with path.empty_steps(number) as steps:
        return make(**given, past_key_values=_cache_class()(Rows(path, steps, number)))


@functools.cache
def _cache_class() -> Any:
    """Make the class: Transformers is imported by whoever has its model."""
    from transformers.cache_utils import Cache, CacheLayerMixin

    class DecoderLayer(CacheLayerMixin):  # type: ignore[no-untyped-call]
        """What Transformers asks a layer of the cache."""

        is_sliding, is_compileable, supports_early_init, is_croppable = False, False, False, False

        def __init__(self, rows: Rows) -> None:
            super().__init__()  # type: ignore[no-untyped-call]
            self.rows, self.is_initialized = rows, True

        def lazy_initialization(self, *_: Any) -> None:
            """Have memory already."""

        def update(self, *_: Any, **__: Any) -> Any:
            raise ValueError(
                "the layers of a module were called one by one with the static cache of an engine, which runs them "
                "together: leave out output_attentions and output_hidden_states, or pass another cache"
            )

        def get_seq_length(self) -> int:
            return self.rows.width

        def get_max_length(self) -> int:
            return self.rows.steps.cache.capacity

        def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
            return self.rows.width + query_length, 0

        def reset(self) -> None:
            self.rows.clear()

        def reorder_cache(self, beam_idx: Tensor) -> None:
            self.rows.reorder(beam_idx)

    class DecoderCache(Cache):
        """Keys and values of a fused decoder, for Transformers: one layer stands for all."""

        def __init__(self, rows: Rows) -> None:
            super().__init__(layers=[DecoderLayer(rows)])
            self.rows = rows

    return DecoderCache


@final
class ModuleForward:
    """`module.forward` while the module has a fused engine.  A copied or pickled module has its class's again."""

    def __init__(self, module: nn.Module) -> None:
        own: Any = module.forward
        self.module = module
        self.__wrapped__: Callable[..., Any] = own.__wrapped__ if isinstance(own, ModuleForward) else own

    @classmethod
    def attach(cls, module: nn.Module) -> None:
        """Let calls with a decoder cache run the fused decoder."""
        module.__dict__["forward"] = cls(module)

    @classmethod
    def detach(cls, module: nn.Module) -> None:
        """Give the module its own forward back."""
        held = module.__dict__.get("forward")
        if not isinstance(held, cls):
            return
        del module.__dict__["forward"]
        if module.forward != held.__wrapped__:
            module.__dict__["forward"] = held.__wrapped__

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        cache: Any = kwargs.get("past_key_values")
        return _forward(cache.rows, *args, **kwargs) if is_decoder_cache(cache) else self.__wrapped__(*args, **kwargs)

    def __reduce__(self) -> tuple[Any, ...]:
        return partial, (type(self.module).forward, self.module)


def _forward(rows: Rows, input_ids: Tensor | None = None, **given: Any) -> Any:
    """Return Transformers' output of a forward by the fused decoder."""
    from transformers.modeling_outputs import CausalLMOutputWithPast

    read = (*_IDLE, *_KNOWN)
    others = [name for name, each in given.items() if name not in read and each is not None and each is not False]
    if input_ids is None or others:
        named = ", ".join(others or ["inputs_embeds"])
        raise ValueError(f"a fused decoder computes logits of input_ids, and got {named}: pass another cache")
    kept = given.get("logits_to_keep") or 0
    if not isinstance(kept, int):
        raise ValueError("a fused decoder keeps the logits of the last positions: pass a number as logits_to_keep")
    logits = rows.advance(input_ids, given.get("attention_mask"), kept)
    return CausalLMOutputWithPast(logits=logits, past_key_values=given["past_key_values"])
