"""Rounds of local steps: replica groups exchange weights instead of gradients (DiLoCo)."""

from zpartition.rounds.estimate import RoundsPlan, plan_rounds
from zpartition.rounds.exchange import OuterExchange, RoundPolicy, Rounds

__all__ = ["OuterExchange", "RoundPolicy", "Rounds", "RoundsPlan", "plan_rounds"]
