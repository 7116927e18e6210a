"""Changes of a state that no kind of commit makes but a repair. Pure, but for reading pages and one record."""

from collections.abc import Iterable, Sequence
from dataclasses import replace

import fastcrc
import numpy as np

from rocketmq_tiered.maintenance.healing import Healed
from tiered.archive.found_objects import FoundObject
from tiered.archive.run_passes import LivingRuns
from tiered.archive.salvage import Lost, Salvage
from tiered.archive.segment_reader import SegmentCache, SegmentReader
from tiered.catalog.broker_facts import recorded_facts
from tiered.catalog.log_histories import living_rows
from tiered.catalog.replace_runs import take_out
from tiered.catalog.state import NO_CHECK, REMOVED_DTYPE, CatalogState, LogCheck, LogCursor, RunChunk
from tiered.errors import CorruptionError, TieredError
from tiered.model.queue import QueueKey
from tiered.model.tables import (
    GAP_DTYPE,
    OBJECT_DTYPE,
    QUEUE_BATCH,
    QUEUE_FILLED,
    QUEUE_HIDDEN,
    QUEUE_LMQ,
    QUEUE_SPARSE,
    QUEUE_STATE_DTYPE,
    RUN_DTYPE,
    GapReason,
    RunKind,
    Table,
)
from tiered.object_store.interface import ObjectStore

DEFAULT_FILE_BYTES = 1 << 30
_FLAG_OF_KIND = {RunKind.BATCH: QUEUE_BATCH, RunKind.LMQ: QUEUE_LMQ, RunKind.SPARSE: QUEUE_SPARSE}


def without_gaps(state: CatalogState) -> CatalogState:
    """``state`` without the gaps that an earlier step or repair has made: what is found now fills them."""
    return replace(state, gaps=state.gaps[state.gaps["reason"] != GapReason.LOST])


def with_lost(state: CatalogState, lost: Iterable[Lost]) -> CatalogState:
    """``state`` with a gap for each range."""
    rows = [(state.row_of(queue), GapReason.LOST, begin, end) for queue, begin, end in lost]
    return replace(state, gaps=np.concatenate([state.gaps, np.array(rows, GAP_DTYPE)]))


def with_ends(store: ObjectStore, state: CatalogState) -> CatalogState:
    """``state`` in which each queue ends where its last run ends: pages of the catalog may have runs of later commits,
    which cannot be read."""
    beyond: list[tuple[QueueKey, np.void]] = []
    for page in LivingRuns(store, state).between(0, 1 << 62):
        rows = state.directory.rows(page.queues, len(state.table))[page.chunk.runs["queue"]]
        is_new = (rows < 0) | (page.chunk.runs["end_queue_offset"] > state.table["end_queue_offset"][rows])
        beyond += [(page.queues[int(run["queue"])], run) for run in page.chunk.runs[is_new]]
    return _reaching(state, beyond)


def _reaching(state: CatalogState, found: Sequence[tuple[QueueKey, np.void]]) -> CatalogState:
    """``state`` with the queues of the runs ``found``, new ones too, and with bounds and flags that include these runs.
    New queues of an earlier generation of their topic are hidden. The runs themselves are not added."""
    new = sorted({queue for queue, _ in found if state.row_of(queue) is None})
    table, directory = state.table.copy(), state.directory
    if new:
        fresh = np.zeros(len(new), QUEUE_STATE_DTYPE)
        fresh["queue_id"] = [queue.queue_id for queue in new]
        fresh["generation"] = [queue.generation for queue in new]
        fresh["min_queue_offset"] = fresh["first_phys"] = 1 << 62
        directory, table = directory.extended(len(table), new), np.concatenate([table, fresh])
    state = replace(state, directory=directory, table=table)
    for queue, run in found:
        row = table[state.row_of(queue)]
        is_inside = int(run["base_queue_offset"]) < int(row["end_queue_offset"])
        row["flags"] |= _FLAG_OF_KIND.get(RunKind(int(run["kind"])), 0) | (QUEUE_FILLED if is_inside else 0)
        row["min_queue_offset"] = min(row["min_queue_offset"], run["base_queue_offset"])
        row["first_phys"] = min(row["first_phys"], run["min_phys"])
        row["end_byte"] = max(row["end_byte"], run["base_byte"] + run["byte_count"])
        for name in ("end_queue_offset", "end_phys", "max_store_timestamp"):
            row[name] = max(row[name], run[name])
    for queue in new:
        newest = state.current_generation(queue.topic, queue.queue_id)
        table["flags"][state.row_of(queue)] |= QUEUE_HIDDEN if queue.generation != newest else 0
    return state


