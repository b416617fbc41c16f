"""Rules of loss scaling as frozen values, and the update of the dynamic scale as a pure function.

A rule comes from the config and never changes; its state lives in the scalers of `zprecision.scaling`.
"""

from __future__ import annotations

import attrs
import torch
from torch import Tensor

from zprecision import checks


@attrs.frozen
class Unscaled:
    """No scaling, for float32 and bf16, whose range covers that of gradients."""


@attrs.frozen
class StaticScaling:
    """A constant factor; a step that overflows is still skipped."""

    factor: float = attrs.field(validator=checks.positive)


@attrs.frozen(kw_only=True)
class DynamicScaling:
    """Dynamic loss scaling (Micikevicius et al. 2018, section 3.2, with hysteresis and a floor).

    Raises ValueError if `initial` is below `floor`, or a field is out of its range.
    """

    # the first factor
    initial: float = attrs.field(default=2.0**16, validator=checks.positive)
    # multiplies the factor on growth and divides it on back-off
    growth: float = attrs.field(default=2.0, validator=checks.above_one)
    # clean steps between two growths; the first after the start or after an overflow takes one more
    window: int = attrs.field(default=1000, validator=checks.count)
    # overflows until back-off: a counter starts here, and at 1 the factor moves instead
    hysteresis: int = attrs.field(default=2, validator=checks.count)
    # True: every clean step refills the counter, so only consecutive overflows use it up; False: only growth does
    consecutive_hysteresis: bool = attrs.field(default=False, validator=checks.flag)
    # the factor never backs off below this
    floor: float = attrs.field(default=1.0, validator=checks.positive)

    def __attrs_post_init__(self) -> None:
        if self.initial < self.floor:
            raise ValueError(
                f"DynamicScaling(initial={self.initial!r}, floor={self.floor!r}): initial is below floor;"
                " raise initial or lower floor"
            )


Scaling = Unscaled | StaticScaling | DynamicScaling


def advance(
    rule: DynamicScaling, factor: Tensor, clean_steps: Tensor, hysteresis_left: Tensor, overflow: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Update the dynamic scale; return the new (factor, clean_steps, hysteresis_left).

    factor () float32, clean_steps and hysteresis_left () int32, overflow () bool, on one device; results likewise.

    An overflow restarts the window. It lowers the counter while that is above 1, and the factor from then on;
    back-off does not refill the counter. A clean step that passes the window raises the factor and refills the
    counter. clean_steps continues from 1, not 0, so a window of n takes n + 1 clean steps from the start or an
    overflow and n from a growth. The only upper limit is float32's: the factor never grows to infinity, which would
    be permanent.
    """
    clean_steps = torch.where(overflow, 0, clean_steps + 1)
    grows = clean_steps > rule.window
    backs_off = overflow & (hysteresis_left <= 1)
    refills = ~overflow if rule.consecutive_hysteresis else grows

    raised = factor * rule.growth
    raised = torch.where(torch.isfinite(raised), raised, factor)
    lowered = (factor * (1.0 / rule.growth)).clamp(min=rule.floor)
    factor = torch.where(backs_off, lowered, torch.where(grows, raised, factor))

    spent = torch.where(overflow, hysteresis_left - 1, hysteresis_left).clamp(min=1)
    return factor, torch.where(grows, 1, clean_steps), torch.where(refills, rule.hysteresis, spent)
