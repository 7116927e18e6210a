"""Projects the cost of an archive for a month, and what a TTL and a longer batch age would change. Pure."""

import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from tiered.errors import AccessDeniedError, NotFoundError, UsageError
from tiered.formats.keys import (
    CATALOG_PREFIX,
    DATA_PREFIX,
    INDEX_PREFIX,
    PAGES_PREFIX,
    SETS_PREFIX,
    STATE_PREFIX,
    TIMER_PREFIX,
    parse_data_key,
)
from tiered.object_store.interface import ObjectInfo

GIB = 1 << 30
DAYS_A_MONTH = 30


@dataclass(frozen=True)
class Prices:
    """Prices in ``currency``. A GiB is 2**30 bytes, which AWS calls GB. Default: S3 Standard in us-east-1, first 50 TB;
    larger archives pay a little less."""

    name: str = "AWS S3 Standard, us-east-1, list prices"
    date: str = "2025"
    currency: str = "USD"
    storage_gib_month: float = 0.023
    put_1000: float = 0.005
    """PUT, COPY, POST: also the start, each part and the end of an upload in parts."""
    get_1000: float = 0.0004
    list_1000: float = 0.005
    read_gib: float = 0.0
    """Retrieval and traffic of reads; 0 in the bucket's region."""

    def storage(self, size_bytes: float, days: float = DAYS_A_MONTH) -> float:
        """Price of ``size_bytes`` kept for ``days``."""
        return size_bytes / GIB * self.storage_gib_month * days / DAYS_A_MONTH

    def requests(self, *, puts: float = 0, gets: float = 0, lists: float = 0) -> float:
        """Price of so many requests."""
        return (puts * self.put_1000 + gets * self.get_1000 + lists * self.list_1000) / 1000

    def reads(self, size_bytes: float) -> float:
        """Price of the bytes that are read, besides that of the requests."""
        return size_bytes / GIB * self.read_gib


def read_prices(path: Path) -> Prices:
    """The prices in a TOML file; a price that it lacks has its default. Raises UsageError that names file and key."""
    try:
        document = tomllib.loads(path.read_text("utf-8"))
    except FileNotFoundError:
        raise NotFoundError(f"price file {path} does not exist", hint="check --prices") from None
    except OSError as error:
        raise AccessDeniedError(f"cannot read {path}: {error.strerror}", hint="check --prices") from None
    except (ValueError, RecursionError) as error:
        raise UsageError(
            f"{path} is not valid TOML: {error}", hint="correct the line that it names"
        ) from None
    return prices_of(document, str(path))


def prices_of(document: Mapping[str, Any], where: str) -> Prices:
    """The prices in ``document``, which was read at ``where``. Raises UsageError for an unknown or impossible price."""
    known = {item.name: type(item.default) for item in fields(Prices)}
    for key, value in document.items():
        if key not in known:
            raise UsageError(
                f"{where}: {key} is not the name of a price",
                hint=f"the names of prices are {', '.join(known)}",
            )
        is_number = (
            isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < float("inf")
        )
        if known[key] is float and not is_number:
            raise UsageError(
                f"{where}: {key} is not a number of at least 0", hint="write a number, such as 0.023"
            )
        if known[key] is str and not isinstance(value, str):
            raise UsageError(f"{where}: {key} is not text", hint=f'write {key} = "…"')
    return Prices(**document)


DAY_MS = 86_400_000
WINDOW_DAYS = 7.0
YOUNG_DAYS = 1 / 24
"""A younger archive has no rate: its first burst is none."""

KINDS = {
    DATA_PREFIX: "data of one queue",
    SETS_PREFIX: "data of many queues",
    CATALOG_PREFIX: "commits",
    PAGES_PREFIX: "catalog pages",
    INDEX_PREFIX: "message index",
    STATE_PREFIX: "broker tables and group offsets",
    TIMER_PREFIX: "timers",
}
OTHER = "others"


@dataclass
class Use:
    """Objects, their bytes, and the PUTs that made them."""

    objects: int = 0
    bytes: int = 0
    puts: int = 0

    def add(self, size_bytes: int, puts: int) -> None:
        """Count one object."""
        self.objects += 1
        self.bytes += size_bytes
        self.puts += puts


