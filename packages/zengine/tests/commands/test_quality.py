"""`zengine quality`, on a tiny LLaMA with a tokenizer of its own."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[1] / "inference"))
from small_texts import TEXT, write_folder

from zengine.cli import main

pytest.importorskip("transformers")
pytest.importorskip("tokenizers")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = write_folder(tmp_path_factory.mktemp("llama"))
    (made / "text.txt").write_text(TEXT)
    return made


@pytest.fixture
def call(folder: Path, capsys: pytest.CaptureFixture[str]):
    def run(*arguments: str, data: str = "text.txt") -> tuple[int, str, str]:
        status = main(["quality", str(folder), "--data", str(folder / data), *arguments])
        return status, *capsys.readouterr()

    return run


def test_the_figures_of_two_formats(call) -> None:
    eight, four = (json.loads(call("--quant", name, "--json")[1]) for name in ("int8", "int4"))
    assert eight["full_bits_per_byte"] == four["full_bits_per_byte"]
    assert eight["num_bytes"] == len(TEXT.encode())
    assert eight["kl_mean"] < four["kl_mean"] < four["kl_high"]
    assert 0.5 < four["top_1"] < eight["top_1"] <= 1
    assert four["full_nbytes"] / four["quantized_nbytes"] == pytest.approx(32 / 4.5, rel=0.2)
    assert len(four["layers"]) == 2 * 7 + 1
    assert [each["name"] for each in sorted(four["layers"], key=lambda x: -x["error"])[:5]] == four["worst"]
    assert four["bits_per_byte"] / four["full_bits_per_byte"] - 1 == pytest.approx(four["bits_change"])
    assert eight["kept"] == []


def test_the_text_and_the_page_have_the_same_figures(call, tmp_path: Path) -> None:
    found = json.loads(call("--quant", "int4", "--json")[1])
    page = tmp_path / "page.html"
    status, out, told = call("--quant", "int4", "--html", str(page))
    assert status == 0
    assert told.endswith(f"{page}\n")
    figures = (
        f"{found['bits_per_byte']:.4f}",
        f"{found['bits_change']:+.2%}",
        f"{found['top_1']:.2%}",
        *found["worst"],
    )
    for figure in figures:
        assert figure in out, figure
        assert figure in page.read_text().replace("<wbr>", ""), figure
    assert "layers that keep 8 bits        0 of 15 (0.0%)" in out


def test_a_part_of_the_text_ends_with_a_whole_character(call) -> None:
    cut = TEXT.encode().find("日".encode()) + 1
    found = json.loads(call("--quant", "int8", "--max-bytes", str(cut), "--json")[1])
    assert found["num_bytes"] == cut - 1


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ((), '--quant "": name the format to judge'),
        (("--quant", "int8", "--context", "97"), "--context 97: the model was made for 96 tokens"),
        (("--quant", "int8", "--html", "absent/x.html"), "--html absent/x.html: No such file"),
    ],
)
def test_wrong_calls_are_told_what_to_do(call, given: tuple[str, ...], message: str) -> None:
    status, _, told = call(*given)
    assert status == 1
    assert message in told


def test_texts_that_cannot_be_read_are_told(call, folder: Path) -> None:
    (folder / "binary").write_bytes(b"abc\xff")
    (folder / "empty").write_bytes(b"")
    assert "byte 3 is not UTF-8; pass a text file" in call("--quant", "int8", data="binary")[2]
    assert "the text has 0 tokens; at least 2" in call("--quant", "int8", data="empty")[2]
    assert "absent: No such file" in call("--quant", "int8", data="absent")[2]
