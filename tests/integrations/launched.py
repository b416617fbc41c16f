"""An Accelerate script, as `accelerate launch --use_deepspeed` starts it, for test_accelerate_launch.py.

    launched.py FOLDER      writes FOLDER/rank<N>.json

It trains once with the DeepSpeed plugin that the launcher's options describe, and once with DistributedDataParallel.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import deepspeed
import torch
from accelerate import Accelerator, InitProcessGroupKwargs
from accelerate.utils import DummyOptim, DummyScheduler
from torch import nn
from torch.nn.parallel import DistributedDataParallel

RATE, WARM, STEPS, MICRO = 1e-2, 4, 4, 2


def model_of() -> nn.Module:
    torch.manual_seed(11)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))


def rows() -> torch.Tensor:
    return torch.randn(2 * 2 * STEPS * MICRO, 6, generator=torch.Generator().manual_seed(5))


def with_the_plugin(folder: Path) -> dict[str, Any]:
    """Train, save in the middle, continue; load, and continue again."""
    accelerator = Accelerator(kwargs_handlers=[InitProcessGroupKwargs(backend="gloo")])
    plugin = accelerator.state.deepspeed_plugin
    loader = torch.utils.data.DataLoader(rows(), batch_size=MICRO)
    model = model_of()
    optimizer = DummyOptim(model.parameters(), lr=RATE, weight_decay=0.01)
    scheduler = DummyScheduler(optimizer, total_num_steps=100, warmup_num_steps=WARM)
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    batches = list(loader)

    def steps(some: list[torch.Tensor]) -> list[list[float]]:
        seen = []
        for batch in some:
            with accelerator.accumulate(model):
                loss = model(batch).square().mean()
                accelerator.backward(loss)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            seen.append([loss.item(), scheduler.get_last_lr()[0]])
        return seen

    first = steps(batches[:STEPS])
    accelerator.save_state(str(folder / "state"))
    second = steps(batches[STEPS:])
    accelerator.load_state(str(folder / "state"))
    found = {
        "launched": [plugin.zero_stage, plugin.gradient_accumulation_steps, plugin.gradient_clipping],
        "ranks": [accelerator.num_processes, accelerator.device.type, type(model).__name__, deepspeed.__name__],
        "losses": first + second,
        "again": steps(batches[STEPS:]),
    }
    accelerator.save_model(model, str(folder / "model"))
    model.destroy()
    return found


def with_ddp() -> list[list[float]]:
    """Train with the same options, by torch alone."""
    model = DistributedDataParallel(model_of())
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=0.01)
    schedule = deepspeed.runtime.lr_schedules.WarmupLR(optimizer, 0.0, RATE, WARM)
    batches = rows().view(-1, 2, MICRO, 6)[:, int(os.environ["RANK"])]
    seen = []
    for index, batch in enumerate(batches):
        loss = model(batch).square().mean()
        (loss / 2).backward()
        if index % 2:
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        seen.append([loss.item(), optimizer.param_groups[0]["lr"]])
    return seen


def main(folder: Path) -> None:
    found = with_the_plugin(folder)
    found["plain"] = with_ddp()
    (folder / f"rank{os.environ['RANK']}.json").write_text(json.dumps(found))
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
