"""Interface of an object store, and what all stores share. Objects are immutable: there is no overwrite.

Errors are tiered.errors only: NotFoundError (no such key or bucket), AlreadyExistsError, ThrottledError and
StoreFullError (no effect), UnansweredError (effect unknown), AccessDeniedError, RefusedRequestError,
ObjectTooLargeError.

``put_own`` and ``compose_own`` are for all objects but commits, which alone compete for keys: other keys contain an
epoch and a unique number. If such a key exists already, a proxy or load balancer sent our PUT twice and lost the first
response. The existing object is not checked: the PUT counts as unanswered, and the caller continues under another key.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from tiered.errors import AlreadyExistsError, ObjectTooLargeError, UnansweredError
from tiered.settings.sections import ObjectStoreSettings

Buffer = bytes | bytearray | memoryview
Body = Sequence[Buffer]
"""An object's bytes as consecutive pieces; not copied, so they must not change until the call returns."""
GET_BYTES_MAX = 1 << 30
"""Limit of a whole object, unless the caller states another one."""


class ObjectRange(NamedTuple):
    """Bytes [offset, offset + length) of an existing object."""

    key: str
    offset: int
    length: int


class FileRange(NamedTuple):
    """Bytes of a local file, read when they are sent; the file must not change until the call returns. ``secret`` is
    that of a SecretFile, which only a store that seals can read."""

    path: str
    offset: int
    length: int
    secret: bytes = b""


Piece = Buffer | ObjectRange | FileRange
"""A piece of a composed object."""


class ObjectInfo(NamedTuple):
    """One listed object. ``modified_ms`` is by the store's clock."""

    key: str
    size_bytes: int
    modified_ms: int


def too_large(byte_count: int, max_bytes: int, where: str) -> ObjectTooLargeError:
    """The error for an object above a caller's maximum."""
    return ObjectTooLargeError(f"{where} has {byte_count} bytes, more than the {max_bytes} that may be read")


def require_size(byte_count: int, max_bytes: int, where: str) -> None:
    """Raises ObjectTooLargeError above ``max_bytes``."""
    if byte_count > max_bytes:
        raise too_large(byte_count, max_bytes, where)


class Upload(NamedTuple):
    """An upload in parts that was begun and not completed: its parts are stored, and paid for, until it is aborted."""

    key: str
    upload_id: str
    begun_ms: int


class ObjectStore(Protocol):
    """A flat key space under one URL. Thread-safe. Keys: ``[A-Za-z0-9._/-]``, below the URL's prefix."""

    @property
    def url(self) -> str:
        """The address without secrets, for messages."""

    def put_if_absent(self, key: str, body: Body, *, timeout_s: float | None = None) -> None:
        """Create ``key`` durably or raise AlreadyExistsError; exactly one of concurrent callers wins.

        One call is one attempt. Large bodies may be multipart uploads except under ``catalog/`` and ``pages/``.
        """

    def compose_if_absent(
        self, key: str, pieces: Sequence[Piece], *, timeout_s: float | None = None, spool: str = ""
    ) -> None:
        """``put_if_absent`` of all pieces in order. Ranges of objects are copied inside the store where it can; what
        has to be written to a file before is written in the directory ``spool`` (empty: that of temporary files).

        Raises NotFoundError for a missing source, CorruptionError for a range beyond its end.
        """

    def get(self, key: str, max_bytes: int) -> bytes:
        """The whole object; ObjectTooLargeError above ``max_bytes``, before it is read."""

    def get_range(self, key: str, offset: int, length: int) -> bytes:
        """Exactly ``length`` bytes from ``offset``; a shorter answer is a CorruptionError."""

    def list(self, prefix: str, *, start_after: str = "", limit: int | None = None) -> Iterator[ObjectInfo]:
        """Keys with ``prefix`` in ascending byte order, beginning after ``start_after``."""

    def delete(self, keys: Sequence[str]) -> None:
        """Remove keys; absent ones are fine."""

    def uploads(self, prefix: str) -> Iterator[Upload]:
        """Uploads in parts below ``prefix`` that were begun and not completed; none where there is no such thing."""

    def abort_upload(self, upload: Upload) -> None:
        """Remove the parts of an upload; an absent one is fine."""

    def clock_ms(self, prefix: str = "") -> int:
        """The store's clock, for skew checks (one cheap request, below ``prefix``)."""

    def close(self) -> None:
        """Release connections. Idempotent."""


class AsyncObjectStore(Protocol):
    """Reading objects in an event loop: keys, errors and semantics of ObjectStore.

    Cancelling a call closes its connection.
    """

    @property
    def url(self) -> str:
        """The address without secrets, for messages."""

    async def get(self, key: str, max_bytes: int) -> bytes:
        """The whole object; ObjectTooLargeError above ``max_bytes``, before it is read."""

    async def get_range(self, key: str, offset: int, length: int) -> bytes:
        """Exactly ``length`` bytes from ``offset``; a shorter answer is a CorruptionError."""

    async def close(self) -> None:
        """Release connections. Idempotent."""


@dataclass(frozen=True)
class S3Credentials:
    """Explicit keys, for tests and embedding programs. Otherwise the SDK's credential chain applies."""

    access_key: str = field(repr=False)
    secret_key: str = field(repr=False)
    session_token: str | None = field(default=None, repr=False)


@dataclass(frozen=True)
class StoreOptions:
    """Options of an object store: the settings section, and values that are never settings. ``retry_seconds``: for how
    long reads, lists and deletes are retried; 0 turns retries off."""

    settings: ObjectStoreSettings = field(default_factory=ObjectStoreSettings)
    credentials: S3Credentials | None = field(default=None, repr=False)
    retry_seconds: float = 20.0


def put_own(store: ObjectStore, key: str, body: Body, *, timeout_s: float | None = None) -> None:
    """``put_if_absent`` that raises UnansweredError instead of AlreadyExistsError."""
    with _unanswered_if_there():
        store.put_if_absent(key, body, timeout_s=timeout_s)


def compose_own(store: ObjectStore, key: str, pieces: Sequence[Piece], spool: str = "") -> None:
    """``compose_if_absent`` that raises UnansweredError instead of AlreadyExistsError."""
    with _unanswered_if_there():
        store.compose_if_absent(key, pieces, spool=spool)


@contextmanager
def _unanswered_if_there() -> Iterator[None]:
    try:
        yield
    except AlreadyExistsError as error:
        why = "a proxy may have sent the request twice, or the object is a remnant of a lost archive"
        raise UnansweredError(f"{error.message}; {why}") from error
