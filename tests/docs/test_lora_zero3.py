"""The example of LoRA at stage 3, on two ranks: it learns, and its adapters load on one."""

from __future__ import annotations

import importlib.util
import io
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import pytest
import repo

from zcomm.testing import run_ranks
from zengine.adapters import load_adapters, quantize_base

pytest.importorskip("transformers")

SCRIPT = repo.ROOT / "examples" / "lora_zero3.py"


def example() -> Any:
    spec = importlib.util.spec_from_file_location("lora_zero3", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def run_example(*options: str) -> tuple[float, float, str]:
    printed = io.StringIO()
    with redirect_stdout(printed):
        loss, reference = example().main(options)
    return loss, reference, printed.getvalue()


@pytest.mark.parametrize("format", ["", "nf4"])
def test_it_learns_to_count_and_its_adapters_load(tmp_path: Path, format: str) -> None:
    options = ["--steps", "30", "--output", str(tmp_path), *(["--quantize", format] if format else [])]
    (loss, reference, printed), (other_loss, _, silence) = run_ranks(run_example, 2, *options)
    assert loss == other_loss
    assert loss < 0.5
    assert reference > 3.5  # of a base that knows nothing: ln 64 = 4.2
    assert silence == ""
    assert "32,256 of" in printed
    script = example()
    model = script.make_model()
    if format:
        quantize_base(model, format, script.TARGETS)
    load_adapters(model, tmp_path)
    ids = next(script.batches(1, 7))
    assert float(model(input_ids=ids, labels=ids).loss.detach()) < 0.5


def test_it_is_short() -> None:
    assert len(SCRIPT.read_text(encoding="utf-8").splitlines()) < 120
