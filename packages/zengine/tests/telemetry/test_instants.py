"""Moments; test_spans.py has those of a device."""

from zengine.telemetry.instants import DeviceInstants, HostInstants


def test_the_hosts_moments_are_readings_of_its_clock():
    readings = iter([1.0, 1.5])
    host = HostInstants(lambda: next(readings))
    interval = host.interval(host.now(), host.now())
    host.synchronize()
    assert interval.ms() == 500


def test_only_the_newest_event_is_waited_for_and_only_once():
    calls = []

    class Event:
        def __init__(self):
            self.number = len(calls)

        def record(self):
            calls.append(f"record {self.number}")

        def synchronize(self):
            calls.append(f"wait {self.number}")

    device = DeviceInstants(Event)
    device.now()
    device.now()
    device.synchronize()
    device.synchronize()
    assert calls == ["record 0", "record 1", "wait 1"]
