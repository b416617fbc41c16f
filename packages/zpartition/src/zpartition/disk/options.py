"""Options of a store, as a frozen value."""

from __future__ import annotations

import enum

import attrs

ALIGNMENT = 4096  # bytes: fits the logical blocks of every drive, and is what memory pages have


class Direct(enum.Enum):
    """Use of O_DIRECT, which bypasses the page cache."""

    AUTO = "auto"  # if a probe shows that the file system supports it
    ALWAYS = "always"  # reject a folder that does not support it
    NEVER = "never"  # through the page cache, which then holds the data that were to stay out of memory


def _is_multiple(_: object, field: attrs.Attribute[int], value: int) -> None:
    if not ALIGNMENT <= value <= 1 << 30 or value % ALIGNMENT:
        raise ValueError(f"{field.name} is {value:,}; it must be a multiple of {ALIGNMENT:,}, and at most 1 GiB")


@attrs.frozen(kw_only=True)
class DiskOptions:
    """Options of a store; the defaults suit one NVMe drive."""

    num_threads: int = attrs.field(default=8, validator=attrs.validators.ge(1))  # calls in flight, per store
    direct: Direct = attrs.field(default=Direct.AUTO, converter=Direct)
    durable: bool = True  # commits survive a power failure (fsync); False: only the death of the process
    chunk_bytes: int = attrs.field(default=1 << 20, validator=_is_multiple)  # of one call and of one checksum
