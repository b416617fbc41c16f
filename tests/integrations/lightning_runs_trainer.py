"""Runs of Lightning's Trainer for lightning_ranks.py: with DDPStrategy, and with DeepSpeedStrategy."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import deepspeed
import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import EMAWeightAveraging, LearningRateMonitor, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.strategies import DeepSpeedStrategy
from lightning.pytorch.utilities.deepspeed import convert_zero_checkpoint_to_fp32_state_dict
from lightning_parts import LR, loader, loss_of, net, schedule_of
from torch import Tensor, nn

ADAM = functools.partial(torch.optim.AdamW, lr=LR)


class Module(pl.LightningModule):
    """Regression whose layers are built in configure_model, as large models are at stage 3."""

    net: nn.Module

    def __init__(self, optimizer: Callable[..., torch.optim.Optimizer] = ADAM, root: Path | None = None) -> None:
        super().__init__()
        self.save_hyperparameters("root")
        self.make_optimizer = optimizer
        self.seen: list[float] = []  # losses
        self.rates: list[float] = []
        self.nbytes = 0  # memory of the first weight when the optimizer is made

    def configure_model(self) -> None:
        if not hasattr(self, "net"):
            self.net = net()

    def forward(self, batch: Tensor) -> Any:
        return self.net(batch)

    def training_step(self, batch: Tensor, index: int) -> Tensor:
        loss = loss_of(self(batch))
        self.seen.append(loss.item())
        self.rates.append(self.optimizers().param_groups[0]["lr"])  # type: ignore[union-attr]
        return loss

    def validation_step(self, batch: Tensor, index: int) -> None:
        self.log("val", loss_of(self(batch)), sync_dist=True)

    def test_step(self, batch: Tensor, index: int) -> None:
        self.log("test", loss_of(self(batch)), sync_dist=True)

    def configure_optimizers(self) -> Any:
        self.nbytes = next(self.parameters()).untyped_storage().nbytes()
        optimizer = self.make_optimizer(self.parameters())
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule_of(optimizer), "interval": "step"}}


class ManualModule(Module):
    """The same loop, written by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Tensor, index: int) -> None:  # type: ignore[override]
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        loss = loss_of(self(batch))
        self.seen.append(loss.item())
        self.manual_backward(loss)
        optimizer.step()


class Average(pl.Callback):
    """Moving average of the weights; its state has tensors, and a time that differs between ranks."""

    def __init__(self) -> None:
        self.average: dict[str, Tensor] = {}

    def on_train_batch_end(self, trainer: pl.Trainer, module: pl.LightningModule, *_: Any) -> None:
        with deepspeed.zero.GatheredParameters(list(module.parameters())):
            for name, weight in module.named_parameters():
                known = self.average.setdefault(name, weight.detach().clone())
                known.lerp_(weight.detach(), 0.5)

    def state_dict(self) -> dict[str, Any]:
        return {"average": self.average, "seconds": 0.1 * (1 + torch.distributed.get_rank())}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.average = state_dict["average"]


def trainer_of(strategy: Any, epochs: int = 1, devices: int = 2, **options: Any) -> pl.Trainer:
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, **options}
    return pl.Trainer(accelerator="cpu", devices=devices, strategy=strategy, max_epochs=epochs, **quiet)


def strategy_of(name: str) -> Any:
    """Return the strategy; at stage 3 one that shards small weights as well."""
    if name != "deepspeed_stage_3":
        return name
    strategy = DeepSpeedStrategy(stage=3, initial_scale_power=8)
    assert strategy.config is not None
    strategy.config["zero_optimization"]["stage3_param_persistence_threshold"] = 0
    return strategy


def fit(
    strategy: str, module: Module | None = None, micro_batch: int = 4, ckpt_path: Path | None = None, **options: Any
) -> tuple[pl.Trainer, Module]:
    trainer, module = (
        trainer_of(strategy_of(strategy), **{"enable_model_summary": False, **options}),
        module or Module(),
    )
    path = None if ckpt_path is None else str(ckpt_path)
    trainer.fit(module, loader(micro_batch), loader(micro_batch), ckpt_path=path, weights_only=False)
    return trainer, module


def whole_weights(module: Module) -> dict[str, Tensor]:
    with deepspeed.zero.GatheredParameters(list(module.parameters())):
        return {name: weight.detach().float().clone() for name, weight in module.named_parameters()}


# -- the runs ------------------------------------------------------------------------------------


def trained(strategy: str, **options: Any) -> dict[str, Any]:
    trainer, module = fit(strategy, **options)
    report = getattr(trainer.model, "last_report", None)
    return {
        "losses": module.seen,
        "rates": module.rates,
        "type": type(trainer.model).__name__,
        "nbytes": module.nbytes,
        "dtype": str(next(module.parameters()).dtype),
        "scale": None if report is None else report.loss_scale,
        "steps": trainer.global_step,
    }


def evaluated(strategy: str) -> list[float]:
    """Train, then test and predict with the same Trainer."""
    trainer, module = fit(strategy)
    tested = trainer.test(module, loader(), verbose=False)[0]["test"]
    predicted: Any = trainer.predict(module, loader())
    return [tested, torch.cat(predicted).sum().item()]


def accumulated() -> dict[str, list[float]]:
    """Losses with accumulation 2; "sgd/2" has half the learning rate."""
    kinds = {"adam": ADAM, "sgd": functools.partial(torch.optim.SGD, lr=0.2)}
    runs = {"ddp": "ddp", "ds": "deepspeed_stage_2"}
    found = {
        f"{kind} {name}": fit(strategy, Module(make), accumulate_grad_batches=2)[1].seen
        for kind, make in kinds.items()
        for name, strategy in runs.items()
    }
    half = functools.partial(torch.optim.SGD, lr=0.1)
    return {**found, "sgd/2 ddp": fit("ddp", Module(half), accumulate_grad_batches=2)[1].seen}


