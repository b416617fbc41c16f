"""Reinforcement learning with group-relative advantages (GRPO): one set of weights trains and generates.

python examples/rollouts.py
torchrun --nproc-per-node 2 examples/rollouts.py

With `exact=True` the log-probabilities of a rollout are those of the trainer, bit for bit, so the first update of a
rollout needs no ratio.  The reward counts even tokens.
"""

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import zengine
from zengine.rollout import RolloutConfig, SamplingConfig

VOCABULARY, PROMPTS, GROUP, NEW = 32, 2, 8, 8
CONFIG = {
    "train_micro_batch_size_per_gpu": PROMPTS * GROUP,
    "gradient_clipping": 1.0,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
    "zero_optimization": {"stage": 2},
    "hybrid_engine": {"enabled": True, "max_out_tokens": 16},
}


def main(steps: int = 12) -> tuple[float, float]:
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=VOCABULARY, max_position_embeddings=32, **sizes))
    engine, *_ = zengine.initialize(model=model, config=CONFIG)
    prompts = [(1 + engine.global_rank, 2), (3, 5, 7)]
    means = []
    for step in range(1, steps + 1):
        sampling = SamplingConfig(max_new_tokens=NEW)
        rollout = engine.rollout(prompts, n=GROUP, sampling=sampling, config=RolloutConfig(exact=True))
        rewards = torch.tensor([sum(token % 2 == 0 for token in each.tokens) / NEW for each in rollout.samples])
        groups = rewards.view(PROMPTS, GROUP)
        advantages = ((groups - groups.mean(1, keepdim=True)) / (groups.std(1, keepdim=True) + 1e-4)).flatten()

        rows = [(*each.prompt, *each.tokens) for each in rollout.samples]
        ids = torch.zeros(len(rows), max(map(len, rows)), dtype=torch.int64)
        is_new = torch.zeros(ids.shape)
        for index, (row, each) in enumerate(zip(rows, rollout.samples)):
            ids[index, : len(row)] = torch.tensor(row)
            is_new[index, len(each.prompt) : len(row)] = 1
        engine.train()
        logits = engine(input_ids=ids.to(engine.device)).logits.float()
        found = torch.log_softmax(logits, -1)[:, :-1].gather(-1, ids[:, 1:, None])[..., 0]
        loss = -(found * is_new[:, 1:] * advantages[:, None]).sum() / is_new.sum()
        engine.backward(loss)
        engine.step()
        means.append(rewards.mean().item())
        if engine.global_rank == 0 and step % 4 == 0:
            print(f"step {step}: mean reward {means[-1]:.2f}")
    engine.close()
    return means[0], means[-1]


if __name__ == "__main__":
    main()
