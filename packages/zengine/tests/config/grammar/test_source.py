"""Sources: a path, JSON text or a mapping; and what is said when there is nothing to read."""

from __future__ import annotations

import base64
import enum
from collections import OrderedDict
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
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
    document = read({"a": {1: 2}, "b": [torch.device("cpu")], "c": float("nan"), "d": float("inf")})
    assert [str(problem) for problem in document.problems] == [
        "a: the key 1 is a Python int, not text",
        "b[0] = device(type='cpu'): is not a JSON value. A Python device cannot be written to a file; give a number, "
        "text, true/false, null, list or object.",
        "c = NaN: is not a JSON value. A Python float cannot be written to a file; give a number, text, "
        "true/false, null, list or object.",
    ]


def test_a_dtype_is_read_as_its_name() -> None:
    document = read({"data_types": {"grad_accum_dtype": torch.float32}})
    assert (document.data, document.problems) == ({"data_types": {"grad_accum_dtype": "torch.float32"}}, ())


@pytest.mark.parametrize("encode", [base64.b64encode, base64.urlsafe_b64encode])
def test_json_text_may_be_in_base64(encode: Callable[[bytes], bytes], tmp_path: Path) -> None:
    text = '{"a": "\u00ff\u00fe?>", "b": 1, "b": 2}'  # both alphabets, and a slip
    document = read(encode(text.encode()).decode())
    assert (document.source, document.data) == ("<base64>", {"a": "\u00ff\u00fe?>", "b": 2})
    assert [problem.place.line for problem in document.problems] == [1]
    assert refusal("c29tZSB0ZXh0").startswith("c29tZSB0ZXh0: no such file")  # base64 of something else
    assert refusal("A" * 5000).partition(": ")[2].startswith("cannot be read")


def test_a_file_of_that_name_comes_before_base64(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    name = base64.b64encode(b'{"a": 1}').decode()
    Path(name).write_text('{"a": 2}')
    assert read(name).data == {"a": 2}


def test_a_dict_that_contains_itself_is_refused_by_name() -> None:
    inner: dict[str, Any] = {"b": 1}
    inner["self"] = [inner]
    document = read({"a": inner, "twice": [shared := {"c": 1}, shared]})
    assert [str(problem) for problem in document.problems] == ["a.self[0]: contains itself. Remove it."]
    assert document.data == {"a": {"b": 1, "self": [None]}, "twice": [{"c": 1}, {"c": 1}]}


@pytest.mark.parametrize("depth", [70, 100_000])
def test_a_very_deep_dict_is_refused(depth: int) -> None:
    deep: Any = 1
    for _ in range(depth):
        deep = {"a": deep}
    (problem,) = read(deep).problems
    assert (problem.key, problem.reason) == (".".join("a" * 65), "nested deeper than 64 levels")
    text = '{"a": ' * 70 + "1" + "}" * 70
    (problem,) = read(text).problems
    assert problem.reason == "nested deeper than 64 levels"


class Device(str, enum.Enum):
    CPU = "cpu"


class Stage(int, enum.Enum):
    WEIGHTS = 3


def test_values_of_python_are_read_as_json_s() -> None:
    document = read({"a": [Device.CPU, Stage.WEIGHTS, np.int64(2), np.float32(0.5), Path("/x"), Fraction(1, 4)]})
    assert document.problems == ()
    assert isinstance(document.data, dict)
    values = document.data["a"]
    assert values == ["cpu", 3, 2, 0.5, "/x", 0.25]
    assert [type(value) for value in values] == [str, int, int, float, str, float]
