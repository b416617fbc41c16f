"""How a store does its work, as a frozen value."""

from __future__ import annotations

import enum

import attrs

ALIGNMENT = 4096  # bytes: fits the logical blocks of every drive, and is what memory pages have


class Direct(enum.Enum):
    """Whether transfers pass by the page cache (O_DIRECT)."""

    AUTO = "auto"  # where the file system allows it, which is tried out
    ALWAYS = "always"  # refuse a folder where it is not allowed
    NEVER = "never"  # through the page cache, which then holds what was to be kept out of memory


def _is_multiple(_: object, field: attrs.Attribute[int], value: int) -> None:
    if not ALIGNMENT <= value <= 1 << 30 or value % ALIGNMENT:
        raise ValueError(f"{field.name} is {value:,}; it must be a multiple of {ALIGNMENT:,}, and at most 1 GiB")


@attrs.frozen(kw_only=True)
class DiskOptions:
    """How a store does its work; the defaults fit one NVMe drive."""

    num_threads: int = attrs.field(default=8, validator=attrs.validators.ge(1))  # calls in flight, per store
    direct: Direct = attrs.field(default=Direct.AUTO, converter=Direct)
    durable: bool = True  # committed values survive a power cut (fsync); False: the death of the process only
    chunk_bytes: int = attrs.field(default=1 << 20, validator=_is_multiple)  # of one call and of one checksum
