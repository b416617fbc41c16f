"""Recognition of a mixture of experts in an observed call.

The module is matched as all others are: by what it computes.  Experts are stacked parameters, or a list of modules of
which each is an MLP; the router is a linear call on the same input that has an output for each expert.  What remains
(number of chosen experts, renormalized weights, a shared expert, its gate) is tried until the output is that of the
module.

Of stacks over expert-parallel ranks a copy with the experts of all is matched, one layer at a time, so that no rank's
search depends on messages; the result has this rank's experts, and the ranks that hold the others.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Sequence

import attrs
import torch
from torch import Tensor, nn

import zpartition
from zengine.inference.experts.gather import whole_experts
from zengine.inference.experts.separate import activation_of, stack_of
from zengine.inference.matching import Constants, closest, equal, match_mlp, projection
from zengine.inference.observe import Call, observe
from zengine.inference.structure import MLP, Mixture, Over, Projection, Ranks
from zpartition.experts import own_experts_of

__all__ = ["match_mixture"]

_MOST_CHOSEN = 16  # experts of a token that are tried, if no attribute says how many


def match_mixture(unit: Call, inside: Sequence[Call], config: object) -> Mixture | None:
    """Return the mixture that the call `unit` computes; None if it is none.

    inside: the calls within it.  config: of the model.
    """
    x = unit.input
    owners = [unit.module, *(call.module for call in inside)]
    constants = Constants.of(owners, config)
    reading = [
        (call, made)
        for call in inside
        if call.inputs and equal(call.input, x) and (made := projection(call)) is not None
    ]
    found = tuple(
        _Candidate(path, experts, [made for call, made in reading if not call.is_inside(path)], constants)
        for path, experts in _experts(unit)
    )
    shared = {each.path: _shared_experts(unit, each.path, inside) for each in found}
    forms = (
        (form, functools.partial(_computed, form, x))
        for is_likely in (True, False)
        for each in found
        for form in _forms(each, shared[each.path], is_likely=is_likely)
    )
    found_form = closest(unit.output, forms)
    return None if found_form is None else _own_part(found_form, unit)


def _own_part(mixture: Mixture, unit: Call) -> Mixture:
    """Return the mixture over what this rank holds, if its experts are over several."""
    for name, module in unit.module.named_modules():
        path, stack, group = f"{unit.name}.{name}", stack_of(module), zpartition.expert_ranks_of(module)
        if stack is None or group.size == 1 or not mixture.experts[0].up.name.startswith(f"{path}."):
            continue
        numbers = own_experts_of(module)
        own = tuple(stack.mlp(module, path, number, mixture.experts[number].act) for number in numbers)
        return attrs.evolve(mixture, experts=own, first=numbers.start, ranks=Ranks(Over.COLUMNS, group))
    return mixture


def _computed(form: Mixture, x: Tensor) -> Tensor:
    return form(x)


@attrs.frozen(eq=False)
class _Candidate:
    """Experts, and what may belong to them."""

    path: str  # name of the module that has them
    experts: tuple[MLP, ...]
    reading: list[Projection]  # of the mixture's input, outside of them
    constants: Constants


def _forms(candidate: _Candidate, shared: Sequence[MLP], *, is_likely: bool) -> Iterator[Mixture]:
    """Yield mixtures of these experts: with a number of chosen ones that an attribute says, or with all others."""
    experts, constants = candidate.experts, candidate.constants
    routers = [each for each in candidate.reading if each.weight.shape[0] == len(experts)]
    gates = [each for each in candidate.reading if each.weight.shape[0] == 1 and len(experts) != 1]
    commons = [*((mlp, gate) for mlp in shared for gate in (*gates, None)), (None, None)]
    said = [int(each) for each in constants.named("top_k", "topk", "experts_per_tok", "num_selected")]
    tried = said if is_likely else [each for each in range(1, _MOST_CHOSEN + 1) if each not in said]
    counts = [each for each in dict.fromkeys(tried) if 1 <= each <= len(experts)]
    factors = dict.fromkeys([1.0, *(each for each in constants.named("routed_scaling", "router_scale") if each > 0)])
    for router, (common, gate), top_k, is_renormalized, factor in itertools.product(
        routers, commons, counts, (True, False), factors
    ):
        yield Mixture(
            router=router,
            experts=experts,
            top_k=top_k,
            is_renormalized=is_renormalized,
            factor=factor,
            shared=common,
            shared_gate=gate,
        )


def _shared_experts(unit: Call, path: str, inside: Sequence[Call]) -> list[MLP]:
    """Return the MLPs beside the experts that read what the mixture reads."""
    found = []
    for call in inside:
        if call.is_inside(path) or not equal(call.input, unit.input) or projection(call) is not None:
            continue
        within = [each for each in inside if each.is_inside(call.name) and each.name != call.name]
        if (made := match_mlp(within, unit.input)) is not None:
            found.append(made)
    return found


def _experts(unit: Call) -> Iterator[tuple[str, tuple[MLP, ...]]]:
    """Yield (name, experts) of the stacks and lists within a call."""
    for name, module in unit.module.named_modules():
        path = f"{unit.name}.{name}"
        stack = stack_of(module)
        if stack is not None:
            module, act = whole_experts(module), activation_of(module, stack)
            if act is not None:
                yield path, tuple(stack.mlp(module, path, each, act) for each in own_experts_of(module))
        elif isinstance(module, nn.ModuleList) and len(module) > 1:
            made = tuple(_listed(expert, f"{path}.{index}", unit.input) for index, expert in enumerate(module))
            known = tuple(each for each in made if each is not None)
            if len(known) == len(made):
                yield path, known


def _listed(expert: nn.Module, path: str, x: Tensor) -> MLP | None:
    """Return the MLP that a module is; an expert that no token chose is called here."""
    flat = x.reshape(-1, x.shape[-1])
    run: Callable[[], Tensor] = functools.partial(expert, flat)
    try:
        calls, _ = observe(expert, run)
    except (TypeError, ValueError, RuntimeError, StopIteration):  # it takes other arguments
        return None
    with torch.no_grad():
        return match_mlp([attrs.evolve(call, name=f"{path}.{call.name}") for call in calls], flat)
