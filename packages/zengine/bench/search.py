"""The search for a config against runs of all candidates: `deepspeed --autotuning` on CPU ranks.

    python packages/zengine/bench/search.py [--ranks 2] [--steps 20] [--rounds 1]

The launcher starts this very file, with a config, as the script that is tuned: AdamW on a model of 0.8 million
parameters.  Candidates are micro-batches of 1, 2, 4, 8 and 16 samples at each stage.  Printed are the tables of both
searches, and the throughput of the fast search's choice in the runs of all candidates, over the best there.  Of
several rounds, a fast search and a run of all candidates in turn, a candidate has the median of its throughputs.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
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
    parser.add_argument("--rounds", type=int, default=1, help="fast searches, and runs of all candidates")
    given = parser.parse_args()
    choices, found, seconds = [], defaultdict(list), [0.0, 0.0]
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(given.rounds):
            start = time.perf_counter()
            fast = search(Path(folder), given.ranks, given.steps)
            middle = time.perf_counter()
            whole = search(Path(folder), given.ranks, given.steps, fast=False, tuner_early_stopping=0)
            seconds = [seconds[0] + middle - start, seconds[1] + time.perf_counter() - middle]
            choices.append(max(fast, key=lambda name: fast[name]))
            for name, throughput in whole.items():
                found[name].append(throughput)
    medians = {name: statistics.median(throughputs) for name, throughputs in found.items()}
    best = max(medians, key=lambda name: medians[name])
    print(f"fast: {len(fast)} runs, {seconds[0] / given.rounds:.0f} s; ", end="")
    print(f"all: {len(whole)} runs, {seconds[1] / given.rounds:.0f} s; rounds: {given.rounds}")
    for name in sorted(medians, key=lambda name: -medians[name])[:6]:
        print(f"{name}: median {medians[name]:.0f}, of {', '.join(f'{each:.0f}' for each in found[name])}")
    for choice in choices:
        print(f"chosen: {choice}, {medians[choice] / medians[best]:.3f} of the best, {best}")


if __name__ == "__main__":
    if any(each.startswith("--local_rank") for each in sys.argv):
        train(sys.argv[1:])
    else:
        main()
