"""`deepspeed.autotuning.autotuner`: the search behind `deepspeed --autotuning tune|run script.py ...`.

Problem.  DeepSpeed's tuner measures every stage and many micro-batches, since it knows neither what fits nor what a
step sends: 20 or more starts of a script that takes minutes to load.

Design.  One run of the script writes the sizes of the model: the planner's largest micro-batch and traffic of each
stage (features/trial_run.py).  Candidates that do not fit, or that the config's rules reject, are never started.
With `fast` the search runs the stage that sends least, from the largest micro-batch down while that is better, and
then the other stages at the best size, the one that sends least first, until a fifth of the candidates has run.
Without it all candidates run in the order of `tuner_type`, until `tuner_early_stopping` of them were no better.

The results folder has what users of DeepSpeed expect: a folder for each run, summary.txt, ds_config_optimal.json and
cmd_optimal.txt.  The latter two have no `autotuning` section, so the command trains on, where DeepSpeed's ends.

Rejected: a cost model that learns from the runs (a fifth of the candidates is too few to fit it).
"""

from __future__ import annotations

import json
import math
import random
import shlex
import shutil
import subprocess
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, final

from zengine.config import load
from zengine.config.keys.autotuning import Autotuning
from zengine.deepspeed.autotuning.candidates import STAGES, Candidate, ModelFacts, list_candidates, why_rejected
from zengine.deepspeed.autotuning.scheduler import Experiment, ResourceManager
from zengine.deepspeed.utils import logger
from zengine.progress import progress

__all__ = ["Autotuner", "ResourceManager", "run_autotuning"]

Measure = Callable[[Candidate], float | None]  # the figure of a run, larger is better; None: it failed
Record = tuple[Experiment, float | None, int]  # as DeepSpeed keeps them: experiment, figure, number of runs

_PROFILE = "profile_model_info"
_SHARE, _FEWEST = 5, 3  # a fast search runs a fifth of the candidates, but not fewer than three
_SMALLER_IS_BETTER = ("latency", "forward", "backward", "step")
_SEED = 0  # of tuner_type "random"


def run_autotuning(args: Any, active_resources: Mapping[str, Sequence[int]]) -> int:
    """Tune, write the results, and with `--autotuning run` train with the best config.

    Returns 0, or the status of the training; 1 if no run has succeeded.
    """
    tuner = Autotuner(args, active_resources)
    tuner.tune()
    tuner.print_tuning_results()
    tuner.write_optimal_config()
    if tuner.optimal_cmd is None:
        return 1
    return tuner.run_after_tuning() if args.autotuning == "run" else 0


