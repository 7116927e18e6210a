"""The begin of queues whose keys are compacted, from a broker: its compaction log is older than its commitlog, of which
the archive is made.

As the broker's slaves do, a consumer pulls from 0 up to the archive's begin; what stays becomes sparse runs there. It
pulls what is above first: of a key with a later message nothing is copied, even if that message, a tombstone, leaves
broker and archive before all is read.

Sources: CompactionLog.pullMessageFromMaster, MessageFetcher.
"""

from __future__ import annotations

import io
import random
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from rocketmq_tiered.maintenance.key_rounds import KeyFigures
from tiered.archive.kept_offsets import KeptOffsets
from tiered.archive.offset_map import OffsetMap, entries_of
from tiered.catalog.commit import CommitDraft, CommitKind
from tiered.catalog.deletions import Reason
from tiered.catalog.garbage import settled_version
from tiered.catalog.maintenance_commit import MaintenanceCommit
from tiered.catalog.pages import RunIndex
from tiered.catalog.requirements import Requirements, histories_of
from tiered.catalog.state import CatalogState
from tiered.console import counted, size_text
from tiered.errors import CorruptionError, UnansweredError, UnavailableError, UsageError
from tiered.formats.keys import compaction_attempts_from, data_key
from tiered.formats.segment import BlockCodec, RowTable, SegmentMeta
from tiered.formats.segment_writer import SegmentWriter, WrittenSegment
from tiered.kernels.queue_table import QueueTable
from tiered.kernels.record_columns import RecordColumns
from tiered.kernels.rescan import own_phys, rescan
from tiered.model.queue import QueueKey
from tiered.model.tables import (
    COPIED_PHYS,
    OBJECT_DTYPE,
    QUEUE_BATCH,
    QUEUE_EXPIRED,
    QUEUE_HIDDEN,
    QUEUE_LMQ,
    QUEUE_SUPERSEDED,
    RUN_DTYPE,
    RunKind,
    concatenated,
    picked,
)
from tiered.remoting.client import BrokerClient
from tiered.remoting.command import RequestCode, ResponseCode
from tiered.settings.topic_rules import is_compacted

GROUP = "TOOLS_CONSUMER"
"""Every broker has this group: pulls register nothing."""
OBJECT_BYTES, OBJECT_ROWS = 32 << 20, 131_072
_BATCH_BYTES = 1 << 20
_RETRIES, _RETRY_S = 50, 0.2
_NOT_FOUND, _RETRY_AT_ONCE, _MOVED = 19, 20, 21
_PULLED = 4
"""The pull's sysFlag: with its subscription."""
Report = Callable[[int, int], None]
"""Offsets done, and all."""


class Begin(NamedTuple):
    """A queue that the archive has from offset ``end`` on."""

    queue: QueueKey
    end: int


class Pulled(NamedTuple):
    """Records ``data[starts[i] : starts[i] + sizes[i]]`` at ``offsets``."""

    data: NDArray[np.uint8]
    starts: NDArray[np.int64]
    sizes: NDArray[np.int32]
    offsets: NDArray[np.int64]

    def where(self, mask: NDArray[np.bool_]) -> Pulled:
        """The records of ``mask``, without the memory of others."""
        if mask.all():
            return self
        starts, sizes = self.starts[mask], self.sizes[mask]
        ranges = zip(starts.tolist(), sizes.tolist(), strict=True)
        data = bytearray(b"".join([self.data[at : at + length].data for at, length in ranges]))
        packed = np.cumsum(sizes, dtype=np.int64) - sizes
        return Pulled(np.frombuffer(data, np.uint8), packed, sizes, self.offsets[mask])


def missing_begins(state: CatalogState, is_keyed: Callable[[str], bool]) -> list[Begin]:
    """Queues whose keys are compacted (``is_keyed`` by topic) and whose first messages the archive does not have,
    though they did not expire there."""
    other = QUEUE_HIDDEN | QUEUE_SUPERSEDED | QUEUE_EXPIRED | QUEUE_LMQ | QUEUE_BATCH  # never copied
    return sorted(
        Begin(queue, int(row["min_queue_offset"]))
        for queue, row in state.queues()
        if int(row["min_queue_offset"]) > 0 and not int(row["flags"]) & other and is_keyed(queue.topic)
    )


