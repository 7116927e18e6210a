"""Writes the selected records of an archive at their places in a log; objects are read side by side."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

from rocketmq_tiered.maintenance.restore.log_order import LogOrder, OrderedRun
from rocketmq_tiered.maintenance.restore.selection import Selection
from tiered.archive.kept_offsets import KeptOffsets
from tiered.archive.object_spans import ObjectSpans
from tiered.archive.segment_reader import SegmentCache, SegmentReader
from tiered.archive.verify import READ_THREADS, few_at_a_time
from tiered.broker_store.restored_log import Piece, RestoredLog
from tiered.catalog.pages import RunIndex
from tiered.catalog.state import CatalogState
from tiered.errors import NotFoundError, SnapshotExpiredError
from tiered.model.queue import QueueKey
from tiered.model.tables import QUEUE_SPARSE
from tiered.object_store.interface import ObjectStore

PENDING_BYTES = 4 << 20
"""Of decoded records before they are written."""

TAIL_BYTES = 32 << 20

Written = Callable[[int, int], object]


class RecordWriter:
    """Copies records of ``selection`` from ``store`` to ``log``."""

    def __init__(self, store: ObjectStore, selection: Selection, log: RestoredLog) -> None:
        self._store, self._selection, self._log = store, selection, log
        self._tails = SegmentCache(store, cache_bytes=TAIL_BYTES)

    def write(self, order: LogOrder, done: int, written: Written) -> None:
        """Write all objects but the first ``done``. ``written(objects, bytes)`` is called as they are finished, in
        order. Raises what reading and writing raise."""
        with ThreadPoolExecutor(READ_THREADS, thread_name_prefix="restore") as pool:
            for number, (copied_bytes, copied) in enumerate(few_at_a_time(self._started(order, done, pool))):
                copied.result()
                written(number + 1, copied_bytes)

    def _started(
        self, order: LogOrder, done: int, pool: ThreadPoolExecutor
    ) -> Iterator[tuple[int, Future[None]]]:
        objects = (runs for window in order.windows for runs in order.objects(window))
        for number, runs in enumerate(objects):
            copied_bytes = sum(int(item.run["byte_count"]) for item in runs)
            if number < done:
                finished: Future[None] = Future()
                finished.set_result(None)
                yield copied_bytes, finished
            else:
                yield copied_bytes, pool.submit(self._copy, runs)

    def _copy(self, runs: Sequence[OrderedRun]) -> None:
        """All of one object."""
        reader = opened(self._tails, runs[0])
        index = reader.index
        runs = sorted(runs, key=lambda item: (int(item.run["ordinal"]), int(item.run["first_row"])))
        parts = [index.check_run(item.run, item.queue) for item in runs]
        ends = [index.block_span(part, part.rows - 1, part.rows) for part in parts]
        spans = ObjectSpans(self._store, index, max(span.offset + span.length for span in ends))
        pieces, pending = list[Piece](), 0
        for item, part in zip(runs, parts, strict=True):
            for found in spans.records(part):
                rows = found.rows
                kept = self._selection.rows(rows, item.queue, int(item.run["kind"]), index.queues)
                pieces.append(Piece(found.data, found.starts[kept], rows.size[kept], rows.phys[kept]))
                pending += int(pieces[-1].sizes.sum())
                if pending >= PENDING_BYTES:
                    self._log.write(pieces)
                    pieces, pending = [], 0
        self._log.write(pieces)


def messages_left(
    store: ObjectStore, state: CatalogState, selection: Selection
) -> dict[QueueKey, KeptOffsets]:
    """What key compaction left of each queue, if LMQs are selected: their other entries are of no message. Raises what
    reading objects raises."""
    if not any(queue.is_lmq and queue.is_selected for queue in selection.queues.values()):
        return {}
    found: dict[QueueKey, KeptOffsets] = {}
    index = RunIndex(store)
    segments = SegmentCache(store, cache_bytes=TAIL_BYTES)
    for key, queue in selection.queues.items():
        row = state.queue(key)
        if row is None or not int(row["flags"]) & QUEUE_SPARSE:
            continue
        found[key] = left = KeptOffsets(queue.min_offset, queue.end_offset)
        chunk = index.runs_of(state, key)
        for run in chunk.runs[chunk.runs["min_phys"] >= 0]:
            place = chunk.objects[int(run["object"])]
            name, sizes = (
                chunk.object_keys[int(place["key"])],
                (int(place["size_bytes"]), int(place["tail_bytes"])),
            )
            reader = opened(segments, OrderedRun(0, name, *sizes, run, key))
            offsets = reader.row_columns(reader.index.check_run(run, key)).queue_offset
            left.keep(offsets[offsets >= queue.min_offset])
    return found


def opened(cache: SegmentCache, item: OrderedRun) -> SegmentReader:
    """The object of a run. Raises SnapshotExpiredError if it is gone."""
    try:
        return cache.open(item.key, size_bytes=item.size_bytes, tail_bytes=item.tail_bytes)
    except NotFoundError as error:
        raise SnapshotExpiredError(
            f"{item.key} no longer exists: garbage collection deleted it",
            hint="restore the newest version, into a new directory; tiered verify lists what else is missing",
        ) from error
