"""The archives below one path, followed from version to version: which offsets a stream's next batch has.

Owns catalog states, limits and the slices between two offsets. Does not own Spark's side (stream_reader.py) nor what
an offset is (stream_offsets.py).
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterator
from contextlib import ExitStack
from dataclasses import replace
from functools import partial

from pyspark.sql.streaming.datasource import (
    ReadLimit,
    ReadMaxBytes,
    ReadMaxRows,
)

from pipeline.options.predicate import Predicate
from pipeline.options.source_options import SourceOptions, Starting
from pipeline.plan.archive_plan import ArchivePlanner, archives, opened, wanted_queues
from pipeline.plan.filled_gaps import GapsByVersion, Layer, filled, without
from pipeline.plan.partitions import OffsetRange, Slices
from pipeline.source.stream_offsets import (
    ArchiveOffset,
    Names,
    StreamOffset,
    bytes_between,
    offset_after,
    share,
)
from tiered.catalog.reading import load, refresh
from tiered.catalog.state import CatalogState
from tiered.errors import NotFoundError
from tiered.flat_file.segment_reader import SegmentReader
from tiered.formats.keys import archive_prefix
from tiered.model.queue import QueueKey
from tiered.model.tables import QUEUE_SUPERSEDED
from tiered.object_store.prefixed import PrefixedStore
from tiered.object_store.protocol import ObjectStore

logger = logging.getLogger(__name__)


class ArchiveFollower:
    """The archives below one path, followed from version to version."""

    def __init__(self, options: SourceOptions) -> None:
        self._options = options
        self._resources = ExitStack()
        self._root = self._resources.enter_context(opened(options))
        self._states: dict[Names, CatalogState] = {}
        self._planners: dict[Names, ArchivePlanner] = {}
        self._gaps: dict[Names, GapsByVersion] = {}
        self._found: set[Names] = set()
        """Archives that were there at the last look."""

    def close(self) -> None:
        self._resources.close()

    # -- where things are -------------------------------------------------------------------------------------

    def newest_offset(self) -> StreamOffset:
        """The end of everything archived now."""
        self._refresh()
        return {
            names: ArchiveOffset(
                state.version,
                {queue: offsets.end for queue, offsets in wanted_queues(state, self._options).items()},
            )
            for names, state in self._states.items()
        }

    def with_known(self, newest: StreamOffset, start: StreamOffset) -> StreamOffset:
        """``newest`` with the queues of ``start`` that are hidden by now: what is left of them is still read.

        Raises NotFoundError when an archive that ``start`` knows is no more, or is another one.
        """
        for names, begun in start.items():
            self._require_still(names, begun.version)
        found = dict(newest)
        for names, one in newest.items():
            state, queues = self._state(names, one.version), dict(one.queues)
            for queue in start[names].queues if names in start else ():
                row = state.queue(queue)
                if queue not in queues and row is not None and self._options.wants(queue.topic):
                    queues[queue] = int(row["end_queue_offset"])
            found[names] = ArchiveOffset(one.version, queues)
        return found

    def _require_still(self, names: Names, version: int) -> None:
        """Raises NotFoundError unless the archive that was read at ``version`` is there."""
        if not self._options.wants_archive(*names):
            return
        where = f"{self._options.path}, archive {'/'.join(names)}"
        hint = "a new checkpoint begins with what is there now"
        if names not in self._found:
            raise NotFoundError(f"{where}: the stream has read of it, and it is there no more", hint=hint)
        newest = self._states[names].version
        if newest < version:
            raise NotFoundError(
                f"{where}: the stream has read of catalog version {version}, the newest is {newest}: it is another one",
                hint=hint,
            )

    def starting_offset(self) -> StreamOffset:
        """Where a new query begins. A queue that is not in it begins at its first message."""
        starting = self._options.starting
        if starting is Starting.LATEST:
            newest = self.newest_offset()
            return {
                names: self._begun_at(names, self._states[names], dict(one.queues))
                for names, one in newest.items()
            }
        self._refresh()
        found = {}
        for names, state in self._states.items():
            queues = {}
            for queue, offsets in wanted_queues(state, self._options).items():
                is_first = starting is Starting.EARLIEST
                queues[queue] = offsets.begin if is_first else self._offset_at_time(names, state, queue)
            found[names] = self._begun_at(names, state, queues)
        return found

    def _gaps_of(self, names: Names) -> GapsByVersion:
        if names not in self._gaps:
            self._gaps[names] = GapsByVersion(partial(self._state, names))
        return self._gaps[names]

    def _begun_at(self, names: Names, state: CatalogState, queues: dict[QueueKey, int]) -> ArchiveOffset:
        gaps = self._gaps_of(names).at(state.version)
        begun = {
            queue: offset
            for queue, offset in queues.items()
            if queue in gaps and gaps[queue][0].begin < offset
        }
        return ArchiveOffset(state.version, queues, begun)

    def _refresh(self) -> None:
        try:
            found = archives(self._root, self._options)
        except NotFoundError:
            found = []  # nothing archived yet
        self._found = {(one.cluster, one.broker) for one in found}
        for one in found:
            names = one.cluster, one.broker
            known = self._states.get(names)
            self._states[names] = load(one.store) if known is None else refresh(one.store, known)
            self._gaps_of(names).note(self._states[names])

    def _store(self, names: Names) -> ObjectStore:
        return PrefixedStore(self._root, archive_prefix(*names))

    def _planner(self, names: Names) -> ArchivePlanner:
        if names not in self._planners:
            self._planners[names] = ArchivePlanner(self._store(names), names)
        return self._planners[names]

    def _state(self, names: Names, version: int) -> CatalogState:
        known = self._states.get(names)
        return (
            known
            if known is not None and known.version == version
            else load(self._store(names), version=version)
        )

    def _filled(self, names: Names, start: ArchiveOffset | None, version: int) -> list[Layer]:
        """What was filled at ``version`` into gaps that the stream had passed by ``start``."""
        if start is None or start.version >= version:
            return []
        passed = {
            queue: OffsetRange(start.begun.get(queue, 0), offset) for queue, offset in start.queues.items()
        }
        gaps = self._gaps_of(names).at(start.version)
        return filled(self._state(names, version), gaps, passed) if gaps else []

    def _offset_at_time(self, names: Names, state: CatalogState, queue: QueueKey) -> int:
        """The first message stored at or after the starting time; the end if there is none."""
        wanted_ms = self._options.starting_timestamp or 0
        chunk = self._planner(names).run_index.runs_of(state, queue)
        for run in chunk.runs[chunk.runs["max_store_timestamp"] >= wanted_ms]:
            place = chunk.objects[int(run["object"])]
            reader = SegmentReader.open(
                self._store(names),
                chunk.object_keys[int(place["key"])],
                size_bytes=int(place["size_bytes"]),
                tail_bytes=int(place["tail_bytes"]),
            )
            rows = reader.row_columns(int(run["ordinal"]))
            later = rows.queue_offset[rows.store_timestamp >= wanted_ms]
            if len(later):
                return int(later[0])
        row = state.queue(queue)
        assert row is not None
        return int(row["end_queue_offset"])

    # -- one batch --------------------------------------------------------------------------------------------

    def limited(self, start: StreamOffset, newest: StreamOffset, limit: ReadLimit) -> StreamOffset:
        """The end of the batch that begins at ``start``, queue by queue in proportion to what there is."""
        start = self._standing(start, newest)
        moved = {names for names, one in newest.items() if self._filled(names, start.get(names), one.version)}
        if not isinstance(limit, ReadMaxRows | ReadMaxBytes):
            return _merged(start, newest, moved)
        todo = [
            (names, queue, *self._range(names, queue, start, newest))
            for names, one in sorted(newest.items())
            for queue in sorted(one.queues)
        ]
        if isinstance(limit, ReadMaxRows):
            shares = share([end - begin for *_, begin, end in todo], limit.max_rows)
            ends = [begin + rows for (*_, begin, _), rows in zip(todo, shares, strict=True)]
        else:
            ends = self._ends_by_bytes(todo, newest, limit.max_bytes)
        found: dict[Names, dict[QueueKey, int]] = {names: {} for names in newest}
        for (names, queue, *_), end in zip(todo, ends, strict=True):
            found[names][queue] = end
        reached = {names: ArchiveOffset(newest[names].version, found[names]) for names in newest}
        return _merged(start, reached, moved)

    def _range(
        self, names: Names, queue: QueueKey, start: StreamOffset, newest: StreamOffset
    ) -> tuple[int, int]:
        """Offsets [begin, end) that are to be read of a queue, now or later."""
        end = newest[names].queues[queue]
        begin = start[names].queues.get(queue) if names in start else None
        if begin is None:
            row = self._state(names, newest[names].version).queue(queue)
            begin = int(row["min_queue_offset"]) if row is not None else end
        return min(begin, end), end

    def _ends_by_bytes(
        self, todo: list[tuple[Names, QueueKey, int, int]], newest: StreamOffset, byte_limit: int
    ) -> list[int]:
        tables = [
            self._planner(names).run_index.runs_of(self._state(names, newest[names].version), queue).runs
            for names, queue, *_ in todo
        ]
        sizes = [bytes_between(runs, begin, end) for runs, (*_, begin, end) in zip(tables, todo, strict=True)]
        if sum(sizes) <= byte_limit:
            return [end for *_, end in todo]
        shares = share(sizes, byte_limit)
        return [
            offset_after(runs, begin, end, size) if size else begin
            for runs, (*_, begin, end), size in zip(tables, todo, shares, strict=True)
        ]

    def parts(self, start: StreamOffset, end: StreamOffset, *, is_header_only: bool) -> list[Slices]:
        """The slices between two offsets, from the catalog version of ``end``."""
        start = self._standing(start, end)
        found: list[Slices] = []
        for names, one in sorted(end.items()):
            state = self._state(names, one.version)
            wanted = {}
            for queue, stop in one.queues.items():
                row = state.queue(queue)
                if row is None:
                    continue
                first = int(row["min_queue_offset"])
                begin = start[names].queues.get(queue, first) if names in start else first
                if begin < min(first, stop):
                    for lost in self._not_in_a_gap(
                        names, start[names], queue, OffsetRange(begin, min(first, stop))
                    ):
                        self._note_expired(queue, lost)
                wanted[queue] = OffsetRange(max(begin, first), stop)
            found += self._planner(names).slices(
                state,
                [wanted, *self._filled(names, start.get(names), one.version)],
                Predicate(),
                is_header_only=is_header_only,
                on_expired=self._note_expired,
            )
        return found

    def _not_in_a_gap(
        self, names: Names, start: ArchiveOffset, queue: QueueKey, offsets: OffsetRange
    ) -> Iterator[OffsetRange]:
        """``offsets`` without what was a gap at the version of ``start``: it leaves with the runs before it."""
        return without(offsets, self._gaps_of(names).at(start.version).get(queue, ()))

    def _standing(self, start: StreamOffset, end: StreamOffset) -> StreamOffset:
        """``start`` as it stands at the versions of ``end``: where the broker's log was replaced since, queues go on
        behind what both logs have in common, as other messages have the offsets read there."""
        found = dict(start)
        for names, one in start.items():
            kept = self._kept(names, one, end[names].version) if names in end else {}
            for queue, offset in kept.items():
                self._note_loss(
                    f"{queue}: the broker's log was replaced, offsets [{offset}, {one.queues[queue]}) that were read "
                    "are other messages now",
                    "failOnDataLoss=false reads the new ones",
                )
            found[names] = replace(one, queues={**one.queues, **kept})
        return found

    def _kept(self, names: Names, start: ArchiveOffset, version: int) -> dict[QueueKey, int]:
        """Ends of the queues of which log lines that began after ``start`` took something back."""
        if version <= start.version:
            return {}
        state = self._state(names, version)
        kept: dict[QueueKey, int] = {}
        for line in state.log_histories:
            if line.version <= start.version or line.common_version == 0:
                continue  # from nothing in common on, queues have a new generation: old rows stay what they were
            common = self._state(names, line.common_version)
            for queue, offset in start.queues.items():
                now, before = state.queue(queue), common.queue(queue)
                if now is not None and int(now["flags"]) & QUEUE_SUPERSEDED:
                    continue
                end = 0 if before is None else max(0, int(before["end_queue_offset"]))
                if kept.get(queue, offset) > end:
                    kept[queue] = end
        return kept

    def _note_expired(self, queue: QueueKey, offsets: OffsetRange) -> None:
        self._note_loss(
            f"{queue}: offsets [{offsets.begin}, {offsets.end}) expired before they were read",
            "failOnDataLoss=false goes on behind them",
        )

    def _note_loss(self, message: str, hint: str) -> None:
        if self._options.fail_on_data_loss:
            raise NotFoundError(message, hint=hint)
        logger.warning("%s", message)


def _merged(start: StreamOffset, end: StreamOffset, moved: Collection[Names]) -> StreamOffset:
    """``end`` with what ``start`` knows besides: an archive or queue that is out of sight is not forgotten.

    Where nothing moves, and nothing was filled in (``moved``), the version stays as well: equal offsets mean that there
    is nothing to read.
    """
    merged = dict(start)
    for names, one in end.items():
        before = start.get(names)
        if before is None:
            merged[names] = one
            continue
        queues = {**before.queues}
        for queue, offset in one.queues.items():
            queues[queue] = max(offset, before.queues.get(queue, offset))
        is_moved = names in moved or queues != dict(before.queues)
        merged[names] = ArchiveOffset(one.version if is_moved else before.version, queues, before.begun)
    return merged
