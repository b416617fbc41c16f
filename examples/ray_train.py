"""Ray Train starts the ranks, the loop is the one of torchrun, and Ray gets its metrics and checkpoints.

python examples/ray_train.py FOLDER                            two CPU workers; needs ray[train]
torchrun --nproc-per-node 2 examples/ray_train.py FOLDER       the same loop without Ray

FOLDER is one that all hosts see.  After a failure Ray restarts the workers, which go on from the newest checkpoint.
"""

import contextlib
import os
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import zengine

EpochEnd = Callable[[float, int], None]  # called on all ranks with the last loss and the number of epochs
EPOCHS = 4
CONFIG = {
    "train_batch_size": 8,
    "gradient_clipping": 1.0,
    "optimizer": {"type": "AdamW", "params": {"lr": 0.03}},
    "zero_optimization": {"stage": 2},
    "checkpoint": {"keep": {"last": 1}},  # Ray copies the folder, so it has the newest only
}


def train(folder: str, resume: str = "", epoch_end: EpochEnd = lambda loss, epochs: None) -> float:
    """Train under any launcher; return the last loss.  resume: folder that has a checkpoint, or ""."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 1))
    data = [(x, x.sum(0, keepdim=True)) for x in torch.randn(64, 8)]
    engine, _, loader, _ = zengine.initialize(model=model, config=CONFIG, training_data=data)
    state = engine.load_checkpoint(resume)[1] if resume else {"epochs": 0}
    loss = float("nan")
    for epoch in range(state["epochs"], EPOCHS):
        for x, y in loader:
            engine.backward(nn.functional.mse_loss(engine(x.to(engine.device)), y.to(engine.device)))
            loss = engine.step().loss  # the mean over ranks
        engine.save_checkpoint(folder, client_state={"epochs": epoch + 1})
        epoch_end(loss, epoch + 1)
    engine.close()
    return loss


def ray_worker(config: dict[str, Any]) -> None:
    """Run the loop in a worker of Ray Train."""
    import ray.train

    is_first = ray.train.get_context().get_world_rank() == 0

    def report(loss: float, epochs: int) -> None:
        if epochs == config["die_at"] and not resume and not is_first:
            time.sleep(3)  # Ray has the reports of earlier epochs
            os._exit(1)  # as if the host had failed
        saved = ray.train.Checkpoint.from_directory(config["folder"]) if is_first else None
        ray.train.report({"loss": loss, "epochs": epochs, "resumed": bool(resume)}, checkpoint=saved)

    last = ray.train.get_checkpoint()
    with last.as_directory() if last else contextlib.nullcontext("") as resume:
        train(config["folder"], resume, report)


def main(folder: str, die_at: int = 0) -> dict[str, Any]:
    """Return Ray's last metrics.  die_at: the epoch (not the first) in which a worker dies; 0: none does."""
    import ray.train
    from ray.train.torch import TorchTrainer

    trainer = TorchTrainer(
        ray_worker,
        train_loop_config={"folder": os.path.join(folder, "checkpoints"), "die_at": die_at},
        scaling_config=ray.train.ScalingConfig(num_workers=2, use_gpu=torch.cuda.is_available()),
        run_config=ray.train.RunConfig(
            storage_path=os.path.join(folder, "ray"),
            name="run",
            checkpoint_config=ray.train.CheckpointConfig(num_to_keep=2),
            failure_config=ray.train.FailureConfig(max_failures=1),
        ),
    )
    result = trainer.fit()
    print(result.metrics, result.checkpoint)
    return dict(result.metrics)


if __name__ == "__main__":
    if "TORCHELASTIC_RUN_ID" in os.environ:
        train(sys.argv[1])
    else:
        main(os.path.abspath(sys.argv[1]))
