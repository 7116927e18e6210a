"""What only file:// has: disks that fill up, directories of another user, failures between system calls.

file:// follows no symbolic link below its root, and waits for no pipe, socket or device.

The race of creates: passes on real stores, and finds stores that let several writers succeed.
"""

import errno
import logging
import os
import socket
import stat
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.broker_store.unprivileged import run_unprivileged
from tests.object_store.imperfect_stores import OverwritingStore, RacyStore, UndeletableStore
from tiered.errors import (
    AccessDeniedError,
    AlreadyExistsError,
    NotFoundError,
    RefusedRequestError,
    StoreFullError,
    ThrottledError,
    UnansweredError,
)
from tiered.object_store import file as file_module
from tiered.object_store.create_race import race_creates, require_exclusive_creates
from tiered.object_store.file import UPLOADS, FileStore
from tiered.object_store.interface import Body, ObjectRange, ObjectStore, StoreOptions
from tiered.object_store.memory import MemoryStore
from tiered.object_store.open_store import open_store
from tiered.settings.sections import ObjectStoreSettings

ROOT = Path(__file__).parents[2]
MIB = 1024 * 1024
UNPRIVILEGED_UID = 65534


def files_below(directory: Path) -> list[str]:
    """All files, hidden ones too."""
    return sorted(str(path.relative_to(directory)) for path in directory.rglob("*") if path.is_file())


@pytest.fixture
def tiny_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 1 MiB."""
    mounted = tmp_path / "tiny"
    mounted.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(mounted)]
    if os.geteuid() != 0 or subprocess.run(command, capture_output=True, check=False).returncode != 0:
        pytest.skip("mounting a tmpfs is not permitted here; the RLIMIT_FSIZE test covers the same error")
    yield mounted
    subprocess.run(["umount", str(mounted)], check=True)


@pytest.mark.parametrize("umask", [0, 0o077])
@pytest.mark.parametrize(
    ("readers", "directory_mode", "file_mode"),
    [("owner", 0o700, 0o600), ("group", 0o750, 0o640), ("all", 0o755, 0o644)],
)
@pytest.mark.parametrize("anonymous", [True, False])
def test_who_reads_an_archive_is_a_setting_and_not_the_umask(
    tmp_path: Path, umask: int, readers: str, directory_mode: int, file_mode: int, anonymous: bool
) -> None:
    before = os.umask(umask)
    try:
        options = StoreOptions(ObjectStoreSettings(file_readers=readers))
        store = open_store((tmp_path / "above" / "archive").as_uri(), options)
        assert isinstance(store._store, FileStore)
        store._store.writes_anonymously = anonymous
        store.put_if_absent("data/ab/object", [b"x"])
        store.clock_ms()
    finally:
        os.umask(before)
    found = {path: stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "above").rglob("*")}
    directories = {mode for path, mode in found.items() if path.is_dir()}
    assert directories == {directory_mode} == {stat.S_IMODE((tmp_path / "above").stat().st_mode)}
    assert {mode for path, mode in found.items() if path.is_file()} == {file_mode}

    def work() -> str:
        try:
            return FileStore(tmp_path / "above" / "archive").get("data/ab/object").decode()
        except AccessDeniedError:
            return "denied"

    assert run_unprivileged(work, tmp_path) == ("x" if readers == "all" else "denied")


def test_a_directory_that_exists_keeps_its_mode_and_gives_its_group(tmp_path: Path) -> None:
    tmp_path.chmod(0o2775)
    FileStore(tmp_path, readers="group").put_if_absent("data/object", [b"x"])
    assert stat.S_IMODE(tmp_path.stat().st_mode) == 0o2775
    assert stat.S_IMODE((tmp_path / "data").stat().st_mode) == 0o2750


@pytest.mark.parametrize("below", ["", "archive"])
def test_nothing_is_put_below_the_place_of_a_disk_that_is_gone(
    tiny_disk: Path, tmp_path: Path, below: str
) -> None:
    """What two directories of one name took in turns would be two broken archives."""
    place = tmp_path / "mounted"
    place.mkdir()
    store = FileStore(place / below)
    subprocess.run(["mount", "--bind", str(tiny_disk), str(place)], check=True)
    try:
        store.put_if_absent("catalog/1", [b"x"])
    finally:
        subprocess.run(["umount", str(place)], check=True)
    with pytest.raises(ThrottledError, match="mount its disk again"):
        store.put_if_absent("catalog/2", [b"x"])
    assert list(place.iterdir()) == []
    subprocess.run(["mount", "--bind", str(tiny_disk), str(place)], check=True)
    try:
        store.put_if_absent("catalog/2", [b"x"])
        assert [info.key for info in store.list("")] == ["catalog/1", "catalog/2"]
    finally:
        subprocess.run(["umount", str(place)], check=True)


def test_a_directory_that_is_gone_is_not_created_again(tmp_path: Path) -> None:
    store = FileStore(tmp_path / "archive")
    store.put_if_absent("catalog/1", [b"x"])
    (tmp_path / "archive").rename(tmp_path / "away")
    with pytest.raises(ThrottledError, match="mount its disk again"):
        store.put_if_absent("catalog/2", [b"x"])
    (tmp_path / "away").rename(tmp_path / "archive")
    store.put_if_absent("catalog/2", [b"x"])
    assert files_below(tmp_path) == ["archive/catalog/1", "archive/catalog/2"]


@pytest.mark.parametrize("anonymous", [True, False])
def test_full_disk(tiny_disk: Path, anonymous: bool) -> None:
    store = FileStore(tiny_disk / "archive")
    store.writes_anonymously = anonymous
    store.put_if_absent("small", [bytes(100_000)])
    with pytest.raises(StoreFullError, match="No space left") as refused:
        store.put_if_absent("large", [bytes(MIB), bytes(MIB)])
    assert refused.value.hint == "free space or grow the file system", "the writer says whether it continues"
    assert [info.key for info in store.list("")] == ["small"]
    with pytest.raises(NotFoundError):
        store.get("large")
    assert files_below(tiny_disk) == ["archive/small"]
    store.put_if_absent("after", [bytes(100_000)])


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_directory_of_another_user(tmp_path: Path) -> None:
    FileStore(tmp_path / "archive").put_if_absent("k", [b"x"])
    (tmp_path / "archive").chmod(0o700)
    script = f"""
        import os, sys
        from tiered.errors import AccessDeniedError
        from tiered.object_store.file import FileStore
        os.setgroups([]); os.setgid({UNPRIVILEGED_UID}); os.setuid({UNPRIVILEGED_UID})
        store = FileStore({str(tmp_path / "archive")!r})
        put, get = store.put_if_absent, store.get
        for act in (lambda: put("n", [b"x"]), lambda: get("k"), lambda: list(store.list(""))):
            try:
                act()
                sys.exit(8)
            except AccessDeniedError as error:
                assert "{tmp_path.name}" in str(error), error
        sys.exit(7)
    """
    for directory in (tmp_path, *tmp_path.parents):
        if directory != Path("/") and directory.owner() == "root" and directory.is_relative_to("/tmp/"):
            directory.chmod(0o755)
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(script)], cwd=ROOT, check=False)
    assert done.returncode == 7


def test_time_limit_leaves_nothing(tmp_path: Path) -> None:
    store = FileStore(tmp_path)
    with pytest.raises(UnansweredError, match="not created"):
        store.put_if_absent("a/k", [bytes(MIB)], timeout_s=0.0)
    assert files_below(tmp_path) == []


@pytest.mark.parametrize("anonymous", [True, False])
def test_failed_write_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, anonymous: bool
) -> None:
    store = FileStore(tmp_path)
    store.writes_anonymously = anonymous

    def broken(_descriptor: int) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "fsync", broken)
    with pytest.raises(UnansweredError, match="Input/output error"):
        store.put_if_absent("k", [b"x"])
    assert files_below(tmp_path) == []


def test_a_full_disk_after_the_object_has_its_name_is_no_refusal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A write that fails with "disk full" leaves no such object."""
    store = FileStore(tmp_path)
    store.put_if_absent("data/a", [b"a"])

    def full(directory: str) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", directory)

    monkeypatch.setattr(file_module, "sync_directory", full)
    with pytest.raises(UnansweredError, match="No space left"):
        store.put_if_absent("data/b", [b"b"])
    assert store.get("data/b") == b"b"


