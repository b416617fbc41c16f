"""Split the layers of a Transformers model over ranks, by one key of the config.

torchrun --nproc-per-node 2 examples/tensor_parallel.py
python examples/tensor_parallel.py                            unsplit, for comparison: the same losses
"""

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import zcomm
import zengine


def main(steps: int = 6) -> list[float]:
    world = zcomm.init()
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=64, max_position_embeddings=32, **sizes))
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_clipping": 1.0,
        "tensor_parallel": {"autotp_size": world.world_size},  # the model's own tp_plan says how layers are split
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        "zero_optimization": {"stage": 2},  # over the ranks that hold the same part
    }
    engine, *_ = zengine.initialize(model=model, config=config)
    own = sum(param.numel() for param in engine.module.parameters())
    losses = []
    for step in range(steps):
        generator = torch.Generator().manual_seed(step)  # the same batch on ranks that share a model
        ids = (torch.randint(64, (4, 1), generator=generator) + torch.arange(32)) % 64
        ids = ids.to(engine.device)
        engine.backward(engine(input_ids=ids, labels=ids).loss)
        losses.append(engine.step().loss)
    if world.rank == 0:
        print(f"{own:,} elements on this rank; losses {', '.join(f'{loss:.4f}' for loss in losses)}")
    engine.close()
    return losses


if __name__ == "__main__":
    main()
