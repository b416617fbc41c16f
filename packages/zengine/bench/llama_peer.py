"""llama.cpp beside decode.py: a process of an interpreter that has `xllamacpp`, which completes a prompt on request.

    python llama_peer.py MODEL.gguf THREADS

It reads a line "PROMPT NEW" for each completion, numbers of tokens, and answers "WALL CPU": seconds of it by the
clock, and processor time of this process.  It needs xllamacpp only, so a virtual environment of its own serves.
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import time
from pathlib import Path
from types import TracebackType

__all__ = ["LlamaPeer"]

VOCABULARY, CONTEXT = 30_000, 2048


class LlamaPeer:
    """The client: starts the process, and ends it when the context is left."""

    def __init__(self, python: str, model: Path, threads: int) -> None:
        command = [python, str(Path(__file__).resolve()), str(model), str(threads)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.system = self._read()

    def _read(self) -> str:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("peer: "):
                return line.removeprefix("peer: ").strip()
        raise RuntimeError(f"llama_peer.py ended with exit code {self._process.wait()}: see its messages above")

    def seconds(self, prompt: int, new: int) -> tuple[float, float]:
        """Complete a prompt; return seconds by the clock, and of the process."""
        assert self._process.stdin is not None
        print(prompt, new, file=self._process.stdin, flush=True)
        wall, cpu = map(float, self._read().split())
        return wall, cpu

    def __enter__(self) -> LlamaPeer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()


def serve(model: str, threads: int) -> None:
    """Answer requests until the end of standard input."""
    import xllamacpp

    params = xllamacpp.CommonParams()
    params.model.path, params.n_ctx, params.n_parallel = model, CONTEXT, 1
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = threads
    params.warmup, params.verbosity = False, 0
    server = xllamacpp.Server(params)

    def complete(prompt: int, new: int) -> tuple[float, float]:
        request = {
            "prompt": [3 + (7 * k + prompt) % VOCABULARY for k in range(prompt)], "n_predict": new, "temperature": 0,
            "ignore_eos": True, "cache_prompt": False,
        }  # fmt: skip
        wall, cpu = time.perf_counter(), processor_seconds()
        answer = server.handle_completions(request)
        wall, cpu = time.perf_counter() - wall, processor_seconds() - cpu
        found = answer if isinstance(answer, dict) else json.loads(answer)
        done = found.get("timings", {}).get("predicted_n", found.get("usage", {}).get("completion_tokens"))
        if done != new:
            raise RuntimeError(f"asked for {new} tokens and got {str(found)[:500]}")
        return wall, cpu

    complete(8, 2)
    print(f"peer: xllamacpp {xllamacpp.__version__}, {xllamacpp.get_system_info().strip()}", flush=True)
    for line in sys.stdin:
        prompt, new = map(int, line.split())
        print("peer: {} {}".format(*complete(prompt, new)), flush=True)


def processor_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


if __name__ == "__main__":
    serve(sys.argv[1], int(sys.argv[2]))
