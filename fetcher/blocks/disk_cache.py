"""Cache of stored blocks on a local disk, which survives restarts and memory pressure.

A file per block: 8 bytes magic, its own CRC32C, the CRC32C of the stored bytes, their length, the length of the
object's key, the key, then the bytes as the object has them; of an encrypted archive, all of this sealed. Written under
a temporary name and renamed, without fsync: a file damaged by a crash fails its checks and is a miss. The directory is
scanned at the start; files of another format are left alone. The bound is disk space: a file counts with whole pages.

Nothing is trusted: a hit needs the key, the length and the CRC32C from the object's footer. Disk errors are misses,
counted. The bound is exact for one process at a time; two are safe.
"""

import errno
import hashlib
import itertools
import logging
import os
import re
import struct
import threading
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import fastcrc

from fetcher.blocks.block_cache import BlockKey
from tiered.model.lru import Lru
from tiered.object_store.sealed import LOCAL_BYTES, LocalSeals
from tiered.private_directory import is_own, log_exposed_parent, make_private

LOG = logging.getLogger(__name__)

_MAGIC = b"RMQTBLK1"
_HEADER = struct.Struct("<8sIIIH")
_PAGE_BYTES = 4096
"""Allocation unit of disks; blocks of LMQs have about a hundred bytes."""
_NAME = re.compile(r"[0-9a-f]{32}-\d+\.block")
_TEMPORARY = re.compile(r"\d+-\d+\.tmp")


@dataclass
class DiskCacheCounts:
    """Totals since the start. ``failed``: reads and writes the disk refused."""

    hits: int = 0
    misses: int = 0
    corrupt: int = 0
    evicted: int = 0
    failed: int = 0


