"""The trained model through the engine for inference, and its runs as models of `zengine generate`."""

from __future__ import annotations

import json

import attrs
import pytest
import torch

import zckpt
from train import inference
from train.launch import parser
from train.model import GPT, Shape
from train.recipe import Folder, make_recipe
from train.text import Windows
from zengine.cli import main
from zengine.commands.byte_gpt import ByteGPTShape, decoder_of
from zengine.inference.cache import KVCache
from zengine.inference.decoder import DecoderPass
from zengine.inference.recognize import recognize

SMALL = Shape(depth=2, width=32, heads=2, context=48)


def trained() -> GPT:
    """A model whose predictions differ clearly."""
    model = GPT(SMALL, seed=1)
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for param in model.parameters():
            param.mul_(4) if param.dim() > 1 else param.add_(torch.randn(param.shape, generator=generator) / 5)
    return model.eval()


@pytest.fixture
def folder(tmp_path):
    """A run with one checkpoint."""
    found = Folder(path=tmp_path / "one")
    recipe = make_recipe(parser().parse_args(["--quick", "--runs", str(tmp_path)]), found)
    attrs.evolve(recipe, shape=SMALL, final_windows=8).write(found.recipe)
    weights = dict(trained().named_parameters())
    shards = [zckpt.whole(f"model.{name}", param.detach()) for name, param in weights.items()]
    zckpt.save(found.checkpoints, "step7", shards=shards, step=7)
    return found


def logits(decoder, ids):
    return DecoderPass(decoder, KVCache.create(decoder, 1, len(ids))).forward_all(ids, 0)


def test_the_decoder_of_a_run_is_the_model():
    model, ids = trained(), torch.randint(0, 256, (48,), generator=torch.Generator().manual_seed(0))
    shape = ByteGPTShape(**attrs.asdict(SMALL))
    with torch.no_grad():
        wanted = model.logits(ids[None])[0]
    written = logits(decoder_of(model.state_dict(), shape), ids)
    found = logits(recognize(model, GPT.logits), ids)
    assert torch.allclose(written, wanted, atol=1e-5 * wanted.abs().max())
    assert torch.allclose(found, wanted, atol=1e-5 * wanted.abs().max())


def test_the_formats_are_judged_on_held_out_text(folder):
    recipe = inference.Recipe.read(folder.recipe)
    text = torch.randint(0, 256, (5000,), dtype=torch.uint8, generator=torch.Generator().manual_seed(3))
    found = inference.judge_inference(folder, recipe, Windows(text, SMALL.context))
    full, eight, wide, four = found.variants
    assert [each.name for each in found.variants] == ["fp32", "int8", "int8-a16", "int4"]
    assert (full.change, full.top_1, full.kl_mean, full.kept_share) == (0.0, 1.0, 0.0, 0.0)
    assert 0 < wide.kl_mean < eight.kl_mean < four.kl_mean
    assert full.nbytes > 3 * eight.nbytes > 5 * four.nbytes
    assert wide.nbytes == eight.nbytes
    assert all(each.tokens_per_s > 0 for each in found.variants)
    windows = Windows(text, SMALL.context).stacked(8)
    with torch.no_grad():
        assert full.bits_per_byte == pytest.approx(
            trained()(windows).item() / torch.tensor(2.0).log().item(), rel=1e-5
        )
    assert found.num_bytes == 8 * 48
    parts = found.sample.split("\n\n")
    assert found.sample.startswith("def ")
    assert len(parts) >= 3
    again = inference.judge_inference(folder, recipe, Windows(text, SMALL.context))
    assert again.sample == found.sample
    assert len(found.table().splitlines()) == 6


def test_a_run_is_a_model_of_zengine_generate(folder, capsys):
    given = ["--prompt", "def ", "--temperature", "0", "--max-new-tokens", "20", "--ignore-eos", "--json"]
    texts = []
    for path in (folder.path, folder.checkpoints, folder.checkpoints / "step7"):
        assert main(["generate", str(path), *given]) == 0
        texts.append(json.loads(capsys.readouterr().out)["tokens"])
    ids, model = list(b"def "), trained()
    with torch.no_grad():
        for _ in range(20):
            ids.append(int(model.logits(torch.tensor([ids]))[0, -1].argmax()))
    assert texts == [ids[4:]] * 3
    assert main(["generate", str(folder.path), "--prompt", "def ", "--quant", "int4"]) == 0
    assert "9 matrices" in capsys.readouterr().err


def test_a_run_is_judged_by_zengine_quality(folder, tmp_path, capsys):
    (tmp_path / "text").write_text("import this\n" * 40)
    assert main(["quality", str(folder.path), "--data", str(tmp_path / "text"), "--quant", "int8", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["num_bytes"] == found["num_tokens"] == 479
    assert abs(found["bits_change"]) < 0.01


def test_runs_that_cannot_be_read_are_told(folder, capsys):
    def told() -> str:
        assert main(["generate", str(folder.path), "--prompt", "a"]) == 1
        return capsys.readouterr().err

    recipe = json.loads(folder.recipe.read_text())
    changes = {
        "is a mixture of experts": {"experts": 4},
        "another shape than": {"width": 64},
        "no model has the shape": {"heads": 3},
        "is not that of a byte-level GPT": {"layers": 3},
        "has no tensor": {"depth": 3},
    }
    for message, change in changes.items():
        folder.recipe.write_text(json.dumps({**recipe, "shape": {**recipe["shape"], **change}}))
        assert message in told()
    folder.recipe.write_text(json.dumps(recipe))
    folder.checkpoints.rename(folder.path / "away")
    assert "has no checkpoint yet" in told()
