#!/usr/bin/env python3
"""Run tests under every supported Python that this machine has, and say which it has not.

    python3 tools/dev.py matrix [PYTEST ARGUMENTS...]
    python3 tools/dev.py matrix --python 3.12 packages/zoptim
    python3 tools/dev.py matrix --smoke

supported.toml lists the pairs of Python and torch.  For each pair whose interpreter is found (python3.12 on PATH, or
below ~/.pyenv/versions) an environment in .cache/matrix gets this torch and everything else that .venv has; then
pytest runs there, with `-n 2`.  Without arguments all tests run, and a pass is recorded in supported.toml; `--smoke`
runs the examples of READMEs and docstrings and the loss curves, in minutes, and records that apart.  Environments are
kept: a second run starts at once.  Each takes about 1.5 GB.

Standard library only.
"""

from __future__ import annotations

import argparse
import datetime
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import devenv
import repo
import tomllib

TABLE = repo.ROOT / "tools" / "supported.toml"
PLACE = repo.ROOT / ".cache" / "matrix"
SMOKE = ("tests/docs/test_examples.py", "tests/parity/test_loss_curves.py")


class Pair(NamedTuple):
    python: str  # "3.12"
    torch: str  # "2.13.0"
    passed: str  # the date of the newest pass of all tests; "" if there is none

    def __str__(self) -> str:
        return f"Python {self.python}, torch {self.torch}"


def pairs(text: str) -> list[Pair]:
    """Read supported.toml."""
    return [Pair(row["python"], row["torch"], row.get("passed", "")) for row in tomllib.loads(text)["pair"]]


def runs(interpreter: Path | str, python: str) -> bool:
    """Return whether the interpreter starts and has the version; a shim of pyenv may do neither."""
    code = "import sys; print('%d.%d' % sys.version_info[:2])"
    try:
        done = subprocess.run([interpreter, "-c", code], capture_output=True, text=True, check=False, timeout=60)
    except OSError:
        return False
    return done.returncode == 0 and done.stdout.strip() == python


def find_interpreter(python: str) -> str | None:
    """Return the path of an interpreter of this version: the running one, on PATH, or one of pyenv's."""
    candidates: list[str | Path | None] = [sys.executable, shutil.which(f"python{python}")]
    candidates += sorted((Path.home() / ".pyenv" / "versions").glob(f"{python}.*/bin/python"), reverse=True)
    return next((str(path) for path in candidates if path and runs(path, python)), None)


def environment(pair: Pair, interpreter: str) -> str:
    """Make or reuse the environment of a pair; return its interpreter.  Raises devenv.SetupError."""
    folder = PLACE / f"python{pair.python}-torch{pair.torch}"
    python, stamp = str(folder / "bin" / "python"), folder / "stamp"
    wanted = devenv.digest(devenv.setup_inputs(), str(pair))
    if devenv.read_text(stamp) == wanted:
        return python
    shutil.rmtree(folder, ignore_errors=True)
    folder.parent.mkdir(parents=True, exist_ok=True)
    pins = folder.parent / f"constraints-{pair.torch}.txt"
    text = (repo.ROOT / "constraints.txt").read_text()
    pins.write_text(re.sub(r"^torch==.*$", f"torch=={pair.torch}", text, flags=re.MULTILINE))
    needs = folder.parent / "requirements.txt"
    needs.write_text((repo.ROOT / "requirements-dev.txt").read_text().replace("-c constraints.txt\n", ""))
    pip = [python, "-m", "pip", "install", "-q", "-c", str(pins)]
    with devenv.exclusive() as lock:
        devenv.call([interpreter, "-m", "venv", str(folder)], f"{pair}: making an environment", lock)
        devenv.call([*pip, *devenv.BUILD_TOOLS], f"{pair}: installing the build tools", lock)
        devenv.call([*pip, "--no-build-isolation", "-r", str(needs)], f"{pair}: installing", lock)
    devenv.write_stamp(stamp, wanted)
    return python


def test(pair: Pair, python: str, arguments: Sequence[str]) -> bool:
    """Run pytest in the environment of a pair; return whether it passes."""
    environ = devenv.child_environment()
    environ |= {"VIRTUAL_ENV": str(Path(python).parents[1]), "OMP_NUM_THREADS": "1"}
    environ["PATH"] = os.pathsep.join([str(Path(python).parent), environ["PATH"]])
    options = ("-q", "-n", "2", "--dist", "worksteal", "--weekly", "-p", "no:cacheprovider")
    command = [python, "-m", "pytest", *options, *arguments]
    return subprocess.run(command, cwd=repo.ROOT, env=environ, check=False).returncode == 0


def record(text: str, pair: Pair, date: str, *, smoke: bool = False) -> str:
    """Return supported.toml with a pass of all tests, or of the smoke tests, for `pair` on `date`."""
    head = f'[[pair]]\npython = "{pair.python}"\ntorch = "{pair.torch}"\n'
    assert text.count(head) == 1, pair
    before, _, after = text.partition(head)
    keys = re.match(r"(?:\w+ = .*\n)*", after)
    lines = keys[0].splitlines(keepends=True) if keys else []
    rest = after[sum(map(len, lines)) :]
    if smoke:
        kept = [line for line in lines if not line.startswith("smoke")]
        return "".join([before, head, *kept, f'smoke = "{date}"\n', rest])
    return f'{before}{head}passed = "{date}"\ntests = "all"\n{rest}'


def parser() -> argparse.ArgumentParser:
    result = argparse.ArgumentParser(prog="dev.py matrix", description=(__doc__ or "").splitlines()[0])
    result.add_argument("--smoke", action="store_true", help="only the examples and the loss curves")
    result.add_argument("--python", action="append", metavar="3.12", help="only this version (repeatable)")
    return result


def main(argv: Sequence[str] | None = None) -> int:
    options, arguments = parser().parse_known_args(argv)
    is_whole = not arguments  # of the chosen tests, so that a pass counts
    arguments = [*(SMOKE if options.smoke else ()), *arguments]
    table = pairs(TABLE.read_text())
    chosen = [pair for pair in table if not options.python or pair.python in options.python]
    if not chosen:
        known = ", ".join(dict.fromkeys(pair.python for pair in table))
        print(f"matrix: --python {' '.join(options.python)}: supported.toml has {known}", file=sys.stderr)
        return 2
    results: dict[Pair, str] = {}
    for pair in chosen:
        start, interpreter = time.monotonic(), find_interpreter(pair.python)
        if interpreter is None:
            results[pair] = f"not run: no python{pair.python} here"
            continue
        try:
            passed = test(pair, environment(pair, interpreter), arguments)
        except devenv.SetupError as error:
            results[pair] = f"FAILED to install\n{error}"
            continue
        if passed and is_whole:
            today = datetime.date.today().isoformat()
            TABLE.write_text(record(TABLE.read_text(), pair, today, smoke=options.smoke))
        what = "all tests" if not arguments else " ".join(arguments)
        results[pair] = f"{'ok' if passed else 'FAILED'} in {time.monotonic() - start:.0f} s ({what})"
    for pair, result in results.items():
        print(f"matrix: {pair}: {result}", flush=True)
    return 1 if any(result.startswith("FAILED") for result in results.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
