"""Branches on the device's type: which there are, and which test takes each of them on the simulated device.

A site is an expression of the sources that asks for the type of a device.  An attribute called `device`, or a call,
that is compared with a word is none: it is an entry of the config (`offload_param.device == "cpu"`).  On the device,
sites of the packages note at import which test evaluates them and with what result (`watched`);
`tests/simulated/branches.txt` is the list.

    SIMULATED_CUDA_BRANCHES=FILE tools/dev.py test --device simulated ...   appends what is taken to FILE
    python -m simulated_cuda.branches FILE                                  writes the list from it
"""

from __future__ import annotations

import ast
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs

__all__ = ["LIST", "VARIABLE", "Site", "find_sites", "read_list", "watched"]

ROOT = Path(__file__).resolve().parent.parent.parent
LIST = ROOT / "tests" / "simulated" / "branches.txt"
VARIABLE = "SIMULATED_CUDA_BRANCHES"
RECORDER = "__branch_on_device__"
TYPES = {"cuda", "cpu"}
NOT_TAKEN = "not taken"


@attrs.frozen(order=True)
class Site:
    """One expression that asks for a device's type."""

    path: str  # from the root of the repository
    function: str  # qualified; "" in a module's body
    text: str

    def __str__(self) -> str:
        return f"{self.path} | {self.function} | {self.text}"


def find_sites() -> list[Site]:
    """Return the sites of all packages; those of DeepSpeed's names are interfaces, not paths, and stay out."""
    found: set[Site] = set()
    for path in sorted(ROOT.glob("packages/*/src/**/*.py")):
        if "zengine/deepspeed/" not in path.as_posix() and "cu" in (text := path.read_text()):
            finder = _Finder(path.relative_to(ROOT).as_posix())
            finder.visit(ast.parse(text))
            found.update(finder.found)
    return sorted(found)


def read_list() -> dict[str, str]:
    """Return the committed list: the test that takes each site."""
    lines = [line for line in LIST.read_text().splitlines() if line and not line.startswith("#")]
    return {site: test for site, _, test in (line.partition(" -> ") for line in lines)}


def watched(path: str) -> Any:
    """Return the code of a source file whose sites record themselves."""
    relative = Path(path).resolve().relative_to(ROOT).as_posix()
    tree = ast.parse(Path(path).read_text())
    return compile(ast.fix_missing_locations(_Finder(relative, wraps=True).visit(tree)), path, "exec")


def recorder() -> Callable[[str, Any, bool], Any]:
    """Return the function that sites call; it appends each site that took its branch of cuda, with the test."""
    seen: set[str] = set()

    def record(site: str, value: Any, on_cuda: bool) -> Any:
        target = os.environ.get(VARIABLE)
        if target and site not in seen and bool(value) == on_cuda and (test := os.environ.get("PYTEST_CURRENT_TEST")):
            seen.add(site)
            with open(target, "a") as file:
                file.write(f"{site} -> {test.rpartition(' ')[0]}\n")
        return value

    return record


def _on_cuda(node: ast.expr) -> bool:
    """Return the value of a site for a device of cuda."""
    if isinstance(node, ast.Attribute):
        return node.attr == "is_cuda"
    if isinstance(node, ast.Call):
        return True
    assert isinstance(node, ast.Compare)
    is_equal = isinstance(node.ops[0], ast.Eq)
    return is_equal == (getattr(node.comparators[0], "value", None) == "cuda")


class _Finder(ast.NodeTransformer):
    """Finds sites and, if it `wraps`, replaces E by RECORDER("site", E, E's value on cuda)."""

    def __init__(self, path: str, wraps: bool = False) -> None:
        self.path, self.wraps = path, wraps
        self.names: list[str] = []
        self.found: set[Site] = set()

    def _scope(self, node: Any) -> ast.AST:
        self.names.append(node.name)
        result = self.generic_visit(node)
        self.names.pop()
        return result

    visit_FunctionDef = visit_ClassDef = _scope  # noqa: N815 - the names that ast calls

    def _site(self, node: ast.expr) -> ast.AST:
        site = Site(self.path, ".".join(self.names), ast.unparse(node))
        self.found.add(site)
        if not self.wraps:
            return node
        arguments = [ast.Constant(str(site)), node, ast.Constant(_on_cuda(node))]
        call = ast.Call(ast.Name(RECORDER, ast.Load()), arguments, [])
        return ast.copy_location(call, node)

    def visit_Compare(self, node: ast.Compare) -> ast.AST:
        constants = [each.value for each in node.comparators if isinstance(each, ast.Constant)]
        is_entry = isinstance(node.left, ast.Call) or getattr(node.left, "attr", "") == "device"
        asks = bool(constants) and constants[0] in TYPES and not is_entry
        return self._site(node) if asks else self.generic_visit(node)

    def visit_Attribute(self, node: ast.Attribute) -> ast.AST:
        return self._site(node) if node.attr in ("is_cuda", "is_cpu") else self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> ast.AST:
        return self._site(node) if ast.unparse(node) == "torch.cuda.is_available()" else self.generic_visit(node)


def main(taken_file: str) -> None:
    """Write the list: the first test of each site, by what was recorded; else the one that is listed already."""
    taken: dict[str, str] = {}
    for line in sorted(Path(taken_file).read_text().splitlines()):
        site, _, test = line.partition(" -> ")
        taken.setdefault(site, test)
    taken = read_list() | taken
    lines = ["# Made by simulated_cuda.branches: branches on the device's type, and a test that takes each on cuda."]
    lines += [f"{site} -> {taken.get(str(site), NOT_TAKEN)}" for site in find_sites()]
    LIST.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main(sys.argv[1])
