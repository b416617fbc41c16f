#!/usr/bin/env python3
"""Commands of this repository.  Each sets up `.venv` first, which takes milliseconds if it is up to date.

    python3 tools/dev.py VERB [ARGUMENTS...]

Arguments after the verb go to its program: `test -k bucket`, `train --steps 20`, `check --fast`.  `--here` before the
verb skips the set-up and uses the running interpreter with the packages' sources on its path, for machines with their
own torch and no package index.

Standard library only.  devenv.py makes the environment.
"""

from __future__ import annotations

import os
import sys
import time

import devenv
from devenv import ROOT, SetupError, info, venv_python

# Four workers on two cores: half of the time of a test is waiting, for ranks to start, to end or to be given up.
PYTEST = ("-m", "pytest", "-n", "4", "--dist", "worksteal")
PYTEST_ALONE = ("-m", "pytest")  # for an interpreter without pytest-xdist
LEFTOVERS = (".cache", ".mypy_cache", ".ruff_cache", ".pytest_cache", ".hypothesis", "build", "dist")


def pytest_command(python: str, arguments: list[str], here: bool = False) -> list[str]:
    """Return the pytest command; later options win, so `-n 0` after the verb disables the workers."""
    from importlib.util import find_spec

    has_workers = not here or find_spec("xdist") is not None
    return [python, *(PYTEST if has_workers else PYTEST_ALONE), *arguments]


def train_command(python: str, arguments: list[str]) -> list[str]:
    return [python, "tools/train/launch.py", *arguments]


def check_command(python: str, arguments: list[str]) -> list[str]:
    return [python, "tools/check.py", *arguments]


def here_environment() -> dict[str, str]:
    """Return the present environment with the packages' sources on PYTHONPATH."""
    sources = [str(path) for path in sorted(ROOT.glob("packages/*/src"))]
    present = os.environ.get("PYTHONPATH")
    return {**os.environ, "PYTHONPATH": os.pathsep.join(sources + ([present] if present else []))}


def prepare(here: bool) -> tuple[str, dict[str, str]]:
    """Return the interpreter and the environment variables of a verb."""
    if here:
        return sys.executable, here_environment()
    devenv.ensure()
    return venv_python(), devenv.child_environment()


def run(command: list[str], environ: dict[str, str]) -> int:
    """Run a command to its end.  Ctrl-C does not end the wait: the child receives it too and handles it."""
    import subprocess

    with subprocess.Popen(command, cwd=ROOT, env=environ) as child:
        while True:
            try:
                return child.wait()
            except KeyboardInterrupt:
                continue


def become(command: list[str], environ: dict[str, str]) -> int:
    """Replace this process, so that the program receives signals and sets the exit code itself."""
    sys.stdout.flush()
    os.chdir(ROOT)
    os.execve(command[0], command, environ)


def train(arguments: list[str], here: bool) -> int:
    """run the main job: train a small language model on two ranks (train --help lists its options)"""
    python, environ = prepare(here)
    return become(train_command(python, arguments), environ)


def on_device(arguments: list[str], environ: dict[str, str]) -> tuple[list[str], dict[str, str]]:
    """Take `--device NAME` out of pytest's arguments; "simulated" is the only NAME (tools/simulated_cuda)."""
    if "--device" not in arguments:
        return arguments, environ
    at = arguments.index("--device")
    if arguments[at + 1 : at + 2] != ["simulated"]:
        raise SetupError("test --device: write `--device simulated`; without it, tests use this machine's devices")
    from simulated_cuda import environment

    rest = environment.pytest_arguments(arguments[:at] + arguments[at + 2 :], ROOT)
    return rest, environment.simulated(environ)


