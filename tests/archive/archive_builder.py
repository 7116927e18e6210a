"""Writes small archives the way an uploader does: real records, segments, commits. Keeps what is in them."""

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import xxhash

from tests.formats.segment_builder import RowSpec, RunSpec, build
from tests.kernels.record_builder import Message, encode, properties
from tiered.archive.segment_reader import SegmentReader
from tiered.catalog.catalog_writer import CatalogWriter
from tiered.catalog.commit import CommitDraft, CommitKind
from tiered.catalog.pages import RunIndex
from tiered.catalog.state import NO_CHECK, REMOVED_DTYPE, CatalogState, RunChunk
from tiered.catalog.writer_limits import CatalogLimits
from tiered.clock import Clock
from tiered.formats.keys import data_key, set_key
from tiered.formats.record import java_hash
from tiered.formats.run_part import CatalogRun, cut_run
from tiered.formats.segment import BlockCodec, SegmentMeta, encode_segment
from tiered.model.queue import QueueKey
from tiered.model.tables import GAP_DTYPE, OBJECT_DTYPE, RUN_DTYPE, GapReason, RunKind, Table
from tiered.object_store.interface import ObjectStore

NOW_MS = 1_700_000_000_000


@dataclass(frozen=True)
class Sent:
    """One message of a cycle. ``offset`` above the queue's end leaves a gap; ``lmq``: LMQs it is also in;
    ``stored_ms``: when the broker stored it."""

    queue: QueueKey
    body: bytes = b"body"
    offset: int | None = None
    tags: str = ""
    keys: Sequence[str] = ()
    unique_key: str = ""
    inner_num: int = 1
    lmq: Sequence[QueueKey] = ()
    stored_ms: int = NOW_MS


@dataclass(frozen=True)
class Stored:
    """One row as it must come back."""

    offset: int
    inner_num: int
    record: bytes
    phys: int
    tags_code: int
    store_timestamp: int


LoggedRow = tuple[QueueKey, RowSpec, int, int]
"""Queue, row, queue offset, physical offset."""
Gap = tuple[QueueKey, int, int]
"""Queue, begin, end."""


@dataclass
class _Queue:
    end: int = 0
    end_byte: int = 0
    is_new: bool = True
    rows: list[Stored] = field(default_factory=list)
    gaps: list[tuple[int, int]] = field(default_factory=list)


