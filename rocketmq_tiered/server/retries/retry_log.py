"""Retry messages in the object store: numbered objects under ``state/serve/retry/``, each created only if absent.

The new owner of the groups (group_state.py) first writes a base as the next number. A fenced server finds its next
number taken, or later numbers if that was removed, so its successor has read every message it acknowledged. Blocking;
one task uses it.
"""

from __future__ import annotations

import secrets
from typing import Final

from rocketmq_tiered.server.retries.retry_state import RetryObject, RetryState, decode_object, encode_object
from tiered.errors import AlreadyExistsError, CorruptionError, FencedError, NotFoundError
from tiered.formats.keys import SERVE_PREFIX
from tiered.formats.memory_bound import stored_bytes_max
from tiered.object_store.interface import ObjectStore

RETRY_KEYS: Final = f"{SERVE_PREFIX}retry/"
CLAIMS_MAX: Final = 20


def object_key(version: int) -> str:
    """Key of an object; later versions sort later."""
    return f"{RETRY_KEYS}{version:020d}"


def _is_ours(key: str) -> bool:
    """Bucket browsers leave objects named like a folder."""
    return key.removeprefix(RETRY_KEYS).isdecimal()


def load_objects(store: ObjectStore) -> list[RetryObject]:
    """The newest base and the objects after it, in order; empty if there is none. Raises CorruptionError."""
    for _ in range(CLAIMS_MAX):
        keys = sorted(info.key for info in store.list(RETRY_KEYS) if _is_ours(info.key))
        try:
            return _from_newest_base(store, keys)
        except NotFoundError:
            continue  # replaced by a newer base since the listing
    raise CorruptionError(f"{store.url}/{RETRY_KEYS}: objects keep disappearing while they are read")


def _from_newest_base(store: ObjectStore, keys: list[str]) -> list[RetryObject]:
    found: list[RetryObject] = []
    for key in reversed(keys):
        one = decode_object(store.get(key, stored_bytes_max()), source=f"{store.url}/{key}")
        if key != object_key(one.version) or (found and one.version != found[-1].version - 1):
            raise CorruptionError(f"{store.url}/{key}: version {one.version} is out of order")
        found.append(one)
        if one.queues is not None:
            return found[::-1]
    if found:
        raise CorruptionError(f"{store.url}/{found[-1].version}: the first object is not a base")
    return []


class RetryLog:
    """Writes an archive's retry messages as one server."""

    def __init__(self, store: ObjectStore, owner_name: str) -> None:
        self._store = store
        self.owner = secrets.token_hex(8)
        self.owner_name = owner_name
        self.version = 0
        self.base_version = 0

    def claim(self) -> RetryState:
        """Read all objects and become the writer. Raises FencedError while another server keeps writing."""
        for _ in range(CLAIMS_MAX):
            state, objects = RetryState(), load_objects(self._store)
            for found in objects:
                state.apply(found)
            self.version = objects[-1].version if objects else 0
            try:
                self.write(state.base(self.version + 1, self.owner, self.owner_name))
            except FencedError:
                continue  # the other server's last append came in between
            return state
        raise FencedError("another server is still writing retry messages")

    def write(self, found: RetryObject) -> None:
        """Write the next object. Raises FencedError if another server wrote it. After other errors it may or may not
        exist: the caller writes the same object again."""
        assert found.version == self.version + 1
        key = object_key(found.version)
        try:
            self._store.put_if_absent(key, [encode_object(found)])
        except AlreadyExistsError:
            there = decode_object(self._store.get(key, stored_bytes_max()), source=f"{self._store.url}/{key}")
            if there.owner != self.owner:
                raise FencedError(f"{there.owner_name} has taken over the retry messages") from None
        if any(_is_ours(info.key) for info in self._store.list(RETRY_KEYS, start_after=key)):
            raise FencedError("another server has taken over the retry messages")
        self.version = found.version
        if found.queues is not None:
            self.base_version = found.version

    def remove_replaced(self) -> None:
        """Delete objects that the newest base replaces."""
        base = object_key(self.base_version)
        keys = [info.key for info in self._store.list(RETRY_KEYS) if info.key < base and _is_ours(info.key)]
        if keys:
            self._store.delete(keys)
