"""Every head has a rank, and every rank has the keys of its queries."""

from __future__ import annotations

import pytest

from zpartition.sequence.head_all_to_all import HeadAssignment


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize(("query", "key_value"), [(4, 4), (6, 3), (6, 2), (8, 1), (5, 5), (12, 4)])
def test_all_queries_are_assigned_with_their_keys(query: int, key_value: int, size: int) -> None:
    shares = HeadAssignment(query, key_value, size)
    assert [head for run in shares.queries() for head in run] == list(range(query))
    assert max(map(len, shares.queries())) - min(map(len, shares.queries())) <= 1
    for rank, (mine, keys) in enumerate(zip(shares.queries(), shares.key_values())):
        wanted = [head // shares.group for head in mine]
        if repeats := shares.repeats(rank):
            found = [keys[place] for place in repeats]
        else:
            each, rest = divmod(len(mine), len(keys))
            assert rest == 0
            found = [keys[place // each] for place in range(len(mine))]
        assert found == wanted


def test_heads_that_divide_are_neither_repeated_nor_sent_twice() -> None:
    shares = HeadAssignment(8, 4, 2)
    assert shares.key_values() == (range(2), range(2, 4))
    assert shares.repeats(0) == shares.repeats(1) == ()


def test_uneven_groups_are_repeated_after_the_exchange() -> None:
    shares = HeadAssignment(6, 3, 2)
    assert shares.key_values() == (range(2), range(1, 3))
    assert (shares.repeats(0), shares.repeats(1)) == ((0, 0, 1), (0, 1, 1))


def test_a_single_key_value_head_goes_to_all_ranks() -> None:
    assert HeadAssignment(8, 1, 4).key_values() == (range(1),) * 4


def test_too_few_or_indivisible_heads_raise_with_the_numbers() -> None:
    with pytest.raises(ValueError, match=r"4 query heads cannot be split over 8 sequence ranks.* at most 4"):
        HeadAssignment(4, 2, 8)
    with pytest.raises(ValueError, match="6 query heads do not share 4 key-value heads evenly"):
        HeadAssignment(6, 4, 2)
