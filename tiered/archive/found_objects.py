"""Data objects as a listing finds them, and which of them hold messages that no commit named: the authority for
verification, repair and garbage collection. Only tails are read.

An object that no commit names is explained if its messages are committed elsewhere: it is of this broker, of an earlier
epoch and a known log history, and all of its rows lie below the ends of their queues, of the log history and of the
archive, outside of gaps. Everything else is kept until a person decides.
"""

import re
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice
from typing import TypeVar

import fastcrc
import numpy as np

from tiered.archive.segment_reader import SegmentCache, SegmentReader
from tiered.catalog.state import CatalogState
from tiered.errors import CorruptionError, NotFoundError
from tiered.formats.keys import SETS_PREFIX, batch_id, queue_prefix, set_prefix
from tiered.formats.segment import SegmentMeta
from tiered.formats.segment_index import SegmentIndex
from tiered.formats.segment_layout import TRAILER_BYTES, decode_trailer
from tiered.model.queue import QueueKey
from tiered.model.tables import OBJECT_DTYPE, QUEUE_HIDDEN, RUN_DTYPE, RunKind, Table, picked
from tiered.object_store.interface import ObjectInfo, ObjectStore

K = TypeVar("K")
T = TypeVar("T")
READ_THREADS = 4
"""Objects read in parallel; each takes some tens of megabytes at most."""
QUEUES_LISTED = 64
"""Of so many queues, those that were written last, the next object is searched by its name."""
_TTL_DAYS = re.compile(r"_(\d+)d-")


@dataclass(frozen=True)
class FoundObject:
    """An object with a readable tail: its runs, and the queue of each. Rows are read when they are needed."""

    key: str
    size_bytes: int
    tail_bytes: int
    tail_crc32c: int
    meta: SegmentMeta
    runs: Table
    queues: list[QueueKey]

    @property
    def rank(self) -> tuple[int, ...]:
        """The order of objects with the same rows: the one with the highest rank is used."""
        meta = self.meta
        return meta.log_history, meta.epoch, meta.catalog_version, meta.created_ms, meta.attempt

    @property
    def messages(self) -> int:
        """Messages in it, without entries of LMQs."""
        runs = self.runs[self.runs["kind"] != RunKind.LMQ]
        spans = runs["end_queue_offset"] - runs["base_queue_offset"]
        return int(np.where(runs["kind"] == RunKind.BATCH, spans, runs["rows"]).sum())

    def open(self, segments: SegmentCache) -> SegmentReader:
        """Open it for reading: its tail is read, unless ``segments`` has it."""
        return segments.open(self.key, size_bytes=self.size_bytes, tail_bytes=self.tail_bytes)

    def row(self) -> Table:
        """The row (OBJECT_DTYPE) with which the catalog would describe this object; its ``key`` is 0."""
        runs, row = self.runs, np.zeros(1, OBJECT_DTYPE)
        row["rows"], row["size_bytes"] = int(runs["rows"].sum()), self.size_bytes
        row["tail_bytes"], row["tail_crc32c"] = self.tail_bytes, self.tail_crc32c
        row["epoch"], row["raw_bytes"] = self.meta.epoch, int(runs["byte_count"].sum())
        row["min_phys"], row["end_phys"] = runs["min_phys"].min(), runs["end_phys"].max()
        days = _TTL_DAYS.search(self.key.rpartition("/")[2])
        row["ttl_class_days"] = int(days[1]) if days and self.key.startswith(SETS_PREFIX) else 0
        return row


def found_objects(
    store: ObjectStore, infos: Iterable[ObjectInfo]
) -> Iterator[tuple[ObjectInfo, FoundObject | None]]:
    """Read the ends of data objects, a few at a time, where their runs are listed. Yields each of ``infos`` that still
    exists with what was read of it; None: it is damaged, or no data object. Raises UnsupportedFormatError for a format
    that this program does not read, and the store's errors."""

    def opened(info: ObjectInfo) -> tuple[bool, FoundObject | None]:
        """Reads the tail of the object ``info``. Returns (True, the object), (True, None) if it is damaged or no
        segment, and (False, None) if it was deleted after it was listed."""
        size = info.size_bytes
        try:
            if size < TRAILER_BYTES:
                return True, None
            trailer = store.get_range(info.key, size - TRAILER_BYTES, TRAILER_BYTES)
            length = size - decode_trailer(trailer, size, source=info.key).tail_offset
            tail = store.get_range(info.key, size - length, length)
            index = SegmentIndex(info.key, size, tail)
        except CorruptionError:
            return True, None
        except NotFoundError:
            return False, None
        runs = picked(index.runs, np.arange(len(index)))[list(RUN_DTYPE.names or ())].astype(RUN_DTYPE)
        queues = [index.queue_of(number) for number in range(len(index))]
        return True, FoundObject(info.key, size, length, fastcrc.crc32.iscsi(tail), index.meta, runs, queues)

    with ThreadPoolExecutor(READ_THREADS, thread_name_prefix="tails") as pool:
        for info, reading in few_at_a_time((info, pool.submit(opened, info)) for info in infos):
            exists, found = reading.result()
            if exists:
                yield info, found