class ArchiveBuilder:
    """Commits cycles to ``store``. ``truth[queue].rows`` and ``.gaps`` say what readers must find."""

    def __init__(
        self, store: ObjectStore, *, limits: CatalogLimits | None = None, codec: BlockCodec | None = None
    ) -> None:
        self.store = store
        self.truth: dict[QueueKey, _Queue] = {}
        self._phys = 4096
        self._parents: dict[tuple[QueueKey, int], QueueKey] = {}
        self._attempt = 0
        self._codec = codec or BlockCodec(block_bytes=600)
        self._limits = limits or CatalogLimits(root_every=4)
        self.restart(1)
        self.keys: list[str] = []
        self.doctor: Callable[[bytes], bytes] = lambda record: record
        self.doctor_runs: Callable[[Table], None] = lambda runs: None
        self.parent_offset_error = 0

    def restart(self, seed: float) -> None:
        """Another process takes the archive over."""
        self.writer = CatalogWriter(
            self.store,
            cluster="cluster",
            broker="broker",
            instance="test",
            kind="run",
            clock=Clock(wall_ms=lambda: NOW_MS),
            limits=self._limits,
            random=random.Random(seed),
            wait=lambda seconds: None,
        )
        self.writer.claim(take_over=True)

    @property
    def state(self) -> CatalogState:
        """The newest version."""
        return self.writer.state

    @property
    def _history_phys(self) -> int:
        histories = self.state.log_histories
        return histories[-1].begin_phys if histories else 0

    def commit(
        self, messages: Sequence[Sent], *, as_set: bool = True, state_objects: Mapping[str, str] | None = None
    ) -> CatalogState:
        """One cycle: all messages, in log order, in one set object, or every run in an object of its own."""
        from_phys = self._phys
        rows, gaps = self._log(messages)
        specs = self._runs(rows)
        groups = [specs] if as_set else [[spec] for spec in specs]
        queues: list[QueueKey] = []
        tables: list[Table] = []
        keys: list[str] = []
        objects = np.zeros(len(groups), OBJECT_DTYPE)
        for number, group in enumerate(groups):
            tables.append(self._put(number, group, queues, objects, keys, from_phys))
        gap_table = np.zeros(len(gaps), GAP_DTYPE)
        for index, (queue, begin, end) in enumerate(gaps):
            gap_table[index] = (_number(queues, queue), GapReason.BROKER_DELETED, begin, end)
        draft = CommitDraft(
            kind=CommitKind.APPEND,
            history=self.state.cursor.history,
            from_phys=from_phys,
            to_phys=self._phys,
            check=NO_CHECK,
            queues=queues,
            runs=np.concatenate(tables),
            objects=objects,
            object_keys=keys,
            gaps=gap_table,
            state_objects=state_objects or {},
            created_ms=NOW_MS,
        )
        self.keys += keys
        return self.writer.append(draft)

    def _log(self, messages: Sequence[Sent]) -> tuple[list[LoggedRow], list[Gap]]:
        rows: list[LoggedRow] = []
        gaps: list[Gap] = []
        for sent in messages:
            offset = self._claim(sent.queue, sent.offset, gaps)
            lmq = [(queue, self._claim(queue, None, gaps)) for queue in sent.lmq]
            record, tags_code = _record(sent, offset, lmq, self._phys)
            record = self.doctor(record)
            truth = Stored(offset, sent.inner_num, record, self._phys, tags_code, sent.stored_ms)
            keys = [*sent.keys, sent.unique_key] if sent.unique_key else sent.keys
            hashes = [xxhash.xxh64_intdigest(f"{sent.queue.topic}#{key}".encode()) for key in keys]
            row = RowSpec(record, tags_code, sent.stored_ms, 0, sent.inner_num, hashes)
            rows.append((sent.queue, row, offset, self._phys))
            self._note(sent.queue, truth)
            for queue, lmq_offset in lmq:
                parent = replace(
                    row, inner_num=1, keys=(), parent_queue_offset=offset + self.parent_offset_error
                )
                rows.append((queue, parent, lmq_offset, self._phys))
                self._parents[queue, lmq_offset] = sent.queue
                self._note(queue, replace(truth, offset=lmq_offset, inner_num=1))
            self._phys += len(record)
        return rows, gaps

    def _claim(self, queue: QueueKey, offset: int | None, gaps: list[Gap]) -> int:
        known = self.truth.setdefault(queue, _Queue())
        if offset is None:
            offset = known.end
        if not known.is_new and offset > known.end:
            gaps.append((queue, known.end, offset))
            known.gaps.append((known.end, offset))
        known.is_new = False
        return offset

    def _note(self, queue: QueueKey, row: Stored) -> None:
        self.truth[queue].rows.append(row)
        self.truth[queue].end = row.offset + row.inner_num

    def _runs(self, rows: Sequence[LoggedRow]) -> list[tuple[QueueKey, RunSpec]]:
        """Rows by queue, cut where offsets are not contiguous. ``queue`` and ``parent`` are filled in later."""
        found: list[tuple[QueueKey, RunSpec]] = []
        for queue in dict.fromkeys(row[0] for row in rows):
            run: list[RowSpec] = []
            base = end = phys = end_phys = 0
            for _, row, offset, row_phys in [row for row in rows if row[0] == queue]:
                if run and offset != end:
                    found.append((queue, self._run(queue, base, run, phys)))
                    run = []
                if not run:
                    base, phys, end_phys = offset, row_phys, row_phys
                run.append(replace(row, gap_before=row_phys - end_phys))
                end, end_phys = offset + row.inner_num, row_phys + len(row.content)
            found.append((queue, self._run(queue, base, run, phys)))
        return found

    def _run(self, queue: QueueKey, base: int, rows: list[RowSpec], phys: int) -> RunSpec:
        known = self.truth[queue]
        if queue.topic.startswith("%LMQ%"):
            return RunSpec(0, base, rows, RunKind.LMQ, 0, phys)
        kind = RunKind.BATCH if any(row.inner_num > 1 for row in rows) else RunKind.PLAIN
        spec = RunSpec(0, base, rows, kind, known.end_byte, phys)
        known.end_byte += sum(len(row.content) for row in rows)
        return spec

    def _put(
        self,
        number: int,
        group: Sequence[tuple[QueueKey, RunSpec]],
        queues: list[QueueKey],
        objects: Table,
        keys: list[str],
        from_phys: int,
    ) -> Table:
        self._attempt += 1
        own: list[QueueKey] = []
        specs = []
        for queue, spec in group:
            rows = spec.rows
            if spec.kind == RunKind.LMQ:
                parents = [self._parents[queue, spec.base + i] for i in range(len(rows))]
                rows = [
                    replace(row, parent=_number(own, parent))
                    for row, parent in zip(rows, parents, strict=True)
                ]
            specs.append(replace(spec, queue=_number(own, queue), rows=rows))
        segment = build(own, specs, shuffle_seed=self._attempt)
        meta = SegmentMeta(
            "cluster",
            "broker",
            self.state.epoch,
            self._attempt,
            self.state.cursor.history,
            self.state.version,
            from_phys,
            self._phys,
            NOW_MS,
            "test",
            self._history_phys,
        )
        encoded = encode_segment(meta, own, segment.runs, segment.rows, segment.arena, self._codec)
        if len(group) > 1:
            key = set_key(f"{from_phys:020d}", self.state.epoch, self._attempt)
        else:
            key = data_key(group[0][0], group[0][1].base, self.state.epoch, self._attempt)
        self.store.put_if_absent(key, encoded.body)
        keys.append(key)
        objects[number] = (
            number,
            encoded.rows,
            encoded.size_bytes,
            encoded.tail_bytes,
            encoded.tail_crc32c,
            self.state.epoch,
            encoded.min_phys,
            encoded.end_phys,
            encoded.raw_bytes,
            0,
        )
        runs = segment.runs.astype(RUN_DTYPE)
        runs["queue"] = [_number(queues, queue) for queue, _ in group]
        runs["object"] = number
        self.doctor_runs(runs)
        return runs

    def forget_above(self, phys: int) -> None:
        """What was sent from ``phys`` on was not: the log was cut there."""
        self._phys = phys
        for queue, known in list(self.truth.items()):
            known.rows[:] = [row for row in known.rows if row.phys < phys]
            if not known.rows:
                del self.truth[queue]
                continue
            known.end = known.rows[-1].offset + known.rows[-1].inner_num
            is_lmq = queue.topic.startswith("%LMQ%")
            known.end_byte = 0 if is_lmq else sum(len(row.record) for row in known.rows)

    def rewrite(self, queue: QueueKey) -> CatalogState:
        """Maintenance: the queue's only run moves to a new object."""
        chunk = RunIndex(self.store).runs_of(self.state, queue)
        runs, objects, keys = chunk.runs, chunk.objects, chunk.object_keys
        assert len(runs) == 1
        self._attempt += 1
        key = data_key(queue, int(runs["base_queue_offset"][0]), self.state.epoch, self._attempt)
        self.store.put_if_absent(key, [self.store.get(keys[0])])
        self.keys.append(key)
        objects = objects.copy()
        objects["epoch"] = self.state.epoch
        draft = CommitDraft(
            kind=CommitKind.MAINTENANCE,
            queues=[queue],
            runs=runs,
            removed=removed_of(runs),
            objects=objects,
            object_keys=[key],
            pending_deletions=[keys[0]],
            created_ms=NOW_MS,
        )
        return self.writer.append(draft)

    def cut_runs(self, rows_max: int) -> CatalogState:
        """Maintenance: all runs are cut into parts of at most ``rows_max`` rows of the objects they are in."""
        index = RunIndex(self.store)
        for queue, _ in list(self.state.queues()):
            chunk = index.runs_of(self.state, queue)
            parts = [part for run in chunk.runs for part in self._parts(chunk, run, rows_max)]
            draft = CommitDraft(
                kind=CommitKind.MAINTENANCE,
                queues=[queue],
                runs=np.array(parts, RUN_DTYPE),
                removed=removed_of(chunk.runs),
                objects=chunk.objects,
                object_keys=chunk.object_keys,
                created_ms=NOW_MS,
            )
            self.writer.append(draft)
        return self.state

    def _parts(self, chunk: RunChunk, run: np.void, rows_max: int) -> list[np.void]:
        place = chunk.objects[int(run["object"])]
        reader = SegmentReader.open(
            self.store,
            chunk.object_keys[int(place["key"])],
            size_bytes=int(place["size_bytes"]),
            tail_bytes=int(place["tail_bytes"]),
        )
        count, columns = int(run["rows"]), reader.row_columns(CatalogRun.of(run))
        return [
            cut_run(run, columns, first, min(first + rows_max, count)) for first in range(0, count, rows_max)
        ]

    def expire_first_run(self, queue: QueueKey) -> CatalogState:
        """Maintenance: the queue's oldest run leaves."""
        runs = RunIndex(self.store).runs_of(self.state, queue).runs
        draft = CommitDraft(
            kind=CommitKind.MAINTENANCE, queues=[queue], removed=removed_of(runs[:1]), created_ms=NOW_MS
        )
        return self.writer.append(draft)


