"""Factories by name, and transformers of a size."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from zengine.planning.models import NotAFactory, Shape, Transformer, build_model, load_factory, shape_of

FILE = """
from torch import nn

def make():
    return nn.Linear(3, 5)

def wrong():
    return 3

size = 4
"""


@pytest.fixture
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "my_train_file.py").write_text(FILE)


@pytest.mark.usefixtures("_folder")
def test_a_factory_of_the_working_directory_makes_a_model_without_memory() -> None:
    model = build_model("my_train_file:make")
    assert model.weight.shape == (5, 3)
    assert model.weight.is_meta


@pytest.mark.usefixtures("_folder")
@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("my_train_file", "is not of the form module:factory"),
        ("no_such_file:make", "No module named 'no_such_file' \\(working directory: "),
        ("my_train_file:mke", 'my_train_file has no "mke". It has make, wrong'),
        ("my_train_file:size", "is a int; it must be callable"),
        ("my_train_file:wrong", "returned a int; it must return a torch.nn.Module"),
    ],
)
def test_a_name_that_is_no_factory_says_what_is_there(name: str, message: str) -> None:
    with pytest.raises(NotAFactory, match=message):
        build_model(name)


def test_attributes_are_followed() -> None:
    assert load_factory("torch:nn.Linear") is torch.nn.Linear


@pytest.mark.parametrize("numel", [1e7, 1.24e8, 1.3e9, 7e9, 7e10])
def test_a_shape_has_nearly_as_many_parameters_as_it_should_and_looks_like_a_model(numel: float) -> None:
    shape = shape_of(numel)
    assert shape.numel == pytest.approx(numel, rel=0.03)
    assert 20 < shape.width / shape.layers < 400


def test_what_is_given_of_a_shape_is_kept() -> None:
    assert shape_of(width=64, layers=3) == Shape(layers=3, width=64)
    assert shape_of(1e9, width=2048).width == 2048
    assert shape_of(1e9, layers=10).layers == 10
    assert str(Shape(layers=2, width=64)) == "a transformer of 2 layers of width 64, 2M parameters"


def test_the_formula_counts_the_model_and_the_model_runs() -> None:
    shape = Shape(layers=2, width=64, vocabulary=100)
    model = Transformer(shape)
    assert sum(param.numel() for param in model.parameters()) == shape.numel
    assert model(torch.arange(12).view(2, 6)).shape == ()
