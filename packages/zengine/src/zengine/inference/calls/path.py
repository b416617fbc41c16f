"""The fused path of an inference engine: a decoder recognized in the module, over one static cache.

`replace_with_kernel_inject` asks for it.  The module stays as it is, and its own forward serves every other call;
both use the same memory.  What is not recognized is logged with the reason, and the module's forward runs.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import final

import attrs
import torch
from torch import Tensor, nn

import zcomm
import zpartition
from zengine.inference.cache import KVCache
from zengine.inference.decoder import DecoderPass
from zengine.inference.quantized_modules import QuantizedLinear, with_weights_of
from zengine.inference.recognize import NotRecognized, recognize
from zengine.inference.structure import Decoder
from zengine.inference.verify import verify
from zpartition import ModelParallelGroup

__all__ = ["FusedPath", "deciding_ranks", "recognized", "reject_length", "reject_prompt"]

log = logging.getLogger("zengine")


def recognized(module: nn.Module, asked_by: str = "replace_with_kernel_inject") -> Decoder | None:
    """Return the decoder that `module` computes, verified against it; None, with the reason logged, if it is none.

    module: in eval mode, with plain weights.  If its layers or experts are split over ranks, this is collective: all
        return a decoder over their parts, or all None.
    asked_by: key of a config, for messages.
    """
    try:
        decoder = _agreed(module, deciding_ranks(module))
        found = verify(decoder, module)
    except (ValueError, LookupError, TypeError, RuntimeError) as error:  # the probe calls module(ids)
        log.warning("%s: %s is not fused, and its own forward runs: %s", asked_by, type(module).__name__, error)
        return None
    opaque = decoder.opaque
    log.info(
        "%s: %d blocks of %s fused (attention, norms, positions, cache%s); as they are: %s; logits differ from the "
        "module's by at most %.1e",
        *(asked_by, len(decoder.blocks), type(module).__name__, "" if opaque else ", MLPs"),
        *(", ".join(opaque) or "none", max(found.prompt_error, found.decode_error)),
    )
    return decoder


def deciding_ranks(module: nn.Module) -> ModelParallelGroup:
    """Return the ranks that decode together, and choose one token: those that split layers, or experts."""
    layers = zpartition.model_parallel_group_of(module)
    return max(layers, zpartition.expert_ranks_of(module), key=lambda each: each.size)


def _agreed(module: nn.Module, ranks: ModelParallelGroup) -> Decoder:
    """Recognize this rank's part.  Raises NotRecognized on all ranks if one cannot."""
    if ranks.size == 1:
        return recognize(module)
    reason, decoder = "", None
    try:
        decoder = recognize(module)
    except (ValueError, LookupError, TypeError, RuntimeError) as error:
        reason = f"rank {ranks.rank}: {error}"
    reasons = [each for each in zcomm.all_gather_object(reason, ranks.group) if each]
    if decoder is None or reasons:
        raise NotRecognized("; ".join(reasons[:2]))
    return decoder


def reject_prompt(length: int, limit: int, place: str = "init_inference()") -> None:
    """Raise RuntimeError (DeepSpeed's) if a prompt of `length` tokens exceeds the max_out_tokens of `place`."""
    if length > limit:
        raise RuntimeError(
            f"Input with size {length} exceeds maximum length of {limit}: pass a larger max_out_tokens to {place}."
        )


def reject_length(prompt: int, new: int, limit: int, num_positions: int | None, place: str) -> None:
    """Raise RuntimeError if a prompt and `new` tokens exceed max_out_tokens of `place`, or the learnt positions.

    limit: the smaller of both.  num_positions: learnt ones; None: positions are not learnt.
    """
    if prompt + new - 1 <= limit:
        return
    if num_positions == limit:
        what, advice = f"the {limit} positions that the model has learnt", ""
    else:
        reject_prompt(prompt, limit, place)
        what, advice = f"max_out_tokens = {limit}", f"raise it in {place}, or "
    room = limit - prompt + 1
    advice += f"ask for at most {room} new tokens" if room > 0 else f"shorten the prompt to {limit} tokens"
    raise RuntimeError(f"a prompt of {prompt} tokens and {new} new ones exceed {what}: {advice}.")


@attrs.frozen
class _Place:
    """Where a weight lies.  Values that change in place show at once, so only this can be out of date."""

    tensor: Tensor = attrs.field(eq=id)
    address: int
    dtype: torch.dtype


def _places(module: nn.Module) -> tuple[_Place, ...]:
    layers = (each for each in module.modules() if isinstance(each, QuantizedLinear))
    tensors = [*module.parameters(), *(part for layer in layers for part in layer.weight.parts().values())]
    return tuple(_Place(each, each.data_ptr(), each.dtype) for each in tensors)


