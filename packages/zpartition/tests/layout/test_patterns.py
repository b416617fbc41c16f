"""Patterns: one star matches inside a component, two match several."""

from __future__ import annotations

import pytest

from zpartition.layout.units import matches


@pytest.mark.parametrize(
    ("pattern", "found"),
    [
        ("layers.*", ["layers.0", "layers.12"]),
        ("layers.*.mlp", ["layers.0.mlp"]),
        ("**.mlp", ["layers.0.mlp"]),
        ("layers.1*", ["layers.12"]),
        ("layers**", ["layers", "layers.0", "layers.0.mlp", "layers.12"]),
        ("layersX0", []),
        ("layers.0", ["layers.0"]),
    ],
)
def test_stars(pattern: str, found: list[str]) -> None:
    names = ["layers", "layers.0", "layers.0.mlp", "layers.12", "head"]
    assert [name for name in names if matches(pattern, name)] == found
