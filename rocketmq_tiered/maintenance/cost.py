"""Projects the cost of an archive for a month, and what a TTL and a longer batch age would change. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from rocketmq_tiered.maintenance.archive_use import YOUNG_DAYS, ArchiveUse, Use
from rocketmq_tiered.maintenance.prices import DAYS_A_MONTH, Prices
from tiered.formats.keys import INDEX_PREFIX, SETS_PREFIX

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
    """The coming month at present rates. Storage grows during the month, so the size in its middle counts."""
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
    """Every topic, the most expensive first. ``messages``: topic to messages and their bytes before compression.

    Objects with many queues are divided by the bytes of messages that lie in no object of their own.
    """
    set_bytes = use.stored.get(SETS_PREFIX, Use()).bytes
    own_bytes = sum(topic.bytes for topic in use.topics.values())
    message_bytes = sum(size for _, size in messages.values())
    expansion = message_bytes / (set_bytes + own_bytes) if set_bytes + own_bytes else 0.0
    names = messages.keys() | use.topics.keys()
    own = {name: use.topics.get(name, Use()) for name in names}
    shared = {name: max(0.0, messages.get(name, (0, 0))[1] - own[name].bytes * expansion) for name in names}
    all_shared = sum(shared.values())
    found = []
    for name in names:
        share = set_bytes * shared[name] / all_shared if all_shared else 0.0
        stored = own[name].bytes + int(share)
        count = messages.get(name, (0, 0))[0]
        found.append(TopicCost(name, count, own[name].objects, stored, prices.storage(stored)))
    return sorted(found, key=lambda topic: (-topic.stored_bytes, topic.topic))


def ttl_costs(use: ArchiveUse, prices: Prices) -> list[Alternative]:
    """Storage a month once a TTL of so many days has taken effect, at the present rate."""
    return [Alternative(days, prices.storage(use.bytes_a_day * days)) for days in TTL_DAYS]


def storage_in_a_year(use: ArchiveUse, prices: Prices) -> float:
    """Storage a month after a year without a TTL, at the present rate."""
    return prices.storage(use.stored_bytes + use.bytes_a_day * YEAR_DAYS)


def batch_age_costs(
    use: ArchiveUse, prices: Prices, batch_age_ms: int, commits_a_day_min: float
) -> list[Alternative]:
    """PUTs a month with longer batch ages than ``batch_age_ms``. ``commits_a_day_min``: those that a full batch closes.

    A cycle writes as many objects as now. Index files do not depend on cycles.
    """
    commits = use.commits_a_day
    index_puts = use.written.get(INDEX_PREFIX, Use()).puts / use.observed_days
    a_cycle = (use.puts_a_day - index_puts) / commits if commits else 0.0
    found = []
    for age_ms in (age for age in BATCH_AGES_MS if age > batch_age_ms):
        fewer = max(min(commits, commits_a_day_min), min(commits, DAY_S * 1000 / age_ms))
        puts = (fewer * a_cycle + index_puts) * DAYS_A_MONTH
        found.append(Alternative(age_ms, prices.requests(puts=puts)))
    return found