def compacted_at(client: BrokerClient, state: CatalogState, address: str) -> Callable[[str], bool]:
    """Which topics the broker at ``address`` compacts, as a function of the topic. Raises UsageError if it is not the
    broker of the archive."""
    config = client.broker_config() or {}
    names = config.get("brokerClusterName"), config.get("brokerName")
    if names != (state.cluster, state.broker):
        raise UsageError(
            f"the broker at {address} is {names[0]}/{names[1]}, but the archive is of {state.cluster}/{state.broker}",
            hint=f"give the address of broker {state.broker}",
        )
    table = client.topics() or {}
    return lambda topic: is_compacted(table.get(topic))


def pulls(client: BrokerClient, queue: QueueKey, begin: int, end: int) -> Iterator[Pulled]:
    """Pull the messages that the broker has at the queue offsets [begin, end), in order, about a megabyte at a time.
    Raises UnavailableError if the broker refuses, and CorruptionError for a malformed reply."""
    fields = {
        "consumerGroup": GROUP,
        "topic": queue.topic,
        "queueId": str(queue.queue_id),
        "maxMsgNums": "1024",
        "sysFlag": str(_PULLED),
        "commitOffset": "0",
        "suspendTimeoutMillis": "0",
        "subVersion": "0",
        "subscription": "*",
        "expressionType": "TAG",
    }
    offset, bodies, retries = begin, list[bytes](), 0
    while offset < end:
        answer = client.call(RequestCode.PULL_MESSAGE, fields | {"queueOffset": str(offset)})
        if answer.code == _RETRY_AT_ONCE and retries < _RETRIES:
            retries += 1
            time.sleep(_RETRY_S)
            continue
        if answer.code not in (ResponseCode.SUCCESS, _NOT_FOUND, _MOVED):
            raise UnavailableError(
                f"the broker refuses to send messages of {queue} from offset {offset}: "
                f"{answer.remark or answer.code}",
                hint="look up the cause in the broker's log file, broker.log; then run the command again",
            )
        next_offset = int(answer.ext_fields.get("nextBeginOffset", offset))
        if answer.code == ResponseCode.SUCCESS:
            bodies.append(answer.body)
        if next_offset <= offset:  # the end of the queue
            break
        offset, retries = next_offset, 0
        if sum(map(len, bodies)) >= _BATCH_BYTES:
            yield _split(b"".join(bodies), end, queue)
            bodies = []
    if bodies:
        yield _split(b"".join(bodies), end, queue)


def _split(data: bytes, end: int, queue: QueueKey) -> Pulled:
    """Split the body of a reply to a pull into records, and keep those at queue offsets below ``end``. A record begins
    with its size; its queue offset is at byte 20. Raises CorruptionError if the sizes do not add up to the length of
    the body."""
    bounds = [0]
    while bounds[-1] + 28 <= len(data):  # 28: size to queue offset
        at = bounds[-1]
        bounds.append(at + max(28, int.from_bytes(data[at : at + 4], "big")))
    if bounds[-1] != len(data):
        raise CorruptionError(
            f"the broker's reply with messages of {queue} is malformed: their sizes do not add up to its length"
        )
    starts, sizes = np.array(bounds[:-1], np.int64), np.diff(bounds).astype(np.int32)
    offsets = np.array([int.from_bytes(data[at + 20 : at + 28], "big") for at in bounds[:-1]], np.int64)
    return Pulled(np.frombuffer(bytearray(data), np.uint8), starts, sizes, offsets).where(offsets < end)