@final
class Autotuner:
    """Searches the config of a script with the best throughput, or another metric of `autotuning.metric`."""

    def __init__(self, args: Any, active_resources: Mapping[str, Sequence[int]]) -> None:
        """Read the config that the script's arguments name, and make the folders.

        args: of the launcher.  active_resources: slots of each host.
        Raises ValueError for arguments without a config file, ConfigError for a wrong `autotuning` section.
        """
        self.args = args
        self.user_config = _user_config(args.user_args)
        self.autotuning_config = _section(self.user_config)
        keys = self.autotuning_config
        self.exps_dir = keys.exps_dir or "autotuning_exps"
        self.results_dir = keys.results_dir or "autotuning_results"
        _make_folders(Path(self.exps_dir), Path(self.results_dir), overwrite=keys.overwrite)
        self.exp_num_nodes = args.num_nodes if args.num_nodes > 0 else len(active_resources)
        slots = min(map(len, active_resources.values()))
        self.exp_num_gpus = args.num_gpus if args.num_gpus > 0 else slots
        self.rm = ResourceManager(
            args, list(active_resources), slots, self.results_dir, self.exps_dir, keys.arg_mappings
        )
        self.records: dict[str, list[Record]] = {}  # by "z<stage>"
        self.model_info: dict[str, Any] = {}
        self.num_candidates = 0
        self.optimal_cmd: list[str] | None = None
        self.optimal_ds_config: dict[str, Any] | None = None
        self.start_time = time.time()

    def metric(self) -> str:
        """Return the name of the figure that decides."""
        return self.autotuning_config.metric

    def fast_enabled(self) -> bool:
        """Return True if only a fifth of the candidates runs."""
        return self.autotuning_config.fast

    def get_model_num_params(self) -> int | None:
        """Return the parameters of the model, once it was profiled."""
        return self.model_info.get("num_params")

    def model_info_profile_run(self) -> dict[str, Any] | None:
        """Run the script up to its first forward; return the sizes of the model, None if that failed."""
        path = Path(self.results_dir, _PROFILE, "model_info.json")
        path.unlink(missing_ok=True)  # of an earlier search
        config = self._profile_config()
        config["autotuning"] = {"enabled": True, "model_info_path": str(path)}
        exp, error = self._run(_PROFILE, config)
        if path.exists():
            found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
            return found
        logger.error(
            "The script did not reach its first forward (%s): see stderr.log in %s", error, exp["result_dir"]
        )
        return None

    def _profile_config(self) -> dict[str, Any]:
        """Return a config of the smallest micro-batch, at the highest stage that the config's rules accept."""
        least, user = self.autotuning_config.min_train_micro_batch_size_per_gpu, _single_valued(self.user_config)
        num_ranks, configs = self.exp_num_nodes * self.exp_num_gpus, []
        for stage in reversed(STAGES):
            each = Candidate(
                stage=stage, micro_batch=least, accumulation=1, replicas=1, others={}, step_bytes=0
            ).config(user)
            del each["train_batch_size"]
            configs.append(each)
            if not why_rejected(_without_section(each), num_ranks, num_ranks, "cpu"):
                return each
        return configs[0]  # whose run says what is wrong

    def tune(self) -> None:
        """Run experiments; their figures are in `records`."""
        self.model_info = self.model_info_profile_run() or {}
        if not self.model_info:
            return
        keys, num_ranks = self.autotuning_config, self.exp_num_nodes * self.exp_num_gpus
        facts = ModelFacts.of(self.model_info, num_ranks)
        logger.info("The model has %s parameters.", f"{facts.num_params:,}")
        if facts.reason:
            logger.warning("What fits is not known, so runs decide: %s", facts.reason)
        candidates = self._accepted(list_candidates(self.user_config, keys, facts), num_ranks, facts.device)
        self.num_candidates = len(candidates)
        if keys.fast:
            search_fast(candidates, self._measure, keys.tuner_num_trials)
        else:
            search_all(
                _ordered(candidates, keys.tuner_type), self._measure, keys.tuner_num_trials, keys.tuner_early_stopping
            )

    def get_best_space_records(self) -> dict[str, Record]:
        """Return the best record of each stage, and of all as "global"; without those that have no figure."""
        found: dict[str, Record] = {}
        for space, records in self.records.items():
            usable = [record for record in records if record[1] is not None]
            if usable:
                exp, value, _ = max(usable, key=self._rank)
                found[space] = (exp, value, len(records))
        if found:
            found["global"] = max(found.values(), key=self._rank)
        return found

    def print_tuning_results(self) -> None:
        """Print the table of the results, and write it to summary.txt."""
        best = self.get_best_space_records()
        num_runs = sum(map(len, self.records.values()))
        rows = [("tuning_space", "num_experiments", "best_metric_val", "best_exp_name")]
        for space, (exp, value, count) in best.items():
            count = num_runs if space == "global" else count
            rows.append((space, str(count), f"{value:.6g}", exp["name"]))
        widths = [max(map(len, column)) for column in zip(*rows)]
        lines = ["| " + " | ".join(map(str.ljust, row, widths)) + " |" for row in rows]
        lines.insert(1, "|" + "|".join("-" * (width + 2) for width in widths) + "|")
        failed = "No run succeeded: see stderr.log in the folder of each run."
        none = "No config was run: none fits, or the log says why each is rejected."
        text = "\n".join(lines if best else [none if self.model_info and not self.num_candidates else failed])
        seconds = time.time() - self.start_time
        text += f"\n\nTuned in {seconds:.0f} s: {num_runs} runs of {self.num_candidates} candidates that fit."
        print(text)
        Path(self.results_dir, "summary.txt").write_text(text + "\n", encoding="utf-8")

    def write_optimal_config(self) -> None:
        """Write ds_config_optimal.json and cmd_optimal.txt, if a run has succeeded."""
        best = self.get_best_space_records().get("global")
        if best is None:
            return
        exp, folder = best[0], Path(self.results_dir)
        config = {key: value for key, value in exp["ds_config"].items() if key != "autotuning"}
        self.optimal_ds_config = config
        self.optimal_cmd = self.rm.command({**exp, "ds_config": config})
        (folder / "ds_config_optimal.json").write_text(json.dumps(config, indent=1) + "\n", encoding="utf-8")
        (folder / "cmd_optimal.txt").write_text(shlex.join(self.optimal_cmd) + "\n", encoding="utf-8")
        logger.info(
            "The best config is %s: see ds_config_optimal.json and cmd_optimal.txt in %s", exp["name"], folder
        )

    def run_after_tuning(self) -> int:
        """Train with the best config; returns the status, 1 without a config."""
        return 1 if self.optimal_cmd is None else subprocess.run(self.optimal_cmd, check=False).returncode

    def _accepted(self, candidates: Iterable[Candidate], num_ranks: int, device: str) -> list[Candidate]:
        """Return the candidates whose config is accepted; the others are logged with the reason."""
        found = []
        for each in candidates:
            reason = why_rejected(_without_section(each.config(self.user_config)), num_ranks, each.replicas, device)
            if reason:
                logger.info("%s is not run: %s", each.name, reason)
            else:
                found.append(each)
        return found

    def _measure(self, candidate: Candidate) -> float | None:
        """Run a candidate and record it."""
        config = candidate.config(self.user_config)
        section = dict(config.get("autotuning") or {})
        config["autotuning"] = {
            "enabled": True,
            **{key: section[key] for key in ("start_profile_step", "end_profile_step") if key in section},
        }
        with progress(f"trial {sum(map(len, self.records.values())) + 1}: {candidate.name}"):
            exp, error = self._run(candidate.name, config)
        value = None if error else _figure(exp, self.metric())
        self.records.setdefault(f"z{candidate.stage}", []).append((exp, value, 1))
        figure = "no figure" if value is None else f"{self.metric()} {value:.6g}"
        print(f"{candidate.name}: {error or figure}", flush=True)
        return None if value is None else self._rank((exp, value, 1))

    def _run(self, name: str, config: Mapping[str, Any]) -> tuple[Experiment, str | None]:
        """Run one experiment; return it, and the error if it failed."""
        path = Path(self.exps_dir, f"{name}.json")
        exp = {"name": name, "ds_config": config, "num_gpus": self.exp_num_gpus, "num_nodes": self.exp_num_nodes}
        path.write_text(json.dumps({**exp, "hostfile": self.args.hostfile}), encoding="utf-8")
        self.rm.clear()
        self.rm.schedule_experiments([str(path)])
        self.rm.run()
        (found,) = self.rm.finished_experiments.values()
        return found

    def _rank(self, record: Record) -> float:
        """Return the figure of a record, larger for a better one."""
        assert record[1] is not None
        return -record[1] if self.metric() in _SMALLER_IS_BETTER else record[1]


