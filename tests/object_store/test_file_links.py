"""file:// follows no symbolic link below its root, and waits for no pipe, socket or device."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from tiered.errors import AlreadyExistsError, RefusedRequestError
from tiered.object_store.file import UPLOADS, FileStore
from tiered.object_store.interface import ObjectRange


@pytest.fixture
def store(tmp_path: Path) -> FileStore:
    """With one object beside the links that tests make; ``tmp_path / foreign`` has a file of another user."""
    (tmp_path / "foreign").mkdir()
    (tmp_path / "foreign" / "file").write_bytes(b"not ours")
    store = FileStore(tmp_path / "archive")
    store.put_if_absent("data/a/own", [b"ours"])
    return store


def keys(store: FileStore, prefix: str = "") -> list[str]:
    return [info.key for info in store.list(prefix)]


ATTEMPTS: dict[str, Callable[[FileStore], object]] = {
    "get": lambda store: store.get("data/b/file"),
    "get_range": lambda store: store.get_range("data/b/file", 0, 1),
    "put": lambda store: store.put_if_absent("data/b/new", [b"x"]),
    "put deeper": lambda store: store.put_if_absent("data/b/deep/new", [b"x"]),
    "compose": lambda store: store.compose_if_absent("data/a/c", [ObjectRange("data/b/file", 0, 1)]),
    "delete": lambda store: store.delete(["data/b/file"]),
}


@pytest.mark.parametrize("attempt", ATTEMPTS)
def test_nothing_is_read_written_or_deleted_through_a_linked_directory(
    store: FileStore, tmp_path: Path, attempt: str
) -> None:
    (tmp_path / "archive" / "data" / "b").symlink_to(tmp_path / "foreign")
    with pytest.raises(RefusedRequestError, match="b is a symbolic link"):
        ATTEMPTS[attempt](store)
    assert [path.name for path in (tmp_path / "foreign").iterdir()] == ["file"]
    assert (tmp_path / "foreign" / "file").read_bytes() == b"not ours"


def test_nothing_is_listed_through_links_and_each_is_named_once(
    store: FileStore, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    data = tmp_path / "archive" / "data"
    (data / "b").symlink_to(tmp_path / "foreign")
    (data / "c").symlink_to(tmp_path / "foreign" / "file")
    (data / "a" / "loop").symlink_to(data)
    (data / "a" / "gone").symlink_to(tmp_path / "nowhere")
    os.mkfifo(data / "a" / "pipe")
    for _ in range(2):
        assert keys(store) == ["data/a/own"]
    assert keys(store, "data/b/") == []
    assert sorted(line.split(" is a link")[0].removeprefix(store.url) for line in caplog.messages) == [
        "/data/a/gone",
        "/data/a/loop",
        "/data/a/pipe",
        "/data/b",
        "/data/c",
    ]


@pytest.mark.parametrize("kind", ["link", "pipe", "socket", "device"])
def test_a_name_that_is_no_regular_file_is_refused_at_once_and_left(
    store: FileStore, tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "archive" / "data" / "a" / "odd"
    if kind == "link":
        path.symlink_to(tmp_path / "foreign" / "file")
    elif kind == "pipe":
        os.mkfifo(path)
    elif kind == "socket":
        with socket.socket(socket.AF_UNIX) as listening:
            monkeypatch.chdir(path.parent)
            listening.bind("odd")
    else:
        try:
            os.mknod(path, 0o020600, os.makedev(1, 3))
        except PermissionError:
            pytest.skip("needs root to make a device")
    for attempt in (
        lambda: store.get("data/a/odd"),
        lambda: store.get_range("data/a/odd", 0, 1),
        lambda: store.delete(["data/a/odd"]),
    ):
        with pytest.raises(RefusedRequestError, match="not a regular file"):
            attempt()
    with pytest.raises(AlreadyExistsError):
        store.put_if_absent("data/a/odd", [b"x"])
    assert os.path.lexists(path) and keys(store) == ["data/a/own"]


def test_left_uploads_are_not_swept_through_a_link(store: FileStore, tmp_path: Path) -> None:
    os.utime(tmp_path / "foreign" / "file", times=(0, 0))
    (tmp_path / "archive" / UPLOADS).symlink_to(tmp_path / "foreign")
    store.writes_anonymously = False
    with pytest.raises(RefusedRequestError, match="symbolic link"):
        store.put_if_absent("data/a/new", [b"x"])
    assert [path.name for path in (tmp_path / "foreign").iterdir()] == ["file"]


def test_an_empty_directory_behind_a_link_stays(store: FileStore, tmp_path: Path) -> None:
    """Deleting the last object of a directory removes the directory, but no foreign one."""
    (tmp_path / "foreign" / "file").unlink()
    (tmp_path / "archive" / "data" / "b").symlink_to(tmp_path / "foreign")
    store.delete(["data/a/own"])
    assert (tmp_path / "foreign").is_dir() and (tmp_path / "archive" / "data" / "b").is_symlink()


def test_the_root_itself_may_be_a_link(store: FileStore, tmp_path: Path) -> None:
    (tmp_path / "named").symlink_to(tmp_path / "archive")
    linked = FileStore(tmp_path / "named")
    linked.put_if_absent("data/b/new", [b"x"])
    assert keys(linked) == keys(store) == ["data/a/own", "data/b/new"]
