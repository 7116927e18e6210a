"""One topic of an archive as an Arrow table: what is read for given columns and a predicate, batch by batch.

Memory is bounded by a few windows of messages. Rows come in the order of objects, which is that of offsets inside each
of them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Any

import orjson
import pyarrow as pa
from pyarrow.dataset import Dataset

from fetcher.access import ArchiveAccess
from fetcher.io.waiting import run_sync
from rocketmq_tiered.message_table.batches.message_batches import BatchBuilder, arrow_schema
from rocketmq_tiered.message_table.options.columns import COLUMNS, Column, Cost, cost_of
from rocketmq_tiered.message_table.options.predicate import Allowed, Predicate, stored_between
from rocketmq_tiered.message_table.options.source_options import SourceOptions
from rocketmq_tiered.message_table.plan.archive_plan import ArchivePlanner, wanted_queues
from rocketmq_tiered.message_table.plan.partitions import cut
from rocketmq_tiered.message_table.scan.archive_scan import ArchiveScan, archive_chunks
from rocketmq_tiered.message_table.scan.object_rows import (
    CorruptPlace,
    catalog_chunks,
    needs_catalog_only,
    without_catalog_rows,
)
from rocketmq_tiered.sql.pushed_filter import read_filter
from tiered.catalog.state import CatalogState
from tiered.errors import CorruptionError, TieredError, UsageError
from tiered.model.queue import QueueKey
from tiered.model.tables import QUEUE_BATCH, QUEUE_LMQ
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
"""Name in SQL -> name in the message table, but ``json``."""
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
    """The named columns in this order; all without names. Raises UsageError for an unknown or repeated one."""
    chosen = list(SCHEMA.names if names is None else names)
    for number, name in enumerate(chosen):
        if name not in SCHEMA.names:
            raise UsageError(f"no column {name}", hint=f"columns: {', '.join(SCHEMA.names)}")
        if name in chosen[:number]:
            raise UsageError(f"column {name} is named twice")
    return chosen


KEYS_MAX = 64
"""Keys of a condition that are looked up, one after the other."""
ONE_PART = 1 << 62
"""Bytes of a partition: one thread reads, and others fetch and decode for it."""


class Topic:
    """One topic, in the newest generation of its queues, at the archive's version when a read begins."""

    schema = SCHEMA
    """All columns: docs/SQL.md."""

    def __init__(self, access: ArchiveAccess, name: str) -> None:
        self._access = access
        self.name = name
        self._options = SourceOptions(access.title, topics=(name,))

    def __repr__(self) -> str:
        return f"Topic({self.name!r} of {self._access.title})"

    def to_arrow(
        self,
        *,
        since: TimePoint | None = None,
        until: TimePoint | None = None,
        columns: Sequence[str] | None = None,
        queues: Sequence[int] | None = None,
    ) -> pa.RecordBatchReader:
        """Messages stored in [since, until) of ``queues``, with ``columns`` (default: all): what no column needs is not
        read. Raises UsageError for an unknown column, and while reading what the object store raises."""
        since_ms, until_ms = (None if time is None else milliseconds(time) for time in (since, until))
        if since_ms is not None and until_ms is not None and since_ms >= until_ms:
            raise UsageError("since is not before until", hint="until is exclusive")
        predicate = stored_between(since_ms, until_ms)
        if queues is not None:
            predicate = predicate.also(Predicate({"queueId": Allowed.of(queues)}))
        names = checked(columns)
        schema = pa.schema([SCHEMA.field(name) for name in names])
        return pa.RecordBatchReader.from_batches(schema, self.batches(names, predicate))

    def batches(self, names: Sequence[str], predicate: Predicate) -> Iterator[pa.RecordBatch]:
        """Rows that match ``predicate``, except for tags, which are compared by hash code."""
        needed = dict.fromkeys(TABLE_NAMES["text" if name == JSON else name] for name in names)
        columns = [COLUMNS[name] for name in needed]
        for batch in self._table_batches(columns, predicate):
            arrays = [_sql_array(batch, name) for name in names]
            yield pa.RecordBatch.from_arrays(arrays, schema=pa.schema([SCHEMA.field(name) for name in names]))

    def _table_batches(self, columns: list[Column], predicate: Predicate) -> Iterator[pa.RecordBatch]:
        access, options = self._access, self._options
        access.require_open()
        state, with_records = access.state, cost_of(columns) > Cost.FOOTER
        queues = wanted_queues(state, options)
        predicate = predicate.also(self._places(state, queues, predicate.keys or ()))
        slices = ArchivePlanner(access.store, (access.cluster, access.broker)).slices(
            state, [queues], predicate, is_header_only=not with_records
        )
        builder = BatchBuilder(
            columns, arrow_schema(columns), batch_bytes=options.batch_bytes, on_corrupt=_refuse
        )
        scan = ArchiveScan(
            access.store,
            predicate,
            with_records=with_records,
            window_bytes=options.window_bytes,
            on_corrupt=_refuse,
        )
        for part in cut(slices, ONE_PART):
            rest = part
            if needs_catalog_only(builder.cost, predicate):
                rest = without_catalog_rows(part)
                yield from (batch for chunk in catalog_chunks(part) for batch in builder.batches(chunk))
            for chunk in archive_chunks(scan, rest):
                yield from builder.batches(chunk)

    def _places(self, state: CatalogState, queues: Iterable[QueueKey], keys: Collection[str]) -> Predicate:
        """Where the key index has messages with ``keys``, if it is few: LMQs and batches have no keys in it."""
        if not 0 < len(keys) <= KEYS_MAX or any(
            row is None or row["flags"] & (QUEUE_LMQ | QUEUE_BATCH) for row in map(state.queue, queues)
        ):
            return Predicate()
        found: list[tuple[int, int]] = []
        for key in keys:
            places = run_sync(self._access.while_open(self._access.places_of_key(state, self.name, key)))
            if places is None:
                return Predicate()
            found += places
        ids, offsets = (Allowed.of(place[field] for place in found) for field in (0, 1))
        return Predicate({"queueId": ids, "queueOffset": offsets})


