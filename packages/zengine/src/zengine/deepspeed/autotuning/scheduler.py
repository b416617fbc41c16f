"""`deepspeed.autotuning.scheduler`: runs a script with several configs, each on free slots of some hosts.

    manager = ResourceManager(args, hosts=["localhost"], num_gpus_per_node=8, results_dir="results", exps_dir="exps",
                              arg_mappings={})
    manager.schedule_experiments(["exps/a.json", "exps/b.json"])
    manager.run()
    best, value = manager.parse_results("throughput")

An experiment is a JSON file with `name`, `num_nodes`, `num_gpus`, `hostfile` and `ds_config`.  It is started by
`zengine.deepspeed.launcher.runner` with its config as base64 text; its folder below `results_dir` has ds_config.json,
exp.json, cmd.txt, stdout.log and stderr.log.  The script writes its numbers as JSON to the file that the config names
as autotuning.metric_path.
"""

from __future__ import annotations

import base64
import json
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, final

import attrs

from zengine.deepspeed.utils import logger

__all__ = ["Node", "Reservation", "ResourceManager"]

_PAUSE_S = 0.2  # between looks at running experiments
_OPTIONS = ("--deepspeed_config", "--deepspeed")  # that a config follows; integrations use the second

_LAUNCHER = (sys.executable, "-m", "zengine.deepspeed.launcher.runner")

Experiment = dict[str, Any]


@final
@attrs.define(eq=False)
class Node:
    """A host and its free slots."""

    host: str
    max_slots: int
    idle_slots: list[int] = attrs.field(
        default=attrs.Factory(lambda self: list(range(self.max_slots)), takes_self=True)
    )

    def reserve_slots(self, slot_request: int) -> list[int] | None:
        """Take slots; None if fewer are free."""
        if len(self.idle_slots) < slot_request:
            return None
        taken, self.idle_slots = self.idle_slots[:slot_request], self.idle_slots[slot_request:]
        return taken

    def restore_slots(self, slots: Iterable[int]) -> None:
        """Give slots back."""
        self.idle_slots += slots


@final
@attrs.define(eq=False)
class Reservation:
    """Slots that an experiment has."""

    node: Node
    slots: list[int]

    def restore_slots(self) -> None:
        """Give the slots back."""
        self.node.restore_slots(self.slots)

    def desc(self) -> str:
        """Return the launcher's filter with its separator, "host:0,1@"."""
        return f"{self.node.host}:{','.join(map(str, sorted(self.slots)))}@"


