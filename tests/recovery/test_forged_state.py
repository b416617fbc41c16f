"""A load of forged values either succeeds or raises one named error and changes nothing, on every rank.

Each value beside the tensors of a real checkpoint is forged in turn (forging.py).  The suite runs a random sample
with a fixed seed; ZENGINE_FORGERIES=all runs all.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from everything import KINDS, digest, seed_all, train
from forging import Forgery, read_manifest, some_forgeries, write_forged

import zckpt
import zcomm
from zcomm.testing import run_ranks

COUNT, LIMIT_S = (10**6, 7000) if os.environ.get("ZENGINE_FORGERIES") == "all" else (180, 280)


def forge_and_load(root: str, kind: str, stage: int, count: int, seed: int) -> list[str]:
    """Return the problem of each forgery that is neither loaded nor rejected correctly."""
    seed_all(1)
    engine = KINDS[kind](stage)
    batches = iter(engine.training_dataloader)
    train(engine, batches, 1)
    engine.save_checkpoint(root, "victim")
    train(engine, batches, 2)
    good = Path(engine.save_checkpoint(root, "good", client_state={"epoch": 3}))
    engine.load_checkpoint(root, "victim")
    batches = iter(engine.training_dataloader)
    before = digest(engine)
    wrong, refused, taken = [], 0, 0
    for number, forgery in enumerate(some_forgeries(read_manifest(good), count, seed)):
        tag = f"forged{number}"
        if zcomm.group_rank() == 0:
            write_forged(good, tag, forgery.applied)
        zcomm.barrier()
        try:
            engine.load_checkpoint(root, tag)
            problem = after_success(engine)
            engine.load_checkpoint(root, "victim")
            batches = iter(engine.training_dataloader)
            taken += 1
        except Exception as error:
            problem = problem_of(error, forgery)
            refused += 1
        now = digest(engine)
        problem += "".join(f"; {name} changed" for name in before if now[name] != before[name])
        problems = zcomm.all_gather_object(problem)
        if any(problems):
            wrong.append(f"{forgery}: {' | '.join(problems)}")
        if any("changed" in each for each in problems):
            engine.load_checkpoint(root, "victim")
            batches = iter(engine.training_dataloader)
    assert taken > 5 < refused
    seed_all(1)
    twin = KINDS[kind](stage)
    twin.load_checkpoint(root, "victim")
    zckpt.rng.restore(json.loads(before["random"]))
    ours = train(engine, batches, 2)
    zckpt.rng.restore(json.loads(before["random"]))
    if ours != train(twin, iter(twin.training_dataloader), 2):
        wrong.append("the steps that follow are not those of a run that never tried")
    return wrong


def problem_of(error: Exception, forgery: Forgery) -> str:
    """Return the problem with the rejection; "" if it is correct."""
    text = str(error)
    if isinstance(error, zckpt.CheckpointMismatch):  # another optimizer, schedule or model
        return "" if "checkpoint" in text else text
    if not isinstance(error, (zckpt.CheckpointStateError, zckpt.CheckpointCorrupt)):
        return f"{type(error).__name__}: {text}"
    key = "['scheduler']['state']" if "_schedule_phases" in forgery.path else forgery.key  # torch raises
    lacks = [word for word in ("manifest.json", key) if word not in text]
    return f"{text} does not say {', '.join(lacks)}" if lacks else ""


def after_success(engine: Any) -> str:
    """Return the problem of an engine that loaded a forgery: rates, counters, or the next step."""
    rates = [float(rate) for rate in engine.get_lr()]
    if not all(0 <= rate < 1e301 for rate in rates):
        return f"rates {rates}"
    counters = engine.clock.state_dict()
    if any(value < 0 for name, value in counters.items() if name != "weight_exponent"):
        return f"counters {counters}"
    try:
        train(engine, iter(engine.training_dataloader), 1)
    except Exception as error:
        return f"taken, and then {type(error).__name__}: {error}"
    return ""


@pytest.mark.timeout(LIMIT_S + 20)
@pytest.mark.parametrize(("kind", "world_size", "stage"), [("ours", 1, 1), ("torch", 1, 3), ("ours", 2, 3)])
def test_a_forged_value_is_loaded_or_rejected_by_name(tmp_path: Path, kind: str, world_size: int, stage: int) -> None:
    count = COUNT // (world_size * 2 - 1)
    for problems in run_ranks(forge_and_load, world_size, str(tmp_path), kind, stage, count, 7, timeout_s=LIMIT_S):
        assert not problems, "\n".join([f"{len(problems)} forgeries:", *problems])
