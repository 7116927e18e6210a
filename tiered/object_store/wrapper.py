"""Base of stores that wrap another store."""

from collections.abc import Iterator, Sequence

from tiered.object_store.interface import GET_BYTES_MAX, Body, ObjectInfo, ObjectStore, Piece, Upload


class StoreWrapper:
    """Forwards every call to ``store``; subclasses override what they change."""

    def __init__(self, store: ObjectStore) -> None:
        self._store = store

    @property
    def url(self) -> str:
        """The wrapped store's URL."""
        return self._store.url

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._store!r})"

    def put_if_absent(self, key: str, body: Body, *, timeout_s: float | None = None) -> None:
        self._store.put_if_absent(key, body, timeout_s=timeout_s)

    def compose_if_absent(
        self, key: str, pieces: Sequence[Piece], *, timeout_s: float | None = None, spool: str = ""
    ) -> None:
        self._store.compose_if_absent(key, pieces, timeout_s=timeout_s, spool=spool)

    def get(self, key: str, max_bytes: int = GET_BYTES_MAX) -> bytes:
        return self._store.get(key, max_bytes)

    def get_range(self, key: str, offset: int, length: int) -> bytes:
        return self._store.get_range(key, offset, length)

    def list(self, prefix: str, *, start_after: str = "", limit: int | None = None) -> Iterator[ObjectInfo]:
        return self._store.list(prefix, start_after=start_after, limit=limit)

    def delete(self, keys: Sequence[str]) -> None:
        self._store.delete(keys)

    def uploads(self, prefix: str) -> Iterator[Upload]:
        return self._store.uploads(prefix)

    def abort_upload(self, upload: Upload) -> None:
        self._store.abort_upload(upload)

    def clock_ms(self, prefix: str = "") -> int:
        return self._store.clock_ms(prefix)

    def close(self) -> None:
        self._store.close()
