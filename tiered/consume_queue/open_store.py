"""Opens a store's consume queues for writing: in files, in RocksDB, or in both, as a broker with
``rocksdbCQDoubleWriteEnable`` keeps them."""

from collections.abc import Collection
from pathlib import Path

from tiered.consume_queue.file_store import FileQueueStore, FileSizes
from tiered.consume_queue.index import BrokerQueue
from tiered.consume_queue.rocksdb_store import RocksdbQueueStore
from tiered.consume_queue.store import ConsumeQueueStore, LogView, StoreKind
from tiered.model.tables import Table


class BothQueueStores:
    """ConsumeQueueStore over two others: writes go to both, reads come from files. RocksDB has no BatchCQ."""

    def __init__(
        self, files: ConsumeQueueStore, rocksdb: ConsumeQueueStore, batch_topics: Collection[str]
    ) -> None:
        self._files, self._rocksdb = files, rocksdb
        self._batch_topics = frozenset(batch_topics)

    def queues(self) -> list[BrokerQueue]:
        return self._files.queues()

    def min_offset(self, topic: str, queue_id: int) -> int:
        return self._files.min_offset(topic, queue_id)

    def max_offset(self, topic: str, queue_id: int) -> int:
        return self._files.max_offset(topic, queue_id)

    def units(self, topic: str, queue_id: int, from_offset: int, count: int) -> Table:
        return self._files.units(topic, queue_id, from_offset, count)

    def put(self, topic: str, queue_id: int, units: Table) -> None:
        for store in self._stores(topic):
            store.put(topic, queue_id, units)

    def put_empty_queue(self, topic: str, queue_id: int, end_offset: int) -> None:
        for store in self._stores(topic):
            store.put_empty_queue(topic, queue_id, end_offset)

    def delete_queue(self, topic: str, queue_id: int) -> None:
        for store in self._stores(topic):
            store.delete_queue(topic, queue_id)

    def truncate(self, phys: int) -> None:
        for store in (self._files, self._rocksdb):
            store.truncate(phys)

    def flush(self, dispatched_phys: int) -> None:
        for store in (self._files, self._rocksdb):
            store.flush(dispatched_phys)

    def close(self) -> None:
        for store in (self._files, self._rocksdb):
            store.close()

    def _stores(self, topic: str) -> tuple[ConsumeQueueStore, ...]:
        """Where the queues of ``topic`` are written: BatchCQ in files only."""
        return (self._files,) if topic in self._batch_topics else (self._files, self._rocksdb)


def open_for_writing(
    store_path: Path,
    kind: StoreKind,
    log: LogView,
    *,
    sizes: FileSizes | None = None,
    batch_topics: Collection[str] = (),
) -> ConsumeQueueStore:
    """Open the consume queues of the store directory ``store_path`` for writing, in files, in RocksDB or in both; what
    is missing is created. No broker may run.

    ``log``: the commitlog whose records they index; ``sizes``: of new files; ``batch_topics``: topics with
    queue.type=BatchCQ, which only files can have.
    """
    if kind is StoreKind.ROCKSDB:
        return RocksdbQueueStore(store_path / "consumequeue", log)
    files = FileQueueStore(store_path, log, sizes=sizes, batch_topics=batch_topics)
    if kind is StoreKind.FILE:
        return files
    return BothQueueStores(files, RocksdbQueueStore(store_path / "consumequeue", log), batch_topics)
