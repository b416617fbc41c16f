"""The random state of a process: Python, NumPy's global generator, torch on the CPU and on every CUDA device.

The state is captured as JSON (byte states in base64), so it fits a checkpoint's `rank_objects`.  Private generators
(torch.Generator, numpy.random.Generator, random.Random) are not captured: save them yourself.  Give a data loader its
own generator: iterating over a loader without one draws a seed from torch's global state, after any restore.
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
    """Return the current state: {"python", "numpy", "torch", "cuda"}.  "cuda" is [] if CUDA was not used."""
    version, words, gauss = random.getstate()
    cuda = torch.cuda.get_rng_state_all() if _cuda_is_used() else []
    return {
        "python": {"version": version, "words": list(words), "gauss": gauss},
        "numpy": _encode_numpy(np.random.get_state(legacy=False)),
        "torch": _encode(torch.get_rng_state()),
        "cuda": [_encode(state) for state in cuda],
    }


def restore(state: Mapping[str, JSON]) -> tuple[str, ...]:
    """Restore a state that `capture` returned, so that every later draw is bit-identical.

    Returns messages about what could not be restored: () unless the number of CUDA devices has changed.
    Raises CheckpointInputError for an invalid state; nothing is changed then.
    """
    return prepare(state)()


def prepare(state: Mapping[str, JSON]) -> Callable[[], tuple[str, ...]]:
    """Decode a state that `capture` returned; the returned function restores it and cannot fail.

    Raises CheckpointInputError for an invalid state, or if NumPy's generator is another one than in this process.
    """
    top = Node(dict(state) if isinstance(state, Mapping) else state, "", CheckpointInputError)
    try:
        python, numpy, torch_state, cuda = top.fields(*_KEYS)
        python_state, numpy_state = _python_state(python), _numpy_state(numpy)
        cpu = _cpu_state(torch_state)
        devices = [_cuda_state(each) for each in cuda.items()]
    except (TypeError, ValueError, RuntimeError, OverflowError) as error:
        raise CheckpointInputError(f"not a random state of capture(), or not for this process: {error}") from error

    def apply() -> tuple[str, ...]:
        random.setstate(python_state)
        np.random.set_state(numpy_state)
        torch.set_rng_state(cpu)
        return _restore_cuda(devices)

    return apply


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
    made = _decode_like(node, np.random.get_state(legacy=False))
    if made["has_gauss"] > 1:
        node.fail(f"has_gauss must be 0 or 1, is {made['has_gauss']}")
    if made["state"].get("pos", 0) > _MT19937_WORDS:
        node.fail(f"state.pos must be at most {_MT19937_WORDS}")  # NumPy would read beyond the state
    assert isinstance(made, dict)
    return made


def _decode_like(node: Node, ours: Any) -> Any:
    if isinstance(ours, dict):
        return {key: _decode_like(part, ours[key]) for key, part in zip(ours, node.fields(*ours))}
    if isinstance(ours, np.ndarray):
        dtype, data = node.fields("dtype", "base64")
        if dtype.value != ours.dtype.str:
            dtype.fail(f"must be {ours.dtype.str!r}")
        found = np.frombuffer(_decode_base64(data), dtype=ours.dtype).copy()
        if found.shape != ours.shape:
            data.fail(f"holds {found.size} numbers, expected {ours.size}")
        return found
    if isinstance(ours, str):
        if node.value != ours:
            node.fail(f"must be {ours!r}, the generator of this process")
        return ours
    return node.number() if isinstance(ours, float) else node.integer(0, 2**128)


def _cpu_state(node: Node) -> Tensor:
    state = _decode_tensor(node)
    try:
        torch.Generator().set_state(state)
    except (TypeError, RuntimeError) as error:
        node.fail(f"is not a state of torch's generator: {error}")
    return state


def _cuda_state(node: Node) -> Tensor:
    """Decode seed and offset; the offset is a multiple of 4."""
    state = _decode_tensor(node)
    if state.numel() != _CUDA_NBYTES or int(state.view(torch.int64)[1]) % 4:
        node.fail("is not a state of a CUDA generator")
    return state


def _cuda_is_used() -> bool:
    """True if this process uses CUDA; reading a state would otherwise create a context on an unused GPU."""
    return bool(torch.cuda.is_initialized())  # type: ignore[no-untyped-call]


def _restore_cuda(states: list[Tensor]) -> tuple[str, ...]:
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    for device, saved in enumerate(states[:count]):
        torch.cuda.set_rng_state(saved, device)
    if len(states) <= count:
        return ()
    return (
        f"this process has {count} CUDA devices; the random states of {len(states) - count} more were not restored",
    )


def _encode(state: Tensor) -> str:
    return base64.b64encode(state.cpu().numpy().tobytes()).decode()


def _decode_tensor(node: Node) -> Tensor:
    return torch.tensor(list(_decode_base64(node)), dtype=torch.uint8)


def _decode_base64(node: Node) -> bytes:
    try:
        return base64.b64decode(node.text(), validate=True)
    except binascii.Error as error:
        node.fail(f"is not base64: {error}")


def _encode_numpy(value: JSON) -> JSON:
    """Encode NumPy's state: ints, strings, arrays and dicts of these, for any bit generator."""
    if isinstance(value, dict):
        return {key: _encode_numpy(item) for key, item in value.items()}
    if isinstance(value, np.ndarray):
        data = base64.b64encode(np.ascontiguousarray(value).tobytes()).decode()
        return {"dtype": value.dtype.str, "base64": data}
    return value.item() if isinstance(value, np.generic) else value
