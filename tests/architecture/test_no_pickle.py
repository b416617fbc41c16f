"""No package reads or writes pickles, because loading a pickle executes code.

Exceptions: the rank harness for tests, which pickles over a pipe to processes that it has started itself; and
state_files.py, which writes temporary files for converters of other libraries that call torch.load.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import repo
import sources

MODULES = {"pickle", "cPickle", "_pickle", "cloudpickle", "dill", "joblib", "shelve", "marshal", "copyreg"}
# Functions of other libraries that pickle inside.
FUNCTIONS = {
    "torch.save", "torch.load", "torch.package", "torch.hub", "np.save", "np.load", "numpy.load", "numpy.save",
    "all_gather_object", "gather_object", "broadcast_object_list", "scatter_object_list", "send_object_list",
    "recv_object_list",
}  # fmt: skip
EXEMPT = (
    repo.source_folder("zcomm") / "testing",
    repo.source_folder("zengine") / "deepspeed" / "utils" / "state_files.py",
)
FILES = [p for name in repo.PACKAGES for p in repo.source_modules(name) if not any(map(p.is_relative_to, EXEMPT))]


def is_of_others(name: str) -> bool:
    """True if a dotted name is a function that pickles; functions of that name in zcomm and zengine send JSON."""
    return name.rpartition(".")[2] in FUNCTIONS and not name.startswith(("zcomm.", "zengine."))


def pickling(path: Path) -> list[str]:
    """Return every import and use of a function that pickles, with its line."""
    named = [(f"{item.module}.{item.name}".rstrip("."), item.line) for item in sources.imports(path)]
    return [
        f"{path.relative_to(repo.ROOT)}:{line} {name}"
        for name, line in [*named, *sources.dotted_names(path)]
        if name.partition(".")[0] in MODULES or name in FUNCTIONS or is_of_others(name)
    ]


def test_no_source_file_pickles() -> None:
    found = [line for path in FILES for line in pickling(path)]
    assert not found, "\n".join(["use JSON and safetensors:", *found])


def test_the_search_finds_known_uses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(repo, "ROOT", tmp_path)
    path = tmp_path / "example.py"
    path.write_text("import torch\nfrom pickle import dumps\ntorch.save(1, 'x')\nimport torch.distributed as dist\n")
    assert pickling(path) == ["example.py:2 pickle.dumps", "example.py:3 torch.save"]
