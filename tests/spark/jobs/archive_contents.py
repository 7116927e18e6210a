"""Archives of many small objects, and all records of one."""

from dataclasses import replace

from tests.archive.queue_reader import QueueReader
from tests.end_to_end.offloading import SMALL
from tiered.catalog.catalog_reader import load
from tiered.object_store.interface import ObjectStore

MIB = 1 << 20
TINY = replace(SMALL, batch_bytes=96 << 10, split_bytes=1 << 20, block_bytes=32 << 10)


def contents(store: ObjectStore) -> dict[object, list[bytes]]:
    """Every record of every queue."""
    state, found = load(store), {}
    for row in range(len(state.table)):
        queue = state.directory.roster.keys[row]
        offset, end = int(state.table["min_queue_offset"][row]), int(state.table["end_queue_offset"][row])
        reader, records = QueueReader(store, state, queue), []
        while offset < end:
            batch = reader.read(offset, max_rows=5000, max_bytes=MIB)
            for begin, size in zip(batch.starts.tolist(), batch.sizes.tolist(), strict=True):
                records.append(batch.data[begin : begin + size].tobytes())
            offset = batch.next_offset
        found[queue] = records
    return found
