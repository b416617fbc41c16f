"""Direct preference optimization: raise the chosen answers over the rejected ones, against a frozen reference.

python examples/dpo.py
torchrun --nproc-per-node 2 examples/dpo.py

The reference is the same model without its adapters, so it costs no memory (Rafailov et al. 2023, equation 7).
"""

import torch
from torch.nn import functional as F
from transformers import LlamaConfig, LlamaForCausalLM

import zengine
from zengine.adapters import LoRAConfig, adapters_disabled, add_lora

VOCABULARY, PROMPT, ANSWER, BATCH, BETA = 32, 4, 4, 8, 0.5
TARGETS = ["q_proj", "v_proj", "o_proj", "up_proj", "down_proj", "lm_head"]
CONFIG = {
    "train_micro_batch_size_per_gpu": BATCH,
    "gradient_clipping": 1.0,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
    "zero_optimization": {"stage": 2},
}


def log_probs(model, ids: torch.Tensor) -> torch.Tensor:
    """Return the log-probability of each answer, (rows,)."""
    logits = model(input_ids=ids[:, :-1]).logits.float()
    each = torch.log_softmax(logits, -1).gather(-1, ids[:, 1:, None])[..., 0]
    return each[:, PROMPT - 1 :].sum(1)


def pairs(generator: torch.Generator) -> torch.Tensor:
    """Return (2 * rows, time) tokens: answers that count upwards are preferred to answers that count downwards."""
    last = torch.randint(VOCABULARY, (BATCH, 1), generator=generator)
    prompt = (last - torch.arange(PROMPT).flip(0)) % VOCABULARY
    steps = 1 + torch.arange(ANSWER)
    chosen, rejected = (last + steps) % VOCABULARY, (last - steps) % VOCABULARY
    return torch.cat([torch.cat([prompt, answer], 1) for answer in (chosen, rejected)])


def main(steps: int = 40) -> float:
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1, "num_attention_heads": 4}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=VOCABULARY, max_position_embeddings=16, **sizes))
    add_lora(model, LoRAConfig(lora_r=8, lora_alpha=16.0, target_mods=TARGETS))
    trained = [param for param in model.parameters() if param.requires_grad]
    engine, *_ = zengine.initialize(model=model, model_parameters=trained, config=CONFIG)
    draw = torch.Generator().manual_seed(engine.global_rank)
    for step in range(1, steps + 1):
        ids = pairs(draw).to(engine.device)
        with torch.no_grad(), adapters_disabled(engine.module):
            reference = log_probs(engine, ids)
        gain = log_probs(engine, ids) - reference
        margin = gain[:BATCH] - gain[BATCH:]
        engine.backward(-F.logsigmoid(BETA * margin).mean())
        report = engine.step()
        if engine.global_rank == 0 and step % 10 == 0:
            print(f"step {step}: loss {report.loss:.3f}, preferred {(margin > 0).float().mean():.0%}")
    engine.close()
    return report.loss


if __name__ == "__main__":
    main()
