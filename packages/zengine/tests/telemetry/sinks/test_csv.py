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


TAGS = [
    "../../etc/passwd",
    "a/b",
    "a_b",
    "=cmd()",
    "x/=cmd()",
    "-x",
    ".hidden",
    "two\nlines",
    "n\0ul",
    "é",
    "x" * 400,
    "",
    "C:\\x",
]


def test_no_tag_leaves_the_folder_or_shares_a_file_or_is_a_formula(tmp_path):
    sink = CsvSink(tmp_path / "run")
    sink.write_events([(tag, 1.0, 5) for tag in TAGS])
    sink.close()
    files = sorted((tmp_path / "run").iterdir())
    assert len(files) == len(TAGS) - 1  # "a/b" and "a_b" are one file, as in DeepSpeed
    assert list(tmp_path.iterdir()) == [tmp_path / "run"]
    for path in files:
        assert len(path.name.encode()) < 250
        found = rows(path)
        assert found[0][0] == "step"
        assert not found[0][1].startswith(("=", "+", "-", "@"))
        assert found[1:] == [["5", "1.0"]] * (2 if path.name == "a_b.csv" else 1)
    assert (tmp_path / "run" / "é.csv").exists()
