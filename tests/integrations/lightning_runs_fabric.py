"""Runs of Lightning Fabric for lightning_ranks.py: with DDPStrategy, and with DeepSpeedStrategy."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import deepspeed
import torch
from lightning.fabric import Fabric
from lightning.fabric.strategies import DeepSpeedStrategy
from lightning_parts import LR, loader, loss_of, net, schedule_of

STEPS = 6


def strategy_of(stage: int, **options: Any) -> Any:
    """Return Fabric's strategy; its config has no `gradient_clipping`, so that of DeepSpeed, 1.0, is in force."""
    strategy = DeepSpeedStrategy(stage=stage, initial_scale_power=8, **options)
    assert strategy.config is not None
    strategy.config["zero_optimization"]["stage3_param_persistence_threshold"] = 0
    return strategy if stage else "ddp"


class Run:
    """Model, optimizer and schedule, set up; stage 0: DDP."""

    def __init__(self, stage: int, **options: Any) -> None:
        precision = options.pop("precision", None)
        self.fabric = Fabric(
            accelerator="cpu", devices=2, strategy=strategy_of(stage, **options), precision=precision
        )
        self.fabric.launch()
        with self.fabric.init_module():
            model = net()
        self.was_sharded = hasattr(next(model.parameters()), "ds_id")
        optimizer = torch.optim.AdamW(model.parameters(), lr=LR)
        self.schedule = schedule_of(optimizer)
        self.model, self.optimizer = self.fabric.setup(model, optimizer)
        self.stage, self.step = stage, 0

    def steps(self, last: int, *, is_local: bool = False) -> list[float]:
        """Run the steps up to `last`; is_local: the backward of every other micro-step is inside no_backward_sync."""
        found = []
        batches = list(self.fabric.setup_dataloaders(loader()))
        for batch in batches[self.step : last]:
            self.step += 1
            is_held = is_local and self.step % 2 == 1
            with self.fabric.no_backward_sync(self.model, enabled=is_held):
                loss = loss_of(self.model(batch))
                self.fabric.backward(loss / 2 if is_local else loss)
            if not is_held:
                if not self.stage:
                    self.fabric.clip_gradients(self.model, self.optimizer, max_norm=1.0)
                self.optimizer.step()
                self.optimizer.zero_grad()
                self.schedule.step()
            found.append(loss.item())
        return found

    def state(self) -> dict[str, Any]:
        return {"model": self.model, "optimizer": self.optimizer, "schedule": self.schedule, "step": self.step}


def trained(stage: int, **options: Any) -> dict[str, Any]:
    run = Run(stage, **options)
    found = {"losses": run.steps(STEPS), "rate": run.optimizer.param_groups[0]["lr"], "sharded": run.was_sharded}
    message = ""
    try:
        run.fabric.clip_gradients(run.model, run.optimizer, max_norm=1.0)
    except NotImplementedError as error:
        message = str(error)
    return {**found, "clip": message, "dtype": str(next(run.model.parameters()).dtype)}


def local(stage: int) -> list[float]:
    return Run(stage).steps(STEPS, is_local=True)


def saved(folder: Path, stage: int) -> dict[str, Any]:
    """Save within the run; continue; load the checkpoint into a new run, and continue that."""
    path = folder / f"fabric-{stage}"
    first = Run(stage)
    begun = first.steps(3)
    first.fabric.save(path, {**first.state(), "note": Path("a"), "seen": torch.tensor(begun)})
    continued = first.steps(STEPS)
    second = Run(stage)
    state = {**second.state(), "seen": None}
    rest = second.fabric.load(path, state)
    second.step = state["step"]
    return {
        "continued": continued,
        "loaded": second.steps(STEPS),
        "seen": state["seen"].tolist() == torch.tensor(begun).tolist(),
        "rest": {name: str(value) for name, value in rest.items()},
    }


def from_files(folder: Path) -> list[float]:
    """Load whole weights at stage 3: fabric.load_raw, and fabric.load with load_full_weights."""
    plain = net()
    plain[0].weight.data.fill_(0.5)
    raw, wrapped = folder / "raw.pt", folder / "wrapped.pt"
    probe, found = torch.ones(1, 8), [plain(torch.ones(1, 8)).sum().item()]
    for options in ({}, {"load_full_weights": True}):
        run = Run(3, **options)
        if run.fabric.global_rank == 0:
            torch.save(plain.state_dict(), raw)
            torch.save({"model": plain.state_dict(), "step": 7}, wrapped)
        deepspeed.comm.barrier()
        if options:
            state = {"model": run.model, "step": 0}
            run.fabric.load(wrapped, state)
            assert state["step"] == 7
        else:
            run.fabric.load_raw(raw, run.model)
        run.model.eval()
        with torch.no_grad():
            found.append(run.model(probe).sum().item())
        deepspeed.comm.barrier()
    return found


def without_optimizer() -> list[float]:
    """Set up the model alone, at stage 3."""
    fabric = Fabric(accelerator="cpu", devices=2, strategy=strategy_of(3))
    fabric.launch()
    with fabric.init_module():
        model = net()
    ready = fabric.setup(model)
    with torch.no_grad():
        return [ready(torch.ones(1, 8)).sum().item(), net()(torch.ones(1, 8)).sum().item()]


def checks(folder: Path) -> dict[str, Callable[[], Any]]:
    """Return the runs by name, for two ranks."""
    partial = functools.partial
    return {
        **{f"fabric {stage}": partial(trained, stage) for stage in (0, 1, 2, 3)},
        **{f"fabric {name}": partial(trained, 2, precision=name) for name in ("bf16-mixed", "16-mixed")},
        **{f"fabric local {stage}": partial(local, stage) for stage in (0, 2, 3)},
        **{f"fabric saved {stage}": partial(saved, folder, stage) for stage in (1, 2, 3)},
        "fabric from files": partial(from_files, folder),
        "fabric without optimizer": without_optimizer,
    }
