"""When a bench run is over."""

from zengine.telemetry.countdown import make_countdown


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
