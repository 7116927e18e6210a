"""Options of the data source: names, defaults, limits, parsing.

Credentials in options travel to the workers and are never shown.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import TypeVar

from rocketmq_tiered.message_table.options.predicate import Predicate, stored_between
from tiered.errors import UsageError
from tiered.object_store.store_options import S3Credentials, StoreOptions
from tiered.settings.sections import ObjectStoreSettings
from tiered.timestamps import parse_instant

E = TypeVar("E", bound=Enum)

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


class Starting(Enum):
    """Where a stream starts."""

    EARLIEST = "earliest"
    LATEST = "latest"
    TIMESTAMP = "timestamp"
    """At the first message stored at or after ``startingTimestamp``."""


@dataclass(frozen=True)
class SourceOptions:
    """Parsed options. Times are ms since the epoch."""

    path: str
    source: Source = Source.ARCHIVE
    topics: tuple[str, ...] = ()
    """Names or shell patterns; empty means all."""
    cluster: str | None = None
    broker: str | None = None
    generation: int | None = None
    """Generation of recreated topics; None means the one shown by default."""
    all_generations: bool = False
    with_superseded: bool = True
    """Include generations that ended when the log was replaced. Set by jobs; not an option."""
    version: int | None = None
    """Catalog version to read; None means the newest when the DataFrame is created."""
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
        return not self.topics or any(fnmatch.fnmatchcase(topic, pattern) for pattern in self.topics)

    def wants_archive(self, cluster: str, broker: str) -> bool:
        """Whether the archive of these names is read."""
        return self.cluster in (None, cluster) and self.broker in (None, broker)

    def refuse_stream_options(self) -> None:
        """Raises UsageError for options that apply to streams only."""
        if self.starting is not Starting.EARLIEST:
            raise UsageError(
                "startingOffsets applies to streams only", hint="since and until select a time range"
            )
        if self.max_rows_per_trigger is not None or self.max_bytes_per_trigger is not None:
            raise UsageError("maxRowsPerTrigger and maxBytesPerTrigger apply to streams only")

    @property
    def times(self) -> Predicate:
        """The predicate of ``since_ms`` and ``until_ms``."""
        return stored_between(self.since_ms, self.until_ms)

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
    "path", "source", "topic", "cluster", "broker", "generation", "version", "since", "until", "columns",
    "pushFilters", "mode", "partitionBytes", "batchBytes", "brokerConf", "startingOffsets", "startingTimestamp",
    "maxRowsPerTrigger", "maxBytesPerTrigger", "failOnDataLoss", "endpoint", "region", "addressingStyle",
    "accessKey", "secretKey", "sessionToken",
)  # fmt: skip
OPTION_NAMES = {name.lower(): name for name in _NAMES}
"""Lower case -> name: Spark's options are case-insensitive."""


def parse_options(given: Mapping[str, str]) -> SourceOptions:
    """Parse the options that Spark passes. Raises UsageError."""
    options = {name.lower(): value for name, value in given.items()}
    unknown = sorted(set(options) - set(OPTION_NAMES))
    if unknown:
        raise UsageError(f"unknown option {unknown[0]}", hint=f"options: {', '.join(_NAMES)}")
    text = _Options(options)
    path = options.get("path", "").strip()
    if not path:
        raise UsageError("path is missing", hint="use load('s3://bucket/prefix') or option('path', …)")
    starting = text.choice("startingOffsets", Starting, Starting.EARLIEST)
    timestamp = text.instant("startingTimestamp")
    if (starting is Starting.TIMESTAMP) != (timestamp is not None):
        raise UsageError("startingOffsets=timestamp and startingTimestamp require each other")
    rows, size = text.number("maxRowsPerTrigger", 1), text.number("maxBytesPerTrigger", 1)
    if rows is not None and size is not None:
        raise UsageError("maxRowsPerTrigger and maxBytesPerTrigger are mutually exclusive")
    since, until = text.instant("since"), text.instant("until")
    if since is not None and until is not None and since >= until:
        raise UsageError("since is not before until", hint="until is exclusive")
    source = text.choice("source", Source, Source.ARCHIVE)
    for name in ("generation", "version") if source is Source.STORE else ("brokerConf",):
        if name.lower() in options:
            other = Source.ARCHIVE if source is Source.STORE else Source.STORE
            raise UsageError(f"{name} requires source={other.value}, not source={source.value}")
    every = options.get("generation", "").lower() == "all"
    return SourceOptions(
        path=path,
        source=source,
        topics=text.names("topic"),
        cluster=options.get("cluster"),
        broker=options.get("broker"),
        generation=None if every else text.number("generation", 0),
        all_generations=every,
        version=text.number("version", 1),
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
        max_rows_per_trigger=rows,
        max_bytes_per_trigger=size,
        fail_on_data_loss=text.flag("failOnDataLoss", default=True),
        endpoint=options.get("endpoint", ""),
        region=options.get("region", ""),
        addressing_style=options.get("addressingstyle", "auto"),
        credentials=_credentials(options),
    )


def _credentials(options: Mapping[str, str]) -> S3Credentials | None:
    access, secret = options.get("accesskey"), options.get("secretkey")
    if (access is None) != (secret is None):
        raise UsageError("accessKey and secretKey require each other")
    if access is None or secret is None:
        return None
    return S3Credentials(access, secret, options.get("sessiontoken"))


class _Options:
    """Typed access to option texts."""

    def __init__(self, options: Mapping[str, str]) -> None:
        self._options = options

    def names(self, name: str) -> tuple[str, ...]:
        items = (item.strip() for item in self._options.get(name.lower(), "").split(","))
        return tuple(item for item in items if item)

    def number(self, name: str, minimum: int, maximum: int | None = None) -> int | None:
        text = self._options.get(name.lower())
        if text is None:
            return None
        try:
            value = int(text)
        except ValueError:
            value = minimum - 1
        if value < minimum or (maximum is not None and value > maximum):
            bounds = f"of at least {minimum}" if maximum is None else f"from {minimum} to {maximum}"
            raise UsageError(f"{name} is {text}", hint=f"use a whole number {bounds}")
        return value

    def instant(self, name: str) -> int | None:
        text = self._options.get(name.lower())
        if text is None:
            return None
        try:
            return parse_instant(text)
        except UsageError as error:
            raise UsageError(f"{name}: {error.message}") from error

    def flag(self, name: str, *, default: bool) -> bool:
        text = self._options.get(name.lower(), str(default)).lower()
        if text not in ("true", "false"):
            raise UsageError(f"{name} is {text}", hint="use true or false")
        return text == "true"

    def choice(self, name: str, kind: type[E], default: E) -> E:
        text = self._options.get(name.lower())
        if text is None:
            return default
        choices = {str(choice.value).lower(): choice for choice in kind}
        if text.lower() in choices:
            return choices[text.lower()]
        names = ", ".join(str(choice.value) for choice in kind)
        raise UsageError(f"{name} is {text}", hint=f"use one of {names}")
