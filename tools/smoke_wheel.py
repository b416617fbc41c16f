#!/usr/bin/env python3
"""Use an installed package once: python tools/smoke_wheel.py zoptim compiled

The second argument says what was installed: "compiled" (a wheel with kernels), "pure" (the wheel without them of a
package that has some) or "python" (a package of Python alone).  tools/release.py and cibuildwheel run this in fresh
environments.  Prints the instruction set or transport in use; raises if the package does not work or comes from
elsewhere than the environment.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch


def zcomm(package: Any, kind: str) -> str:
    world = package.init(device="cpu")
    assert package.all_gather_object({"rank": world.rank}) == [{"rank": 0}]
    world.close()
    has_transport = importlib.util.find_spec("zcomm._shared") is not None
    assert has_transport == (kind == "compiled"), kind
    if not has_transport:
        return "Gloo"
    importlib.import_module("zcomm._shared")
    return "shared memory"


def zprecision(package: Any, kind: str) -> str:
    weight = package.quantize(torch.randn(32, 128), "int4")
    assert package.linear(torch.ones(2, 128), package.pack(weight)).shape == (2, 32)
    assert package.inspect([torch.ones(4)]).norm.item() == 2.0
    assert bool(package.kernels().levels) == (kind == "compiled"), package.kernels()
    return str(package.kernels().cpu)


def zoptim(package: Any, kind: str) -> str:
    layer = torch.nn.Linear(8, 2)
    optimizer = package.AdamW(layer.parameters(), lr=0.1)
    oracle = torch.optim.AdamW([torch.nn.Parameter(p.detach().clone()) for p in layer.parameters()], lr=0.1)
    for _ in range(3):
        layer(torch.ones(8)).sum().backward()
        for mine, theirs in zip(layer.parameters(), oracle.param_groups[0]["params"]):
            theirs.grad = None if mine.grad is None else mine.grad.clone()
        optimizer.step()
        oracle.step()
    for mine, theirs in zip(layer.parameters(), oracle.param_groups[0]["params"]):
        torch.testing.assert_close(mine, theirs)
    assert bool(package.kernels().levels) == (kind == "compiled"), package.kernels()
    return str(package.kernels().cpu)


def zpartition(package: Any, kind: str) -> str:
    layer = torch.nn.Linear(8, 2)
    plan = package.plan(layer, policy=package.ZeroPolicy(stage=2), world_size=4)
    return f"{plan}"[:40]


def zckpt(package: Any, kind: str) -> str:
    layer = torch.nn.Linear(4, 2)
    with tempfile.TemporaryDirectory() as folder:
        package.save(folder, tensors=package.views(layer), objects={"epoch": 3}, step=1)
        assert package.load(folder, tensors=package.views(layer)).objects == {"epoch": 3}
    return "saved and loaded"


def zengine(package: Any, kind: str) -> str:
    layer = torch.nn.Linear(4, 1)
    config = {"train_batch_size": 2, "optimizer": {"type": "AdamW"}, "zero_optimization": {"stage": 2}}
    engine, *_ = package.initialize(model=layer, config=config)
    engine.backward(engine(torch.ones(2, 4)).sum())
    report = engine.step()
    assert report
    return str(report)


USES = {use.__name__: use for use in (zcomm, zprecision, zpartition, zoptim, zckpt, zengine)}


def main(argv: list[str]) -> int:
    if len(argv) != 2 or Path(argv[0]).name not in USES or argv[1] not in ("compiled", "pure", "python"):
        print(f"usage: smoke_wheel.py {{{','.join(USES)}}} {{compiled,pure,python}}", file=sys.stderr)
        return 2
    name, kind = Path(argv[0]).name, argv[1]
    package = importlib.import_module(name)
    assert str(package.__file__).startswith(sys.prefix), package.__file__
    print(f"{name} {package.__version__} ({kind}): {USES[name](package, kind)}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
