"""One topic of an archive as an Arrow table: what is read for given columns and a predicate, batch by batch.

Memory is bounded by a few windows of messages. Rows come in the order of objects, which is that of offsets inside each
of them.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime, timedelta
from itertools import combinations
from typing import Any

import orjson
import pyarrow as pa

from fetcher.access import ArchiveAccess
from rocketmq_tiered.message_table.batches.message_batches import BatchBuilder, arrow_schema
from rocketmq_tiered.message_table.options.columns import COLUMNS, Column, Cost, cost_of
from rocketmq_tiered.message_table.options.predicate import (
    NUMBER_COLUMNS,
    Allowed,
    Predicate,
    has_code,
    stored_between,
)
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
from tiered.errors import CorruptionError, TieredError, UsageError
from tiered.timestamps import TimePoint, milliseconds

_COMPARISON = re.compile(r"\((\w+) (==|>=|<=|>|<) (.+)\)", re.DOTALL)
_MEMBER = re.compile(
    r"if_else\(is_valid\((\w+)\), is_in\(\1, \{value_set=\w+:\[\n(.*)\n\], null_matching_behavior=MATCH\}\), "
    r"null\[bool\]\)",
    re.DOTALL,
)
_BETWEEN_TEXTS = '",\n  "'
_TIME = "storeTimestamp"


def predicate_of(filter_text: str) -> Predicate:
    """The predicate of an expression's text. It admits every row that the expression does."""
    predicate = Predicate()
    for condition in _conjuncts(filter_text):
        found = _condition(condition)
        if found is not None:
            predicate = predicate.also(found)
    return predicate


def _conjuncts(text: str) -> Iterator[str]:
    """``(a and (b and c))`` -> a, b, c."""
    parts = _operands(text[1:-1]) if _is_wrapped(text) else [text]
    if len(parts) == 1:
        yield text
    for part in parts if len(parts) > 1 else ():
        yield from _conjuncts(part)


def _is_wrapped(text: str) -> bool:
    return (
        text.startswith("(") and next((at for at, depth in _depths(text) if depth == 0), -1) == len(text) - 1
    )


def _operands(text: str) -> list[str]:
    """The operands of ``and`` outside of parentheses and quotes."""
    cuts = [at for at, depth in _depths(text) if depth == 0 and text.startswith(" and ", at)]
    begins, ends = [0, *(cut + len(" and ") for cut in cuts)], [*cuts, len(text)]
    return [text[begin:end] for begin, end in zip(begins, ends, strict=True)]


def _depths(text: str) -> Iterator[tuple[int, int]]:
    """(place, open parentheses after it) of each character outside of quotes."""
    depth, at = 0, 0
    while at < len(text):
        if text[at] == '"':
            at += 1
            while at < len(text) and text[at] != '"':
                at += 2 if text[at] == "\\" else 1
        else:
            depth += {"(": 1, ")": -1}.get(text[at], 0)
            yield at, depth
        at += 1


def _condition(text: str) -> Predicate | None:
    if (compared := _COMPARISON.fullmatch(text)) is not None:
        name, operator, literal = compared.groups()
        return _comparison(TABLE_NAMES.get(name, ""), operator, literal)
    if (member := _MEMBER.fullmatch(text)) is not None:
        return _membership(TABLE_NAMES.get(member[1], ""), member[2])
    return None


def _comparison(name: str, operator: str, literal: str) -> Predicate | None:
    if name == "tags":
        plain = literal[1:-1]
        is_plain = operator == "==" and literal[:1] == '"' and "\\" not in plain and has_code(plain)
        return Predicate(tags=frozenset({plain})) if is_plain else None
    value = _milliseconds(literal) if name == "storeTime" else _integer(literal)
    if value is None or name not in ("storeTime", *NUMBER_COLUMNS):
        return None
    # Rows have whole milliseconds; a bound may lie inside one.
    step = 0 if name == "storeTime" else 1
    allowed = {
        "==": Allowed(value, value),
        ">=": Allowed(low=value),
        "<=": Allowed(high=value),
        ">": Allowed(low=value + step),
        "<": Allowed(high=value - step),
    }[operator]
    return Predicate({_TIME if name == "storeTime" else name: allowed})


def _membership(name: str, listed: str) -> Predicate | None:
    lines = [line.strip() for line in listed.split(",\n")]
    if name in NUMBER_COLUMNS:
        values = [_integer(line) for line in lines]
        known = [value for value in values if value is not None]
        return Predicate({name: Allowed(values=tuple(sorted(known)))}) if len(known) == len(lines) else None
    texts = listed.strip().removeprefix('"').removesuffix('"').split(_BETWEEN_TEXTS)
    if name != "tags" or len(texts) != len(lines) or not listed.strip().startswith('"'):
        return None  # a long list is printed in part
    # Arrow does not escape these texts: one may contain what is between two.
    cuts = combinations(range(len(texts) + 1), 2)
    joined = frozenset(_BETWEEN_TEXTS.join(texts[begin:end]) for begin, end in cuts)
    return Predicate(tags=joined) if all(map(has_code, joined)) else None


def _integer(text: str) -> int | None:
    return int(text) if re.fullmatch(r"-?\d{1,18}", text) else None


def _milliseconds(text: str) -> int | None:
    try:
        time = datetime.fromisoformat(text)
    except ValueError:
        return None
    return (
        None if time.tzinfo is None else (time - datetime.fromtimestamp(0, UTC)) // timedelta(milliseconds=1)
    )


class _NoPandas:
    """Hides pandas from the import below; ``.df()`` loads it when it is wanted."""

    def find_spec(self, name: str, path: object = None, target: object = None) -> None:
        """Called by the import system."""
        if name == "pandas":
            raise ModuleNotFoundError(name, name=name)


_hides = _NoPandas()
sys.meta_path.insert(0, _hides)
try:
    from pyarrow.dataset import Dataset
finally:
    sys.meta_path.remove(_hides)

__all__ = ["Dataset"]


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
            predicate = predicate.also(Predicate({"queueId": Allowed(values=tuple(sorted(set(queues))))}))
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
        slices = ArchivePlanner(access.store, (access.cluster, access.broker)).slices(
            state, [wanted_queues(state, options)], predicate, is_header_only=not with_records
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
        text = "" if condition is None else str(condition)
        # A name inside a quoted value only adds a column.
        needed = columns + [name for name in SCHEMA.names if name in text and name not in columns]
        try:
            for batch in self._topic.batches(needed, predicate_of(text)):
                rows = batch if condition is None else batch.filter(condition)
                yield rows.select(columns)
        except TieredError as error:
            self._on_error(error)
            raise