@final
@attrs.define(eq=False)
class FusedPath:
    """A decoder, and the cache that its calls take turns with.

    Calls of several threads, and calls within a call (by a streamer), each have a cache: the first that of the path,
    which stays, the others one of their own, which is freed when they end.

    Invariant: `steps`, if any, has a capacity of `capacity` tokens, and no call uses it.
    A copy, also a pickled one, is recognized anew: it has the copied module's weights, and a cache of its own.
    """

    decoder: Decoder
    module: nn.Module  # whose weights `decoder` reads
    places: tuple[_Place, ...]  # of its weights when the decoder was made
    capacity: int  # tokens of a sequence, prompt and answer
    place: str = "init_inference()"  # where max_out_tokens is given
    steps: DecoderPass | None = None  # with the cache of the largest batch so far; None while a call uses it
    timed: Callable[[], AbstractContextManager[object]] = nullcontext  # around each prefill, and each step of a batch
    _taking: threading.Lock = attrs.field(factory=threading.Lock)  # of `steps`

    @classmethod
    def of(cls, decoder: Decoder, module: nn.Module, max_out_tokens: int) -> FusedPath:
        """Return the path with the module's present weights, for `max_out_tokens` or as many as it has positions."""
        most = decoder.max_positions
        capacity = max_out_tokens if most is None else min(max_out_tokens, most)
        return cls(with_weights_of(decoder, module), module, _places(module), capacity)

    @classmethod
    def over(cls, decoder: Decoder, module: nn.Module, max_out_tokens: int, place: str) -> FusedPath:
        """Return the path of a decoder that has just been recognized in `module`."""
        capacity = min(max_out_tokens, decoder.max_positions or max_out_tokens)
        return cls(decoder, module, _places(module), capacity, place)

    def __reduce__(self) -> tuple[Callable[[nn.Module, int], FusedPath | None], tuple[nn.Module, int]]:
        return _recognized_path, (self.module, self.capacity)

    @property
    def is_current(self) -> bool:
        """Whether the module still has the tensors, in the memory, that the decoder reads."""
        return _places(self.module) == self.places

    @contextmanager
    def empty_steps(self, num_slots: int) -> Iterator[DecoderPass]:
        """Lend a pass with at least `num_slots` empty slots; the largest so far is kept for the next call."""
        steps = self._take(num_slots) or DecoderPass(
            self.decoder, KVCache.create(self.decoder, num_slots, self.capacity)
        )
        for slot in range(steps.cache.num_slots):
            steps.cache.clear(slot)
        try:
            yield steps
        finally:
            with self._taking:
                if self.steps is None or self.steps.cache.num_slots < steps.cache.num_slots:
                    self.steps = steps

    def _take(self, num_slots: int) -> DecoderPass | None:
        """Return the kept pass if it has as many slots; a smaller one is freed."""
        with self._taking:
            kept, self.steps = self.steps, None
        return None if kept is None or kept.cache.num_slots < num_slots else kept

    def check_length(self, prompt: int, new: int) -> None:
        """Raise RuntimeError if a prompt and `new` tokens do not fit into the cache."""
        reject_length(prompt, new, self.capacity, self.decoder.max_positions, self.place)

    def prefill(self, steps: DecoderPass, prompts: list[Tensor]) -> Tensor:
        """Put one prompt into each slot; return the logits after each, (prompts, vocabulary) float32.

        prompts: (time,) int64 each, on the decoder's device.  Equal ones are computed once.
        """
        first: dict[tuple[int, ...], int] = {}
        rows: list[Tensor] = []
        with self.timed():
            for slot, prompt in enumerate(prompts):
                source = first.setdefault(tuple(prompt.tolist()), slot)
                if source == slot:
                    rows.append(steps.forward(prompt, slot).clone())
                else:
                    steps.cache.copy_prefix(source, slot, len(prompt))
                    rows.append(rows[source])
        return torch.stack(rows)

    def step(self, steps: DecoderPass, tokens: Tensor, slots: Iterable[int], logits: Tensor) -> Tensor:
        """Append one token to each of `slots`; return the logits with those after it in their rows.

        tokens: (batch,) int64; logits: (batch, vocabulary) float32, of all slots, not changed.
        """
        on_device, logits = tokens.to(self.decoder.embedding.tokens.device), logits.clone()
        with self.timed():
            at = list(slots)
            logits[at] = steps.forward_each(on_device[at], at)
        return logits


def _recognized_path(module: nn.Module, capacity: int) -> FusedPath | None:
    """Return the path of a copied module; None, with the reason logged, if it is no decoder any more."""
    decoder = recognized(module)
    return None if decoder is None else FusedPath.of(decoder, module, capacity)


def has_quantized_layers(module: nn.Module) -> bool:
    """Return whether a layer of `module` is quantized already."""
    return any(isinstance(each, QuantizedLinear) for each in module.modules())
