"""zckpt in a plain PyTorch loop: background saves, retention, and a resume that is exact to the bit.

python examples/zckpt_loop.py
"""

import tempfile

import torch

import zckpt


def run(folder: str, steps: int) -> torch.Tensor:
    """Train up to `steps`, from the newest checkpoint if there is one; return the weights."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Dropout(0.1), torch.nn.Linear(16, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    views, first = zckpt.views(model, optimizer), 0
    try:
        loaded = zckpt.load(folder, tensors=views)  # fills model and optimizer in place
    except zckpt.CheckpointNotFound:
        pass
    else:
        first = loaded.step
        zckpt.rng.restore(loaded.objects["rng"])

    with zckpt.AsyncSaver() as saver:
        for step in range(first + 1, steps + 1):
            x = torch.randn(32, 8)
            (model(x) - x.sum(1, keepdim=True)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            if step % 5 == 0:
                objects = {"rng": zckpt.rng.capture()}
                saver.save(folder, tensors=zckpt.views(model, optimizer), objects=objects, step=step)
    zckpt.prune(folder, zckpt.Retention(last=2))
    return torch.cat([param.detach().flatten() for param in model.parameters()])


def main() -> bool:
    with tempfile.TemporaryDirectory() as one, tempfile.TemporaryDirectory() as two:
        whole = run(one, 20)
        run(two, 10)  # "killed" here
        resumed = run(two, 20)
    same = torch.equal(whole, resumed)
    print(f"resumed and uninterrupted weights are {'equal, bit for bit' if same else 'DIFFERENT'}")
    return same


if __name__ == "__main__":
    main()
