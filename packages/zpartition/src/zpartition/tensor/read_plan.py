"""Plans from other libraries: Hugging Face's `tp_plan`, DeepSpeed's `partition_config` and `injection_policy`.

Each is read for a given model.  Unsupported entries are rejected by name; nothing is ignored silently, except
patterns of a `tp_plan` that match no layer of this model, which such plans may contain.

`tp_model_init`, with DeepSpeed's name and arguments, selects a plan and splits the model by it.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed import ProcessGroup

import zcomm
from zpartition.layout.hf_experts import is_hf_experts, is_sharded_hf_experts
from zpartition.layout.units import matches
from zpartition.tensor.infer_plan import infer_verified_plan
from zpartition.tensor.layer_split import linear_kind
from zpartition.tensor.parallelize import parallelize
from zpartition.tensor.plan import Rule, TensorPlan, Uncovered
from zpartition.tensor.styles import Column, NormShard, Replicated, Row, Style, Vocabulary

__all__ = ["find_tp_plan", "read_injection_policy", "read_layer_specs", "read_tp_plan", "tp_model_init"]

log = logging.getLogger("zpartition")

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
    # Before version 5: layers on plain tensors, whose partial sums an enclosing module with "gather" adds.  A Row
    # adds its own, which is the same sum, so the marks on modules around the layers need nothing.
    "local_colwise": Column(),
    "local_rowwise": Row(),
    "local": Replicated(),
    "gather": Replicated(),
    "local_params": Replicated(),
    "moe_identity_expert": Replicated(),  # experts are whole, so nothing is summed
    "sequence_parallel": Replicated(),  # activations between split layers are whole, so norms see all tokens
}
_PACKED = ("packed_colwise", "local_packed_colwise")  # [gate; up] in one weight

# Styles of Transformers that mean nothing here, and why.
_NO_MEANING = {
    "packed_rowwise": "a fused weight cannot be split by inputs",
    "local_packed_rowwise": "a fused weight cannot be split by inputs",
    "mla_kv_a_proj": "a layer cannot be split for one part of its outputs and whole for the other",
    "all_reduce": "a module other than a linear layer cannot return partial sums",
    "local": "a tensor that a module holds beside its layers cannot be split",
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
    bare = _bare_parameters(modules, names)
    rules: list[Rule] = []
    for pattern, style in plan.items():
        short = pattern.removesuffix(".weight").removesuffix(".bias")
        matched = [name for name in names if matches(pattern, name) or matches(short, name)]
        if sharded := [name for name in bare if matches(pattern, name)] if "wise" in style else []:
            raise ValueError(_unreadable("local", f"{pattern!r} (parameter {sharded[0]})", style))
        rules += _read_tp_style(style.lower(), pattern if pattern == short else short, matched, modules)
    if not rules:
        raise ValueError(
            f"tp_plan: none of its {len(plan)} patterns ({', '.join(list(plan)[:3])}) fits a module of this model, "
            f"which are called {', '.join(names[:5])}. Patterns are full names, with * for numbers."
        )
    if "sequence_parallel" in plan.values():
        log.info("tp_plan: sequence_parallel has no effect: activations between split layers are whole")
    return TensorPlan(rules, uncovered=Uncovered.KEEP)


def find_tp_plan(model: nn.Module) -> Mapping[str, str]:
    """Return the plan that a model of Transformers declares, with the full names of `model`; empty without one.

    Read are, for the model and for models inside it (a language model behind a vision tower, say): `tp_plan` or
    `_tp_plan` of the model, and `base_model_tp_plan` of its config, whose names begin at the base model.  The entry
    of the outermost module that names a layer counts, and a model's own before its config's.  A plan that splits no
    pair of layers, but the head alone, is none.
    """
    own = _declared(model)
    if _splits_pairs(own):  # complete: a user's, or Transformers' with those of the config and the modules inside
        return own
    found: dict[str, str] = {}
    for path, module in model.named_modules():
        plans = [(path, _declared(module))]
        base = getattr(getattr(module, "config", None), "base_model_tp_plan", None)
        if isinstance(base, Mapping) and (not path or hasattr(module, "base_model_prefix")):
            plans.append((_join(path, _base_model_path(module, base)), base))
        for prefix, plan in plans:
            found = {**{_join(prefix, pattern): style for pattern, style in plan.items()}, **found}
    return found if _splits_pairs(found) else {}


def _declared(module: nn.Module) -> Mapping[str, str]:
    plans = (getattr(module, name, None) for name in ("tp_plan", "_tp_plan"))
    return next((plan for plan in plans if isinstance(plan, Mapping) and plan), {})


def _splits_pairs(plan: Mapping[str, str]) -> bool:
    return any("row" in style and "embedding" not in style for style in plan.values())


def _base_model_path(module: nn.Module, plan: Mapping[str, str]) -> str:
    """Return the path of the module at which the names of a config's plan begin."""
    names = [name for name, _ in module.named_modules()]
    prefix = getattr(module, "base_model_prefix", "")
    paths = [prefix, *(name for name in names if name.count(".") < 2)] if prefix in names else names
    return next(
        (path for path in paths if any(matches(_join(path, pattern), name) for pattern in plan for name in names)), ""
    )


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path and name else path or name


def _bare_parameters(modules: Mapping[str, nn.Module], names: Iterable[str]) -> list[str]:
    """Return the parameters, but expert stacks', that modules other than linear layers, norms and embeddings hold."""
    return [
        f"{name}.{key}"
        for name in names
        if not isinstance(modules[name], nn.Embedding) and linear_kind(modules[name]) is None
        for key, _ in modules[name].named_parameters(recurse=False)
        if key not in ("weight", "bias")
    ]


def _read_tp_style(
    style: str, pattern: str, matched: Sequence[str], modules: Mapping[str, nn.Module]
) -> Sequence[Rule]:
    """Return the rules of one entry, none if it matches no module.  Raises ValueError for an unreadable style."""
    if not matched:
        return []
    if style in _PACKED and all(linear_kind(modules[name]) is not None for name in matched):
        halves = {name: _num_outputs(modules[name]) // 2 for name in matched}
        return [Rule(name, Column(blocks=(half, half))) for name, half in halves.items()]
    if style not in _STYLES:
        raise ValueError(_unreadable(style, repr(pattern), style))
    found = _STYLES[style]
    if isinstance(modules[matched[0]], nn.Embedding) and isinstance(found, Row | Column):
        found = Vocabulary()
    return [Rule(pattern, found)]


def _unreadable(reason: str, what: str, style: str) -> str:
    known = sorted((*_STYLES, *_PACKED))
    why = f"has no meaning here ({_NO_MEANING[reason]})" if reason in _NO_MEANING else "is not known"
    known_styles = ", ".join(known)
    return (
        f"tp_plan: style {style!r} of {what} {why}; allowed: {known_styles}. Write a TensorPlan, or use infer_plan."
    )


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
    if own := find_tp_plan(model):
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
