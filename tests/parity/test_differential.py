"""Random programs have the weights of plain torch; see differential.py."""

from __future__ import annotations

import pytest
from differential import Program, run_programs

from zcomm.testing import run_ranks

SEEDS = range(40)


@pytest.mark.parametrize("world_size", [1, 2])
def test_random_programs_have_the_weights_of_plain_torch(world_size: int) -> None:
    programs = [Program.draw(seed, world_size) for seed in SEEDS]
    by_rank = run_ranks(run_programs, world_size, programs)
    told = [
        f"rank {rank}: {text}\n  {programs[i]}"
        for rank, all in enumerate(by_rank)
        for i, text in enumerate(all)
        if text
    ]
    assert not told, "\n".join(told)
    assert all(len(each) == len(programs) for each in by_rank)
