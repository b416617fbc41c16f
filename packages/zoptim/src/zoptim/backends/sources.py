"""The sources of the kernels: the rules that there are, and the digest of what the C extension is compiled from.

Every header `csrc/rules/<name>.h` is one update rule, for C and for CUDA.  Its place among the sorted names is the
number of the rule.  `rules_text` numbers the rules and lists them in two macros, from which every dispatch follows
(kern.c, zk_gpu.cu, zk_prepare).  A header defines

    ZK_<NAME>_LOOPS(X)    X(name, number of states, flags) for every loop that is compiled
    ZK_<NAME>_SQUARES     bit k: state k is a second moment
    zk_<name>_prepare     the coefficients that differ from those of zk_prepare
    zk_<name>             the update of one element; LAMB, which reads twice, has none

`hatch_build.py` loads this file by its path, where neither torch nor zoptim is installed, so it imports the standard
library only.  Rejected: a table in C beside one in Python, which would be two rows for one rule.
"""

from __future__ import annotations

import functools
import hashlib
import re
from pathlib import Path
from typing import NamedTuple

__all__ = ["CSRC", "KernelRule", "kernel_rules", "rule_number", "rules_text", "source_hash"]

CSRC = Path(__file__).resolve().parents[1] / "csrc"


class KernelRule(NamedTuple):
    """A header of `csrc/rules`."""

    name: str
    text: str
    loop_flags: tuple[str, ...]  # names of the flags that select a loop
    is_elementwise: bool  # has zk_<name>


@functools.cache
def kernel_rules(csrc: Path = CSRC) -> tuple[KernelRule, ...]:
    """The rules, by number."""
    return tuple(_read(path) for path in sorted((csrc / "rules").glob("*.h")))


def _read(path: Path) -> KernelRule:
    name, text = path.stem, path.read_text()
    loops = re.search(rf"#define ZK_{name.upper()}_LOOPS\(X\)((?:.*\\\n)*.*)", text)
    if loops is None:
        raise ValueError(f"{path} does not define ZK_{name.upper()}_LOOPS(X).")
    flags = tuple(dict.fromkeys(re.findall(r"ZK_(\w+)", loops[1])))
    return KernelRule(name, text, flags, bool(re.search(rf"\bzk_{name}\(", text)))


def rule_number(name: str) -> int:
    """The number of a rule in C."""
    return [rule.name for rule in kernel_rules()].index(name)


def rules_text(csrc: Path = CSRC, *, include: bool) -> str:
    """The numbers of all rules, ZK_RULES(X), ZK_ELEMENTWISE(X), and the headers: as #include lines or in full."""
    rules = kernel_rules(csrc)
    lines = [f"#define ZK_{rule.name.upper()} {number}" for number, rule in enumerate(rules)]
    for macro, chosen in (("ZK_RULES", rules), ("ZK_ELEMENTWISE", [rule for rule in rules if rule.is_elementwise])):
        lines.append(f"#define {macro}(X) " + " ".join(f"X({rule.name.upper()}, {rule.name})" for rule in chosen))
    headers = [f'#include "rules/{rule.name}.h"\n' if include else rule.text for rule in rules]
    return "\n".join(lines) + "\n" + "".join(headers)


def source_hash(project: Path) -> str:
    """16 hexadecimal digits over what the extension of a checkout is compiled from; the CUDA text is not."""
    csrc = project / "src" / "zoptim" / "csrc"
    headers = [path for path in csrc.rglob("*.h") if not path.name.startswith("zk_gpu")]
    total = hashlib.sha256()
    for path in [project / "hatch_build.py", Path(__file__), *sorted([*csrc.glob("*.c"), *headers])]:
        text = path.read_bytes()
        total.update(f"{path.name} {len(text)}\n".encode() + text)
    return total.hexdigest()[:16]
