"""The keys of one archive, wrapped by keys of a ring, in its objects ``keys/``.

The objects are numbered tables, each with all keys, and created only if absent; the newest counts. Rewrapping and
rotating keys write a new table and no other object. An archive is encrypted from its first object on, or never.
"""

import base64
import json
import secrets
import struct
import threading
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from typing import Final, NamedTuple

import fastcrc

from tiered.clock import MACHINE_CLOCK
from tiered.errors import (
    AlreadyExistsError,
    CorruptionError,
    EncryptionKeyError,
    TopicKeyError,
    UnavailableError,
    UsageError,
)
from tiered.formats.keys import CATALOG_PREFIX, KEYS_PREFIX, is_version_name, version_name
from tiered.formats.version import FORMAT_MAJOR, FORMAT_MINOR, require_major
from tiered.object_store.interface import ObjectStore
from tiered.object_store.key_ring import (
    KEY_BYTES,
    SETTING,
    KeyRing,
    wrong_key,
)
from tiered.settings.topic_rules import ring_key_of

KIND: Final = b"RMQTKEYS"
_HEAD = struct.Struct("<8sHHI")
_TABLE_BYTES_MAX: Final = 1 << 24
_TRIES: Final = 10


@dataclass(frozen=True)
class ArchiveKey:
    """A key that encrypts objects. ``key_id``: 32 hex digits; ``wrapped``: the key itself, encrypted by the key
    ``ring_key`` of the ring. ``is_topics``: it encrypts only objects of topics that have a ring key of their own."""

    key_id: str
    ring_key: str
    wrapped: bytes
    is_topics: bool
    created_ms: int


class KeyTable(NamedTuple):
    """One version of the keys. ``topics``: which topics have a ring key of their own: pattern and ring key ("": the
    current one), of which the first whose pattern fits a topic counts."""

    version: int
    keys: tuple[ArchiveKey, ...] = ()
    topics: tuple[tuple[str, str], ...] = ()

    def ring_key_of(self, topic: str | None) -> str:
        """The ring key of its own that ``topic`` has; "" if it has none, and for objects of many topics (None)."""
        return ring_key_of(self.topics, topic) if topic else ""

    def fitting(self, topic: str | None) -> list[ArchiveKey]:
        """The keys for objects of ``topic``, the newest last: those that its own ring key wraps; if it has none, those
        of no topics, whatever ring key wraps them."""
        own = self.ring_key_of(topic)
        return [one for one in self.keys if one.is_topics == bool(own) and own in ("", one.ring_key)]

    def encoded(self) -> bytes:
        """Its object: kind, version of the format, CRC32C of what follows, JSON."""
        keys = [
            [one.key_id, one.ring_key, base64.b64encode(one.wrapped).decode(), one.is_topics, one.created_ms]
            for one in self.keys
        ]
        data = json.dumps(
            {"version": self.version, "keys": keys, "topics": self.topics}, separators=(",", ":")
        ).encode()
        return _HEAD.pack(KIND, FORMAT_MAJOR, FORMAT_MINOR, fastcrc.crc32.iscsi(data)) + data


def decode_key_table(data: bytes, source: str) -> KeyTable:
    """Check and parse; raises CorruptionError naming ``source``, or UnsupportedFormatError."""
    if len(data) < _HEAD.size or not data.startswith(KIND):
        raise CorruptionError(f"{source} is damaged: it does not begin as a table of keys")
    _, major, minor, crc = _HEAD.unpack_from(data)
    require_major(major, minor, f"{source}: keys")
    if fastcrc.crc32.iscsi(data[_HEAD.size :]) != crc:
        raise CorruptionError(f"{source} is damaged: it fails its CRC32C")
    try:
        header = json.loads(data[_HEAD.size :])
        keys = tuple(
            ArchiveKey(
                str(key_id), str(ring_key), base64.b64decode(wrapped), bool(is_topics), int(created_ms)
            )
            for key_id, ring_key, wrapped, is_topics, created_ms in header["keys"]
        )
        topics = tuple((str(pattern), str(key)) for pattern, key in header["topics"])
        return KeyTable(int(header["version"]), keys, topics)
    except (KeyError, TypeError, ValueError) as error:
        raise CorruptionError(f"{source}: its content is damaged: {error}") from error


