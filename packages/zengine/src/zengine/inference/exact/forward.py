"""Exact training: a module whose recognised blocks compute with batch-invariant operators.

    exact = ExactForward.install(model)     # raises NotRecognized or NotExact, with the block and the reason
    logits = engine(batch)                  # forward and backward through exact operators
    steps = exact.steps(KVCache.create(exact.decoder, num_slots=8, capacity=1024))
    exact.close()                           # the module is as it was

The logits of a token are then a function of the weights and of the tokens before it: not of the batch, of padding
left or right, of the slot, of the number of ranks, or of whether it was computed in training or over a cache.
`install` proves it on the module itself: a padded batch through the module and single tokens over a cache must give
equal bits.

What is put on the module: the `forward` of each block, of its projections and norms, of the last norm and of the
head, and of the module itself, which notes the padding of a batch.  All else (embedding, loss, outputs) is the
module's own code.

torch.compile stays on the module, below the exact forwards, and has no effect until `close`: its graphs would add up
in another order.

Dropout is rejected, since generation has none.  Positions count from the first token that the attention mask shows:
with rotary positions that is what the module computes, since only distances matter; learnt positions are looked up by
the module, so a batch with padding on the left needs `position_ids`, as without exact.

Rejected: replaced functions of torch (F.linear, softmax) inside the user's blocks, whose code between them rounds in
its own order, which a pass over a cache would have to repeat.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import math
from collections.abc import Callable, Iterator
from typing import Any, final

import attrs
import torch
from torch import Tensor, nn

from zengine.inference.cache import KVCache
from zengine.inference.exact.attention import attend_sequences
from zengine.inference.exact.blocks import HeadRule, PositionTables, embed, rule_of, run_block
from zengine.inference.exact.choices import NotExact, exact_decoder
from zengine.inference.exact.modules import ModuleParts, check_dtype, evaluating, perturbed
from zengine.inference.exact.products import Products
from zengine.inference.exact.steps import ExactPass
from zengine.inference.observe import tensors_in, uncompiled
from zengine.inference.recognize import fitting, recognize, run_module
from zengine.inference.structure import Block, Decoder, Mixture, Norm

__all__ = ["ExactForward", "exact_forward"]

Run = Callable[[nn.Module, Tensor], Any]
_AT_ONE_POSITION = 4  # times as far from the module's own logits as at most others, in 16 bits


@final
@attrs.frozen(eq=False)
class _Shift:
    """Sequences with padding on the left, moved to begin at the first position."""

    to_start: Tensor  # (batch, time) int64: the column that goes to each position
    back: Tensor  # (batch, time) int64

    @classmethod
    def of(cls, starts: Tensor, time: int) -> _Shift:
        """starts: (batch,) columns of the first tokens."""
        columns = torch.arange(time, device=starts.device)
        return cls((columns + starts[:, None]).clamp(max=time - 1), (columns - starts[:, None]).clamp(min=0))

    @staticmethod
    def move(x: Tensor, index: Tensor) -> Tensor:
        """x: (batch, time, ...)."""
        return x[torch.arange(x.shape[0], device=x.device)[:, None], index]


@final
@attrs.define(eq=False)
class ExactForward:
    """An installed exact forward.

    Invariant: from `install` until `close`, the module's recognised blocks run `run_block`.
    """

    decoder: Decoder
    head_rule: HeadRule
    parts: ModuleParts
    tables: PositionTables = attrs.field(factory=PositionTables)
    shift: _Shift | None = None  # of the batch that runs; None: no padding on the left

    @classmethod
    def install(cls, module: nn.Module, run: Run = run_module, *, is_checked: bool = True) -> ExactForward:
        """Put exact operators on `module`.

        module: with weights (at ZeRO stage 3 inside `zpartition.gathered`), float32, bfloat16 or float16; with
            adapters or without.  run: calls it with (batch, time) int64 ids; its first tensor are the logits.
        is_checked: compare training with generation, and both with the module.

        Raises NotRecognized if the module is no decoder of a known form, NotExact if a block or the head cannot be
        computed exactly or if results differ, ValueError for other dtypes and for dropout.
        """
        check_dtype(module)
        with evaluating(module), perturbed(module), uncompiled():
            decoder = recognize(module, run)
            decoder, head_rule, returns = exact_decoder(module, decoder, run)
            exact = cls(decoder, head_rule, ModuleParts(module, Products()))
            try:
                with torch.no_grad():
                    ids, before = _probe(run, module, decoder)
                    exact._replace(module, returns)
                    if is_checked:
                        exact.check(module, run, before, ids)
            except BaseException:
                exact.close()
                raise
        return exact

    def close(self) -> None:
        """Take everything off the module."""
        self.parts.replaced.close()

    def steps(self, cache: KVCache) -> ExactPass:
        """Return a pass over `cache` that generates with the module's weights as they are at each call.

        At ZeRO stage 3 the module must be gathered while the pass runs.
        """
        return ExactPass(
            self.decoder,
            cache,
            self.parts,
            products=self.parts.products,
            tables=self.tables,
            head_rule=self.head_rule,
        )

    # -- what stands on the module ---------------------------------------------------------------

    def _replace(self, module: nn.Module, returns: dict[str, Callable[[Tensor], Any]]) -> None:
        decoder, parts = self.decoder, self.parts
        for block in decoder.blocks:
            for projection in block.projections:
                parts.add_projection(projection)
            if isinstance(block.mlp, Mixture):
                parts.add_mixture(block.mlp)
            owner = module.get_submodule(block.name)
            parts.replaced.replace(owner, functools.partial(self._block, block, returns[block.name]))
        parts.add_projection(decoder.head.projection)
        for norm in _norms(decoder):
            parts.add_norm(norm)
        parts.replaced.replace(module, self._whole(module))

    def _whole(self, module: nn.Module) -> Callable[..., Any]:
        """Return the module's forward, which notes the padding of the batch.  It raises ValueError in autocast."""
        forward = module.forward
        signature = inspect.signature(forward)

        @functools.wraps(forward)
        def call(*args: Any, **kwargs: Any) -> Any:
            if torch.is_autocast_enabled(next(module.parameters()).device.type):
                raise ValueError(
                    "rollout.exact computes in the dtype of the weights, and torch.autocast is on: leave it out, or "
                    "train with weights of its dtype"
                )
            given = dict(kwargs)
            with contextlib.suppress(TypeError):
                bound = signature.bind_partial(*args, **kwargs).arguments
                given = {**bound, **bound.get("kwargs", {})}
            before, self.shift = self.shift, _shift_of(given)
            try:
                with uncompiled():
                    return forward(*args, **kwargs)
            finally:
                self.shift = before

        return call

    def _block(
        self, block: Block, returned: Callable[[Tensor], Any], hidden_states: Tensor, *_: Any, **__: Any
    ) -> Any:
        return returned(run_block(self.parts, block, hidden_states, functools.partial(self._attend, block)))

    def _attend(self, block: Block, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        shift, attention, time = self.shift, block.attention, query.shape[1]
        if shift is not None:
            query, key, value = (shift.move(each, shift.to_start) for each in (query, key, value))
        if attention.rotary is not None:
            cos, sin = (table[:time][None] for table in self.tables.of(attention.rotary, time))
            query, key = attention.rotary.rotate(query, cos, sin), attention.rotary.rotate(key, cos, sin)
        mixed = attend_sequences(self.parts.products, rule_of(attention), query, key, value)
        return mixed if shift is None else shift.move(mixed, shift.back)

    # -- proof -----------------------------------------------------------------------------------

    def check(self, module: nn.Module, run: Run, before: Tensor, ids: Tensor) -> None:
        """Compare the logits of a batch, of one sequence, and of tokens over a cache.

        before: (1, time, vocabulary) of the module's own forward for ids[:1], (1, time).

        Raises NotExact if bits differ, or if the exact forward is not the module's up to rounding.
        """
        batch, alone = _logits(run, module, ids), _logits(run, module, ids[:1])
        errors = (alone.double() - before.double()).abs().amax(-1) / before.double().abs().max()
        # another rounding of a router may choose another expert at some position, and 16 bits are coarse at a few
        has_experts = any(isinstance(block.mlp, Mixture) for block in self.decoder.blocks)
        is_wide = self.decoder.embedding.tokens.dtype == torch.float32
        most = 1e-4 if is_wide else 5e-2
        at_worst = math.inf if has_experts else most if is_wide else _AT_ONE_POSITION * most
        median, worst = float(errors.median()), float(errors.max())
        if not (median <= most and worst <= at_worst):  # also for NaN
            raise NotExact(
                f"the exact forward of {type(module).__name__} differs from its own by {worst:.1e} of the largest "
                f"logit at the worst position and {median:.1e} in the median, allowed {at_worst:.0e} and {most:.0e}"
            )
        steps = self.steps(KVCache.create(self.decoder, 3, ids.shape[1]))
        half = ids.shape[1] // 2
        prompt = steps.forward_all(ids[0, :half], 1)
        steps.forward(ids[1, :half], 2)
        rows = [steps.forward_each(ids[:, at], [1, 2])[0] for at in range(half, ids.shape[1])]
        generated = torch.cat([prompt, torch.stack(rows)])
        for name, found in (("one of two sequences", batch[0]), ("generation over a cache", generated)):
            if not torch.equal(found.float(), alone[0].float()):
                raise NotExact(
                    f"{type(module).__name__}: {name} and a sequence alone have other logits, by "
                    f"{float((found.float() - alone[0].float()).abs().max()):.1e}: {self._first_difference(ids)}"
                )

    def _first_difference(self, ids: Tensor) -> str:
        """Return where one token alone first differs from the same token in a batch."""
        positions = torch.arange(ids.shape[1], device=ids.device)[None]
        x = embed(self.parts, self.decoder.embedding, ids, positions)
        for block in self.decoder.blocks:
            alone = run_block(self.parts, block, x[:1], functools.partial(self._attend, block))
            x = run_block(self.parts, block, x, functools.partial(self._attend, block))
            if not torch.equal(alone[0], x[0]):
                return f"block {block.name} depends on the batch"
        return "its blocks agree; the embedding or the head rounds otherwise"


@contextlib.contextmanager
def exact_forward(module: nn.Module, run: Run = run_module) -> Iterator[ExactForward]:
    """Install an exact forward inside the block.  Raises as `ExactForward.install`."""
    exact = ExactForward.install(module, run)
    try:
        yield exact
    finally:
        exact.close()


def _probe(run: Run, module: nn.Module, decoder: Decoder) -> tuple[Tensor, Tensor]:
    """Return two sequences that end in another tile of 16 rows, if the model takes so many; logits of the first."""
    tokens = decoder.embedding.tokens

    def attempt(count: int) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(2)
        ids = torch.randint(0, tokens.shape[0], (2, count), generator=generator).to(tokens.device)
        return ids, _logits(run, module, ids[:1])

    return fitting(min(21, decoder.max_positions or 21), attempt)


def _logits(run: Run, module: nn.Module, ids: Tensor) -> Tensor:
    return next(tensors_in(run(module, ids))).clone()


def _norms(decoder: Decoder) -> Iterator[Norm]:
    """Yield the norms that are modules, each once."""
    found: list[Norm | None] = [decoder.embedding.norm, decoder.norm]
    for block in decoder.blocks:
        found += [block.attention_norm, block.attention_out_norm, block.mlp_norm, block.mlp_out_norm]
        found += [block.attention.query_norm, block.attention.key_norm]
    yield from {norm.name: norm for norm in found if norm is not None}.values()


def _shift_of(given: dict[str, Any]) -> _Shift | None:
    """Return the shift of a batch by the arguments of its call.

    Raises ValueError for a mask that hides tokens between others, for packed positions, and for a cache.
    """
    cache, positions, mask = (given.get(name) for name in ("past_key_values", "position_ids", "attention_mask"))
    if cache is not None and (not hasattr(cache, "get_seq_length") or cache.get_seq_length() > 0):
        raise ValueError("rollout.exact computes whole sequences: leave past_key_values out, or use engine.rollout()")
    seen = _seen(mask)
    if isinstance(positions, Tensor) and positions.dim() == 2:
        gaps = positions.diff(dim=1) != 1
        if bool((gaps if seen is None else gaps & seen[:, 1:] & seen[:, :-1]).any()):
            raise ValueError(
                "rollout.exact got position_ids that do not count up by one: packed sequences have no exact "
                "attention; give each its own row"
            )
    if seen is None or bool(seen[:, 0].all()):
        return None
    return _Shift.of(seen.int().argmax(dim=1), seen.shape[1])


def _seen(mask: Any) -> Tensor | None:
    """Return where tokens are, (batch, time) bool.  Raises ValueError if padding is between them."""
    if mask is None:
        return None
    if not isinstance(mask, Tensor) or mask.dim() != 2:
        raise ValueError(
            "rollout.exact got an attention_mask that is not (batch, time): pass 1 for tokens and 0 for padding"
        )
    seen = mask.bool()
    edges = (seen[:, 1:] != seen[:, :-1]).sum(dim=1)
    if bool(((edges > 2) | ((edges == 2) & seen[:, 0])).any()):
        raise ValueError("rollout.exact got an attention_mask with padding between tokens, not only left and right")
    return seen
