"""One CSV file a tag."""

import csv

from zengine.step_report import StepReport
from zengine.telemetry.sinks.csv import CsvSink
from zengine.telemetry.snapshot import Snapshot


def snapshot(samples, loss):
    return Snapshot(
        report=StepReport(
            applied=True,
            reason="",
            step=1,
            applied_steps=1,
            skipped_steps=0,
            samples=samples,
            loss=loss,
            grad_norm=1.0,
            loss_scale=1.0,
            lr=(0.1,),
        )
    )


def rows(path):
    with open(path, newline="") as file:
        return list(csv.reader(file))


def test_each_tag_has_a_file_with_samples_and_values(tmp_path):
    sink = CsvSink(tmp_path / "deep" / "run")
    sink.write(snapshot(32, 2.5))
    sink.write(snapshot(64, 0.1 + 0.2))
    table = rows(tmp_path / "deep" / "run" / "Train_Samples_train_loss.csv")
    assert table == [["step", "train_loss"], ["32", "2.5"], ["64", repr(0.1 + 0.2)]]
    assert rows(tmp_path / "deep" / "run" / "Train_Samples_lr.csv")[0] == ["step", "lr"]
    sink.close()


def test_a_file_that_is_there_is_continued_without_a_second_header(tmp_path):
    for samples in (32, 64):
        sink = CsvSink(tmp_path)
        sink.write(snapshot(samples, 1.0))
        sink.close()
        sink.close()
    assert [row[0] for row in rows(tmp_path / "Train_Samples_lr.csv")] == ["step", "32", "64"]


def test_not_a_number_is_written_as_such(tmp_path):
    sink = CsvSink(tmp_path)
    sink.write(snapshot(1, float("nan")))
    sink.close()
    assert rows(tmp_path / "Train_Samples_train_loss.csv")[1] == ["1", "nan"]


def test_scalars_of_the_program_have_files_too(tmp_path):
    sink = CsvSink(tmp_path)
    sink.write_events([("eval/loss", 1.5, 3)])
    sink.close()
    assert rows(tmp_path / "eval_loss.csv") == [["step", "loss"], ["3", "1.5"]]
