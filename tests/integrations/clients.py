"""Runs of unmodified TRL, PEFT, Trainer and Accelerate scripts on two ranks, with zengine as their `deepspeed`.

    python -m zengine.as_deepspeed clients.py FOLDER        (by test_clients.py, once for each rank)

Each run writes its results to an entry of FOLDER/rank<N>.json, which the test file checks.
"""

from __future__ import annotations

import functools
import importlib.metadata
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.update({"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "HF_HUB_DISABLE_PROGRESS_BARS": "1"})
os.environ["HF_DATASETS_DISABLE_PROGRESS_BARS"] = "1"

import clients_accelerate
import clients_peft
import clients_published
import clients_trl
from two_ranks import report


def main(folder: Path) -> None:
    importlib.metadata.metadata = functools.cache(
        importlib.metadata.metadata
    )  # Accelerate and PEFT call it each step
    rank = os.environ["RANK"]
    saved = folder / "saved"
    clients_trl.save_models(saved)
    clients_peft.write_configs(folder / "peft")
    checks: dict[str, Callable[[], dict[str, Any]]] = {
        **{f"trl-{make.__name__}": functools.partial(clients_trl.compare, folder, saved, make)
           for make in clients_trl.TRAINERS},
        **{f"peft-{name}": functools.partial(clients_peft.train_adapter, folder / "peft", name)
           for name in clients_peft.ADAPTERS},
        "peft-loaded": functools.partial(clients_peft.load_adapter, folder / "peft"),
        **clients_published.checks(folder / "published"),
        **clients_accelerate.checks(folder / "accelerate"),
    }  # fmt: skip
    report(checks, folder / f"rank{rank}.json", sys.argv[2:])


if __name__ == "__main__":
    main(Path(sys.argv[1]))
