"""One topic of an archive as an Arrow table: what is read for given columns and a predicate, batch by batch.

Memory is bounded by a few windows of messages. Rows come in the order of objects, which is that of offsets inside each
of them.
"""

import operator
import pickle  # nosec B403 - only written
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial, reduce
from types import SimpleNamespace
from typing import Any

import orjson
import pyarrow as pa
from pyarrow.dataset import Dataset

from fetcher.access import ArchiveAccess
from fetcher.io.waiting import run_sync
from rocketmq_tiered.message_table.batches.message_batches import (
    BatchBuilder,
    Damage,
    arrow_schema,
    exploded,
)
from rocketmq_tiered.message_table.options.columns import COLUMNS, Cost
from rocketmq_tiered.message_table.options.predicate import Allowed, Predicate, stored_between
from rocketmq_tiered.message_table.options.source_options import SourceOptions
from rocketmq_tiered.message_table.plan.archive_plan import ArchivePlanner, wanted_queues
from rocketmq_tiered.message_table.plan.partitions import Slices, cut
from rocketmq_tiered.message_table.scan.archive_scan import ArchiveScan, archive_chunks
from rocketmq_tiered.message_table.scan.object_rows import (
    RowChunk,
    catalog_chunks,
)
from rocketmq_tiered.sql.pushed_filter import read_filter
from tiered.catalog.state import CatalogState
from tiered.errors import TieredError, UsageError
from tiered.model.queue import QueueKey
from tiered.model.tables import QUEUE_BATCH, QUEUE_LMQ, RunKind, picked
from tiered.timestamps import TimePoint, milliseconds

_SHOWN = (
    "queueId",
    "queueOffset",
    "storeTime",
    "bornTime",
    "tags",
    "keys",
    "uniqKey",
    "properties",
    "text",
    "body",
    "topic",
    "generation",
    "brokerName",
    "cluster",
    "storeSize",
    "commitLogOffset",
    "storeTimestamp",
    "bornTimestamp",
    "bornHost",
    "storeHost",
    "sysFlag",
    "flag",
    "reconsumeTimes",
    "ptOffset",
    "offsetMsgId",
    "tagsCode",
    "innerNum",
)
JSON = "json"
"""The text as a JSON value; null where it is none."""


def snake_case(name: str) -> str:
    """``queueOffset`` -> ``queue_offset``."""
    return re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name).lower()


TABLE_NAMES = {snake_case(name): name for name in _SHOWN}
"""Name in SQL -> name in the message table, for all columns except ``json``."""
SCHEMA = pa.schema(
    [
        *(
            field.with_name(snake_case(field.name))
            for field in arrow_schema([COLUMNS[name] for name in _SHOWN])
        ),
        pa.field(JSON, pa.json_()),
    ]
)


def checked(names: Sequence[str] | None) -> list[str]:
    """The columns ``names`` in this order; None means all. Raises UsageError for an unknown or repeated one."""
    chosen = list(SCHEMA.names if names is None else names)
    for number, name in enumerate(chosen):
        if name not in SCHEMA.names:
            raise UsageError(f"no column {name}", hint=f"columns: {', '.join(SCHEMA.names)}")
        if name in chosen[:number]:
            raise UsageError(f"column {name} is named twice")
    return chosen


KEYS_MAX = 64
"""Keys of a condition, each in each of its topics, that are looked up, one after the other."""
KEPT_BYTES = 16 << 20
"""At most so many bytes that a scan of a topic's end has read are kept: the rows of a statement are first counted, and
then read by the statement itself."""
ONE_PART = 1 << 62
"""Bytes of a partition: one thread reads, and others fetch and decode for it."""
_PLANNED = frozenset({"queueId", "generation"})
_OF_BATCHES = ("queueId", "generation", "storeTimestamp", "commitLogOffset")
"""What the messages of an inner batch have in common."""
Report = Callable[[int, int, str], None]
"""(messages read, messages to read, name of the scan that reads them)."""


