"""A DeepSpeed script with one changed line: the import.

python examples/from_deepspeed.py
torchrun --nproc-per-node 2 examples/from_deepspeed.py
"""

import argparse

import torch

import zengine.deepspeed as deepspeed  # was: import deepspeed

CONFIG = {
    "train_batch_size": 16,
    "gradient_accumulation_steps": 2,
    "gradient_clipping": 1.0,
    "optimizer": {"type": "Adam", "params": {"lr": 1e-2}},
    "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 4}},
    "zero_optimization": {"stage": 2, "overlap_comm": True, "contiguous_gradients": True},
}


def main(folder: str = "runs/from_deepspeed") -> float:  # a folder that all ranks see
    parser = deepspeed.add_config_arguments(argparse.ArgumentParser())
    args = parser.parse_args([])
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.Tanh(), torch.nn.Linear(32, 1))
    data = [(x, x.sum(0, keepdim=True)) for x in torch.randn(256, 8)]
    engine, _, loader, _ = deepspeed.initialize(
        args=args, model=model, model_parameters=model.parameters(), training_data=data, config=CONFIG
    )
    losses = []
    for _ in range(4):
        for x, y in loader:
            loss = torch.nn.functional.mse_loss(engine(x.to(engine.device)), y.to(engine.device))
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())

    engine.save_checkpoint(folder, tag="end", client_state={"epoch": 4})
    before = deepspeed.utils.safe_get_full_fp32_param(model[0].weight).clone()
    torch.nn.init.zeros_(model[2].bias)
    path, client_state = engine.load_checkpoint(folder, tag="end")  # also at another world size and stage
    assert client_state["epoch"] == 4
    assert torch.equal(before, deepspeed.utils.safe_get_full_fp32_param(model[0].weight))
    if engine.global_rank == 0:
        print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f} after {engine.global_steps} steps; restored from {path}")
    engine.close()
    return losses[-1] / losses[0]


if __name__ == "__main__":
    main()
