"""Silent, and the countdown of `bench_steps`."""

from zengine.step_report import StepReport
from zengine.telemetry import Silent
from zengine.telemetry.silent import Countdown, make_countdown

REPORT = StepReport(
    applied=True, reason="", step=1, applied_steps=1, skipped_steps=0, samples=8,
    loss=1.0, grad_norm=1.0, loss_scale=1.0, lr=(0.1,),
)  # fmt: skip


def test_it_takes_every_call_of_the_slot_and_writes_nothing(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    silent = Silent()
    silent.begin(None)
    with silent.paused(), silent.span("forward"), silent.span("forward"):
        silent.forward((), {})
    silent.report_tokens(3)
    silent.recomputes(1.0)
    silent.counted(1.0)
    silent.layers({"head": 1.0})
    silent.write_events([("a", 1.0, 1)])
    assert not silent.enabled
    silent.micro_step_end()
    silent.step_end(REPORT)
    silent.load_state_dict(silent.state_dict())
    silent.close()
    assert not silent.bench_done
    assert capsys.readouterr().out == ""
    assert list(tmp_path.iterdir()) == []


def test_it_counts_boundaries_for_a_bench_like_rank_0_does():
    silent = Silent(Countdown(2))
    silent.step_end(REPORT)
    silent.step_end(REPORT)
    assert silent.bench_done
    silent.load_state_dict({})
    assert not silent.bench_done


def test_it_is_over_after_the_warm_up_and_the_measured_steps():
    countdown = make_countdown(3, 2)
    seen = []
    for _ in range(6):
        countdown.step_end()
        seen.append(countdown.is_over)
    assert seen == [False] * 4 + [True] * 2
    countdown.reset()
    assert not countdown.is_over


def test_without_bench_steps_it_is_never_over():
    countdown = make_countdown(0, 2)
    for _ in range(5):
        countdown.step_end()
    assert not countdown.is_over
