"""Checks the broker's store directory: readable, linkable, and with room before the broker deletes messages."""

import errno
import os
import secrets
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from rocketmq_tiered.doctor.check import Check, CheckFinding, failed, not_checked, ok
from rocketmq_tiered.process.findings import MARGIN_BAD_SHARE
from rocketmq_tiered.process.lag import retention_margin_s
from tiered.broker_store.conf import BrokerConf
from tiered.broker_store.pins import PinLimits, measure_disk
from tiered.broker_store.retention import DiskUse, short_margin_s
from tiered.broker_store.store import BrokerStore
from tiered.catalog.state import CatalogState
from tiered.console import counted, duration_text, size_text
from tiered.object_store.interface import ObjectStore
from tiered.private_directory import make_private
from uploader.log_divergence import CheckResult, matches_archive

FILES_CHECKED_MAX = 20_000


@dataclass(frozen=True)
class StoreSubject:
    """What is checked. ``opened`` returns the store, or raises what opening raises. ``archived``: the archive and its
    state; None: there is no archive yet. System calls are injected."""

    opened: Callable[[], BrokerStore]
    pin_directories: tuple[Path, ...]
    limits: PinLimits
    archived: Callable[[], tuple[ObjectStore, CatalogState] | None]
    has_pins: bool = True
    disk_use: Callable[[Path], DiskUse] = measure_disk
    link: Callable[[Path, Path], None] = os.link
    may_read: Callable[[Path], bool] = lambda path: os.access(path, os.R_OK)


def store_checks(subject: StoreSubject) -> list[Check]:
    """The checks of the broker's store directory, apart from its retention margin: can it be opened, read, linked, and
    has its disk enough space."""
    needs = ("broker-store",)
    return [
        Check("broker-store", "store directory", lambda: _directory(subject.opened())),
        Check(
            "broker-store-permissions",
            "store permissions",
            lambda: permissions(subject),
            needs,
        ),
        Check("broker-tables", "the broker's tables", lambda: tables(subject.opened()), needs),
        Check("pins", "pins (hard links)", lambda: pins(subject), needs),
        Check("disk-space", "disk space", lambda: disk_space(subject), needs),
    ]


def archive_checks(subject: StoreSubject) -> list[Check]:
    """Whether `tiered run` would continue the archive with this log, and the retention margin. Both read the archive: a
    bucket that cannot be read is not reported again."""
    return [
        Check(
            "log-continues",
            "log of the broker",
            lambda: continuation(subject),
            ("broker-store", "bucket-list", "bucket-read"),
        ),
        Check("retention-margin", "retention margin", lambda: margin(subject), ("broker-store", "archive")),
    ]


def _directory(store: BrokerStore) -> CheckFinding:
    files = store.commit_log.files
    size = sum(file.size_bytes for file in files)
    kind = "RocksDB" if store.has_rocksdb_queues else "files"
    return ok(f"{store.path}: {len(files)} commitlog files, {size_text(size)}; consume queues in {kind}")


def permissions(subject: StoreSubject) -> CheckFinding:
    """Whether this user can read the files of the store, up to FILES_CHECKED_MAX of them."""
    store, count = subject.opened(), 0
    for path in islice(_paths(store), FILES_CHECKED_MAX):
        count += 1
        if not subject.may_read(path):
            return failed(
                f"user {os.geteuid()} cannot read {path}",
                f"run as the broker's user, or allow it: setfacl -R -m u:{os.geteuid()}:rX {store.path}",
            )
    return ok(f"user {os.geteuid()} can read {count:,} files and directories")


def tables(store: BrokerStore) -> CheckFinding:
    """Whether the broker's tables (topics, groups, offsets) can be read."""
    state = store.state()
    if state.damaged:
        what = "; ".join(f"{name}: {why}" for name, why in state.damaged.items())
        return failed(
            f"tables of the broker (files below config/) are damaged: {what}",
            "let the broker write them again, or restore their .bak files",
        )
    return ok(f"{counted(len(state.topics), 'topic')}, {counted(len(state.subscription_groups), 'group')}")


def _paths(store: BrokerStore) -> Iterator[Path]:
    """The files of the commitlog first, then all others of the store."""
    for file in store.commit_log.files:
        if not file.is_pinned:
            yield file.path
    for parent, directories, files in os.walk(store.path):
        yield from (Path(parent, name) for name in directories)
        yield from (Path(parent, name) for name in files)


