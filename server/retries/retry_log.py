"""The objects under ``state/serve/retry/``: numbered, each created only if absent, one writer at a time.

Who owns the groups (group_state.py) begins by writing a base as the next number. A server that was fenced finds its own
next number taken, or where that was removed later numbers, and knows; so nothing it acknowledges can be missing from
what its successor read.

Blocking; one task uses it. Owns keys, fencing and removal of what a base replaces.
"""

from __future__ import annotations

import secrets
from typing import Final

from server.retries.retry_state import RetryObject, RetryState, decode_object, encode_object
from tiered.errors import AlreadyExistsError, CorruptionError, FencedError, NotFoundError
from tiered.formats.keys import SERVE_PREFIX
from tiered.object_store.interface import ObjectStore

RETRY_KEYS: Final = f"{SERVE_PREFIX}retry/"
CLAIMS_MAX: Final = 20


def object_key(version: int) -> str:
    """Key of one object; later ones sort later."""
    return f"{RETRY_KEYS}{version:020d}"


def _is_ours(key: str) -> bool:
    """Browsers of buckets leave objects that are called like a folder."""
    return key.removeprefix(RETRY_KEYS).isdecimal()


def load_objects(store: ObjectStore) -> list[RetryObject]:
    """The newest base and what came after it, in order; nothing when there is none. Raises CorruptionError."""
    for _ in range(CLAIMS_MAX):
        keys = sorted(info.key for info in store.list(RETRY_KEYS) if _is_ours(info.key))
        try:
            return _from_newest_base(store, keys)
        except NotFoundError:
            continue  # a newer base came and this was removed meanwhile
    raise CorruptionError(f"{store.url}/{RETRY_KEYS}: objects are removed faster than they are read")


def _from_newest_base(store: ObjectStore, keys: list[str]) -> list[RetryObject]:
    found: list[RetryObject] = []
    for key in reversed(keys):
        one = decode_object(store.get(key), source=f"{store.url}/{key}")
        if key != object_key(one.version) or (found and one.version != found[-1].version - 1):
            raise CorruptionError(f"{store.url}/{key}: version {one.version} is out of order")
        found.append(one)
        if one.queues is not None:
            return found[::-1]
    if found:
        raise CorruptionError(f"{store.url}/{found[-1].version}: nothing before it, and it is no base")
    return []


class RetryLog:
    """The one writer of an archive's messages sent back."""

    def __init__(self, store: ObjectStore, owner_name: str) -> None:
        self._store = store
        self.owner = secrets.token_hex(8)
        self.owner_name = owner_name
        self.version = 0
        self.base_version = 0

    def claim(self) -> RetryState:
        """Read all and become the writer. Raises FencedError while others keep writing."""
        for _ in range(CLAIMS_MAX):
            state, objects = RetryState(), load_objects(self._store)
            for found in objects:
                state.apply(found)
            self.version = objects[-1].version if objects else 0
            try:
                self.write(state.base(self.version + 1, self.owner, self.owner_name))
            except FencedError:
                continue  # its last append came between: read that too
            return state
        raise FencedError("messages sent back are still written by another server")

    def write(self, found: RetryObject) -> None:
        """Make the next object durable; raises FencedError when another server wrote it.

        Other errors leave open whether it was written: the same object is written again.
        """
        assert found.version == self.version + 1
        key = object_key(found.version)
        try:
            self._store.put_if_absent(key, [encode_object(found)])
        except AlreadyExistsError:
            there = decode_object(self._store.get(key), source=f"{self._store.url}/{key}")
            if there.owner != self.owner:
                raise FencedError(f"messages sent back are written by {there.owner_name} now") from None
        if any(_is_ours(info.key) for info in self._store.list(RETRY_KEYS, start_after=key)):
            raise FencedError("messages sent back are written by another server now")
        self.version = found.version
        if found.queues is not None:
            self.base_version = found.version

    def remove_replaced(self) -> None:
        """Remove what the newest base replaces."""
        base = object_key(self.base_version)
        keys = [info.key for info in self._store.list(RETRY_KEYS) if info.key < base and _is_ours(info.key)]
        if keys:
            self._store.delete(keys)
