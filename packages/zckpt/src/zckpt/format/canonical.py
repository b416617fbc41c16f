"""Canonical JSON: a writer with one spelling per value, and a strict reader.

Allowed objects: None, bool, int, finite float, str, list (a tuple becomes a list) and dict with str keys.  NaN and
infinity are rejected although Python would write them: other JSON readers reject them, and a NaN in a saved counter
should fail at save, not after a resume.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from json.encoder import encode_basestring_ascii
from typing import Any, NoReturn, TypeAlias

from zckpt.errors import CheckpointInputError

JSON: TypeAlias = Any  # null, bool, int, float, str, list of JSON, dict of str to JSON; `plain` enforces it

MAX_DEPTH = 64  # maximum nesting; a deeper value is an object graph by mistake
MAX_INT_BITS = 4096  # Python refuses to print integers of more than 4,300 digits

_ALLOWED = "None, bool, int, finite float, str, list, tuple and dict with str keys"


def plain(value: object, where: str) -> JSON:
    """Deep copy of `value` as plain JSON.  Raises CheckpointInputError with the key path of a bad value."""
    return _plain(value, where, MAX_DEPTH)


def _plain(value: object, where: str, depth: int) -> JSON:
    if depth == 0:
        raise CheckpointInputError(f"{where}: nested deeper than {MAX_DEPTH} levels; does it contain itself?")
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        return str(value)
    if isinstance(value, int):
        return _integer(int(value), where)
    if isinstance(value, float):
        return _number(float(value), where)
    if isinstance(value, (list, tuple)):
        return [_plain(item, f"{where}[{i}]", depth - 1) for i, item in enumerate(value)]
    if isinstance(value, dict):
        return {_key(key, where): _plain(item, f"{where}[{key!r}]", depth - 1) for key, item in value.items()}
    kind = f"{type(value).__module__}.{type(value).__qualname__}"
    raise CheckpointInputError(
        f"{where} is a {kind}: objects may hold {_ALLOWED}. Convert it (.item(), .tolist(), str()), "
        "or pass a tensor as a shard."
    )


def _key(key: object, where: str) -> str:
    if not isinstance(key, str):
        raise CheckpointInputError(f"{where} has a key {key!r} of type {type(key).__name__}; keys must be str")
    return str(key)


def _integer(value: int, where: str) -> int:
    if value.bit_length() > MAX_INT_BITS:
        raise CheckpointInputError(f"{where} is an integer of {value.bit_length()} bits; at most {MAX_INT_BITS}")
    return value


def _number(value: float, where: str) -> float:
    if not math.isfinite(value):
        raise CheckpointInputError(f"{where} is {value}, which JSON cannot represent. Save None or a str instead.")
    return value


def dump(value: JSON) -> bytes:
    """ASCII JSON with sorted keys and no spaces: equal values give equal bytes."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False).encode()


def quote(text: str) -> str:
    """One string as `dump` writes it."""
    return encode_basestring_ascii(text)


def load(data: bytes) -> JSON:
    """Parse strict JSON.  Raises ValueError for duplicate keys, NaN, infinity, bad UTF-8 or excessive nesting."""
    try:
        return json.loads(
            data.decode("utf-8"),
            object_pairs_hook=_unique,
            parse_constant=_no_constant,
            parse_float=_finite,
        )
    except UnicodeDecodeError as error:
        raise ValueError(f"not UTF-8 at byte {error.start}") from None
    except RecursionError:
        raise ValueError("nested too deeply") from None


def _unique(pairs: list[tuple[str, JSON]]) -> dict[str, JSON]:
    made = dict(pairs)
    if len(made) != len(pairs):
        twice, _ = Counter(key for key, _ in pairs).most_common(1)[0]
        raise ValueError(f"duplicate key {twice!r}")
    return made


def _no_constant(text: str) -> NoReturn:
    raise ValueError(f"{text} is not JSON")


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text} is too large for a float")
    return value
