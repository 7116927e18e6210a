"""PUTs of keys that are unique to this writer.

Only commits compete for keys; all others contain an epoch and a unique number. If such a key exists already, a proxy
or load balancer sent our PUT twice and lost the first response. The existing object is not checked: the PUT counts as
unanswered, and the caller continues under another key.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from tiered.errors import AlreadyExistsError, UnansweredError
from tiered.object_store.interface import Body, ObjectStore, Piece


def put_own(store: ObjectStore, key: str, body: Body, *, timeout_s: float | None = None) -> None:
    """``put_if_absent`` that raises UnansweredError instead of AlreadyExistsError."""
    with _unanswered_if_there():
        store.put_if_absent(key, body, timeout_s=timeout_s)


def compose_own(store: ObjectStore, key: str, pieces: Sequence[Piece]) -> None:
    """``compose_if_absent`` that raises UnansweredError instead of AlreadyExistsError."""
    with _unanswered_if_there():
        store.compose_if_absent(key, pieces)


@contextmanager
def _unanswered_if_there() -> Iterator[None]:
    try:
        yield
    except AlreadyExistsError as error:
        raise UnansweredError(f"{error.message}; a proxy may have sent it twice") from error
