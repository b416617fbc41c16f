"""DeepSpeed's loader for custom loops."""

from __future__ import annotations

from itertools import chain

import pytest

from zengine.deepspeed.runtime.dataloader import DeepSpeedDataLoader, RepeatingLoader


class Timer:
    started = 0

    def start(self) -> None:
        self.started += 1


def loader(**options: object) -> DeepSpeedDataLoader:
    given = {"pin_memory": False, "local_rank": 0, "tput_timer": None, "num_local_io_workers": 0, **options}
    return DeepSpeedDataLoader(list(range(10)), 2, **given)  # type: ignore[arg-type]


def test_ranks_share_the_samples() -> None:
    ranks = [loader(data_parallel_world_size=2, data_parallel_rank=rank, collate_fn=list) for rank in (0, 1)]
    batches = [list(each) for each in ranks]
    assert sorted(chain(*batches[0], *batches[1])) == list(range(10))
    assert list(ranks[0]) == batches[0]  # one order for all epochs
    assert len(ranks[0]) == len(batches[0]) == 3
    assert len(loader(data_parallel_world_size=2, data_parallel_rank=0, dataloader_drop_last=True)) == 2


def test_the_timer_starts_before_each_batch_and_the_loader_repeats() -> None:
    timer = Timer()
    one = loader(tput_timer=timer, data_sampler=range(4), collate_fn=list)
    with pytest.raises(TypeError, match="call iter"):
        next(one)
    repeated = RepeatingLoader(one)
    assert [next(repeated) for _ in range(3)] == [[0, 1], [2, 3], [0, 1]]
    assert timer.started >= 3


def test_one_process_for_several_devices_reads_for_all_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_SIZE", "2")  # devices of a CPU host
    one = loader(local_rank=-1, collate_fn=list, num_local_io_workers=None)
    assert (one.batch_size, one.device_count, len(one), one.num_local_io_workers) == (4, 2, 3, 4)
    assert sorted(chain(*loader(local_rank=-1, collate_fn=list))) == list(range(10))
    assert (loader().batch_size, loader(num_local_io_workers=None).num_local_io_workers) == (2, 2)


def test_a_curriculum_chooses_the_samples() -> None:
    metric = {"clustering_type": "single_cluster", "min_difficulty": 1, "max_difficulty": 5}
    metric |= {"schedule_type": "fixed_linear", "schedule_config": {"total_curriculum_step": 4, "difficulty_step": 1}}
    config = {
        "curriculum_learning": True,
        "data_efficiency": {
            "seed": 1,
            "data_sampling": {
                "num_epochs": 2,
                "curriculum_learning": {"enabled": True, "curriculum_metrics": {"any": metric}},
            },
        },
        "num_workers": 0,
        "data_parallel_group": None,
        "gradient_accumulation_steps": 1,
        "global_rank": 0,
    }
    one = loader(
        deepspeed_dataloader_config=config, collate_fn=list, data_parallel_world_size=1, data_parallel_rank=0
    )
    one.post_process_func = lambda batch, state: (batch, state["current_difficulties"]["any"])
    found = list(one)
    assert sorted(chain(*(batch for batch, _ in found))) == sorted(2 * list(range(10)))
    assert [difficulty for _, difficulty in found][:5] == [2, 3, 4, 5, 5]