def pins(subject: StoreSubject) -> CheckFinding:
    """Whether commitlog files can be kept by hard links (pins) until they are archived: links one into a pin directory,
    and removes the link."""
    if not subject.has_pins:
        return not_checked("pins.enabled is false")
    source = next((file.path for file in subject.opened().commit_log.files if not file.is_pinned), None)
    if source is None:
        return not_checked("the commitlog has no file yet")
    problem: tuple[Path, OSError] | None = None
    for directory in subject.pin_directories:
        try:
            _try_link(source, directory, subject.link)
        except FileNotFoundError:
            return not_checked(f"the broker deleted {source} during the check")
        except OSError as error:
            problem = directory, error
        else:
            return ok(f"{directory}")
    if problem is None:
        return not_checked("no pin directory is known; give --state-dir")
    return failed(
        f"{source} cannot be linked into {problem[0]}: {problem[1].strerror}; if the broker deletes files while the "
        "archive is behind, messages are lost at a restart of tiered run",
        _pin_fix(source, problem[1]),
    )


def _try_link(source: Path, directory: Path, link: Callable[[Path, Path], None]) -> None:
    """Link ``source`` into ``directory`` and remove the link, with the directories that had to be made for it. Raises
    OSError if that is impossible."""
    made = [parent for parent in (directory, *directory.parents) if not parent.exists()]
    trial = directory / f".doctor-{secrets.token_hex(8)}"
    try:
        make_private(directory, "pins.directory")
        link(source, trial)
    finally:
        trial.unlink(missing_ok=True)
        for parent in made:
            with suppress(OSError):
                parent.rmdir()


def _pin_fix(source: Path, error: OSError) -> str:
    if error.errno == errno.EXDEV:
        return f"set pins.directory to a directory on the file system of {source.parent}"
    if error.errno in (errno.EPERM, errno.EACCES):
        return "run as the owner of the broker's files, who may link them, and let this user write in pins.directory"
    return "set pins.directory to a directory of a file system with hard links"


def disk_space(subject: StoreSubject) -> CheckFinding:
    """How full the disk of the commitlog is, compared with the thresholds from which no files are pinned, and from
    which the broker deletes files early or refuses messages."""
    store = subject.opened()
    conf = store.conf or BrokerConf()
    use = subject.disk_use(store.commit_log.files[-1].path if store.commit_log.files else store.path)
    free = size_text((1 - use.used_ratio) * use.capacity_bytes)
    limits = subject.limits
    thresholds = (
        f"no pins above {limits.create_below_ratio:.0%}; the broker deletes files early above "
        f"{conf.disk_max_used_ratio:.0%}, and refuses messages above {conf.disk_warning_ratio:.0%}"
    )
    text = f"{use.used_ratio:.0%} of the disk is used, {free} are free; {thresholds}"
    if use.used_ratio >= limits.create_below_ratio:
        return failed(text, "free space on the broker's disk, or lower fileReservedTime of the broker")
    return ok(text)


def continuation(subject: StoreSubject) -> CheckFinding:
    """Whether the broker's log has the last bytes that the archive has, so that `tiered run` continues it."""
    archived = subject.archived()
    if archived is None:
        return not_checked("there is no archive of this broker yet")
    archive, state = archived
    if matches_archive(subject.opened(), archive, state) is CheckResult.DIFFERENT:
        return failed(
            f"the broker's log differs from the archive below physical offset {state.cursor.phys:,}: it is another "
            "broker's log, the disk was replaced, or the log was truncated",
            "compare archive.url and the broker's name; tiered run says up to where log and archive are the same",
        )
    return ok(
        f"the log has the archived bytes below physical offset {state.cursor.phys:,}, or has deleted them"
    )


def margin(subject: StoreSubject) -> CheckFinding:
    """How long it takes until the broker deletes messages that are not archived (the retention margin)."""
    archived = subject.archived()
    if archived is None:
        return not_checked("there is no archive of this broker yet")
    store = subject.opened()
    store.commit_log.refresh()
    end_phys = store.commit_log.data_end_phys()
    left_s = retention_margin_s(store, archived[1].cursor.phys, end_phys, ())
    if left_s is None:
        return ok("no unarchived message is about to be deleted")
    zone = f"deleteWhen in {store.zone()}"
    text = f"{duration_text(left_s)} until the broker deletes messages that are not archived ({zone})"
    if left_s < short_margin_s(store.conf or BrokerConf()) / MARGIN_BAD_SHARE:
        return failed(text, "start tiered run, or see in tiered status why the archive is behind")
    return ok(text)
