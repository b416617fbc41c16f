"""A rejected load changes nothing on any rank; after a load that fails half-way the engine does not continue."""

from __future__ import annotations

import contextlib
import errno
import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from everything import KINDS, digest, seed_all, train
from forging import write_forged

import zckpt
import zcomm
import zengine
import zpartition
from zcomm.testing import run_ranks
from zengine.engine.clock import HalfLoaded

NUM_MORE = 2  # steps after the attempt


def flip(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)


def truncate(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-5])


DAMAGES: dict[str, Callable[[Path], None]] = {
    "a flipped byte": lambda folder: flip(max(folder.glob("*.safetensors"))),
    "a truncated file": lambda folder: truncate(max(folder.glob("*.safetensors"))),
    "a missing file": lambda folder: max(folder.glob("*.safetensors")).unlink(),
    "a flipped byte of the manifest": lambda folder: flip(folder / "manifest.json"),
    "no manifest": lambda folder: (folder / "manifest.json").unlink(),
}


def steps_after(engine: Any, randomness: dict[str, Any], batches: Any) -> list[Any]:
    zckpt.rng.restore(randomness)
    return train(engine, batches, NUM_MORE)


def fresh_copy(kind: str, stage: int, root: str) -> Any:
    """Make an engine in the state of `victim` without a failed attempt."""
    engine = KINDS[kind](stage)
    engine.load_checkpoint(root, "victim")
    return engine


def prepared(root: str, kind: str, stage: int) -> tuple[Any, Any]:
    """Make an engine loaded from its checkpoint `victim`, and batches; write a later checkpoint `good`."""
    seed_all(1)
    engine = KINDS[kind](stage)
    batches = iter(engine.training_dataloader)
    train(engine, batches, 1)
    engine.save_checkpoint(root, "victim")
    train(engine, batches, 2)
    engine.save_checkpoint(root, "good")
    engine.load_checkpoint(root, "victim")
    return engine, iter(engine.training_dataloader)


def damaged_on_one_rank(root: str, kind: str, stage: int) -> list[str]:
    """Damage files on the last rank only; return the problems afterwards."""
    engine, batches = prepared(root, kind, stage)
    before, randomness, wrong = digest(engine), zckpt.rng.capture(), []
    is_last = zcomm.group_rank() == zcomm.group_size() - 1
    for number, (name, damage) in enumerate(DAMAGES.items()):
        other = Path(root, f"copy{number}")
        if is_last:
            shutil.copytree(Path(root, "good"), other / "good")
            damage(other / "good")
        try:
            engine.load_checkpoint(str(other if is_last else root), "good")
            wrong.append(f"{name}: loaded")
        except zckpt.CheckpointError:
            after = digest(engine)
            wrong += [f"{name}: {thing} changed" for thing in before if after[thing] != before[thing]]
    mine = steps_after(engine, randomness, batches)
    twin = fresh_copy(kind, stage, root)
    if mine != steps_after(twin, randomness, iter(twin.training_dataloader)):
        wrong.append("the steps that follow are not those of a run that never tried")
    return wrong


@pytest.mark.parametrize(("kind", "world_size", "stage"), [("ours", 1, 1), ("torch", 2, 1), ("ours", 2, 3)])
def test_damage_on_one_rank_is_rejected_by_all(tmp_path: Path, kind: str, world_size: int, stage: int) -> None:
    assert run_ranks(damaged_on_one_rank, world_size, str(tmp_path), kind, stage) == [[]] * world_size


def rejected_in_the_middle_of_a_step(root: str) -> list[str]:
    """Reject a load between micro-steps; the gradients of the first still count."""
    engine, batches = prepared(root, "torch", 1)
    randomness, good = zckpt.rng.capture(), Path(root, "good")
    if zcomm.group_rank() == 0:
        write_forged(good, "forged", with_steps(-7))
    zcomm.barrier()
    reports = []
    for tries in (True, False):
        zckpt.rng.restore(randomness)
        for _ in range(2):
            engine.backward(engine(next(batches)))
            if tries and engine.clock.index == 0:
                engine.step()
                with pytest.raises(
                    zckpt.CheckpointStateError, match=r"manifest\.json: objects\['clock'\]: steps = -7"
                ):
                    engine.load_checkpoint(root, "forged")
            else:
                reports.append(engine.step())
        engine.load_checkpoint(root, "victim")
        batches = iter(engine.training_dataloader)
    reports = [report for report in reports if report is not None]
    return [] if len(reports) == 2 and reports[0] == reports[1] else [f"{reports}"]


def with_steps(count: int) -> Callable[[dict[str, Any]], dict[str, Any]]:
    def change(manifest: dict[str, Any]) -> dict[str, Any]:
        manifest["objects"]["clock"]["steps"] = count
        return manifest

    return change


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_rejected_load_in_the_middle_of_a_step_keeps_its_gradients(tmp_path: Path, world_size: int) -> None:
    assert run_ranks(rejected_in_the_middle_of_a_step, world_size, str(tmp_path)) == [[]] * world_size


# -- the disk fails after all checks have passed ------------------------------------------------


