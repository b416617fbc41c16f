"""`accelerate launch --use_deepspeed`, as a process, trains with zengine as its deepspeed, as torch's DDP does.

Two CPU ranks; see launched.py.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [
    pytest.mark.skipif(
        importlib.util.find_spec("accelerate") is None,
        reason="not installed: accelerate (requirements-dev.txt has it)",
    ),
]

SCRIPT = Path(__file__).with_name("launched.py")
ZENGINE = ("-m", "zengine.as_deepspeed")
AUTO = {
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "optimizer": {"type": "AdamW", "params": {"lr": "auto", "weight_decay": "auto"}},
    "scheduler": {
        "type": "WarmupLR",
        "params": dict.fromkeys(("warmup_min_lr", "warmup_max_lr", "warmup_num_steps"), "auto"),
    },
    "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
}


def test_a_launched_script_trains_saves_and_loads_as_ddp(tmp_path: Path):
    """The launcher's options reach the plugin, which fills "auto"; losses and rates are those of DDP."""
    config = tmp_path / "ds.json"
    config.write_text(json.dumps({**AUTO, "gradient_accumulation_steps": 2, "gradient_clipping": 0.1}))
    command = [sys.executable, *ZENGINE, "-m", "accelerate.commands.launch", "--use_deepspeed"]
    where = ["--num_processes", "2", "--num_machines", "1", "--main_process_port", "0", "--dynamo_backend", "no"]
    how = ["--mixed_precision", "no", "--deepspeed_config_file", str(config)]
    done = subprocess.run(
        [*command, *where, *how, *ZENGINE, str(SCRIPT), str(tmp_path)],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    for rank in (0, 1):
        found = json.loads((tmp_path / f"rank{rank}.json").read_text())
        assert found["launched"] == [3, 2, 0.1]
        assert found["ranks"] == [2, "cpu", "DeepSpeedEngine", "zengine.deepspeed"]
        for ours, plain in zip(found["losses"], found["plain"], strict=True):
            assert ours == pytest.approx(plain, abs=1e-6)
        assert found["again"] == found["losses"][4:]
    assert (tmp_path / "model/model.safetensors").exists()
