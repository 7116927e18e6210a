"""Index items from a segment's key section and row columns, across its runs."""

from collections.abc import Iterator

import numpy as np

from tiered.archive.index.items import ITEM_DTYPE
from tiered.formats.part_rows import in_object_order, rows_of_parts
from tiered.formats.segment_index import KeySection, SegmentIndex
from tiered.model.queue import LMQ_PREFIX
from tiered.model.tables import RunKind, Table, begins, concatenated, picked, positions


def items_of_segment(index: SegmentIndex, keys: KeySection, runs: Table) -> Table:
    """The index items (ITEM_DTYPE: hash of a key, and the message that has it) of ``runs`` in the data object whose
    footer is ``index`` and whose key section is ``keys``, in the order of the object. Raises CorruptionError unless the
    object has all of these runs.

    Rows of an LMQ have none: keys are hashed with the topic of their record, and indexed in its queue.
    """
    return concatenated(pieces_of_segment(index, keys, runs, max(len(keys.hashes), 1)), ITEM_DTYPE)


def pieces_of_segment(index: SegmentIndex, keys: KeySection, runs: Table, items_max: int) -> Iterator[Table]:
    """The items that ``items_of_segment`` returns, in tables of at most ``items_max``. All keys of a message are in one
    table, even if they are more."""
    runs = in_object_order(index, runs)
    first_key = begins(keys.counts)
    first = index.first_row[runs["ordinal"]] + runs["first_row"]
    own = picked(index.runs, runs["ordinal"])
    is_lmq = np.array([topic.startswith(LMQ_PREFIX) for topic in index.topics], bool)
    is_lmq = (own["kind"] == RunKind.LMQ) | is_lmq[index.queue_table["topic"]][own["queue"]]
    has_keys = ~is_lmq & (first_key[first] < first_key[first + runs["rows"]])
    queues = picked(index.queue_table, own["queue"][has_keys])  # of each run that has keys
    for rows in rows_of_parts(index, picked(runs, has_keys)):
        ends = np.cumsum(keys.counts[rows.row], dtype=np.int64)
        row = 0
        while row < len(ends):
            before = int(ends[row - 1]) if row else 0
            stop = max(int(np.searchsorted(ends, before + items_max, side="right")), row + 1)
            counts = keys.counts[rows.row[row:stop]]
            which = np.repeat(np.arange(row, stop), counts)
            items = np.empty(len(which), ITEM_DTYPE)
            items["hash"] = keys.hashes[positions(first_key[rows.row[row:stop]], counts)]
            items["queue_offset"], items["store_timestamp"] = (
                rows.queue_offset[which],
                rows.store_timestamp[which],
            )
            queue = queues[rows.part[which]]
            items["queue_id"], items["generation"] = queue["queue_id"], queue["generation"]
            yield items
            row = stop


def rows_with_hash(index: SegmentIndex, keys: KeySection, runs: Table, wanted: int) -> Table:
    """The items of ``runs`` in a data object that have the hash ``wanted``, for a query of objects that no index file
    covers. Raises CorruptionError unless the object has all of these runs."""
    if not bool((keys.hashes == np.uint64(wanted)).any()):
        in_object_order(index, runs)  # raises if a run is not there
        return np.zeros(0, ITEM_DTYPE)
    items = items_of_segment(index, keys, runs)
    found: Table = items[items["hash"] == np.uint64(wanted)]
    return found
