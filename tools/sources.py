"""Facts about Python files for the architecture tests: imports, functions and their sizes, public names.

They are read from syntax trees; no file is imported.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

Definition = ast.FunctionDef | ast.AsyncFunctionDef
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


class Import(NamedTuple):
    """One imported name: `from a.b import c` is ("a.b", "c"), `import a.b` is ("a.b", "").

    Relative imports in a package's `src` have their absolute name.
    """

    module: str
    name: str
    line: int
    at_import: bool  # runs when the file is imported: outside functions and TYPE_CHECKING blocks
    for_types: bool  # under `if TYPE_CHECKING:`, never run

    @property
    def top(self) -> str:
        return self.module.partition(".")[0]


class Function(NamedTuple):
    name: str  # qualified: "Engine.step"
    line: int
    num_lines: int  # from `def` to the end, less the docstring
    num_parameters: int  # without self and cls; *args and **kwargs count one each
    is_public: bool


@cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), str(path))


@cache
def imports(path: Path) -> list[Import]:
    """Return every import statement of a file, and every `import_module("literal")`."""
    return [found._replace(module=absolute(found.module, path)) for found in _imports(tree(path), True, False)]


def absolute(module: str, path: Path) -> str:
    """Resolve `module`, perhaps with leading dots, in the file at `path` below a `src` folder."""
    level = len(module) - len(module.lstrip("."))
    if level == 0:
        return module
    parts = path.with_suffix("").parts
    parts = parts[len(parts) - parts[::-1].index("src") :]
    return ".".join([*parts[: len(parts) - level], *filter(None, [module[level:]])])


def _imports(node: ast.AST, at_import: bool, for_types: bool) -> Iterator[Import]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import):
            for alias in child.names:
                yield Import(alias.name, "", child.lineno, at_import, for_types)
        elif isinstance(child, ast.ImportFrom):
            module = "." * child.level + (child.module or "")
            for alias in child.names:
                yield Import(module, alias.name, child.lineno, at_import, for_types)
        elif isinstance(child, ast.Call) and _is_dynamic_import(child):
            yield Import(str(child.args[0].value), "", child.lineno, at_import, for_types)  # type: ignore[attr-defined]
        if isinstance(child, ast.If) and ast.unparse(child.test).endswith("TYPE_CHECKING"):
            for statement in child.body:
                yield from _imports(ast.Module([statement], []), at_import=False, for_types=True)
            for statement in child.orelse:
                yield from _imports(ast.Module([statement], []), at_import, for_types)
        else:
            inside = at_import and not isinstance(child, (*_FUNCTIONS, ast.Lambda))
            yield from _imports(child, inside, for_types)


def _is_dynamic_import(call: ast.Call) -> bool:
    name = ast.unparse(call.func).rpartition(".")[2]
    is_literal = bool(call.args) and isinstance(call.args[0], ast.Constant) and isinstance(call.args[0].value, str)
    return name in ("import_module", "__import__") and is_literal


def uses(path: Path, package: str, with_types: bool = True) -> set[str]:
    """Return the names of `package` that a file uses, as dotted paths below it: {"init", "testing.run_ranks"}.

    Finds `from package.part import name`, and `package.name` after `import package`.  `with_types=False` excludes
    annotations: imports under TYPE_CHECKING, and `package.name` in an annotation.
    """
    found: set[str] = set()
    for item in imports(path):
        if item.top != package or (item.for_types and not with_types):
            continue
        found.add(".".join([*item.module.split(".")[1:], item.name]).strip("."))
    if "" in found:  # `import package`: every name is used through it
        found.discard("")
        ignored = set() if with_types else _annotation_nodes(path)
        for node in ast.walk(tree(path)):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == package:
                found |= set() if id(node) in ignored else {node.attr}
    return found


def _annotation_nodes(path: Path) -> set[int]:
    """Return the `id` of every node inside an annotation of a file."""
    fields = ("annotation", "returns")
    roots = [getattr(node, field, None) for node in ast.walk(tree(path)) for field in fields]
    return {id(inner) for root in roots if isinstance(root, ast.AST) for inner in ast.walk(root)}


def dotted_names(path: Path) -> Iterator[tuple[str, int]]:
    """Yield the dotted expressions of a file, longest forms only: ("torch.distributed.barrier", line 12)."""
    inner: set[int] = set()
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Attribute):
            parts = []
            current: ast.expr = node
            while isinstance(current, ast.Attribute):
                inner.add(id(current.value))
                parts.append(current.attr)
                current = current.value
            if isinstance(current, ast.Name) and id(node) not in inner:
                yield ".".join([current.id, *reversed(parts)]), node.lineno


@cache
def functions(path: Path) -> list[Function]:
    return list(_functions(tree(path), prefix="", in_class=False, is_public=not path.name.startswith("_")))


def _functions(node: ast.AST, prefix: str, in_class: bool, is_public: bool) -> Iterator[Function]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, _FUNCTIONS):
            visible = is_public and (not child.name.startswith("_") or child.name == "__init__")
            name = prefix + child.name
            yield Function(name, child.lineno, _num_lines(child), _num_parameters(child, in_class), visible)
            yield from _functions(child, f"{name}.", in_class=False, is_public=False)
        elif isinstance(child, ast.ClassDef):
            visible = is_public and not child.name.startswith("_")
            yield from _functions(child, f"{prefix}{child.name}.", in_class=True, is_public=visible)
        else:
            yield from _functions(child, prefix, in_class, is_public)


def _num_lines(function: Definition) -> int:
    total = (function.end_lineno or function.lineno) - function.lineno + 1
    first = function.body[0]
    if ast.get_docstring(function) is not None:
        total -= (first.end_lineno or first.lineno) - first.lineno + 1
    return total


def _num_parameters(function: Definition, in_class: bool) -> int:
    arguments = function.args
    names = [a.arg for a in (*arguments.posonlyargs, *arguments.args)]
    if in_class and names and names[0] in ("self", "cls", "mcs"):
        names = names[1:]
    extra = [a for a in (arguments.vararg, arguments.kwarg) if a is not None]
    return len(names) + len(arguments.kwonlyargs) + len(extra)


def classes(path: Path) -> list[ast.ClassDef]:
    return [node for node in ast.walk(tree(path)) if isinstance(node, ast.ClassDef)]


def public_names(path: Path) -> list[str] | None:
    """Return the literal names in `__all__` of a file; None without `__all__`.

    Starred parts (`*table.NAMES`) are skipped, since only an import could expand them.  Raises ValueError if another
    part is computed.
    """
    for statement in tree(path).body:
        targets = statement.targets if isinstance(statement, ast.Assign) else []
        if any(isinstance(target, ast.Name) and target.id == "__all__" for target in targets):
            value = statement.value  # type: ignore[attr-defined]
            if isinstance(value, ast.List):
                value = ast.List([element for element in value.elts if not isinstance(element, ast.Starred)])
            return [str(name) for name in ast.literal_eval(value)]
    return None
