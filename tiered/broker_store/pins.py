"""Pins commitlog files until they are archived: hard links, or open descriptors, outlive the broker's deletion.

Pins take the broker's disk space. So no pin is created above 65 % disk usage, and all are released, oldest first,
above 72 %, always below the broker's own thresholds: a gap is better than blocked producers. Where link() fails
(another file system, another owner), an open descriptor pins the file for the lifetime of this process.

``plan_pins`` decides, purely; ``PinKeeper`` acts. A pin of a file that the broker has replaced (recreated, truncated
log) is stale and released at once.

Links are named by physical offset, and every broker has a file at offset 0: a directory belongs to one store, which
its owner file names. Pins of another store would be read as this broker's log, and so would files that another user
planted: a directory is private. A pin itself is the broker's own file, with its mode and owner.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Final, NamedTuple

from tiered.broker_store.commit_log import LogFile
from tiered.broker_store.conf import BrokerConf
from tiered.broker_store.retention import DiskUse
from tiered.errors import AccessDeniedError
from tiered.private_directory import make_private
from tiered.residency import NAME_DIGITS, open_failure

DESCRIPTORS_MAX: Final = 256
"""So many files are pinned by open descriptors at most."""
SETTING: Final = "pins.directory"
OWNER_FILE: Final = "OWNER"
"""The file in a directory of links that names the store to which it belongs."""
BELOW_BROKER_RATIO: Final = 0.01
"""Pins are released when the disk is that much emptier than at the lowest of the broker's own thresholds."""


class FileIdentity(NamedTuple):
    """Device and inode of a file."""

    device: int
    inode: int


class PinMethod(Enum):
    """How a file is pinned."""

    LINK = "hard link"
    DESCRIPTOR = "open descriptor"


@dataclass(frozen=True)
class Pin:
    """One pinned file. ``path`` opens it, even after the broker deleted it."""

    begin_phys: int
    size_bytes: int
    identity: FileIdentity
    method: PinMethod
    path: Path

    @property
    def end_phys(self) -> int:
        """One past the last physical offset the file can hold."""
        return self.begin_phys + self.size_bytes


@dataclass(frozen=True)
class PinLimits:
    """Disk usage above which no pins are created, and above which all are released."""

    create_below_ratio: float = 0.65
    release_above_ratio: float = 0.72

    def below_broker(self, conf: BrokerConf) -> PinLimits:
        """These limits, or lower ones, so that pins are released before the disk use reaches a threshold at which the
        broker deletes files or refuses messages."""
        thresholds = (conf.disk_max_used_ratio, conf.disk_clean_forcibly_ratio, conf.disk_warning_ratio)
        release = min(self.release_above_ratio, min(thresholds) - BELOW_BROKER_RATIO)
        distance = self.release_above_ratio - self.create_below_ratio
        return PinLimits(min(self.create_below_ratio, release - distance), release)


@dataclass(frozen=True)
class PinPlan:
    """Pins to release, then pins to create."""

    release: tuple[Pin, ...]
    create: tuple[LogFile, ...]


@dataclass(frozen=True)
class PinStatus:
    """The pinned files, how many pins the last step ``released``, and files that should be pinned and are not.
    ``problem``: why a file is not pinned by a hard link, or why links of an earlier process are unknown; empty: all is
    well."""

    pins: tuple[Pin, ...] = ()
    released: int = 0
    unpinned: tuple[LogFile, ...] = ()
    used_ratio: float = 0.0
    problem: str = ""


def plan_pins(
    files: Mapping[LogFile, FileIdentity],
    pins: Sequence[Pin],
    archived_phys: int,
    used_ratio: float,
    limits: PinLimits,
) -> PinPlan:
    """Decide, for one disk, which pins (hard links or open descriptors that keep commitlog files) to release and which
    files to pin. ``files``: the broker's files there; ``archived_phys``: everything below is archived; ``used_ratio``:
    how full the disk is. A pin is released when its file is archived, or when the broker has replaced the file."""
    oldest_first = sorted(pins, key=lambda pin: pin.begin_phys)
    if used_ratio > limits.release_above_ratio:
        return PinPlan(tuple(oldest_first), ())
    present = {file.begin_phys: identity for file, identity in files.items()}
    last = max(present, default=None)
    release = [  # archived, replaced by another file, or above a log that was truncated
        pin
        for pin in oldest_first
        if pin.end_phys <= archived_phys
        or present.get(pin.begin_phys, pin.identity) != pin.identity
        or (last is not None and pin.begin_phys > last)
    ]
    kept = {pin.begin_phys for pin in pins} - {pin.begin_phys for pin in release}
    create: list[LogFile] = []
    if used_ratio < limits.create_below_ratio:
        create = [file for file in files if file.end_phys > archived_phys and file.begin_phys not in kept]
    return PinPlan(tuple(release), tuple(sorted(create, key=lambda file: file.begin_phys)))


