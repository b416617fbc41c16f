import itertools
import time

import torch
from torch import nn

from zcomm.testing import run_ranks
from zpartition.pipeline import (
    Action,
    Bar,
    PipelineModule,
    PipelineRunner,
    Recorder,
    Timeline,
    comparison_svg,
    one_f_one_b,
    simulate_measured,
)


def slowly(value: torch.Tensor) -> torch.Tensor:
    time.sleep(0.01)
    return value.sin()


def records() -> tuple[Timeline, float]:
    model = PipelineModule(
        [nn.Linear(2, 2), slowly, slowly], 2, loss_fn=lambda x, y: x.sum(), partition_method="uniform"
    )
    runner, recorder = PipelineRunner.over(model), Recorder(model)
    begun = time.perf_counter()
    runner.train_batch(iter([(torch.ones(1, 2), None)] * 3), 3, observe=recorder)
    return recorder.timeline(), time.perf_counter() - begun


def test_all_ranks_get_one_timeline_in_the_order_of_the_schedule() -> None:
    (first, lasted), (second, _) = run_ranks(records, 2)
    assert first == second
    assert first.bars[0].start == 0.0
    assert 0.03 < first.span < lasted + 1.0
    schedule = one_f_one_b(2, 3)
    for rank in range(2):
        bars = [bar for bar in first.bars if bar.rank == rank]
        assert tuple(bar.action for bar in bars) == schedule.ranks[rank]
        assert all(before.stop <= after.start for before, after in itertools.pairwise(bars))


def test_an_action_starts_after_its_inputs_were_sent() -> None:
    timeline = run_ranks(records, 2)[0][0]
    starts = {bar.action: bar.start for bar in timeline.bars}
    assert all(starts[Action.parse(f"1F{micro}")] >= starts[Action.parse(f"0F{micro}")] for micro in range(3))


def test_simulate_measured_uses_medians_and_free_messages() -> None:
    schedule = one_f_one_b(2, 2)
    lengths = {"0F": 1.0, "1F": 1.0, "0B": 2.0, "1B": 2.0}
    bars = tuple(
        Bar(rank, action, 10.0 * number, 10.0 * number + lengths[f"{action.stage}{action.kind.value}"])
        for rank, actions in enumerate(schedule.ranks)
        for number, action in enumerate(actions)
    )
    predicted = simulate_measured(schedule, Timeline(2, bars))
    assert predicted.bubble == 0.5  # (P-1)/M
    drawn = comparison_svg(predicted, Timeline(2, bars))
    assert drawn.count("<svg") == drawn.count("</svg>") == 1
    assert drawn.count("<rect") == 2 * len(bars)
    assert "predicted: 9000 ms, bubble 50.0% of the work" in drawn
