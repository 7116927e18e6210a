"""Archives the broker's tables (topics, subscription groups, consumer offsets), so that a bucket alone can be served.

A snapshot is written under ``state/`` only if its content changed, and becomes visible with the next commit.
"""

import hashlib
import json
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from tiered.formats.keys import state_key
from tiered.formats.memory_bound import stored_bytes_max
from tiered.formats.state_object import decode_state, encode_state
from tiered.object_store.interface import ObjectStore, put_own


class BrokerStateArchive:
    """Keeps copies of the broker's tables in ``archive``. ``read`` returns the tables as they are now: by name, such as
    topics or consumer_offsets, a document that JSON can hold."""

    def __init__(self, archive: ObjectStore, read: Callable[[], Mapping[str, Any]]) -> None:
        self._archive = archive
        self._read = read
        self._lock = threading.Lock()
        self._digests: dict[str, str] = {}
        self._pending: dict[str, str] = {}

    def adopt(self, state_objects: Mapping[str, str]) -> None:
        """Start with the copies that the catalog names: ``state_objects`` has their keys, which end in the digest of
        the content, by name of the table."""
        with self._lock:
            self._digests = {name: key.rsplit("-", 1)[-1] for name, key in state_objects.items()}
            self._pending = {}

    def archived_names(self, state_objects: Mapping[str, str], name: str) -> set[str]:
        """The names (of topics, say) that the archived copy of the table ``name`` has; empty if it was not archived.
        ``state_objects``: the keys of the copies, by name of the table. Raises what reading an object raises."""
        key = state_objects.get(name)
        if key is None:
            return set()
        source = f"{self._archive.url}/{key}"
        table = decode_state(self._archive.get(key, stored_bytes_max()), name, source=source)
        return set(table) if isinstance(table, dict) else set()

    def has(self, names: Iterable[str]) -> bool:
        """Whether the catalog names all of these, or will with the next commit."""
        with self._lock:
            return self._digests.keys() >= set(names)

    def refresh(self, epoch: int, attempt: int) -> bool:
        """Put a copy of each table of the broker that has changed since its last copy. Returns whether the next commit
        must name copies. ``epoch`` and ``attempt`` are a part of their keys, which no other object has.

        Raises what the object store raises; the next call tries again under a new key.
        """
        for name, document, digest in self._changed():
            key = state_key(name, epoch, attempt, digest)
            put_own(self._archive, key, [encode_state(name, document)])
            with self._lock:
                self._digests[name] = digest
                self._pending[name] = key
        return bool(self._pending)

    def has_changes(self) -> bool:
        """Whether ``refresh`` would write anything. Raises what reading the tables raises."""
        return any(True for _ in self._changed())

    def _changed(self) -> Iterator[tuple[str, Any, str]]:
        """The tables that differ from their last copies: name, content, and a digest of the content, which is a part of
        the copy's key."""
        for name, document in self._read().items():
            encoded = json.dumps(document, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
            digest = hashlib.sha256(encoded.encode("utf-8", "surrogatepass")).hexdigest()[:16]
            with self._lock:
                is_same = self._digests.get(name) == digest
            if not is_same:
                yield name, document, digest

    def pending(self) -> dict[str, str]:
        """Names and keys that the next commit must carry."""
        with self._lock:
            return dict(self._pending)

    def committed(self, state_objects: Mapping[str, str]) -> None:
        """Remove keys that a commit has named."""
        with self._lock:
            for name, key in state_objects.items():
                if self._pending.get(name) == key:
                    del self._pending[name]
