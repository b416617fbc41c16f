"""Small Hugging Face folders: a LLaMA with random weights, and a tokenizer trained on a few lines."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

TEXT = (
    """def add(first, second):
    return first + second  # naïve, 日本語, €5, 🙂🙂
for number in range(10):
    print(add(number, number))
"""
    * 8
)
TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def write_tokenizer(folder: Path, *, template: str = TEMPLATE) -> None:
    """Write a byte-level BPE of 300 tokens: <s> begins a text, </s> ends it."""
    import tokenizers
    from tokenizers import decoders, models, pre_tokenizers, processors, trainers

    made = tokenizers.Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer: Any = trainers.BpeTrainer(vocab_size=300, special_tokens=["<s>", "</s>"], initial_alphabet=alphabet)
    made.train_from_iterator(TEXT.splitlines(keepends=True), trainer)
    made.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    made.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "eos_token": "</s>",
        **({"chat_template": template} if template else {}),
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


def write_model(folder: Path, **given: Any) -> None:
    """Write a LLaMA whose predictions differ clearly: weights three times as large as usual."""
    import transformers

    sizes = {
        "vocab_size": 300,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "max_position_embeddings": 96,
        "bos_token_id": 0,
        "eos_token_id": 1,
    }
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**{**sizes, **given}))
    with torch.no_grad():
        for param in model.parameters():
            if param.dim() > 1:
                param.mul_(3)
    model.save_pretrained(folder)


def write_folder(folder: Path, **given: Any) -> Path:
    """Write model and tokenizer."""
    folder.mkdir(parents=True, exist_ok=True)
    write_model(folder, **given)
    write_tokenizer(folder)
    return folder