def clipped(strategy: str) -> list[float]:
    return fit(strategy, Module(functools.partial(torch.optim.SGD, lr=0.2)), gradient_clip_val=0.05)[1].seen


def by_hand(strategy: str) -> list[float]:
    return fit(strategy, ManualModule())[1].seen


def saved(folder: Path, stage: int) -> dict[str, Any]:
    """Save after each epoch, resume from the first, evaluate and convert the last."""
    callback = ModelCheckpoint(folder, filename="{epoch}", save_top_k=-1, monitor="val", every_n_epochs=1)
    average, strategy = Average(), f"deepspeed_stage_{stage}"
    options = {"epochs": 2, "enable_checkpointing": True, "enable_model_summary": True}
    options |= {"logger": CSVLogger(folder), "log_every_n_steps": 1}
    callbacks = [callback, LearningRateMonitor(), average]
    trainer, module = fit(strategy, Module(root=folder), callbacks=callbacks, **options)
    weights = whole_weights(module)
    deepspeed.comm.barrier()
    first, last = folder / "epoch=0.ckpt", folder / "epoch=1.ckpt"
    again = Average()
    resumed = fit(strategy, ckpt_path=first, epochs=2, callbacks=[again])[1]
    found = {
        "losses": module.seen,
        "resumed": resumed.seen,
        "rates": module.rates[-len(resumed.rates) :] == resumed.rates,
        "averages": all(torch.equal(again.average[name], average.average[name]) for name in weights),
        "best": callback.best_model_path.endswith(".ckpt"),
        "tested": trainer.test(module, loader(), verbose=False)[0]["test"],
        "restored": trainer_of(strategy_of(strategy)).test(Module(), loader(), ckpt_path=str(last), verbose=False)[0][
            "test"
        ],
    }
    if trainer.global_rank == 0:
        found["converted"] = converted(last, folder / "converted.pt", weights)
    deepspeed.comm.barrier()
    return found


def converted(checkpoint: Path, file: Path, weights: dict[str, Tensor]) -> list[bool]:
    """Convert by Lightning's function, and load the file as Lightning does."""
    state = convert_zero_checkpoint_to_fp32_state_dict(checkpoint, file)
    module = Module.load_from_checkpoint(file, weights_only=False, map_location="cpu")
    loaded = dict(module.named_parameters())
    return [
        state["epoch"] == 1,
        module.hparams["root"] == file.parent,
        all(torch.equal(loaded[name], value) for name, value in weights.items()),
    ]


def across_stages(folder: Path) -> list[float]:
    return fit("deepspeed_stage_3", ckpt_path=folder / "saved-1" / "epoch=0.ckpt", epochs=2)[1].seen


def from_whole_weights(folder: Path) -> dict[str, float]:
    """Load the file of a DDP run at stage 3, part by part."""
    trainer, module = fit("ddp")
    trainer.save_checkpoint(folder / "whole.ckpt")
    strategy = DeepSpeedStrategy(stage=3, load_full_weights=True)
    options = {"ckpt_path": str(folder / "whole.ckpt"), "verbose": False, "weights_only": False}
    loaded = trainer_of(strategy).test(Module(), loader(), **options)[0]["test"]
    return {"plain": trainer.test(module, loader(), verbose=False)[0]["test"], "loaded": loaded}


def averaged(folder: Path, strategy: str) -> dict[str, float]:
    """Lightning's own average, in place of the weights while it validates and at the end."""
    trainer, module = fit(strategy, callbacks=[EMAWeightAveraging(decay=0.5)])
    trainer.save_checkpoint(folder / strategy)
    return trainer.validate(module, loader(), verbose=False)[0]


def checks(folder: Path) -> dict[str, Callable[[], Any]]:
    """Return the runs by name, for two ranks."""
    stages = ("1", "2", "3", "2_offload", "3_offload")
    precisions = {"bf16-mixed": "deepspeed_stage_2", "16-mixed": "deepspeed_stage_3", "32-true": "deepspeed_stage_1"}
    both = ("ddp", "deepspeed_stage_3")
    partial = functools.partial
    return {
        "plain": partial(trained, "ddp"),
        **{f"stage {stage}": partial(trained, f"deepspeed_stage_{stage}") for stage in stages},
        **{name: partial(trained, strategy, precision=name) for name, strategy in precisions.items()},
        "accumulated": accumulated,
        **{f"{run.__name__} {name}": partial(run, name) for run in (evaluated, clipped, by_hand) for name in both},
        **{f"saved {stage}": partial(saved, folder / f"saved-{stage}", stage) for stage in (1, 2, 3)},
        "across stages": partial(across_stages, folder),
        "from whole weights": partial(from_whole_weights, folder),
        **{f"averaged {name}": partial(averaged, folder, name) for name in ("ddp", "deepspeed_stage_2")},
    }


def on_one_rank(folder: Path) -> dict[str, Callable[[], Any]]:
    """Return the run that resumes a checkpoint of two ranks on one, with the same batches."""
    checkpoint = folder / "saved-3" / "epoch=0.ckpt"
    options = {"micro_batch": 8, "ckpt_path": checkpoint, "epochs": 2, "devices": 1}
    return {"on one rank": lambda: fit("deepspeed_stage_2", **options)[1].seen}