def removed_of(runs: Table) -> Table:
    removed = np.zeros(len(runs), REMOVED_DTYPE)
    for name in ("rows", "base_queue_offset", "end_queue_offset", "version"):
        removed[name] = runs[name]
    return removed


def _number(queues: list[QueueKey], queue: QueueKey) -> int:
    if queue not in queues:
        queues.append(queue)
    return queues.index(queue)


def _record(sent: Sent, offset: int, lmq: Sequence[tuple[QueueKey, int]], phys: int) -> tuple[bytes, int]:
    pairs = []
    if sent.tags:
        pairs.append((b"TAGS", sent.tags.encode()))
    if sent.keys:
        pairs.append((b"KEYS", " ".join(sent.keys).encode()))
    if sent.unique_key:
        pairs.append((b"UNIQ_KEY", sent.unique_key.encode()))
    if sent.inner_num > 1:
        pairs += [(b"INNER_BASE", str(offset).encode()), (b"INNER_NUM", str(sent.inner_num).encode())]
    if lmq:
        pairs.append((b"INNER_MULTI_DISPATCH", ",".join(queue.topic for queue, _ in lmq).encode()))
        pairs.append((b"INNER_MULTI_QUEUE_OFFSET", ",".join(str(number) for _, number in lmq).encode()))
    message = Message(
        topic=sent.queue.topic.encode(),
        queue_id=sent.queue.queue_id,
        queue_offset=offset,
        body=sent.body,
        properties=properties(*pairs),
        sys_flag=0x80 if sent.inner_num > 1 else 0,
        store_timestamp=sent.stored_ms,
    )
    return encode(message, phys), java_hash(sent.tags)
