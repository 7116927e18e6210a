"""Size, checksum and parts of a body, and a file-like view for the SDK.

Pieces are not copied; small neighbours are joined when sent.
"""

import base64
import hashlib
import os
from collections.abc import Iterable, Iterator

from tiered.errors import CorruptionError
from tiered.object_store.interface import Body, Buffer, FileRange
from tiered.object_store.secret_file import secret_cipher

SMALL_PIECE_BYTES = 64 * 1024
JOINED_BYTES_MAX = 256 * 1024


def size_bytes(body: Body) -> int:
    """All pieces together."""
    return sum(map(buffer_bytes, body))


def buffer_bytes(piece: Buffer) -> int:
    """Length in bytes: ``len`` of a memoryview counts items, not bytes."""
    return piece.nbytes if isinstance(piece, memoryview) else len(piece)


def as_views(body: Body) -> list[memoryview]:
    """The pieces as flat byte views, without empty ones."""
    return [memoryview(piece).cast("B") for piece in body if buffer_bytes(piece)]


def coalesced(views: list[memoryview]) -> Iterator[Buffer]:
    """The bytes of ``views`` in fewer buffers: small neighbouring ones are joined, which copies them; large ones are
    yielded as they are."""
    pending: list[memoryview] = []
    pending_bytes = 0
    for view in views:
        if pending and (view.nbytes >= SMALL_PIECE_BYTES or pending_bytes + view.nbytes > JOINED_BYTES_MAX):
            yield b"".join(pending)
            pending, pending_bytes = [], 0
        if view.nbytes >= SMALL_PIECE_BYTES:
            yield view
        else:
            pending.append(view)
            pending_bytes += view.nbytes
    if pending:
        yield b"".join(pending)


def parts(views: Iterable[memoryview], part_bytes: int) -> Iterator[list[memoryview]]:
    """Divide the bytes of ``views`` into consecutive parts of exactly ``part_bytes``, the last one smaller, each as a
    list of views. Nothing is copied."""
    part: list[memoryview] = []
    room = part_bytes
    for view in views:
        rest = view
        while rest.nbytes:
            part.append(rest[:room])
            room -= part[-1].nbytes
            rest = rest[part[-1].nbytes :]
            if room == 0:
                yield part
                part, room = [], part_bytes
    if part:
        yield part


def crc32c_base64(views: list[memoryview]) -> str:
    """The CRC32C of the bytes of all ``views``, in base64 as S3's checksum headers have it."""
    from fastcrc import crc32  # loaded by the first upload

    crc = 0
    for view in views:
        crc = crc32.iscsi(view, crc)
    return base64.b64encode(crc.to_bytes(4, "big")).decode("ascii")


def md5_base64(views: list[memoryview]) -> str:
    """MD5 of all pieces, for requests that cannot carry a CRC32C."""
    digest = hashlib.md5(usedforsecurity=False)
    for view in views:
        digest.update(view)
    return base64.b64encode(digest.digest()).decode("ascii")


class PieceReader:
    """The pieces as a seekable file, the only form besides bytes that the SDK accepts."""

    def __init__(self, views: list[memoryview]) -> None:
        self.views = views
        self._size = sum(view.nbytes for view in views)
        self._position = 0

    def __len__(self) -> int:
        return self._size

    def tell(self) -> int:
        """Bytes before the next read."""
        return self._position

    def seek(self, offset: int, whence: int = 0) -> int:
        """Move to ``offset``, as io.IOBase.seek does."""
        base = (0, self._position, self._size)[whence]
        self._position = max(0, base + offset)
        return self._position

    def read(self, amount: int = -1) -> bytes:
        """The next ``amount`` bytes, fewer at the end; all remaining ones if it is negative or None."""
        wanted = self._size - self._position if amount is None or amount < 0 else amount
        taken: list[memoryview] = []
        start = 0
        for view in self.views:
            if wanted <= 0:
                break
            within = self._position - start
            start += view.nbytes
            if within < view.nbytes:  # the position is not behind this view
                taken.append(view[within : within + wanted])
                wanted -= taken[-1].nbytes
                self._position += taken[-1].nbytes
        return b"".join(taken)


def read_file_range(piece: FileRange) -> bytes:
    """The bytes of a range of a local file. Raises CorruptionError if the file ends before the range does."""
    descriptor = os.open(piece.path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        data = os.pread(descriptor, piece.length, piece.offset)
        while len(data) < piece.length:
            more = os.pread(descriptor, piece.length - len(data), piece.offset + len(data))
            if not more:
                raise CorruptionError(
                    f"{piece.path} ends at byte {piece.offset + len(data)}, before the end of the requested "
                    f"{piece.length} bytes from byte {piece.offset}"
                )
            data += more
    finally:
        os.close(descriptor)
    return secret_cipher(piece.secret, piece.offset).update(data) if piece.secret else data