def test_without_hard_links(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_arguments: object, **_options: object) -> None:
        raise OSError(errno.EPERM, os.strerror(errno.EPERM))

    store = FileStore(tmp_path)
    store.writes_anonymously = False
    monkeypatch.setattr(file_module, "_link", refused)
    store.put_if_absent("a/k", [b"first"])
    with pytest.raises(AlreadyExistsError):
        store.put_if_absent("a/k", [b"second"])
    assert store.get("a/k") == b"first"
    assert files_below(tmp_path) == ["a/k"]
    # Nor a rename that replaces nothing: that will not change, and a plain rename would let two writers win.
    monkeypatch.setattr(file_module, "_RENAME_NOREPLACE", 1 << 10)
    with pytest.raises(RefusedRequestError, match="neither hard links nor renames"):
        store.put_if_absent("a/other", [b"third"])


def test_synced_before_it_is_named_and_directory_after(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    events: list[str] = []
    real_fsync, real_link = os.fsync, file_module._link

    def fsync(descriptor: int) -> None:
        events.append("sync directory" if os.path.isdir(f"/proc/self/fd/{descriptor}") else "sync file")
        real_fsync(descriptor)

    def link(source: str, target: str, *, follow: bool) -> None:
        events.append("link")
        real_link(source, target, follow=follow)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(file_module, "_link", link)
    store = FileStore(tmp_path)
    store.put_if_absent("k", [b"x"])
    assert events == ["sync file", "link", "sync directory"]
    events.clear()
    with pytest.raises(AlreadyExistsError):
        store.put_if_absent("k", [b"y"])
    assert events == ["sync file", "link", "sync directory"], "what the loser saw is durable too"


def test_put_and_delete_race_over_one_directory(tmp_path: Path) -> None:
    store = FileStore(tmp_path)
    errors: list[BaseException] = []

    def churn(name: str) -> None:
        try:
            for _ in range(100):
                store.put_if_absent(f"a/b/{name}", [b"x"])
                store.delete([f"a/b/{name}"])
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=churn, args=(str(number),)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [str(error) for error in errors] == []
    assert os.listdir(tmp_path) == []


def test_missing_directory_is_an_empty_store(tmp_path: Path) -> None:
    store = FileStore(tmp_path / "nowhere")
    assert list(store.list("")) == []
    with pytest.raises(NotFoundError):
        store.get("k")
    store.delete(["k"])
    assert not (tmp_path / "nowhere").exists(), "reading makes no directories"


def test_keys_that_a_directory_tree_cannot_hold_are_refused(tmp_path: Path) -> None:
    store = FileStore(tmp_path)
    store.put_if_absent("k", [b"x"])
    with pytest.raises(RefusedRequestError):
        store.put_if_absent("k/x", [b"x"])
    with pytest.raises(RefusedRequestError):
        store.put_if_absent("c" * 256, [b"x"])
    with pytest.raises(RefusedRequestError):
        store.put_if_absent(f"{UPLOADS}/x", [b"x"])


def test_read_only_file_system_is_access_denied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_arguments: object, **_options: object) -> int:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(os, "open", refused)
    with pytest.raises(AccessDeniedError, match="Read-only"):
        FileStore(tmp_path).put_if_absent("k", [b"x"])


