"""Runs of unmodified Lightning on one rank of several, with zengine as its `deepspeed`.

    python -m zengine.as_deepspeed lightning_ranks.py FOLDER        (by test_lightning.py, once for each rank)

Each run writes its results to an entry of FOLDER/<number of ranks>-<rank>.json, which the test file checks.
"""

from __future__ import annotations

import logging
import os
import sys
import warnings
from pathlib import Path

import lightning_runs_fabric
import lightning_runs_trainer
from lightning_parts import allow_cpus
from two_ranks import report


def main(folder: Path) -> None:
    allow_cpus()
    warnings.simplefilter("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    rank, ranks = os.environ["RANK"], os.environ["WORLD_SIZE"]
    if ranks == "1":
        checks = lightning_runs_trainer.on_one_rank(folder)
    else:
        checks = {**lightning_runs_trainer.checks(folder), **lightning_runs_fabric.checks(folder)}
    report(checks, folder / f"{ranks}-{rank}.json", sys.argv[2:])


if __name__ == "__main__":
    main(Path(sys.argv[1]))
