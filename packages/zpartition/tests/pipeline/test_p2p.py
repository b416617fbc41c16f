import torch

from zpartition.pipeline import Schedule, interleaved
from zpartition.pipeline.channels import Channels
from zpartition.pipeline.p2p import P2P


def post_of(rank: int, num_ranks: int, num_stages: int) -> P2P:
    return P2P(rank, num_ranks, Channels(None, torch.device("cpu")), num_stages=num_stages)


class Patient:
    """Channels that send nothing."""

    def forget_shapes(self) -> None: ...

    def expect_receive(self, source: int, edge: int, mp_group: object = None) -> tuple[int, int]:
        return source, edge


def test_messages_are_expected_in_the_order_of_the_sender() -> None:
    p2p = P2P(0, 2, Patient(), num_stages=4)  # type: ignore[arg-type]
    p2p.begin(interleaved(2, 2, 2))
    # rank 1 holds stages 1 and 3: values for stage 2, gradients for stages 2 and 0
    assert p2p.pending == {1: ((2, 0, False), (1, 4))}  # a receive is posted before any wait
    assert list(p2p.expected[1]) == [
        (2, 1, False), (2, 0, True), (2, 1, True), (0, 0, True), (0, 1, True),
    ]  # fmt: skip
    assert not p2p.expected[0]
    p2p.begin_evaluation(2)
    assert p2p.pending == {1: ((2, 0, False), (1, 4))}
    assert list(p2p.expected[1]) == [(2, 1, False)]


def test_stages_on_one_rank_exchange_detached_tensors() -> None:
    p2p = post_of(0, 1, 2)
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
