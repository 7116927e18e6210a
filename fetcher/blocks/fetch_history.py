"""Which blocks were fetched before: bytes fetched twice measure caches and prefetch."""

from __future__ import annotations

import threading
from collections.abc import Sequence

from tiered.formats.segment_index import BlockSpan
from tiered.model.lru import Lru

HISTORY_OBJECTS = 4096
"""Objects whose fetched blocks are recorded."""


class FetchHistory:
    """The blocks fetched of the objects used last, one bit each. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._fetched: Lru[str, int] = Lru(HISTORY_OBJECTS)

    def note(self, key: str, spans: Sequence[BlockSpan]) -> int:
        """Blocks of ``key`` came from the store (spans of one each); returns stored bytes of those known already."""
        again_bytes = 0
        with self._lock:
            known = self._fetched.peek(key) or 0
            for span in spans:
                bit = 1 << span.first_block
                if known & bit:
                    again_bytes += span.length
                known |= bit
            self._fetched.put(key, known)
        return again_bytes
