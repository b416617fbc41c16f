"""The random state of a process: Python, NumPy's global generator, torch on the CPU and on every CUDA device.

Captured as JSON (byte states in base64), so it goes into a checkpoint's `rank_objects`.  Private generators
(torch.Generator, numpy.random.Generator, random.Random) belong to whoever made them.  A data loader should have
one: iterating over a loader without one draws its seed from torch's global state, after any restore.
"""

from __future__ import annotations

import base64
import binascii
import random
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from zckpt.errors import CheckpointInputError
from zckpt.format.canonical import JSON
from zckpt.format.nodes import Node

_KEYS = ("python", "numpy", "torch", "cuda")
_MT19937_WORDS = 624
_CUDA_NBYTES = 16


def capture() -> dict[str, JSON]:
    """The state now; {"python", "numpy", "torch", "cuda"}.  "cuda" is [] where CUDA has not been used."""
    version, words, gauss = random.getstate()
    cuda = torch.cuda.get_rng_state_all() if _cuda_is_used() else []
    return {
        "python": {"version": version, "words": list(words), "gauss": gauss},
        "numpy": _pack(np.random.get_state(legacy=False)),
        "torch": _encode(torch.get_rng_state()),
        "cuda": [_encode(state) for state in cuda],
    }


def restore(state: Mapping[str, JSON]) -> tuple[str, ...]:
    """Put back what `capture` returned, so that every later draw is bit-identical.

    Returns what could not be put back, in words: () unless the number of CUDA devices has changed.
    CheckpointInputError if it is no such state; nothing is changed then.
    """
    return prepare(state)()


def prepare(state: Mapping[str, JSON]) -> Callable[[], tuple[str, ...]]:
    """Decode what `capture` returned; the result puts it back, as `restore` does, and cannot fail.

    CheckpointInputError if it is no such state, or one of another NumPy generator than this process has.
    """
    top = Node(dict(state) if isinstance(state, Mapping) else state, "", CheckpointInputError)
    try:
        python, numpy, torch_state, cuda = top.fields(*_KEYS)
        python_state, numpy_state = _python_state(python), _numpy_state(numpy)
        cpu = _cpu_state(torch_state)
        devices = [_cuda_state(each) for each in cuda.items()]
    except (TypeError, ValueError, RuntimeError, OverflowError) as error:
        raise CheckpointInputError(f"not a random state that capture() made here: {error}") from error

    def put_back() -> tuple[str, ...]:
        random.setstate(python_state)
        np.random.set_state(numpy_state)
        torch.set_rng_state(cpu)
        return _restore_cuda(devices)

    return put_back


def _python_state(node: Node) -> tuple[Any, ...]:
    version, words, gauss = node.fields("version", "words", "gauss")
    numbers = tuple(word.integer(0, 2**32 - 1) for word in words.items())
    made = version.integer(), numbers, None if gauss.value is None else gauss.number()
    try:
        random.Random().setstate(made)
    except ValueError as error:
        node.fail(f"version and words: {error}")
    return made


def _numpy_state(node: Node) -> dict[str, Any]:
    """The saved state, checked member by member against the state of the current generator."""
    made = _like(node, np.random.get_state(legacy=False))
    if made["has_gauss"] > 1:
        node.fail(f"has_gauss must be 0 or 1, is {made['has_gauss']}")
    if made["state"].get("pos", 0) > _MT19937_WORDS:
        node.fail("state.pos lies outside of it")  # NumPy would read there
    assert isinstance(made, dict)
    return made


def _like(node: Node, ours: Any) -> Any:
    if isinstance(ours, dict):
        return {key: _like(part, ours[key]) for key, part in zip(ours, node.fields(*ours))}
    if isinstance(ours, np.ndarray):
        dtype, data = node.fields("dtype", "base64")
        if dtype.value != ours.dtype.str:
            dtype.fail(f"must be {ours.dtype.str!r}")
        found = np.frombuffer(_raw(data), dtype=ours.dtype).copy()
        if found.shape != ours.shape:
            data.fail(f"holds {found.size} numbers, and {ours.size} are needed")
        return found
    if isinstance(ours, str):
        if node.value != ours:
            node.fail(f"must be {ours!r}, the generator of this process")
        return ours
    return node.number() if isinstance(ours, float) else node.integer(0, 2**128)


def _cpu_state(node: Node) -> Tensor:
    state = _bytes(node)
    try:
        torch.Generator().set_state(state)
    except (TypeError, RuntimeError) as error:
        node.fail(f"is no state of torch's generator: {error}")
    return state


def _cuda_state(node: Node) -> Tensor:
    """Seed and offset, of which the second is a multiple of 4."""
    state = _bytes(node)
    if state.numel() != _CUDA_NBYTES or int(state.view(torch.int64)[1]) % 4:
        node.fail("is no state of a CUDA generator")
    return state


def _cuda_is_used() -> bool:
    """Asking for the state would create a context on a GPU that the process leaves alone."""
    return bool(torch.cuda.is_initialized())  # type: ignore[no-untyped-call]


def _restore_cuda(states: list[Tensor]) -> tuple[str, ...]:
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    for device, saved in enumerate(states[:count]):
        torch.cuda.set_rng_state(saved, device)
    if len(states) <= count:
        return ()
    return (f"random states of {len(states) - count} CUDA devices were saved that this process does not have",)


def _encode(state: Tensor) -> str:
    return base64.b64encode(state.cpu().numpy().tobytes()).decode()


def _bytes(node: Node) -> Tensor:
    return torch.tensor(list(_raw(node)), dtype=torch.uint8)


def _raw(node: Node) -> bytes:
    try:
        return base64.b64decode(node.text(), validate=True)
    except binascii.Error as error:
        node.fail(f"is no base64: {error}")


def _pack(value: JSON) -> JSON:
    """NumPy's state is a dict of ints, strings, arrays and dicts of these, whatever the bit generator."""
    if isinstance(value, dict):
        return {key: _pack(item) for key, item in value.items()}
    if isinstance(value, np.ndarray):
        data = base64.b64encode(np.ascontiguousarray(value).tobytes()).decode()
        return {"dtype": value.dtype.str, "base64": data}
    return value.item() if isinstance(value, np.generic) else value
