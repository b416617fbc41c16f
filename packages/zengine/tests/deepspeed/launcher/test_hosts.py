"""Hostfiles and filters; the cases are those of DeepSpeed's tests of its launcher."""

from __future__ import annotations

from pathlib import Path

import pytest

from zengine.deepspeed.launcher import hosts, runner

ONE = {"worker-0": [0, 1, 2, 3]}
TWO = {"worker-0": [0, 1, 2, 3], "worker-1": [0, 1, 2, 3]}


@pytest.mark.parametrize(
    ("given", "include", "exclude", "expected"),
    [
        (ONE, "", "", ONE),
        (ONE, "", "worker-0:1", {"worker-0": [0, 2, 3]}),
        (ONE, "", "worker-0:1,1", {"worker-0": [0, 2, 3]}),
        (ONE, "worker-0:1,1", "", {"worker-0": [1]}),
        (ONE, "worker-0:1@worker-0:0,1", "", {"worker-0": [0, 1]}),
        (ONE, "worker-0", "", ONE),
        (TWO, "worker-1@worker-0:0,2", "", {"worker-0": [0, 2], "worker-1": [0, 1, 2, 3]}),
        (TWO, "", "worker-0:0,1,2,3@worker-1:0", {"worker-1": [1, 2, 3]}),
    ],
)
def test_a_filter_selects_devices(
    given: dict[str, list[int]], include: str, exclude: str, expected: dict[str, list[int]]
):
    found = runner.parse_resource_filter(given, include_str=include, exclude_str=exclude)
    assert list(found.items()) == list(expected.items())


@pytest.mark.parametrize("text", ["jeff", "worker-1:4", "worker-0:", "worker-0@worker-1:0@5"])
def test_what_there_is_not_is_rejected(text: str):
    for include, exclude in ((text, ""), ("", text)):
        with pytest.raises(ValueError, match=r"jeff|No slot|not a host|'5' not found"):
            runner.parse_resource_filter(TWO, include, exclude)
    with pytest.raises(ValueError, match="mutually exclusive"):
        runner.parse_resource_filter({}, "A", "B")


def test_a_hostfile_is_read_and_a_bad_one_is_not(tmp_path: Path):
    text = "\n  worker-1 slots=2\n\n  localhost slots=1\n  123.23.12.10 slots=2\n#worker-1 slots=3\n"
    (tmp_path / "hosts").write_text(text)
    assert runner.fetch_hostfile(str(tmp_path / "hosts")) == {"worker-1": 2, "localhost": 1, "123.23.12.10": 2}
    assert runner.fetch_hostfile(str(tmp_path / "none")) is None
    for bad in ("a slots=2\na slots=1", "localhost slots=", "localhost =3", "localhost", "", "#a slots=1"):
        with pytest.raises(ValueError, match="Hostfile"):
            runner._parse_hostfile(bad.splitlines())


def test_numbers_of_hosts_and_devices():
    assert runner.parse_inclusion_exclusion({"a": 2, "b": 1}, "b", "") == {"b": [0]}
    assert runner.apply_num_nodes_and_gpus(TWO, 1, 2) == {"worker-0": [0, 1]}
    assert hosts.decode_world_info(runner.encode_world_info(TWO)) == TWO
    with pytest.raises(ValueError, match="world_info can not be None"):
        hosts.decode_world_info("None")


@pytest.mark.parametrize("filter_option", ["-i", "-e"])
@pytest.mark.parametrize("numbers", ["--num_nodes 1", "--num_gpus 1", "--num_nodes 1 --num_gpus 1"])
def test_numbers_and_filters_exclude_each_other(filter_option: str, numbers: str):
    with pytest.raises(ValueError, match="Cannot specify num_nodes/gpus with include/exclude"):
        runner.main(f"{numbers} {filter_option} localhost foo.py".split())


def test_options_of_the_command():
    found = runner.parse_args(["--num_gpus", "2", "--module", "pkg.train", "--deepspeed", "--epochs", "3"])
    assert (found.num_gpus, found.module, found.user_script) == (2, True, "pkg.train")
    assert found.user_args == ["--deepspeed", "--epochs", "3"]
    for wrong in ("--autotuning test foo.py", "--autotuning"):
        with pytest.raises(SystemExit):
            runner.parse_args(wrong.split())
    with pytest.raises(ValueError, match="--autotuning needs the config of the script"):
        runner.main(["--autotuning", "tune", "foo.py"])
    with pytest.raises(ValueError, match="Num nodes is >1"):
        runner.main(["--num_nodes", "2", "foo.py"])