def search_fast(candidates: Sequence[Candidate], measure: Measure, num_trials: int) -> None:
    """Measure few candidates: the first one's stage from large micro-batches to small ones, then other stages.

    candidates: in the order of their traffic.
    """
    left = min(num_trials, max(_FEWEST, math.ceil(len(candidates) / _SHARE)))
    if not candidates:
        return
    stages = list(dict.fromkeys((each.stage, tuple(each.others.items())) for each in candidates))
    groups = {
        stage: sorted(
            (each for each in candidates if (each.stage, tuple(each.others.items())) == stage),
            key=lambda each: -each.micro_batch,
        )
        for stage in stages
    }
    best: tuple[float, Candidate] | None = None
    keep = 1 if len(stages) > 1 else 0  # runs for other stages
    for each in groups[stages[0]]:
        if left <= keep:
            break
        value, left = measure(each), left - 1
        if value is not None and (best is None or value > best[0]):
            best = value, each
        elif best is not None:
            break
    for stage in stages[1:]:
        if left <= 0:
            break
        size = groups[stage][0].micro_batch if best is None else best[1].micro_batch
        fitting = [each for each in groups[stage] if each.micro_batch <= size]
        if fitting:
            value, left = measure(fitting[0]), left - 1
            if value is not None and (best is None or value > best[0]):
                best = value, fitting[0]


