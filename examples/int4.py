"""Quantize a model to 4 bits while it is read, and generate.

python examples/int4.py

The folder is a Hugging Face folder; here it is written first, with random weights, so nothing is downloaded.
"""

import tempfile

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from zengine.inference import load_model


def write_folder(folder: str) -> LlamaForCausalLM:
    torch.manual_seed(0)
    sizes = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2, "num_attention_heads": 4}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=512, max_position_embeddings=64, **sizes))
    model.save_pretrained(folder)
    return model


def main() -> tuple[float, float]:
    with tempfile.TemporaryDirectory() as folder:
        whole = write_folder(folder).eval()
        loaded = load_model(folder, format="int4")  # the peak of memory is the 4-bit model and one layer
    module = loaded.module
    ids = torch.arange(16)[None]
    with torch.no_grad():
        expected, found = whole(ids).logits, module(ids).logits
        tokens = module.generate(ids, max_new_tokens=8, do_sample=False)
    error = float((found - expected).norm() / expected.norm())
    small, large = (sum(t.nbytes for t in model.state_dict().values()) for model in (module, whole))
    print(f"{small / large:.2f} of the bytes; logits differ by {error:.1%}; new tokens {tokens[0, 16:].tolist()}")
    return small / large, error


if __name__ == "__main__":
    main()