class ArchiveKeys:
    """The keys of the archive ``name`` (``<cluster>/<broker>``) of ``store``. ``ring`` None: only whether it is
    encrypted is known. Thread-safe; each key is unwrapped once."""

    def __init__(self, store: ObjectStore, name: str, ring: KeyRing | None) -> None:
        """Makes no request."""
        self.name = name
        self._store, self._ring = store, ring
        self._lock = threading.RLock()
        self._table: KeyTable | None = None
        self._unwrapped: dict[str, bytes] = {}

    def is_encrypted(self) -> bool:
        """Whether the archive is encrypted, or will be. Raises what ``table`` raises."""
        return self.table().version > 0 or self._ring is not None

    def table(self, *, is_new: bool = False) -> KeyTable:
        """The newest table that is known, or, if ``is_new``, that there is; of version 0 if there is none. Raises
        UsageError for an archive that began without encryption, if there is a ring, and the store's errors."""
        with self._lock:
            table = self._table
            # Without a table yet, another process that has the ring may begin the archive at any time: look again.
            if table is None or is_new or (self._ring is not None and not table.version):
                self._table = table = self._read()
            return table

    def _read(self) -> KeyTable:
        """The newest table in the store, which is listed first, or an empty one; raises what ``table`` raises."""
        folder = f"{self.name}/{KEYS_PREFIX}"
        for info in self._store.list(folder):
            if is_version_name(info.key.removeprefix(folder)):
                data = self._store.get(info.key, _TABLE_BYTES_MAX)
                return decode_key_table(data, f"{self._store.url}/{info.key}")
        if self._ring is not None and next(iter(self._store.list(f"{self.name}/", limit=1)), None):
            raise UsageError(
                f"archive {self.name} has objects, but none in {KEYS_PREFIX}: it began without encryption, or its keys"
                " are lost",
                hint=f"if it is encrypted, put the objects of {KEYS_PREFIX} back from a copy of the bucket; if not,"
                f" unset {SETTING}, or begin another archive",
            )
        return KeyTable(0)

    def change(self, change: Callable[[KeyTable], KeyTable]) -> KeyTable:
        """Store the next table, which is what ``change`` makes of the newest; it is called again if another process
        stores one first. Raises the store's errors."""
        with self._lock:
            for _ in range(_TRIES):
                table = self.table(is_new=True)
                table = change(table)._replace(version=table.version + 1)
                key = f"{self.name}/{KEYS_PREFIX}{version_name(table.version)}"
                try:
                    self._store.put_if_absent(key, [table.encoded()])
                except AlreadyExistsError:  # by another process: its table counts
                    continue
                self._table = table
                return table
            raise UnavailableError(
                f"the keys of archive {self.name} cannot be changed now: other processes change them all the time"
            )

    def add(self, ring_key: str, *, is_topics: bool = False) -> ArchiveKey:
        """Make a key that encrypts objects from now on, wrapped by ``ring_key``; with ``is_topics`` those of the
        topics whose rules name this ring key. Raises what the ring raises."""
        key, key_id = secrets.token_bytes(KEY_BYTES), secrets.token_hex(16)
        wrapped = self.ring.wrap(ring_key, key, f"{self.name}/{key_id}")
        made = ArchiveKey(key_id, ring_key, wrapped, is_topics, MACHINE_CLOCK.wall_ms())
        self.change(lambda table: table._replace(keys=(*table.keys, made)))
        self._unwrapped[key_id] = key
        return made

    def rewrap(self, ring_keys: Collection[str], target: str) -> list[ArchiveKey]:
        """Wrap by ``target`` the keys that one of ``ring_keys`` wraps now; returns them. Raises what the ring
        raises."""
        moved = {
            one.key_id: replace(
                one,
                ring_key=target,
                wrapped=self.ring.wrap(target, self._unwrap(one), f"{self.name}/{one.key_id}"),
            )
            for one in self.table(is_new=True).keys
            if one.ring_key in ring_keys
        }
        if moved:
            self.change(
                lambda table: table._replace(keys=tuple(moved.get(one.key_id, one) for one in table.keys))
            )
        return [*moved.values()]

    @property
    def ring(self) -> KeyRing:
        """The ring. Raises EncryptionKeyError, which names the keys of the archive, if there is none."""
        if self._ring is not None:
            return self._ring
        names = ", ".join(sorted({one.ring_key for one in self.table().keys})) or "a key"
        raise EncryptionKeyError(
            f"archive {self.name} is encrypted with {names}",
            hint=f"set {SETTING} to the key ring that contains it",
        )

    def check(self) -> None:
        """Raise EncryptionKeyError, or what the ring raises, unless this process can read what is written now: it
        unwraps the newest key of objects of many topics, if there is one."""
        if self.table().fitting(None):
            self.newest(None)

    def begin(self, topics: tuple[tuple[str, str], ...], *, is_owner: bool = True) -> None:
        """Check that this process can write new objects with the ring keys of ``topics`` (pattern and id), and make the
        keys that are missing. Only the archive's owner may change which topics have which keys, later, by ``own``, as
        compaction keeps topics apart by its rules. Raises UsageError, EncryptionKeyError or what the ring raises."""
        if self.is_encrypted():
            differs, catalog = self.table(is_new=True).topics != topics, f"{self.name}/{CATALOG_PREFIX}"
            if differs and not is_owner and next(iter(self._store.list(catalog, limit=1)), None):
                raise UsageError(
                    f"archive {self.name} gives topics other keys of their own than these settings",
                    hint="use the topics.rules of tiered run, which alone changes their keys",
                )
            self.check()  # before a key is made: with the ring of another archive there must be none
            for own in sorted({"", *(key for _, key in topics)}):
                self._newest_of(own)
        elif topics:
            raise UsageError(
                f"a topic has an encryption_key, but nothing is encrypted without {SETTING}",
                hint=f"set {SETTING}",
            )

    def own(self, topics: tuple[tuple[str, str], ...]) -> None:
        """Store ``topics``, which ``begin`` has checked, as the topics with ring keys of their own: new objects get
        these from now on. For the archive's owner alone. Raises the store's errors."""
        if self.is_encrypted() and self.table(is_new=True).topics != topics:
            self.change(lambda table: table._replace(topics=topics))

    def to_write(self, topic: str | None) -> tuple[ArchiveKey, bytes]:
        """The key for a new object, of ``topic`` or of many (None)."""
        return self._newest_of(self.table().ring_key_of(topic))

    def _newest_of(self, own: str) -> tuple[ArchiveKey, bytes]:
        """The newest key that ``own``, the ring key of some topics, wraps; for "" the newest for other objects that the
        current ring key wraps. It is made if there is none."""
        with self._lock:
            ring_key = own or self.ring.current
            fitting = [
                one for one in self.table().keys if (one.ring_key, one.is_topics) == (ring_key, bool(own))
            ]
            key = fitting[-1] if fitting else self.add(ring_key, is_topics=bool(own))
        return key, self._unwrap(key)

    def newest(self, topic: str | None) -> tuple[ArchiveKey, bytes]:
        """The newest key for objects of ``topic`` or of many (None); unlike ``to_write``, makes none. Raises
        EncryptionKeyError if there is none."""
        fitting = self.table().fitting(topic)
        if not fitting:
            raise EncryptionKeyError(f"archive {self.name} has no key for objects of topic {topic}")
        return fitting[-1], self._unwrap(fitting[-1])

    def to_read(self, key_id: str) -> bytes:
        """The key with this id. Raises EncryptionKeyError if the archive has none."""
        key = self._unwrapped.get(key_id)
        if key is not None:
            return key
        for is_new in (False, True):  # first in the table that is known, then in the store's newest
            found = next((one for one in self.table(is_new=is_new).keys if one.key_id == key_id), None)
            if found is not None:
                return self._unwrap(found)
        # This is no CorruptionError, as a repair would drop objects that are readable once keys/ is put back.
        raise EncryptionKeyError(
            f"archive {self.name} has no key {key_id}: objects of {KEYS_PREFIX} are missing, or what the key encrypts"
            " is of another archive",
            hint=f"put the objects of {KEYS_PREFIX} back from a copy of the bucket",
        )

    def _unwrap(self, one: ArchiveKey) -> bytes:
        """The bytes of a key, from the ring when it is first used. Raises what the ring raises; TopicKeyError for the
        key of topics, as objects without it can be read then."""
        with self._lock:
            key = self._unwrapped.get(one.key_id)
            if key is None:
                try:
                    key = self.ring.unwrap(one.ring_key, one.wrapped, f"{self.name}/{one.key_id}")
                    if len(key) != KEY_BYTES:
                        raise wrong_key(one.ring_key, SETTING)
                except EncryptionKeyError as error:
                    raise (TopicKeyError if one.is_topics else type(error))(
                        error.message, hint=error.hint
                    ) from None
                self._unwrapped[one.key_id] = key
            return key
