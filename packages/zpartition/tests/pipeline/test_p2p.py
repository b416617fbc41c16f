import torch

from zpartition.pipeline import Schedule, interleaved, one_f_one_b, zero_bubble
from zpartition.pipeline.channels import Channels, PendingReceive
from zpartition.pipeline.launch_order import StageMessage, sent_messages
from zpartition.pipeline.p2p import P2P, AgreedOrder, EarlyReceives
from zpartition.pipeline.schedule import forward_only


class Noted:
    """Channels that send nothing, and note what they are to receive."""

    def expect_receive(self, source: int, edge: int, mp_group: object = None) -> tuple[int, int]:
        return source, edge


def test_messages_that_travel_by_themselves_are_expected_in_the_order_of_the_sender() -> None:
    messages = EarlyReceives(Noted(), (None, None))  # type: ignore[arg-type]
    p2p = P2P(0, 2, Noted(), messages)  # type: ignore[arg-type]
    p2p.begin(interleaved(2, 2, 2))
    # rank 1 holds stages 1 and 3: values for stage 2, gradients for stages 2 and 0
    assert messages.pending == {1: (StageMessage(2, 0, False, 1, 0), (1, 4))}  # posted before any wait
    assert [(each.stage, each.micro, each.is_gradient) for each in messages.expected[1]] == [
        (2, 1, False), (2, 0, True), (2, 1, True), (0, 0, True), (0, 1, True),
    ]  # fmt: skip
    assert not messages.expected[0]
    p2p.begin(forward_only(2, 2, 2))
    assert messages.pending == {1: (StageMessage(2, 0, False, 1, 0), (1, 4))}
    assert list(messages.expected[1]) == [StageMessage(2, 1, False, 1, 0)]


class Log:
    """Channels that send nothing, and log what they exchange."""

    def __init__(self) -> None:
        self.sent: list[tuple[int, int]] = []  # (receiving rank, edge), in the order in which shapes are checked
        self.received: list[tuple[int, int]] = []

    def prepare(self, value: object, to: int, edge: int, mp_group: object) -> None:
        self.sent.append((to, edge))

    def exchange(self, sends: object, receives: list[PendingReceive]) -> None:
        self.received += [(each.source, each.edge) for each in receives]


def logged(schedule: Schedule, rank: int) -> Log:
    """Go through the actions of a rank."""
    log = Log()
    messages, sent = AgreedOrder(log, (None, None)), dict(sent_messages(schedule, rank))  # type: ignore[arg-type]
    messages.begin(schedule, rank)
    for number in range(len(schedule.ranks[rank])):
        messages.proceed(number)
        if number in sent:
            messages.send(sent[number], None)
    messages.proceed(len(schedule.ranks[rank]))
    assert not messages.launches
    assert not messages.computed
    return log


def test_both_ranks_know_the_first_message_of_an_edge_even_if_a_later_one_is_needed_first() -> None:
    """Rank 0 computes micro-batch 1 first, rank 1 is busy then, and waits for micro-batch 0 later."""
    by_hand = Schedule.parse("0F1 0F0 2F0 2B0 0B0 2F1 2B1 0B1 \n 1F0 3F0 3B0 1B0 1F1 3F1 3B1 1B1")
    for schedule in (by_hand, interleaved(2, 4, 2), one_f_one_b(4, 8), zero_bubble(3, 5), forward_only(2, 3, 3)):
        logs = [logged(schedule, rank) for rank in range(len(schedule.ranks))]
        for rank, log in enumerate(logs):
            for other, its in enumerate(logs):
                sent = [edge for to, edge in log.sent if to == other]
                assert sent == [edge for source, edge in its.received if source == rank]


def test_stages_on_one_rank_exchange_detached_tensors() -> None:
    channels = Channels(None, torch.device("cpu"))
    p2p = P2P(0, 1, channels, EarlyReceives(channels, (None, None)))
    p2p.begin(Schedule.parse("0F0 1F0 1B0 0B0"))
    weight = torch.ones(2, requires_grad=True)
    p2p.send_activation(1, 0, (weight * 2, None))
    value, nothing = p2p.receive_activation(1, 0)
    assert nothing is None
    assert value.is_leaf
    assert value.requires_grad
    (value * torch.tensor([3.0, 4.0])).sum().backward()
    p2p.send_gradient(0, 0, (value, None))
    gradient, nothing = p2p.receive_gradient(0, 0)
    assert (gradient.tolist(), nothing) == ([3, 4], None)
    p2p.send_gradient(0, 0, weight.detach().requires_grad_())  # unused: zeros are sent, so no stage waits
    assert p2p.receive_gradient(0, 0).tolist() == [0, 0]


def test_nothing_of_a_failed_batch_remains() -> None:
    channels = Channels(None, torch.device("cpu"))
    p2p = P2P(0, 1, channels, EarlyReceives(channels, (None, None)))
    p2p.begin(Schedule.parse("0F0 1F0 1B0 0B0"))
    p2p.send_activation(1, 0, torch.ones(2))
    channels.known["to", 1, 2] = (False, ((0, 1, (2,)),))  # shapes that the other rank may not have received
    channels.compared.add((1, 2))
    p2p.abort()
    assert (p2p.kept, channels.known, channels.compared, channels.in_flight) == ({}, {}, set(), [])
