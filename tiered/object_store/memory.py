"""memory://: objects in a dictionary, for tests, simulations and temporary archives."""

import threading
from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterator, Sequence

from tiered.clock import MACHINE_CLOCK, Clock
from tiered.errors import AlreadyExistsError, CorruptionError, NotFoundError
from tiered.object_store.body import read_file_range
from tiered.object_store.interface import (
    GET_BYTES_MAX,
    Body,
    Buffer,
    FileRange,
    ObjectInfo,
    ObjectRange,
    Piece,
    Upload,
    require_size,
)
from tiered.object_store.key import check_key


class MemoryStore:
    """Objects in a dictionary with their sorted keys. ``clock`` gives their timestamps."""

    def __init__(self, url: str = "memory://", *, clock: Clock = MACHINE_CLOCK) -> None:
        self._url = url
        self._clock = clock
        self._lock = threading.Lock()
        self._objects: dict[str, tuple[bytes, int]] = {}
        self._keys: list[str] = []

    @property
    def url(self) -> str:
        """``memory://name``."""
        return self._url

    def __repr__(self) -> str:
        return f"MemoryStore({self._url!r}, objects={len(self._keys)})"

    def put_if_absent(self, key: str, body: Body, *, timeout_s: float | None = None) -> None:
        content = b"".join(body)
        with self._lock:
            if key in self._objects:
                raise AlreadyExistsError(f"{self._url}/{key} exists")
            self._objects[check_key(key)] = (content, self._clock.wall_ms())
            insort(self._keys, key)

    def compose_if_absent(
        self, key: str, pieces: Sequence[Piece], *, timeout_s: float | None = None, spool: str = ""
    ) -> None:
        """Join the pieces into one object, as there is nothing to be saved by copying."""
        body: list[Buffer] = []
        for piece in pieces:
            if isinstance(piece, ObjectRange):
                body.append(self.get_range(*piece))
            else:
                body.append(read_file_range(piece) if isinstance(piece, FileRange) else piece)
        self.put_if_absent(key, body)

    def get(self, key: str, max_bytes: int = GET_BYTES_MAX) -> bytes:
        with self._lock:
            found = self._objects.get(check_key(key))
        if found is None:
            raise NotFoundError(f"{self._url}/{key} does not exist")
        require_size(len(found[0]), max_bytes, f"{self._url}/{key}")
        return found[0]

    def get_range(self, key: str, offset: int, length: int) -> bytes:
        content = self.get(key)
        if offset < 0 or length < 0 or offset + length > len(content):
            raise CorruptionError(
                f"{self._url}/{key} has {len(content)} bytes, so that there is no range [{offset}, {offset + length})"
            )
        return content[offset : offset + length]

    def list(self, prefix: str, *, start_after: str = "", limit: int | None = None) -> Iterator[ObjectInfo]:
        """List the objects with ``prefix`` that come after ``start_after``, as they are at the call."""
        with self._lock:
            first = max(bisect_left(self._keys, prefix), bisect_right(self._keys, start_after))
            found: list[ObjectInfo] = []
            for key in self._keys[first:] if limit is None else self._keys[first : first + limit]:
                if not key.startswith(prefix):
                    break
                content, modified_ms = self._objects[key]
                found.append(ObjectInfo(key, len(content), modified_ms))
        return iter(found)

    def delete(self, keys: Sequence[str]) -> None:
        with self._lock:
            for key in keys:
                if self._objects.pop(key, None) is not None:
                    del self._keys[bisect_left(self._keys, key)]

    def uploads(self, prefix: str) -> Iterator[Upload]:
        return iter(())

    def abort_upload(self, upload: Upload) -> None:
        """Nothing: no upload is ever unfinished."""

    def clock_ms(self, prefix: str = "") -> int:
        return self._clock.wall_ms()

    def close(self) -> None:
        """Nothing to release."""
