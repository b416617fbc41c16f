"""What it takes to begin: `import zengine` over `import torch`, `initialize`, and the memory of both.

    .venv/bin/python packages/zengine/bench/startup.py [--repeats 5] [--deepspeed VENV/bin/python] [--json FILE]

Every figure is the median of fresh processes that import torch first and do nothing else; seconds of processor time,
which neighbours on a shared machine disturb less than wall time (they are the same on a quiet one), and megabytes of
resident memory.  A process before them leaves bytecode behind, as `pip install` does: to compile the sources anew in
each process, which PYTHONDONTWRITEBYTECODE makes Python do in a source tree, would be half of what is measured.  The
tiny model has 544 parameters, the other one 124 million, as GPT-2 small; its "copies" are what `initialize` adds at
most, over the bytes of weights and AdamW's states together (12 bytes a parameter in fp32).

Imports and commands: the minimum of fresh processes that take turns, over the minimum of `import torch` alone; with
--deepspeed, of the interpreter of an environment that has the real one, too.
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


CONFIG = """{"train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 8, "bf16": {"enabled": true},
"optimizer": {"type": "AdamW", "params": {"lr": 1e-3}}, "zero_optimization": {"stage": 1}}"""
ZENGINE = {
    "import torch": "import torch",
    "import zengine.deepspeed": "import torch, zengine.deepspeed",
    "and touch initialize, zero, comm": "import torch, zengine.deepspeed as d; d.initialize, d.zero, d.comm",
    "zengine --help": "run('--help')",
    "zengine check": "run('check c.json')",
    "zengine explain, 7B": "import torch; run('explain c.json --params 7e9 --world 64 --device cuda')",
    "zengine explain, 1T": "import torch; run('explain c.json --params 1e12 --world 1024 --device cuda')",
    "zengine plan, 7B": "import torch; run('plan c.json --params 7e9 --world 64 --memory 80GB --device cuda')",
    "zengine plan, 1T": "import torch; run('plan c.json --params 1e12 --world 1024 --memory 80GB --device cuda')",
}
DEEPSPEED_IMPORTS = {"(its) import torch": "import torch", "import deepspeed": "import torch, deepspeed"}
TIMED = """
import contextlib, io, sys, time
begin = time.process_time()
def run(line):
    from zengine.cli import main
    with contextlib.redirect_stdout(io.StringIO()), contextlib.suppress(SystemExit):
        main(line.split())
{code}
print("seconds", time.process_time() - begin)
"""


def least_seconds(deepspeed: str, repeats: int) -> dict[str, float]:
    """Return the least processor seconds of fresh processes for each import and command."""
    cases = {name: (sys.executable, code) for name, code in ZENGINE.items()}
    cases |= {name: (deepspeed, code) for name, code in DEEPSPEED_IMPORTS.items() if deepspeed}
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    found: dict[str, list[float]] = {name: [] for name in cases}
    with tempfile.TemporaryDirectory() as folder:
        environment["PYTHONPYCACHEPREFIX"] = folder
        (Path(folder) / "c.json").write_text(CONFIG, encoding="utf-8")
        for _ in range(1 + repeats):
            for name, (python, code) in cases.items():
                command = [python, "-c", TIMED.replace("{code}", code)]
                done = subprocess.run(
                    command, check=True, capture_output=True, text=True, env=environment, cwd=folder
                )
                found[name].append(float(done.stdout.split()[-1]))
    return {name: min(seconds[1:]) for name, seconds in found.items()}


def print_least(least: dict[str, float]) -> None:
    """Print the seconds of imports and commands over torch's import."""
    for name, seconds in least.items():
        base = least.get("(its) import torch", 0.0) if name == "import deepspeed" else least["import torch"]
        imports_torch = "import torch" not in name and seconds > base
        over = f", {seconds - base:6.3f} s over import torch" if imports_torch else ""
        print(f"{name:34} {seconds:7.3f} s{over}")


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--deepspeed", default="", help="an interpreter that can import the real DeepSpeed")
    parser.add_argument("--json", type=Path, help="write the numbers there")
    options = parser.parse_args()
    least = least_seconds(options.deepspeed, options.repeats)
    print_least(least)
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
        options.json.write_text(json.dumps({"least": least, "tiny": tiny, "large": large}, indent=1) + "\n")


if __name__ == "__main__":
    main()
