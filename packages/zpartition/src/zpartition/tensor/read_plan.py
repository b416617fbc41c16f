"""Plans from other libraries: Hugging Face's `tp_plan`, DeepSpeed's `partition_config` and `injection_policy`.

Each is read for a given model.  Unsupported entries are rejected by name; nothing is ignored silently, except
patterns of a `tp_plan` that match no layer of this model, which such plans may contain.

`tp_model_init`, with DeepSpeed's name and arguments, selects a plan and splits the model by it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed import ProcessGroup

import zcomm
from zpartition.layout.hf_experts import is_hf_experts, is_sharded_hf_experts
from zpartition.tensor.infer_plan import infer_verified_plan
from zpartition.tensor.layer_split import linear_kind
from zpartition.tensor.parallelize import parallelize
from zpartition.tensor.plan import Rule, TensorPlan, Uncovered
from zpartition.tensor.styles import Column, NormShard, Replicated, Row, Style, Vocabulary

__all__ = ["read_injection_policy", "read_layer_specs", "read_tp_plan", "tp_model_init"]

_STYLES: dict[str, Style] = {
    "colwise": Column(),
    "colwise_rep": Column(gathers=True),
    "colwise_gather_output": Column(gathers=True),
    "rowwise": Row(),
    "rowwise_rep": Row(takes_part=True),
    "rowwise_split_input": Row(takes_part=True),
    "embedding_rowwise": Vocabulary(),
    "embedding_colwise": Vocabulary(),  # the results do not depend on how an embedding is split
    "replicate": Replicated(),
    "replicated_with_grad_allreduce": NormShard(),
}

_SPEC_KEYS = {
    *("patterns", "partition_type", "shape", "partition_dim", "model_types", "gather_output", "grad_allreduce")
}


def tp_model_init(
    model: nn.Module,
    tp_size: int,
    dtype: torch.dtype | None = None,
    config: TensorPlan | Mapping[str, Any] | None = None,
    *,
    inputs: tuple[Any, ...] | Mapping[str, Any] = (),
) -> nn.Module:
    """Split `model` in place over runs of `tp_size` consecutive ranks of the world, and return it.

    config: a plan, or DeepSpeed's `partition_config`.  Default: the model's own `tp_plan` if it has one (Hugging
        Face); else a plan is inferred and verified with `inputs`, positional or by name (Hugging Face models provide
        some).
    dtype: converts the weights to this dtype.
    Data-parallel ranks are those at the same place in all runs: `zcomm.strided_group(tp_size)`.

    Raises:
        ValueError: `tp_size` does not divide the number of ranks, or the plan does not fit the model.
    """
    group = zcomm.consecutive_group(tp_size)
    parallelize(model, _select_plan(model, config, inputs, group), group)
    return model if dtype is None else model.to(dtype)


def read_tp_plan(plan: Mapping[str, str], model: nn.Module) -> TensorPlan:
    """Read a Hugging Face plan, such as `model.tp_plan`: module pattern -> style.

    Layers that it does not name stay whole, and so do expert stacks: `zpartition.experts.distribute` shards those.

    Raises:
        ValueError: a style of a matching pattern is unknown, or no pattern matches a module of `model`.
    """
    modules = {name: module for name, module in model.named_modules() if name}
    names = [name for name, module in modules.items() if not (is_hf_experts(module) or is_sharded_hf_experts(module))]
    rules = []
    for pattern, style in plan.items():
        rule = Rule(pattern, _STYLES.get(style, Replicated()))
        matched = [name for name in names if rule.matches(name)]
        if matched and style not in _STYLES:
            raise ValueError(
                f"tp_plan: style {style!r} of {pattern!r} is not known; allowed: {', '.join(sorted(_STYLES))}. Write "
                "a TensorPlan, or use infer_plan."
            )
        if matched and isinstance(modules[matched[0]], nn.Embedding) and isinstance(rule.style, Row | Column):
            rule = Rule(pattern, Vocabulary())
        rules += [rule] if matched else []
    if not rules:
        raise ValueError(
            f"tp_plan: none of its {len(plan)} patterns ({', '.join(list(plan)[:3])}) fits a module of this model, "
            f"which are called {', '.join(names[:5])}. Patterns are full names, with * for numbers."
        )
    return TensorPlan(rules, uncovered=Uncovered.KEEP)


def read_layer_specs(config: Mapping[str, Any], model: nn.Module, *, is_part: bool = False) -> TensorPlan:
    """Read DeepSpeed's `tensor_parallel.partition_config`; patterns are regular expressions over weight names.

    Layers that no spec names stay whole, unless `strict_mode` is true: then `resolve` raises.
    is_part: `model` is a pipeline stage; other stages may have the layers of a pattern that matches nothing.

    Raises:
        ValueError: a spec has an unknown key, type or shape, or matches no module.
    """
    kind = getattr(getattr(model, "config", None), "model_type", None)
    rules: list[Rule] = []
    for index, spec in enumerate(config.get("layer_specs") or ()):
        where = f"partition_config.layer_specs[{index}]"
        if unknown := sorted(set(spec) - _SPEC_KEYS):
            raise ValueError(f"{where}: unknown {', '.join(unknown)}; allowed: {', '.join(sorted(_SPEC_KEYS))}.")
        if spec.get("model_types") and kind not in spec["model_types"]:
            continue
        rules += [
            rule
            for pattern in spec.get("patterns", ())
            for rule in _make_rules(where, f"re:{pattern}", spec, model, is_part=is_part)
        ]
    return TensorPlan(rules, uncovered=Uncovered.REFUSE if config.get("strict_mode") else Uncovered.KEEP)


def read_injection_policy(
    policy: Mapping[type[nn.Module], Sequence[str]], model: nn.Module, seen: TensorPlan | None = None
) -> TensorPlan:
    """Read DeepSpeed's inference policy: {class of blocks: names of the layers in them whose outputs are summed}.

    In such blocks those linear layers become rows and all others columns; layers outside stay whole.  seen: an
    inferred plan (`infer_plan`), which knows the structure of fused columns; a policy does not.

    Raises:
        ValueError: no block of a class has a linear layer of a name.
    """
    rules = []
    for kind, names in policy.items():
        layers = _linear_layers(model, kind)
        rows = {path for path in layers if any(f".{path}".endswith(f".{name}") for name in names)}
        for name in names:
            if not any(f".{path}".endswith(f".{name}") for path in rows):
                raise ValueError(
                    f"injection_policy: no linear layer in a {kind.__name__} is called {name!r}; there are "
                    f"{', '.join(dict.fromkeys(path.rpartition('.')[2] for path in layers)) or 'none'}."
                )
        for path in layers:
            style: Style = Row() if path in rows else Column()
            found = None if seen is None else seen.style_of(path)
            rules.append(Rule(path, found if found is not None and type(found) is type(style) else style))
    return TensorPlan(rules, uncovered=Uncovered.KEEP)


def _select_plan(
    model: nn.Module,
    config: TensorPlan | Mapping[str, Any] | None,
    inputs: tuple[Any, ...] | Mapping[str, Any],
    group: ProcessGroup | None,
) -> TensorPlan:
    if isinstance(config, TensorPlan):
        return config
    if config and config.get("layer_specs"):
        return read_layer_specs(config, model)
    own = getattr(model, "tp_plan", None)
    if own and any("row" in style and "embedding" not in style for style in own.values()):  # not of the head alone
        return read_tp_plan(own, model)
    args, kwargs = ((), inputs) if isinstance(inputs, Mapping) else (inputs, {})
    return infer_verified_plan(model, group, *args, kwargs=kwargs)


def _linear_layers(model: nn.Module, kind: type[nn.Module]) -> list[str]:
    """Return the paths of linear layers in blocks of a class."""
    return [
        path
        for prefix, block in model.named_modules()
        if isinstance(block, kind)
        for path, child in block.named_modules(prefix=prefix)
        if linear_kind(child) is not None
    ]


def _make_rules(where: str, pattern: str, spec: Mapping[str, Any], model: nn.Module, *, is_part: bool) -> list[Rule]:
    """Make one rule for each module, because blocks depend on its size."""
    found = [
        (name, module) for name, module in model.named_modules() if name and Rule(pattern, Replicated()).matches(name)
    ]
    if not found and not is_part:
        raise ValueError(
            f"{where}: pattern {pattern[3:]!r} fits no weight of the model, e.g. {_example_weight(model)!r}."
        )
    return [Rule(name, _read_style(where, spec, name, module)) for name, module in found]


def _read_style(where: str, spec: Mapping[str, Any], name: str, module: nn.Module) -> Style:
    kind = spec.get("partition_type", "column")
    if kind not in ("row", "column", "skip"):
        raise ValueError(f"{where}: partition_type {kind!r}; allowed: row, column, skip.")
    if kind == "skip" or linear_kind(module) is None:
        return Vocabulary() if kind != "skip" and isinstance(module, nn.Embedding) else Replicated()
    if kind == "row":
        return Row()
    if spec.get("gather_output"):
        return Column(gathers=True)
    return Column(blocks=_read_blocks(where, spec, name, module))


def _read_blocks(where: str, spec: Mapping[str, Any], name: str, module: nn.Module) -> tuple[int, ...]:
    """Read `shape`: [n, -1] is n equal blocks of rows, [[a, b, c], -1] blocks of these sizes."""
    shape: Sequence[Any] = spec.get("shape") or (1, -1)
    outputs = _num_outputs(module)
    if len(shape) != 2 or shape[1] != -1 or spec.get("partition_dim", 0) not in (0, None):
        raise ValueError(
            f"{where}: shape {list(shape)} with partition_dim {spec.get('partition_dim', 0)} is not known; allowed: "
            "[n, -1] for n equal blocks of rows and [[a, b, ...], -1] for blocks of such sizes, with partition_dim 0."
        )
    if isinstance(shape[0], Sequence):
        return tuple(shape[0])
    if outputs % shape[0]:
        raise ValueError(f"{where}: the {outputs} rows of {name} cannot be split into {shape[0]} equal blocks.")
    return (outputs // shape[0],) * shape[0] if shape[0] > 1 else ()


def _num_outputs(module: nn.Module) -> int:
    kind = linear_kind(module)
    assert kind is not None
    return kind.shape(module)[0]


def _example_weight(model: nn.Module) -> str:
    return next((f"{name}.weight" for name, module in model.named_modules() if linear_kind(module) is not None), "")
