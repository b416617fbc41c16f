"""What it takes to begin: `import zengine` over `import torch`, `initialize`, and the memory of both.

    .venv/bin/python packages/zengine/bench/startup.py [--repeats 5] [--json FILE]

Every figure is the median of fresh processes that import torch first and do nothing else; seconds of processor time,
which neighbours on a shared machine disturb less than wall time (they are the same on a quiet one), and megabytes of
resident memory.  A process before them leaves bytecode behind, as `pip install` does: to compile the sources anew in
each process, which PYTHONDONTWRITEBYTECODE makes Python do in a source tree, would be half of what is measured.  The
tiny model has 544 parameters, the other one 124 million, as GPT-2 small; its "copies" are what `initialize` adds at
most, over the bytes of weights and AdamW's states together (12 bytes a parameter in fp32).
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

DEEPSPEED = {
    "import_s": 0.45,
    "initialize_s": 3.5,
    "initialize_mb": 127.0,
}  # 0.19.8 on two cores, torch's import apart

PROBE = """
import json, resource, sys, threading, time
import torch
from torch import nn
logging = __import__("logging"); logging.getLogger("zengine").setLevel(logging.ERROR)

def resident():
    return int(open("/proc/self/statm").read().split()[1]) * resource.getpagesize() / 1e6

torch_s, start_mb, begin = time.process_time(), resident(), time.process_time()
import zengine
import_s, import_mb = time.process_time() - begin, resident() - start_mb

class Peak(threading.Thread):
    highest, stopped = 0.0, False
    def run(self):
        while not self.stopped:
            self.highest = max(self.highest, resident())
            time.sleep(0.002)

width, layers = json.loads(sys.argv[1])
sizes = [width, 2 * width] * layers
model = nn.Sequential(*(nn.Linear(*sizes[i : i + 2]) for i in range(layers)))
numel = sum(param.numel() for param in model.parameters())
config = {"train_batch_size": 4, "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}}}
peak, before = Peak(daemon=True), resident()
peak.start()
begin = time.process_time()
engine, *_ = zengine.initialize(model=model, config=config)
initialize_s = time.process_time() - begin
peak.highest, peak.stopped = max(peak.highest, resident()), True
initialize_mb = resident() - before
engine.backward(engine(torch.ones(4, width)).square().mean())
engine.step()
begin = time.process_time()
zengine.initialize(model=nn.Linear(16, 32), config=config)
print(json.dumps({"torch_s": torch_s, "import_s": import_s, "import_mb": import_mb, "initialize_s": initialize_s,
    "initialize_mb": initialize_mb, "peak_mb": peak.highest - before, "again_s": time.process_time() - begin,
    "numel": numel, "after_step_mb": resident() - before}))
"""


def probe(width: int, layers: int, repeats: int) -> dict[str, float]:
    """Medians over fresh processes, after one that compiles."""
    command = [sys.executable, "-c", PROBE, json.dumps([width, layers])]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    runs = []
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(1 + repeats):
            environment["PYTHONPYCACHEPREFIX"] = folder
            done = subprocess.run(command, check=True, capture_output=True, text=True, env=environment)
            runs.append(json.loads(done.stdout.splitlines()[-1]))
    return {name: statistics.median(run[name] for run in runs[1:]) for name in runs[0]}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", type=Path, help="write the numbers there")
    options = parser.parse_args()
    tiny = probe(16, 1, options.repeats)
    large = probe(2790, 8, 1)
    states_mb = 12 * large["numel"] / 1e6
    print(f"Python {platform.python_version()}, {platform.machine()}; import torch alone: {tiny['torch_s']:.2f} s")
    rows = [
        ("import zengine", tiny["import_s"], tiny["import_mb"], DEEPSPEED["import_s"], "-"),
        ("initialize, 544 parameters", tiny["initialize_s"], tiny["initialize_mb"], DEEPSPEED["initialize_s"], 127),
        ("initialize, the next one", tiny["again_s"], 0.0, "-", "-"),
    ]
    for name, seconds, megabytes, theirs_s, theirs_mb in rows:
        print(f"{name:28} {seconds:7.3f} s {megabytes:8.1f} MB   (DeepSpeed: {theirs_s} s, {theirs_mb} MB)")
    print(
        f"initialize, {large['numel'] / 1e6:.0f}M parameters   {large['initialize_s']:7.3f} s, "
        f"at most {large['peak_mb']:.0f} MB more: {large['peak_mb'] / states_mb:.2f} copies of weights and states; "
        f"after a step {large['after_step_mb']:.0f} MB more"
    )
    if options.json:
        options.json.write_text(json.dumps({"tiny": tiny, "large": large}, indent=1) + "\n")


if __name__ == "__main__":
    main()
