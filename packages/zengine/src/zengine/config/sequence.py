"""What does not go with samples whose tokens are shared out: sections that cut or drop tokens of whole sequences.

Each sequence rank would cut its own piece, and what is left would be no sequence.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from zengine.config.data_rules import LTD, SEQLEN, curriculum, random_ltd
from zengine.config.errors import NOWHERE, Problem

if TYPE_CHECKING:
    from zengine.config.load import Config
    from zengine.config.parallel import ParallelPlan

__all__ = ["sequences_are_whole"]


def sequences_are_whole(config: Config, parallel: ParallelPlan) -> list[Problem]:
    """The sections that are on and need whole sequences, where ranks have pieces."""
    size = parallel.degrees.sequence
    if size == 1:
        return []
    asked = {f"{SEQLEN}.enabled": curriculum(config), f"{LTD}.enabled": random_ltd(config)}
    return [
        Problem(
            place=config.given.get(key, NOWHERE),
            key=key,
            given=True,
            reason=f"it takes tokens out of whole sequences, of which each of {size} ranks has a piece "
            f"(sequence_parallel_size)",
            suggestion="Leave the section out, or set sequence_parallel_size to 1.",
        )
        for key, is_on in asked.items()
        if is_on
    ]