def with_adopted(
    state: CatalogState, found: Sequence[tuple[QueueKey, FoundObject, np.void]], version: int
) -> CatalogState:
    """``state`` with the runs ``found``, as if the commit ``version`` had added them. Each is (queue, object that has
    the run, row of RUN_DTYPE), for offsets that no other run of the queue has."""
    if not found:
        return state
    state = _reaching(state, [(queue, run) for queue, _, run in found])
    used = {one.key: one for _, one, _ in found}
    objects = np.concatenate([np.zeros(0, OBJECT_DTYPE), *(one.row() for one in used.values())])
    objects["key"] = np.arange(len(objects))
    numbers = {key: number for number, key in enumerate(used)}
    runs = np.array([run for _, _, run in found], RUN_DTYPE)
    runs["version"] = version
    runs["object"] = [numbers[one.key] for _, one, _ in found]
    runs["queue"] = [state.row_of(queue) for queue, _, _ in found]
    return replace(state, chunks=(*state.chunks, RunChunk(runs, objects, tuple(used))))


def with_replaced(state: CatalogState, found: Salvage, new: Healed | None, version: int) -> CatalogState:
    """``state`` with the runs of the whole object ``new`` (None: nothing was readable) in the place of those of the
    damaged object ``found``, and with gaps for the messages that are lost."""
    removed = np.zeros(len(found.runs), REMOVED_DTYPE)
    for name in ("rows", "base_queue_offset", "end_queue_offset", "version"):
        removed[name] = found.runs[name]
    removed["queue"] = [state.row_of(queue) for queue in found.check.queues]
    removed["removed_version"] = version
    chunks, tombstones = take_out(state, removed)
    state = replace(state, chunks=chunks, tombstones=tombstones)
    if new is not None:
        runs = new.runs.copy()
        # The object also names the parents of its LMQs, which may have expired; no run is theirs.
        rows = np.array([-1 if (row := state.row_of(queue)) is None else row for queue in new.segment.queues])
        runs["queue"], runs["object"], runs["version"] = rows[runs["queue"]], 0, version
        table = state.table.copy()
        table["flags"][runs["queue"]] |= QUEUE_FILLED
        chunk = RunChunk(runs, new.objects, (new.key,))
        state = replace(state, table=table, chunks=(*state.chunks, chunk))
    return with_lost(state, found.lost)


def with_row_counts(store: ObjectStore, state: CatalogState) -> CatalogState:
    """``state`` in which the row count of each queue is that of its living runs."""
    counts = np.zeros(len(state.table), np.int64)
    for page in LivingRuns(store, state).between(0, 1 << 62):
        rows = state.directory.rows(page.queues, len(state.table))[page.chunk.runs["queue"]]
        np.add.at(counts, rows[rows >= 0], living_rows(state, page)[rows >= 0])
    table = state.table.copy()
    table["row_count"] = counts
    return replace(state, table=table)


def with_log_cursor(
    segments: SegmentCache, state: CatalogState, objects: Sequence[FoundObject]
) -> CatalogState:
    """``state`` with the place in the broker's log where a writer continues: the end of the newest upload (cycle) in
    the newest log history, as the data ``objects`` record it."""
    cycles = [one.meta for one in objects if one.meta.history_phys >= 0]
    if not cycles:
        return state
    history = max(meta.log_history for meta in cycles)
    phys = max(meta.to_phys for meta in cycles if meta.log_history == history)
    cursor = LogCursor(history, phys, _last_record(segments, objects, phys))
    version = max(meta.catalog_version for meta in cycles)
    return replace(state, cursor=cursor, started=True, version=max(1, version))


