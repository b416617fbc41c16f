"""Forged checkpoints: one wrong value beside the tensors, with correct checksums."""

from __future__ import annotations

import copy
import json
import os
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import attrs
import xxhash

GONE = object()  # instead of a value: removes the key
NAN = {"$float": "nan"}
JUNK: tuple[Any, ...] = (
    *(GONE, None, True, "x", "", -7, 0, 3, 10**30, -1.5, 1e300, NAN, {"$float": "inf"}, [], [[]], [1, 2, 3, 4]),
    *({}, {"a": {"b": []}}, {"$tuple": 5}, {"$pairs": [[[], 1]]}, {"$tensor": [1]}, {"$tensor": [1, "junk", []]}),
    *({"$tensor": ["x", "float32", [1]]}, {"$float": []}, {"$float": "much"}, {"$tuple": []}, {"$pairs": {"a": 1}}),
)
IGNORED = ("plan", "zero_stage", "metrics", "client_state", "imported")  # a load does not read these


@attrs.frozen
class Forgery:
    """Replacement of the value at `path` of a manifest by `value`."""

    path: tuple[Any, ...]
    value: Any

    @property
    def key(self) -> str:
        """The innermost name of the path."""
        return next(part for part in reversed(self.path) if isinstance(part, str) and not part.startswith("$"))

    def __str__(self) -> str:
        shown = "no value" if self.value is GONE else json.dumps(self.value)
        return f"{'.'.join(map(str, self.path))} = {shown[:60]}"

    def applied(self, manifest: dict[str, Any]) -> dict[str, Any]:
        forged = copy.deepcopy(manifest)
        place = forged
        for part in self.path[:-1]:
            place = place[part]
        if self.value is GONE:
            del place[self.path[-1]]
        elif self.value == "longer":
            place[self.path[-1]] += place[self.path[-1]][:1]
        else:
            place[self.path[-1]] = self.value
        return forged


def all_forgeries(manifest: dict[str, Any]) -> list[Forgery]:
    """Return forgeries of every value of the small state by every invalid value."""
    found = []
    for path in [*_paths(manifest["objects"], ("objects",)), *_paths(manifest["rank_objects"], ("rank_objects",))]:
        if len(path) < 2 or path[1] in IGNORED:
            continue
        present: Any = manifest
        for part in path:
            present = present[part]
        others = [junk for junk in JUNK if junk is GONE or (type(junk), junk) != (type(present), present)]
        found += [Forgery(path, junk) for junk in others]
        found += [Forgery(path, "longer")] if isinstance(present, list) and present else []
    return found


def some_forgeries(manifest: dict[str, Any], count: int, seed: int) -> list[Forgery]:
    """Return a sample of them that contains every path."""
    by_path: dict[tuple[Any, ...], list[Forgery]] = {}
    for forgery in all_forgeries(manifest):
        by_path.setdefault(forgery.path, []).append(forgery)
    draw = random.Random(seed)
    for each in by_path.values():
        draw.shuffle(each)
    order = [each[turn] for turn in range(len(JUNK)) for each in by_path.values() if turn < len(each)]
    return order[:count]


def _paths(value: Any, path: tuple[Any, ...]) -> Iterator[tuple[Any, ...]]:
    yield path
    members = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in members:
        if not (isinstance(key, int) and key > 2):  # the beginning of a long list (random words)
            yield from _paths(item, (*path, key))


def read_manifest(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "manifest.json").read_bytes())


def write_forged(good: Path, tag: str, change: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    """Write a checkpoint `tag` with the files of `good`, a changed manifest and a correct checksum."""
    folder = good.with_name(tag)
    folder.mkdir()
    for file in good.glob("*.safetensors"):
        os.link(file, folder / file.name)
    forged = change(read_manifest(good)) | {"tag": tag}
    del forged["checksum"]
    body = json.dumps(forged, sort_keys=True, separators=(",", ":")).encode()[:-1]
    end = f',"checksum":"{xxhash.xxh3_128_hexdigest(body)}"}}\n'.encode()
    (folder / "manifest.json").write_bytes(body + end)
