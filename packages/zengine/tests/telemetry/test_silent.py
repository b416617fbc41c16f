"""The identity of the slot."""

from zengine.report import StepReport
from zengine.telemetry import Silent
from zengine.telemetry.countdown import Countdown

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
