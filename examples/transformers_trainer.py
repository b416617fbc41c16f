"""Transformers' Trainer with a DeepSpeed config, run by zengine.  Accelerate works the same way.

python examples/transformers_trainer.py
torchrun --nproc-per-node 2 examples/transformers_trainer.py

`install()` must run before transformers is imported.  A script that cannot be edited starts through the module:
`torchrun ... -m zengine.as_deepspeed train.py`.
"""

import tempfile
from typing import Any

import zengine.as_deepspeed

zengine.as_deepspeed.install()

import torch  # noqa: E402
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments  # noqa: E402

CONFIG: dict[str, Any] = {
    "train_batch_size": "auto",  # Trainer fills these in
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "optimizer": {"type": "AdamW", "params": {"lr": "auto", "weight_decay": "auto"}},
    "zero_optimization": {"stage": 3},
}


def main(folder: str = "") -> float:
    arguments = TrainingArguments(  # before the model: at stage 3 it is built in parts
        output_dir=folder or tempfile.mkdtemp(),
        per_device_train_batch_size=8,
        max_steps=30,
        learning_rate=1e-2,
        logging_steps=10,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        use_cpu=not torch.cuda.is_available(),
        deepspeed=CONFIG,
    )
    size = {"vocab_size": 32, "n_positions": 16, "n_embd": 32, "n_layer": 2, "n_head": 2}
    model = GPT2LMHeadModel(GPT2Config(**size, bos_token_id=0, eos_token_id=0))
    rows = (torch.arange(64)[:, None] + torch.arange(16)) % 32  # it learns to count
    trainer = Trainer(model=model, args=arguments, train_dataset=[{"input_ids": row, "labels": row} for row in rows])
    trainer.train()
    trainer.save_model()  # whole weights, from all ranks
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry][-1]


if __name__ == "__main__":
    print(f"loss {main():.3f}")
