"""Named streams: reproducible, independent of torch's numbers, and the same when recomputed."""

from __future__ import annotations

import pytest
import torch

from zpartition.activations import MODEL_PARALLEL, Checkpointing, RandomStreams

CPU = torch.device("cpu")


def test_a_stream_continues_and_torch_s_numbers_do_not_change() -> None:
    streams = RandomStreams(CPU)
    streams.seed_model_parallel(7, rank=1)
    plain = torch.Generator().manual_seed(7)
    own = torch.Generator().manual_seed(7 + 2718 + 1)
    for _ in range(2):
        assert torch.equal(torch.rand(3), torch.rand(3, generator=plain))
        with streams.fork():
            assert torch.equal(torch.rand(5), torch.rand(5, generator=own))
    saved = streams.get_states()
    first: list[torch.Tensor] = []

    def fails() -> None:
        with streams.fork():
            first.append(torch.rand(2))
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fails()
    assert torch.equal(torch.rand(3), torch.rand(3, generator=plain))
    streams.set_states(saved)
    with streams.fork(MODEL_PARALLEL):
        assert torch.equal(first[0], torch.rand(2))


def test_names_and_seeds_are_unique() -> None:
    streams = RandomStreams(CPU)
    streams.add("a", 1)
    with pytest.raises(ValueError, match="seed 1 is in use by another stream"):
        streams.add("b", 1)
    with pytest.raises(ValueError, match="stream 'a' exists already"):
        streams.add("a", 2)
    with pytest.raises(ValueError, match="there is no stream 'c', only 'a'"), streams.fork("c"):
        pass
    streams.reseed(5, rank=0)
    streams.reseed(5, rank=0)
    assert list(streams.get_states()) == ["a", MODEL_PARALLEL]
    streams.reset()
    assert streams.get_states() == {}
    streams.add("a", 1)


@pytest.mark.parametrize("checkpointed", [False, True])
def test_a_block_that_forks_draws_the_same_numbers_when_recomputed(checkpointed: bool) -> None:
    streams, seen = RandomStreams(CPU), []
    streams.seed_model_parallel(3, rank=0)

    def block(x: torch.Tensor) -> torch.Tensor:
        with streams.fork():
            mask = torch.rand(4)
        seen.append(mask)
        return (x * mask * torch.rand(4)).sin()

    x = torch.ones(4, requires_grad=True)
    run = Checkpointing(streams=streams) if checkpointed else lambda function, *args: function(*args)
    y = run(block, x)
    with streams.fork():
        between = torch.rand(2)
    y.sum().backward()
    with streams.fork():
        after = torch.rand(2)
    own = torch.Generator().manual_seed(3 + 2718)
    wanted = [torch.rand(count, generator=own) for count in (4, 2, 2)]
    assert all(torch.equal(mask, wanted[0]) for mask in seen)
    assert len(seen) == 1 + checkpointed
    assert torch.equal(between, wanted[1])
    assert torch.equal(after, wanted[2])
