"""Options of the data source: names, defaults, limits, parsing.

Credentials in options travel to the workers and are never shown.
"""

from __future__ import annotations

import fnmatch
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from pathlib import Path
from typing import Any

from rocketmq_tiered.message_table.options.columns import (
    CHANGE_TYPE,
    DEFAULT_NAMES,
    Column,
    Cost,
    chosen,
    cost_of,
)
from rocketmq_tiered.message_table.options.predicate import Predicate, stored_between
from tiered.errors import UsageError
from tiered.object_store.interface import S3Credentials, StoreOptions
from tiered.settings.sections import ObjectStoreSettings
from tiered.timestamps import parse_instant

Parse = Callable[[str, str], Any]
"""(name, text of the option) -> value. Raises UsageError for an impossible one."""


def _names(_name: str, text: str) -> tuple[str, ...]:
    """Items of a list with commas."""
    return tuple(filter(None, map(str.strip, text.split(","))))


def _regex(name: str, text: str) -> str:
    try:
        re.compile(text)
    except re.error as error:
        raise UsageError(f"{name} {text} is not a regular expression: {error}") from error
    return text


def _number(minimum: int, maximum: int | None = None) -> Parse:
    """A parser of an option that is a whole number from ``minimum`` to ``maximum``."""

    def parse(name: str, text: str) -> int:
        """The number in ``text``. Raises UsageError, with the option's name, if it is none or out of bounds."""
        try:
            value = int(text)
        except ValueError:
            value = minimum - 1
        if value < minimum or (maximum is not None and value > maximum):
            bounds = f"of at least {minimum}" if maximum is None else f"from {minimum} to {maximum}"
            raise UsageError(f"{name} is {text}", hint=f"use a whole number {bounds}")
        return value

    return parse


def _instant(name: str, text: str) -> int:
    """A time in ms since the epoch."""
    try:
        return parse_instant(text)
    except UsageError as error:
        raise UsageError(f"{name}: {error.message}") from error


def _flag(name: str, text: str) -> bool:
    if text.lower() not in ("true", "false"):
        raise UsageError(f"{name} is {text}", hint="use true or false")
    return text.lower() == "true"


def _choice(kind: type[Enum]) -> Parse:
    """A parser of an option that is one of the values of the enumeration ``kind``, in upper or lower case."""

    def parse(name: str, text: str) -> Enum:
        choices = {str(choice.value).lower(): choice for choice in kind}
        if text.lower() in choices:
            return choices[text.lower()]
        names = ", ".join(str(choice.value) for choice in kind)
        raise UsageError(f"{name} is {text}", hint=f"use one of {names}")

    return parse


