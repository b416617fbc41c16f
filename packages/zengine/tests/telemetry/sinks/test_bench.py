"""The figures of a bench run."""

from zengine.step_report import StepReport
from zengine.telemetry.sinks.bench import Bench
from zengine.telemetry.snapshot import Snapshot
from zengine.telemetry.throughput import Rate
from zengine.telemetry.work import Fleet


def snapshot(step, ms):
    report = StepReport(
        applied=True, reason="", step=step, applied_steps=step, skipped_steps=0, samples=8 * step,
        loss=1.0, grad_norm=1.0, loss_scale=1.0, lr=(0.1,),
    )  # fmt: skip
    rate = Rate(samples=8, ms=ms, steps=1, tokens=100, flops=1e12, useful_flops=1e12) if ms else Rate()
    return Snapshot(
        report=report,
        rate=rate,
        fleet=Fleet(num_devices=2, peak_tflops=10),
        memory={"states": 2**20} if step == 3 else {"process": step * 2**20},
    )


def test_the_summary_is_printed_once_after_the_measured_steps(capsys):
    bench = Bench(10)
    for step, ms in enumerate([0, 0, *range(100, 1100, 100), 5, 5], start=1):
        bench.write(snapshot(step, ms))
        if step == 11:
            assert capsys.readouterr().out == ""
    bench.close()
    head, *rows = capsys.readouterr().out.splitlines()
    assert head == "bench: steps 3 to 12, 2 rank(s)"
    cells = {row[:36].strip(): row[36:].strip() for row in rows}
    assert cells == {
        "ms a step, median": "550.00",
        "ms a step, 90th percentile": "900.00",
        "ms a step, least and most": "100.00 .. 1000.00",
        "samples/s": "14.55",
        "tokens/s": "181.82",
        "TFLOPS of a device, by the formula": "0.91",  # 10e12 in 5.5 s on two devices
        "MFU, % of the device's peak": "9.09",
        "process, MiB": "12.0",
        "states, MiB": "1.0",  # told nine steps before
    }
