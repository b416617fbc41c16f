"""Lightning's Trainer with `strategy="deepspeed_stage_2"`, run by zengine.

python examples/lightning_trainer.py
"""

import tempfile

import zengine.as_deepspeed

zengine.as_deepspeed.install()  # before lightning is imported

import lightning.pytorch as pl  # noqa: E402
import lightning.pytorch.strategies.deepspeed as strategies  # noqa: E402
import torch  # noqa: E402

if not torch.cuda.is_available():  # DeepSpeedStrategy asks for CUDA; zengine does not need it
    strategies.CUDAAccelerator = pl.accelerators.CPUAccelerator
    strategies._validate_device_index_selection = lambda devices: None


class Regression(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.Tanh(), torch.nn.Linear(32, 1))
        self.losses: list[float] = []

    def training_step(self, batch: list[torch.Tensor], index: int) -> torch.Tensor:
        x = batch[0]
        loss = (self.net(x) - x.sum(1, keepdim=True)).square().mean()
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def main(folder: str = "") -> float:
    pl.seed_everything(0, verbose=False)
    module = Regression()
    data = torch.utils.data.TensorDataset(torch.randn(256, 8))
    trainer = pl.Trainer(
        default_root_dir=folder or tempfile.mkdtemp(),
        strategy="deepspeed_stage_2",
        devices=1,
        max_epochs=2,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, torch.utils.data.DataLoader(data, batch_size=16))
    return module.losses[-1] / module.losses[0]


if __name__ == "__main__":
    print(f"the loss fell to {main():.2f} of the first")
