"""Which layer is split how: patterns over module names, and what they come to for one model.

    TensorPlan([Rule("layers.*.q_proj", Column()), Rule("layers.*.o_proj", Row()), ...])

A pattern names modules; `*` stands for one component of a name or a part of one, `**` for any number of them.  One
that begins with "re:" is a regular expression over names of weights (DeepSpeed's).  The first rule that matches a
module counts.  `resolve` is pure: it reads shapes alone, and whatever is wrong with a plan is said by it, before any
rank has told another anything.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Iterable, Mapping

import attrs
from torch import nn

from zpartition.patterns import matches
from zpartition.tensor.heads import NO_HEADS, Heads, heads_of
from zpartition.tensor.placing import Cut, kind_of, placed
from zpartition.tensor.styles import Column, Gather, Row, Scatter, Style, Summed, Vocabulary, Whole

__all__ = ["Rule", "TensorPlan", "Uncovered", "resolve"]

_NAMED = 5  # names that an error lists


class Uncovered(enum.Enum):
    """What to do with a linear layer that no rule covers."""

    REFUSE = "refuse"
    KEEP = "keep"  # whole, on every rank


@attrs.frozen
class Rule:
    """One line of a plan."""

    pattern: str
    style: Style

    def matches(self, name: str) -> bool:
        """Whether the module of this name is meant."""
        if self.pattern.startswith("re:"):
            return re.match(self.pattern[3:], f"{name}.weight") is not None
        return matches(self.pattern, name)


def _tuple(rules: Iterable[Rule]) -> tuple[Rule, ...]:
    return tuple(rules)


@attrs.frozen
class TensorPlan:
    """A model's layers and their styles."""

    rules: tuple[Rule, ...] = attrs.field(converter=_tuple)
    uncovered: Uncovered = Uncovered.REFUSE
    grain: int = 1  # rows or columns of a layer without heads that stay together, where its size is a multiple
    sequence_dim: int = -1  # of activations between split layers, which are split by tokens there; -1: they are not

    def style_of(self, name: str) -> Style | None:
        """What the first rule says that matches; None if none does."""
        return next((rule.style for rule in self.rules if rule.matches(name)), None)


def resolve(plan: TensorPlan, model: nn.Module, num_ranks: int, rank: int) -> list[Cut]:
    """What becomes of each module that the plan names, for one rank; pure.

    Raises:
        ValueError: a pattern matches nothing; a linear layer is not covered; a style does not fit its module; a size
            cannot be shared out; or modules that share a weight would cut it differently.
    """
    modules = dict(model.named_modules())
    names = [name for name in modules if name]
    _refuse_idle(plan, names)
    chosen = {name: style for name in names if (style := plan.style_of(name)) is not None}
    _refuse_uncovered(plan, modules, chosen)
    _refuse_regions(plan, chosen)
    cuts = []
    for name, style in chosen.items():
        if not isinstance(style, Whole):
            parent = name.rpartition(".")[0]
            heads = _heads(modules[parent], f"{parent or 'the model'}", num_ranks)
            units = _with_units(style, modules[name], heads)
            fitted = _coarsened(units, modules[name], plan.grain, num_ranks)
            cuts.append(placed(name, modules[name], fitted, num_ranks, rank))
    _refuse_torn(model, cuts)
    return cuts


def _heads(parent: nn.Module, name: str, num_ranks: int) -> Heads:
    if isinstance(parent, nn.MultiheadAttention):
        raise ValueError(
            f"{name} is torch's MultiheadAttention, which reads the weights of its layers without calling them, so "
            "they cannot be split. Write the attention with Linear layers and scaled_dot_product_attention, or leave "
            "it whole with Whole()."
        )
    heads = heads_of(parent)
    if heads != NO_HEADS and heads.query % heads.key_value:
        raise ValueError(
            f"{name} has {heads.query} query heads and {heads.key_value} key-value heads, and the one is no multiple "
            "of the other."
        )
    if 0 < heads.units < num_ranks:
        kind = "key-value heads" if heads.key_value < heads.query else "heads"
        raise ValueError(
            f"{name} has {heads.units} {kind}, which cannot be shared out over {num_ranks} tensor ranks: each needs "
            f"one at least. Use {heads.units} tensor ranks or fewer, or leave this attention whole with Whole()."
        )
    return heads