def _document(name: str, text: str, kind: type[Any], hint: str) -> Any:
    """Parse an option that is JSON and whose value has the Python type ``kind``. Raises UsageError, with the option's
    name and ``hint``, if it is not."""
    try:
        found = json.loads(text)
    except ValueError:
        found = None
    if not isinstance(found, kind):
        raise UsageError(f"{name} is not {'a JSON list' if kind is list else 'JSON'}: {text}", hint=hint)
    return found


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
    batch_bytes: int = 4 * MIB
    """Approximate message bytes of an Arrow batch; a single larger message is still read."""
    broker_conf: str | None = None
    """broker.conf of a store directory whose commitlog is elsewhere."""
    starting: Starting = Starting.EARLIEST
    starting_timestamp: int | None = None
    max_rows_per_trigger: int | None = None
    max_bytes_per_trigger: int | None = None
    fail_on_data_loss: bool = True
    store: StoreOptions = field(default_factory=StoreOptions)

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
        """Raise UsageError if options are set that only a stream has, because this is a read of a table."""
        if self.starting is not Starting.EARLIEST:
            raise UsageError(
                f"startingOffsets={self.starting.value} applies to streams only",
                hint="to read a range of times of a table, use since and until",
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


_OFFSETS_HINT = (
    'use earliest, latest or JSON such as {"orders": {"0": 4711, "1": -2}}; -2 is the first, -1 the end'
)


def _text(_name: str, text: str) -> str:
    return text


def _generation(name: str, text: str) -> int | None:
    number: int | None = None if text.lower() == "all" else _number(0)(name, text)
    return number


def _offsets(default: str) -> Parse:
    """A parser of an option that gives queue offsets as JSON, in the form that Spark's Kafka source has. The word
    ``default`` stands for no offsets."""

    def parse(name: str, text: str) -> QueueOffsets:
        """Parse ``{"topic": {"0": offset}}`` into offsets by topic and queue id. Raises UsageError, with the option's
        name, for anything else."""
        if text.lower() == default:
            return {}
        found = {}
        for topic, queues in _document(name, text, dict, _OFFSETS_HINT).items():
            for queue_id, offset in (queues if isinstance(queues, dict) else {"": None}).items():
                if not queue_id.isdecimal() or type(offset) is not int or offset < OLDEST:
                    raise UsageError(
                        f"{name}: topic {topic} does not have an offset for each queue id",
                        hint=_OFFSETS_HINT,
                    )
                found[topic, int(queue_id)] = offset
        return found

    return parse


_PARSERS: dict[str, tuple[str, Parse]] = {
    "source": ("source", _choice(Source)),
    "topic": ("topics", _names),
    "subscribePattern": ("topic_regex", _regex),
    "cluster": ("cluster", _text),
    "broker": ("broker", _text),
    "generation": ("generation", _generation),
    "version": ("version", _number(1)),
    "timestampAsOf": ("version_ms", _instant),
    "since": ("since_ms", _instant),
    "until": ("until_ms", _instant),
    "columns": ("columns", _names),
    "view": ("view", _choice(View)),
    "explodeBatches": ("explode_batches", _flag),
    "pushFilters": ("push_filters", _flag),
    "mode": ("mode", _choice(Mode)),
    "partitionBytes": ("partition_bytes", _number(MIB)),
    "batchBytes": ("batch_bytes", _number(64 << 10, BATCH_BYTES_MAX)),
    "brokerConf": ("broker_conf", _text),
    "endingOffsets": ("ends", _offsets("latest")),
    "maxRowsPerTrigger": ("max_rows_per_trigger", _number(1)),
    "maxBytesPerTrigger": ("max_bytes_per_trigger", _number(1)),
    "failOnDataLoss": ("fail_on_data_loss", _flag),
}
"""Option -> field of SourceOptions, and how its text is read."""
_OF_STORE = {
    "endpoint": "endpoint_url",
    "region": "region",
    "addressingStyle": "addressing_style",
    "keyRing": "key_ring",
}
"""Option -> field of ObjectStoreSettings."""
_NAMES = (
    "path",
    "paths",
    *_PARSERS,
    *_OF_STORE,
    "startingOffsets",
    "startingTimestamp",
    "accessKey",
    "secretKey",
    "sessionToken",
)
_ALIASES = {
    "subscribe": "topic",
    "maxOffsetsPerTrigger": "maxRowsPerTrigger",
    "versionAsOf": "version",
}
"""Names of the Kafka source and of Delta."""
OPTION_NAMES = {name.lower(): name for name in (*_NAMES, *_ALIASES)}
"""Lower case -> name: Spark's options are case-insensitive."""
_OF_ARCHIVES = ("generation", "version", "timestampAsOf", "startingOffsets", "endingOffsets", "view")
_EXCLUSIVE = (
    ("maxRowsPerTrigger", "maxBytesPerTrigger"),
    ("version", "timestampAsOf"),
    ("topic", "subscribePattern"),
)


def parse_options(given: Mapping[str, str], store: ObjectStoreSettings | None = None) -> SourceOptions:
    """Parse the options of the data source, by name as Spark passes them. ``store``: how the object store is opened
    where the options do not say it. Raises UsageError for unknown, wrong and contradictory options."""
    options = _named(given)
    values: dict[str, Any] = {
        field: parse(name, options[name.lower()])
        for name, (field, parse) in _PARSERS.items()
        if name.lower() in options
    }
    first, *others = _paths(options)
    source = values.get("source", Source.ARCHIVE)
    for name in _OF_ARCHIVES if source is Source.STORE else ("brokerConf",):
        if name.lower() in options:
            other = Source.ARCHIVE if source is Source.STORE else Source.STORE
            raise UsageError(f"{name} requires source={other.value}, not source={source.value}")
    starting, timestamp, starts = _starting(options)
    place: dict[str, Any] = {
        name: options[option.lower()] for option, name in _OF_STORE.items() if option.lower() in options
    }
    found = SourceOptions(
        first,
        **values,
        more_paths=tuple(others),
        starting=starting,
        starting_timestamp=timestamp,
        starts=starts,
        all_generations=options.get("generation", "").lower() == "all",
        store=StoreOptions(replace(store or ObjectStoreSettings(), **place), _credentials(options)),
    )
    if found.since_ms is not None and found.until_ms is not None and found.since_ms >= found.until_ms:
        raise UsageError("since is not before until", hint="until is exclusive")
    return found


def _named(given: Mapping[str, str]) -> dict[str, str]:
    """The options by their names in lower case, an alias replaced by the name it stands for. Raises UsageError for
    unknown options and for those that exclude each other."""
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
            raise UsageError(f"{one} and {other} are mutually exclusive", hint="use one of them")
    return options


def _paths(options: Mapping[str, str]) -> list[str]:
    """The URLs of the paths that the options name: ``s3a://`` becomes ``s3://``, and a path without a scheme is a local
    directory. Raises UsageError if there is none."""
    paths = [options.get("path", "").strip()]
    if "paths" in options:  # as Spark passes load([…])
        paths += _document("paths", options["paths"], list, "use load(['s3://a/b', …])")
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


def _starting(options: Mapping[str, str]) -> tuple[Starting, int | None, QueueOffsets]:
    """Where a stream starts: the kind of start, and for these kinds the time in ms or the offsets by queue. Raises
    UsageError if the options contradict each other."""
    name, time = "startingOffsets", options.get("startingtimestamp")
    timestamp = None if time is None else _instant("startingTimestamp", time)
    text = options.get(name.lower(), "earliest" if timestamp is None else Starting.TIMESTAMP.value)
    if text.lstrip().startswith("{"):
        kind, starts = Starting.EARLIEST, _offsets("earliest")(name, text)
    else:
        kind, starts = _choice(Starting)(name, text), {}
    if (kind is Starting.TIMESTAMP) != (timestamp is not None):
        raise UsageError(
            "startingOffsets=timestamp and startingTimestamp require each other", hint="set both"
        )
    return kind, timestamp, starts


def _credentials(options: Mapping[str, str]) -> S3Credentials | None:
    access, secret = options.get("accesskey"), options.get("secretkey")
    if (access is None) != (secret is None):
        raise UsageError("accessKey and secretKey require each other", hint="set both")
    if access is None or secret is None:
        return None
    return S3Credentials(access, secret, options.get("sessiontoken"))
