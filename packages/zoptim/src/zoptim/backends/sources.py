"""The sources of the kernels: the update rules, and the digest of the C extension.

Every header `csrc/rules/<name>.h` is one update rule, for C and for CUDA.  The number of a rule is its position among
the sorted names.  `rules_text` writes the numbers and two macros that list the rules; every dispatch uses them
(kern.c, zk_gpu.cu, zk_prepare).  A header defines

    ZK_<NAME>_LOOPS(X)    X(name, number of states, flags) for every loop that is compiled
    ZK_<NAME>_SQUARES     bit k: state k is a second moment
    zk_<name>_prepare     the coefficients that differ from those of zk_prepare
    zk_<name>             the update of one element; absent in LAMB, which has two passes

`hatch_build.py` loads this file by path, where neither torch nor zoptim is installed, so it imports the standard
library only.  Rejected: a table in C and one in Python, which would be two rows per rule.
"""

from __future__ import annotations

import functools
import hashlib
import re
from pathlib import Path
from typing import NamedTuple

__all__ = ["CSRC", "KernelRule", "generated", "kernel_rules", "rule_number", "rules_text", "source_hash"]

CSRC = Path(__file__).resolve().parents[1] / "csrc"


class KernelRule(NamedTuple):
    """A header of `csrc/rules`."""

    name: str
    text: str
    loop_flags: tuple[str, ...]  # names of the flags that select a loop
    is_elementwise: bool  # has zk_<name>


@functools.cache
def kernel_rules(csrc: Path = CSRC) -> tuple[KernelRule, ...]:
    """Return the rules, in the order of their numbers."""
    return tuple(_read(path) for path in sorted((csrc / "rules").glob("*.h")))


def _read(path: Path) -> KernelRule:
    name, text = path.stem, path.read_text()
    loops = re.search(rf"#define ZK_{name.upper()}_LOOPS\(X\)((?:.*\\\n)*.*)", text)
    if loops is None:
        raise ValueError(f"{path} does not define ZK_{name.upper()}_LOOPS(X).")
    flags = tuple(dict.fromkeys(re.findall(r"ZK_(\w+)", loops[1])))
    return KernelRule(name, text, flags, bool(re.search(rf"\bzk_{name}\(", text)))


def rule_number(name: str) -> int:
    """Return the number of a rule in C."""
    return [rule.name for rule in kernel_rules()].index(name)


def rules_text(csrc: Path = CSRC, *, include: bool) -> str:
    """Return the C text of all rules: numbers, ZK_RULES(X), ZK_ELEMENTWISE(X), headers (as #include or in full)."""
    rules = kernel_rules(csrc)
    lines = [f"#define ZK_{rule.name.upper()} {number}" for number, rule in enumerate(rules)]
    for macro, chosen in (("ZK_RULES", rules), ("ZK_ELEMENTWISE", [rule for rule in rules if rule.is_elementwise])):
        lines.append(f"#define {macro}(X) " + " ".join(f"X({rule.name.upper()}, {rule.name})" for rule in chosen))
    headers = [f'#include "rules/{rule.name}.h"\n' if include else rule.text for rule in rules]
    return "\n".join(lines) + "\n" + "".join(headers)


def generated() -> dict[str, str]:
    """Return the headers that a build makes: name -> text."""
    return {"zk_table.h": rules_text(include=True)}


def source_hash(project: Path) -> str:
    """Return a digest, 16 hexadecimal digits, of the sources of a checkout's extension; without the CUDA text."""
    csrc = project / "src" / "zoptim" / "csrc"
    headers = [path for path in csrc.rglob("*.h") if not path.name.startswith("zk_gpu")]
    paths = [project / "hatch_build.py", Path(__file__), *sorted([*csrc.glob("*.c"), *headers])]
    settings = (project / "pyproject.toml").read_bytes().partition(b"\n[tool.zbuild]\n")[2]  # not version, links, ...
    total = hashlib.sha256(settings)
    for path in paths:
        text = path.read_bytes()
        total.update(f"{path.name} {len(text)}\n".encode() + text)
    return total.hexdigest()[:16]