@dataclass
class ArchiveUse:
    """What is stored, and what was written during the last ``observed_days``, by prefix. ``topics``: objects with data
    of one queue only. Objects that were written and deleted in that time are not known."""

    stored: dict[str, Use] = field(default_factory=dict)
    written: dict[str, Use] = field(default_factory=dict)
    topics: dict[str, Use] = field(default_factory=dict)
    observed_days: float = WINDOW_DAYS

    @property
    def is_young(self) -> bool:
        """Whether rates say nothing yet."""
        return self.observed_days < YOUNG_DAYS

    @property
    def stored_bytes(self) -> int:
        """Bytes of all objects."""
        return sum(use.bytes for use in self.stored.values())

    @property
    def stored_objects(self) -> int:
        """The number of all stored objects."""
        return sum(use.objects for use in self.stored.values())

    @property
    def bytes_a_day(self) -> float:
        """Bytes of all objects written."""
        return sum(use.bytes for use in self.written.values()) / self.observed_days

    @property
    def puts_a_day(self) -> float:
        """PUTs of all objects written."""
        return sum(use.puts for use in self.written.values()) / self.observed_days

    @property
    def commits_a_day(self) -> float:
        """Commits written."""
        return self.written.get(CATALOG_PREFIX, Use()).objects / self.observed_days