def test_named_uploads_of_killed_processes_are_removed(tmp_path: Path) -> None:
    """No listing shows them: they are no objects. What another process is writing now stays."""
    uploads = tmp_path / UPLOADS
    uploads.mkdir()
    for name, age_s in (("old", file_module.LEFT_OVER_S + 60), ("young", 3600)):
        (uploads / name).write_bytes(b"part of an object")
        os.utime(uploads / name, times=(time.time() - age_s,) * 2)
    store = FileStore(tmp_path)
    store.writes_anonymously = False
    store.put_if_absent("a", [b"x"])
    assert files_below(tmp_path) == [f"{UPLOADS}/young", "a"]


def test_a_part_of_an_archive_on_another_disk_is_refused(tiny_disk: Path, tmp_path: Path) -> None:
    """Taken for no answer, it would be tried again for ever under new names, all kept as garbage."""
    store = FileStore(tmp_path / "archive")
    store.put_if_absent("c/b/catalog/1", [b"x"])
    data = tmp_path / "archive" / "c" / "b" / "data"
    data.mkdir()
    subprocess.run(["mount", "--bind", str(tiny_disk), str(data)], check=True)
    try:
        with pytest.raises(RefusedRequestError, match="one file system"):
            store.put_if_absent("c/b/data/1", [b"x"])
        assert list(tiny_disk.iterdir()) == []
    finally:
        subprocess.run(["umount", str(data)], check=True)


@pytest.mark.parametrize("number", [errno.EXDEV, errno.EOPNOTSUPP, errno.EINVAL])
def test_ranges_are_copied_where_the_kernel_cannot(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    """As from a spool directory on another file system."""

    def refuse(*_arguments: object) -> int:
        raise OSError(number, os.strerror(number))

    store = FileStore(tmp_path / "archive")
    content = os.urandom(3 << 20)
    store.put_if_absent("source", [content])
    monkeypatch.setattr(os, "copy_file_range", refuse)
    store.compose_if_absent("k", [ObjectRange("source", 1, (3 << 20) - 1), b"x"])
    assert store.get("k") == content[1:] + b"x"


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
    assert sorted(line.split(" is neither")[0].removeprefix(store.url) for line in caplog.messages) == [
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


@pytest.mark.parametrize("make", [lambda path: MemoryStore(), lambda path: FileStore(path / "a")])
def test_it_passes_and_leaves_nothing(make: Callable[[Path], ObjectStore], tmp_path: Path) -> None:
    store = make(tmp_path)
    require_exclusive_creates(store)
    assert list(store.list("")) == []


def test_a_store_that_lets_several_creates_win_is_refused() -> None:
    store = RacyStore()
    with pytest.raises(RefusedRequestError, match="of 16 concurrent creates succeeded where only one may"):
        require_exclusive_creates(store)
    assert list(store.list("")) == []


def test_a_store_that_replaces_objects_is_refused() -> None:
    with pytest.raises(RefusedRequestError, match="concurrent creates"):
        race_creates(OverwritingStore(), "key")
    with pytest.raises(RefusedRequestError, match="the store lets a second create replace an object"):
        race_creates(OverwritingStore(), "key", racers=1)


def test_a_store_that_refuses_all_is_temporarily_unavailable() -> None:
    class Busy(MemoryStore):
        def put_if_absent(self, key: str, body: Body, *, timeout_s: float | None = None) -> None:
            raise ThrottledError("busy")

    with pytest.raises(ThrottledError):
        require_exclusive_creates(Busy())


def test_objects_that_cannot_be_removed_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        require_exclusive_creates(UndeletableStore(), rounds=1)
    assert (
        "1 objects that tested conditional writes remain below" in caplog.text
        and "s3:DeleteObject" in caplog.text
    )
