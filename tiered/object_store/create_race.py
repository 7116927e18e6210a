"""Verifies by trying that of several concurrent creates of one key exactly one succeeds.

Commits depend on it. Some stores refuse a create that follows another one, but let several concurrent ones succeed: two
writers would commit the same catalog version, and one of them would lose messages that it had acknowledged.
"""

import logging
import secrets
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from typing import NamedTuple

from tiered.errors import (
    AccessDeniedError,
    AlreadyExistsError,
    RefusedRequestError,
    TieredError,
    UnavailableError,
)
from tiered.object_store.interface import ObjectStore

logger = logging.getLogger(__name__)

TRIAL_PREFIX = "doctor/"
"""Objects of trials, which no commit names. They are removed afterwards."""
TRIAL_SUFFIX = ".check"
"""No other object's key ends like this, so that a policy may allow the deletion of these alone."""
RACERS = 16
ROUNDS = 3
_BODY_BYTES = 16 * 1024
_HINT = "use a store with atomic conditional PUTs (If-None-Match: *), such as AWS S3 or MinIO"


class _Attempt(NamedTuple):
    """One writer's create. ``failure`` is None if it succeeded."""

    body: bytes
    failure: TieredError | None


def new_trial() -> str:
    """A prefix for one trial, unique to it."""
    return f"{TRIAL_PREFIX}{secrets.token_hex(8)}/"


def require_exclusive_creates(store: ObjectStore, *, rounds: int = ROUNDS) -> None:
    """Find out by trying that ``store``, at the archive's prefix, lets exactly one of several concurrent creates of a
    key succeed, which commits depend on. The objects of the trial are removed.

    Raises RefusedRequestError for a store that lets several succeed, and what its requests raise, also for an account
    that may not read.
    """
    trial = new_trial()
    keys = [f"{trial}race-{number}{TRIAL_SUFFIX}" for number in range(rounds)]
    try:
        for key in keys:
            race_creates(store, key)
        store.get(keys[0], _BODY_BYTES)  # a writer reads its own catalog, pages and index
    except TieredError:
        with suppress(TieredError):
            store.delete(keys)
        raise
    try:
        store.delete(keys)
    except TieredError as error:
        logger.warning(
            "%d objects that tested conditional writes remain below %s/%s, delete them: %s",
            len(keys),
            store.url,
            trial,
            error,
        )


def race_creates(store: ObjectStore, key: str, *, racers: int = RACERS) -> None:
    """Create the object ``key`` from ``racers`` threads at once, each with other content, then once more.

    Raises RefusedRequestError unless exactly one create succeeds and its object stays, and what requests raise.
    """
    start = threading.Barrier(racers)
    bodies = [f"writer {number}\n".encode().ljust(_BODY_BYTES, b".") for number in range(racers)]
    with ThreadPoolExecutor(racers, thread_name_prefix="create-race") as threads:
        attempts = list(threads.map(partial(_create, store, key, start), bodies))
    where = f"{store.url}/{key}"
    winner = _winner(where, attempts)
    if _stored(store, key) not in (None, winner):
        raise RefusedRequestError(
            f"{where}: of several concurrent creates, one that the store refused replaced the object of the one that "
            "succeeded",
            hint=_HINT,
        )
    if _create(store, key, threading.Barrier(1), b"late".ljust(_BODY_BYTES, b".")).failure is None:
        raise RefusedRequestError(f"{where}: the store lets a second create replace an object", hint=_HINT)


def _create(store: ObjectStore, key: str, start: threading.Barrier, body: bytes) -> _Attempt:
    """Create the object ``key`` once all threads have come to ``start``, and return how that ended."""
    start.wait()
    try:
        store.put_if_absent(key, [body])
    except TieredError as error:
        return _Attempt(body, error)
    return _Attempt(body, None)


def _stored(store: ObjectStore, key: str) -> bytes | None:
    """The object; None if this account may not read it."""
    try:
        return store.get(key, _BODY_BYTES)
    except AccessDeniedError:
        return None


def _winner(where: str, attempts: Sequence[_Attempt]) -> bytes:
    """The body of the only one of ``attempts`` to create the object at ``where`` that succeeded. Raises
    RefusedRequestError if several did, and the store's error if none did, or if one failed for another reason than that
    the object exists or that the store is busy."""
    failures = [attempt.failure for attempt in attempts if attempt.failure is not None]
    for failure in failures:
        if not isinstance(failure, AlreadyExistsError | UnavailableError):
            raise failure
    winners = [attempt.body for attempt in attempts if attempt.failure is None]
    if len(winners) > 1:
        raise RefusedRequestError(
            f"{where}: {len(winners)} of {len(attempts)} concurrent creates succeeded where only one may",
            hint=_HINT,
        )
    if not winners:
        raise next((failure for failure in failures if isinstance(failure, UnavailableError)), failures[0])
    return winners[0]
