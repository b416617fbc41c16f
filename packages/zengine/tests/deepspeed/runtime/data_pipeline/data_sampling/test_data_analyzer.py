"""Metrics of a dataset, from functions of batches: the files are those of DeepSpeed 0.19.8."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import zcomm
from zcomm.testing import run_ranks
from zengine.data.metrics import MetricIndex
from zengine.deepspeed.runtime.data_pipeline.data_sampling import data_analyzer
from zengine.deepspeed.runtime.data_pipeline.data_sampling.data_analyzer import DataAnalyzer, DistributedDataAnalyzer
from zengine.deepspeed.runtime.data_pipeline.data_sampling.data_sampler import DeepSpeedDataSampler
from zengine.deepspeed.runtime.data_pipeline.data_sampling.indexed_dataset import MMapIndexedDataset

GOLDEN = json.loads((Path(__file__).parents[3] / "golden/deepspeed_0_19_8.json").read_text())["analyzer"]


def dataset() -> list[torch.Tensor]:
    rng = random.Random(3)
    return [torch.full((length,), length) for length in (rng.randrange(1, 30) for _ in range(60))]


def lengths(batch: list[torch.Tensor]) -> torch.Tensor:
    return torch.tensor([len(sample) for sample in batch])


def totals(batch: list[torch.Tensor]) -> torch.Tensor:
    return torch.tensor([sum(map(len, batch)), len(batch)])


def settings(folder: Path) -> dict[str, Any]:
    return {
        "batch_size": 7,
        "metric_names": ["len", "tot"],
        "metric_functions": [lengths, totals],
        "metric_types": ["single_value_per_sample", "accumulate_value_over_samples"],
        "save_path": folder,
        "collate_fn": list,
    }


def files_of(folder: Path) -> dict[str, Any]:
    found = {}
    for name in GOLDEN:
        data = MMapIndexedDataset(str(folder / name))
        found[name] = [data.dtype.__name__, [data[place].tolist() for place in range(len(data))]]
    return found


@pytest.mark.parametrize(("workers", "threads"), [(1, 1), (2, 1), (1, 2)])
def test_files_are_those_of_deepspeed(workers: int, threads: int, tmp_path: Path) -> None:
    shared = settings(tmp_path) | {"num_workers": workers, "num_threads": threads}
    analyzers = [DataAnalyzer(dataset(), worker_id=worker, **shared) for worker in range(workers)]
    for analyzer in analyzers:
        analyzer.run_map()
    analyzers[0].run_reduce()
    assert files_of(tmp_path) == GOLDEN
    stem = tmp_path / "len" / "len"
    index = MetricIndex.load(f"{stem}_index_to_sample", f"{stem}_index_to_metric")
    assert index.count_by_value(5) == 9


def _distributed(folder: Path) -> None:
    rank = zcomm.group_rank()
    DistributedDataAnalyzer(
        dataset(), num_workers=2, worker_id=rank, device="cpu", **settings(folder)
    ).run_map_reduce()


def test_ranks_measure_together(tmp_path: Path) -> None:
    run_ranks(_distributed, 2, tmp_path)
    assert files_of(tmp_path) == GOLDEN


def test_workers_that_cannot_wait_for_each_other_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data_analyzer, "is_initialized", lambda: False)
    with pytest.raises(RuntimeError, match=r"2 workers must wait .* call deepspeed.init_distributed\(\) first"):
        DataAnalyzer(dataset(), num_workers=2, **settings(tmp_path)).run_map_reduce()


def test_wrong_metrics_are_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"metric_types has \['sum'\]; allowed are single_value"):
        DataAnalyzer([], metric_types=["sum"])
    with pytest.raises(ValueError, match="equally many members"):
        DataAnalyzer([], metric_names=["a"])
    given = settings(tmp_path)
    with pytest.raises(TypeError, match=r"metric 'len' has dtype torch\.int64, but metric_dtypes says torch\.int32"):
        DataAnalyzer(dataset(), **given, metric_dtypes=[torch.int32, torch.int64]).run_map()
    with pytest.raises(TypeError, match="metric 'len' returned a int, not a tensor"):
        DataAnalyzer(dataset(), **(given | {"metric_functions": [len, len]})).run_map()
    part = DataAnalyzer(dataset(), num_workers=2, **given)
    part.run_map()
    with pytest.raises(FileNotFoundError):
        part.run_reduce()


def test_a_sampler_reads_the_files_and_holds_difficult_samples_back(tmp_path: Path) -> None:
    DataAnalyzer(dataset(), **settings(tmp_path)).run_map_reduce()
    sizes, stem = [len(sample) for sample in dataset()], tmp_path / "len" / "len"
    metric = {
        "index_to_sample_path": f"{stem}_index_to_sample",
        "index_to_metric_path": f"{stem}_index_to_metric",
        "difficulty_type": "value",
        "min_difficulty": 10,
        "max_difficulty": 30,
        "schedule_type": "fixed_linear",
        "schedule_config": {"total_curriculum_step": 4, "difficulty_step": 1},
    }
    section = {"enabled": True, "data_cluster_path": "unused", "curriculum_metrics": {"len": metric}}
    config = {"seed": 5, "data_sampling": {"num_epochs": 1, "curriculum_learning": section}}

    def sampler(rank: int) -> DeepSpeedDataSampler:
        return DeepSpeedDataSampler(config, 60, 3, rank, 2, None, 1, rank)

    one, two = sampler(0), sampler(1)
    pairs = list(zip(one, two))
    assert len(pairs) == len(one) // 6 == 10
    limits = [15, 20, 25, 30]
    for limit, (mine, other) in zip(limits, pairs):
        assert max(sizes[number] for number in (*mine, *other)) <= limit
        assert len({*mine, *other}) == 6
    assert one.state_dict()["current_difficulties"] == {"len": 30}
    again, halfway = sampler(0), sampler(0)
    for _, batch in zip(range(4), halfway):
        assert len(batch) == 3
    again.load_state_dict(halfway.state_dict())
    assert list(again) == [mine for mine, _ in pairs[4:]]
    assert one.get_start_end_idx(4) == (0, 2)
    with pytest.raises(ValueError, match=r"data_parallel_rank is 2, but must be in 0\.\.1"):
        sampler(2)
    metric["dificulty_type"] = "value"
    with pytest.raises(ValueError, match=r"unknown keys \['dificulty_type'\]"):
        sampler(0)
    assert np.mean(sizes) > 10
