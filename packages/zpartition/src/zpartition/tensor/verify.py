"""Verify a plan: run a small input through the model and through a split copy of it, and compare.

Outputs and all gradients are compared.  A plan that mixes columns of different ranks gives errors about as large as
the values, so the tolerances only have to exceed rounding.

Without a small input a plan is verified when the first batch comes (`verify_on_first_call`), block by block.  A block
is the nearest module around column layers and the row layer that sums them: outside of blocks all activations are
whole, so a model whose blocks equal the whole ones, in outputs and in the gradients of their inputs and parameters,
is equal to the whole model.  A block's structure is copied, without memory, before the split; at its first call its
weights are gathered over the tensor ranks (and at ZeRO stage 3 over the ranks that shard them), so at most two whole
blocks and their gradients exist at a time, of a model of any size.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.nn import Parameter
from torch.utils.hooks import RemovableHandle

import zcomm
from zpartition._compat import tree_flatten, tree_map_only
from zpartition.layout.model_parallel import ALONE, addresses_of
from zpartition.tensor.layer_split import LayerSplit
from zpartition.tensor.parallel_region import ParallelRegion
from zpartition.tensor.parallelize import apply_splits, enclosing_block, parallelize
from zpartition.tensor.plan import Rule, TensorPlan, Uncovered, resolve
from zpartition.tensor.styles import Column, NormShard, Row, Vocabulary
from zpartition.tensors.whole import FullTensors, part_of

__all__ = ["PendingVerification", "find_problem", "verify", "verify_on_first_call"]

_TOLERANCES = {torch.float64: 1e-9, torch.float32: 1e-3, torch.float16: 0.05, torch.bfloat16: 0.1}  # of the largest
_GRADIENT = "gradient of "


def verify(
    model: nn.Module,
    plan: TensorPlan,
    group: ProcessGroup | None = None,
    *args: Any,
    kwargs: Mapping[str, Any] | None = None,
) -> None:
    """Run `model(*args, **kwargs)` whole and split over the ranks of `group`, and compare.

    All ranks call it with the same whole model and input.  The model is not changed; two copies of it (and gradients)
    are held meanwhile.  Modules are in evaluation mode, so no random numbers are drawn.

    Raises:
        ValueError: on every rank, with the first difference in the order of the model and its size, or the error of
            the split copy.
    """
    if problem := find_problem(model, plan, group, args, kwargs or {}):
        raise ValueError(
            f"the tensor-parallel plan does not fit {type(model).__name__}: {problem}. An operation between a column "
            "and a row layer mixes columns of different ranks, or a module keeps its head count under an unknown "
            "name. Keep those layers whole, with Replicated() or without rules, or make the activations between them "
            "whole: Column(gathers=True) and Row(takes_part=True)."
        )


def find_problem(
    model: nn.Module, plan: TensorPlan, group: ProcessGroup | None, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> str:
    """Return the problem of a plan, the same on all ranks; "" if there is none.  Raises as `resolve` does."""
    problem = _first_problem(_dry_run(model, plan, group, args, kwargs), group)
    if problem:
        return problem
    parts = copy.deepcopy(model).eval()
    parallelize(parts, plan, group)
    whole = copy.deepcopy(model).eval()
    for tensor in [*whole.parameters(), *whole.buffers()]:
        tensor.data = tensor.data.contiguous()
        zcomm.broadcast(tensor.data, group, source=0, label="verify")
    return _first_problem(_find_difference(parts, _run(whole, args, kwargs), _run(parts, args, kwargs)), group)


def _dry_run(
    model: nn.Module, plan: TensorPlan, group: ProcessGroup | None, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> str:
    """Run this rank's part without communication: a failure on one rank would leave others waiting.

    Layers whose outputs or inputs are joined are whole here.
    """
    mine = copy.deepcopy(model).eval()
    splits = resolve(plan, mine, zcomm.group_size(group), zcomm.group_rank(group))
    local = [split for split in splits if not (isinstance(split.style, Column) and split.style.gathers)]
    local = [split for split in local if not (isinstance(split.style, Row) and split.style.takes_part)]
    apply_splits(mine, [split for split in local if not isinstance(split.style, Vocabulary)], ParallelRegion(ALONE))
    try:
        with torch.no_grad():
            mine(*args, **kwargs)
    except (RuntimeError, IndexError, TypeError, ValueError) as error:
        return f"a rank's part fails with {type(error).__name__}: {error}"
    return ""


def _find_difference(parts: nn.Module, expected: Mapping[str, Tensor], got: Mapping[str, Tensor]) -> str:
    """Return the first value that differs; "" if there is none."""
    addresses = addresses_of(parts)
    scale = max((float(v.double().abs().max()) for n, v in expected.items() if n.startswith(_GRADIENT)), default=0.0)
    for name, value in expected.items():
        at = addresses.get(name.removeprefix(_GRADIENT))
        reference = (value if at is None else part_of(value, at)).double()
        largest = float(value.double().abs().max())
        magnitude = max(largest, scale / 1000 if name.startswith(_GRADIENT) else 0.0)
        tolerance = max(_TOLERANCES.get(value.dtype, 1e-3), _autocast_tolerance(value.device)) * magnitude
        is_comparable = got[name].shape == reference.shape
        error = float((got[name].double() - reference).abs().max()) if is_comparable else math.inf
        if not error <= tolerance:
            return f"{name} differs by {error:.3g}, its largest value is {largest:.3g}"
    return ""


def _autocast_tolerance(device: torch.device) -> float:
    is_on = torch.is_autocast_enabled(device.type)
    return _TOLERANCES.get(torch.get_autocast_dtype(device.type), 0.0) if is_on else 0.0


def _first_problem(problem: str, group: ProcessGroup | None) -> str:
    """Return the problem of the first rank that has one."""
    return next((each for each in zcomm.all_gather_object(problem, group) if each), "")


def _run(model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return outputs by number, then gradients of the sum of their squares, last layers first."""
    with torch.enable_grad():
        outputs = [leaf for leaf in tree_flatten(model(*args, **kwargs))[0] if _is_number(leaf)]
        found = {f"output {index}": leaf.detach() for index, leaf in enumerate(outputs)}
        squares = [leaf.float().square().mean() for leaf in outputs if leaf.requires_grad]
        if squares:
            torch.stack(squares).sum().backward()  # type: ignore[no-untyped-call]
    return {**found, **dict(_gradients(model))}


