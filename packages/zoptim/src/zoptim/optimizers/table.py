"""The table of optimizers.

An optimizer is its class (`optimizers/<name>.py`), its pure rule (`rules/`), its kernel text (`csrc/rules/<name>.h`,
if it has one) and a row here.  `make_optimizer` and the public names of `zoptim` follow from the rows.  Modules are
imported on first use: most programs use one optimizer.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import attrs

if TYPE_CHECKING:  # the public names of the rows, for type checkers
    import torch

    from zoptim.optimizers.adafactor import Adafactor as Adafactor
    from zoptim.optimizers.adagrad import Adagrad as Adagrad
    from zoptim.optimizers.adam import Adam as Adam
    from zoptim.optimizers.adam import AdamW as AdamW
    from zoptim.optimizers.lamb import LAMB as LAMB
    from zoptim.optimizers.lion import Lion as Lion
    from zoptim.optimizers.muon import Muon as Muon
    from zoptim.optimizers.onebit_adam import OneBitAdam as OneBitAdam
    from zoptim.optimizers.onebit_lamb import OneBitLamb as OneBitLamb
    from zoptim.optimizers.sgd import SGD as SGD
    from zoptim.optimizers.zero_one_adam import ZeroOneAdam as ZeroOneAdam
    from zoptim.rules.adafactor import AdafactorMoments as AdafactorMoments
    from zoptim.rules.adafactor import adafactor_rule as adafactor_rule
    from zoptim.rules.elementwise import AdamMoments as AdamMoments
    from zoptim.rules.elementwise import adagrad_rule as adagrad_rule
    from zoptim.rules.elementwise import adam_rule as adam_rule
    from zoptim.rules.elementwise import adamw_rule as adamw_rule
    from zoptim.rules.elementwise import lamb_rule as lamb_rule
    from zoptim.rules.elementwise import lion_rule as lion_rule
    from zoptim.rules.elementwise import sgd_rule as sgd_rule
    from zoptim.rules.muon import muon_rule as muon_rule
    from zoptim.rules.muon import orthogonalize as orthogonalize
    from zoptim.rules.onebit import onebit_adam_rule as onebit_adam_rule
    from zoptim.rules.onebit_lamb import OneBitLambMoments as OneBitLambMoments
    from zoptim.rules.onebit_lamb import OneBitLambPolicy as OneBitLambPolicy
    from zoptim.rules.onebit_lamb import onebit_lamb_rule as onebit_lamb_rule
    from zoptim.rules.zero_one import ZeroOneClock as ZeroOneClock
    from zoptim.rules.zero_one import ZeroOneMoments as ZeroOneMoments
    from zoptim.rules.zero_one import ZeroOnePolicy as ZeroOnePolicy
    from zoptim.rules.zero_one import zero_one_adam_rule as zero_one_adam_rule


@attrs.frozen(kw_only=True)
class OptimizerRow:
    """One optimizer."""

    name: str  # of the class; a config may spell it in any case
    module: str  # below zoptim.optimizers
    rules: tuple[str, ...]  # public names below zoptim.rules: the pure rule and its moments
    fp32_states: bool = False  # a config may have DeepSpeed's fp32_optimizer_states
    defaults: Mapping[str, Any] = attrs.field(factory=dict)  # DeepSpeed's, if they differ from the class's

    def load(self) -> type[torch.optim.Optimizer]:
        """Import and return the class."""
        cls: type[torch.optim.Optimizer] = getattr(importlib.import_module(self.path), self.name)
        return cls

    @property
    def path(self) -> str:
        """The module of the class."""
        return f"zoptim.optimizers.{self.module}"


ROWS = (
    OptimizerRow(
        name="Adam", module="adam", rules=("elementwise.adam_rule", "elementwise.AdamMoments"), fp32_states=True
    ),
    OptimizerRow(name="AdamW", module="adam", rules=("elementwise.adamw_rule",), fp32_states=True),
    OptimizerRow(name="SGD", module="sgd", rules=("elementwise.sgd_rule",)),
    OptimizerRow(name="Adagrad", module="adagrad", rules=("elementwise.adagrad_rule",), fp32_states=True),
    OptimizerRow(name="LAMB", module="lamb", rules=("elementwise.lamb_rule",)),
    OptimizerRow(
        name="Lion",
        module="lion",
        rules=("elementwise.lion_rule",),
        fp32_states=True,
        defaults={"lr": 1e-3, "betas": (0.9, 0.999)},
    ),
    OptimizerRow(name="Muon", module="muon", rules=("muon.muon_rule", "muon.orthogonalize")),
    OptimizerRow(
        name="Adafactor", module="adafactor", rules=("adafactor.adafactor_rule", "adafactor.AdafactorMoments")
    ),
    OptimizerRow(name="OneBitAdam", module="onebit_adam", rules=("onebit.onebit_adam_rule",)),
    OptimizerRow(
        name="ZeroOneAdam",
        module="zero_one_adam",
        rules=(
            "zero_one.zero_one_adam_rule",
            *(f"zero_one.ZeroOne{part}" for part in ("Clock", "Moments", "Policy")),
        ),
    ),
    OptimizerRow(
        name="OneBitLamb",
        module="onebit_lamb",
        rules=("onebit_lamb.onebit_lamb_rule", "onebit_lamb.OneBitLambMoments", "onebit_lamb.OneBitLambPolicy"),
    ),
)

# Public name -> its module.
MODULE_BY_NAME = {row.name: row.path for row in ROWS}
MODULE_BY_NAME |= {
    rule.rpartition(".")[2]: f"zoptim.rules.{rule.rpartition('.')[0]}" for row in ROWS for rule in row.rules
}
