"""Sources: a path, JSON text or a mapping; and what is said when there is nothing to read."""

from __future__ import annotations

from collections import OrderedDict
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
import torch

from zengine.config.grammar.errors import ConfigError
from zengine.config.grammar.source import read


def refusal(source: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        read(source)
    return str(caught.value)


def test_a_path_may_be_text_or_a_path_object(tmp_path: Path) -> None:
    file = tmp_path / "a.json"
    file.write_text('{"a": 1}')
    assert read(str(file)).data == read(file).data == {"a": 1}
    assert read(file).place(("a",)).source == str(file)


def test_text_that_starts_with_a_brace_is_json() -> None:
    document = read(' \n {"a": 1}')
    assert (document.source, document.data) == ("<json>", {"a": 1})
    assert document.place(("a",)).line == 2
    assert read('\ufeff{"a": 1}').data == {"a": 1}


def test_a_byte_order_mark_is_read_over(tmp_path: Path) -> None:
    file = tmp_path / "a.json"
    file.write_bytes(b'\xef\xbb\xbf{"a": 1}')
    assert read(file).data == {"a": 1}
    assert (read(file).place(("a",)).line, read(file).place(("a",)).column) == (1, 2)


def test_a_missing_file_shows_the_working_directory_and_the_nearest_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "config.json").write_text("{}")
    monkeypatch.chdir(tmp_path)
    expected = f'confg.json: no such file (working directory: {tmp_path}). Did you mean "config.json"?'
    assert refusal("confg.json") == expected
    assert refusal("runs/z.json") == f"runs/z.json: no such file (working directory: {tmp_path})"


def test_a_folder_an_empty_file_and_other_bytes_are_refused(tmp_path: Path) -> None:
    assert refusal(tmp_path) == f"{tmp_path}: is a folder, not a JSON file"
    file = tmp_path / "a.json"
    file.write_text(" \n")
    assert refusal(file) == f"{file}: is empty. The smallest config is {{}}."
    file.write_bytes(b'{"a":\n "\xff"}')
    assert refusal(file) == f"{file}: is not UTF-8 text (line 2). Save it as UTF-8."
    assert refusal("") == "config: the path is empty. Give the path of a JSON file, or a dict."
    assert "cannot be read" in refusal("a\0b.json")


@pytest.mark.parametrize("source", [None, 3, ["a"], b"{}"])
def test_another_kind_of_source_is_a_type_error(source: Any) -> None:
    with pytest.raises(TypeError, match="give a path to a JSON file, a dict or JSON text"):
        read(source)


def test_a_mapping_is_copied() -> None:
    inner = {"lr": 1.0, "betas": (0.9, 0.95)}
    document = read(MappingProxyType({"a": OrderedDict(inner)}))
    inner["lr"] = 2.0
    assert document.data == {"a": {"lr": 1.0, "betas": [0.9, 0.95]}}
    assert document.place(("a",)).origin() == "dict"


def test_what_json_has_no_word_for_is_refused_by_name() -> None:
    document = read({"a": {1: 2}, "b": [torch.float16], "c": float("nan"), "d": float("inf")})
    assert [str(problem) for problem in document.problems] == [
        "a: the key 1 is a Python int, not text",
        'b[0] = torch.float16: is not a JSON value. Write the dtype as text: "fp32", "fp16" or "bf16".',
        "c = NaN: is not a JSON value. A Python float cannot be written to a file; give a number, text, "
        "true/false, null, list or object.",
    ]
