"""`zengine generate`, on a tiny LLaMA with a tokenizer of its own."""

from __future__ import annotations

import io
import json
import re
import shutil
import struct
import sys
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

sys.path.append(str(Path(__file__).parents[1] / "inference"))
from small_texts import write_folder

from zengine.cli import main
from zengine.commands import generate as command

transformers = pytest.importorskip("transformers")
pytest.importorskip("tokenizers")

PROMPT = "def add("


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_folder(tmp_path_factory.mktemp("llama"))


@pytest.fixture
def call(folder: Path, capsys: pytest.CaptureFixture[str]):
    def run(*arguments: str, model: Path = folder) -> tuple[int, str, str]:
        status = main(["generate", str(model), *arguments])
        return status, *capsys.readouterr()

    return run


def greedy(folder: Path, prompt: str, count: int) -> list[int]:
    """The tokens of Transformers."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
    ids = tokenizer(prompt, return_tensors="pt").input_ids
    mask = torch.ones_like(ids)
    found = model.generate(
        ids, attention_mask=mask, do_sample=False, max_new_tokens=count, eos_token_id=None, pad_token_id=0
    )
    return found[0, ids.shape[1] :].tolist()


def test_greedy_text_is_that_of_transformers(folder: Path, call) -> None:
    wanted = greedy(folder, PROMPT, 20)
    status, out, told = call("--prompt", PROMPT, "--temperature", "0", "--max-new-tokens", "20", "--ignore-eos")
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    assert status == 0
    assert out == tokenizer.decode(wanted, skip_special_tokens=True) + "\n"
    assert "2 blocks" in told
    assert "20 tokens in" in told


def test_json_has_tokens_seeds_and_log_probabilities(folder: Path, call) -> None:
    status, out, _ = call(
        *("--prompt", PROMPT, "--prompt", "for", "--samples", "2", "--seed", "5", "--max-new-tokens", "9"),
        *("--json", "--log-probs", "--ignore-eos", "--top-k", "20", "--top-p", "0.95", "--repetition-penalty", "1.1"),
    )
    rows = [json.loads(line) for line in out.splitlines()]
    assert status == 0
    assert [(row["prompt"], row["seed"]) for row in rows] == [(0, 5), (0, 6), (1, 5), (1, 6)]
    assert all(len(row["tokens"]) == len(row["log_probs"]) == 9 and row["finish"] == "length" for row in rows)
    assert len({row["text"] for row in rows}) == 4
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
    ids = [*tokenizer(PROMPT).input_ids, *rows[0]["tokens"]]
    with torch.no_grad():
        wanted = torch.log_softmax(model(torch.tensor([ids])).logits[0, -10:-1].double(), -1)
    assert rows[0]["log_probs"] == pytest.approx(wanted[range(9), rows[0]["tokens"]].tolist(), abs=1e-4)


def test_a_sample_is_the_same_alone_and_with_others(folder: Path, call, tmp_path: Path) -> None:
    (tmp_path / "prompts.txt").write_text(f"for\n\n{PROMPT}\nreturn first\n")
    (tmp_path / "prompts.jsonl").write_text(f'"for"\n{{"prompt": "{PROMPT}"}}\n')
    common = ("--max-new-tokens", "12", "--json", "--quant", "int8")
    many = [
        json.loads(line)
        for line in call("--prompts", str(tmp_path / "prompts.txt"), "--samples", "4", *common)[1].splitlines()
    ]
    (one,) = (json.loads(line) for line in call("--prompt", PROMPT, "--seed", "2", *common)[1].splitlines())
    assert len(many) == 12
    assert [row for row in many if (row["prompt"], row["seed"]) == (1, 2)] == [{**one, "prompt": 1}]
    lines = [json.loads(line) for line in call("--prompts", str(tmp_path / "prompts.jsonl"), *common)[1].splitlines()]
    assert [row["tokens"] for row in lines] == [
        row["tokens"] for row in many if row["prompt"] < 2 and row["seed"] == 0
    ]


def test_several_samples_are_printed_one_after_the_other(call) -> None:
    given = ("--prompt", PROMPT, "--samples", "3", "--max-new-tokens", "10")
    streamed, whole = call(*given)[1], call(*given, "--no-stream")[1]
    assert streamed == whole
    parts = [call("--prompt", PROMPT, "--max-new-tokens", "10", "--seed", str(seed))[1] for seed in range(3)]
    assert streamed == "".join(f"--- prompt 0, seed {seed}\n{text}" for seed, text in enumerate(parts))


def test_stop_strings_end_the_text(call) -> None:
    given = ("--prompt", PROMPT, "--temperature", "0", "--max-new-tokens", "30", "--ignore-eos")
    text = call(*given)[1]
    stop = text[10:13]
    row = json.loads(call(*given, "--stop", "not in it", "--stop", stop, "--json")[1])
    assert row["text"] == text[: text.find(stop)]
    assert row["finish"] == "string"


def test_log_probabilities_are_a_line_each(call) -> None:
    _, out, _ = call("--prompt", PROMPT, "--max-new-tokens", "3", "--log-probs", "--ignore-eos")
    *_, first, second, third, total = out.splitlines()
    values = [float(line.split()[0]) for line in (first, second, third)]
    assert float(total.split()[0]) == pytest.approx(sum(values), abs=2e-4)
    assert total.endswith("3 tokens")


def test_a_conversation_goes_through_the_template(folder: Path, call, tmp_path: Path) -> None:
    rendered = "<system>Be brief\n<user>Hi\n<assistant>"
    common = ("--temperature", "0", "--max-new-tokens", "8", "--json")
    chat = json.loads(call("--chat", "--system", "Be brief", "--prompt", "Hi", *common)[1])
    messages = [{"role": "system", "content": "Be brief"}, {"role": "user", "content": "Hi"}]
    (tmp_path / "chats.jsonl").write_text(json.dumps({"messages": messages}) + "\n")
    assert json.loads(call("--chat", "--prompts", str(tmp_path / "chats.jsonl"), *common)[1]) == chat
    tokens = transformers.AutoTokenizer.from_pretrained(folder)(rendered, add_special_tokens=False).input_ids
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
    with torch.no_grad():
        assert chat["tokens"][0] == int(model(torch.tensor([tokens])).logits[0, -1].argmax())


def test_the_prompt_may_come_from_standard_input(call, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = call("--prompt", PROMPT, "--max-new-tokens", "5")[1]
    monkeypatch.setattr("sys.stdin", io.StringIO(PROMPT))
    assert call("--prompt", "-", "--max-new-tokens", "5")[1] == wanted


def test_without_a_number_as_many_tokens_as_fit_are_made(folder: Path, call) -> None:
    row = json.loads(call("--prompt", PROMPT, "--json", "--ignore-eos")[1])
    length = len(transformers.AutoTokenizer.from_pretrained(folder)(PROMPT).input_ids)
    assert len(row["tokens"]) == 96 - length + 1


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (("--prompt", PROMPT, "--max-new-tokens", "96"), "the model's positions hold 96 together: ask for at most 9"),
        (("--prompt", "def " * 60), "the model's positions hold 96 together: shorten it to 96 tokens"),
        (
            ("--prompt", PROMPT, "--max-out-tokens", "8", "--max-new-tokens", "9"),
            "--max-out-tokens hold 8 together: ask",
        ),
        (("--prompt", PROMPT, "--max-out-tokens", "97"), "--max-out-tokens 97: the model was made for 96 tokens"),
        (("--prompt", PROMPT, "--quant", "int3"), "--quant int3: "),
        (("--prompt", PROMPT, "--dtype", "int8"), "--dtype int8: pass auto, fp32"),
        (("--prompt", PROMPT, "--temperature", "-1"), "temperature is -1.0; it must be"),
        (("--prompt", PROMPT, "--system", "x"), "--system belongs to a conversation: pass --chat"),
        ((), "there is no prompt: pass --prompt TEXT"),
        (("--prompts", "absent.txt"), "--prompts absent.txt: No such file"),
        (("--prompt", PROMPT, "--tokenizer", "."), "has no tokenizer"),
    ],
)
def test_wrong_calls_are_told_what_to_do(
    call, given: tuple[str, ...], message: str, tmp_path: Path, monkeypatch
) -> None:
    monkeypatch.chdir(tmp_path)
    status, out, told = call(*given)
    assert (status, out) == (1, "")
    assert message in told.splitlines()[-1]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "prompt 0: no JSON"),
        ("[" * 100_000, "prompt 0: no JSON"),
        ("7", 'prompt 0: write a string, {"prompt": "..."}'),
        ('{"messages": [{"role": "user", "content": "a"}]}', "prompt 0: a conversation needs --chat"),
    ],
)
def test_wrong_files_of_prompts_are_told(call, line: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "p.jsonl").write_text(line + "\n")
    status, _, told = call("--prompts", str(tmp_path / "p.jsonl"))
    assert status == 1
    assert message in told


def test_paths_that_hold_no_model_are_told(call, tmp_path: Path, folder: Path) -> None:
    def told(model: Path) -> str:
        status, out, text = call("--prompt", PROMPT, model=model)
        assert (status, out) == (1, "")
        return text

    assert "does not exist: pass a Hugging Face folder" in told(tmp_path / "absent")
    assert "is empty: pass a Hugging Face folder" in told(tmp_path)
    broken = shutil.copytree(folder, tmp_path / "broken")
    weights = broken / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])
    assert "is not a valid safetensors file" in told(broken)
    weights.unlink()
    assert "has none of model.safetensors" in told(broken)


@pytest.mark.parametrize("given", [("--max-new-tokens", "96"), ("--max-out-tokens", "97")])
def test_tokens_beyond_the_positions_are_told_before_weights_are_read(
    given: tuple[str, str], call, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("zengine.commands.models._read", lambda *_: pytest.fail("was read"))
    status, _, told = call("--prompt", PROMPT, *given)
    assert status == 1
    assert "96" in told


def test_a_model_below_the_folder_of_a_run_is_that_model(folder: Path, call, tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text('{"shape": {"depth": 1, "width": 8, "heads": 1, "context": 8}}')
    exported = shutil.copytree(folder, tmp_path / "export")
    given = ("--prompt", PROMPT, "--max-new-tokens", "5")
    assert call(*given, model=exported)[:2] == call(*given)[:2]


def test_damaged_json_is_told(folder: Path, call, tmp_path: Path) -> None:
    broken = shutil.copytree(folder, tmp_path / "broken")
    (broken / "generation_config.json").write_text("[" * 100_000)
    status, _, told = call("--prompt", PROMPT, model=broken)
    assert status == 1
    assert "generation_config.json is no JSON object" in told
    (broken / "generation_config.json").unlink()
    (broken / "run.json").write_text("[" * 100_000)
    assert call("--prompt", PROMPT, model=broken)[0] == 0, "a file of another program"


def test_dtypes_that_cpus_do_not_compute_in_are_read_as_float32(folder: Path, call, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    given, weights = ("--prompt", PROMPT, "--max-new-tokens", "5"), load_file(folder / "model.safetensors")
    for dtype in (torch.float64, torch.float8_e4m3fn):
        other = shutil.copytree(folder, tmp_path / str(dtype))
        save_file({name: each.to(dtype) for name, each in weights.items()}, other / "model.safetensors")
        assert call(*given, model=other)[0] == 0


def test_a_model_too_large_is_told_before_it_is_read(call, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("zengine.commands.models.available_bytes", lambda: 200_000)
    monkeypatch.setattr("zengine.commands.models._read", lambda *_: pytest.fail("was read"))
    _, _, told = call("--prompt", PROMPT)
    assert re.search(r"\([\d.]+ k parameters in float32\) needs 0\.\d+ MB, and 0.2 MB of memory are available", told)
    assert "; --quant int8 needs 0.1" in told


def test_a_cache_too_large_is_told(call, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "available_bytes", lambda: 10_000)
    _, _, told = call("--prompt", PROMPT)
    assert "a cache of 96 tokens needs" in told
    assert "pass --max-out-tokens 39 or less" in told


def test_text_is_printed_as_it_comes(folder: Path, call, monkeypatch: pytest.MonkeyPatch) -> None:
    class Recorder(io.StringIO):
        flushed: ClassVar[list[str]] = []

        def flush(self) -> None:
            self.flushed.append(self.getvalue())

    given = ("--prompt", PROMPT, "--max-new-tokens", "10", "--ignore-eos")
    text = call(*given)[1]
    monkeypatch.setattr("sys.stdout", Recorder())
    assert main(["generate", str(folder), *given]) == 0
    growing = list(dict.fromkeys(Recorder.flushed))
    assert growing[-1] == text
    assert len(growing) > 5
    assert all(text.startswith(each) for each in growing)


def write_gguf(path: Path, folder: Path) -> None:
    """Write the model of `folder` as llama.cpp's converter does, in float32, with the tokenizer's vocabulary."""
    from safetensors.torch import load_file

    weights, settings = load_file(folder / "model.safetensors"), json.loads((folder / "config.json").read_text())
    words: dict[str, int] = json.loads((folder / "tokenizer.json").read_text())["model"]["vocab"]
    merges = [" ".join(pair) for pair in json.loads((folder / "tokenizer.json").read_text())["model"]["merges"]]
    heads, groups = settings["num_attention_heads"], settings["num_key_value_heads"]
    names = {
        "input_layernorm": "attn_norm",
        "post_attention_layernorm": "ffn_norm",
        **{f"self_attn.{ours}_proj": f"attn_{theirs}" for ours, theirs in zip("qkvo", ("q", "k", "v", "output"))},
        **{f"mlp.{kind}_proj": f"ffn_{kind}" for kind in ("gate", "up", "down")},
    }
    found = {
        "token_embd.weight": weights["model.embed_tokens.weight"],
        "output_norm.weight": weights["model.norm.weight"],
    }
    found["output.weight"] = weights["lm_head.weight"]
    for layer in range(settings["num_hidden_layers"]):
        for ours, theirs in names.items():
            value = weights[f"model.layers.{layer}.{ours}.weight"]
            if theirs in ("attn_q", "attn_k"):  # neighbours rotate there, halves here
                count = heads if theirs == "attn_q" else groups
                value = value.view(count, 2, -1, value.shape[-1]).transpose(1, 2).reshape(value.shape)
            found[f"blk.{layer}.{theirs}.weight"] = value.contiguous()

    def text(value: str) -> bytes:
        return struct.pack("<Q", len(value.encode())) + value.encode()

    def texts(values: list[str]) -> bytes:
        return struct.pack("<IQ", 8, len(values)) + b"".join(map(text, values))

    tokens = sorted(words, key=words.__getitem__)
    numbers = {
        "block_count": settings["num_hidden_layers"],
        "context_length": settings["max_position_embeddings"],
        "embedding_length": settings["hidden_size"],
        "feed_forward_length": settings["intermediate_size"],
        "attention.head_count": heads,
        "attention.head_count_kv": groups,
    }
    keys = [
        text("general.architecture") + struct.pack("<I", 8) + text("llama"),
        *(text(f"llama.{name}") + struct.pack("<II", 4, value) for name, value in numbers.items()),
        text("llama.attention.layer_norm_rms_epsilon") + struct.pack("<If", 6, settings["rms_norm_eps"]),
        text("tokenizer.ggml.model") + struct.pack("<I", 8) + text("gpt2"),
        text("tokenizer.ggml.tokens") + struct.pack("<I", 9) + texts(tokens),
        text("tokenizer.ggml.merges") + struct.pack("<I", 9) + texts(merges),
        text("tokenizer.ggml.add_bos_token") + struct.pack("<I?", 7, True),
        text("tokenizer.ggml.bos_token_id") + struct.pack("<II", 4, 0),
        text("tokenizer.ggml.eos_token_id") + struct.pack("<II", 4, 1),
    ]
    infos, data = [], b""
    for name, value in found.items():
        shape = value.shape[::-1]
        infos.append(text(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, 0, len(data)))
        data += value.numpy().tobytes()
        data += bytes(-len(data) % 32)
    head = b"GGUF" + struct.pack("<IQQ", 3, len(infos), len(keys)) + b"".join(keys) + b"".join(infos)
    path.write_bytes(head + bytes(-len(head) % 32) + data)


def test_a_gguf_file_is_the_same_model(folder: Path, call, tmp_path: Path) -> None:
    write_gguf(tmp_path / "tiny.gguf", folder)
    common = ("--prompt", PROMPT, "--temperature", "0", "--max-new-tokens", "12", "--json")
    wanted = call(*common, "--quant", "int8")[1]
    assert call(*common, "--quant", "int8", "--tokenizer", str(folder), model=tmp_path / "tiny.gguf")[1] == wanted
    status, out, told = call(*common, "--quant", "int8", model=tmp_path / "tiny.gguf")
    assert (status, json.loads(out)["tokens"]) == (0, json.loads(wanted)["tokens"]), told


def test_a_packed_folder_is_the_model_that_was_quantized(folder: Path, call, tmp_path: Path) -> None:
    from zengine.inference.loading.load import load_model
    from zengine.inference.loading.packed import save_packed

    save_packed(load_model(folder, format="int4", dtype=torch.float32).module, tmp_path / "packed", source=folder)
    common = ("--prompt", PROMPT, "--temperature", "0", "--max-new-tokens", "12", "--json")
    assert call(*common, model=tmp_path / "packed")[1] == call(*common, "--quant", "int4")[1]
    _, out, told = call(*common, "--quant", "int8", model=tmp_path / "packed")
    assert out == call(*common, "--quant", "int4")[1]
    assert "matrices of int4" in told, "what is loaded is told, as it is not what was asked for"
