"""Plans: patterns over module names with styles, and their resolution for one model.

    TensorPlan([Rule("layers.*.q_proj", Column()), Rule("layers.*.o_proj", Row()), ...])

A pattern names modules; `*` stands for one component of a name or a part of one, `**` for any number of components.
A pattern that begins with "re:" is a regular expression over weight names (DeepSpeed's).  The first matching rule
applies.  `resolve` is pure: it reads shapes only, and finds every fault of a plan before any rank communicates.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Iterable, Mapping

import attrs
from torch import nn

from zpartition.layout.units import matches
from zpartition.tensor.heads import NO_HEADS, Heads, heads_of
from zpartition.tensor.layer_split import LayerSplit, linear_kind, split_layer
from zpartition.tensor.styles import Column, Gather, NormShard, Replicated, Row, Scatter, Style, Vocabulary

__all__ = ["Rule", "TensorPlan", "Uncovered", "resolve"]

_NAMED = 5  # names that an error lists


class Uncovered(enum.Enum):
    """Treatment of linear layers that no rule covers."""

    REFUSE = "refuse"
    KEEP = "keep"  # whole, on every rank


@attrs.frozen
class Rule:
    """One line of a plan."""

    pattern: str
    style: Style

    def matches(self, name: str) -> bool:
        """Check if the pattern matches the module name."""
        if self.pattern.startswith("re:"):
            return re.match(self.pattern[3:], f"{name}.weight") is not None
        return matches(self.pattern, name)


def _tuple(rules: Iterable[Rule]) -> tuple[Rule, ...]:
    return tuple(rules)


@attrs.frozen
class TensorPlan:
    """The layers of a model and their styles."""

    rules: tuple[Rule, ...] = attrs.field(converter=_tuple)
    uncovered: Uncovered = Uncovered.REFUSE
    grain: int = 1  # rows or columns of a layer without heads that stay together, where its size is a multiple
    sequence_dim: int = -1  # of activations between split layers, which are split by tokens there; -1: they are not

    def style_of(self, name: str) -> Style | None:
        """Return the style of the first matching rule; None if none matches."""
        return next((rule.style for rule in self.rules if rule.matches(name)), None)


def resolve(plan: TensorPlan, model: nn.Module, num_ranks: int, rank: int) -> list[LayerSplit]:
    """Compute the split of each module that the plan names, for one rank; pure.

    Raises:
        ValueError: a pattern matches nothing; a linear layer is not covered; a style does not fit its module; a size
            cannot be split over the ranks; or modules that share a weight would split it differently.
    """
    modules = dict(model.named_modules())
    names = [name for name in modules if name]
    _check_all_match(plan, names)
    chosen = {name: style for name in names if (style := plan.style_of(name)) is not None}
    _check_covered(plan, modules, chosen)
    _check_sequence_styles(plan, chosen)
    splits = []
    for name, style in chosen.items():
        if not isinstance(style, Replicated):
            parent = name.rpartition(".")[0]
            heads = _attention_heads(modules[parent], f"{parent or 'the model'}", num_ranks)
            units = _set_units(style, modules[name], heads)
            fitted = _coarsen_units(units, modules[name], plan.grain, num_ranks)
            splits.append(split_layer(name, modules[name], fitted, num_ranks, rank))
    _check_shared_weights(model, splits)
    return splits


def _attention_heads(parent: nn.Module, name: str, num_ranks: int) -> Heads:
    if isinstance(parent, nn.MultiheadAttention):
        raise ValueError(
            f"{name} is torch's MultiheadAttention, which reads the weights of its layers without calling them, so "
            "they cannot be split. Write the attention with Linear layers and scaled_dot_product_attention, or keep "
            "it whole with Replicated()."
        )
    heads = heads_of(parent)
    if heads != NO_HEADS and heads.query % heads.key_value:
        raise ValueError(
            f"{name} has {heads.query} query heads and {heads.key_value} key-value heads; the first number must be a "
            "multiple of the second."
        )
    if 0 < heads.units < num_ranks:
        kind = "key-value heads" if heads.key_value < heads.query else "heads"
        raise ValueError(
            f"{name} has {heads.units} {kind}, which cannot be split over {num_ranks} tensor ranks: each rank needs "
            f"one. Use at most {heads.units} tensor ranks, or keep this attention whole with Replicated()."
        )
    return heads


def _set_units(style: Style, module: nn.Module, heads: Heads) -> Style:
    """Set the units of a style: its own, or heads, or elements (where activations between two layers are whole)."""
    if not isinstance(style, Column | Row) or style.units:
        return style
    kind = linear_kind(module)
    if kind is None:
        return style
    size = kind.shape(module)[0 if isinstance(style, Column) else 1]
    sizes = (style.blocks if isinstance(style, Column) else ()) or (size,)
    is_joined = style.gathers if isinstance(style, Column) else style.takes_part
    if heads != NO_HEADS and not is_joined and all(each % heads.units == 0 for each in sizes):
        return attrs.evolve(style, units=heads.units)
    return attrs.evolve(style, units=min(sizes) if len(set(sizes)) > 1 else sizes[0])


def _coarsen_units(style: Style, module: nn.Module, grain: int, num_ranks: int) -> Style:
    """Use runs of `grain` elements as units, where units are elements and there are enough runs."""
    kind = linear_kind(module)
    if grain == 1 or kind is None or not isinstance(style, Column | Row):
        return style
    size = kind.shape(module)[0 if isinstance(style, Column) else 1]
    sizes = (style.blocks if isinstance(style, Column) else ()) or (size,)
    fits = all(each == style.units and each % grain == 0 and each // grain >= num_ranks for each in sizes)
    return attrs.evolve(style, units=style.units // grain) if fits else style


def _check_all_match(plan: TensorPlan, names: Iterable[str]) -> None:
    known = list(names)
    for rule in plan.rules:
        if not any(rule.matches(name) for name in known):
            raise ValueError(
                f"pattern {rule.pattern!r} of the tensor-parallel plan matches none of the model's {len(known)} "
                f"modules ({_list_names(known)}); `*` stands for one component of a name, `**` for any number of "
                "components."
            )


def _check_covered(plan: TensorPlan, modules: Mapping[str, nn.Module], chosen: Mapping[str, Style]) -> None:
    if plan.uncovered is Uncovered.KEEP:
        return
    missed = [name for name, module in modules.items() if linear_kind(module) is not None and name not in chosen]
    if missed:
        raise ValueError(
            f"the tensor-parallel plan covers {len(chosen)} layers and leaves out {len(missed)} linear ones: "
            f"{_list_names(missed)}. Add rules for them (Replicated() keeps a layer whole), or set "
            "uncovered=Uncovered.KEEP."
        )


def _check_sequence_styles(plan: TensorPlan, chosen: Mapping[str, Style]) -> None:
    if plan.sequence_dim >= 0:
        if not any(style == NormShard(gathers=True) for style in chosen.values()):
            raise ValueError(
                f"the plan splits activations by tokens (sequence_dim={plan.sequence_dim}), but none of its "
                f"{len(chosen)} layers gathers them, and split layers need all tokens. Give the norms before them "
                "the style NormShard(gathers=True)."
            )
        return
    for name, style in chosen.items():
        if (
            isinstance(style, Scatter | Gather)
            or (isinstance(style, Vocabulary) and style.scatters)
            or style == NormShard(gathers=True)
        ):
            raise ValueError(
                f"{name} has the style {style}, which splits activations by tokens, but in a plan with "
                "sequence_dim=-1 they are whole. Set sequence_dim=1 for activations (batch, tokens, features)."
            )


def _check_shared_weights(model: nn.Module, splits: Iterable[LayerSplit]) -> None:
    """Check that modules that share a weight split it alike."""
    split_of = {split.module: split for split in splits}
    first: dict[int, tuple[str, object]] = {}
    for prefix, module in model.named_modules():
        for key, param in module.named_parameters(recurse=False):
            address = split_of[prefix].addresses.get(key) if prefix in split_of else None
            name, found = first.setdefault(id(param), (f"{prefix}.{key}", address))
            if found != address:
                raise ValueError(
                    f"{name} and {prefix}.{key} are one parameter, of shape {list(param.shape)}, but the plan splits "
                    "them differently: cover both (an embedding with Vocabulary(), the head tied to it with "
                    "Column(gathers=True)), or neither."
                )


def _list_names(names: list[str]) -> str:
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return ", ".join(names[:_NAMED]) + more
