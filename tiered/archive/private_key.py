"""The archive's own key, which seals the senders that proxy mode notes in timers, and the recall handles that it gives
to clients. An account of the object store that may read the key's object can make both."""

import secrets
from contextlib import suppress

from tiered.errors import AlreadyExistsError, CorruptionError, NotFoundError
from tiered.formats.keys import PRIVATE_KEY
from tiered.object_store.interface import ObjectStore

KEY_BYTES = 32


def private_key(store: ObjectStore) -> bytes:
    """The archive's private key, which the first process that needs it makes. Raises what the store raises."""
    try:
        key = store.get(PRIVATE_KEY, KEY_BYTES)
    except NotFoundError:
        with suppress(AlreadyExistsError):
            store.put_if_absent(PRIVATE_KEY, [secrets.token_bytes(KEY_BYTES)])
        key = store.get(PRIVATE_KEY, KEY_BYTES)
    if len(key) != KEY_BYTES:
        raise CorruptionError(
            f"{store.url}/{PRIVATE_KEY} is damaged: it has {len(key)} bytes instead of {KEY_BYTES}"
        )
    return key
