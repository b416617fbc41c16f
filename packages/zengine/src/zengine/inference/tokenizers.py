"""Tokenizers: text to token ids and back, with the stop tokens and the chat template of a model's folder.

`open_tokenizer` reads those of Transformers from a local folder, never from the network, and runs no code of the
folder.  `ByteTokenizer` is for models whose tokens are bytes.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, final

import attrs

__all__ = [
    *("ByteTokenizer", "Message", "PretrainedTokenizer", "Tokenizer", "TokenizerError", "gguf_tokenizer"),
    "open_tokenizer",
]

Message = Mapping[str, str]  # of a conversation: "role" and "content"

_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "spiece.model", "tokenizer_config.json")
_GGML = "tokenizer.ggml."
_GGML_NAMES = {  # of Transformers' builders
    "model": "tokenizer_type",
    "pre": "pre_tokenizer_type",
    "unknown_token_id": "unk_token_id",
    "padding_token_id": "pad_token_id",
    "add_space_prefix": "add_prefix_space",
}
_MOST_NBYTES = 1 << 26  # of a JSON file with settings


class TokenizerError(ValueError):
    """A tokenizer cannot be read, or lacks what was asked for."""


class Tokenizer(Protocol):
    """Conversion between text and token ids."""

    @property
    def begin(self) -> int | None:
        """Token that begins every text, if the model was trained with one."""

    @property
    def stop_tokens(self) -> tuple[int, ...]:
        """Tokens that end an answer."""

    def encode(self, text: str) -> list[int]:
        """Return the tokens of a text, without special tokens before or after it."""

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of tokens, without special tokens; bytes that are not UTF-8 become U+FFFD."""

    def encode_chat(self, messages: Sequence[Message]) -> list[int]:
        """Return the tokens of a conversation, up to where the model's answer begins.

        Raises TokenizerError without a chat template, or if it rejects the messages.
        """


@final
@attrs.frozen
class ByteTokenizer:
    """Token i is the byte i.  The zero byte, which separates files, ends an answer."""

    begin: int | None = None
    stop_tokens: tuple[int, ...] = (0,)

    def encode(self, text: str) -> list[int]:
        """Return the bytes of the UTF-8 text."""
        return list(text.encode())

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of the bytes, without zero bytes."""
        return bytes(token for token in tokens if token).decode(errors="replace")

    def encode_chat(self, messages: Sequence[Message]) -> list[int]:
        """Raise TokenizerError: a model of bytes has no template."""
        raise TokenizerError("this model of bytes has no chat template: pass the prompt as it is")


@final
@attrs.frozen(eq=False)
class PretrainedTokenizer:
    """A tokenizer of Transformers."""

    inner: Any  # PreTrainedTokenizerBase
    begin: int | None
    stop_tokens: tuple[int, ...]

    @classmethod
    def of(cls, inner: Any, stop_tokens: Sequence[int] = ()) -> PretrainedTokenizer:
        """Wrap a tokenizer.  stop_tokens: in addition to its own end of text."""
        own = inner.eos_token_id
        begins = inner("", verbose=False)["input_ids"]
        begin = begins[0] if begins and begins[0] == inner.bos_token_id else None
        stops = dict.fromkeys((*stop_tokens, *(() if own is None else (own,))))
        return cls(inner, begin, tuple(stops))

    def encode(self, text: str) -> list[int]:
        """Return the tokens of a text; see `Tokenizer`."""
        found: list[int] = self.inner(text, add_special_tokens=False, verbose=False)["input_ids"]
        return found

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of tokens; see `Tokenizer`."""
        text: str = self.inner.decode(list(tokens), skip_special_tokens=True, clean_up_tokenization_spaces=False)
        return text

    def encode_chat(self, messages: Sequence[Message]) -> list[int]:
        """Return the tokens of a conversation; see `Tokenizer`."""
        if not self.inner.chat_template:
            raise TokenizerError(
                f"the tokenizer {self.inner.name_or_path} has no chat template: pass the prompt as the model expects "
                "it, without --chat"
            )
        try:
            text = self.inner.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=True)
        except Exception as error:  # of the template's own making
            raise TokenizerError(f"the chat template rejects the messages: {error}") from error
        return self.encode(text)