def test(arguments: list[str], here: bool) -> int:
    """run the tests; pytest's arguments: test packages/zoptim, test -k bucket; --device simulated: on a CUDA model"""
    python, environ = prepare(here)
    arguments, environ = on_device(arguments, environ)
    # One computing thread per process: the workers and their ranks already fill the cores.
    environ.setdefault("OMP_NUM_THREADS", "1")
    start = time.monotonic()
    code = run(pytest_command(python, arguments, here), environ)
    result = "ok" if code == 0 else f"FAILED (pytest exit code {code})"
    info(f"test {result} in {time.monotonic() - start:.0f} s")
    return code


def check(arguments: list[str], here: bool) -> int:
    """format, lint, types, architecture, caps, collect, doctests, tests: a line each (--fast, --only, --fix)"""
    python, environ = prepare(here)
    environ.setdefault("OMP_NUM_THREADS", "1")
    return become(check_command(python, arguments), environ)


def build(arguments: list[str], here: bool) -> int:
    """compile the kernels of all packages, even if their sources have not changed"""
    if arguments or here:
        raise SetupError("build takes no arguments and works in .venv only")
    devenv.ensure()
    packages = devenv.kernel_packages()
    if not packages:
        info("nothing to build: no package has compiled kernels (packages/*/hatch_build.py)")
        return 0
    with devenv.exclusive() as lock:
        devenv.build_kernels(packages, lock)
    return 0


def matrix(arguments: list[str], here: bool) -> int:
    """run the tests under every supported Python that is found, and say which are not (matrix --help)"""
    return become([sys.executable, "tools/matrix.py", *arguments], dict(os.environ))


def bench(arguments: list[str], here: bool) -> int:
    """run the benchmarks behind the committed figures; without names it lists them; --all (bench --help)"""
    python, environ = prepare(here)
    return become([python, "tools/bench.py", *arguments], environ)


def docs(arguments: list[str], here: bool) -> int:
    """build the documentation site and check its links; --run: run its code; --serve: show it (docs --help)"""
    python, environ = prepare(here)
    return become([python, "tools/docs.py", *arguments], environ)


def clean(arguments: list[str], here: bool) -> int:
    """remove .venv and every cache and build output; runs/ with its checkpoints stays"""
    if arguments or here:
        raise SetupError("clean takes no arguments")
    import shutil

    with devenv.exclusive():
        bytecode = [path for top in ("packages", "tests", "tools") for path in ROOT.glob(f"{top}/**/__pycache__")]
        devenv.discard()
        for path in [*(ROOT / name for name in LEFTOVERS), *bytecode]:
            shutil.rmtree(path, ignore_errors=True)
    info("removed .venv, caches and build outputs")
    return 0


VERBS = {verb.__name__: verb for verb in (train, test, check, build, bench, matrix, docs, clean)}


def usage() -> str:
    lines = [f"  {name:7}{verb.__doc__}" for name, verb in VERBS.items()]
    return "\n".join([(__doc__ or "").strip(), "", "Verbs:", *lines])


def parse(argv: list[str]) -> tuple[str, list[str], bool]:
    """Split a command line into verb, arguments and True for `--here`; the verb is `help` if help is requested.

    Raises SetupError for an unknown verb.
    """
    here = argv[:1] == ["--here"]
    rest = argv[1:] if here else argv
    if not rest or rest[0] in ("-h", "--help", "help"):
        return "help", rest[1:], here
    if rest[0] not in VERBS:
        import difflib

        near = difflib.get_close_matches(rest[0], VERBS, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"choose one of {', '.join(VERBS)}"
        raise SetupError(f"unknown verb {rest[0]!r}: {hint}")
    return rest[0], rest[1:], here


def main(argv: list[str]) -> int:
    try:
        verb, arguments, here = parse(argv)
        if verb == "help":
            print(usage())
            return 0
        return VERBS[verb](arguments, here)
    except SetupError as error:
        print(f"dev: {error}", file=sys.stderr, flush=True)
        return 2
    except KeyboardInterrupt:
        print("dev: interrupted", file=sys.stderr, flush=True)
        return 130


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
