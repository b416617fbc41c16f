import sys
from pathlib import Path

import fsspec
import pytest

from zckpt import CheckpointInputError, CheckpointReadError, LockPolicy, remote
from zckpt.storage.locate import resolve_checkpoint, resolve_root
from zckpt.storage.object_store import RemoteStorage
from zckpt.storage.storage import LOCAL


@pytest.mark.parametrize("text", ["runs/a", "/runs/a", "runs/a:b", "s3", "C:/runs", "nosuchscheme:/x", "a:b/c"])
def test_everything_else_is_a_local_folder(text: str) -> None:
    assert resolve_root(text) == (Path(text), LOCAL)


def test_a_file_url_is_a_local_folder_too() -> None:
    assert resolve_root("file:///runs/a") == (Path("/runs/a"), LOCAL)
    assert resolve_root(Path("file:///runs/a")) == (Path("/runs/a"), LOCAL)


@pytest.mark.parametrize("url", ["memory://runs/a", "memory://runs/a/", "MEMORY://runs/a", Path("memory://runs/a")])
def test_a_url_is_a_place_in_a_store(url: str) -> None:
    root, storage = resolve_root(url)
    assert isinstance(storage, RemoteStorage)
    assert (root, storage.root, storage.base) == (Path("memory:/runs/a"), root, "/runs/a")
    folder, storage = resolve_checkpoint(url)
    assert (folder, storage.root) == (Path("memory:/runs/a"), Path("memory:/runs"))


def test_a_storage_that_was_chosen_is_kept() -> None:
    chosen = remote("memory://runs/a", lock_policy=LockPolicy(heartbeat_s=1.0))
    assert resolve_root("memory://runs/a", chosen) == (Path("memory:/runs/a"), chosen)
    assert chosen.lock_policy.heartbeat_s == 1.0


def test_the_url_gives_host_and_the_options_go_to_fsspec() -> None:
    made = remote("file:///runs", auto_mkdir=True)
    assert made.files.auto_mkdir is True  # type: ignore[attr-defined]
    assert made.base == "/runs"


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("nosuchscheme://x/y", "fsspec cannot serve nosuchscheme://"),
        ("simplecache::memory://x", "chained URLs are not supported"),
        ("runs/a", "is not a URL: use <scheme>://<path>"),
        ("memory://", "is not a URL: use <scheme>://<path>"),
    ],
)
def test_what_cannot_be_served_is_told(url: str, words: str) -> None:
    with pytest.raises(CheckpointInputError, match=words):
        remote(url)


@pytest.mark.parametrize(
    "url", ["memory://me:pa55@host/run", "memory:/me:pa55@host/run", "simplecache::ftp://me:pa55@host/x"]
)
def test_a_password_in_a_url_is_refused_and_not_shown(url: str) -> None:
    with pytest.raises(CheckpointInputError, match=r"me:\.\.\.@host.* holds a password") as caught:
        resolve_root(url)
    assert "pa55" not in str(caught.value)
    resolve_root("memory://me@host/run")
    assert resolve_root("runs/a:b@c") == (Path("runs/a:b@c"), LOCAL)


def test_a_store_that_cannot_be_reached_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    class Away(fsspec.AbstractFileSystem):  # type: ignore[misc]
        def __init__(self, **options: object) -> None:
            raise ConnectionRefusedError(111, "Connection refused")

    fsspec.register_implementation("zckptaway", Away, clobber=True)
    with pytest.raises(
        CheckpointReadError, match="zckptaway://h/run: the store cannot be reached: ConnectionRefused"
    ):
        resolve_root("zckptaway://h/run")


def test_without_fsspec_the_extra_is_named_and_local_folders_work(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("fsspec", "fsspec.registry"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(CheckpointInputError, match=r"s3://b/run needs the package fsspec: install zckpt\[fsspec\]"):
        resolve_root("s3://b/run")
    assert resolve_root("runs/a") == (Path("runs/a"), LOCAL)
    assert resolve_root("s3:/b/run") == (Path("s3:/b/run"), LOCAL)