class Topic:
    """One topic, or all, in the newest generation of each queue, at the archive's version when a read begins."""

    schema = SCHEMA
    """All columns: docs/SQL.md."""

    def __init__(self, access: ArchiveAccess, name: str, options: SourceOptions | None = None) -> None:
        """``name``: empty stands for all topics. ``options``: only mode and explodeBatches are used."""
        self._access = access
        self.name = name
        topics = (name,) if name else ()
        self._options = replace(options or SourceOptions(access.title), topics=topics)

    def __repr__(self) -> str:
        return f"Topic({self.name!r} of {self._access.title})"

    def __arrow_c_stream__(self, requested_schema: object = None) -> object:
        """All messages, for pyarrow, polars, pandas, DuckDB and what else takes Arrow's C stream."""
        return self.to_arrow().__arrow_c_stream__(requested_schema)

    def to_arrow(
        self,
        *,
        since: TimePoint | None = None,
        until: TimePoint | None = None,
        columns: Sequence[str] | None = None,
        queues: Sequence[int] | None = None,
        filter: Any = None,
    ) -> pa.RecordBatchReader:
        """Messages stored in [since, until) of ``queues`` for which ``filter`` is true, an expression of Arrow, with
        ``columns`` (default: all): what no column needs is not read. Raises UsageError for an unknown column, and while
        reading what the object store raises."""
        since_ms, until_ms = (None if time is None else milliseconds(time) for time in (since, until))
        if since_ms is not None and until_ms is not None and since_ms >= until_ms:
            raise UsageError("since is not before until", hint="until is exclusive")
        predicate = stored_between(since_ms, until_ms)
        if queues is not None:
            predicate = predicate.also(Predicate({"queueId": Allowed.of(queues)}))
        names = checked(columns)
        schema = pa.schema([SCHEMA.field(name) for name in names])
        return pa.RecordBatchReader.from_batches(schema, self.batches(names, predicate, filter))

    def batches(
        self,
        names: Sequence[str],
        predicate: Predicate,
        condition: Any = None,
        report: Report = lambda done, total, scan: None,
    ) -> Iterator[pa.RecordBatch]:
        """The columns ``names`` of the rows that match ``predicate``, whose tags are compared by hash code only, and
        ``condition``, an expression of Arrow."""
        pushed, fields = (Predicate(), set()) if condition is None else read_filter(condition, TABLE_NAMES)
        read = [
            *names,
            *(name for name in checked(None if fields is None else sorted(fields)) if name not in names),
        ]
        needed = dict.fromkeys(TABLE_NAMES["text" if name == JSON else name] for name in read)
        options = self._options
        columns = [COLUMNS[name] for name in needed]
        damage = Damage(options.mode, wants_rows=False)
        builder = BatchBuilder(
            columns, arrow_schema(columns), batch_bytes=options.batch_bytes, on_corrupt=damage
        )

        predicate = predicate.also(pushed)
        with_records = options.cost_of(columns) > Cost.FOOTER
        if options.reads_records:
            numbers = {name: one for name, one in predicate.numbers.items() if name in _OF_BATCHES}
            predicate = Predicate(numbers, predicate.topics)
        scan = ArchiveScan(
            self._access.store,
            predicate,
            with_records=with_records,
            window_bytes=options.window_bytes,
            on_corrupt=damage,
        )
        slices = self._slices(predicate, with_records=with_records)
        schema = pa.schema([SCHEMA.field(name) for name in read])
        done, total = 0, sum(int((part.table["end"] - part.table["begin"]).sum()) for part in slices)
        # Without a thread of its own: the scan reads and decodes ahead anyway, and another thread makes it slower.
        for chunk in _chunks(scan, slices, options.cost_of(columns)):
            done += len(chunk)
            report(done, max(done, total), f"{self.name} {id(scan)}")
            rows = exploded(chunk) if options.explode_batches else chunk
            for batch in builder.batches(rows):
                one = pa.RecordBatch.from_arrays([_sql_array(batch, name) for name in read], schema=schema)
                yield one if condition is None else one.filter(condition).select(names)

    def _slices(self, predicate: Predicate, *, with_records: bool) -> list[Slices]:
        """The slices of the topic's queues at the archive's present version that may match the predicate."""
        access = self._access
        access.require_open()
        state = access.state
        queues = wanted_queues(state, self._options)
        predicate = predicate.also(self._places(state, queues, predicate))
        planner = ArchivePlanner(access.store, (access.cluster, access.broker))
        return planner.slices(state, [queues], predicate, is_header_only=not with_records)

    def _places(self, state: CatalogState, queues: Iterable[QueueKey], predicate: Predicate) -> Predicate:
        """Where the key index has messages with the keys of ``predicate``, if they are few. LMQs and batches have no
        keys in it."""
        topics = sorted({queue.topic for queue in queues if predicate.admits_topic(queue.topic)})
        wanted = [(topic, key) for topic in topics for key in predicate.keys or ()]
        if not 0 < len(wanted) <= KEYS_MAX or any(
            row is None or row["flags"] & (QUEUE_LMQ | QUEUE_BATCH) for row in map(state.queue, queues)
        ):
            return Predicate()
        found: list[tuple[int, int]] = []
        for topic, key in wanted:
            places = run_sync(self._access.while_open(self._access.places_of_key(state, topic, key)))
            if places is None:
                return Predicate()
            found += places
        ids, offsets = (Allowed.of(place[field] for place in found) for field in (0, 1))
        return Predicate({"queueId": ids, "queueOffset": offsets})


