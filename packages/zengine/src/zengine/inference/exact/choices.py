"""Choices that make a recognised decoder exact: the rounding of its embedding and head, and what its blocks return.

A recognised decoder is right up to rounding.  Where code of the user stays (before the first block, after the head),
generation must round as that code does: the forms it may have are tried, and the one with equal bits is taken.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import attrs
import torch
from torch import Tensor, nn

from zengine.inference.exact.blocks import HeadRule, finished
from zengine.inference.exact.modules import owner_of
from zengine.inference.matching import Constants
from zengine.inference.observe import Call, observe, tensors_in
from zengine.inference.quantized import projections
from zengine.inference.recognize import fitting
from zengine.inference.structure import MLP, Decoder, Embedding, Head, Mixture

__all__ = ["NotExact", "exact_decoder"]

Run = Callable[[nn.Module, Tensor], Any]
Returned = Callable[[Tensor], Any]  # hidden states -> what the block's forward returned


class NotExact(ValueError):
    """The module cannot run exactly.  The message says which part, and why."""


def exact_decoder(module: nn.Module, decoder: Decoder, run: Run) -> tuple[Decoder, HeadRule, dict[str, Returned]]:
    """Return the decoder with the bits of the module's embedding, the head's rounding, and what blocks return.

    module: in eval mode, as it was recognised, with its adapters.

    Raises NotExact, and ValueError for dropout.
    """
    _check_blocks(decoder)
    _check_dropout(module)
    tokens = decoder.embedding.tokens
    ids = tokens.new_empty(0)

    def observed(count: int) -> tuple[list[Call], Tensor]:
        nonlocal ids
        generator = torch.Generator().manual_seed(1)
        ids = torch.randint(0, tokens.shape[0], (1, count), generator=generator).to(tokens.device)
        return observe(module, lambda: run(module, ids))

    returned: dict[str, Any] = {}
    handles = [
        module.get_submodule(block.name).register_forward_hook(
            lambda _module, _args, output, name=block.name: returned.__setitem__(name, output)
        )
        for block in decoder.blocks
    ]
    try:
        calls, logits = fitting(min(24, decoder.max_positions or 24), observed)
    finally:
        for handle in handles:
            handle.remove()
    constants = Constants.of((), getattr(module, "config", None))
    embedding = _exact_embedding(decoder, constants, calls, ids)
    head, head_rule = _exact_head(decoder.head, constants, calls, logits)
    returns = {name: _returned(name, output) for name, output in returned.items()}
    return attrs.evolve(decoder, embedding=embedding, head=head), head_rule, returns


def _check_blocks(decoder: Decoder) -> None:
    for block in decoder.blocks:
        if not isinstance(block.mlp, (MLP, Mixture)):
            what = f"{block.name}.mlp is no MLP of a known form, and no mixture of experts of one"
            raise NotExact(f"{what}, so rollout.exact cannot compute it")
        if isinstance(block.mlp, Mixture) and owner_of(block.mlp) in (block.name, ""):
            raise NotExact(f"the router of {block.name} is in no module together with its experts")
    for each in projections(decoder):
        if not isinstance(each.weight, Tensor):
            raise NotExact(f"{each.name} is quantized; rollout.exact needs float32, bfloat16 or float16 weights")


def _check_dropout(module: nn.Module) -> None:
    if getattr(getattr(module, "config", None), "output_router_logits", False):
        raise NotExact(
            f"{type(module).__name__}.config.output_router_logits is True, and exact mixtures record none for the "
            "auxiliary loss: set it to False"
        )
    for name, child in module.named_modules():
        own = [("p", child.p)] if isinstance(child, nn.modules.dropout._DropoutNd) else []
        named = [row for row in vars(child).items() if any(each in row[0] for each in ("dropout", "pdrop", "jitter"))]
        for key, value in (*own, *named):
            if isinstance(value, float) and value > 0:
                raise ValueError(
                    f"rollout.exact got dropout: {name or type(module).__name__}.{key} is {value}. Training would "
                    "have other log-probabilities than generation; set it to 0"
                )


def _exact_embedding(decoder: Decoder, constants: Constants, calls: list[Call], ids: Tensor) -> Embedding:
    """Return the embedding whose sum has the bits of what the module computes."""
    form, first = decoder.embedding, decoder.blocks[0].name
    reader = first if form.norm is None else form.norm.name
    wanted = next(call.input for call in calls if call.name == reader)
    positions = torch.arange(ids.shape[1], device=ids.device)[None]
    width, dtype = form.tokens.shape[1], form.tokens.dtype
    root = width**0.5
    roots = (root, torch.tensor(root).to(dtype).item())
    for factor in dict.fromkeys((form.factor, *roots, *constants.named("embed"))):
        made = attrs.evolve(form, factor=factor)
        if torch.equal(made.summed(ids, positions), wanted):
            return made
    raise NotExact(
        f"what {reader} reads is no sum of embeddings bit for bit (their factor is about {form.factor:.6g}), so "
        "generation would begin with other bits than training"
    )


def _exact_head(head: Head, constants: Constants, calls: list[Call], logits: Tensor) -> tuple[Head, HeadRule]:
    """Return the head and its rounding.  A soft cap that bfloat16 hides is one of the config's."""
    before = [call.output for call in calls if call.name == head.projection.name][-1]
    caps = dict.fromkeys((head.softcap, 0.0, *constants.named("softcap")))
    said = [value for value in constants.named("logit") if value > 0]
    factors = [(each, 0.0) for each in dict.fromkeys((head.factor, *said))]
    factors += [(1.0 / each, each) for each in dict.fromkeys((*said, 1.0 / head.factor))]
    for (factor, divisor), softcap, is_narrow in itertools.product(factors, caps, (False, True)):
        made = attrs.evolve(head, factor=factor, softcap=softcap)
        rule = HeadRule(is_narrow=is_narrow, divisor=divisor)
        if torch.equal(finished(made, rule, before), logits.float()):
            return made, rule
    raise NotExact(
        f"the logits are not those of {head.projection.name} by a factor and a soft cap, bit for bit; "
        f"found: factor {head.factor:.6g}, soft cap {head.softcap:.6g}"
    )


def _returned(name: str, output: Any) -> Returned:
    if isinstance(output, Tensor):
        return lambda x: x
    if type(output) in (tuple, list) and all(each is None for each in output[1:]):
        return lambda x: type(output)((x, *output[1:]))
    extra = len(list(tensors_in(output))) - 1
    raise NotExact(f"{name} returns {type(output).__name__} with {extra} tensors besides the hidden states")
