"""The search for a config against runs of all candidates: `deepspeed --autotuning` on CPU ranks.

    python packages/zengine/bench/search.py [--ranks 2] [--steps 20]

The launcher starts this very file, with a config, as the script that is tuned: AdamW on a model of 0.8 million
parameters.  Candidates are micro-batches of 1, 2, 4, 8 and 16 samples at each stage.  Printed are the tables of both
searches, and the throughput of the fast search's choice in the run of all candidates, over the best there.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

SIZES = (1, 2, 4, 8, 16)
LINE = re.compile(r"^(z\d\S+): throughput ([\d.e+]+)$", re.MULTILINE)


def train(argv: list[str]) -> None:
    """Train until the profile ends the process."""
    import torch
    from torch import nn

    import zengine.deepspeed as deepspeed

    parser = deepspeed.add_config_arguments(argparse.ArgumentParser())
    parser.add_argument("--local_rank", type=int)
    torch.manual_seed(0)
    torch.set_num_threads(1)
    blocks = [nn.Sequential(nn.Linear(128, 512), nn.GELU(), nn.Linear(512, 128)) for _ in range(4)]
    model = nn.Sequential(nn.Embedding(1000, 128), *blocks, nn.Linear(128, 1000))
    engine, *_ = deepspeed.initialize(args=parser.parse_args(argv), model=model)
    tokens = torch.randint(0, 1000, (engine.train_micro_batch_size_per_gpu(), 32))
    while True:
        loss = nn.functional.cross_entropy(engine(tokens).flatten(0, 1), tokens.flatten())
        engine.backward(loss)
        engine.step()


def search(folder: Path, num_ranks: int, num_steps: int, **keys: Any) -> dict[str, float]:
    """Run one search; return the throughput of each run by its name."""
    section = {"enabled": True, "start_profile_step": 5, "end_profile_step": 5 + num_steps, **keys}
    config = {
        "train_micro_batch_size_per_gpu": list(SIZES),
        "gradient_clipping": 1.0,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "autotuning": section,
    }
    (folder / "ds.json").write_text(json.dumps(config))
    options = ["--num_gpus", str(num_ranks), "--autotuning", "tune", __file__, "--deepspeed_config", "ds.json"]
    done = subprocess.run(
        [sys.executable, "-m", "zengine.deepspeed.launcher.runner", *options],
        cwd=folder,
        env={**os.environ, "DS_ACCELERATOR": "cpu"},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    print(done.stdout, flush=True)
    return {name: float(value) for name, value in LINE.findall(done.stdout)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--steps", type=int, default=20, help="profiled steps of a run")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        start = time.perf_counter()
        fast = search(Path(folder), given.ranks, given.steps)
        middle = time.perf_counter()
        whole = search(Path(folder), given.ranks, given.steps, fast=False, tuner_early_stopping=0)
        end = time.perf_counter()
    choice, best = max(fast, key=lambda name: fast[name]), max(whole, key=lambda name: whole[name])
    print(f"fast: {len(fast)} runs, {middle - start:.0f} s; all: {len(whole)} runs, {end - middle:.0f} s")
    print(f"{choice}, among all runs: {whole[choice] / whole[best]:.3f} of the best, {best}")


if __name__ == "__main__":
    if any(each.startswith("--local_rank") for each in sys.argv):
        train(sys.argv[1:])
    else:
        main()