@final
class ResourceManager:
    """Queue of experiments over hosts with equally many slots."""

    def __init__(
        self,
        args: Any,
        hosts: Iterable[str],
        num_gpus_per_node: int,
        results_dir: str | None,
        exps_dir: str | None,
        arg_mappings: Mapping[str, str] | None,
    ) -> None:
        """Make an empty queue.

        args: of the launcher: user_script, user_args, master_port.
        arg_mappings: key of a config -> option of the script that gets its value.
        """
        self.args, self.num_gpus_per_node = args, num_gpus_per_node
        self.results_dir, self.exps_dir = results_dir, exps_dir
        self.nodes = [Node(host, num_gpus_per_node) for host in hosts]
        self.arg_mappings = {key.strip(): option.strip() for key, option in (arg_mappings or {}).items()}
        self.experiment_count = 0
        self.clear()

    def clear(self) -> None:
        """Forget all experiments; running ones are terminated."""
        for process, _, reservations, _ in getattr(self, "running_experiments", {}).values():
            process.terminate()
            process.wait()
            _restore(reservations)
        self.experiment_queue: list[Experiment] = []
        self.running_experiments: dict[int, tuple[Any, Experiment, list[Reservation], float]] = {}
        self.finished_experiments: dict[int, tuple[Experiment, str | None]] = {}
        self.exp_paths: set[str] = set()

    def schedule_experiments(self, exp_paths: Iterable[str]) -> None:
        """Queue experiments by their files; those with a result on disk count as finished."""
        for path in exp_paths:
            if path in self.exp_paths:
                continue
            self.exp_paths.add(path)
            exp: Experiment = json.loads(Path(path).read_text(encoding="utf-8"))
            exp["exp_id"], self.experiment_count = self.experiment_count, self.experiment_count + 1
            folder = Path(self.results_dir or ".", exp["name"])
            exp["result_dir"] = str(folder)
            if isinstance(exp["ds_config"].get("autotuning"), dict):
                exp["ds_config"]["autotuning"]["metric_path"] = str(folder / "metrics.json")
            errors = folder / "stderr.log"
            if errors.exists() and "KeyboardInterrupt" not in errors.read_text(errors="replace"):
                found = _error_in(errors)
                if found or (folder / "metrics.json").exists():
                    logger.info("Skipping exp %s whose result already exists", exp["name"])
                    self.finished_experiments[exp["exp_id"]] = (exp, found)
                    continue
            self.experiment_queue.append(exp)

    def run(self) -> None:
        """Run the queue to its end.  Raises ValueError for an experiment that all hosts together cannot hold."""
        while self.experiment_queue:
            exp = self.experiment_queue[0]
            reservations = self.resource_request(exp)
            if reservations is not None:
                self.run_job(self.experiment_queue.pop(0), reservations)
            elif self.running_experiments:
                self.experiment_check()
            else:
                raise ValueError(
                    f"experiment {exp['name']!r} needs {exp['num_nodes']} hosts with {exp['num_gpus']} slots; there "
                    f"are {self.status() or 'none'}. Lower num_nodes or num_gpus"
                )
        while self.running_experiments:
            self.experiment_check()

    def resource_request(self, exp: Mapping[str, Any]) -> list[Reservation] | None:
        """Reserve num_gpus slots on each of num_nodes hosts; None if they are not free."""
        found: list[Reservation] = []
        for node in self.nodes:
            slots = node.reserve_slots(exp["num_gpus"]) if len(found) < exp["num_nodes"] else None
            if slots:
                found.append(Reservation(node, slots))
        if len(found) == exp["num_nodes"]:
            return found
        _restore(found)
        return None

    def run_job(self, exp: Experiment, reservations: list[Reservation]) -> None:
        """Start an experiment on its slots."""
        exp["master_port"] = self.args.master_port + exp["exp_id"]
        exp["launcher_args"] = [
            *("--hostfile", str(exp.get("hostfile", ""))),
            *_devices(reservations),
            *("--master_port", str(exp["master_port"])),
        ]
        exp["user_script"], exp["user_args"] = self.args.user_script, self._user_args(exp)
        command = self.command(exp)
        folder = Path(exp["result_dir"])
        folder.mkdir(parents=True, exist_ok=True)
        exp["ds_config_path"] = str(folder / "ds_config.json")
        (folder / "ds_config.json").write_text(json.dumps(exp["ds_config"]), encoding="utf-8")
        (folder / "exp.json").write_text(json.dumps(exp), encoding="utf-8")
        (folder / "cmd.txt").write_text(shlex.join(command) + "\n", encoding="utf-8")
        with (folder / "stdout.log").open("wb") as out, (folder / "stderr.log").open("wb") as errors:
            process = subprocess.Popen(command, stdout=out, stderr=errors)
        self.running_experiments[exp["exp_id"]] = (process, exp, reservations, time.time())

    def command(self, exp: Mapping[str, Any]) -> list[str]:
        """Return the command of an experiment that has run, with the config that it has now."""
        return [*_LAUNCHER, *exp["launcher_args"], exp["user_script"], *self._user_args(exp)]

    def _user_args(self, exp: Mapping[str, Any]) -> list[str]:
        """Return the script's arguments with the experiment's config, and the values that mapped options get."""
        config = exp["ds_config"]
        encoded = base64.urlsafe_b64encode(json.dumps(config).encode()).decode()
        given = list(self.args.user_args)
        option = next((each for each in _OPTIONS if each in given[:-1]), None)
        if option is None:
            raise ValueError(f"the script's arguments {given} have no config: pass --deepspeed_config FILE")
        given[given.index(option) + 1] = encoded
        for key, name in self.arg_mappings.items():
            value = _value_of(config, key)
            if value in (None, "auto"):
                continue
            if name in given[:-1]:
                given[given.index(name) + 1] = str(value)
            else:
                given += [name, str(value)]
        return given

    def experiment_check(self, pbar: Any = None) -> None:
        """Wait until a running experiment ends, and give back the slots of those that have.

        pbar: an object whose `update(count)` is called.
        """
        while True:
            ended = [key for key, (process, *_) in self.running_experiments.items() if process.poll() is not None]
            if ended or not self.running_experiments:
                break
            time.sleep(_PAUSE_S)
        for key in ended:
            process, exp, reservations, start = self.running_experiments.pop(key)
            _restore(reservations)
            folder = Path(exp["result_dir"])
            found = None
            if process.returncode or not (folder / "metrics.json").exists():  # words of a log alone are no error
                found = _error_in(folder / "stderr.log") or (
                    f"status {process.returncode}" * bool(process.returncode)
                )
            self.finished_experiments[key] = (exp, found or None)
            logger.info("Finished experiment %s in %.1f s", exp["name"], time.time() - start)
        if pbar is not None:
            pbar.update(len(ended))

    def status(self) -> str:
        """Return the hosts with their free slots."""
        return ", ".join(f"{node.host} ({len(node.idle_slots)} idle gpus)" for node in self.nodes)

    def parse_results(self, metric: str) -> tuple[Experiment | None, float | None]:
        """Return the experiment with the largest `metric`, and the value; None for what there is not."""
        best: tuple[Experiment | None, float | None] = (None, None)
        for exp, error in self.finished_experiments.values():
            if error:
                logger.info("experiment %s failed (%s): see stderr.log in %s", exp["name"], error, exp["result_dir"])
            with suppress(OSError, KeyError, ValueError):
                path = exp["ds_config"].get("autotuning", {}).get("metric_path", "")
                exp["results"] = json.loads(Path(path).read_text(encoding="utf-8"))
                value = float(exp["results"][metric])
                if not error and (best[1] is None or value > best[1]):
                    best = (exp, value)
            if best[1] is None:
                best = (exp, None)
        return best


def _devices(reservations: Sequence[Reservation]) -> tuple[str, str]:
    """Return the launcher's option for the slots; the first ones of this host are a number, which CPUs may exceed."""
    first = reservations[0]
    if (
        len(reservations) == 1
        and first.node.host == "localhost"
        and sorted(first.slots) == [*range(len(first.slots))]
    ):
        return "--num_gpus", str(len(first.slots))
    return "--include", "".join(each.desc() for each in reservations).rstrip("@")


def _restore(reservations: Iterable[Reservation]) -> None:
    for each in reservations:
        each.restore_slots()


def _error_in(path: Path) -> str | None:
    """Return what follows the first "error" of a file; None without one, as DeepSpeed judges."""
    if not path.exists():
        return f"{path.name} does not exist"
    found = re.search(r"(?:Error|error|ERROR)[: ]*(.*)", path.read_text(errors="replace"))
    return None if found is None else found[1] or "error"


def _value_of(config: Any, key: str) -> Any:
    """Return the first value of `key` in nested sections; None without one."""
    if not isinstance(config, Mapping):
        return None
    if key in config:
        return config[key]
    return next((found for each in config.values() if (found := _value_of(each, key)) is not None), None)
