"""Loaders of the data sections, and of DeepSpeed's calls."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import IterableDataset, SequentialSampler

import zengine
from zcomm.testing import run_ranks
from zengine.config import ConfigError
from zengine.data import (
    CurriculumLoader,
    DataAnalyzer,
    MapLoader,
    MetricError,
    PackedLoader,
    SampledLoader,
    length_of,
)

DATA = [torch.full((1 + index % 7,), float(index)) for index in range(42)]
METRIC = {
    "min_difficulty": 2,
    "max_difficulty": 7,
    "schedule_type": "fixed_linear",
    "schedule_config": {"total_curriculum_step": 5},
}


def firsts(samples: list[torch.Tensor]) -> torch.Tensor:
    return torch.stack([sample[0] for sample in samples])


def sampling(**sections: Any) -> dict[str, Any]:
    return {"data_efficiency": {"enabled": True, "data_sampling": {"enabled": True, **sections}}}


def curriculum(**metrics: Any) -> dict[str, Any]:
    return sampling(num_epochs=1, curriculum_learning={"enabled": True, "curriculum_metrics": metrics})


def start(data: Any = DATA, **config: Any) -> tuple[zengine.Engine, Any]:
    base = {"train_micro_batch_size_per_gpu": 2, "optimizer": {"type": "SGD", "params": {"lr": 0.1}}}
    engine, _, loader, _ = zengine.initialize(
        model=nn.Linear(1, 1), config={**base, **config}, training_data=data, collate_fn=firsts
    )
    return engine, loader


def lengths(batches: Any, count: int) -> list[list[int]]:
    return [[len(DATA[int(value)]) for value in next(batches)] for _ in range(count)]


def test_plain_data_are_loaded_by_the_workers_of_the_config() -> None:
    _, plain = start()
    _, fetched = start(**sampling(num_workers=1))
    assert isinstance(plain, MapLoader)
    assert [batch.tolist() for batch in plain] == [batch.tolist() for batch in fetched]


def test_a_metric_without_files_is_measured() -> None:
    """Step t admits lengths up to floor(t/5 * 5 + 2) = 3, 4, 5, 6, 7."""
    _, loader = start(**curriculum(seqlen=METRIC))
    assert isinstance(loader, CurriculumLoader)
    batches = iter(loader)
    for step in range(1, 6):
        assert max(lengths(batches, 1)[0]) <= step + 2


def test_a_curriculum_that_admits_all_is_the_plain_loader_and_off_is_absent() -> None:
    """21 batches of two: the epoch is whole."""
    all_at_once = {**METRIC, "min_difficulty": 7}
    _, plain = start()
    _, full = start(**curriculum(seqlen=all_at_once))
    _, off = start(data_efficiency={**curriculum(seqlen=METRIC)["data_efficiency"], "enabled": False})
    expected = [batch.tolist() for _ in range(2) for batch in plain]
    assert [batch.tolist() for _ in range(2) for batch in full] == expected
    assert [batch.tolist() for _ in range(2) for batch in off] == expected


def test_metrics_come_from_files(tmp_path: Path) -> None:
    DataAnalyzer(DATA, {"seqlen": length_of, "value": lambda sample: -sample[0]}, tmp_path).run()
    paths = {
        name: {
            f"index_to_{kind}_path": str(tmp_path / name / f"index_to_{kind}.npy") for kind in ("sample", "metric")
        }
        for name in ("seqlen", "value")
    }
    percentile = {**METRIC, "difficulty_type": "percentile", "min_difficulty": 50, "max_difficulty": 100}
    percentile["schedule_config"] = {"total_curriculum_step": 1000}
    _, loader = start(**curriculum(seqlen={**METRIC, **paths["seqlen"]}, value={**percentile, **paths["value"]}))
    first = next(iter(loader))
    assert all(len(DATA[int(value)]) <= 3 and value >= 21 for value in first)
    missing = {**METRIC, **paths["seqlen"], "index_to_metric_path": str(tmp_path / "none.npy")}
    with pytest.raises(MetricError, match=r"none\.npy cannot be read"):
        start(**curriculum(seqlen=missing))


def test_lengths_come_from_a_folder_or_a_file_or_are_measured(tmp_path: Path) -> None:
    DataAnalyzer(DATA, {"seqlen": length_of}, tmp_path).run()
    paths = ["", str(tmp_path / "seqlen"), str(tmp_path / "seqlen" / "sample_to_metric.npy")]
    found = []
    for path in paths:
        _, loader = start(**sampling(dynamic_batching={"enabled": True, "max_tokens": 12, "metrics_path": path}))
        assert isinstance(loader, PackedLoader)
        found.append([batch.tolist() for batch in loader])
    assert found[0] == found[1] == found[2]
    np.save(tmp_path / "halves.npy", np.array([0.5]))
    for path in (str(tmp_path), str(tmp_path / "halves.npy")):
        with pytest.raises(MetricError, match=r"metrics_path: .* is not a file of lengths"):
            start(**sampling(dynamic_batching={"enabled": True, "max_tokens": 12, "metrics_path": path}))


class Stream(IterableDataset):
    def __iter__(self) -> Any:
        yield from DATA


@pytest.mark.parametrize(
    ("data", "says"), [(None, "got no training_data"), (Stream(), "is a Stream, which has no length and index")]
)
def test_a_section_about_samples_needs_samples_with_an_index(data: Any, says: str) -> None:
    for config in (curriculum(seqlen=METRIC), sampling(dynamic_batching={"enabled": True, "max_tokens": 12})):
        with pytest.raises(ConfigError, match=says):
            start(data, **config)


def test_a_loader_by_deepspeed_s_call() -> None:
    engine, _ = start()
    kept = engine.deepspeed_io(DATA, batch_size=3, route="eval")
    assert [batch.tolist() for batch in kept][:2] == [[0, 1, 2], [3, 4, 5]]
    shuffled = engine.deepspeed_io(DATA, num_local_io_workers=1)
    assert shuffled.batch_size == 2
    assert [batch.tolist() for batch in shuffled] == [batch.tolist() for batch in start()[1]]
    sampled = engine.deepspeed_io(DATA, data_sampler=SequentialSampler(DATA), collate_fn=len)
    assert isinstance(sampled, SampledLoader)
    assert next(iter(sampled)) == 2
    assert [len(batch) for batch in engine.deepspeed_io(Stream())][:2] == [2, 2]


@pytest.mark.parametrize("data", [iter(DATA), {"train": DATA}, None])
def test_what_is_no_dataset_is_refused(data: Any) -> None:
    with pytest.raises(ValueError, match=r"deepspeed_io\(dataset=.*\): a torch Dataset is needed"):
        start()[0].deepspeed_io(data)


def test_an_unknown_route_is_refused() -> None:
    with pytest.raises(ValueError, match="route='test'"):
        start()[0].deepspeed_io(DATA, route="test")


def test_a_post_processing_function_makes_what_the_loader_yields() -> None:
    engine, loader = start()
    engine.set_data_post_process_func(lambda batch, state: (batch, state["consumed_samples"]))
    batch, consumed = next(iter(loader))
    assert (len(batch), consumed) == (2, 2)
    engine.set_data_post_process_func(None)
    assert len(next(iter(loader))) == 2
    with pytest.raises(ValueError, match="pass training_data= to initialize"):
        start(None)[0].set_data_post_process_func(len)


def test_custom_schedules_reach_the_loader() -> None:
    engine, loader = start(**curriculum(seqlen={**METRIC, "schedule_type": "custom", "schedule_config": {}}))
    engine.set_custom_curriculum_learning_schedule({"seqlen": lambda step: 2})
    assert max(lengths(iter(loader), 1)[0]) <= 2
    assert engine.curriculum_learning_enabled()
    assert not engine.random_ltd_enabled()


def train(engine: zengine.Engine, batches: Any, steps: int) -> list[tuple[list[float], float]]:
    seen = []
    for _ in range(steps):
        batch = next(batches)
        engine.backward(engine(batch[:, None] / 42).square().mean())
        seen.append((batch.tolist(), engine.step().loss))
    return seen


@pytest.mark.parametrize(
    "config",
    [
        curriculum(seqlen=METRIC),
        sampling(dynamic_batching={"enabled": True, "max_tokens": 12, "sequence_picking_order": "seqlen"}),
        sampling(num_workers=1),
    ],
)
def test_a_run_goes_on_from_a_checkpoint_in_the_middle_of_an_epoch(tmp_path: Path, config: dict[str, Any]) -> None:
    torch.manual_seed(0)
    first, loader = start(**config)
    batches = iter(loader)
    train(first, batches, 4)
    first.save_checkpoint(tmp_path)
    second, other = start(**config)
    second.load_checkpoint(tmp_path)
    assert train(second, iter(other), 4) == train(first, batches, 4)


@pytest.mark.parametrize(
    ("config", "tag", "values"),
    [
        (curriculum(seqlen=METRIC), "data/curriculum_seqlen", [3, 4, 5]),
        (
            {"curriculum_learning": {"enabled": True, **METRIC, "min_difficulty": 2}},
            "data/curriculum_seqlen",
            [3, 4, 5],
        ),
        (
            sampling(dynamic_batching={"enabled": True, "max_tokens": 7, "max_batch_size": 1}),
            "data/batch_size",
            [1] * 3,
        ),
    ],
)
def test_what_data_features_do_is_charted_by_step(
    tmp_path: Path, config: dict[str, Any], tag: str, values: list[int]
) -> None:
    """floor(t/5 * 5 + 2) for t = 1, 2, 3."""
    monitor = {"jsonl_monitor": {"enabled": True, "output_path": str(tmp_path), "job_name": "a"}}
    engine, loader = start(**config, **monitor)
    train(engine, iter(loader), 3)
    engine.close()
    lines = [json.loads(line) for line in (tmp_path / "a" / "events.jsonl").read_text().splitlines()]
    assert [line["values"][tag] for line in lines if tag in line["values"]] == values


def _with_unequal_data() -> str:
    short = DATA[: 42 - 7 * torch.distributed.get_rank()]
    with pytest.raises(zengine.RanksDisagree) as caught:
        start(short)
    other = DATA if torch.distributed.get_rank() else DATA[::-1]
    with pytest.raises(zengine.RanksDisagree, match="metric seqlen"):
        start(other, **curriculum(seqlen=METRIC))
    return str(caught.value)


def test_ranks_with_unequal_data_are_told_so() -> None:
    for text in run_ranks(_with_unequal_data, 2):
        assert "different training data: rank 0 has [42 samples], rank 1 has [35 samples]" in text


def _on_ranks(folder: str, config: dict[str, Any], world: int) -> list[list[float]]:
    """Four steps of a global batch of four, saved, then four more; the samples of the last four."""
    micro = 4 // world
    engine, loader = start(**config, train_micro_batch_size_per_gpu=micro)
    if world == 1:
        engine.load_checkpoint(folder)
        return [batch for batch, _ in train(engine, iter(loader), 4)]
    batches = iter(loader)
    train(engine, batches, 4)
    engine.save_checkpoint(folder)
    return [batch for batch, _ in train(engine, batches, 4)]


def test_a_curriculum_goes_on_at_the_same_samples_on_another_number_of_ranks(tmp_path: Path) -> None:
    config = curriculum(seqlen=METRIC)
    left, right = run_ranks(_on_ranks, 2, str(tmp_path), config, 2)
    alone = _on_ranks(str(tmp_path), config, 1)
    assert [[*mine, *theirs] for mine, theirs in zip(left, right)] == alone
