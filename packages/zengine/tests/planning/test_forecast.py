"""The forecast as text and as data."""

from __future__ import annotations

import attrs
import torch

from zengine.config import Facts, load, resolve
from zengine.planning.batches import token_ids
from zengine.planning.forecast import Forecast, forecast, usable
from zengine.planning.models import Shape, Transformer
from zengine.planning.peaks import Subject


def made(room_bytes: int) -> Forecast:
    config, facts = load({"train_batch_size": 8}), Facts(world_size=1, replicas=1)
    with torch.device("meta"):
        model = Transformer(Shape(layers=1, width=64, vocabulary=100))
    subject = Subject(module=model, batch=token_ids(8), device="cpu")
    return forecast(config, resolve(config, facts), facts, subject, room_bytes=room_bytes)


def test_alone_there_is_one_stage_and_nothing_is_sent() -> None:
    found = made(10**9)
    assert [each.stage for each in found.stages] == [0]
    assert found.own_fits
    assert found.usable_bytes == usable(10**9) < 10**9
    assert "on 1 rank (CPU)" in found.text()
    assert "measured" not in found.text()


def test_a_measurement_is_held_against_the_plan() -> None:
    found = attrs.evolve(made(10**9), measured=(2 * 2**30, 2**30))
    assert "2.00 GiB at the peak of a step, 1.00 GiB planned (50%)" in found.text()
    assert found.as_json()["measured"] == {"peak_bytes": 2 * 2**30, "planned_bytes": 2**30}