def measure_disk(path: Path) -> DiskUse:
    """How full the disk of ``path`` is, computed as the broker does (UtilAll.getDiskPartitionSpaceUsedPercent)."""
    status = os.statvfs(path)
    used = status.f_blocks - status.f_bfree
    entire = used + status.f_bavail
    # The broker rounds up to whole percents.
    percent = -(-used * 100 // entire) if entire else 0
    return DiskUse(percent / 100, entire * status.f_frsize)


@dataclass
class PinKeeper:
    """Creates and releases pins. ``directories``: where links may be; a file's link is in the first one on its disk.
    ``owner`` names the store; empty: existing links count as the store's own. ``former``: directories of earlier
    settings: links there are released in time, and no new ones are made.

    ``disk_use`` measures the disk of a path. Not thread-safe except ``files``.
    """

    directories: Sequence[Path]
    limits: PinLimits = field(default_factory=PinLimits)
    disk_use: Callable[[Path], DiskUse] = measure_disk
    owner: str = ""
    former: Sequence[Path] = ()
    _pins: dict[int, Pin] = field(default_factory=dict, init=False)
    """By the physical offset at which the file begins."""
    _descriptors: dict[int, int] = field(default_factory=dict, init=False)
    """The open descriptors that pin files, by the same offset."""
    _unlisted: dict[Path, str] = field(default_factory=dict, init=False)
    """Directories that could not be listed, and why: links of an earlier process there are unknown."""

    def __post_init__(self) -> None:
        """Counts the links that an earlier process left as pins of this one."""
        self._take_up((*self.directories, *self.former))

    @property
    def problem(self) -> str:
        """Why some links of an earlier process are unknown; empty: all are known."""
        return next(iter(self._unlisted.values()), "")

    def files(self) -> list[LogFile]:
        """The pinned files, from which CommitLog reads what the broker has deleted."""
        return [LogFile(pin.begin_phys, pin.size_bytes, pin.path, True) for pin in list(self._pins.values())]

    def let_go(self, files: Iterable[LogFile]) -> None:
        """``step`` while it is not known what is archived: no pin is created, and one is released only if the disk is
        too full, or the broker has replaced its file."""
        self.step(files, 0, may_create=False)

    def step(self, files: Iterable[LogFile], archived_phys: int, *, may_create: bool = True) -> PinStatus:
        """Pin those of the broker's ``files`` that are not archived yet, and release pins that are no longer needed, or
        all of them if the disk is too full. ``archived_phys``: everything below is archived; ``may_create``: False only
        releases. Returns what is pinned then. Calling it again changes nothing."""
        self._take_up(list(self._unlisted))
        identities = _identities(files)
        disks = {identity.device for identity in identities.values()}
        disks |= {pin.identity.device for pin in self._pins.values()}
        released, unpinned, problem, used_ratio = 0, [], "", 0.0
        for disk in disks:
            on_disk = {file: identity for file, identity in identities.items() if identity.device == disk}
            pins = [pin for pin in self._pins.values() if pin.identity.device == disk]
            path = next(iter(on_disk)).path.parent if on_disk else pins[0].path
            used_ratio = max(used_ratio, used := self.disk_use(path).used_ratio)
            plan = plan_pins(on_disk, pins, archived_phys, used, self.limits)
            for pin in plan.release:
                self._release(pin)
            released += len(plan.release)
            for file in plan.create if may_create else ():
                why_not = self._create(file, identities[file])
                problem = problem or why_not
            unpinned += [f for f in on_disk if f.end_phys > archived_phys and f.begin_phys not in self._pins]
        problem = problem or self.problem
        return PinStatus(tuple(self._pins.values()), released, tuple(unpinned), used_ratio, problem)

    def release_all(self) -> None:
        """Release every pin, oldest first."""
        for begin_phys in sorted(self._pins):
            self._release(self._pins[begin_phys])

    def inherit(self, before: PinKeeper) -> None:
        """Take over the pins of ``before``, the keeper of an earlier uploader in this process, which is no longer used.
        Where both have different pins at the same offset, this one's is kept and the other one released; equal pins are
        the same link."""
        for begin_phys, pin in list(before._pins.items()):
            if self._pins.get(begin_phys, pin) == pin:
                self._pins[begin_phys] = before._pins.pop(begin_phys)
                if pin.method is PinMethod.DESCRIPTOR:
                    self._descriptors[begin_phys] = before._descriptors.pop(begin_phys)
            else:
                before._release(pin)

    def close(self) -> None:
        """Close the descriptors; links stay for the next process."""
        for begin_phys in list(self._descriptors):
            self._release(self._pins[begin_phys])

    def _take_up(self, directories: Iterable[Path]) -> None:
        """Count the links of an earlier process in ``directories`` as pins of this one. A directory that cannot be read
        is noted as a problem and tried again at the next step: its links take disk space."""
        for directory in directories:
            self._unlisted.pop(directory, None)
            try:
                pins = []
                if directory.is_dir():
                    make_private(directory, SETTING)  # others could plant files there
                    pins = _load_links(directory) if self._may_use(directory) else []
                for pin in pins:
                    kept = self._pins.setdefault(pin.begin_phys, pin)
                    if kept.method is PinMethod.DESCRIPTOR and kept.identity == pin.identity:
                        pin.path.unlink(missing_ok=True)  # a second pin of a file would never be released
            except OSError as error:
                self._unlisted[directory] = f"pins in {directory} cannot be listed: {error.strerror or error}"
            except AccessDeniedError as error:
                self._unlisted[directory] = f"pins in {directory} are not used: {error}"

    def _create(self, file: LogFile, identity: FileIdentity) -> str:
        """Pin ``file``, whose device and inode are ``identity``, by a hard link in the first directory where that
        works, else by an open descriptor. Returns why it is not a link, empty if it is."""
        refusal = "no pin directory on this disk"
        for directory in self.directories:
            try:
                make_private(directory, SETTING)
                if directory.stat().st_dev != identity.device:
                    continue
                if not self._may_use(directory):
                    refusal = f"{directory / OWNER_FILE} names another store"
                    continue
                path = directory / f"{file.begin_phys:0{NAME_DIGITS}d}"
                with contextlib.suppress(FileNotFoundError):
                    path.unlink()
                os.link(file.path, path, follow_symlinks=False)
            except OSError as error:
                refusal = f"link into {directory}: {error.strerror}"
                continue
            except AccessDeniedError as error:
                refusal = str(error)
                continue
            return self._keep(file, PinMethod.LINK, path, path.stat())
        return (
            self._hold_descriptor(file)
            or f"files are pinned by open descriptors, which end with this process, not by hard links ({refusal})"
        )

    def _may_use(self, directory: Path) -> bool:
        """Whether ``directory`` belongs to this store. One that belongs to no store does from now on."""
        try:
            return not self.owner or _owner_of(directory, self.owner) == self.owner
        except OSError:
            return True  # without write access no link can be made in it either

    def _hold_descriptor(self, file: LogFile) -> str:
        """Pin ``file`` by an open descriptor, which keeps it as long as this process lives. Returns why it cannot be
        pinned, empty if it is."""
        if len(self._descriptors) >= DESCRIPTORS_MAX:
            return f"{file.path} is not pinned, as {DESCRIPTORS_MAX} open descriptors pin others already"
        try:
            fd = os.open(file.path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            return open_failure(file.path, error).message
        self._descriptors[file.begin_phys] = fd
        return self._keep(file, PinMethod.DESCRIPTOR, Path(f"/proc/self/fd/{fd}"), os.fstat(fd))

    def _keep(self, file: LogFile, method: PinMethod, path: Path, status: os.stat_result) -> str:
        """Note that ``file`` is pinned, by the link or open descriptor ``path`` with ``status``. Returns an empty text,
        as there is no problem."""
        identity = FileIdentity(status.st_dev, status.st_ino)
        self._pins[file.begin_phys] = Pin(file.begin_phys, status.st_size, identity, method, path)
        return ""

    def _release(self, pin: Pin) -> None:
        """Remove the link, or close the descriptor, of ``pin``."""
        self._pins.pop(pin.begin_phys, None)
        if pin.method is PinMethod.DESCRIPTOR:
            os.close(self._descriptors.pop(pin.begin_phys))
        else:
            with contextlib.suppress(FileNotFoundError):
                pin.path.unlink()


def _owner_of(directory: Path, newcomer: str) -> str:
    """The store that a directory of links belongs to, by its owner file; without one it belongs to ``newcomer`` from
    now on. Raises OSError."""
    marker = directory / OWNER_FILE
    if not marker.exists():
        with tempfile.NamedTemporaryFile(dir=directory, prefix=f".{OWNER_FILE}.") as file:
            file.write(newcomer.encode())
            file.flush()
            os.fsync(file.fileno())
            with contextlib.suppress(FileExistsError):
                os.link(file.name, marker)
    return marker.read_bytes().decode("utf-8", "replace")


def _identities(files: Iterable[LogFile]) -> dict[LogFile, FileIdentity]:
    """Device and inode of each of the broker's own files: those read from a pin, and those that the broker has just
    deleted, are skipped."""
    identities = {}
    for file in files:
        with contextlib.suppress(FileNotFoundError):
            if not file.is_pinned:
                status = file.path.stat()
                identities[file] = FileIdentity(status.st_dev, status.st_ino)
    return identities


def _load_links(directory: Path) -> list[Pin]:
    """The pins that an earlier process left as links in ``directory``, by the physical offsets in their names; none if
    there is no such directory. Raises OSError."""
    pins = []
    try:
        for path in sorted(directory.iterdir()):
            if len(path.name) == NAME_DIGITS and path.name.isdecimal():
                status = path.stat()
                identity = FileIdentity(status.st_dev, status.st_ino)
                pins.append(Pin(int(path.name), status.st_size, identity, PinMethod.LINK, path))
    except FileNotFoundError:
        return []
    return pins
