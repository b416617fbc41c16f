from zckpt import ALONE, Peers


def test_alone_is_rank_zero_of_one_and_exchanges_with_itself() -> None:
    peers: Peers = ALONE
    assert (peers.rank, peers.world_size) == (0, 1)
    assert peers.exchange({"a": [1, "b", None]}) == [{"a": [1, "b", None]}]
