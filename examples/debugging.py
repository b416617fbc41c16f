"""A NaN, too little memory and a wrong order of calls: what the engine says.  (Hangs: hang.py.)

python examples/debugging.py
"""

import torch
from torch import nn

import zengine


class Fragile(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 8), nn.Linear(8, 1)

    def forward(self, x: torch.Tensor, poison: bool = False) -> torch.Tensor:
        y = self.first(x)
        return self.second(torch.sqrt(y.square() * 0.0) if poison else y)  # the derivative of sqrt at 0 is infinite


def main() -> list[str]:
    torch.manual_seed(0)
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_clipping": 1.0,
        "optimizer": {"type": "AdamW"},
        "fp16": {"enabled": True, "initial_scale_power": 8, "auto_cast": True},
    }
    engine, *_ = zengine.initialize(model=Fragile(), config=config)
    x, said = torch.ones(2, 4, device=engine.device), []

    for poison in (False, True, False):
        engine.backward(engine(x, poison).square().mean())
        report = engine.step()
        said.append(str(report))  # of the second step: which parameter, NaN or infinite, on which rank
        if report.nonfinite:
            said.append(f"the first gradient that is not finite: {report.nonfinite}")

    try:
        engine.step()  # without a backward
    except zengine.CallOrderError as error:
        said.append(str(error))

    try:
        engine(x[:1].expand(2**46, 4))  # a copy in half precision has 512 TiB
    except torch.OutOfMemoryError as error:
        said.append(str(error))
    engine.close()
    return said


if __name__ == "__main__":
    print("\n".join(main()))
