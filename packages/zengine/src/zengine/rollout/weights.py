"""The trainer's weights, opened for generation.

Problem.  Generation needs whole weights for thousands of tokens; ZeRO-3 has shards, LoRA has a base and an update.

Design.  A `Weights` object belongs to an engine.  Inside `open()` the module is in eval mode and its weights are
whole: at stages 0 to 2 they always are, and the decoder reads them where they lie (no byte is copied); at stage 3
they are gathered once, unit by unit, and stay until the block ends.  A later block rebuilds the decoder over the
weights of that time, without another observed pass.  Adapters are merged into a copy of the matrices
that they update, in float32 and rounded once; the base is never written, so its bits do not change.  Opening inside
an open block is free, so several rollouts, or turns, share one gather.

A rollout may read a copy instead: quantized, or split over groups of ranks (copies.py).  At stage 3 it is made unit
by unit, and nothing else is held.

Rejected: gathering in each layer's forward (the model travels for every token); `zpartition.gathered` (it looks for
edits when it ends, which gathers everything a second time); adding the update to the base and
subtracting it afterwards, which does not give the base's bits back.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import final

import attrs
import torch
from torch import Tensor, nn

from zengine.adapters.foreign import adapted
from zengine.inference.cache import Forgotten, KeptSequences, KVCache
from zengine.inference.calls.path import FusedPath
from zengine.inference.decoder import DecoderPass
from zengine.inference.exact.forward import ExactForward
from zengine.inference.exact.modules import evaluating
from zengine.inference.exact.steps import ExactPass
from zengine.inference.quantized import quantized, replaced
from zengine.inference.quantized_modules import StackedLayer, layer_at, with_weights_of
from zengine.inference.recognize import learnt_positions, recognize
from zengine.inference.structure import Decoder, Projection
from zengine.inference.verify import LONG, verify
from zengine.rollout.copies import Units, copy_decoder, copy_problem
from zengine.rollout.tensor_split import WHOLE, TensorSplit, split_of
from zpartition import ModelParallelGroup
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
    units: Units  # of SHARDED weights
    group: ModelParallelGroup  # ranks over which copies for rollouts are split
    depth: int = 0  # open blocks
    stack: ExitStack = attrs.field(factory=ExitStack)  # what the outermost open block holds
    skeleton: Decoder | None = None  # recognized before; its weights that are no parameters are dropped
    split: TensorSplit = WHOLE  # of `skeleton` over `group`
    split_problem: str = ""  # why there is none
    decoder: Decoder | None = None  # over the module's own weights
    cache: KVCache | None = None  # of the largest rollout so far
    path: FusedPath | None = None  # over `decoder`; its cache is that of `generate`
    reason: str = ""  # why `present_path` returned None
    params: tuple[tuple[int, torch.dtype], ...] = ()  # of the module when `skeleton` was recognized
    provisional_at: int = (
        -1
    )  # version whose weights hide what some parts compute, over which `skeleton` was recognized
    exact: ExactForward | None = None  # on the module from the first exact rollout until one that is not
    copies: dict[str, Decoder] = attrs.field(factory=dict)  # split or quantized ones, by format
    kept: Forgotten = Forgotten()  # noqa: RUF009 - without state; sequences in the cache, inside `turns`
    kept_by: Hashable = None  # version of the weights, and way to compute, of `kept`

    @property
    def most_tokens(self) -> int:
        """Tokens that prompt and sample may have together, known without the weights."""
        learnt = None if self.skeleton is None else self.skeleton.max_positions  # a config may not say
        return min(self.capacity, learnt_positions(self.module) or learnt or self.capacity)

    @contextmanager
    def open(self, *, holds_all: bool = True) -> Iterator[None]:
        """Hold whole weights inside the block; at stage 3 every rank enters it.

        holds_all: False for a block that reads copies, which are made unit by unit.
        """
        with ExitStack() as stack:
            if holds_all and self.storage is Storage.SHARDED:
                stack.enter_context(self.hold())
            if self.depth:
                yield
                return
            stack.enter_context(evaluating(self.module))
            stack.enter_context(torch.no_grad())
            self.depth, self.stack = self.depth + 1, stack
            try:
                yield
            finally:
                self._forget()

    def _forget(self) -> None:
        self.depth -= 1
        self.copies.clear()
        if self.storage is Storage.SHARDED or any(adapted(each) is not None for each in self.module.modules()):
            self.decoder = self.path = None
        self._release_cache()

    def _release_cache(self) -> None:
        if not self.keeps_cache and not self.kept.needs_cache:
            self.cache = None
            if self.path is not None:
                self.path.steps = None

    @contextmanager
    def turns(self) -> Iterator[None]:
        """Keep the sequences of rollouts in the cache inside the block, so that later ones continue them."""
        if self.kept.needs_cache:
            raise RuntimeError("turns() is inside another block of turns(): leave that one first")
        self.kept = KeptSequences()
        try:
            yield
        finally:
            self.kept = Forgotten()
            self._release_cache()

    def kept_sequences(self, way: Hashable) -> Forgotten:
        """Return what the slots of the cache have; nothing if other weights, or another way, computed it."""
        if self.kept_by != (self.version(), way):
            self.kept_by = (self.version(), way)
            self.forget_sequences()
        return self.kept

    def forget_sequences(self) -> None:
        """Let no rollout continue what the cache has: the weights have changed."""
        self.kept = self.kept.emptied()

    def present_decoder(self) -> Decoder:
        """Return the decoder over the present weights.  Raises NotRecognized."""
        assert self.depth
        is_stale = self.is_stale
        if self.decoder is not None and self.path is not None and self.path.is_current and not is_stale:
            return self.decoder
        decoder = self.decoder = self._rebuilt(is_stale)
        self.path = FusedPath.over(decoder, self.module, self.capacity, PLACE)
        return decoder

    @property
    def is_stale(self) -> bool:
        """Whether other weights may show other forms than those recognized.

        Before training, norms are all ones and some matrices all zeros, as those of adapters of the user's own; so
        they stay in steps of a learning rate of zero.
        """
        return 0 <= self.provisional_at != self.version()

    def _rebuilt(self, is_stale: bool) -> Decoder:
        """Return the decoder of the last block over the present weights, or recognize and verify it."""
        if self.skeleton is not None and self._params() == self.params and not is_stale:
            return with_weights_of(self.skeleton, self.module)
        decoder = recognize(self.module)
        verify(decoder, self.module, longest=min(LONG, self.most_tokens))  # a module may take no more
        self._remember(decoder)
        return decoder

    def _remember(self, decoder: Decoder) -> None:
        """Keep what was recognized, without memory, and how it is split."""
        self.params, version = self._params(), self.version()
        self.provisional_at = version if version == 0 or any(map(_is_blank, self.module.parameters())) else -1
        try:
            self.split, self.split_problem = split_of(decoder, self.group), ""
        except ValueError as error:
            self.split, self.split_problem = WHOLE, str(error)
        self.skeleton = replaced(decoder, lambda each: _without_memory(each, self.module))

    def _params(self) -> tuple[tuple[int, torch.dtype], ...]:
        return tuple((id(param), param.dtype) for param in self.module.parameters())

    def steps(self, num_slots: int, format: str = "") -> DecoderPass:
        """Return a pass with at least `num_slots` empty slots; collective over `group`.

        format: of a quantized copy, made once in each block; "": the dtype of the weights.

        Raises NotRecognized, or ValueError if the decoder cannot be split.
        """
        is_copy = bool(format) or self.group.size > 1
        decoder = self._copy(format) if is_copy else self.present_decoder()
        return DecoderPass(decoder, self.empty_cache(decoder, num_slots))

    def _copy(self, format: str) -> Decoder:
        """Return a copy of the weights, split or quantized or both, made once in each block."""
        if format not in self.copies:
            skeleton = self._recognized()
            if self.split_problem:
                raise ValueError(self.split_problem)
            problem, rule = copy_problem(skeleton), format_named(format) if format else None
            if not problem:
                found = copy_decoder(skeleton, self.module, self.units, self.split, rule)
            elif self.group.size > 1 or rule is None:
                raise ValueError(f"hybrid_engine.inference_tp_size = {self.group.size}: {problem}")
            else:
                if self.storage is Storage.SHARDED:  # what is not quantized stays the module's
                    self.stack.enter_context(self.hold())
                found = quantized(self.present_decoder(), rule)[0]
            self.copies[format] = found
        return self.copies[format]

    def _recognized(self) -> Decoder:
        """Return the skeleton of the module; all weights are held only if it is not known yet, nor split."""
        if self.skeleton is None or self.is_stale or self._params() != self.params:
            if self.storage is Storage.SHARDED and self.group.size > 1:
                self._recognize_by_parts()
            else:
                with self.open():
                    self.present_decoder()
        if self.storage is Storage.SHARDED:
            self.decoder = self.path = None  # which would keep what is gathered
        assert self.skeleton is not None
        return self.skeleton

    def _recognize_by_parts(self) -> None:
        """Recognize the module one unit at a time, and verify a split copy of it."""

        def held(modules: Sequence[nn.Module]) -> AbstractContextManager[None]:
            return self.units.held(self.units.of([param for each in modules for param in each.parameters()]))

        self._remember(recognize(self.module, hold=held))
        assert self.skeleton is not None
        if not self.split_problem and not copy_problem(self.skeleton):
            copy = copy_decoder(self.skeleton, self.module, self.units, self.split)
            verify(copy, self.module, longest=min(LONG, self.most_tokens))
        self.units.release()

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

    def exact_lifted(self) -> AbstractContextManager[None]:
        """Take exact forwards off inside the block, so that other code replaces the module's own."""
        return nullcontext() if self.exact is None else self.exact.parts.replaced.lifted()

    def empty_cache(self, decoder: Decoder, num_slots: int) -> KVCache:
        """Return a cache with at least `num_slots` slots, all empty."""
        capacity = min(self.most_tokens, decoder.max_positions or self.capacity)
        like = decoder.embedding.tokens
        found = self.cache
        fits = found is not None and found.num_slots >= num_slots and found.capacity == capacity
        shape = (self._heads(decoder), like.dtype, like.device)
        if not fits or found is None or (found.keys[0].shape[1], found.keys[0].dtype, found.keys[0].device) != shape:
            self.cache = None  # frees the smaller one first
            self.forget_sequences()
            found = self.cache = KVCache.create(decoder, num_slots, capacity)
        for slot in range(found.num_slots):
            found.clear(slot)
        return found

    @staticmethod
    def _heads(decoder: Decoder) -> int:
        return decoder.blocks[0].attention.num_kv_heads

    def present_path(self) -> FusedPath | None:
        """Return the fused path of `generate`; None if the module is no decoder that is recognized."""
        try:
            self.present_decoder()
        except (ValueError, LookupError, TypeError, RuntimeError) as error:  # the probe calls module(ids)
            self.reason = str(error)
            return None
        return self.path


def _is_blank(param: nn.Parameter) -> bool:
    """Return whether a trained matrix is all zeros; a sharded one is none."""
    return param.requires_grad and param.dim() > 1 and param.numel() > 0 and not bool(param.detach().any())


def _without_memory(projection: Projection, module: nn.Module) -> Projection:
    """Return a projection without merged weights and views, which would keep memory of a closed block."""
    weight = projection.weight
    if not isinstance(weight, Tensor) or isinstance(weight, nn.Parameter):
        return projection
    empty = weight.new_empty(0, 2)  # its transpose has other strides
    layer = layer_at(module, projection.name)
    # Without adapters, whose weights are merged, it is a view of transposed weights, but for a stack's matrices.
    is_transposed = weight.stride(-1) != 1 if isinstance(layer, StackedLayer) else adapted(layer) is None
    return attrs.evolve(projection, weight=empty.t() if is_transposed else empty)
