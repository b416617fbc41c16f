"""Launches of every schedule: no circle, and no delay, on a simulated device that executes them in order."""

from __future__ import annotations

import functools
import itertools
import random
from collections import Counter, deque
from collections.abc import Iterator, Mapping

import attrs
import pytest

from zpartition.pipeline import Action, ActionKind, Schedule, make_schedule, simulate
from zpartition.pipeline.launch_order import Launch, StageMessage, launch_order
from zpartition.pipeline.schedule import forward_only
from zpartition.pipeline.timeline import COSTS

Orders = tuple[tuple[Launch, ...], ...]
Costs = Mapping[Action, float]
NAMES = [("gpipe", 1), ("1f1b", 1), ("zero_bubble", 1), ("interleaved", 2), ("interleaved", 3)]
BY_HAND = """
0F0 0F1 4F0 4F1 4B0 0F2 4B1 4F2 0B0 0F3 4B2 4F3 0B1 4B3 0B2 0B3  # one forward at a time, then whatever is there
1F0 1F1 5F0 5B0 5F1 1F2 5B1 1B0 1F3 5F2 5B2 1B1 5F3 5B3 1B2 1B3
2F0 2F1 6F0 6B0 6F1 2F2 6B1 2B0 2F3 6F2 6B2 2B1 6F3 6B3 2B2 2B3
3F0 3F1 7F0 7B0 7F1 3F2 7B1 3B0 3F3 7F2 7B2 3B1 7F3 7B3 3B2 3B3
"""


@functools.cache
def schedules() -> tuple[Schedule, ...]:
    return tuple(_schedules())


def _schedules() -> Iterator[Schedule]:
    for name, per_rank in NAMES:
        for ranks in (1, 2, 3, 4, 8):
            for count in (ranks, 2 * ranks, 5 * ranks) if per_rank > 1 else (1, 3, ranks, 2 * ranks + 1):
                yield make_schedule(name, ranks, count, per_rank)
    for ranks, per_rank in ((2, 1), (4, 1), (2, 3), (8, 2)):
        yield forward_only(ranks, 5, per_rank)
    yield Schedule.parse(BY_HAND)
    yield from (shuffled(seed) for seed in range(20))


def shuffled(seed: int) -> Schedule:
    """Return a schedule whose ranks take any action that is ready, at random times."""
    draw = random.Random(seed)
    stages, micros, ranks = (6, 4, 3) if seed % 2 else (4, 5, 2)
    kinds = [ActionKind.FORWARD, ActionKind.BACKWARD]
    left = {Action(stage, kind, micro) for stage in range(stages) for kind in kinds for micro in range(micros)}
    whole, done = Schedule("drawn", stages, micros, ((),) * ranks), set[Action]()
    lists: list[list[Action]] = [[] for _ in range(ranks)]
    while left:
        action = draw.choice(sorted(each for each in left if not whole.missing(each, done)))
        left.remove(action)
        done.add(action)
        lists[action.stage % ranks].append(action)
    return attrs.evolve(whole, ranks=tuple(map(tuple, lists))).checked()


def needed_by(message: StageMessage, schedule: Schedule) -> Action:
    kinds = (ActionKind.BACKWARD, ActionKind.INPUT) if message.is_gradient else (ActionKind.FORWARD,)
    actions = [Action(message.stage, kind, message.micro) for kind in kinds]
    return next(action for action in actions if action in schedule.ranks[message.target])


def needs_of(schedule: Schedule) -> dict[Action, tuple[Action, int]]:
    """Return (action that computes, its rank) of what an action receives, written without `sent_messages`."""
    found = {}
    every = {action: rank for rank, actions in enumerate(schedule.ranks) for action in actions}
    for action, rank in every.items():
        for need in schedule.needs(action):
            made = need if need in every else Action(need.stage, ActionKind.BACKWARD, need.micro)
            if every[made] != rank:
                found[action] = made, every[made]
    return found


def executed(schedule: Schedule, order: Orders, costs: Costs, message_s: float = 0.0) -> float:
    """Return when the last action ends.  Raises AssertionError if ranks wait for each other forever.

    A message takes place when both of its ranks have started the launch with it, a launch is over when all of its
    messages are, and the next one of the rank starts after that.
    """
    needs, every = needs_of(schedule), range(len(order))
    ends, free = [[0.0] for _ in every], [0.0 for _ in every]  # of the first actions; of the launches
    left = [deque(launches) for launches in order]
    started: dict[tuple[int, StageMessage], float] = {}
    arrived: dict[Action, float] = {}
    has_moved = True
    while has_moved:
        has_moved = False
        for rank, actions in enumerate(schedule.ranks):
            action = actions[len(ends[rank]) - 1] if len(ends[rank]) <= len(actions) else None
            if action is not None and (action not in needs or action in arrived):
                ends[rank].append(max(ends[rank][-1], arrived.get(action, 0.0)) + costs[action])
                has_moved = True
            if not left[rank] or left[rank][0].after >= len(ends[rank]):
                continue
            launch = left[rank][0]
            for message in launch.messages:
                started.setdefault((rank, message), max(free[rank], ends[rank][launch.after]))
            both = [(end, message) for message in launch.messages for end in (message.source, message.target)]
            if all(each in started for each in both):
                left[rank].popleft()
                has_moved, free[rank] = True, max(started[each] for each in both) + message_s
                received = [each for each in launch.messages if each.target == rank]
                arrived.update({needed_by(each, schedule): free[rank] for each in received})
    assert not any(left), "a circle"
    assert [len(each) - 1 for each in ends] == [len(each) for each in schedule.ranks]
    return max(each[-1] for each in ends)