def few_at_a_time(pending: Iterator[tuple[K, Future[T]]]) -> Iterator[tuple[K, Future[T]]]:
    """Yield ``pending``, which starts each work as it is iterated, in order: the next few works are started while the
    caller waits for the first."""
    window = list(islice(pending, 2 * READ_THREADS))
    while window:
        yield window.pop(0)
        window += islice(pending, 1)


def is_own(state: CatalogState, found: FoundObject) -> bool:
    """Whether the object belongs to the archive of ``state``."""
    return (found.meta.cluster, found.meta.broker) == (state.cluster, state.broker)


def why_unexplained(state: CatalogState, found: FoundObject | None) -> str:
    """Why the object ``found``, which ``state`` does not name, may have messages that no commit ever named, as text
    after the object's name; empty if all of its messages are in other objects. None: an object that cannot be read."""
    if found is None:
        return "its end, which lists its messages, cannot be read"
    meta, runs = found.meta, found.runs
    if not is_own(state, found):
        return f"it belongs to the archive of {meta.cluster}/{meta.broker}"
    if meta.epoch > state.epoch:
        return f"it is of epoch {meta.epoch}, and the newest known one is {state.epoch}"
    if meta.log_history > state.cursor.history or meta.catalog_version > state.version:
        return f"its writer knew catalog version {meta.catalog_version}, and the newest known one is {state.version}"
    # The part of the object's log that is archived ends where a later log history begins, that of a replaced or
    # truncated log.
    later_begins = [
        history.begin_phys for history in state.log_histories if history.number > meta.log_history
    ]
    if len(runs) and int(runs["end_phys"].max()) > min([state.cursor.phys, *later_begins]):
        return "it has messages beyond the end of what is archived from their log"
    for queue, run in zip(found.queues, runs, strict=True):
        row = state.queue(queue)
        if row is None or run["end_queue_offset"] > row["end_queue_offset"]:
            return f"it has messages beyond the end of {queue}"
        gaps = state.gaps_of(queue)
        inside = gaps["begin_queue_offset"] < run["end_queue_offset"]
        if (inside & (gaps["end_queue_offset"] > run["base_queue_offset"])).any():
            return f"it has messages in a gap of {queue}"
    return ""


def may_be_newest(state: CatalogState, found: FoundObject | None) -> bool:
    """Whether the object ``found``, which ``state`` does not name, shows that the newest commit may be missing: it has
    messages beyond the archive's end, and its writer owned the archive in the newest known epoch or a later one."""
    if found is None or not len(found.runs) or not is_own(state, found):
        return False
    # Cycles are uploaded side by side, so that its writer may have known an earlier version than the newest one.
    is_new = found.meta.epoch >= state.epoch or found.meta.catalog_version >= state.version
    return is_new and bool(why_unexplained(state, found))


def objects_at_end(store: ObjectStore, state: CatalogState, *, all_queues: bool) -> list[FoundObject]:
    """Data objects that begin, by their names, where the archive of ``state`` ends, and that it does not name, if they
    may have messages that no commit named. Takes one LIST for each TTL class, and, with ``all_queues``, one for each of
    the QUEUES_LISTED queues that were written last."""
    ttl_days = {0, *np.unique(state.memory.objects["ttl_class_days"]).tolist()}
    prefixes = [set_prefix(batch_id(state.cursor.phys, days)) for days in ttl_days]
    if all_queues:
        newest = sorted(state.current_queues(), key=lambda item: -int(item[1]["end_phys"]))
        prefixes += [
            queue_prefix(queue, int(row["end_queue_offset"]))
            for queue, row in newest[:QUEUES_LISTED]
            if not row["flags"] & QUEUE_HIDDEN
        ]
    named = {*state.memory.object_keys}
    infos = (info for prefix in prefixes for info in store.list(prefix) if info.key not in named)
    return [
        found
        for _, found in found_objects(store, infos)
        if found is not None and is_own(state, found) and why_unexplained(state, found)
    ]
