"""Runs pieces in processes of their own, within a budget of minutes, and remembers verdicts in a state file."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import attrs

from acceptance.child import PARENT_VARIABLE
from acceptance.table import Piece
from acceptance.verdict import State, Verdict

__all__ = ["Memory", "Runner", "key_of"]

SCRIPT = Path(__file__).resolve().parent.parent / "gpu_acceptance.py"
OUTPUT_CHARACTERS = 4000  # kept of a failed piece
GRACE_S = 10  # between the request to end and the end


def key_of(facts: Mapping[str, Any]) -> str:
    """Return the text under which verdicts are comparable: sources, device, driver and versions."""
    versions = " ".join(f"{name} {version}" for name, version in sorted(facts["versions"].items()))
    return f"{facts['sources']} on {facts['device']}, driver {facts['driver']}, {versions}"


@attrs.define(eq=False)
class Memory:
    """Verdicts by key and piece, in a file that is replaced at every change, so a kill leaves the last whole one."""

    path: Path
    verdicts: dict[str, dict[str, Verdict]] = attrs.field(factory=dict)

    @classmethod
    def open(cls, path: Path) -> Memory:
        """Read the file, if there is one.  Raises ValueError for a file that is something else."""
        if not path.exists():
            return cls(path)
        try:
            plain = json.loads(path.read_text())
            found = {key: {name: Verdict.from_json(each) for name, each in of.items()} for key, of in plain.items()}
        except (ValueError, AttributeError, TypeError, KeyError) as error:
            raise ValueError(f"{path} is no state of this script ({error}): delete it, or name another") from None
        return cls(path, found)

    def of(self, key: str) -> dict[str, Verdict]:
        return self.verdicts.setdefault(key, {})

    def keep(self, key: str, verdict: Verdict) -> None:
        """Remember a verdict, on disk."""
        self.of(key)[verdict.piece] = verdict
        plain = {key: {name: each.to_json() for name, each in of.items()} for key, of in self.verdicts.items()}
        self.path.parent.mkdir(parents=True, exist_ok=True)
        made = self.path.with_name(f"{self.path.name}.{os.getpid()}")
        made.write_text(json.dumps(plain, indent=1) + "\n")
        made.replace(self.path)


@attrs.define(eq=False, kw_only=True)
class Runner:
    """Runs pieces one by one."""

    environ: Mapping[str, str]
    results: Path  # of the report
    deadline: float  # of time.monotonic
    log: Callable[[str], None]
    plant: str = ""

    def facts(self) -> dict[str, Any]:
        """Ask a process for the device.  Raises RuntimeError with its output."""
        found, output = self._child("facts", 300)
        if found is None:
            raise RuntimeError(output.strip().splitlines()[-1] if output.strip() else "no answer")
        return found

    def run(self, pieces: list[Piece], memory: Memory, key: str, again: bool) -> dict[str, Verdict]:
        """Return the verdict of each piece: a remembered pass, or that of a run."""
        verdicts = {}
        for number, piece in enumerate(pieces, start=1):
            verdict = memory.of(key).get(piece.name)
            done = verdict is not None and verdict.state is State.PASSED and not again and not self.plant
            remains = self.deadline - time.monotonic()
            if verdict is not None and done:
                how = "passed before"
            elif remains < piece.limit_s:
                known = verdict or Verdict(
                    piece=piece.name, state=State.NOT_RUN, reason="no time was left: run again"
                )
                verdict, how = known, f"not run now: needs up to {piece.limit_s} s, {max(0, remains):.0f} s are left"
            else:
                self.log(f"[{number}/{len(pieces)}] {piece.name}: {piece.title} ...")
                verdict = self._run(piece)
                how = f"{verdict.state.value} in {verdict.seconds:.0f} s"
                if not self.plant:
                    memory.keep(key, verdict)
            verdicts[piece.name] = verdict
            reason = verdict.reason if verdict.state is not State.PASSED else ""
            self.log(f"[{number}/{len(pieces)}] {piece.name}: {how}" + (f"\n    {reason}" if reason else ""))
        return verdicts

    def _run(self, piece: Piece) -> Verdict:
        start = time.monotonic()
        found, output = self._child(piece.name, piece.limit_s)
        if found is not None:
            verdict = Verdict.from_json(found)
            kept = (verdict.output or output)[-OUTPUT_CHARACTERS:] if verdict.state is State.FAILED else ""
            return attrs.evolve(verdict, output=kept)
        seconds = round(time.monotonic() - start, 1)
        (*_, reason) = output.splitlines()
        return Verdict(
            piece=piece.name, state=State.FAILED, reason=reason, seconds=seconds, output=output[-OUTPUT_CHARACTERS:]
        )

    def _child(self, name: str, limit_s: float) -> tuple[dict[str, Any] | None, str]:
        """Return the result of a process, None if it left none, and its output with the way it ended."""
        with tempfile.TemporaryDirectory(prefix="gpu-acceptance-") as folder:
            target, log = Path(folder) / "result.json", Path(folder) / "output"
            command = [sys.executable, str(SCRIPT), "--child", name, "--target", str(target)]
            command += ["--results", str(self.results), "--plant", self.plant]
            environ = {**self.environ, PARENT_VARIABLE: str(os.getpid())}
            with log.open("wb") as file:
                child = subprocess.Popen(
                    command, env=environ, stdout=file, stderr=subprocess.STDOUT, start_new_session=True
                )
                try:
                    code: int | None = child.wait(limit_s)
                except subprocess.TimeoutExpired:
                    code = None
                finally:
                    _end(child)
            output = log.read_text(errors="replace")
            if target.exists() and code == 0:
                return json.loads(target.read_text()), output
            way = f"was ended after {limit_s} s" if code is None else f"ended with code {code}"
            return None, f"{output.rstrip()}\nthe process {way}" if name != "facts" else output


def _end(child: subprocess.Popen[bytes]) -> None:
    """End a process with all that it has started; one that still runs prints its stacks first."""
    for number in (signal.SIGABRT, signal.SIGKILL) if child.poll() is None else (signal.SIGKILL,):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(GRACE_S)