def _gradients(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    for name, param in reversed(list(model.named_parameters())):
        if param.grad is not None:
            yield f"{_GRADIENT}{name}", param.grad


def _is_number(leaf: object) -> bool:
    return isinstance(leaf, Tensor) and leaf.is_floating_point() and leaf.numel() > 0


# -- without a small input -----------------------------------------------------------------------


def verify_on_first_call(model: nn.Module, plan: TensorPlan, group: ProcessGroup | None) -> PendingVerification:
    """Let every block that `plan` splits verify itself when it is called first; call it before `parallelize`.

    A block whose activations between layers are whole needs no verification.  The first call of a block raises
    ValueError, on all ranks of `group`, if its part of the plan does not fit.
    """
    splits = resolve(plan, model, zcomm.group_size(group), zcomm.group_rank(group))
    rows = [split.module for split in splits if isinstance(split.style, Row)]
    columns = [split for split in splits if isinstance(split.style, Column) and not split.style.gathers]
    paths = {enclosing_block(split.module, rows) for split in columns}
    outermost = [path for path in paths if not any(_is_inside(path, other) for other in paths - {path})]
    return PendingVerification(
        [_Block.hook(path, model.get_submodule(path), splits, plan, group) for path in sorted(outermost)]
    )


@final
class PendingVerification:
    """The blocks that were not called yet."""

    def __init__(self, blocks: Sequence[_Block]) -> None:
        self.blocks = blocks

    def close(self) -> None:
        """Remove the hooks of blocks that were never called."""
        for block in self.blocks:
            block.handle.remove()


class _Block:
    """A split block, and its structure before the split."""

    handle: RemovableHandle

    def __init__(self, path: str, structure: nn.Module, plan: TensorPlan, group: ProcessGroup | None) -> None:
        self.path, self.structure, self.plan, self.group = path, structure, plan, group
        self.was_called = False

    @classmethod
    def hook(
        cls, path: str, module: nn.Module, splits: Sequence[LayerSplit], plan: TensorPlan, group: ProcessGroup | None
    ) -> _Block:
        """Copy the structure of a block, and hook its first call."""
        kept = (Column, Row, NormShard, Vocabulary)
        rules = [
            Rule(split.module[len(path) + 1 if path else 0 :], split.style)
            for split in splits
            if isinstance(split.style, kept) and _is_inside(split.module, path)
        ]
        rules = [Rule(f"block.{rule.pattern}", rule.style) for rule in rules]
        memo: dict[int, Any] = {id(each): torch.empty_like(each, device="meta") for each in module.buffers()}
        for param in module.parameters():
            memo[id(param)] = Parameter(torch.empty_like(param, device="meta"), param.requires_grad)
        block = cls(path, copy.deepcopy(module, memo), TensorPlan(rules, Uncovered.KEEP, plan.grain), group)
        hook: Any = torch.compiler.disable(block.verify)  # type: ignore[no-untyped-call]
        block.handle = module.register_forward_pre_hook(hook, with_kwargs=True)
        return block

    def verify(self, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Compare the whole block and its parts on the arguments of the first call.  Raises ValueError.

        A call without gradients (an evaluation) leaves those to be verified later.
        """
        if self.was_called and not torch.is_grad_enabled():
            return
        with torch.inference_mode(False), torch.no_grad():
            whole = _CalledBlock(self._whole(module), args, kwargs)
        if problem := find_problem(whole, self.plan, self.group, (), {}):  # raised at each call, not at the first
            raise ValueError(_unfit(self.path, self.plan, problem.replace("block.", f"{self.path}.".lstrip("."))))
        self.was_called = True
        if torch.is_grad_enabled():
            self.handle.remove()
            self.structure = nn.Identity()

    def _whole(self, module: nn.Module) -> nn.Module:
        """Return the block with its whole weights; at stage 3 reading them in a running module gathers them."""
        full_tensors, found = FullTensors.of(module), dict[int, Parameter]()
        for param in module.parameters():
            value = full_tensors(param).clone()
            found[id(param)] = Parameter(value, param.requires_grad)
        whole = copy.deepcopy(self.structure)
        for live, child in zip(module.modules(), whole.modules()):
            for name, tensor in list(child._parameters.items()):
                if tensor is not None:
                    child._parameters[name] = found[id(live._parameters[name])]
            child._buffers.update({name: _detached(buffer) for name, buffer in live._buffers.items()})
        return whole


class _CalledBlock(nn.Module):
    """A block and the arguments of its call, whose gradients are compared, too."""

    def __init__(self, block: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        super().__init__()
        self.block, self.inputs = block, nn.ParameterList()
        given = (args, dict(kwargs))
        given = tree_map_only(Tensor, self._keep, given)
        memo: dict[int, Any] = {}
        _detach_inside(given, memo)
        self.given = copy.deepcopy(given, memo)

    def _keep(self, leaf: Tensor) -> Any:
        """Replace a tensor with a gradient by its number among the inputs; others are constants."""
        if not leaf.requires_grad:
            return leaf
        self.inputs.append(Parameter(leaf.detach().clone()))
        return _Number(len(self.inputs) - 1)

    def forward(self) -> Any:
        args, kwargs = tree_map_only(_Number, lambda leaf: self.inputs[int(leaf)] * 1, self.given)
        return self.block(*args, **kwargs)


class _Number(int):
    """Number of an input in the place of its tensor."""


def _detached(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.detach().clone()


def _detach_inside(value: Any, memo: dict[int, Any]) -> None:
    """Put copies of all tensors inside `value` into a memo of `deepcopy`, which rejects computed tensors."""
    if id(value) in memo or isinstance(value, type | nn.Module):
        return
    if isinstance(value, Tensor):
        memo[id(value)] = _detached(value)
        return
    memo.setdefault(id(_detach_inside), []).append(value)  # keeps it alive, so that its id stays its own
    visited = memo.setdefault(id(_CalledBlock), set())
    if id(value) in visited:
        return
    visited.add(id(value))
    parts = value.values() if isinstance(value, Mapping) else value if isinstance(value, list | tuple | set) else ()
    for part in (*parts, *getattr(value, "__dict__", {}).values()):
        _detach_inside(part, memo)


def _is_inside(path: str, outer: str) -> bool:
    return not outer or path == outer or path.startswith(f"{outer}.")


def _unfit(path: str, plan: TensorPlan, problem: str) -> str:
    """Return the message for a block that is not equal to the whole one, with the lines that keep it whole."""
    names = [rule.pattern.removeprefix("block.") for rule in plan.rules if isinstance(rule.style, Column | Row)]
    layers = [f"{path}.{name}" if path else name for name in names]
    pattern = "|".join(dict.fromkeys(name.replace(".", "\\\\.") for name in names))
    spec = f'{{"patterns": [".*({pattern})\\\\.weight"], "partition_type": "skip"}}'
    return (
        f"the split of {path or 'the model'} by the names of its layers ({', '.join(layers)}) is wrong: {problem}. "
        "The block computes something else between these layers than a usual attention or MLP. Keep them whole with "
        f'"tensor_parallel": {{"partition_config": {{"layer_specs": [{spec}]}}}}, or name their split there; or pass '
        "training_data= to initialize() (or give the model dummy_inputs), so that the plan is inferred."
    )
