import base64
import random
from collections.abc import Iterator

import numpy as np
import pytest
import torch

from zckpt import CheckpointInputError
from zckpt.format import canonical
from zckpt.sources import rng


@pytest.fixture(autouse=True)
def _leave_no_trace() -> Iterator[None]:
    before = rng.capture()
    yield
    rng.restore(before)


def draw() -> list[object]:
    """Numbers of every kind; an odd count of normals leaves half a pair in each generator."""
    made: list[object] = [random.random(), random.gauss(0, 1), random.getrandbits(100)]
    made += [np.random.rand(), np.random.randn(), np.random.randint(1 << 40), np.random.permutation(5).tolist()]
    made += [torch.rand(3).tolist(), torch.randn(17).tolist(), torch.randperm(9).tolist()]
    made += [torch.nn.functional.dropout(torch.ones(50)).tolist()]
    if torch.cuda.is_available():
        made += [torch.randn(5, device=f"cuda:{i}").tolist() for i in range(torch.cuda.device_count())]
    return made


def test_later_draws_are_bit_identical_after_a_trip_through_json() -> None:
    random.seed(1)
    np.random.seed(1)
    torch.manual_seed(1)
    draw()
    state = canonical.load(canonical.dump(canonical.plain(rng.capture(), "rng")))
    first = draw()
    assert draw() != first
    assert rng.restore(state) == ()
    assert draw() == first


def test_capturing_changes_nothing() -> None:
    state = rng.capture()
    assert rng.capture() == state
    first = draw()
    rng.restore(state)
    rng.capture()
    assert draw() == first


def test_devices_that_are_gone_are_reported() -> None:
    state = rng.capture()
    state["cuda"] = [base64.b64encode(bytes(16)).decode()] * (torch.cuda.device_count() + 2)
    expected = (
        f"this process has {torch.cuda.device_count()} CUDA devices; the random states of 2 more were not restored"
    )
    assert rng.restore(state) == (expected,)


@pytest.mark.parametrize(
    "spoil",
    [
        lambda state: state.pop("numpy"),
        lambda state: state.update(other=1),
        lambda state: state.update(torch="AAAA"),
        lambda state: state.update(torch="not base64!"),
        lambda state: state.update(python={"version": 3, "words": [1], "gauss": None}),
        lambda state: state.update(python=[]),
        lambda state: state.update(numpy={"bit_generator": "Other", "state": {}}),
        lambda state: state["numpy"]["state"].update(key={"dtype": "|O", "base64": ""}),
        lambda state: state.update(cuda=[1]),
        lambda state: state.update(cuda=[state["torch"]]),
        lambda state: state["python"]["words"].__setitem__(3, -1),
        lambda state: state["python"]["words"].__setitem__(3, 2**64),
        lambda state: state["python"]["words"].__setitem__(624, 700),
        lambda state: state["python"].update(gauss="x"),
        lambda state: state["numpy"]["state"].update(pos=700),
        lambda state: state["numpy"]["state"].update(pos=-7),
        lambda state: state["numpy"].update(has_gauss=2),
        lambda state: state["numpy"].update(gauss="x"),
        lambda state: state["numpy"]["state"]["key"].update(base64="AAAA"),
    ],
)
def test_what_is_no_state_is_refused_and_nothing_is_changed(spoil) -> None:
    state = rng.capture()
    before = rng.capture()
    spoil(state)
    with pytest.raises(CheckpointInputError, match="random state"):
        rng.restore(state)
    assert rng.capture() == before


def test_a_state_is_a_mapping() -> None:
    with pytest.raises(CheckpointInputError, match="must be an object, is list"):
        rng.restore([])  # type: ignore[arg-type]