def equal_costs(schedule: Schedule) -> dict[Action, float]:
    return {action: COSTS[action.kind] for actions in schedule.ranks for action in actions}


def test_every_message_is_launched_once_after_it_is_computed_and_before_it_is_needed() -> None:
    for schedule in schedules():
        place = {action: number for actions in schedule.ranks for number, action in enumerate(actions)}
        needs, sent, received = needs_of(schedule), set(), set()
        for rank, launches in enumerate(launch_order(schedule)):
            assert [each.after for each in launches] == sorted(each.after for each in launches)
            for launch in launches:
                for message in launch.messages:
                    action = needed_by(message, schedule)
                    made, source = needs[action]
                    assert (message.source, message.target) == (source, schedule.rank_of(message.stage))
                    if rank == source:
                        assert place[made] < launch.after
                        sent.add(action)
                    else:
                        assert rank == message.target
                        assert launch.after <= place[action]
                        received.add(action)
        assert sent == received == needs.keys()
        assert sum(len(each.messages) for launches in launch_order(schedule) for each in launches) == 2 * len(sent)


def test_two_ranks_launch_what_they_exchange_in_one_order() -> None:
    for schedule in schedules():
        order = launch_order(schedule)
        for one, other in itertools.combinations(range(len(order)), 2):
            shared = [
                [
                    [each for each in launch.messages if {each.source, each.target} == {one, other}]
                    for launch in launches
                ]
                for launches in (order[one], order[other])
            ]
            assert [each for each in shared[0] if each] == [each for each in shared[1] if each]


def test_no_action_is_later_than_with_independent_messages() -> None:
    for schedule in schedules():
        assert executed(schedule, launch_order(schedule), equal_costs(schedule)) == simulate(schedule).span


def test_no_circle_however_long_actions_and_messages_take() -> None:
    for number, schedule in enumerate(schedules()):
        draw = random.Random(number)
        costs = {action: draw.choice((0.0, 0.1, 1.0, 50.0)) for actions in schedule.ranks for action in actions}
        assert executed(schedule, launch_order(schedule), costs, draw.choice((0.0, 3.0))) >= 0


def test_messages_take_no_more_time_than_independent_ones_that_are_received_when_needed() -> None:
    """The bound of the essay: batches of equal actions, with messages of 0.05 and 0.2 of a forward."""
    for name, per_rank in NAMES:
        for ranks in (2, 4, 8):
            schedule = make_schedule(name, ranks, 2 * ranks, per_rank)
            needs, costs = needs_of(schedule), equal_costs(schedule)
            for message_s in (0.05, 0.2):
                waiting = {action: cost + message_s * (action in needs) for action, cost in costs.items()}
                found = executed(schedule, launch_order(schedule), costs, message_s)
                assert 0.95 < found / simulate(schedule, waiting.__getitem__).span < 1 + 1e-9


def test_the_simulated_device_finds_circles_and_delays() -> None:
    schedule = make_schedule("1f1b", 2, 4)
    one_by_one = [
        tuple(Launch(each.after, (message,)) for each in launches for message in _sent_first(each, rank))
        for rank, launches in enumerate(launch_order(schedule))
    ]
    with pytest.raises(AssertionError, match="a circle"):
        executed(schedule, tuple(one_by_one), equal_costs(schedule))
    slow = {action: cost * (2 if action.stage else 1) for action, cost in equal_costs(schedule).items()}
    assert executed(schedule, launch_order(schedule), slow) == simulate(schedule, slow.__getitem__).span
    assert executed(schedule, launch_order(schedule), slow) > executed(
        schedule, launch_order(schedule), equal_costs(schedule)
    )


def _sent_first(launch: Launch, rank: int) -> list[StageMessage]:
    return sorted(launch.messages, key=lambda message: message.source != rank)


def test_early_receives_are_few() -> None:
    """Messages that a rank has launched and does not need yet, beside that of its next action."""
    for name, per_rank in NAMES:
        for ranks in (2, 4, 8):
            schedule = make_schedule(name, ranks, 3 * ranks, per_rank)
            place = {action: number for actions in schedule.ranks for number, action in enumerate(actions)}
            held = Counter(
                (rank, number)
                for rank, launches in enumerate(launch_order(schedule))
                for launch in launches
                for message in launch.messages
                if message.target == rank
                for number in range(launch.after, place[needed_by(message, schedule)])
            )
            assert max(held.values(), default=0) <= (0 if name == "gpipe" else 3 if per_rank > 1 else 1)


def test_an_evaluation_goes_through_all_stages_micro_batch_by_micro_batch() -> None:
    assert forward_only(2, 2, 2).text() == "0F0 2F0 0F1 2F1\n1F0 3F0 1F1 3F1"
    first, second = launch_order(forward_only(2, 1, 2))
    assert [[(each.stage, each.source) for each in launch.messages] for launch in first] == [
        [(1, 0)],
        [(2, 1)],
        [(3, 0)],
    ]
    assert [launch.after for launch in first] == [1, 1, 2]
    assert [launch.after for launch in second] == [0, 1, 1]
