import json
import sys
from pathlib import Path

import pytest
from small_texts import TEXT, write_tokenizer

from zengine.inference.tokenizers import ByteTokenizer, TokenizerError, open_tokenizer

pytest.importorskip("transformers")
pytest.importorskip("tokenizers")

MESSAGES = [{"role": "user", "content": "Hé"}]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(made)
    return made


def test_tokens_of_a_folder_are_those_of_transformers(folder: Path) -> None:
    import transformers

    tokenizer = open_tokenizer(folder)
    theirs = transformers.AutoTokenizer.from_pretrained(folder)
    assert [tokenizer.begin, *tokenizer.encode(TEXT)] == theirs(TEXT).input_ids
    assert tokenizer.decode([0, *tokenizer.encode(TEXT), 1]) == TEXT
    assert (tokenizer.begin, tokenizer.stop_tokens) == (0, (1,))


def test_a_tokenizer_without_settings_is_read_and_has_no_ends(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_bytes((folder / "tokenizer.json").read_bytes())
    tokenizer = open_tokenizer(tmp_path)
    assert tokenizer.encode(TEXT) == open_tokenizer(folder).encode(TEXT)
    assert (tokenizer.begin, tokenizer.stop_tokens) == (None, ())


@pytest.mark.parametrize(
    ("name", "value", "stops"), [("generation_config", [7, 8], (7, 8, 1)), ("config", 9, (9, 1))]
)
def test_stop_tokens_come_from_the_configs(
    folder: Path, tmp_path: Path, name: str, value: object, stops: tuple[int, ...]
) -> None:
    for each in folder.iterdir():
        (tmp_path / each.name).write_bytes(each.read_bytes())
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", "eos_token_id": 5}))
    (tmp_path / f"{name}.json").write_text(json.dumps({"model_type": "llama", "eos_token_id": value}))
    assert open_tokenizer(tmp_path).stop_tokens == stops


def test_a_conversation_is_what_the_template_makes_of_it(folder: Path, tmp_path: Path) -> None:
    tokenizer = open_tokenizer(folder)
    assert tokenizer.decode(tokenizer.encode_chat(MESSAGES)) == "<user>Hé\n<assistant>"
    write_tokenizer(tmp_path, template="")
    with pytest.raises(TokenizerError, match="has no chat template: pass the prompt"):
        open_tokenizer(tmp_path).encode_chat(MESSAGES)
    write_tokenizer(tmp_path, template="{{ raise_exception('only one turn') }}")
    with pytest.raises(TokenizerError, match="the chat template rejects the messages: only one turn"):
        open_tokenizer(tmp_path).encode_chat(MESSAGES)
    with pytest.raises(TokenizerError, match="no chat template"):
        ByteTokenizer().encode_chat(MESSAGES)


def test_what_cannot_be_read_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(TokenizerError, match=r"has no tokenizer \(tokenizer.json.*pass --tokenizer FOLDER"):
        open_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(TokenizerError, match="cannot be read"):
        open_tokenizer(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(TokenizerError, match="needs Transformers: pip install transformers"):
        open_tokenizer(tmp_path)


def test_bytes_are_tokens() -> None:
    tokenizer = ByteTokenizer()
    assert tokenizer.encode("aé") == [97, 195, 169]
    assert tokenizer.decode([97, 0, 195, 169, 255]) == "aé\N{REPLACEMENT CHARACTER}"