class DiskCache:
    """Stored blocks below ``directory``, on at most ``bytes_max`` of disk. Thread-safe. Blocks its caller: call it in a
    pool."""

    def __init__(
        self, directory: str | os.PathLike[str], bytes_max: int, seals: LocalSeals | None = None
    ) -> None:
        """Open or make the cache in ``directory``, with at most ``bytes_max`` bytes on disk, and take over the blocks
        that are there. Raises OSError when that fails, and AccessDeniedError if other users can write to the
        directory. With ``seals``, its files are sealed."""
        self._directory = os.path.abspath(directory)
        self._lock = threading.Lock()
        self._names: Lru[str, str] = Lru(bytes_max)
        self._numbers = itertools.count()
        self._seals = seals
        self.counts = DiskCacheCounts()
        make_private(Path(self._directory), "fetch.disk_cache_path")
        log_exposed_parent(Path(self._directory))
        self._scan()

    def __len__(self) -> int:
        return len(self._names)

    def __contains__(self, key: BlockKey) -> bool:
        return _name(key) in self._names

    @property
    def held_bytes(self) -> int:
        """Disk space of all files."""
        return self._names.held_bytes

    def _scan(self) -> None:
        """Take over the blocks that earlier processes cached in the directory, oldest first. Remove unfinished files,
        and files that belong to another user, who may have put them there before the directory was private."""
        found: list[tuple[float, str, int]] = []
        with os.scandir(self._directory) as entries:
            for entry in entries:
                if _TEMPORARY.fullmatch(entry.name):
                    with suppress(OSError):  # a process that crashed left it, or one that runs is writing it
                        os.unlink(entry.path)
                elif _NAME.fullmatch(entry.name):
                    with suppress(FileNotFoundError):
                        status = entry.stat(follow_symlinks=False)
                        if not is_own(status):
                            os.unlink(entry.path)
                            continue
                        found.append((status.st_mtime, entry.name, _space_bytes(status.st_size)))
        for _, name, size in sorted(found):
            self._keep(name, size)

    # -- blocks -----------------------------------------------------------------------------------------------

    def get(self, key: BlockKey, crc32c: int, length: int) -> bytes | None:
        """The stored bytes of a block, or None if they are not cached. A file whose content does not have this checksum
        and length is damaged and is deleted."""
        name = _name(key)
        with self._lock:
            if self._names.get(name) is None:
                self.counts.misses += 1
                return None
        path = self._path(name)
        try:
            with open(path, "rb", buffering=0) as file:
                content = file.read(_HEADER.size + len(key.object_key) + length + 1 + LOCAL_BYTES)
        except OSError as error:
            self._failed(error, path)
            self.drop(key)
            return None
        if self._seals is not None:
            content = self._seals.open(key.object_key, content)
        stored = _decoded(content, key, crc32c, length)
        if stored is None:
            self.counts.corrupt += 1
            LOG.warning("disk cache: %s is damaged and is deleted; its block is fetched again", path)
            self.drop(key)
            return None
        self.counts.hits += 1
        return stored

    def put(self, key: BlockKey, stored: bytes | memoryview) -> None:
        """Write the stored bytes of a block, which have passed their checks, to the cache. If that fails, it is logged,
        and the block is not cached."""
        name = _name(key)
        size = _HEADER.size + len(key.object_key) + len(stored) + LOCAL_BYTES * (self._seals is not None)
        space_bytes = _space_bytes(size)
        with self._lock:
            if name in self._names or space_bytes > self._names.bytes_max:
                return
        pieces = [_header(key, stored), stored]
        if self._seals is not None:
            pieces = [self._seals.seal(key.object_key, b"".join(pieces))]
            if not pieces[0]:  # the key to seal it with is missing
                return
        temporary = self._path(f"{os.getpid()}-{next(self._numbers)}.tmp")
        try:
            with open(temporary, "xb", buffering=0, opener=_open_private) as file:
                if os.writev(file.fileno(), pieces) != size:
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), temporary)
            os.rename(temporary, self._path(name))
        except OSError as error:
            self._failed(error, temporary)
            with suppress(OSError):  # the file may not exist
                os.unlink(temporary)
            return
        self._keep(name, space_bytes)

    def drop(self, key: BlockKey) -> None:
        """Forget one block."""
        name = _name(key)
        with self._lock:
            is_known = self._names.pop(name) is not None
        if is_known:
            self._unlink(name)

    def _keep(self, name: str, space_bytes: int) -> None:
        with self._lock:
            evicted = self._names.put(name, name, space_bytes)
            self.counts.evicted += len(evicted)
        for other in evicted:
            self._unlink(other)

    def _unlink(self, name: str) -> None:
        try:
            os.unlink(self._path(name))
        except FileNotFoundError:
            return
        except OSError as error:
            self._failed(error, self._path(name))

    def _failed(self, error: OSError, path: str) -> None:
        self.counts.failed += 1
        LOG.warning("the disk cache cannot use %s: %s", path, error.strerror or error)

    def _path(self, name: str) -> str:
        return os.path.join(self._directory, name)


def directory_of(root: Path, archive_url: str, endpoint_url: str) -> Path:
    """The directory below ``root`` for the archive at ``archive_url``, S3 being at ``endpoint_url``.

    Two archives of the same names have the same keys, and would push each other's blocks out.
    """
    where = f"{endpoint_url.rstrip('/')}\0{archive_url.rstrip('/')}"
    return root / hashlib.blake2b(where.encode(), digest_size=8).hexdigest()


def _open_private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)


def _space_bytes(size: int) -> int:
    """What a file of ``size`` bytes takes of the disk."""
    return -(-size // _PAGE_BYTES) * _PAGE_BYTES


def _name(key: BlockKey) -> str:
    digest = hashlib.blake2b(key.object_key.encode(), digest_size=16).hexdigest()
    return f"{digest}-{key.block}.block"


def _header(key: BlockKey, stored: bytes | memoryview) -> bytes:
    name = key.object_key.encode()
    fields = (fastcrc.crc32.iscsi(stored), len(stored), len(name))
    own = fastcrc.crc32.iscsi(_HEADER.pack(_MAGIC, 0, *fields) + name)
    return _HEADER.pack(_MAGIC, own, *fields) + name


def _decoded(content: bytes, key: BlockKey, crc32c: int, length: int) -> bytes | None:
    """The stored bytes in a file's content, or None when anything about it is not as it must be."""
    begin = _HEADER.size + len(key.object_key.encode())
    stored = content[begin:]
    if len(stored) != length or fastcrc.crc32.iscsi(stored) != crc32c:
        return None
    return stored if content[:begin] == _header(key, stored) else None
