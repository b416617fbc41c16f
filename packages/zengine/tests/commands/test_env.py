"""`zengine env`: every section says something, also for programs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from zengine.cli import main
from zengine.commands import env

TITLES = [
    *("versions", "processor", "memory", "GPUs", "transport between ranks", "optional packages", "variables"),
    "known problems",
]


def test_every_section_says_something(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["env"]) == 0
    out = capsys.readouterr().out
    assert [line for line in out.splitlines() if line and not line.startswith(" ")] == TITLES
    assert "optimizer kernels, cpu" in out


def test_programs_get_json_and_two_ranks_tell_what_carries_messages(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["env", "--json", "--try"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert list(found) == TITLES
    assert found["transport between ranks"]["two ranks here"].startswith(("shared memory (", "gloo ("))
    assert all(found[title] for title in TITLES)


def test_a_limit_of_the_container_is_a_known_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    files = {
        "/sys/fs/cgroup/memory.max": ["1073741824"],
        "/proc/meminfo": ["MemTotal: 4194304 kB", "MemAvailable: 1 kB"],
        "/proc/cpuinfo": ["model name : A fine one", "flags : sse2"],
    }
    monkeypatch.setattr(env, "_lines", lambda place: files.get(place, []))
    told = dict(env.problems())
    assert told["memory limit"] == "this container is killed beyond 1.00 GiB of 4.00 GiB"
    assert "no bf16 instructions" in told["bf16"]
    assert dict(env._processor())["model"] == "A fine one"


def test_what_cannot_be_read_is_left_open(tmp_path: Path) -> None:
    assert env._lines(str(tmp_path / "nothing")) == []
