"""Location of a root: a local folder, or the URL of an object store.

Every function that takes a root accepts a URL, as text or as the Path that a save returned.  A URL is a scheme that
fsspec knows and "://", or ":/" as pathlib writes it.  "file://" is a local folder and served natively, since a local
disk offers more than fsspec exposes (fsync, locks, atomic renames).

A root appears in every error, note and returned path, so a URL with a password raises; pass passwords as options of
`remote`, or in fsspec's own configuration.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zckpt.errors import CheckpointInputError, CheckpointReadError
from zckpt.storage.lock import DEFAULT_LOCK_POLICY, LockPolicy
from zckpt.storage.storage import LOCAL, Storage

if TYPE_CHECKING:
    from zckpt.storage.object_store import RemoteStorage

_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+):(//?)(.*)", re.DOTALL)
_LOCAL_SCHEMES = ("file", "local")
_PASSWORD = re.compile(r"(:/{1,2}[^/@:]*):[^/]*@")


def resolve_root(root: str | os.PathLike[str], storage: Storage = LOCAL) -> tuple[Path, Storage]:
    """Resolve a root to its path and storage; a storage that the caller passed is kept.

    Raises CheckpointInputError for an unsupported scheme, or what is no path.
    """
    if not isinstance(root, (str, os.PathLike)):
        raise CheckpointInputError(
            f"the first argument is the folder of checkpoints, a path; got a {type(root).__name__}. Write "
            "save(folder, tensors={...}): torch.save has the other order."
        )
    scheme, rest = _split(os.fspath(root))
    if not scheme or storage is not LOCAL:
        return Path(root), storage
    if scheme in _LOCAL_SCHEMES:
        return Path("/", rest), LOCAL
    made = remote(root)
    return made.root, made


def resolve_checkpoint(path: str | os.PathLike[str], storage: Storage = LOCAL) -> tuple[Path, Storage]:
    """Like `resolve_root`, for the folder of one checkpoint; its root is the parent folder."""
    folder = Path(path)
    root, found = resolve_root(folder.parent, storage)
    return root / folder.name, found


def remote(
    url: str | os.PathLike[str], *, lock_policy: LockPolicy = DEFAULT_LOCK_POLICY, **options: Any
) -> RemoteStorage:
    """The storage of the checkpoint root at this URL; pass it to `save` and `find` together with the same URL.

    lock_policy: heartbeat and timeout of the root's lock.
    options: of the fsspec file system of the URL's scheme, such as credentials and endpoint.

    Raises CheckpointInputError: not a URL, or one with a password; fsspec or the scheme's own package is missing; or
    fsspec rejects the options.  CheckpointReadError: the store cannot be reached.
    """
    scheme, rest = _split(os.fspath(url))
    if not scheme or not rest:
        raise CheckpointInputError(f"{os.fspath(url)!r} is not a URL: use <scheme>://<path>, such as s3://bucket/run")
    fsspec = _fsspec(os.fspath(url))
    from zckpt.storage.object_store import RemoteStorage, native_path

    try:
        files = fsspec.filesystem(
            scheme, **{"use_listings_cache": False, **options, **_from_url(fsspec, scheme, rest)}
        )
    except (ImportError, ValueError, TypeError) as error:
        raise CheckpointInputError(f"{os.fspath(url)}: fsspec cannot serve {scheme}://: {error}") from error
    except Exception as error:  # of any class, from the store's own package, which may connect here
        raise CheckpointReadError(
            f"{os.fspath(url)}: the store cannot be reached: {type(error).__name__}: {error}", path=os.fspath(url)
        ) from error
    root = Path(f"{scheme}:/{rest}")
    return RemoteStorage(root=root, base=native_path(files, root), files=files, lock_policy=lock_policy)


def _split(text: str) -> tuple[str, str]:
    """("s3", "bucket/run"), or ("", "") for a local path."""
    match = _URL.fullmatch(text)
    if match is None:
        if "://" in text:
            _check_no_password(text)
            raise CheckpointInputError(f"{text!r} is neither a local path nor <scheme>://<path>; chained URLs are "
                                       "not supported")  # fmt: skip
        return "", ""
    scheme, slashes, rest = match[1].lower(), match[2], match[3].strip("/")
    if slashes == "//" or scheme in _LOCAL_SCHEMES or scheme in _known_schemes():
        _check_no_password(text)
        return scheme, rest
    return "", ""


def _check_no_password(url: str) -> None:
    if _PASSWORD.search(url):
        shown = _PASSWORD.sub(r"\1:...@", url)
        raise CheckpointInputError(
            f"{shown!r} holds a password, which errors and paths would show: remove it and pass "
            "storage=zckpt.remote(url, password=...), or set it in fsspec's configuration"
        )


def _known_schemes() -> set[str]:
    try:
        from fsspec.registry import known_implementations
    except ImportError:
        return set()
    return set(known_implementations)


def _from_url(fsspec: Any, scheme: str, rest: str) -> dict[str, Any]:
    """Options that the URL itself contains, such as host and port."""
    found: dict[str, Any] = fsspec.get_filesystem_class(scheme)._get_kwargs_from_urls(f"{scheme}://{rest}")
    found.pop("path", None)
    return found


def _fsspec(url: str) -> Any:
    try:
        import fsspec
    except ImportError as error:
        raise CheckpointInputError(f"{url} needs the package fsspec: install zckpt[fsspec] and the package of the "
                                   "store, such as s3fs or gcsfs") from error  # fmt: skip
    return fsspec
