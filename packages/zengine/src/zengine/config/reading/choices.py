"""Validation of optimizers and schedules: their names and options are passed to zoptim on one number.

This happens before the model exists, so a misspelt `weight_decay` is reported together with the other mistakes of the
file.  zoptim alone defines its names, options and ranges.  Options that it certainly accepts are not
tried: to build even one number imports torch.  Rejected: a copy of its option lists here, which would be wrong after
the first change there.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import attrs

import zoptim
from zengine.config.grammar.errors import NOTHING, Place, Problem
from zengine.config.grammar.scan import Document
from zengine.config.keys.root import Settings
from zengine.config.keys.training import Optimizer, Scheduler

if TYPE_CHECKING:
    import torch

Make = Callable[[str, Mapping[str, Any]], object]

# Options that are valid for an optimizer alone and redundant in the engine.
_ENGINE_DOES: dict[str, str] = {
    "split_master": "the engine keeps float32 masters of low-precision weights, so there is nothing to split. "
    'Remove it; "state_dtype": "bf16" or "8bit" makes the optimizer smaller, bf16.bf16_master_weights_and_grads the '
    "masters",
}


@attrs.frozen(kw_only=True)
class Choices:
    """Result of the trials."""

    problems: tuple[Problem, ...] = ()
    given: Mapping[str, Place] = attrs.field(factory=dict)  # "optimizer.params.lr" -> where


def check_choices(settings: Settings, document: Document) -> Choices:
    """Build the optimizer and the schedule of `settings` on one number and collect the problems.  Pure."""
    optimizer = _Trial("optimizer", settings.optimizer, _make_optimizer, document)
    faults = list(optimizer.problems())
    scheduler = _Trial(
        "scheduler", settings.scheduler, _schedule_maker(Optimizer() if faults else settings.optimizer), document
    )
    return Choices(problems=(*faults, *scheduler.problems()), given={**optimizer.places(), **scheduler.places()})


def accepts_option(name: str, params: Mapping[str, Any], option: str, value: object) -> bool:
    """Return True if the optimizer `name` with `params` also accepts `option` with this value."""
    given = {**params, option: value}
    is_certain = zoptim.certainly_accepts(zoptim.OPTIMIZER_OPTIONS, name, given)
    failure = None if is_certain else _failure(_make_optimizer, name, given)
    return failure is None or _depends_on_groups(failure, params)


def _make_optimizer(name: str, params: Mapping[str, Any]) -> torch.optim.Optimizer:
    import torch

    return zoptim.make_optimizer(name, [torch.nn.Parameter(torch.zeros(1, 1))], params)


def _schedule_maker(optimizer: Optimizer) -> Make:
    """Return a maker of schedules on the optimizer of the config, or on AdamW if the caller passes one."""

    def make(name: str, params: Mapping[str, Any]) -> object:
        named = optimizer if optimizer.type else Optimizer(type="AdamW")
        return zoptim.make_schedule(name, _make_optimizer(named.type, named.params), params)

    return make


@attrs.frozen
class _Trial:
    """One section, validated in three steps: the name, the names of its options, their values."""

    section: str
    chosen: Optimizer | Scheduler
    make: Make
    document: Document

    def problems(self) -> Iterator[Problem]:
        """Yield the problems of the first step that has any."""
        if not self.chosen.type:
            if self.chosen.params:
                yield self.problem("params", f"given without {self.section}.type, the name of what to build")
            return
        if self.is_certain():
            return
        failure = _failure(self.make, self.chosen.type, {})
        if isinstance(failure, zoptim.UnknownNameError):
            yield self.problem("type", _sentence(failure), self.chosen.type)
            return
        options = list(self.option_problems())
        yield from options or self.value_problem()

    def is_certain(self) -> bool:
        """Return True if nothing has to be tried."""
        table = zoptim.OPTIMIZER_OPTIONS if self.section == "optimizer" else zoptim.SCHEDULE_OPTIONS
        is_accepted = zoptim.certainly_accepts(table, self.chosen.type, self.chosen.params)
        return is_accepted and not set(self.chosen.params) & _ENGINE_DOES.keys()

    def option_problems(self) -> Iterator[Problem]:
        """Yield problems of options that do not exist, are redundant, or are still "auto"."""
        for name, value in self.chosen.params.items():
            failure = _failure(self.make, self.chosen.type, {name: value})
            if value == "auto":
                reason = "must be resolved by the integration that wrote it"
                yield self.problem(f"params.{name}", reason, value)
            elif name in _ENGINE_DOES and value and not isinstance(failure, zoptim.UnknownNameError):
                yield self.problem(f"params.{name}", _ENGINE_DOES[name], value)
            elif isinstance(failure, zoptim.UnknownNameError):
                yield self.problem(f"params.{name}", _sentence(failure), value)

    def value_problem(self) -> Iterator[Problem]:
        """Yield the error of building with all options, at the option that it names."""
        params = self.chosen.params
        failure = _failure(self.make, self.chosen.type, params)
        if failure is None or _depends_on_groups(failure, params):
            return
        culprit = _named_in(str(failure), params)
        key, value = (f"params.{culprit}", params[culprit]) if culprit else ("params", NOTHING)
        yield self.problem(key, _sentence(failure), value)

    def problem(self, key: str, reason: str, given: object = NOTHING) -> Problem:
        place = self.document.place((self.section, *key.split(".")))
        return Problem(place=place, key=f"{self.section}.{key}", given=given, reason=reason)

    def places(self) -> dict[str, Place]:
        """Return the places of the options in the source."""
        path = (self.section, "params")
        return {".".join((*path, name)): self.document.place((*path, name)) for name in self.chosen.params}


def _failure(make: Make, name: str, params: Mapping[str, Any]) -> Exception | None:
    """Return the exception that building raises, of any class: the values of the config caused it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the real build warns
        try:
            make(name, params)
        except zoptim.BaseShapesMissingError:  # of muP: names and values are right, and the model is not there yet
            return None
        except Exception as failure:
            return failure
    return None


def _depends_on_groups(failure: Exception, params: Mapping[str, Any]) -> bool:
    """Return True if an option has one value per parameter group, which cannot be checked without the groups."""
    return "parameter groups" in str(failure) and any(isinstance(value, (list, tuple)) for value in params.values())


def _named_in(message: str, params: Mapping[str, Any]) -> str:
    """Return the option that a message names; "" if it names none."""
    return next((name for name in params if re.search(rf"\b{re.escape(name)}\b", message)), "")


def _sentence(failure: Exception) -> str:
    return (str(failure) or type(failure).__name__).rstrip(".")
