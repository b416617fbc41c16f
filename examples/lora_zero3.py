#!/usr/bin/env python3
"""Fine-tune a Transformers model with LoRA at ZeRO stage 3: the base is sharded, a small part is trained.

    torchrun --nproc_per_node 2 examples/lora_zero3.py
    torchrun --nproc_per_node 2 examples/lora_zero3.py --quantize nf4 --output adapters

The model is a tiny Llama with random weights, so nothing is downloaded; `AutoModelForCausalLM.from_pretrained` gives
a real one.  It learns to count: after each token comes its successor.  `--quantize` stores the frozen base in 4 or 8
bits (QLoRA).  The adapters are saved in PEFT's format.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

import zengine
from zengine.adapters import LoRAConfig, adapters_disabled, add_lora, merged_weights, quantize_base, save_adapters

VOCABULARY, LENGTH, BATCH = 64, 32, 8
TARGETS = ["q_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "lm_head"]
CONFIG = {
    "train_micro_batch_size_per_gpu": BATCH,
    "gradient_clipping": 1.0,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.0}},
    "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 5, "warmup_max_lr": 1e-2}},
    "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 1000},
}


def make_model() -> LlamaForCausalLM:
    """Return the base, the same on every rank."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4}
    return LlamaForCausalLM(LlamaConfig(vocab_size=VOCABULARY, max_position_embeddings=LENGTH, **sizes))


def batches(num_steps: int, rank: int) -> Iterator[Tensor]:
    """Yield (batch, length) int64 tokens that count up from a random one; ranks see different ones."""
    generator = torch.Generator().manual_seed(rank)
    for _ in range(num_steps):
        first = torch.randint(VOCABULARY, (BATCH, 1), generator=generator)
        yield (first + torch.arange(LENGTH)) % VOCABULARY


def main(arguments: Sequence[str] | None = None) -> tuple[float, float]:
    """Train; return the last loss, and that of the base alone."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--rank", type=int, default=8, help="of the adapters")
    parser.add_argument("--quantize", default="", help="format of the frozen base, such as nf4, int4 or int8")
    parser.add_argument("--output", default="", help="folder for the adapters")
    options = parser.parse_args(arguments)

    model = make_model()
    if options.quantize:
        quantize_base(model, options.quantize, TARGETS)
    add_lora(model, LoRAConfig(lora_r=options.rank, lora_alpha=16.0, target_mods=TARGETS))
    trained = [param for param in model.parameters() if param.requires_grad]
    engine, *_ = zengine.initialize(model=model, model_parameters=trained, config=CONFIG)
    if engine.global_rank == 0:
        total = sum(param.numel() for param in model.parameters())
        print(f"{sum(param.numel() for param in trained):,} of {total:,} parameters are trained")

    for step, ids in enumerate(batches(options.steps, engine.global_rank), start=1):
        ids = ids.to(engine.device)
        engine.backward(engine(input_ids=ids, labels=ids).loss)
        report = engine.step()
        if engine.global_rank == 0 and (step % 10 == 0 or step == 1):
            print(f"step {step:3}: loss {report.loss:.3f}")

    engine.eval()
    with torch.no_grad(), adapters_disabled(engine.module):  # what the base says, for a KL penalty, say
        reference = engine(input_ids=ids, labels=ids).loss.item()
    merged = sum(weight.numel() for _, weight in merged_weights(engine.module))  # gathered layer by layer
    if options.output:
        save_adapters(engine.module, options.output, task_type="CAUSAL_LM")
    if engine.global_rank == 0:
        print(f"the base alone: loss {reference:.3f}; {merged:,} weights merge with their adapters")
    engine.close()
    return report.loss, reference


if __name__ == "__main__":
    main()