@contextlib.contextmanager
def failing_copies() -> Iterator[None]:
    """Make the first rank's disk fail after two copied ranges, or after a batch of small tensors."""
    copy, seen, fill_batch = zckpt.loading.run_reads.fill, [], zckpt.loading.small.Batch.fill

    def fill(*args: Any) -> int:
        seen.extend(args[0].shape[:1] if args[0].numel() > 1 else ())
        if zcomm.group_rank() == 0 and len(seen) > 2:
            raise OSError(errno.EIO, "Input/output error", "a disk")
        return copy(*args)

    def fill_and_fail(batch: Any, data: Any) -> None:
        fill_batch(batch, data)
        if zcomm.group_rank() == 0 and any(item.shard.name.startswith("model") for item in batch.items):
            raise OSError(errno.EIO, "Input/output error", "a disk")

    with (
        mock.patch.object(zckpt.loading.run_reads, "fill", fill),
        mock.patch.object(zckpt.loading.small.Batch, "fill", fill_and_fail),
    ):
        yield


@contextlib.contextmanager
def failing_commit() -> Iterator[None]:
    """Make the last rank's optimizer fail to store the loaded state."""
    hand_over = zpartition.state.addressing.StagedState.hand_over

    def fail(staged: Any) -> None:
        if zcomm.group_rank() == zcomm.group_size() - 1:
            raise MemoryError("no memory")
        hand_over(staged)

    with mock.patch.object(zpartition.state.addressing.StagedState, "hand_over", fail):
        yield


FAILURES = {
    "copies": (failing_copies, zckpt.CheckpointReadError),
    "commit": (failing_commit, (MemoryError, ValueError)),
}


def half_loaded(root: str, failure: str, kind: str, stage: int) -> list[str]:
    """Return the calls that a half-loaded engine accepts, and True if another load repairs it."""
    engine, batches = prepared(root, kind, stage)
    batch = next(batches)
    loss = engine(batch)
    break_down, error = FAILURES[failure]
    with break_down(), pytest.raises(error):
        engine.load_checkpoint(root, "good")
    calls: dict[str, Callable[[], Any]] = {
        "forward": lambda: engine(batch),
        "backward": lambda: engine.backward(loss),
        "step": engine.step,
        "save_checkpoint": lambda: engine.save_checkpoint(root, "never"),
        "save_16bit_model": lambda: engine.save_16bit_model(root),
    }
    wrong = []
    expected = rf"checkpoint {root}/good failed .*Load a complete checkpoint: engine\.load_checkpoint"
    for name, call in calls.items():
        with pytest.raises(HalfLoaded, match=rf"^{name}\(\) is not possible: the load of {expected}"):
            call()
    with pytest.raises(zckpt.CheckpointNotFound):
        engine.load_checkpoint(root, "absent")
    with pytest.raises(HalfLoaded, match=expected):  # a rejected load repairs nothing
        engine(batch)
    engine.load_checkpoint(root, "good")
    twin = KINDS[kind](stage)
    twin.load_checkpoint(root, "good")
    randomness = zckpt.rng.capture()
    ours = steps_after(engine, randomness, iter(engine.training_dataloader))
    if ours != steps_after(twin, randomness, iter(twin.training_dataloader)):
        wrong.append("a whole load after a half one goes on otherwise")
    engine.close()
    return wrong


@pytest.mark.parametrize("failure", FAILURES)
@pytest.mark.parametrize(("kind", "world_size", "stage"), [("ours", 1, 1), ("torch", 2, 3)])
def test_a_half_loaded_engine_raises_until_another_load(
    tmp_path: Path, failure: str, kind: str, world_size: int, stage: int
) -> None:
    assert run_ranks(half_loaded, world_size, str(tmp_path), failure, kind, stage) == [[]] * world_size


# -- values that are not requested are not checked ------------------------------------------------------


def damaged(*keys: str) -> Callable[[dict[str, Any]], dict[str, Any]]:
    def change(manifest: dict[str, Any]) -> dict[str, Any]:
        return manifest | {"objects": manifest["objects"] | dict.fromkeys(keys, 5) | {"of a later version": 1}}

    return change


@pytest.mark.parametrize(
    ("keys", "flags"),
    [
        (("clock", "features", "optimizer", "scheduler", "scaler"), {"load_module_only": True}),
        (("optimizer", "scaler"), {"load_optimizer_states": False}),
        (("scheduler",), {"load_lr_scheduler_states": False}),
    ],
)
def test_values_that_are_not_requested_may_be_damaged(
    tmp_path: Path, keys: tuple[str, ...], flags: dict[str, bool]
) -> None:
    engine, _ = prepared(str(tmp_path), "ours", 1)
    write_forged(tmp_path / "good", "damaged", damaged(*keys))
    with pytest.raises(zckpt.CheckpointStateError, match=r"damaged/manifest\.json: objects\['"):
        engine.load_checkpoint(tmp_path, "damaged")
    engine.load_checkpoint(tmp_path, "damaged", **flags)
    engine.close()


def test_the_copy_in_memory_is_checked_in_the_same_way(tmp_path: Path) -> None:
    model = torch.nn.Linear(3, 1)
    config = {"train_batch_size": 2, "optimizer": {"type": "Adam"}, "checkpoint": {"async_save": True}}
    engine = zengine.initialize(model=model, config=config)[0]
    engine.save_checkpoint(str(tmp_path), "a")
    engine.wait_for_checkpoint()
    objects = json.loads(json.dumps(engine.parts.checkpoints.saver.newest(zckpt.ALONE).objects))
    objects["clock"]["steps"] = -7
    before = {name: value.clone() for name, value in engine.state_dict().items()}
    with (
        mock.patch.object(zckpt.MemoryCheckpoint, "objects", objects),
        pytest.raises(zckpt.CheckpointStateError, match=r"memory copy of a: objects\['clock'\]: steps = -7"),
    ):
        engine.restore_from_memory()
    assert all(torch.equal(before[name], value) for name, value in engine.state_dict().items())
    engine.restore_from_memory()
    engine.close()
