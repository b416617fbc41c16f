#!/usr/bin/env python3
"""Test a package as it is published: its wheel, alone, in a fresh environment, outside this tree.

    python3 tools/isolate.py zoptim [zckpt ...]
    python3 tools/isolate.py --all

For each package: build its wheel and those of the siblings it depends on; create an environment; install torch, the
wheels and pytest with the pins of constraints.txt; outside the tree, check that no other sibling can be imported and
that present ones come from their wheels; run a copy of the package's tests, and its README as a doctest.

pip gets all wheels as files in one command, so it looks up no sibling on the package index, where two of the names
belong to unrelated projects.  A test that needs an absent sibling skips itself (`pytest.importorskip`); the result
line counts these and `--verbose` gives the reasons.

Takes about a minute and 1 GB of temporary disk per package.  Standard library only.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
import zipfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import devenv
import repo

TEST_TOOLS = ("pytest", "pytest-timeout", "hypothesis")

# Run in the fresh environment: argv[1] names the siblings that must be absent, argv[2] those that must be present.
PROBE = """
import importlib.metadata, importlib.util, json, sys
absent, present = sys.argv[1].split(), sys.argv[2].split()
for name in absent:
    assert importlib.util.find_spec(name) is None, f"{name} is importable but not a dependency"
for pair in present:
    name, distribution = pair.split("=")
    origin = importlib.util.find_spec(name).origin
    assert origin.startswith(sys.prefix), f"{name} comes from {origin}"
    url = importlib.metadata.distribution(distribution).read_text("direct_url.json") or "{}"
    assert json.loads(url).get("url", "").startswith("file:"), f"{distribution} does not come from its wheel"
for name in ("zcomm", "zengine"):
    installed = {d.metadata["Name"] for d in importlib.metadata.distributions()}
    assert name not in installed, f"{name} is the unrelated project from PyPI"
