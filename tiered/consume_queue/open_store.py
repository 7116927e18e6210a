"""Opens a store's consume queues for writing."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

from tiered.consume_queue.both_stores import BothQueueStores
from tiered.consume_queue.file_store import FileQueueStore, FileSizes
from tiered.consume_queue.rocksdb_store import RocksdbQueueStore
from tiered.consume_queue.store import ConsumeQueueStore, LogView, StoreKind


def open_for_writing(
    store_path: Path,
    kind: StoreKind,
    log: LogView,
    *,
    sizes: FileSizes | None = None,
    batch_topics: Collection[str] = (),
) -> ConsumeQueueStore:
    """The consume queues of the store directory ``store_path``; what is missing is created. No broker may run.

    ``sizes`` and ``batch_topics`` (topics of queue.type=BatchCQ) are of files: RocksDB has no BatchCQ.
    """
    if kind is StoreKind.ROCKSDB:
        return RocksdbQueueStore(store_path / "consumequeue", log)
    files = FileQueueStore(store_path, log, sizes=sizes, batch_topics=batch_topics)
    if kind is StoreKind.FILE:
        return files
    return BothQueueStores(files, RocksdbQueueStore(store_path / "consumequeue", log), batch_topics)
