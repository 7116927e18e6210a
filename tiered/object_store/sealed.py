"""Seals what an archive's objects say, and opens it: everything above sees the objects as they would be without
encryption. Commits, catalog pages and wrapped keys stay plain.

A sealed object is chunks of CHUNK_BYTES, each encrypted by AES-256-GCM and followed by its tag and the CRC32C of both,
and a trailer of TRAILER_BYTES. Its data key is derived from a key of the archive and a salt of its own; the nonce of a
chunk is its number; the archive, the object's key, the number and the object's length are authenticated. So sizes
follow from each other, each range can be read alone, and the checksums need no key.
"""

import hmac
import io
import re
import secrets
import struct
import tempfile
import threading
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from typing import Any, Final, NamedTuple

import fastcrc

from tiered.errors import CorruptionError, EncryptionKeyError, NotFoundError, ObjectTooLargeError, TieredError
from tiered.formats.keys import parse_data_key
from tiered.formats.version import FORMAT_MAJOR, FORMAT_MINOR, require_major
from tiered.model.lru import Lru
from tiered.object_store.archive_keys import ArchiveKeys
from tiered.object_store.body import as_views, parts, read_file_range, size_bytes
from tiered.object_store.interface import (
    GET_BYTES_MAX,
    Body,
    Buffer,
    FileRange,
    ObjectInfo,
    ObjectRange,
    ObjectStore,
    Piece,
    too_large,
)
from tiered.object_store.key_ring import (
    KEY_BYTES,
    NONCE_BYTES,
    KeyRing,
)
from tiered.object_store.part_plan import piece_bytes
from tiered.object_store.wrapper import StoreWrapper

CHUNK_BYTES: Final = 32 * 1024
TAG_BYTES: Final = 16
ADDED_BYTES: Final = TAG_BYTES + 4
"""What a chunk has besides its content: tag and CRC32C."""
STORED_BYTES: Final = CHUNK_BYTES + ADDED_BYTES
"""A chunk as stored: only the last one may be shorter."""
_TRAILER = struct.Struct("<8sHHIQ16s32s4xI")
TRAILER_BYTES: Final = _TRAILER.size
LOCAL_BYTES: Final = 16 + NONCE_BYTES + TAG_BYTES
"""What a seal adds to a local copy."""
_MAGIC: Final = b"RMQTSEAL"
_SEALED = re.compile(r"([^/]+/[^/]+)/((?:data|sets|index|state|timer|private)/.+)\Z")
"""Keys of objects that are sealed in an encrypted archive: the archive's name, and the key there."""
_Place = tuple[ArchiveKeys, str]
"""The keys of an object's archive, and the object's key there."""
_SEALS_MAX: Final = 16_384
"""How many objects' seals are kept in memory."""
_STEP_BYTES: Final = 8 * 1024 * 1024
"""What is read of an object at a time."""


