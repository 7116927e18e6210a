"""Options of the data source: names, defaults, limits, parsing.

Credentials in options travel to the workers and are never shown.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from pathlib import Path

from rocketmq_tiered.message_table.options.columns import (
    CHANGE_TYPE,
    DEFAULT_NAMES,
    Column,
    Cost,
    chosen,
    cost_of,
)
from rocketmq_tiered.message_table.options.option_texts import OptionTexts
from rocketmq_tiered.message_table.options.predicate import Predicate, stored_between
from tiered.errors import UsageError
from tiered.object_store.store_options import S3Credentials, StoreOptions
from tiered.settings.sections import ObjectStoreSettings

SOURCE_NAME = "rocketmq-tiered"
MIB = 1 << 20
WINDOW_BYTES_MIN = 8 * MIB
BATCH_BYTES_MAX = 1024 * MIB
"""An Arrow column of bytes or text holds less than 2 GiB, and a body larger than the limit still has to fit."""


class Mode(Enum):
    """How damaged bytes are handled."""

    FAILFAST = "FAILFAST"
    """The job fails and names object and range."""
    PERMISSIVE = "PERMISSIVE"
    """They are skipped and logged, and reported as rows if the column _corrupt_record is read."""


class Source(Enum):
    """Kind of the path."""

    ARCHIVE = "archive"
    STORE = "store"
    """A broker's store directory."""


class View(Enum):
    """Which messages of a queue are rows."""

    MESSAGES = "messages"
    LATEST = "latest"
    """The last message of each key; of a key whose last message is a tombstone (empty body) none."""
    CHANGES = "changes"
    """The last message of each key, tombstones as well, with the column _change_type."""


class Starting(Enum):
    """Where a stream starts."""

    EARLIEST = "earliest"
    LATEST = "latest"
    TIMESTAMP = "timestamp"
    """At the first message stored at or after ``startingTimestamp``."""


NEWEST, OLDEST = -1, -2
"""Offsets in startingOffsets and endingOffsets, as in the Kafka source: the end and the first message."""

QueueOffsets = Mapping[tuple[str, int], int]
"""(topic, queue id) -> offset."""


@dataclass(frozen=True)
class SourceOptions:
    """Parsed options. Times are ms since the epoch."""

    path: str
    source: Source = Source.ARCHIVE
    topics: tuple[str, ...] = ()
    """Names or shell patterns; empty means all."""
    more_paths: tuple[str, ...] = ()
    topic_regex: str = ""
    """A regular expression that whole names match; empty means all."""
    view: View = View.MESSAGES
    explode_batches: bool = False
    """One row for each message of an inner batch."""
    starts: QueueOffsets = field(default_factory=dict, hash=False)
    ends: QueueOffsets = field(default_factory=dict, hash=False)
    """Of some queues only offsets from ``starts`` on and below ``ends``."""
    cluster: str | None = None
    broker: str | None = None
    generation: int | None = None
    """Generation of recreated topics; None means the one shown by default."""
    all_generations: bool = False
    with_superseded: bool = True
    """Include generations that ended when the log was replaced. Set by jobs; not an option."""
    with_deleted: bool = False
    """Of a store directory, include records of deleted topics. Set by jobs; not an option."""
    version: int | None = None
    """Catalog version to read; None means the newest when the DataFrame is created."""
    version_ms: int | None = None
    """Read the last catalog version committed at or before this time."""
    since_ms: int | None = None
    until_ms: int | None = None
    """Only messages stored in [since_ms, until_ms) are read."""
    columns: tuple[str, ...] = ()
    push_filters: bool = False
    """Accept filters from Spark. Only safe for a DataFrame that is used once: Spark 4.2 applies the filters pushed for
    one scan to every other scan of the same DataFrame."""
    mode: Mode = Mode.FAILFAST
    partition_bytes: int = 64 * MIB
    """Approximate message bytes of a partition, before compression."""
    batch_bytes: int = 2 * MIB
    """Approximate message bytes of an Arrow batch; a single larger message is still read."""
    broker_conf: str | None = None
    """broker.conf of a store directory whose commitlog is elsewhere."""
    starting: Starting = Starting.EARLIEST
    starting_timestamp: int | None = None
    max_rows_per_trigger: int | None = None
    max_bytes_per_trigger: int | None = None
    fail_on_data_loss: bool = True
    endpoint: str = ""
    region: str = ""
    addressing_style: str = "auto"
    credentials: S3Credentials | None = field(default=None, repr=False)

    def wants(self, topic: str) -> bool:
        """Whether messages of ``topic`` are read."""
        if self.topic_regex and not re.fullmatch(self.topic_regex, topic):
            return False
        return not self.topics or any(fnmatch.fnmatchcase(topic, pattern) for pattern in self.topics)

    def each_path(self) -> list[SourceOptions]:
        """The same options for each of the paths."""
        return [replace(self, path=path, more_paths=()) for path in (self.path, *self.more_paths)]

    def wants_archive(self, cluster: str, broker: str) -> bool:
        """Whether the archive of these names is read."""
        return self.cluster in (None, cluster) and self.broker in (None, broker)

    def refuse_stream_options(self) -> None:
        """Raises UsageError for options that apply to streams only."""
        if self.starting is not Starting.EARLIEST:
            raise UsageError(
                f"startingOffsets={self.starting.value} applies to streams only",
                hint="since and until select a time range",
            )
        if self.max_rows_per_trigger is not None or self.max_bytes_per_trigger is not None:
            raise UsageError("maxRowsPerTrigger and maxBytesPerTrigger apply to streams only")

    @property
    def times(self) -> Predicate:
        """The predicate of ``since_ms`` and ``until_ms``."""
        return stored_between(self.since_ms, self.until_ms)

    @property
    def chosen_columns(self) -> list[Column]:
        """The columns to read, by default those of the view."""
        extra = (CHANGE_TYPE,) if self.view is View.CHANGES else ()
        return chosen(self.columns or (*DEFAULT_NAMES, *extra))

    def cost_of(self, columns: Sequence[Column]) -> Cost:
        """What must be read for ``columns``."""
        return max(Cost.RECORD if self.reads_records else Cost.CATALOG, cost_of(columns))

    @property
    def reads_records(self) -> bool:
        """Whether the choice of rows requires the records."""
        return self.explode_batches or self.view is not View.MESSAGES

    @property
    def window_bytes(self) -> int:
        """Approximate message bytes of one request, before compression."""
        return max(self.batch_bytes, WINDOW_BYTES_MIN)

    def store_options(self) -> StoreOptions:
        """Options that open the object store."""
        settings = ObjectStoreSettings(
            endpoint_url=self.endpoint, region=self.region, addressing_style=self.addressing_style
        )
        return StoreOptions(settings, self.credentials)


