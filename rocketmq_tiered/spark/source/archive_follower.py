"""Follows the archives below one path and chooses the offsets and slices of a stream's batches."""

import logging
from collections.abc import Collection, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any
from urllib.parse import quote, unquote

import numpy as np
from pyspark.sql.streaming.datasource import (
    ReadLimit,
    ReadMaxBytes,
    ReadMaxRows,
)

from rocketmq_tiered.message_table.options.predicate import Predicate
from rocketmq_tiered.message_table.options.source_options import SourceOptions, Starting
from rocketmq_tiered.message_table.plan.archive_plan import (
    ArchivePlanner,
    GapsByVersion,
    KeptEnds,
    Layer,
    archive_store,
    archives,
    filled,
    opened,
    require_topics,
    runs_of,
    wanted_queues,
    without,
)
from rocketmq_tiered.message_table.plan.partitions import OffsetRange, Slices
from tiered.archive.segment_reader import SegmentCache
from tiered.catalog.catalog_reader import load, refresh
from tiered.catalog.state import CatalogState
from tiered.errors import CorruptionError, NotFoundError, SnapshotExpiredError
from tiered.formats.run_part import CatalogRun
from tiered.model.queue import QueueKey
from tiered.model.tables import QUEUE_SUPERSEDED, Table
from tiered.object_store.interface import ObjectStore

Names = tuple[str, str]


@dataclass(frozen=True)
class ArchiveOffset:
    """A stream's position in one archive. ``origins``: where it started, for queues with missing offsets below that:
    messages that are archived there later are not read."""

    version: int
    queues: Mapping[QueueKey, int]
    origins: Mapping[QueueKey, int] = field(default_factory=dict)


StreamOffset = Mapping[Names, ArchiveOffset]

QUEUES_MAX = 4_000_000
"""Limit of an offset in a checkpoint, over all its archives."""
NAME_CHARACTERS_MAX = 1024
OFFSET_MAX = (1 << 63) - 1


def to_json(offset: StreamOffset) -> dict[str, Any]:
    """A stream's offset in the form in which Spark's checkpoint stores it. Equal offsets give equal documents."""
    document: dict[str, Any] = {}
    for (cluster, broker), one in sorted(offset.items()):
        origins = {"from": _by_topic(one.origins)} if one.origins else {}
        document[f"{quote(cluster, safe='')}/{quote(broker, safe='')}"] = {
            "version": one.version,
            "queues": _by_topic(one.queues),
            **origins,
        }
    return document


def _by_topic(offsets: Mapping[QueueKey, int]) -> dict[str, dict[str, int]]:
    queues: dict[str, dict[str, int]] = {}
    for queue in sorted(offsets):
        queues.setdefault(queue.topic, {})[f"{queue.queue_id}.{queue.generation}"] = offsets[queue]
    return queues


def from_json(document: Mapping[str, Any]) -> dict[Names, ArchiveOffset]:
    """A stream's offset from the form in which Spark's checkpoint stores it. Raises CorruptionError if it does not
    parse, or is too large."""
    try:
        _check_size(document)
        return {_names(name): _archive_offset(one) for name, one in document.items()}
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise CorruptionError(
            f"an offset in the stream's checkpoint cannot be read: {error}",
            hint="start the stream with a new checkpoint",
        ) from error


def _check_size(document: Mapping[str, Any]) -> None:
    """Raise ValueError if a ``document`` from a checkpoint has too many queues or too long names, before memory is
    allocated for it."""
    left = QUEUES_MAX
    for name, one in document.items():
        for topics in (one["queues"], one.get("from", {})):
            left -= len(topics) + sum(map(len, topics.values()))
            if left < 0:
                raise ValueError(f"it has more than {QUEUES_MAX} queues")
            if max(map(len, (name, *topics))) > NAME_CHARACTERS_MAX:
                raise ValueError(f"it has a name of more than {NAME_CHARACTERS_MAX} characters")