def sealed_size(plain_bytes: int) -> int:
    """The size of an object whose content has ``plain_bytes``."""
    return plain_bytes + ADDED_BYTES * max(1, -(-plain_bytes // CHUNK_BYTES)) + TRAILER_BYTES


def plain_size(stored_bytes: int) -> int:
    """The size of the content of a sealed object; 0 if it is too small to be one."""
    chunks = -(-(stored_bytes - TRAILER_BYTES) // STORED_BYTES)
    return max(0, stored_bytes - TRAILER_BYTES - ADDED_BYTES * chunks)


class Seal(NamedTuple):
    """How one object is sealed. ``cipher``: encrypts and decrypts by the object's data key; ``place``: the archive's
    name and the object's key there, which every chunk authenticates; ``plain_bytes``: the size of its content."""

    cipher: Any
    place: bytes
    plain_bytes: int

    def associated(self, number: int) -> bytes:
        """What chunk ``number`` authenticates besides its content."""
        return struct.pack("<QQ", number, self.plain_bytes) + self.place

    def encrypted(self, content: Iterable[memoryview]) -> Iterator[Buffer]:
        """The chunks of ``content`` as they are stored, each in two pieces: encrypted content, and CRC32C. An object
        without content has one empty chunk."""
        number = -1
        for number, part in enumerate(parts(content, CHUNK_BYTES)):
            yield from self._chunk(number, part[0] if len(part) == 1 else b"".join(part))
        if number < 0:
            yield from self._chunk(0, b"")

    def _chunk(self, number: int, content: Buffer) -> tuple[bytes, bytes]:
        sealed = bytes(self.cipher.encrypt(_nonce(number), content, self.associated(number)))
        return sealed, fastcrc.crc32.iscsi(sealed).to_bytes(4, "little")

    def span(self, offset: int, length: int) -> tuple[int, int]:
        """Offset and length of the chunks that hold a range of the content."""
        first, end = offset // CHUNK_BYTES, offset + length
        last = -(-end // CHUNK_BYTES) * STORED_BYTES
        chunks_bytes = sealed_size(self.plain_bytes) - TRAILER_BYTES
        return first * STORED_BYTES, min(last, chunks_bytes) - first * STORED_BYTES

    def decrypted(self, stored: Buffer, offset: int, length: int, source: str) -> bytes:
        """``length`` bytes of the content from ``offset``. ``stored``: the chunks that hold them, as ``span`` says.
        Raises CorruptionError, which names ``source``."""
        from cryptography.exceptions import InvalidTag

        view, first = memoryview(stored), offset // CHUNK_BYTES
        content, scratch = io.BytesIO(bytes(length)), memoryview(bytearray(CHUNK_BYTES))
        skipped = offset - first * CHUNK_BYTES
        for number, begin in enumerate(range(0, max(1, len(view)), STORED_BYTES), first):
            chunk = view[begin : begin + STORED_BYTES][:-4]
            part = scratch[: len(chunk) - TAG_BYTES]
            try:
                self.cipher.decrypt_into(_nonce(number), chunk, self.associated(number), part)
            except (InvalidTag, ValueError):
                raise CorruptionError(
                    f"{source}: chunk {number} is damaged, or is not of this object: its seal does not fit"
                ) from None
            content.write(part[skipped : skipped + length - content.tell()])
            skipped = 0
        if content.tell() < length:
            raise CorruptionError(f"{source} ends before byte {offset + length} of its content")
        return content.getvalue()


def _nonce(number: int) -> bytes:
    return number.to_bytes(NONCE_BYTES, "little")


class _Trailer(NamedTuple):
    """What a sealed object states: its key, the salt of its data key, and the size of its content."""

    key_id: str
    salt: bytes
    plain_bytes: int

    def encoded(self) -> bytes:
        fields = (self.plain_bytes, bytes.fromhex(self.key_id), self.salt)
        data = _TRAILER.pack(_MAGIC, FORMAT_MAJOR, FORMAT_MINOR, CHUNK_BYTES, *fields, 0)[:-4]
        return b"".join((data, fastcrc.crc32.iscsi(data).to_bytes(4, "little")))


def _decode_trailer(data: bytes, source: str) -> _Trailer:
    """Check and parse; raises CorruptionError, or UnsupportedFormatError for another major version."""
    if len(data) != TRAILER_BYTES or not data.startswith(_MAGIC):
        raise CorruptionError(
            f"{source} is cut off, or not encrypted as this archive is: it does not end with a seal"
        )
    _, major, minor, chunk_bytes, plain_bytes, key_id, salt, crc = _TRAILER.unpack(data)
    if fastcrc.crc32.iscsi(data[:-4]) != crc:
        raise CorruptionError(f"{source} is damaged: its seal fails its CRC32C")
    require_major(major, minor, f"{source}: seal")
    if chunk_bytes != CHUNK_BYTES:
        raise CorruptionError(
            f"{source} is sealed in chunks of {chunk_bytes} bytes, but this program reads chunks of {CHUNK_BYTES}"
        )
    return _Trailer(key_id.hex(), salt, plain_bytes)


class SealedStore(StoreWrapper):
    """``store``, the root of archives, with their objects sealed by keys that ``ring`` wraps. Without a ring, archives
    that are not encrypted are read and written as they are; of others only sizes, checksums and what is plain."""

    def __init__(self, store: ObjectStore, ring: KeyRing | None) -> None:
        """Makes no request: the first one for an archive finds out whether it is encrypted."""
        super().__init__(store)
        self._ring = ring
        self._lock = threading.Lock()
        self._archives: dict[str, ArchiveKeys] = {}
        self._seals: Lru[str, Seal] = Lru(_SEALS_MAX)

    def keys(self, name: str) -> ArchiveKeys:
        """The keys of the archive ``<cluster>/<broker>``. Makes no request."""
        with self._lock:
            if name not in self._archives:
                self._archives[name] = ArchiveKeys(self._store, name, self._ring)
            return self._archives[name]

    def _place(self, key: str) -> _Place | None:
        """The keys of the archive of object ``key``, and its key there; None for what is not sealed."""
        parsed = _SEALED.match(key)
        if parsed is None or not (keys := self.keys(parsed[1])).is_encrypted():
            return None
        return keys, parsed[2]

    # -- writing -----------------------------------------

    def put_if_absent(self, key: str, body: Body, *, timeout_s: float | None = None) -> None:
        place = self._place(key)
        if place is not None:
            seal, trailer = self._new_seal(key, place, size_bytes(body))
            body = [*seal.encrypted(as_views(body)), trailer]
        self._store.put_if_absent(key, body, timeout_s=timeout_s)

    def compose_if_absent(
        self, key: str, pieces: Sequence[Piece], *, timeout_s: float | None = None, spool: str = ""
    ) -> None:
        """Create an object of pieces. The store cannot copy ranges of sealed objects, as each has a data key of its
        own: they are read, and sealed again in a local file, which is sent."""
        place = self._place(key)
        if place is None:
            self._store.compose_if_absent(key, pieces, timeout_s=timeout_s, spool=spool)
            return
        seal, trailer = self._new_seal(key, place, sum(map(piece_bytes, pieces)))
        with tempfile.TemporaryFile(dir=spool or None) as file:
            # The file has no name, so that a killed process leaves nothing.
            file.writelines(seal.encrypted(self._content(pieces)))
            file.write(trailer)
            file.flush()
            whole = FileRange(f"/proc/self/fd/{file.fileno()}", 0, sealed_size(seal.plain_bytes))
            self._store.compose_if_absent(key, [whole], timeout_s=timeout_s)

    def _new_seal(self, key: str, place: _Place, plain_bytes: int) -> tuple[Seal, bytes]:
        archive_key, secret = place[0].to_write(topic_of(place[1]))
        trailer = _Trailer(archive_key.key_id, secrets.token_bytes(KEY_BYTES), plain_bytes)
        return _seal(secret, trailer, place), trailer.encoded()

    def _content(self, pieces: Sequence[Piece]) -> Iterator[memoryview]:
        """The content of the pieces in order, read from objects and files by _STEP_BYTES at a time."""
        for piece in pieces:
            if isinstance(piece, ObjectRange | FileRange):
                for offset in range(piece.offset, piece.offset + piece.length, _STEP_BYTES):
                    length = min(_STEP_BYTES, piece.offset + piece.length - offset)
                    part = piece._replace(offset=offset, length=length)
                    yield memoryview(
                        self.get_range(*part) if isinstance(part, ObjectRange) else read_file_range(part)
                    )
            else:
                yield from as_views([piece])

    # -- reading -----------------------------------------

    def get(self, key: str, max_bytes: int = GET_BYTES_MAX) -> bytes:
        """The content of an object; ObjectTooLargeError, with the content's size, above ``max_bytes``."""
        place = self._place(key)
        if place is None:
            return self._store.get(key, max_bytes)
        try:
            stored = memoryview(self._store.get(key, sealed_size(max_bytes)))
        except ObjectTooLargeError:
            raise too_large(
                next(self.list(key, limit=1)).size_bytes, max_bytes, f"{self.url}/{key}"
            ) from None
        seal = self._opened(key, place, bytes(stored[-TRAILER_BYTES:]), len(stored))
        return seal.decrypted(stored[:-TRAILER_BYTES], 0, seal.plain_bytes, f"{self.url}/{key}")

    def get_range(self, key: str, offset: int, length: int) -> bytes:
        """Exactly ``length`` bytes of an object's content from ``offset``, by one request if its seal is known, or if
        the range ends where the content does."""
        place = self._place(key)
        if place is None or length <= 0 or offset < 0:
            return self._store.get_range(key, offset, length)
        source = f"{self.url}/{key}"
        with self._lock:
            seal = self._seals.get(key)
        if seal is None:
            # Readers open an object by the end of its content, where the trailer with the seal follows: one request
            # gets both. If the range does not end there, a listing gives the size, and so the place of the trailer.
            begin, end = offset // CHUNK_BYTES * STORED_BYTES, sealed_size(offset + length)
            try:
                stored = self._store.get_range(key, begin, end - begin)
                seal = self._opened(key, place, stored[-TRAILER_BYTES:], end)
                return seal.decrypted(memoryview(stored)[:-TRAILER_BYTES], offset, length, source)
            except CorruptionError:
                seal = self._listed(key, place)
        if offset + length > seal.plain_bytes:
            raise CorruptionError(
                f"{source} has {seal.plain_bytes} bytes, and so no bytes {offset} to {offset + length - 1}"
            )
        begin, count = seal.span(offset, length)
        return seal.decrypted(self._store.get_range(key, begin, count), offset, length, source)

    def _listed(self, key: str, place: _Place) -> Seal:
        """The seal of an object whose size is not known: a listing gives it. Raises NotFoundError and
        CorruptionError."""
        info = next(iter(self._store.list(key, limit=1)), None)
        if info is None or info.key != key:
            raise NotFoundError(f"{self.url}/{key} does not exist")
        if info.size_bytes < TRAILER_BYTES:
            raise CorruptionError(
                f"{self.url}/{key} is cut off, or not encrypted as this archive is: it does not end with a seal"
            )
        end = self._store.get_range(key, info.size_bytes - TRAILER_BYTES, TRAILER_BYTES)
        return self._opened(key, place, end, info.size_bytes)

    def _opened(self, key: str, place: _Place, trailer: bytes, stored_bytes: int) -> Seal:
        """The seal that ``trailer``, the last bytes of an object of ``stored_bytes``, states; kept for later reads.
        Raises CorruptionError, and EncryptionKeyError if its key cannot be used: this one can check the object's
        checksums, which needs no key."""
        source = f"{self.url}/{key}"
        stated = _decode_trailer(trailer, source)
        if sealed_size(stated.plain_bytes) != stored_bytes:
            raise CorruptionError(
                f"{source} has {stored_bytes} bytes, but its last bytes say that it encrypts {stated.plain_bytes} bytes"
            )
        try:
            seal = _seal(place[0].to_read(stated.key_id), stated, place)
        except EncryptionKeyError as error:
            refused = type(error)(f"{source}: {error.message}", hint=error.hint)
            refused.check, refused.lacks = partial(self._check, key, stored_bytes), error.message
            raise refused from None
        with self._lock:
            self._seals.put(key, seal)
        return seal

    def list(self, prefix: str, *, start_after: str = "", limit: int | None = None) -> Iterator[ObjectInfo]:
        """List objects; the size of a sealed one is that of its content."""
        for info in self._store.list(prefix, start_after=start_after, limit=limit):
            is_sealed = self._place(info.key) is not None
            yield info._replace(size_bytes=plain_size(info.size_bytes)) if is_sealed else info

    def _check(self, key: str, stored_bytes: int) -> None:
        """Read a sealed object of ``stored_bytes`` and check the checksums of its chunks, without a key. Raises
        CorruptionError."""
        end, source = stored_bytes - TRAILER_BYTES, f"{self.url}/{key}"
        step = _STEP_BYTES // STORED_BYTES * STORED_BYTES
        for begin in range(0, end, step):
            stored = self._store.get_range(key, begin, min(step, end - begin))
            for at in range(0, len(stored), STORED_BYTES):
                chunk = stored[at : at + STORED_BYTES]
                if fastcrc.crc32.iscsi(chunk[:-4]).to_bytes(4, "little") != chunk[-4:]:
                    number = (begin + at) // STORED_BYTES
                    raise CorruptionError(f"{source} is damaged: chunk {number} fails its CRC32C")


def _seal(secret: bytes, trailer: _Trailer, place: _Place) -> Seal:
    """The data key is one step of HKDF (RFC 5869) with the object's salt."""
    name = f"{place[0].name}/{place[1]}".encode()
    return Seal(_cipher(secret, b"data" + trailer.salt + name), name, trailer.plain_bytes)


def _cipher(secret: bytes, purpose: bytes) -> Any:
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM  # import takes 0.05 s

    return AESGCM(hmac.digest(secret, purpose, "sha256"))


class LocalSeals:
    """Seals copies of blocks that this machine keeps, by the keys of their archive."""

    def __init__(self, keys: ArchiveKeys) -> None:
        self._keys = keys

    def seal(self, key: str, content: bytes) -> bytes:
        """``content`` of the object ``key``, sealed; empty if no key can be used: then it must not be kept."""
        nonce = secrets.token_bytes(NONCE_BYTES)
        try:
            used, secret = self._keys.newest(topic_of(key))
        except TieredError:
            return b""
        return b"".join(
            (
                bytes.fromhex(used.key_id),
                nonce,
                _cipher(secret, b"local").encrypt(nonce, content, key.encode()),
            )
        )

    def open(self, key: str, sealed: bytes) -> bytes:
        """What ``seal`` was given; empty if it is damaged, or its key is gone."""
        from cryptography.exceptions import InvalidTag

        begin = 16 + NONCE_BYTES
        try:
            cipher = _cipher(self._keys.to_read(sealed[:16].hex()), b"local")
            return bytes(cipher.decrypt(sealed[16:begin], sealed[begin:], key.encode()))
        except (TieredError, InvalidTag, ValueError):
            return b""


def topic_of(key: str) -> str | None:
    """The topic of a stream object; None for other objects of an archive."""
    found = parse_data_key(key)
    return found and found.topic
