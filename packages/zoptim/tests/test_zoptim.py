"""The package: unused optimizers are not imported."""

from __future__ import annotations

import subprocess
import sys

import pytest

import zoptim


def test_every_public_name_is_there_and_a_typo_is_not() -> None:
    for name in zoptim.__all__:
        assert getattr(zoptim, name) is not None
        assert name in dir(zoptim)
    with pytest.raises(AttributeError, match="'zoptim' has no attribute 'Adamw'"):
        zoptim.Adamw  # noqa: B018


def test_a_name_of_a_config_imports_its_own_optimizer_alone() -> None:
    code = (
        "import sys, torch, zoptim; zoptim.make_optimizer('Lion', [torch.ones(2, requires_grad=True)], {}); "
        "assert 'zoptim.optimizers.lion' in sys.modules; assert 'zoptim.optimizers.muon' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