_NAMES = (
    "path", "paths", "source", "topic", "subscribePattern", "cluster", "broker", "generation", "version",
    "timestampAsOf", "since", "until", "columns", "view", "explodeBatches", "pushFilters", "mode", "partitionBytes",
    "batchBytes", "brokerConf", "startingOffsets", "endingOffsets", "startingTimestamp", "maxRowsPerTrigger",
    "maxBytesPerTrigger", "failOnDataLoss", "endpoint", "region", "addressingStyle", "accessKey", "secretKey",
    "sessionToken",
)  # fmt: skip
_ALIASES = {
    "subscribe": "topic", "maxOffsetsPerTrigger": "maxRowsPerTrigger", "versionAsOf": "version",
}  # fmt: skip
"""Names of the Kafka source and of Delta."""
OPTION_NAMES = {name.lower(): name for name in (*_NAMES, *_ALIASES)}
"""Lower case -> name: Spark's options are case-insensitive."""
_OF_ARCHIVES = ("generation", "version", "timestampAsOf", "startingOffsets", "endingOffsets", "view")
_EXCLUSIVE = (
    ("maxRowsPerTrigger", "maxBytesPerTrigger"), ("version", "timestampAsOf"), ("topic", "subscribePattern"),
)  # fmt: skip


def parse_options(given: Mapping[str, str]) -> SourceOptions:
    """Parse the options that Spark passes. Raises UsageError."""
    options = _named(given)
    text = OptionTexts(options)
    first, *others = _paths(options, text)
    source = text.choice("source", Source, Source.ARCHIVE)
    for name in _OF_ARCHIVES if source is Source.STORE else ("brokerConf",):
        if name.lower() in options:
            other = Source.ARCHIVE if source is Source.STORE else Source.STORE
            raise UsageError(f"{name} requires source={other.value}, not source={source.value}")
    starting, timestamp, starts = _starting(options, text)
    since, until = text.instant("since"), text.instant("until")
    if since is not None and until is not None and since >= until:
        raise UsageError("since is not before until", hint="until is exclusive")
    every = options.get("generation", "").lower() == "all"
    return SourceOptions(
        path=first,
        more_paths=tuple(others),
        source=source,
        topics=text.names("topic"),
        topic_regex=text.regex("subscribePattern"),
        view=text.choice("view", View, View.MESSAGES),
        explode_batches=text.flag("explodeBatches", default=False),
        starts=starts,
        ends=_offsets("endingOffsets", "latest", options, text),
        cluster=options.get("cluster"),
        broker=options.get("broker"),
        generation=None if every else text.number("generation", 0),
        all_generations=every,
        version=text.number("version", 1),
        version_ms=text.instant("timestampAsOf"),
        since_ms=since,
        until_ms=until,
        columns=text.names("columns"),
        push_filters=text.flag("pushFilters", default=False),
        mode=text.choice("mode", Mode, Mode.FAILFAST),
        partition_bytes=text.number("partitionBytes", MIB) or SourceOptions.partition_bytes,
        batch_bytes=text.number("batchBytes", 64 << 10, BATCH_BYTES_MAX) or SourceOptions.batch_bytes,
        broker_conf=options.get("brokerconf"),
        starting=starting,
        starting_timestamp=timestamp,
        max_rows_per_trigger=text.number("maxRowsPerTrigger", 1),
        max_bytes_per_trigger=text.number("maxBytesPerTrigger", 1),
        fail_on_data_loss=text.flag("failOnDataLoss", default=True),
        endpoint=options.get("endpoint", ""),
        region=options.get("region", ""),
        addressing_style=options.get("addressingstyle", "auto"),
        credentials=_credentials(options),
    )