def _with_units(style: Style, module: nn.Module, heads: Heads) -> Style:
    """The style with units: those it names, or heads, or elements (where what is between two layers is whole)."""
    if not isinstance(style, Column | Row) or style.units:
        return style
    kind = kind_of(module)
    if kind is None:
        return style
    size = kind.shape(module)[0 if isinstance(style, Column) else 1]
    sizes = (style.blocks if isinstance(style, Column) else ()) or (size,)
    is_joined = style.gathers if isinstance(style, Column) else style.takes_part
    if heads != NO_HEADS and not is_joined and all(each % heads.units == 0 for each in sizes):
        return attrs.evolve(style, units=heads.units)
    return attrs.evolve(style, units=min(sizes) if len(set(sizes)) > 1 else sizes[0])


def _coarsened(style: Style, module: nn.Module, grain: int, num_ranks: int) -> Style:
    """The style with runs of `grain` elements for units, where units were elements and enough runs are there."""
    kind = kind_of(module)
    if grain == 1 or kind is None or not isinstance(style, Column | Row):
        return style
    size = kind.shape(module)[0 if isinstance(style, Column) else 1]
    sizes = (style.blocks if isinstance(style, Column) else ()) or (size,)
    fits = all(each == style.units and each % grain == 0 and each // grain >= num_ranks for each in sizes)
    return attrs.evolve(style, units=style.units // grain) if fits else style


def _refuse_idle(plan: TensorPlan, names: Iterable[str]) -> None:
    known = list(names)
    for rule in plan.rules:
        if not any(rule.matches(name) for name in known):
            raise ValueError(
                f"pattern {rule.pattern!r} of the tensor-parallel plan matches none of the model's {len(known)} "
                f"modules. They are called {_listed(known)}; `*` stands for one component of a name, `**` for any "
                "number of them."
            )


def _refuse_uncovered(plan: TensorPlan, modules: Mapping[str, nn.Module], chosen: Mapping[str, Style]) -> None:
    if plan.uncovered is Uncovered.KEEP:
        return
    missed = [name for name, module in modules.items() if kind_of(module) is not None and name not in chosen]
    if missed:
        raise ValueError(
            f"the tensor-parallel plan covers {len(chosen)} layers and leaves out {len(missed)} linear ones: "
            f"{_listed(missed)}. Add rules for them (Whole() leaves a layer whole), or say "
            "uncovered=Uncovered.KEEP."
        )


def _refuse_regions(plan: TensorPlan, chosen: Mapping[str, Style]) -> None:
    if plan.sequence_dim >= 0:
        if not any(style == Summed(gathers=True) for style in chosen.values()):
            raise ValueError(
                f"the plan splits activations by tokens (sequence_dim={plan.sequence_dim}), and none of its "
                f"{len(chosen)} layers gathers them: split layers need all tokens. Give the norms before them the "
                "style Summed(gathers=True)."
            )
        return
    for name, style in chosen.items():
        if (
            isinstance(style, Scatter | Gather)
            or (isinstance(style, Vocabulary) and style.scatters)
            or style == Summed(gathers=True)
        ):
            raise ValueError(
                f"{name} has the style {style}, which splits activations by tokens, in a plan with sequence_dim=-1, "
                "in which they are whole. Give the plan sequence_dim=1 for activations (batch, tokens, features)."
            )


def _refuse_torn(model: nn.Module, cuts: Iterable[Cut]) -> None:
    """A weight that modules share must be cut by all of them, and alike."""
    cut_of = {cut.module: cut for cut in cuts}
    first: dict[int, tuple[str, object]] = {}
    for prefix, module in model.named_modules():
        for key, param in module.named_parameters(recurse=False):
            address = cut_of[prefix].addresses.get(key) if prefix in cut_of else None
            name, found = first.setdefault(id(param), (f"{prefix}.{key}", address))
            if found != address:
                raise ValueError(
                    f"{name} and {prefix}.{key} are one parameter, of shape {list(param.shape)}, and the plan cuts "
                    "them differently: cover both, an embedding with Vocabulary() and the head tied to it with "
                    "Column(gathers=True), or neither."
                )


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return ", ".join(names[:_NAMED]) + more
