"""The trainer's weights, opened for generation.

Problem.  Generation needs whole weights for thousands of tokens; ZeRO-3 has shards, LoRA has a base and an update.

Design.  A `Weights` object belongs to an engine.  Inside `open()` the module is in eval mode and its weights are
whole: at stages 0 to 2 they always are, and the decoder reads them where they lie (no byte is copied); at stage 3
they are gathered once, unit by unit, and stay until the block ends.  A later block rebuilds the decoder over the
weights of that time, without another observed pass.  Adapters are merged into a copy of the matrices
that they update, in float32 and rounded once; the base is never written, so its bits do not change.  Opening inside
an open block is free, so several rollouts, or turns, share one gather.

Rejected: gathering in each layer's forward (the model travels for every token); `zpartition.gathered` (it looks for
edits when it ends, which gathers everything a second time); adding the update to the base and
subtracting it afterwards, which does not give the base's bits back.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import final

import attrs
import torch
from torch import Tensor, nn

from zengine.adapters.foreign import adapted
from zengine.inference.cache import KVCache
from zengine.inference.calls.path import FusedPath
from zengine.inference.decoder import DecoderPass
from zengine.inference.exact.forward import ExactForward
from zengine.inference.exact.modules import evaluating
from zengine.inference.exact.steps import ExactPass
from zengine.inference.quantized import quantized, replaced
from zengine.inference.quantized_modules import with_weights_of
from zengine.inference.recognize import learnt_positions, recognize
from zengine.inference.structure import Decoder, Projection
from zengine.inference.verify import LONG, verify
from zprecision.quant import format_named

__all__ = ["PLACE", "Storage", "Weights"]

PLACE = "hybrid_engine.max_out_tokens"  # the key of the config that limits prompt and sample


class Storage(enum.Enum):
    """Where the weights of a module are between its passes."""

    WHOLE = "whole"  # on every rank: nothing moves when they are opened
    SHARDED = "sharded"  # over the ranks: opening is a collective, and holds the whole model until the block ends


@final
@attrs.define(eq=False)
class Weights:
    """Weights of an engine's module, for generation.

    Invariant: outside of `open`, nothing here holds a gathered, merged or quantized weight.
    """

    module: nn.Module
    capacity: int  # tokens of a sequence, prompt and sample
    version: Callable[[], int]  # optimizer steps that the weights have seen
    keeps_cache: bool  # the cache stays allocated between rollouts
    storage: Storage
    hold: Callable[[], AbstractContextManager[None]]  # of SHARDED weights: gathers each unit once, inside the block
    depth: int = 0  # open blocks
    skeleton: Decoder | None = None  # recognized before; its weights that are no parameters are dropped
    decoder: Decoder | None = None  # over the module's own weights
    cache: KVCache | None = None  # of the largest rollout so far
    path: FusedPath | None = None  # over `decoder`; its cache is that of `generate`
    reason: str = ""  # why `present_path` returned None
    params: tuple[tuple[int, torch.dtype], ...] = ()  # of the module when `skeleton` was recognized
    recognized_at: int = -1  # version for which a decoder was made last and verified first; -1: never
    exact: ExactForward | None = None  # on the module from the first exact rollout until one that is not
    quantized_decoders: dict[str, Decoder] = attrs.field(factory=dict)  # copies, by format

    @property
    def most_tokens(self) -> int:
        """Tokens that prompt and sample may have together, known without the weights."""
        return min(self.capacity, learnt_positions(self.module) or self.capacity)

    @contextmanager
    def open(self) -> Iterator[None]:
        """Hold whole weights inside the block; at stage 3 every rank enters it."""
        if self.depth:
            yield
            return
        with ExitStack() as stack:
            if self.storage is Storage.SHARDED:
                stack.enter_context(self.hold())
            stack.enter_context(evaluating(self.module))
            stack.enter_context(torch.no_grad())
            self.depth += 1
            try:
                yield
            finally:
                self._forget()

    def _forget(self) -> None:
        self.depth -= 1
        self.quantized_decoders.clear()
        if self.storage is Storage.SHARDED or any(adapted(each) is not None for each in self.module.modules()):
            self.decoder = self.path = None
        if not self.keeps_cache:
            self.cache = None
            if self.path is not None:
                self.path.steps = None

    def present_decoder(self) -> Decoder:
        """Return the decoder over the present weights.  Raises NotRecognized."""
        assert self.depth
        # Before training, norms are all ones and some matrices all zeros, so that forms may look alike.
        is_stale = self.recognized_at == 0 and self.version() > 0
        if self.decoder is not None and self.path is not None and self.path.is_current and not is_stale:
            return self.decoder
        decoder = self._rebuilt(is_stale)
        self.decoder, self.recognized_at = decoder, max(self.recognized_at, self.version())
        self.path = FusedPath.over(decoder, self.module, self.capacity, PLACE)
        return decoder

    def _rebuilt(self, is_stale: bool) -> Decoder:
        """Return the decoder of the last block over the present weights, or recognize and verify it."""
        params = tuple((id(param), param.dtype) for param in self.module.parameters())
        if self.skeleton is not None and params == self.params and not is_stale:
            return with_weights_of(self.skeleton, self.module)
        decoder = recognize(self.module)
        verify(decoder, self.module, longest=min(LONG, self.most_tokens))  # a module may take no more
        self.params = params
        self.skeleton = replaced(decoder, lambda each: _without_memory(each, self.module))
        return decoder

    def steps(self, num_slots: int, format: str = "") -> DecoderPass:
        """Return a pass with at least `num_slots` empty slots.

        format: of a quantized copy, made once in each block; "": the weights themselves.
        """
        decoder = self.present_decoder()
        if format:
            if format not in self.quantized_decoders:
                self.quantized_decoders[format] = quantized(decoder, format_named(format))[0]
            decoder = self.quantized_decoders[format]
        return DecoderPass(decoder, self.empty_cache(decoder, num_slots))

    def exact_steps(self, num_slots: int) -> ExactPass:
        """Return a pass whose logits are the trainer's, bit for bit; the module's blocks are exact from then on.

        Raises NotRecognized, NotExact or ValueError, with the block and the reason.
        """
        assert self.depth
        if self.exact is None:
            self.decoder = self.path = None  # of other forwards
            self.exact = ExactForward.install(self.module)
        return self.exact.steps(self.empty_cache(self.exact.decoder, num_slots))

    def leave_exact(self) -> None:
        """Give the module its own forward back."""
        if self.exact is not None:
            self.exact.close()
            self.exact = None

    def empty_cache(self, decoder: Decoder, num_slots: int) -> KVCache:
        """Return a cache with at least `num_slots` slots, all empty."""
        capacity = min(self.most_tokens, decoder.max_positions or self.capacity)
        like = decoder.embedding.tokens
        found = self.cache
        fits = found is not None and found.num_slots >= num_slots and found.capacity == capacity
        if not fits or found is None or found.keys[0].dtype != like.dtype or found.keys[0].device != like.device:
            self.cache = None  # frees the smaller one first
            found = self.cache = KVCache.create(decoder, num_slots, capacity)
        for slot in range(found.num_slots):
            found.clear(slot)
        return found

    def present_path(self) -> FusedPath | None:
        """Return the fused path of `generate`; None if the module is no decoder that is recognized."""
        try:
            self.present_decoder()
        except (ValueError, LookupError, TypeError, RuntimeError) as error:  # the probe calls module(ids)
            self.reason = str(error)
            return None
        return self.path


def _without_memory(projection: Projection, module: nn.Module) -> Projection:
    """Return a projection without merged weights and views, which would keep memory of a closed block."""
    weight = projection.weight
    if not isinstance(weight, Tensor) or isinstance(weight, nn.Parameter):
        return projection
    empty = weight.new_empty(0, 0)
    is_merged = adapted(module.get_submodule(projection.name)) is not None
    return attrs.evolve(projection, weight=empty if is_merged else empty.t())  # a view stands for a transposed one