def _named(given: Mapping[str, str]) -> dict[str, str]:
    """Values by lower-case name, aliases replaced. Raises UsageError for unknown names and contradictions."""
    options = {name.lower(): value for name, value in given.items()}
    if "location" in options:
        raise UsageError(
            "CREATE TABLE is impossible: Spark 4.2 has no tables of Python data sources",
            hint=f"use CREATE TEMPORARY VIEW … USING `{SOURCE_NAME}` OPTIONS (path '…', topic '…')",
        )
    unknown = sorted(set(options) - set(OPTION_NAMES))
    if unknown:
        raise UsageError(
            f"unknown option {unknown[0]}", hint=f"options: {', '.join((*_NAMES, *sorted(_ALIASES)))}"
        )
    for alias, name in _ALIASES.items():
        if alias.lower() in options:
            if name.lower() in options:
                raise UsageError(f"{alias} and {name} are the same option", hint="use one of them")
            options[name.lower()] = options.pop(alias.lower())
    for one, other in _EXCLUSIVE:
        if one.lower() in options and other.lower() in options:
            raise UsageError(f"{one} and {other} are mutually exclusive")
    return options


def _paths(options: Mapping[str, str], text: OptionTexts) -> list[str]:
    """The paths as URLs: ``s3a://`` is ``s3://``, a bare path a local directory."""
    paths = [options.get("path", "").strip()]
    paths += text.document("paths", list, "use load(['s3://a/b', …])") or []  # as Spark passes load([…])
    found = [_url(path, options.get("source", "")) for path in paths if path]
    if not found:
        raise UsageError("path is missing", hint="use load('s3://bucket/prefix') or option('path', …)")
    return list(dict.fromkeys(found))


def _url(path: str, source: str) -> str:
    scheme, separator, rest = path.partition("://")
    if separator:
        return f"s3://{rest}" if scheme in ("s3a", "s3n") else path
    if source.lower() == Source.STORE.value:
        return str(Path(path.removeprefix("file:")).absolute())
    return Path(path.removeprefix("file:")).absolute().as_uri()


_OFFSETS_HINT = (
    'use earliest, latest or JSON such as {"orders": {"0": 4711, "1": -2}}; -2 is the first, -1 the end'
)


def _starting(options: Mapping[str, str], text: OptionTexts) -> tuple[Starting, int | None, QueueOffsets]:
    """Where a stream starts: kind, time, offsets."""
    timestamp = text.instant("startingTimestamp")
    if options.get("startingoffsets", "").lstrip().startswith("{"):
        kind, starts = Starting.EARLIEST, _offsets("startingOffsets", "earliest", options, text)
    else:
        default = Starting.EARLIEST if timestamp is None else Starting.TIMESTAMP
        kind, starts = text.choice("startingOffsets", Starting, default), {}
    if (kind is Starting.TIMESTAMP) != (timestamp is not None):
        raise UsageError("startingOffsets=timestamp and startingTimestamp require each other")
    return kind, timestamp, starts


def _offsets(name: str, default: str, options: Mapping[str, str], text: OptionTexts) -> QueueOffsets:
    """Offsets by queue from JSON, of the Kafka source's shape; none for ``default``."""
    if options.get(name.lower(), default).lower() == default:
        return {}
    found = {}
    for topic, queues in text.document(name, dict, _OFFSETS_HINT).items():
        for queue_id, offset in (queues if isinstance(queues, dict) else {"": None}).items():
            if not queue_id.isdecimal() or type(offset) is not int or offset < OLDEST:
                raise UsageError(f"{name} is wrong for topic {topic}", hint=_OFFSETS_HINT)
            found[topic, int(queue_id)] = offset
    return found


def _credentials(options: Mapping[str, str]) -> S3Credentials | None:
    access, secret = options.get("accesskey"), options.get("secretkey")
    if (access is None) != (secret is None):
        raise UsageError("accessKey and secretKey require each other")
    if access is None or secret is None:
        return None
    return S3Credentials(access, secret, options.get("sessiontoken"))
