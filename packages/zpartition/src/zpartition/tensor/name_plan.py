"""Plans by the names of layers, for models that cannot be run beforehand.

Without a sample of the data (and for a model inside `zero.Init`, which has no values) no plan can be inferred.  As
DeepSpeed's AutoTP does, this one recognizes the last projection of a block by its name (`o_proj`, `down_proj`,
`fc2`, ...): it becomes a row layer, and the other linear layers of the block are columns.

A name does not tell what a block computes between its layers.  So activations are split only where names, sizes and
head counts agree on the usual form, an attention with separate queries, keys and values, or an MLP; the weights of
all other blocks (fused projections, low-rank attentions, blocks with other parameters) are split, too, but the
activations between their layers are whole on every rank: Column(gathers=True), then Row(takes_part=True), which is
correct for any code.  `verify_on_first_call` (verify.py) checks the others.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping

from torch import nn

from zpartition.layout.hf_experts import is_hf_experts, is_sharded_hf_experts
from zpartition.tensor.heads import NO_HEADS, heads_of
from zpartition.tensor.infer_plan import gathered_pair, pairs_plan
from zpartition.tensor.layer_split import LINEAR, linear_kind
from zpartition.tensor.plan import TensorPlan
from zpartition.tensor.styles import Column, NormShard, Row, Style

__all__ = ["plan_by_names"]

# Ends of the paths of last projections; of several in one block the first counts.
_LAST = (
    *("o_proj", "out_proj", "down_proj", "dense_4h_to_h", "c_proj", "wo", "fc2", "fc_out", "proj_out", "to_out.0"),
    *("out_lin", "lin2", "linear2", "linear_2", "w2", "down", "attention.dense", "self_attention.dense"),
    *("self_attn.dense", "attn.dense", "attn.proj", "attention.proj", "mlp.proj", "output.dense", "attn.out"),
)
_QUERIES = re.compile(r"(^|\.)(w?[qkv]|[qkv]_(proj|lin)|to_[qkv]|query|key|value|[qkv]_b_proj)$")
_HEAD_NORMS = re.compile(r"(^|[._])([qk]|query|key)_?(norm|ln|layernorm)$")


def plan_by_names(model: nn.Module, num_ranks: int, *, vocabulary: bool = False) -> TensorPlan:
    """Return the plan that the names of the layers suggest, for `num_ranks` ranks; layers outside stay whole.

    vocabulary: split embeddings and output layers too.

    Raises:
        ValueError: no layer has the name of a last projection.
    """
    modules = dict(model.named_modules())
    whole = [path for path, module in modules.items() if is_hf_experts(module) or is_sharded_hf_experts(module)]
    linear = {
        name: shape
        for name, module in modules.items()
        if (shape := _shape(module)) and not any(name == path or name.startswith(f"{path}.") for path in whole)
    }
    taken: set[str] = set()
    pairs: list[dict[str, Style]] = []
    rows = [name for name in linear if _priority(name) < len(_LAST)]
    for row in sorted(rows, key=lambda name: (-name.count("."), _priority(name))):
        scope, columns = ("", []) if row in taken else _scope(row, modules, linear, taken)
        if columns:
            taken.update(columns, [row])
            pairs.append(_pair(scope, row, columns, modules, linear, num_ranks))
    if not any(pairs):
        raise ValueError(
            f"none of the {len(linear)} linear layers of {type(model).__name__} has the name of a last projection "
            f"({', '.join(_LAST[:7])}, ...) and other layers before it; they are called "
            f"{', '.join(dict.fromkeys(name.rpartition('.')[2] for name in linear)) or '(there are none)'}."
        )
    order = list(modules)
    return pairs_plan(sorted(filter(None, pairs), key=lambda pair: order.index(list(pair)[-1])), model, vocabulary)


def _shape(module: nn.Module) -> tuple[int, int] | None:
    kind = linear_kind(module)
    return None if kind is None else kind.shape(module)


def _priority(name: str) -> int:
    return next((at for at, last in enumerate(_LAST) if f".{name}".endswith(f".{last}")), len(_LAST))


def _scope(
    row: str, modules: Mapping[str, nn.Module], linear: Collection[str], taken: Collection[str]
) -> tuple[str, list[str]]:
    """Return the nearest module around `row` with other layers that are not taken, and these; it is one block."""
    path = row
    while path:
        inner, path = modules[path], path.rpartition(".")[0]
        is_list = isinstance(modules[path], nn.ModuleList | nn.Sequential) and any(inner.children())
        if is_list or (not path and _has_blocks(modules)):
            break  # other blocks
        prefix = f"{path}." if path else ""
        found = [name for name in linear if name.startswith(prefix) and name != row and name not in taken]
        if found:
            return path, found
    return "", []


def _has_blocks(modules: Mapping[str, nn.Module]) -> bool:
    return any(isinstance(module, nn.ModuleList | nn.Sequential) for module in modules.values())


def _pair(
    scope: str,
    row: str,
    columns: list[str],
    modules: Mapping[str, nn.Module],
    linear: Mapping[str, tuple[int, int]],
    num_ranks: int,
) -> dict[str, Style]:
    """Return the styles of a row layer and of the columns before it, the row last; {} to keep them whole."""
    inputs = linear[row][1]
    outputs = [linear[name][0] for name in columns]
    heads = heads_of(modules[columns[0].rpartition(".")[0]])
    if heads != NO_HEADS and heads.units < num_ranks:
        return {}
    others = dict(_other_parameters(scope, modules, {row, *columns}))
    are_linear = all(linear_kind(modules[name]) is LINEAR for name in (row, *columns))
    styles: dict[str, Style] = {**dict.fromkeys(columns, Column()), row: Row()}
    if heads != NO_HEADS and len(columns) > 1 and all(_QUERIES.search(name) for name in columns):
        norms = {name for name, numel in others.items() if _HEAD_NORMS.search(name) and numel < min(outputs)}
        is_usual = max(outputs) == inputs and norms == set(others)
        if is_usual and all(size % heads.units == 0 for size in outputs) and are_linear:
            return {**dict.fromkeys(norms, NormShard()), **styles}
    elif heads == NO_HEADS and set(outputs) == {inputs} and inputs >= num_ranks and inputs not in others.values():
        return styles
    splittable = {name: style for name, style in styles.items() if min(linear[name]) >= num_ranks}
    return gathered_pair(splittable) if row in splittable else {}


def _other_parameters(
    scope: str, modules: Mapping[str, nn.Module], known: Collection[str]
) -> Iterator[tuple[str, int]]:
    """Yield the modules in a block that hold other parameters, but no linear layers, and the largest one's size."""
    for name, module in modules.items():
        sizes = [param.numel() for param in module.parameters(recurse=False)]
        inside = not scope or name == scope or name.startswith(f"{scope}.")
        if inside and sizes and name not in known and linear_kind(module) is None:
            yield name, max(sizes)
