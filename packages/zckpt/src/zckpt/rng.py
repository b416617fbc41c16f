"""The random state of a process: Python, NumPy's global generator, torch on the CPU and on every CUDA device.

Captured as JSON (byte states in base64), so it goes into a checkpoint's `rank_objects`.  Private generators
(torch.Generator, numpy.random.Generator, random.Random) belong to whoever made them.  A data loader should have
one: iterating over a loader without one draws its seed from torch's global state, after any restore.
"""

from __future__ import annotations

import base64
import binascii
import random
from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from .canonical import JSON
from .errors import CheckpointInputError

_KEYS = ("python", "numpy", "torch", "cuda")


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
    CheckpointInputError if it is no such state; nothing is changed then, as far as that can be told beforehand.
    """
    if not isinstance(state, Mapping) or set(state) != set(_KEYS):
        raise CheckpointInputError(f"a random state has the keys {_KEYS}, given {_keys(state)}")
    try:
        python = state["python"]
        python_state = (python["version"], tuple(python["words"]), python["gauss"])
        numpy_state = _unpack(state["numpy"])
        torch_state = _decode(state["torch"])
        cuda_states = [_decode(each) for each in state["cuda"]]
        random.Random().setstate(python_state)
        torch.Generator().set_state(torch_state)
        np.random.set_state(numpy_state)
    except (TypeError, ValueError, KeyError, RuntimeError, binascii.Error) as error:
        raise CheckpointInputError(f"not a random state that capture() made here: {error}") from error
    random.setstate(python_state)
    torch.set_rng_state(torch_state)
    return _restore_cuda(cuda_states)


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


def _keys(state: object) -> object:
    return sorted(map(str, state)) if isinstance(state, Mapping) else type(state).__name__


def _encode(state: Tensor) -> str:
    return base64.b64encode(state.cpu().numpy().tobytes()).decode()


def _decode(text: str) -> Tensor:
    return torch.frombuffer(bytearray(base64.b64decode(text, validate=True)), dtype=torch.uint8)


def _pack(value: JSON) -> JSON:
    """NumPy's state is a dict of ints, strings, arrays and dicts of these, whatever the bit generator."""
    if isinstance(value, dict):
        return {key: _pack(item) for key, item in value.items()}
    if isinstance(value, np.ndarray):
        data = base64.b64encode(np.ascontiguousarray(value).tobytes()).decode()
        return {"dtype": value.dtype.str, "base64": data}
    return value.item() if isinstance(value, np.generic) else value


def _unpack(value: JSON) -> JSON:
    if isinstance(value, dict) and value.keys() == {"dtype", "base64"}:
        dtype = np.dtype(value["dtype"])
        if dtype.hasobject:
            raise ValueError(f"dtype {dtype}")
        return np.frombuffer(base64.b64decode(value["base64"], validate=True), dtype=dtype).copy()
    return {key: _unpack(item) for key, item in value.items()} if isinstance(value, dict) else value
