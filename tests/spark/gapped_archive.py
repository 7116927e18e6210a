"""An archive of two queues whose gaps are filled, whose oldest runs expire, and whose old pages are collected."""

import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from tests.archive.archive_builder import NOW_MS, ArchiveBuilder, Sent, _record
from tests.catalog.collection import run_gc
from tests.formats.segment_builder import RowSpec
from tiered.catalog.catalog_reader import load
from tiered.catalog.commit import CommitDraft, CommitKind
from tiered.catalog.state import CatalogState
from tiered.catalog.writer_limits import CatalogLimits
from tiered.formats.keys import CATALOG_PREFIX, archive_prefix, object_of
from tiered.model.queue import QueueKey
from tiered.model.tables import OBJECT_DTYPE
from tiered.object_store.file import FileStore
from tiered.object_store.prefixed import PrefixedStore

ONE, OTHER, LMQ = QueueKey("one", 0, 0), QueueKey("other", 1, 0), QueueKey("%LMQ%light", 0, 0)
ARCHIVE = "cluster/broker"
SOON_PAGES = CatalogLimits(
    root_every=3,
    spill_runs=6,
    page_runs_max=4,
    merge_sequences=2,
    merge_spills=2,
    page_retry_commits=1,
    pack_bytes_max=1,
)


class GappedArchive:
    """Below ``path``. Every message's body is its offset."""

    def __init__(self, path: Path) -> None:
        self.url = f"file://{path}"
        self._store = PrefixedStore(FileStore(path), archive_prefix("cluster", "broker"))
        self._builder = ArchiveBuilder(self._store, limits=SOON_PAGES)

    @property
    def state(self) -> CatalogState:
        """The newest version."""
        return self._builder.state

    def state_at(self, version: int) -> CatalogState:
        """An older version."""
        return load(self._store, version=version)

    def is_gone(self, key: str) -> bool:
        """Whether the page object at ``key`` was deleted. Small pages are embedded in commits, which stay."""
        return not key.startswith(CATALOG_PREFIX) and not list(self._store.list(object_of(key), limit=1))

    def put(self, queue: QueueKey, offsets: Sequence[int], lmq: Sequence[QueueKey] = ()) -> None:
        """One cycle; where ``offsets`` jump a gap is left."""
        self._builder.commit([Sent(queue, b"%d" % offset, offset, lmq=lmq) for offset in offsets])

    def fill(self, queue: QueueKey, offsets: range) -> None:
        """What was lost is found."""
        builder, phys = self._builder, 64
        rows = []
        for offset in offsets:
            record, code = _record(Sent(queue, b"%d" % offset), offset, (), phys)
            rows.append(RowSpec(record, code, NOW_MS, 0, 1, []))
            phys += len(record)
        queues: list[QueueKey] = []
        keys: list[str] = []
        objects = np.zeros(1, OBJECT_DTYPE)
        run = builder._run(queue, offsets.start, rows, 64)
        runs = builder._put(0, [(queue, run)], queues, objects, keys, 64)
        draft = CommitDraft(
            CommitKind.MAINTENANCE,
            queues=queues,
            runs=runs,
            objects=objects,
            object_keys=keys,
            created_ms=NOW_MS,
        )
        builder.writer.append(draft)

    def expire(self, queue: QueueKey, runs: int = 1) -> None:
        """The oldest runs leave; their objects go with the next collection."""
        for _ in range(runs):
            self._builder.expire_first_run(queue)

    def age(self) -> None:
        """Write and merge pages, and delete unreferenced ones."""
        for _ in range(13):
            end = int(self.state.queue(OTHER)["end_queue_offset"])  # type: ignore[index]
            self.put(OTHER, [end])
        self.collect()

    def collect(self) -> None:
        """Removes the pending deletions."""
        self._builder.writer.release()
        self._builder.writer.claim()
        run_gc(self._store, self.state, apply=True, grace_ms=0, clock=lambda: time.time_ns() // 1_000_000)
        self._builder.writer.load()


def with_a_gap(directory: Path) -> GappedArchive:
    """Queue ``one``: offsets 0 to 9 and 15 to 24; queue ``other``: 0 to 4."""
    made = GappedArchive(directory)
    made.put(ONE, range(10))
    made.put(OTHER, range(5))
    made.put(ONE, range(15, 25))
    return made