@dataclass(frozen=True)
class PartSizes:
    """The size from which objects are uploaded in parts, and the size of a part."""

    threshold_bytes: int
    part_bytes: int

    def puts(self, size_bytes: int) -> int:
        """PUTs of one object: in parts, also the start and the end."""
        return 1 if size_bytes <= self.threshold_bytes else 2 + -(-size_bytes // self.part_bytes)


def measure(listing: Iterable[ObjectInfo], now_ms: int, parts: PartSizes) -> ArchiveUse:
    """Sum up the objects of one archive: what is stored, and what was written in the last seven days (or since the
    oldest object). ``listing``: all its objects; ``now_ms``: by the store's clock."""
    use = ArchiveUse()
    since_ms = now_ms - WINDOW_DAYS * DAY_MS
    oldest_ms = now_ms
    for info in listing:
        prefix = info.key.partition("/")[0] + "/"
        kind = prefix if prefix in KINDS else ""
        puts = parts.puts(info.size_bytes)
        use.stored.setdefault(kind, Use()).add(info.size_bytes, puts)
        oldest_ms = min(oldest_ms, info.modified_ms)
        if info.modified_ms >= since_ms:
            use.written.setdefault(kind, Use()).add(info.size_bytes, puts)
        if kind == DATA_PREFIX and (parsed := parse_data_key(info.key)) is not None:
            name = info.key.split("/")[2] if parsed.topic is None else parsed.topic
            use.topics.setdefault(name, Use()).add(info.size_bytes, puts)
    use.observed_days = min(WINDOW_DAYS, max(1, now_ms - oldest_ms) / DAY_MS)
    return use


DAY_S = 86_400.0
TTL_DAYS = (3, 7, 30, 90, 365)
BATCH_AGES_MS = (5_000, 15_000, 60_000, 300_000)
YEAR_DAYS = 365


@dataclass(frozen=True)
class RequestCounts:
    """Requests of a running instance since it started, by operation, and the bytes they moved."""

    seconds: float
    requests: Mapping[str, float]
    uploaded_bytes: float
    downloaded_bytes: float

    @property
    def is_young(self) -> bool:
        """Whether the instance runs for less than an hour, which begins with more requests than usual."""
        return self.seconds < YOUNG_DAYS * DAY_S

    @property
    def gets(self) -> float:
        """Reads of objects and ranges."""
        return sum(count for name, count in self.requests.items() if name.startswith("get"))

    @property
    def lists(self) -> float:
        """Listings; the clock is read from one."""
        return sum(self.requests.get(name, 0.0) for name in ("list", "clock"))

    def a_month(self, count: float) -> float:
        """``count`` of this process, for a month at the same rate."""
        return count * DAYS_A_MONTH * DAY_S / max(self.seconds, 1.0)


@dataclass(frozen=True)
class MonthCost:
    """The coming month. ``puts`` is None for a young archive, then ``storage`` is that of now; ``gets``, ``lists`` and
    ``reads`` are None without an instance that has run for an hour."""

    storage: float
    puts: float | None
    gets: float | None
    lists: float | None
    reads: float | None

    @property
    def total(self) -> float:
        """The sum of the known parts."""
        return self.storage + (self.puts or 0) + (self.gets or 0) + (self.lists or 0) + (self.reads or 0)


@dataclass(frozen=True)
class TopicCost:
    """One topic. ``objects`` has its own ones; ``stored_bytes`` includes its share of objects with many queues."""

    topic: str
    messages: int
    objects: int
    stored_bytes: int
    storage_month: float


@dataclass(frozen=True)
class Alternative:
    """A value of a setting, and what it would cost a month."""

    value: int
    month: float


def month_cost(use: ArchiveUse, prices: Prices, counts: RequestCounts | None) -> MonthCost:
    """What the coming month costs at present rates. Storage grows during the month, so that the size in its middle
    counts. ``counts``: requests of the running instance, None without one."""
    if use.is_young:
        return MonthCost(prices.storage(use.stored_bytes), None, None, None, None)
    middle_bytes = use.stored_bytes + use.bytes_a_day * DAYS_A_MONTH / 2
    puts = prices.requests(puts=use.puts_a_day * DAYS_A_MONTH)
    storage = prices.storage(middle_bytes)
    if counts is None or counts.is_young:
        return MonthCost(storage, puts, None, None, None)
    return MonthCost(
        storage,
        puts,
        prices.requests(gets=counts.a_month(counts.gets)),
        prices.requests(lists=counts.a_month(counts.lists)),
        prices.reads(counts.a_month(counts.downloaded_bytes)),
    )


def topic_costs(use: ArchiveUse, messages: Mapping[str, tuple[int, int]], prices: Prices) -> list[TopicCost]:
    """What each topic stores and costs a month, the most expensive first. ``messages``: topic -> number of messages,
    and their bytes before compression.

    Objects with many queues are shared out among topics by the bytes of their messages that are in no object of the
    topic alone.
    """
    set_bytes = use.stored.get(SETS_PREFIX, Use()).bytes
    own_bytes = sum(topic.bytes for topic in use.topics.values())
    message_bytes = sum(size for _, size in messages.values())
    expansion = message_bytes / (set_bytes + own_bytes) if set_bytes + own_bytes else 0.0
    names = messages.keys() | use.topics.keys()
    own = {name: use.topics.get(name, Use()) for name in names}
    shared = {name: max(0.0, messages.get(name, (0, 0))[1] - own[name].bytes * expansion) for name in names}
    all_shared = sum(shared.values())
    costs = []
    for name in names:
        share = set_bytes * shared[name] / all_shared if all_shared else 0.0
        stored = own[name].bytes + int(share)
        count = messages.get(name, (0, 0))[0]
        costs.append(TopicCost(name, count, own[name].objects, stored, prices.storage(stored)))
    return sorted(costs, key=lambda topic: (-topic.stored_bytes, topic.topic))


def ttl_costs(use: ArchiveUse, prices: Prices) -> list[Alternative]:
    """Storage a month once a TTL of so many days has taken effect, at the present rate."""
    return [Alternative(days, prices.storage(use.bytes_a_day * days)) for days in TTL_DAYS]


def storage_in_a_year(use: ArchiveUse, prices: Prices) -> float:
    """Storage a month after a year without a TTL, at the present rate."""
    return prices.storage(use.stored_bytes + use.bytes_a_day * YEAR_DAYS)


def batch_age_costs(
    use: ArchiveUse, prices: Prices, batch_age_ms: int, commits_a_day_min: float
) -> list[Alternative]:
    """What PUTs would cost a month with other values of offload.batch_age_ms, longer than the present ``batch_age_ms``.
    ``commits_a_day_min``: how many commits there are at least, because a batch is full before that age.

    It is assumed that each commit has as many new objects as now; index files do not depend on commits.
    """
    commits = use.commits_a_day
    index_puts = use.written.get(INDEX_PREFIX, Use()).puts / use.observed_days
    a_cycle = (use.puts_a_day - index_puts) / commits if commits else 0.0
    alternatives = []
    for age_ms in (age for age in BATCH_AGES_MS if age > batch_age_ms):
        fewer = max(min(commits, commits_a_day_min), min(commits, DAY_S * 1000 / age_ms))
        puts = (fewer * a_cycle + index_puts) * DAYS_A_MONTH
        alternatives.append(Alternative(age_ms, prices.requests(puts=puts)))
    return alternatives