def _refuse(place: CorruptPlace) -> None:
    raise CorruptionError(place.message, hint="tiered verify ARCHIVE_URL --full lists the damage")


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
    """A topic as DuckDB reads it: each scan asks for its columns and rows. It may be scanned several times at once."""

    schema = SCHEMA

    def __init__(self, topic: Topic, on_error: Callable[[TieredError], None]) -> None:
        """``on_error`` gets what a scan raised: DuckDB keeps only its text."""
        self._topic, self._on_error = topic, on_error

    def scanner(self, columns: list[str] | None = None, filter: Any = None, **options: Any) -> TopicScanner:
        """Called by DuckDB at the start of each scan."""
        return TopicScanner(self._topic, checked(columns), filter, self._on_error)


class TopicScanner:
    """One scan: the rows for which ``filter``, an Arrow expression, is true."""

    def __init__(
        self, topic: Topic, columns: list[str], filter: Any, on_error: Callable[[TieredError], None]
    ) -> None:
        self._topic, self._columns, self._filter, self._on_error = topic, columns, filter, on_error
        self.projected_schema = pa.schema([SCHEMA.field(name) for name in columns])

    def to_reader(self) -> pa.RecordBatchReader:
        """The rows, as DuckDB asks for them."""
        return pa.RecordBatchReader.from_batches(self.projected_schema, self._batches())

    def _batches(self) -> Iterator[pa.RecordBatch]:
        condition, columns = self._filter, self._columns
        predicate, fields = (Predicate(), set()) if condition is None else read_filter(condition, TABLE_NAMES)
        needed = columns + [
            name for name in SCHEMA.names if name not in columns and (fields is None or name in fields)
        ]
        try:
            for batch in self._topic.batches(needed, predicate):
                rows = batch if condition is None else batch.filter(condition)
                yield rows.select(columns)
        except TieredError as error:
            self._on_error(error)
            raise
