"""Handshake: the ranks decide together whether to use shared memory."""

from __future__ import annotations

import os
import warnings

import attrs
import pytest
import torch

import zcomm
from zcomm.shared import handshake, native, registry
from zcomm.shared.handshake import Presence, obstacle_of
from zcomm.shared.host_layout import HostLayout
from zcomm.shared.segment import Offer, Segment
from zcomm.testing import run_ranks

needs_extension = pytest.mark.skipif(bool(native.unavailable_reason()), reason=native.unavailable_reason())

FINE = Presence("auto", "host", 100, "", Offer(100, 3, "00", 4096))


@pytest.mark.parametrize(
    ("second", "reason"),
    [
        (FINE, ""),
        (attrs.evolve(FINE, choice="shared"), ""),
        (attrs.evolve(FINE, choice="gloo"), "rank 1 has ZCOMM_TRANSPORT=gloo"),
        (attrs.evolve(FINE, choice="shm"), "rank 1 has ZCOMM_TRANSPORT=shm; allowed: auto, shared, gloo"),
        (attrs.evolve(FINE, obstacle="no memory", offer=None), "rank 1: no memory"),
        (attrs.evolve(FINE, host="other"), ""),
        (
            attrs.evolve(FINE, host="other", choice="shared"),
            "each of its 2 ranks is on a host of its own",
        ),
    ],
)
def test_the_decision_names_the_rank_that_prevents_it(second: Presence, reason: str) -> None:
    assert obstacle_of([FINE, second]) == reason


def test_the_ranks_of_one_host_are_counted_and_not_those_of_the_group() -> None:
    assert handshake.rank_limit_obstacle(HostLayout.of("A" * 64), 64) == ""
    assert (
        handshake.rank_limit_obstacle(HostLayout.of("A" * 65), 64)
        == "65 ranks are in the group; at most 64 can share memory"
    )
    assert handshake.rank_limit_obstacle(HostLayout.of("AB" * 64), 64) == ""
    assert handshake.rank_limit_obstacle(HostLayout.of("AB" * 65), 64) == (
        "65 ranks on each host are in the group; at most 64 can share memory"
    )


def test_a_presence_survives_its_journey() -> None:
    for each in (FINE, attrs.evolve(FINE, offer=None)):
        assert Presence.from_json(attrs.asdict(each)) == each


def rank_reduces(settings: dict[str, str]) -> tuple[str, str, float, list[str]]:
    os.environ.update(settings)
    return reduced()


def reduced() -> tuple[str, str, float, list[str]]:
    """Transport, its reason, the sum of ones over the ranks, and the warnings on the way."""
    tensor = torch.ones(4)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        zcomm.all_reduce(tensor)
        zcomm.all_reduce(tensor.fill_(1))
    texts = [str(each.message) for each in caught if "zcomm" in str(each.message)]
    return zcomm.transport(), zcomm.transport_reason(), tensor[0].item(), texts


def test_gloo_can_be_asked_for_without_a_warning() -> None:
    found = run_ranks(rank_reduces, 2, {"ZCOMM_TRANSPORT": "gloo"})
    assert found == [("gloo", "rank 0 has ZCOMM_TRANSPORT=gloo", 2.0, [])] * 2


def rank_one_fails(how: str) -> tuple[str, str, float, list[str]]:
    if zcomm.group_rank() == 1:
        break_here(how)
    return reduced()


def break_here(how: str) -> None:
    """Make this rank alone unable to share memory."""

    def reject(*_: object, **__: object) -> None:
        raise OSError(f"no {how} today")

    if how == "host":
        os.environ["ZCOMM_HOST"] = "elsewhere"
    elif how == "extension":
        handshake.unavailable_reason = lambda: "the extension is not built"  # type: ignore[assignment]
    elif how == "gloo":
        os.environ["ZCOMM_TRANSPORT"] = "gloo"
    elif how == "memory":
        Segment.create = reject  # type: ignore[assignment]
    elif how == "permission":
        Offer.accept = reject  # type: ignore[assignment]


REASONS = {
    "host": "its hosts have different numbers of ranks: 2 on that of rank 0, 1 on that of rank 1",
    "extension": "rank 1: the extension is not built",
    "gloo": "rank 1 has ZCOMM_TRANSPORT=gloo",
    "memory": "rank 1: no memory for its control segment (no memory today)",
    "permission": "rank 1: cannot reach the memory of rank 0 (no permission today)",
}


@pytest.fixture
def fresh_ranks() -> object:
    """Ranks that were broken for good must not be used again: a failed task ends them."""
    yield
    with pytest.raises(RuntimeError):
        run_ranks(fail, 3)


def fail() -> None:
    raise ValueError("on purpose")


@needs_extension
@pytest.mark.parametrize("how", REASONS)
def test_if_one_rank_cannot_all_use_gloo_and_rank_0_warns_once(how: str, fresh_ranks: object) -> None:
    found = run_ranks(rank_one_fails, 3, how)
    warned = [f"zcomm uses Gloo where shared memory would be faster: {REASONS[how]}."]
    assert found[0] == ("gloo", REASONS[how], 3.0, [] if how == "gloo" else warned)
    assert found[1] == found[2] == ("gloo", REASONS[how], 3.0, [])


def rank_insists() -> str:
    if zcomm.group_rank() == 0:
        os.environ["ZCOMM_TRANSPORT"] = "shared"
    os.environ["ZCOMM_HOST"] = str(zcomm.group_rank())
    with pytest.raises(zcomm.CollectiveFailed) as caught:
        zcomm.all_reduce(torch.ones(1), label="first")
    with pytest.raises(handshake.TransportUnavailable):
        registry.transport_of(None)
    assert zcomm.transport() == "none"
    return str(caught.value)


@needs_extension
def test_if_one_rank_insists_and_cannot_all_raise() -> None:
    for text in run_ranks(rank_insists, 2):
        assert "all_reduce 'first'" in text
        assert "ZCOMM_TRANSPORT=shared, but the group cannot use shared memory: each of its 2 ranks is on" in text


def test_a_kernel_without_pidfd_is_no_obstacle(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(pid: int) -> int:
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr(handshake.os, "pidfd_open", absent, raising=False)
    assert handshake._pidfd(os.getpid()) == -1
