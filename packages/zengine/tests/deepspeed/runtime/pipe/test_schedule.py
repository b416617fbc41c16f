"""Instructions of DeepSpeed's schedules; the texts are those of DeepSpeed 0.19.8."""

from __future__ import annotations

import pytest

from zengine.deepspeed.runtime.pipe import schedule


def text(found: schedule.PipeSchedule) -> list[str]:
    return [
        " ".join(f"{each.name}{each.kwargs.get('buffer_id', '')}" for each in instructions) for instructions in found
    ]


def test_two_stages_train_two_micro_batches():
    assert text(schedule.TrainSchedule(micro_batches=2, stages=2, stage_id=0)) == [
        "LoadMicroBatch0 ForwardPass0",
        "SendActivation0",
        "LoadMicroBatch1 ForwardPass1",
        "RecvGrad0 SendActivation1 BackwardPass0",
        "",
        "RecvGrad1 BackwardPass1 ReduceTiedGrads ReduceGrads OptimizerStep",
    ]
    assert text(schedule.TrainSchedule(micro_batches=2, stages=2, stage_id=1)) == [
        "",
        "RecvActivation0 LoadMicroBatch0 ForwardPass0",
        "BackwardPass0",
        "SendGrad0 RecvActivation1 LoadMicroBatch1 ForwardPass1",
        "BackwardPass1",
        "SendGrad1 ReduceTiedGrads ReduceGrads OptimizerStep",
    ]


def test_two_stages_run_forward_only():
    assert text(schedule.InferenceSchedule(2, 2, 1)) == [
        "",
        "LoadMicroBatch0 RecvActivation0 ForwardPass0",
        "LoadMicroBatch1 RecvActivation1 ForwardPass1",
    ]
    assert text(schedule.InferenceSchedule(2, 2, 0))[1:] == [
        "LoadMicroBatch1 SendActivation0 ForwardPass1",
        "SendActivation1",
    ]


@pytest.mark.parametrize("stages", [1, 2, 3, 4])
@pytest.mark.parametrize("micro_batches", [1, 3, 8])
def test_every_message_has_a_partner_and_every_buffer_exists(stages: int, micro_batches: int):
    made = [schedule.TrainSchedule(micro_batches, stages, stage) for stage in range(stages)]
    names = [[each.name for instructions in found for each in instructions] for found in made]
    for stage, found in enumerate(made):
        assert names[stage].count("ForwardPass") == names[stage].count("BackwardPass") == micro_batches
        for instructions in found:
            for each in instructions:
                if isinstance(each, schedule.BufferOpInstruction):
                    assert 0 <= each.buffer_id < found.num_pipe_buffers()
    for stage in range(stages - 1):
        assert names[stage].count("SendActivation") == names[stage + 1].count("RecvActivation")
        assert names[stage].count("RecvGrad") == names[stage + 1].count("SendGrad")


def test_a_schedule_without_a_pipeline():
    found = schedule.DataParallelSchedule(2, 1, 0)
    assert text(found)[1] == "LoadMicroBatch0 ForwardPass0 BackwardPass0 ReduceGrads OptimizerStep"
    assert (found.num_micro_batches, found.num_stages, found.is_first_stage, found.is_last_stage) == (
        2,
        1,
        True,
        True,
    )
    assert repr(schedule.SendGrad(buffer_id=1)) == "SendGrad(buffer_id=1)"


def test_dual_pipe_v_lists_the_steps_of_both_phases():
    found = schedule.DualPipeVSchedule(4, 2, 1)
    assert found.num_pipe_buffers() == 8
    initials = [
        " ".join("".join(filter(str.isupper, each.name)) + str(each.kwargs.get("buffer_id", "")) for each in step)
        for step in found
    ]
    assert initials == [
        "RA0",
        "CPP FP0 RA1 CPP FP4 SA4",
        "CPP FP1 RA2 CPP FP5",
        "CPP FP2 SA5 RG4 CPP BP4 CPP FP6 BP0 SA6 SG0",
        "RA3 RG5 CPP FP3 BP5 CPP FP7 BP1 SA7 SG1",
        "RG6 CPP BP6 CPP BP2 SG2",
        "RG7 CPP BP7 CPP BP3 SG3",
        "CPP",
        "CPP",
        "CPP RTG RG OS",
    ]
    forward = [each for step in schedule.DualPipeVSchedule(4, 2, 0, forward_only=True) for each in step]
    assert {each.name for each in forward} == {
        *("LoadMicroBatch", "ForwardPass", "SendActivation", "RecvActivation", "CommitP2P")
    }
    assert [each.phase for each in forward if each.name == "ForwardPass"].count(1) == 4
    with pytest.raises(ValueError, match="needs 4 micro-batches or more, got 3"):
        schedule.DualPipeVSchedule(3, 2, 0)