@dataclass(frozen=True)
class CopyReport:
    """``figures``: of the begins of queues, as the broker has them (before) and the archive (after)."""

    broker: str
    is_applied: bool
    figures: KeyFigures

    def document(self) -> dict[str, Any]:
        """What was copied from the broker, as the JSON that ``--json`` prints."""
        own = self.figures
        return {
            "broker": self.broker,
            "applied": self.is_applied,
            "queues": own.queues,
            "messages": own.new_messages,
            "bytes": own.new_bytes,
        }

    def lines(self, title: str) -> list[str]:
        """What was copied from the broker, or would be with ``--apply``, as lines to print."""
        own = self.figures
        if not own.queues:
            return [
                f"{title}: nothing to copy: the first messages of every queue with keys are archived, or expired"
            ]
        verb = "copied" if self.is_applied else "dry run, add --apply to copy"
        return [
            f"{title}: {verb} {counted(own.new_messages, 'message')}, {size_text(own.new_bytes)}, from {self.broker}: "
            f"the first ones of {counted(own.queues, 'queue')}"
        ]


@dataclass(frozen=True)
class Copying:
    """Copies begins of queues into an archive. ``spool`` takes keys that exceed ``memory_bytes``. ``min_age_ms``:
    younger messages replace nothing, as the log may still lose them."""

    maintenance: MaintenanceCommit
    client: BrokerClient
    spool: Path
    memory_bytes: int
    codec: BlockCodec
    min_age_ms: int

    def all(
        self, address: str, is_keyed: Callable[[str], bool], report: Report, *, apply: bool
    ) -> CopyReport:
        """Copy the missing first messages of all queues whose keys both archive and broker compact, by one commit for
        each queue; without ``apply`` only count them. ``is_keyed``: whether the archive compacts a topic's keys. Raises
        as ``copy``, UsageError if ``address`` is another broker, and the errors of the broker's client."""
        at_broker = compacted_at(self.client, self.maintenance.state, address)
        copied = CopyReport(address, apply, KeyFigures())
        for begin in missing_begins(
            self.maintenance.state, lambda topic: is_keyed(topic) and at_broker(topic)
        ):
            figures = (
                self.copy(begin, report) if apply else self.read(self.maintenance.state, begin, report)[0]
            )
            copied = replace(copied, figures=copied.figures + figures)
        return copied

    def _counted_end(self, state: CatalogState, queue: QueueKey) -> int:
        """The queue offset below which messages of the archive replace older ones of their keys: messages that are old
        enough, and all that an earlier round has compacted."""
        store = self.maintenance.store
        settled = settled_version(store, state.version, store.clock_ms() - self.min_age_ms)
        runs = RunIndex(store).runs_of(state, queue).runs
        young = runs["base_queue_offset"][runs["version"] > settled]
        compacted = runs["end_queue_offset"][runs["kind"] == RunKind.SPARSE]
        end = int(runs["end_queue_offset"].max(initial=0))
        return max(int(young.min(initial=end)), int(compacted.max(initial=0)))

    def read(self, state: CatalogState, begin: Begin, report: Report) -> tuple[KeyFigures, KeptOffsets]:
        """Read at the broker which of the queue's messages below ``begin.end``, where the archive begins, are the
        latest of their keys. Returns their figures and their offsets. Raises UnavailableError if the broker's queue
        ends below the archive's begin."""
        queue, figures = begin.queue, KeyFigures(queues=1)
        fields = {"topic": queue.topic, "queueId": str(queue.queue_id)}
        answer = self.client.call(RequestCode.GET_MAX_OFFSET, fields)
        end = int(answer.ext_fields.get("offset", 0))
        if answer.code != ResponseCode.SUCCESS or end < begin.end:
            raise UnavailableError(
                f"the broker does not have {queue} up to offset {begin.end}, where it begins in the archive: "
                f"{answer.remark or f'it ends at offset {end}'}",
                hint="if the topic was created again at the broker, nothing can be copied",
            )
        end = max(begin.end, min(end, self._counted_end(state, queue)))
        kept = KeptOffsets(0, begin.end)
        with closing(OffsetMap(self.spool, self.memory_bytes)) as keys:
            # Later messages first, which replace older ones of their keys: a tombstone among them may soon be gone.
            for first, last in ((begin.end, end), (0, begin.end)):
                for pulled in pulls(self.client, queue, first, last):
                    report(int(pulled.offsets[-1]) - first if len(pulled.offsets) else 0, end)
                    entries = entries_of(pulled.data, pulled.starts, pulled.sizes, pulled.offsets)
                    if last == begin.end:
                        figures += KeyFigures(messages=len(entries), bytes=int(entries["size"].sum()))
                    keys.add(picked(entries, entries["has_key"] > 0))
            for latest in keys.latest():
                mine = picked(latest, (latest["offset"] < begin.end) & (latest["is_tombstone"] == 0))
                kept.keep(mine["offset"].astype(np.int64))
                figures += KeyFigures(
                    keys=len(mine), new_messages=len(mine), new_bytes=int(mine["size"].sum())
                )
        return figures, kept

    def copy(self, begin: Begin, report: Report) -> KeyFigures:
        """Copy from the broker the latest message of each key below ``begin.end``, where the archive's queue begins, in
        objects of some megabytes, and commit them. Raises UnavailableError if the archive has changed since; the
        objects are garbage then."""
        started = self.maintenance.refresh()
        figures, kept = self.read(started, begin, report)
        if not figures.new_messages:
            return figures
        required = Requirements(epoch=started.epoch, histories=histories_of(started))
        nonce = compaction_attempts_from(random.SystemRandom().getrandbits(40))
        segments: list[tuple[str, WrittenSegment]] = []
        held: list[Pulled] = []  # messages of the next object
        base = written = 0  # where that begins: its first queue offset, and the message bytes before it
        batches: Iterator[Pulled | None] = chain(pulls(self.client, begin.queue, 0, begin.end), [None])
        for pulled in batches:
            if held and (pulled is None or _is_full(held)):
                segment, body = self._encoded(
                    started, begin.queue, held, (base, written, nonce + len(segments))
                )
                key = data_key(begin.queue, base, started.epoch, nonce + len(segments))
                if not self.maintenance.announce([key], required):
                    raise _changed(begin.queue)
                self._put(key, body)
                segments.append((key, segment))
                base, written, held = (
                    int(segment.runs["end_queue_offset"][0]),
                    written + int(segment.runs["byte_count"][0]),
                    [],
                )
            if pulled is not None:
                is_kept = kept.mask(pulled.offsets)
                report(int(pulled.offsets[-1]) if len(is_kept) else 0, begin.end)
                if is_kept.any():
                    held.append(pulled.where(is_kept))
        if segments:
            self._commit(begin, started, segments, required)
        return figures

    def _put(self, key: str, body: list[bytes]) -> None:
        try:
            self.maintenance.put(key, body)
        except UnansweredError as error:
            raise UnavailableError(
                f"the object store did not answer the PUT of {key}", hint="run the command again"
            ) from error

    def _encoded(
        self, state: CatalogState, queue: QueueKey, held: list[Pulled], place: tuple[int, int, int]
    ) -> tuple[WrittenSegment, list[bytes]]:
        """Encode the messages ``held`` as an object of ``queue``, whose rows have explicit offsets. ``place``: its
        first queue offset, the message bytes before it, and the number of the attempt, which is part of its key.
        Returns the object's index and its bytes in pieces."""
        base, written, attempt = place
        columns = [_columns(queue, pulled) for pulled in held]
        names = ("size", "tags_code", "store_timestamp", "key_count", "key_hashes")
        size, tags, times, key_count, hashes = (
            np.concatenate([column[name] for column in columns]) for name in names
        )
        ends = np.concatenate([pulled.offsets for pulled in held]) + 1
        begins = np.concatenate([[base], ends[:-1]])
        position = np.cumsum(size, dtype=np.int64) - size
        none = np.full(len(size), -1, np.int64)
        rows = RowTable(
            position,
            size,
            tags,
            times,
            COPIED_PHYS + written + position,
            begins,
            (ends - begins).astype(np.int32),
            key_count,
            none,
            none,
            hashes,
        )
        head = np.zeros(1, RUN_DTYPE)
        head["kind"], head["base_queue_offset"], head["base_byte"] = RunKind.SPARSE, base, written
        head["min_store_timestamp"], head["min_phys"] = times.min(), rows.phys[0]
        file = io.BytesIO()
        writer = SegmentWriter(file, self.codec)
        writer.begin_runs([queue], head)
        writer.add_rows(rows, [])
        for pulled in held:
            writer.add_records([pulled.data.data], pulled.sizes)
        meta = SegmentMeta(
            state.cluster,
            state.broker,
            state.epoch,
            attempt,
            state.cursor.history,
            state.version,
            0,
            0,
            self.maintenance.store.clock_ms(),
            "compact-keys",
        )
        segment = writer.finish(meta)
        return segment, [file.getvalue(), segment.keys, segment.tail]

    def _commit(
        self,
        begin: Begin,
        started: CatalogState,
        segments: list[tuple[str, WrittenSegment]],
        required: Requirements,
    ) -> None:
        """Commit the objects of ``segments`` (key, index) as the first messages of the queue, below ``begin.end``.
        Raises UnavailableError if the queue's minimum offset has changed since ``started``, or key compaction has
        dropped rows."""
        runs = concatenated([segment.runs for _, segment in segments], RUN_DTYPE)
        runs["queue"], runs["object"] = 0, np.arange(len(runs))
        runs["end_queue_offset"][-1] = begin.end
        objects = concatenated(
            [segment.object_row(started.epoch, 0) for _, segment in segments], OBJECT_DTYPE
        )
        objects["key"] = np.arange(len(objects))
        keys = tuple(key for key, _ in segments)
        draft = CommitDraft(
            CommitKind.MAINTENANCE,
            queues=[begin.queue],
            runs=runs,
            objects=objects,
            object_keys=keys,
            restored=keys,
            reason=Reason.COMPACTED,
        )
        before = started.queue(begin.queue)

        def change(newest: CatalogState) -> CommitDraft | None:
            now = newest.queue(begin.queue)
            if before is None or now is None:
                return None
            # If key compaction dropped a tombstone since, an older value that was read for its key would come back. It
            # dropped nothing if the queue has grown by as many rows as offsets.
            grown = [int(now[name]) - int(before[name]) for name in ("row_count", "end_queue_offset")]
            return draft if grown[0] == grown[1] and now["min_queue_offset"] == begin.end else None

        if not self.maintenance.commit(change, replace(required, announced=frozenset(keys))):
            raise _changed(begin.queue)