def _chunks(scan: ArchiveScan, parts: list[Slices], cost: Cost) -> Iterator[RowChunk]:
    """The rows of ``parts``. Those of plain runs come without reading objects if only columns of the catalog are
    wanted, and no condition but those that the plan has applied."""
    predicate = scan.predicate
    if cost <= Cost.CATALOG and predicate.tags is None and predicate.numbers.keys() <= _PLANNED:
        for number, part in enumerate(parts):
            is_plain = part.table["kind"] == RunKind.PLAIN
            yield from catalog_chunks(replace(part, table=picked(part.table, is_plain)))
            parts[number] = replace(part, table=picked(part.table, ~is_plain))
    for part in cut(parts, ONE_PART):
        yield from archive_chunks(scan, part)


def _sql_array(batch: pa.RecordBatch, name: str) -> pa.Array:
    if name != JSON:
        return batch.column(TABLE_NAMES[name])
    texts = batch.column("text").to_pylist()
    return pa.ExtensionArray.from_storage(pa.json_(), pa.array(map(_json, texts), pa.string()))


def _json(text: str | None) -> str | None:
    try:
        orjson.loads(text or "")
    except orjson.JSONDecodeError:
        return None
    return text


class TopicDataset(Dataset):  # type: ignore[misc]
    """A topic as DuckDB reads it: each scan has its own columns and rows. It may be scanned several times at once."""

    schema = SCHEMA

    def __init__(
        self, topic: Topic, on_error: Callable[[TieredError], None], report: Report, within: Any = None
    ) -> None:
        """``on_error`` gets what a scan raised: DuckDB keeps only its text. ``within``, an expression: only rows for
        which it is true; then a scan of the same columns and rows as the last one gets what that one read, once."""
        self._topic, self._on_error, self._report, self._within = topic, on_error, report, within
        self._kept: tuple[bytes, list[pa.RecordBatch]] | None = None

    def scanner(
        self, columns: list[str] | None = None, filter: Any = None, **options: Any
    ) -> SimpleNamespace:
        """Called by DuckDB at the start of each scan. Returns the part of Arrow's scanner that DuckDB uses."""
        names, given = checked(columns), [one for one in (self._within, filter) if one is not None]
        condition = reduce(operator.and_, given) if given else None
        request, kept, self._kept = pickle.dumps((names, filter)), self._kept, None
        if kept is not None and kept[0] == request:
            batches = iter(kept[1])
        else:
            batches = self._noted(self._topic.batches(names, Predicate(), condition, self._report), request)
        schema = pa.schema([SCHEMA.field(name) for name in names])
        read = partial(pa.RecordBatchReader.from_batches, schema, batches)
        return SimpleNamespace(projected_schema=schema, to_reader=read)

    def _noted(self, batches: Iterator[pa.RecordBatch], request: bytes) -> Iterator[pa.RecordBatch]:
        """The ``batches``, which are kept for the next scan if they are few; ``request``: what this scan reads."""
        kept, size_bytes = list[pa.RecordBatch](), 0
        try:
            for batch in batches:
                size_bytes += batch.nbytes
                kept = [*kept, batch] if self._within is not None and size_bytes <= KEPT_BYTES else []
                yield batch
        except TieredError as error:
            self._on_error(error)
            raise
        if kept:
            self._kept = request, kept