def open_tokenizer(folder: Path) -> PretrainedTokenizer:
    """Read the tokenizer of a local folder by Transformers.

    Raises TokenizerError if there is none, if it cannot be read, or if Transformers is not installed.
    """
    if not any((folder / name).is_file() for name in _FILES):
        raise TokenizerError(
            f"{folder} has no tokenizer ({', '.join(_FILES[:4])}): put its files there, or pass --tokenizer FOLDER"
        )
    try:
        import transformers
    except ImportError:
        raise TokenizerError(
            f"reading the tokenizer of {folder} needs Transformers: pip install transformers"
        ) from None
    library: Any = transformers
    is_bare = not any((folder / name).is_file() for name in ("tokenizer_config.json", "config.json"))
    try:
        if is_bare and (folder / _FILES[0]).is_file():
            inner = library.PreTrainedTokenizerFast(tokenizer_file=str(folder / _FILES[0]))
        else:
            inner = library.AutoTokenizer.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)
    except Exception as error:  # Transformers and tokenizers raise many classes for damaged files
        raise TokenizerError(f"the tokenizer of {folder} cannot be read: {error}") from error
    return PretrainedTokenizer.of(inner, stop_tokens_of(folder))


def gguf_tokenizer(metadata: Mapping[str, Any], origin: str) -> PretrainedTokenizer:
    """Return the tokenizer that the metadata of a GGUF file describes, built by Transformers.

    Raises TokenizerError if there is none, or if Transformers cannot build it.
    """
    advice = "pass --tokenizer FOLDER, the model's Hugging Face folder"
    given = {name.removeprefix(_GGML): _plain(value) for name, value in metadata.items() if name.startswith(_GGML)}
    tokens, kind = given.get("tokens"), given.get("model")
    if not isinstance(tokens, list) or not isinstance(kind, str):
        raise TokenizerError(f"{origin} has no tokenizer in its metadata: {advice}")
    try:
        from transformers import PreTrainedTokenizerFast
        from transformers.integrations import gguf
    except ImportError as error:
        raise TokenizerError(
            f"reading the tokenizer in {origin} needs a Transformers that builds it ({error}): pip install "
            f"transformers>=5.23, or {advice}"
        ) from None
    build: Any = PreTrainedTokenizerFast
    library: Any = gguf
    renamed = {_GGML_NAMES.get(name, name): value for name, value in given.items()}
    ends = {name: given.get(f"{name}_token_id") for name in ("bos", "eos")}
    try:
        named = {f"{name}_token": tokens[token] for name, token in ends.items() if token is not None}
        backend, _ = library.convert_gguf_tokenizer(str(metadata.get("general.architecture")), renamed)
        inner = build(tokenizer_object=backend, chat_template=metadata.get("tokenizer.chat_template"), **named)
    except Exception as error:  # as above
        raise TokenizerError(f"the tokenizer in {origin} cannot be built ({error}): {advice}") from error
    begins = given.get("add_bos_token", kind == "llama") and ends["bos"] is not None
    stops = dict.fromkeys(token for token in (ends["eos"], given.get("eot_token_id")) if type(token) is int)
    return PretrainedTokenizer(inner, ends["bos"] if begins else None, tuple(stops))


def _plain(value: Any) -> Any:
    """Return an array of numbers as a list."""
    return value.tolist() if hasattr(value, "tolist") else value


def stop_tokens_of(folder: Path) -> tuple[int, ...]:
    """Return the tokens that end an answer by generation_config.json, else by config.json."""
    for name in ("generation_config.json", "config.json"):
        path = folder / name
        if not path.is_file() or path.stat().st_size > _MOST_NBYTES:
            continue
        try:
            found = json.loads(path.read_text("utf-8")).get("eos_token_id")
        except (ValueError, AttributeError, RecursionError) as error:
            raise TokenizerError(f"{path} is no JSON object: {error}") from error
        listed = found if isinstance(found, list) else [found]
        if tokens := tuple(token for token in listed if type(token) is int):
            return tokens
    return ()