def _is_full(held: list[Pulled]) -> bool:
    rows, size = sum(len(one.sizes) for one in held), sum(int(one.sizes.sum()) for one in held)
    return rows + _BATCH_BYTES // 100 > OBJECT_ROWS or size + _BATCH_BYTES > OBJECT_BYTES


def _columns(queue: QueueKey, pulled: Pulled) -> dict[str, NDArray[Any]]:
    """The columns of the index of an object, from the ``pulled`` records. Raises CorruptionError for a record that is
    damaged, or of another queue."""
    table, parsed = QueueTable(), RecordColumns(rows=len(pulled.starts) or 1)
    count, reason = rescan(
        pulled.data, pulled.starts, pulled.sizes, own_phys(pulled.data, pulled.starts), table, parsed
    )
    if reason or (parsed.queue[:count] != table.ordinal(queue.topic, queue.queue_id)).any():
        raise CorruptionError(
            f"the broker's message of {queue} at offset {pulled.offsets[count % len(pulled.offsets)]} is damaged"
        )
    names = ("size", "tags_code", "store_timestamp", "key_count")
    columns: dict[str, NDArray[Any]] = {name: getattr(parsed, name)[:count].copy() for name in names}
    return columns | {"key_hashes": parsed.key_hashes[: parsed.keys].copy()}


def _changed(queue: QueueKey) -> UnavailableError:
    return UnavailableError(
        f"the archive has changed while older messages of {queue} were copied from the broker",
        hint="run the command again",
    )
