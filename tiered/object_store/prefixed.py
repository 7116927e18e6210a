"""A store below a prefix: keys are relative to it."""

from collections.abc import Iterator, Sequence

from tiered.object_store.interface import (
    GET_BYTES_MAX,
    Body,
    ObjectInfo,
    ObjectRange,
    ObjectStore,
    Piece,
    Upload,
)
from tiered.object_store.key import check_key
from tiered.object_store.wrapper import StoreWrapper


class PrefixedStore(StoreWrapper):
    """``store`` below ``prefix`` (one or more components, with or without a trailing slash)."""

    def __init__(self, store: ObjectStore, prefix: str) -> None:
        super().__init__(store)
        self._prefix = check_key(prefix.rstrip("/")) + "/"

    @property
    def url(self) -> str:
        """The URL of the store and the prefix."""
        inner = self._store.url
        return f"{inner if inner.endswith('/') else inner + '/'}{self._prefix.rstrip('/')}"

    def __repr__(self) -> str:
        return f"PrefixedStore({self._store!r}, {self._prefix!r})"

    def put_if_absent(self, key: str, body: Body, *, timeout_s: float | None = None) -> None:
        self._store.put_if_absent(self._prefix + key, body, timeout_s=timeout_s)

    def compose_if_absent(
        self, key: str, pieces: Sequence[Piece], *, timeout_s: float | None = None, spool: str = ""
    ) -> None:
        placed = [
            piece._replace(key=self._prefix + piece.key) if isinstance(piece, ObjectRange) else piece
            for piece in pieces
        ]
        self._store.compose_if_absent(self._prefix + key, placed, timeout_s=timeout_s, spool=spool)

    def get(self, key: str, max_bytes: int = GET_BYTES_MAX) -> bytes:
        return self._store.get(self._prefix + key, max_bytes)

    def get_range(self, key: str, offset: int, length: int) -> bytes:
        return self._store.get_range(self._prefix + key, offset, length)

    def list(self, prefix: str, *, start_after: str = "", limit: int | None = None) -> Iterator[ObjectInfo]:
        after = self._prefix + start_after if start_after else ""
        for info in self._store.list(self._prefix + prefix, start_after=after, limit=limit):
            yield info._replace(key=info.key[len(self._prefix) :])

    def delete(self, keys: Sequence[str]) -> None:
        self._store.delete([self._prefix + key for key in keys])

    def uploads(self, prefix: str) -> Iterator[Upload]:
        for upload in self._store.uploads(self._prefix + prefix):
            yield upload._replace(key=upload.key[len(self._prefix) :])

    def abort_upload(self, upload: Upload) -> None:
        self._store.abort_upload(upload._replace(key=self._prefix + upload.key))

    def clock_ms(self, prefix: str = "") -> int:
        return self._store.clock_ms(self._prefix + prefix)
