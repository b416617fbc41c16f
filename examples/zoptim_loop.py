"""zoptim in a plain PyTorch loop: 8-bit states, and clipping and skipping folded into the update.

python examples/zoptim_loop.py
"""

import torch

import zoptim


def main(steps: int = 150) -> tuple[float, int]:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.Tanh(), torch.nn.Linear(64, 1))
    optimizer = zoptim.AdamW(model.parameters(), lr=1e-2, state_dtype="8bit")  # 2 bytes an element instead of 8
    schedule = zoptim.WarmupCosineLR(optimizer, total_num_steps=steps, warmup_num_steps=5)
    for step in range(steps):
        x = torch.randn(64, 16)
        loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
        loss.backward()
        stats = optimizer.grad_stats()  # norm and finiteness, one read of the gradients
        optimizer.grad_scale = stats.norm.clamp(min=1.0)  # the update divides by it: a norm of at most 1
        optimizer.found_inf = stats.found_inf  # non-zero: the step changes nothing
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        if step == 0:
            first = loss.item()
    states = optimizer.state.values()
    num_bytes = sum(t.numel() * t.element_size() for state in states for t in state.values() if torch.is_tensor(t))
    print(f"loss {first:.2f} -> {loss.item():.3f}; states take {num_bytes:,} bytes; kernels: {zoptim.kernels().cpu}")
    return loss.item() / first, num_bytes


if __name__ == "__main__":
    main()