def with_cursor_at(
    segments: SegmentCache, state: CatalogState, objects: Sequence[FoundObject]
) -> CatalogState:
    """``state`` with the cursor, from which a writer reads the broker's log, at the end of the records in ``objects``,
    if these follow the present cursor without a hole. Else ``state`` as it is: the writer reads the log again."""
    phys = state.cursor.phys
    file_bytes = recorded_facts(state).commitlog_file_bytes or DEFAULT_FILE_BYTES
    parts = [np.zeros((0, 2), np.int64)]
    for one in objects:
        for number in np.flatnonzero(one.runs["kind"] != RunKind.LMQ).tolist():
            try:
                rows = one.open(segments).row_columns(number)
            except CorruptionError:
                return state
            parts.append(np.column_stack([rows.phys, rows.phys + rows.size]))
    spans = np.unique(np.concatenate(parts), axis=0)
    spans = spans[spans[:, 0] >= phys]
    begins, ends = spans[:, 0], np.concatenate([[phys], spans[:, 1]])
    # A record begins where the one before ends, or at the next commitlog file.
    is_next = (begins == ends[:-1]) | (begins == -(-ends[:-1] // file_bytes) * file_bytes)
    if not len(spans) or not is_next.all():
        return state
    end_phys = int(ends[-1])
    check = _last_record(segments, objects, end_phys)
    return replace(state, cursor=LogCursor(state.cursor.history, end_phys, check), started=True)


def without_filled_gaps(state: CatalogState, adopted: Iterable[tuple[QueueKey, np.void]]) -> CatalogState:
    """``state`` with gaps only where the ``adopted`` runs have no messages: gaps are shortened, divided or dropped."""
    gaps = list(state.gaps)
    for queue, run in adopted:
        row, low, high = state.row_of(queue), int(run["base_queue_offset"]), int(run["end_queue_offset"])
        parts: list[np.void] = []
        for gap in gaps:
            begin, end = int(gap["begin_queue_offset"]), int(gap["end_queue_offset"])
            if gap["queue"] != row or end <= low or begin >= high:
                parts.append(gap)
                continue
            for first, last in ((begin, min(end, low)), (max(begin, high), end)):
                if first < last:
                    parts.append(gap.copy())
                    parts[-1]["begin_queue_offset"], parts[-1]["end_queue_offset"] = first, last
        gaps = parts
    return replace(state, gaps=np.array(gaps, GAP_DTYPE) if gaps else state.gaps[:0])


def _last_record(segments: SegmentCache, objects: Sequence[FoundObject], phys: int) -> LogCheck:
    """Place and CRC32C of the last archived record that ends at or below the physical offset ``phys``: the writer
    compares it with the broker's log before it continues there. NO_CHECK if there is none, or it cannot be read."""
    ends = [
        (min(int(one.runs["end_phys"][number]), phys), one, int(number))
        for one in objects
        for number in np.flatnonzero((one.runs["min_phys"] < phys) & (one.runs["kind"] != RunKind.LMQ))
    ]
    best: tuple[int, SegmentReader, int, int] | None = None
    try:
        for end, one, number in sorted(ends, key=lambda item: -item[0]):
            if best is not None and best[0] >= end:
                break
            reader = one.open(segments)
            rows = reader.row_columns(number)
            below = np.flatnonzero(rows.phys + rows.size <= phys)
            if len(below) and (best is None or int(rows.phys[below[-1]]) > best[0]):
                best = int(rows.phys[below[-1]]), reader, number, int(below[-1])
        if best is None:
            return NO_CHECK
        begin, reader, number, row = best
        blocks = reader.read_blocks(number, row, row + 1)
    except TieredError:
        return NO_CHECK
    record: Table = blocks.data[int(blocks.starts[0]) : int(blocks.starts[0]) + int(blocks.sizes[0])]
    return LogCheck(begin, begin + len(record), fastcrc.crc32.iscsi(record.tobytes()))
