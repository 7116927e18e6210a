"""One archive of the Spark benchmark, and the bytes that a scan of a range of times reads of it.

Owns counting requests. Timing is in spark.py.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.spark_report import (
    Row,
)
from benchmarks.stores import StoreProfile
from rocketmq_tiered.message_table.options.predicate import Allowed, Predicate
from rocketmq_tiered.message_table.options.source_options import parse_options
from rocketmq_tiered.message_table.plan.archive_plan import pinned_versions, plan
from rocketmq_tiered.message_table.scan.archive_scan import ArchiveScan, archive_chunks
from tiered.formats.keys import archive_prefix
from tiered.object_store.file import FileStore
from tiered.object_store.interface import ObjectStore
from tiered.object_store.prefixed import PrefixedStore

CLUSTER, BROKER = "BenchCluster", "bench-a"


@dataclass(frozen=True)
class Archived:
    """One archived profile."""

    profile: StoreProfile
    root: Path
    messages: int
    raw_bytes: int
    stored_bytes: int
    first_ms: int
    last_ms: int

    @property
    def url(self) -> str:
        """Where it is."""
        return f"file://{self.root}"


class _CountingStore:
    """Counts the bytes of ranged reads."""

    def __init__(self, store: ObjectStore) -> None:
        self._store = store
        self.url = store.url
        self.read_bytes = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def get_range(self, key: str, offset: int, length: int) -> bytes:
        """As the store's, counted."""
        self.read_bytes += length
        return self._store.get_range(key, offset, length)


def range_bytes(archived: Archived, begin: int, end: int) -> Row:
    """Bytes a scan of the range reads, beside those of the blocks that hold its messages and of the messages."""
    options = parse_options({"path": archived.url})
    predicate = Predicate({"storeTimestamp": Allowed.between(begin, end - 1)})
    store = _CountingStore(PrefixedStore(FileStore(archived.root), archive_prefix(CLUSTER, BROKER)))
    scan = ArchiveScan(
        store,
        predicate,
        with_records=True,
        window_bytes=options.window_bytes,
        on_corrupt=_never,
    )
    parts = plan(options, pinned_versions(options), predicate, is_header_only=False)
    message_bytes = sum(int(chunk.size.sum()) for part in parts for chunk in archive_chunks(scan, part))
    tails = {(ref.key, ref.tail_bytes) for part in parts for ref in part.objects}
    return {
        "read_bytes": store.read_bytes,
        "block_bytes": store.read_bytes - sum(size for _, size in tails),
        "message_bytes": round(message_bytes * archived.stored_bytes / archived.raw_bytes),
    }


def _never(place: object) -> None:
    raise AssertionError(f"damage in a benchmark's archive: {place}")
