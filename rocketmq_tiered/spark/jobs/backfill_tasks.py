"""Tasks of a bulk backfill and their results, as plain data, and how a task opens store and archive."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rocketmq_tiered.spark.plan.archive_plan import archive_store
from tiered.broker_store.conf import read_broker_conf
from tiered.broker_store.store import BrokerStore, open_broker_store
from tiered.catalog.commit import CommitDraft
from tiered.model.queue import TopicFilter
from tiered.object_store.interface import ObjectStore
from tiered.object_store.open_store import open_store
from tiered.object_store.store_options import StoreOptions
from tiered.settings.sections import OffloadSettings
from tiered.settings.topic_rules import TopicRules
from uploader.log_batch import DamagedRange, LostRange
from uploader.log_feed import FeedBound
from uploader.skipped_log import SkippedLog

QueueNames = list[tuple[str, int]]
LmqNames = list[tuple[int, str, int, int]]
"""Unusual LMQ entries: physical offset of the record, topic and queue id, and the LMQ offset or the constant of
uploader.lmq_dispatch for an excluded entry."""


@dataclass(frozen=True)
class StoreSource:
    """A broker's store directory, at the same path on every worker, and the names of its archive."""

    path: str
    cluster: str
    broker: str
    conf_path: str = ""
    topics: TopicFilter = field(default_factory=TopicFilter)

    def open(self) -> BrokerStore:
        """Open it for reading. Raises what open_broker_store raises."""
        conf = read_broker_conf(Path(self.conf_path)) if self.conf_path else None
        return open_broker_store(Path(self.path), conf=conf)


@dataclass(frozen=True)
class ArchiveTarget:
    """The URL of the archives, and options that open the object store."""

    url: str
    options: StoreOptions = field(default_factory=StoreOptions)

    @contextmanager
    def open(self, cluster: str, broker: str) -> Iterator[ObjectStore]:
        """The archive of one broker name."""
        with closing(open_store(self.url, self.options)) as root:
            yield archive_store(root, cluster, broker)


@dataclass(frozen=True)
class LogPart:
    """Physical offsets [from_phys, to_phys). Below ``proven_phys`` every record must be valid. ``is_cycle``: the part
    was read before and ends with a record."""

    from_phys: int
    to_phys: int
    proven_phys: int
    is_cycle: bool = False

    @property
    def bound(self) -> FeedBound:
        """The bound of the feed."""
        return FeedBound(self.to_phys, min(self.proven_phys, self.to_phys), is_record_end=self.is_cycle)


@dataclass(frozen=True)
class ScanTask:
    """Scan ``part``: whole commitlog files."""

    source: StoreSource
    settings: OffloadSettings
    part: LogPart


@dataclass(frozen=True)
class ScannedCycle:
    """A cycle inside ``part``. ``ordinals`` index the queues of the scan.

    ``excluded``: physical offsets of records that consume queues contradict. Row numbers would differ between reads: a
    scan also returns the first rows of a topic before the topic filter has decided about it.
    """

    part: LogPart
    rows: int
    is_damaged: bool
    is_lost: bool
    excluded: list[int]
    lmq: LmqNames
    ordinals: NDArray[np.int64]
    moves: NDArray[np.int64]


@dataclass(frozen=True)
class Scan:
    """The consecutive cycles of a part of the log, from its start."""

    queues: QueueNames
    cycles: list[ScannedCycle]
    part: LogPart

    @property
    def end_phys(self) -> int:
        """The end of the last cycle. It is below the end of the part if the written log ends there."""
        return self.cycles[-1].part.to_phys if self.cycles else self.part.from_phys


@dataclass(frozen=True)
class PutTask:
    """Encode one cycle and make it durable in ``epoch``.

    ``tails`` (TAIL_FIELDS) are those of ``queues`` before the cycle. ``skipped``: ranges excluded before this backfill;
    ``was_…``: by its own earlier cycles. ``topics``: the attributes that ``rules`` use. ``outage_limit_s``: how long
    the store may refuse every request."""

    source: StoreSource
    settings: OffloadSettings
    target: ArchiveTarget
    part: LogPart
    epoch: int
    history: int
    catalog_version: int
    writer: str
    queues: QueueNames
    tails: NDArray[np.int64]
    rows: int
    excluded: list[int]
    lmq: LmqNames
    was_damaged: bool
    was_lost: bool
    skipped: SkippedLog
    rules: TopicRules
    topics: Mapping[str, Any]
    outage_limit_s: float


@dataclass(frozen=True)
class PutCycle:
    """A durable cycle. ``draft`` lacks the time; its check is NO_CHECK if the cycle has no bytes."""

    draft: CommitDraft
    rows: int
    raw_bytes: int
    stored_bytes: int
    abandoned: list[str]
    damaged: list[DamagedRange]
    lost: list[LostRange]