def search_all(candidates: Iterable[Candidate], measure: Measure, num_trials: int, early_stopping: int) -> None:
    """Measure candidates in their order, until `early_stopping` of them in a row were not better; 0: all."""
    best, since = -math.inf, 0
    for count, each in enumerate(candidates):
        if count >= num_trials or (early_stopping and since >= early_stopping):
            return
        value = measure(each)
        better = value is not None and value > best
        best, since = (value if better and value is not None else best), (0 if better else since + 1)


def _ordered(candidates: Sequence[Candidate], tuner_type: str) -> list[Candidate]:
    """Return the candidates in the order of a tuner's type; `model_based` is that of their traffic."""
    if tuner_type == "random":
        return random.Random(_SEED).sample(candidates, len(candidates))
    if tuner_type == "gridsearch":
        return sorted(candidates, key=lambda each: (each.stage, -each.micro_batch))
    return list(candidates)


def _figure(exp: Experiment, metric: str) -> float | None:
    """Return a figure of a finished run; None if it wrote none."""
    path = Path(exp["ds_config"]["autotuning"]["metric_path"])
    if not path.exists():
        return None
    written: dict[str, float] = json.loads(path.read_text(encoding="utf-8"))
    return written.get("FLOPS_per_gpu" if metric == "flops" else metric)


def _user_config(user_args: Sequence[str]) -> dict[str, Any]:
    """Return the config that a script's arguments name."""
    for option in ("--deepspeed_config", "--deepspeed"):
        if option in user_args[:-1]:
            path = Path(user_args[user_args.index(option) + 1])
            if path.suffix == ".json" and path.is_file():
                found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
                return found
    raise ValueError(
        f"--autotuning needs the config of the script, whose arguments are {list(user_args)}: pass "
        "--deepspeed_config FILE.json (or --deepspeed FILE.json) with a file that exists"
    )


def _section(user: Mapping[str, Any]) -> Autotuning:
    """Return the section `autotuning`, checked; the config may lack it."""
    section = user.get("autotuning") or {}
    if not isinstance(section, Mapping):
        raise ValueError(f"autotuning = {section!r}: write an object, as in CONFIG.md")
    config = load({"train_micro_batch_size_per_gpu": 1, "autotuning": {**section, "enabled": True}})
    return config.settings.autotuning


def _single_valued(user: Mapping[str, Any]) -> dict[str, Any]:
    """Return the config with the first value of each list in `zero_optimization`."""
    zero = user.get("zero_optimization")
    if not isinstance(zero, Mapping):
        return dict(user)
    return {**user, "zero_optimization": {k: v[0] if isinstance(v, list) else v for k, v in zero.items()}}


def _without_section(config: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in config.items() if key != "autotuning"}


def _make_folders(exps: Path, results: Path, *, overwrite: bool) -> None:
    """Make the folders; earlier runs are removed if `overwrite`, and nothing else that the folders hold."""
    for folder in (exps, results):
        folder.mkdir(parents=True, exist_ok=True)
    if overwrite:
        for written in results.glob("*/exp.json"):
            shutil.rmtree(written.parent)
