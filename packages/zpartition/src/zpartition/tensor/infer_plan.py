"""Infer plans from the data flow of a model, without a list of models.

Linear layers can be split in pairs, where the outputs of some go into one other and nowhere else: q, k and v into the
output projection, gate and up into down.  Pairs are found in the flow of a small input: a layer whose input
comes only from linear layers that feed nothing else becomes a Row, and those become Columns.  The structure of the
columns (heads, fused blocks) is read from the views of their outputs.  A residual stream never qualifies, since many
layers read it.

The flow does not show if operations between two layers mix columns.  `verify` detects this: it runs the input through
the model and a split copy.  `infer_verified_plan` does both.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

from torch import nn
from torch.distributed import ProcessGroup

from zpartition.tensor.layer_split import LINEAR, linear_kind
from zpartition.tensor.plan import Rule, TensorPlan, Uncovered
from zpartition.tensor.styles import Column, NormShard, Row, Style, Vocabulary
from zpartition.tensor.tracing import LayerFlow, trace
from zpartition.tensor.verify import find_problem, verify

__all__ = ["gathered_pair", "infer_plan", "infer_verified_plan", "inputs_of", "pairs_plan"]


def infer_plan(
    model: nn.Module, *args: Any, kwargs: Mapping[str, Any] | None = None, vocabulary: bool = False
) -> TensorPlan:
    """Infer a plan for any model from one run of `model(*args, **kwargs)` on a small input.

    args, kwargs: default: the model's `dummy_inputs`.
    vocabulary: split embeddings and output layers too.  The model may be on the meta device.
    A wrong plan is not detected here: use `verify`, or `infer_verified_plan`.

    Raises:
        ValueError: no two layers of the model can be split as a pair, or there is no input.
    """
    pairs = _find_pairs(model, args, inputs_of(model, args, kwargs))
    return pairs_plan(pairs, model, vocabulary)


def infer_verified_plan(
    model: nn.Module,
    group: ProcessGroup | None,
    *args: Any,
    kwargs: Mapping[str, Any] | None = None,
    vocabulary: bool = False,
) -> TensorPlan:
    """Infer a plan and verify it over the ranks of `group`, which all call this.

    Pairs that cannot be split (relative positions that all heads share, blocks at fixed places) still have split
    weights, but the activations between their layers are whole on every rank: Column(gathers=True), then
    Row(takes_part=True).

    Raises:
        ValueError: as `infer_plan` and `verify` do, on every rank.
    """
    given = inputs_of(model, args, kwargs)
    kinds: dict[str, list[dict[str, Style]]] = {}
    for pair in _find_pairs(model, args, given):
        kinds.setdefault(_generalize(list(pair)[-1]), []).append(pair)
    checked: list[dict[str, Style]] = []
    for pairs in kinds.values():
        fits = not find_problem(model, pairs_plan(pairs, model), group, args, given)
        checked += pairs if fits else [gathered_pair(pair) for pair in pairs]
    plan = pairs_plan(checked, model, vocabulary)
    verify(model, plan, group, *args, kwargs=given)
    return plan


def inputs_of(model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any] | None) -> Mapping[str, Any]:
    """Return the keyword arguments of a small run.  Raises ValueError if there are no arguments at all."""
    given: Mapping[str, Any] = kwargs or ({} if args else getattr(model, "dummy_inputs", {}))
    if not args and not given:
        raise ValueError(
            f"a plan for {type(model).__name__} is inferred from a run on a small input: pass the arguments of its "
            "forward, a few tokens or rows."
        )
    return given


def _find_pairs(model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[dict[str, Style]]:
    """Return the styles by module of each pair; the row layer last."""
    flow, modules = trace(model, args, kwargs), dict(model.named_modules())
    pairs: list[dict[str, Style]] = []
    taken: set[str] = set()
    for row, columns in flow.sources.items():
        is_free = not taken.intersection(columns) and not flow.leaking.intersection(columns) and row not in columns
        if columns and is_free and all(flow.consumers(name) == {row} for name in columns):
            pair = _pair(flow, modules, row, sorted(columns))
            taken.update(pair)
            pairs += [pair] if pair else []
    if not pairs:
        raise ValueError(
            f"none of the {len(flow.sources)} linear layers of {type(model).__name__} that ran could be paired: no "
            "layer feeds exactly one other layer. Write a TensorPlan, or do not split the model."
        )
    return pairs


def pairs_plan(pairs: Iterable[Mapping[str, Style]], model: nn.Module, vocabulary: bool = False) -> TensorPlan:
    """Return the plan of these styles by module, one rule for layers that differ in numbers only."""
    modules = dict(model.named_modules())
    styles = {name: style for pair in pairs for name, style in pair.items()}
    ends = _vocabulary_ends(model) if vocabulary else {}
    return TensorPlan(_rules({**ends, **styles}, modules), uncovered=Uncovered.KEEP)


def gathered_pair(pair: Mapping[str, Style]) -> dict[str, Style]:
    """Split the same layers, with whole activations between them."""
    joined: dict[type[Style], Style] = {Column: Column(gathers=True), Row: Row(takes_part=True)}
    return {name: joined[type(style)] for name, style in pair.items() if type(style) in joined}


def _pair(flow: LayerFlow, modules: Mapping[str, nn.Module], row: str, columns: list[str]) -> dict[str, Style]:
    """Return the styles of a row layer and of those before it; {} if their sizes do not allow it."""
    inputs = _shape(modules[row])[1]
    units = min((number for name in columns for number in flow.heads.get(name, ())), default=inputs)
    sizes = [size for name in columns for size in _sizes(flow, modules, name)]
    norms = [name for name, found in flow.norms.items() if found and found.issubset(columns)]
    weights = [param.numel() for name in norms for param in modules[name].parameters(recurse=False)]
    is_over_heads = all(numel < min(sizes) for numel in weights)  # and not over columns that other ranks have
    fits = all(size % units == 0 for size in (*sizes, inputs))
    if not (fits and is_over_heads) or (units == inputs and any(size != inputs for size in sizes)):
        return {}
    if any(flow.blocks.get(name) and linear_kind(modules[name]) is not LINEAR for name in columns):
        return gathered_pair({**dict.fromkeys(columns, Column()), row: Row()})
    styles: dict[str, Style] = {name: Column(units=units, blocks=flow.blocks.get(name, ())) for name in columns}
    return {**styles, **dict.fromkeys(norms, NormShard()), row: Row(units=units)}


def _sizes(flow: LayerFlow, modules: Mapping[str, nn.Module], name: str) -> tuple[int, ...]:
    return flow.blocks.get(name) or (_shape(modules[name])[0],)


def _shape(module: nn.Module) -> tuple[int, int]:
    """Return (outputs, inputs) of a linear layer."""
    kind = linear_kind(module)
    assert kind is not None
    return kind.shape(module)


def _vocabulary_ends(model: nn.Module) -> dict[str, Style]:
    """Return styles for token embeddings, and linear layers with as many outputs as there are tokens."""
    tables = {n: m for n, m in model.named_modules() if type(m) is nn.Embedding}
    sizes = {module.num_embeddings for module in tables.values()}
    linear = {name: module for name, module in model.named_modules() if linear_kind(module) is LINEAR}
    heads: dict[str, Style] = {n: Column(gathers=True) for n, m in linear.items() if _shape(m)[0] in sizes}
    ends = heads | dict.fromkeys(tables, Vocabulary())
    while torn := [name for name in ends if _is_shared(model, name, ends)]:
        for name in torn:
            del ends[name]
    return ends


def _is_shared(model: nn.Module, name: str, ends: Mapping[str, Style]) -> bool:
    """Check if a module that is not among `ends` shares a parameter with this one."""
    own = {id(param) for param in model.get_submodule(name).parameters(recurse=False)}
    return any(
        id(param) in own and other not in ends
        for other, module in model.named_modules()
        for param in module.parameters(recurse=False)
    )


def _rules(styles: Mapping[str, Style], modules: Mapping[str, nn.Module]) -> Iterable[Rule]:
    """Yield one rule for all layers whose names differ in numbers only, if they have one style."""
    members: dict[str, list[str]] = {}
    for name, module in modules.items():
        if type(module) in {type(modules[styled]) for styled in styles}:
            members.setdefault(_generalize(name), []).append(name)
    done: set[str] = set()
    for name, style in styles.items():
        pattern = _generalize(name)
        alike = all(styles.get(other, style) == style for other in members[pattern])
        if pattern not in done:
            yield Rule(pattern if alike else name, style)
        if alike:
            done.add(pattern)


def _generalize(name: str) -> str:
    return re.sub(r"(?<![^.])\d+(?![^.])", "*", name)
