"""Archives of many small objects, and all records of one."""

from dataclasses import replace

from tests.archive.queue_reader import QueueReader, records_of
from tests.end_to_end.offloading import SMALL
from tiered.catalog.catalog_reader import load
from tiered.object_store.interface import ObjectStore

MIB = 1 << 20
TINY = replace(SMALL, batch_bytes=96 << 10, split_bytes=1 << 20, block_bytes=32 << 10)


def contents(store: ObjectStore) -> dict[object, list[bytes]]:
    """Every record of every queue."""
    state = load(store)
    return {
        queue: [record for _, _, record in records_of(QueueReader(store, state, queue))]
        for queue, _ in state.queues()
    }
