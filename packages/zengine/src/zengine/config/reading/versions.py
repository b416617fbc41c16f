"""`config_version`: pins the defaults of absent keys to a release.

Releases change defaults: gradients that were not clipped suddenly are.  `"config_version": "deepspeed-0.18"` names
the release that a file was written for: absent keys get that release's defaults, and those that differ from today's
are logged at start.  `"zengine-0.2"` pins ours.  Without the key today's defaults apply, and those that an earlier
release of DeepSpeed had otherwise are logged if they have an effect.

The table contains the changes of DeepSpeed's releases.  Where our default differs from all of theirs (bucket sizes,
overlap), it changes no result, and a comment at the key gives the reason.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import attrs

from zengine.config.grammar.errors import Place, Problem, shown
from zengine.config.grammar.scan import Document

__all__ = ["CHANGED", "KEY", "Change", "Pinning", "pin"]

KEY = "config_version"
Version = tuple[int, ...]
NEWEST: Mapping[str, Version] = {"deepspeed": (0, 19, 8), "zengine": (0, 2)}
_FORM = re.compile(r"(deepspeed|zengine)[-= ]?v?(\d+(?:\.\d+){1,2})$", re.IGNORECASE)


@attrs.frozen(kw_only=True)
class Change:
    """Default that a release of DeepSpeed changed."""

    key: str
    before: object
    now: object  # ours, and DeepSpeed's from `since` on
    since: Version
    means: str  # effect of the older default, for the notice
    needs: tuple[str, ...] = ()  # the switch that must be on for the default to have an effect; () = none

    def acts(self, data: Mapping[str, Any]) -> bool:
        """Return True if the key is absent and its default has an effect in this config."""
        *home, name = self.key.split(".")
        section: Any = data
        for part in home:
            section = section.get(part) if isinstance(section, Mapping) else None
        if not isinstance(section, Mapping) or name in section:
            return False
        return not self.needs or section.get(self.needs[-1]) not in (None, False, "none")


CHANGED: tuple[Change, ...] = (
    Change(
        key="gradient_clipping",
        before=0.0,
        now=1.0,
        since=(0, 19, 3),
        means="gradients were not clipped by default",
    ),
    Change(
        key="bf16.check_grad_overflow",
        before=False,
        now=True,
        since=(0, 19, 3),
        means="a bf16 update with non-finite gradients was applied",
        needs=("enabled",),
    ),
    Change(
        key="steps_per_print",
        before=10,
        now=0,
        since=(0, 15, 2),
        means="a line was printed every 10 steps",
    ),
    *(
        Change(
            key=f"zero_optimization.{section}.pin_memory",
            before=False,
            now=True,
            since=(0, 19, 5),
            means="offloaded tensors were in pageable memory, and every copy was synchronous",
            needs=("device",),
        )
        for section in ("offload_optimizer", "offload_param")
    ),
)


@attrs.frozen(kw_only=True)
class Pinning:
    """Document with the defaults of the release that it names."""

    document: Document
    pinned: Mapping[str, str] = attrs.field(factory=dict)  # key -> release of its value, "deepspeed-0.18"
    notices: tuple[str, ...] = ()
    problems: tuple[Problem, ...] = ()


def pin(document: Document) -> Pinning:
    """Add the defaults of the release in `config_version`.  Pure."""
    data = document.data
    if not isinstance(data, Mapping):
        return Pinning(document=document)
    if KEY not in data:
        return Pinning(document=document, notices=_unpinned(data))
    place = document.place((KEY,))
    found = _FORM.match(data[KEY]) if isinstance(data[KEY], str) else None
    if found is None:
        return Pinning(document=document, problems=(_problem(place, data[KEY], "not the name of a release"),))
    who, version = found[1].lower(), tuple(map(int, found[2].split(".")))
    if version > NEWEST[who]:
        reason = f"the newest known release is {who}-{_text(NEWEST[who])}"
        return Pinning(document=document, problems=(_problem(place, data[KEY], reason),))
    if who == "zengine":
        return Pinning(document=document)  # no default of ours has changed yet
    return _as_in(document, data, version)


def _as_in(document: Document, data: Mapping[str, Any], version: Version) -> Pinning:
    name = f"deepspeed-{_text(version)}"
    older = [change for change in CHANGED if version < change.since[: len(version)] and change.acts(data)]
    completed: Any = dict(data)
    for change in older:
        *home, key = change.key.split(".")
        section = completed
        for part in home:
            section[part] = dict(section[part])
            section = section[part]
        section[key] = change.before
    listed = "; ".join(f"{change.key} = {shown(change.before)} (now {shown(change.now)})" for change in older)
    notice = f"{document.place((KEY,)).origin()}: {KEY} {name} sets defaults that have changed since: {listed}"
    return Pinning(
        document=attrs.evolve(document, data=completed),
        pinned={change.key: name for change in older},
        notices=(notice,) if older else (),
    )


def _unpinned(data: Mapping[str, Any]) -> tuple[str, ...]:
    """Return notices of absent keys whose default an earlier release had otherwise."""
    found: dict[str, list[Change]] = {}
    for change in CHANGED:
        if change.acts(data) and change.now:
            found.setdefault(change.means, []).append(change)
    return tuple(_notice(changes) for changes in found.values())


def _notice(changes: list[Change]) -> str:
    """Return one line for keys that changed together."""
    first, verb = changes[0], "is" if len(changes) == 1 else "are"
    return (
        f"{' and '.join(change.key for change in changes)} {verb} not given and {verb} {shown(first.now)}; "
        f"before DeepSpeed {_text(first.since)} {first.means} "
        f'(to restore that, write "{first.key.rpartition(".")[2]}": {shown(first.before)}, or set "{KEY}")'
    )


def _problem(place: Place, given: object, reason: str) -> Problem:
    newest = (
        f'"deepspeed-0.18" up to "deepspeed-{_text(NEWEST["deepspeed"])}", or "zengine-{_text(NEWEST["zengine"])}"'
    )
    return Problem(
        place=place,
        key=KEY,
        given=given,
        reason=reason,
        suggestion=f"Write the release that the file was written for: {newest}.",
    )


def _text(version: Version) -> str:
    return ".".join(map(str, version))