"""


class IsolationError(Exception):
    """Raised when a package fails alone; the message names the step and has its last lines."""


class Counts(NamedTuple):
    passed: int
    failed: int
    skipped: list[str]  # one reason per skipped test


def run(command: Sequence[str], what: str, cwd: Path, environ: dict[str, str]) -> str:
    """Run `command` and return its output.  Raises IsolationError if it fails."""
    done = subprocess.run(
        command, cwd=cwd, env=environ, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        text=True, errors="replace", check=False,
    )  # fmt: skip
    if done.returncode:
        tail = "\n".join(f"    {line}" for line in done.stdout.strip().splitlines()[-40:])
        raise IsolationError(f"{what} failed (exit code {done.returncode})\n{tail}")
    return done.stdout


def environment(venv: Path) -> dict[str, str]:
    """Return the variables for programs of the fresh environment, without this tree and .venv."""
    result = devenv.child_environment()
    search = [part for part in result["PATH"].split(os.pathsep) if not part.startswith(str(devenv.VENV))]
    result |= {"VIRTUAL_ENV": str(venv), "PATH": os.pathsep.join([str(venv / "bin"), *search])}
    result.setdefault("OMP_NUM_THREADS", "1")
    return result


def build_wheels(names: Sequence[str], target: Path) -> dict[str, Path]:
    """Build the wheels with the build tools of .venv; return them by package name."""
    wheels = {}
    for name in names:
        command = [devenv.venv_python(), "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "-q"]
        folder = target / name
        environ = devenv.child_environment()
        run([*command, "-w", str(folder), str(repo.package_folder(name))], f"building {name}", repo.ROOT, environ)
        (wheels[name],) = folder.glob("*.whl")
    return wheels


def check_wheel(name: str, wheel: Path) -> None:
    """Raise IsolationError unless the wheel has the package, its type marker and its kernels, and nothing else."""
    with zipfile.ZipFile(wheel) as archive:
        files = archive.namelist()
    if f"{name}/py.typed" not in files:
        raise IsolationError(f"{wheel.name} lacks {name}/py.typed")
    strays = [file for file in files if not file.startswith(f"{name}/") and ".dist-info/" not in file]
    if strays:
        raise IsolationError(f"{wheel.name} holds files outside {name}/: {strays[:5]}")
    is_compiled = (repo.package_folder(name) / "hatch_build.py").exists()
    if is_compiled != any(file.endswith(".so") for file in files) or is_compiled == wheel.stem.endswith("-none-any"):
        expected = "an .so and the tag of a platform" if is_compiled else "no .so and the tag none-any"
        raise IsolationError(f"{wheel.name} must have {expected}, because of {name}/hatch_build.py or its absence")


def install(venv: Path, wheels: Sequence[Path], cwd: Path) -> str:
    """Create the environment and install the wheels; return its interpreter."""
    python = str(venv / "bin" / "python")
    run([devenv.venv_python(), "-m", "venv", str(venv)], "making the environment", cwd, devenv.child_environment())
    constraints = ["-c", str(repo.ROOT / "constraints.txt")]
    what = [*map(str, wheels), "torch", *TEST_TOOLS]
    run([python, "-m", "pip", "install", "-q", *constraints, *what], "installing", cwd, environment(venv))
    return python


def copy_tests(name: str, target: Path) -> None:
    """Copy the tests, the documents and the pytest settings, all that the tests need beside the wheel."""
    target.mkdir()
    folder = repo.package_folder(name)
    shutil.copytree(folder / "tests", target / "tests", ignore=shutil.ignore_patterns("__pycache__"))
    for document in folder.glob("*.md"):
        shutil.copy(document, target)
    shutil.copy(repo.ROOT / "pyproject.toml", target)


def read_counts(report: Path) -> Counts:
    """Read the counts of a junit file."""
    cases = list(ElementTree.parse(report).iter("testcase"))
    failed = [case for case in cases if case.find("failure") is not None or case.find("error") is not None]
    skips = [found.get("message", "") for case in cases if (found := case.find("skipped")) is not None]
    return Counts(len(cases) - len(failed) - len(skips), len(failed), skips)


def isolate(name: str, folder: Path) -> Counts:
    """Run all phases for one package, inside the empty `folder`.  Raises IsolationError."""
    needed = repo.closure([name])
    wheels = build_wheels(needed, folder / "wheels")
    check_wheel(name, wheels[name])
    venv, place = folder / "venv", folder / "elsewhere"
    python = install(venv, list(wheels.values()), folder)
    copy_tests(name, place)
    absent = " ".join(other for other in repo.PACKAGES if other not in needed)
    present = " ".join(f"{other}={repo.DISTRIBUTIONS[other]}" for other in needed)
    environ = environment(venv)
    run([python, "-c", PROBE, absent, present], "looking for siblings", place, environ)
    report = folder / "report.xml"
    pytest = [python, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--junitxml={report}", "tests"]
    run(pytest, "its tests", place, environ)
    run([python, "-m", "doctest", "README.md"], "the example of its README", place, environ)
    return read_counts(report)


@contextlib.contextmanager
def working_folder(name: str, keep: bool) -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(prefix=f"isolate-{name}-"))
    try:
        yield folder
    finally:
        if keep:
            print(f"kept {folder}")
        else:
            shutil.rmtree(folder, ignore_errors=True)


def report(name: str, keep: bool, verbose: bool) -> bool:
    """Isolate one package and print its result line; return True if it passes."""
    print(f"{name:12}", end="", flush=True)
    start = time.monotonic()
    with working_folder(name, keep) as folder:
        try:
            counts = isolate(name, folder)
        except IsolationError as error:
            print(f"FAIL {time.monotonic() - start:6.1f} s  {error}", flush=True)
            return False
    siblings = ", ".join(repo.closure([name])[:-1]) or "no sibling"
    word = "ok" if counts.passed else "FAIL"  # a wheel whose tests all skip has not been tested
    numbers = f"{counts.passed} passed, {len(counts.skipped)} skipped; README ok; with {siblings}"
    print(f"{word:4} {time.monotonic() - start:6.1f} s  {numbers}", flush=True)
    for reason in sorted(set(counts.skipped)) if verbose else ():
        print(f"    skipped {counts.skipped.count(reason)} x: {reason}")
    return bool(counts.passed)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("packages", nargs="*", metavar="PKG", help=", ".join(repo.PACKAGES))
    parser.add_argument("--all", action="store_true", help="every package, one after the other")
    parser.add_argument("--keep", action="store_true", help="keep the temporary folders")
    parser.add_argument("--verbose", action="store_true", help="print why tests were skipped")
    options = parser.parse_args(argv)
    names = list(repo.PACKAGES) if options.all else options.packages
    unknown = [name for name in names if name not in repo.PACKAGES]
    if unknown or not names:
        parser.error(f"choose from {', '.join(repo.PACKAGES)}, or --all" + (f"; not {unknown}" if unknown else ""))
    try:
        devenv.ensure()
    except devenv.SetupError as error:
        print(f"isolate: {error}", file=sys.stderr)
        return 2
    failed = [name for name in names if not report(name, options.keep, options.verbose)]
    print(f"isolate: {'FAIL: ' + ', '.join(failed) if failed else 'ok'}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