def _names(text: str) -> Names:
    cluster, broker = (unquote(part) for part in text.split("/"))
    return cluster, broker


def _archive_offset(one: Mapping[str, Any]) -> ArchiveOffset:
    return ArchiveOffset(_whole(one["version"]), _offsets(one["queues"]), _offsets(one.get("from", {})))


def _offsets(topics: Mapping[str, Mapping[str, Any]]) -> dict[QueueKey, int]:
    queues = {}
    for topic, numbers in topics.items():
        for name, offset in numbers.items():
            queue_id, generation = (_whole(int(number)) for number in name.split("."))
            queues[QueueKey(topic, queue_id, generation)] = _whole(offset)
    return queues


def _whole(value: Any) -> int:
    if type(value) is not int or not 0 <= value <= OFFSET_MAX:
        raise ValueError(f"{str(value)[:32]!r} is not a whole number from 0 to {OFFSET_MAX}")
    return value


def share(available: Sequence[int], limit: int) -> list[int]:
    """Divide ``limit`` into shares in proportion to ``available``, none of which is exceeded. The sum of the shares is
    at least 1 if anything is available."""
    total = sum(available)
    limit = min(max(limit, 1), total)
    if total == 0:
        return [0] * len(available)
    shares = [amount * limit // total for amount in available]
    left = limit - sum(shares)
    by_remainder = sorted(range(len(available)), key=lambda i: (-(available[i] * limit % total), i))
    for i in by_remainder[:left]:
        shares[i] += 1
    return shares


def bytes_between(runs: Table, begin: int, end: int) -> int:
    """Approximate message bytes of queue offsets [begin, end): messages of a run count as equally large."""
    low = np.clip(begin, runs["base_queue_offset"], runs["end_queue_offset"])
    high = np.clip(end, runs["base_queue_offset"], runs["end_queue_offset"])
    span = np.maximum(runs["end_queue_offset"] - runs["base_queue_offset"], 1)
    return int((_weights(runs) * (np.maximum(high - low, 0) / span)).sum())


def offset_after(runs: Table, begin: int, end: int, byte_count: int) -> int:
    """The queue offset in [begin, end] up to which messages from ``begin`` on have about ``byte_count`` bytes; at least
    one message, if there is any. ``runs``: the runs of the queue, which say how many bytes ranges of offsets have."""
    low, high = min(begin + 1, end), end
    while low < high:
        middle = (low + high + 1) // 2
        if bytes_between(runs, begin, middle) <= byte_count:
            low = middle
        else:
            high = middle - 1
    return low


def _weights(runs: Table) -> Any:
    """Bytes of each run; for LMQs, whose bytes are in other runs, a number proportional to rows."""
    return np.where(runs["byte_count"] > 0, runs["byte_count"], runs["rows"] * 1024)


logger = logging.getLogger(__name__)


class ArchiveFollower:
    """The archives below one path. Caches their newest catalog states."""

    def __init__(self, options: SourceOptions) -> None:
        """Open the object store of ``options``; no archive is read yet."""
        self._options = options
        self._resources = ExitStack()
        self._root = self._resources.enter_context(opened(options))
        self._states: dict[Names, CatalogState] = {}
        self._planners: dict[Names, ArchivePlanner] = {}
        self._gaps: dict[Names, GapsByVersion] = {}
        self._found: set[Names] = set()
        """Archives that existed at the last refresh."""
        self._has_topics = False
        """Whether the topics of the options were found."""

    def close(self) -> None:
        """Close the object store."""
        self._resources.close()

    # -- catalog states ---------------------------------------------------------------------------------------

    def newest_offset(self) -> StreamOffset:
        """The stream's offset at the end of everything that is archived now."""
        self._refresh()
        return {
            names: ArchiveOffset(
                state.version,
                {queue: offsets.end for queue, offsets in wanted_queues(state, self._options).items()},
            )
            for names, state in self._states.items()
        }

    def with_hidden(self, newest: StreamOffset, start: StreamOffset) -> StreamOffset:
        """``newest`` with those queues of ``start`` that were hidden since, as their topic was deleted or created
        again: the rest of their messages is still read.

        Raises NotFoundError if an archive of ``start`` no longer exists or was replaced by another one.
        """
        for names, reached in start.items():
            self._require_archive(names, reached.version)
        offsets = dict(newest)
        for names, one in newest.items():
            state, queues = self._state(names, one.version), dict(one.queues)
            for queue in start[names].queues if names in start else ():
                row = state.queue(queue)
                if queue not in queues and row is not None and self._options.wants(queue.topic):
                    queues[queue] = int(row["end_queue_offset"])
            offsets[names] = ArchiveOffset(one.version, queues)
        return offsets

    def _require_archive(self, names: Names, version: int) -> None:
        """Raise NotFoundError if the archive ``names`` (cluster, broker), of which the stream has read catalog
        ``version``, no longer exists, or is another one now, whose versions are lower."""
        if not self._options.wants_archive(*names):
            return
        archive = f"{self._options.path}: the archive {'/'.join(names)}, of which the checkpoint has offsets,"
        hint = "start the stream with a new checkpoint"
        if names not in self._found:
            raise NotFoundError(f"{archive} no longer exists", hint=hint)
        newest = self._states[names].version
        if newest < version:
            raise NotFoundError(
                f"{archive} was replaced by another one: the stream read catalog version {version}, "
                f"but the newest is {newest}",
                hint=hint,
            )

    def starting_offset(self) -> StreamOffset:
        """The offset at which a new stream starts, by ``startingOffsets`` or the starting time. Queues that are not in
        it start at their first message."""
        starting = self._options.starting
        if starting is Starting.LATEST:
            newest = self.newest_offset()
            return {
                names: self._with_origins(names, self._states[names], dict(one.queues))
                for names, one in newest.items()
            }
        self._refresh()
        offsets_of = {}
        for names, state in self._states.items():
            queues = {}
            for queue, offsets in wanted_queues(state, self._options).items():
                is_first = starting is Starting.EARLIEST
                queues[queue] = offsets.begin if is_first else self._offset_at_time(names, state, queue)
            offsets_of[names] = self._with_origins(names, state, queues)
        return offsets_of

    def _gaps_of(self, names: Names) -> GapsByVersion:
        if names not in self._gaps:
            self._gaps[names] = GapsByVersion(partial(self._state, names))
        return self._gaps[names]

    def _with_origins(self, names: Names, state: CatalogState, queues: dict[QueueKey, int]) -> ArchiveOffset:
        """The offset of an archive at which a stream starts. For a queue with a gap below its start it also has that
        start as origin: messages that fill the gap below it later are not read. Elsewhere none can appear there."""
        gaps = self._gaps_of(names).at(state.version)
        origins = {
            queue: offset
            for queue, offset in queues.items()
            if queue in gaps and gaps[queue][0].begin < offset
        }
        return ArchiveOffset(state.version, queues, origins)

    def _refresh(self) -> None:
        """List the archives below the path, and read the newest state and the gaps of each. Raises NotFoundError if,
        when archives are found for the first time, none has a topic of the options."""
        try:
            listed = archives(self._root, self._options)
        except NotFoundError:
            listed = []  # nothing archived yet
        self._found = {(one.cluster, one.broker) for one in listed}
        for one in listed:
            names = one.cluster, one.broker
            cached = self._states.get(names)
            self._states[names] = load(one.store) if cached is None else refresh(one.store, cached)
            self._gaps_of(names).add(self._states[names])
        if listed and not self._has_topics:
            require_topics(
                self._options, {queue.topic for state in self._states.values() for queue, _ in state.queues()}
            )
            self._has_topics = True

    def _store(self, names: Names) -> ObjectStore:
        return archive_store(self._root, *names)

    def _planner(self, names: Names) -> ArchivePlanner:
        if names not in self._planners:
            self._planners[names] = ArchivePlanner(self._store(names), names)
        return self._planners[names]

    def _state(self, names: Names, version: int) -> CatalogState:
        cached = self._states.get(names)
        if cached is not None and cached.version == version:
            return cached
        return load(self._store(names), version=version)

    def _filled(self, names: Names, start: ArchiveOffset | None, version: int) -> list[Layer]:
        """Offsets in gaps that the stream has passed before ``start``, and that commits up to ``version`` have filled
        since: the next batch reads them too."""
        if start is None or start.version >= version:
            return []
        passed = {
            queue: OffsetRange(start.origins.get(queue, 0), offset) for queue, offset in start.queues.items()
        }
        gaps = self._gaps_of(names).at(start.version)
        return filled(self._state(names, version), gaps, passed) if gaps else []

    def _offset_at_time(self, names: Names, state: CatalogState, queue: QueueKey) -> int:
        """The offset of the queue's first message that was stored at or after the starting time of the options; the end
        of the queue if there is none."""
        wanted_ms = self._options.starting_timestamp or 0
        chunk = self._planner(names).run_index.runs_from(state, queue, wanted_ms)
        for run in chunk.runs[chunk.runs["max_store_timestamp"] >= wanted_ms]:
            reader = SegmentCache(self._store(names)).of_run(chunk, run)
            rows = reader.row_columns(CatalogRun.of(run))
            later = rows.queue_offset[rows.store_timestamp >= wanted_ms]
            if len(later):
                return int(later[0])
        row = state.queue(queue)
        assert row is not None
        return int(row["end_queue_offset"])

    # -- one batch --------------------------------------------------------------------------------------------

    def limited(self, start: StreamOffset, newest: StreamOffset, limit: ReadLimit) -> StreamOffset:
        """The offset at which the micro-batch that begins at ``start`` ends: ``newest``, or as far as ``limit`` (rows
        or bytes) allows. Queues share the limit in proportion to their unread messages."""
        start = self._rewound(start, newest)
        # Archives with something to read although their offsets do not move: messages archived after those behind them.
        with_late_messages = {
            names for names, one in newest.items() if self._filled(names, start.get(names), one.version)
        }
        if not isinstance(limit, ReadMaxRows | ReadMaxBytes):
            return _merged(start, newest, with_late_messages)
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
        ends_of: dict[Names, dict[QueueKey, int]] = {names: {} for names in newest}
        for (names, queue, *_), end in zip(todo, ends, strict=True):
            ends_of[names][queue] = end
        reached = {names: ArchiveOffset(newest[names].version, ends_of[names]) for names in newest}
        return _merged(start, reached, with_late_messages)

    def _range(
        self, names: Names, queue: QueueKey, start: StreamOffset, newest: StreamOffset
    ) -> tuple[int, int]:
        """The offsets [begin, end) of a queue that are not read yet: from ``start``, or if the queue is not in it from
        its first message, to ``newest``."""
        end = newest[names].queues[queue]
        begin = start[names].queues.get(queue) if names in start else None
        if begin is None:
            row = self._state(names, newest[names].version).queue(queue)
            begin = int(row["min_queue_offset"]) if row is not None else end
        return min(begin, end), end

    def _ends_by_bytes(
        self, todo: list[tuple[Names, QueueKey, int, int]], newest: StreamOffset, byte_limit: int
    ) -> list[int]:
        """Shorten the unread ranges of ``todo`` (archive, queue, begin, end) so that they have about ``byte_limit``
        message bytes together, in proportion to what each has. Returns the new end of each."""
        wanted: dict[Names, Layer] = {names: {} for names in newest}
        for names, queue, begin, end in todo:
            wanted[names][queue] = OffsetRange(begin, end)
        runs_of_queue = {
            names: runs_of(self._planner(names).run_index, self._state(names, newest[names].version), layer)
            for names, layer in wanted.items()
        }
        tables = [runs_of_queue[names][queue] for names, queue, *_ in todo]
        sizes = [bytes_between(runs, begin, end) for runs, (*_, begin, end) in zip(tables, todo, strict=True)]
        if sum(sizes) <= byte_limit:
            return [end for *_, end in todo]
        shares = share(sizes, byte_limit)
        return [
            offset_after(runs, begin, end, size) if size else begin
            for runs, (*_, begin, end), size in zip(tables, todo, shares, strict=True)
        ]

    def parts(self, start: StreamOffset, end: StreamOffset, *, is_header_only: bool) -> list[Slices]:
        """What the tasks of a micro-batch read: the messages between two offsets of the stream, as the catalog version
        in ``end`` has them, in slices. ``is_header_only``: no column needs message bodies. Messages that expired before
        they were read are reported."""
        start = self._rewound(start, end)
        slices: list[Slices] = []
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
                    # Gaps expire together with the runs before them.
                    gaps = self._gaps_of(names).at(start[names].version).get(queue, ())
                    for lost in without(OffsetRange(begin, min(first, stop)), gaps):
                        self._note_expired(queue, lost)
                wanted[queue] = OffsetRange(max(begin, first), stop)
            slices += self._planner(names).slices(
                state,
                [wanted, *self._filled(names, start.get(names), one.version)],
                Predicate(),
                is_header_only=is_header_only,
                on_expired=self._note_expired,
            )
        return slices

    def _rewound(self, start: StreamOffset, end: StreamOffset) -> StreamOffset:
        """``start`` with queues moved back if the broker's log was truncated or replaced since they were read: offsets
        behind the last common message have other messages now. That is reported as a loss of data."""
        rewound = dict(start)
        for names, one in start.items():
            ends = self._common_ends(names, one, end[names].version) if names in end else {}
            for queue, offset in ends.items():
                self._note_loss(
                    NotFoundError(
                        f"{queue}: the broker's log was truncated or replaced, and offsets [{offset}, "
                        f"{one.queues[queue]}), which the stream has read, have other messages now",
                        hint="failOnDataLoss=false reads the new messages",
                    )
                )
            rewound[names] = replace(one, queues={**one.queues, **ends})
        return rewound

    def _common_ends(self, names: Names, start: ArchiveOffset, version: int) -> dict[QueueKey, int]:
        """Queues of which a truncated or replaced log has taken back the last messages before ``start`` -> the end of
        the messages that the log of ``version`` still has."""
        if version <= start.version:
            return {}
        state = self._state(names, version)
        kept = KeptEnds(self._store(names), state, start.version)
        ends = {}
        for queue, offset in start.queues.items():
            row, end = state.queue(queue), kept.before_divergence(queue)
            is_superseded = row is not None and int(row["flags"]) & QUEUE_SUPERSEDED
            if end is not None and end < offset and not is_superseded:
                ends[queue] = end
        return ends

    def _note_expired(self, queue: QueueKey, offsets: OffsetRange) -> None:
        self._note_loss(
            SnapshotExpiredError(
                f"{queue}: offsets [{offsets.begin}, {offsets.end}) expired before they were read",
                hint="failOnDataLoss=false skips them",
            )
        )

    def _note_loss(self, loss: NotFoundError) -> None:
        if self._options.fail_on_data_loss:
            raise loss
        logger.warning("%s", loss.message)


def _merged(start: StreamOffset, end: StreamOffset, with_late_messages: Collection[Names]) -> StreamOffset:
    """The offset ``end`` with those archives and queues of ``start`` that it lacks; no queue moves back.

    An archive without new offsets keeps the version of ``start``: Spark takes equal offsets to mean that there is
    nothing to read, and starts no empty batch. Archives of ``with_late_messages`` get the version of ``end``, as
    messages below their offsets are to be read. Where queues started (``origins``) never changes.
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
        is_moved = names in with_late_messages or queues != dict(before.queues)
        merged[names] = ArchiveOffset(one.version if is_moved else before.version, queues, before.origins)
    return merged
