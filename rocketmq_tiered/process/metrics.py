"""Prometheus metrics of a StatusReport and of StoreMetrics.

`rocketmq_tiered_store_dispatch_behind`, `_dispatch_latency` and `_messages_dispatch_total` have the meaning of
RocketMQ's tiered store, whose latency is declared in seconds but recorded in milliseconds; here it is in seconds.
"""

import itertools
from collections.abc import Callable, Iterable, Iterator

from prometheus_client import CollectorRegistry, PlatformCollector, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from rocketmq_tiered.maintenance.expire import TOO_MUCH
from rocketmq_tiered.process.findings import (
    ABOUT,
    UP,
    Finding,
    RunState,
    of_report,
    unreadable_messages,
    word_of,
)
from rocketmq_tiered.process.report import StatusReport
from tiered.archive.task import EXPIRY, GARBAGE_COLLECTION
from tiered.formats.memory_bound import SHORTAGES
from tiered.object_store.request_metrics import LATENCY_BOUNDS_S, OperationStats, StoreMetrics

PREFIX = "rocketmq_tiered_store"
QUEUES_MAX = 1000
"""Bound of per-queue series: the queues with the largest lag have them; totals count all."""
UNREADABLE_MEANING = "Archived messages that this process could not read: their object is missing or damaged."

_MEDIUM = {"storage_type": "tiered", "storage_medium": "blob"}
_QUEUE_LABELS = [*_MEDIUM, "topic", "queue_id", "file_type"]


class _Families(Collector):
    """Makes metrics by a function at each scrape."""

    def __init__(self, families: Callable[[], Iterable[Metric]]) -> None:
        self._families = families

    def collect(self) -> Iterable[Metric]:
        return self._families()


def registry_of(*families: Callable[[], Iterable[Metric]]) -> CollectorRegistry:
    """What a process exports: its memory and CPU, and the metrics that each of ``families`` makes at a scrape."""
    registry = CollectorRegistry()
    ProcessCollector(registry=registry)
    PlatformCollector(registry=registry)
    for make in families:
        registry.register(_Families(make))
    return registry


def status_families(report: StatusReport) -> Iterator[Metric]:
    """The metrics of a status report, one family for each name. Before the archive is known they are only whether the
    process works, and its state."""
    word = word_of(report.state)
    meaning = "1 while an uploader archives, or stands by."
    yield _labelled(GaugeMetricFamily, "up", meaning, word in {state.value for state in UP})
    yield _state_family(word)
    if report.cluster:
        yield from _queue_families(report)
        yield from _figure_families(report)
        yield attention_family(of_report(report))


def _state_family(word: str) -> Metric:
    family = GaugeMetricFamily(f"{PREFIX}_state", "1 for the present state.", labels=[*_MEDIUM, "state"])
    for state in RunState:
        family.add_metric([*_MEDIUM.values(), state.value], int(state.value == word))
    return family


def attention_family(findings: Iterable[Finding]) -> Metric:
    """A gauge for each kind of problem that an operator should look at: 1 if ``findings`` has it, else 0."""
    meaning = "1 for what an operator should look at; tiered status has the next step."
    family = GaugeMetricFamily(f"{PREFIX}_attention", meaning, labels=[*_MEDIUM, "about"])
    found = {finding.about for finding in findings}
    for about in ABOUT:
        family.add_metric([*_MEDIUM.values(), about], int(about in found))
    return family


def _queue_families(report: StatusReport) -> Iterator[Metric]:
    """The lag of single queues: of the thousand with the largest lag, as each queue is a time series of its own."""
    worst = sorted(report.queues, key=lambda queue: queue.lag_messages, reverse=True)[:QUEUES_MAX]
    meanings = {
        "dispatch_behind": "Messages of a queue not archived yet.",
        "dispatch_latency": "Age in seconds of a queue's oldest message not archived yet.",
        "dispatch_behind_bytes": "Bytes of a queue not archived yet.",
    }
    families = [
        GaugeMetricFamily(f"{PREFIX}_{name}", meaning, labels=_QUEUE_LABELS)
        for name, meaning in meanings.items()
    ]
    for queue in worst:
        labels = [*_MEDIUM.values(), queue.topic, str(queue.queue_id), "consume_queue"]
        values = queue.lag_messages, queue.lag_seconds, queue.lag_bytes
        for family, value in zip(families, values, strict=True):
            family.add_metric(labels, value)
    yield from families


GAUGE, COUNTER = GaugeMetricFamily, CounterMetricFamily
FIGURES = (
    ("", GAUGE, "behind_messages", "lag_messages", "Messages not archived yet; above 64 MiB an estimate."),
    ("", GAUGE, "behind_bytes", "lag_bytes", "Bytes not archived yet, all queues."),
    ("", GAUGE, "behind_seconds", "lag_seconds", "Age in seconds of the oldest message not archived yet."),
    (
        "",
        GAUGE,
        "figures_age_seconds",
        "measured_seconds",
        "Age in seconds of lag, retention margin and catalog figures: the last ones that were known.",
    ),
    (
        "",
        GAUGE,
        "retention_margin_seconds",
        "retention_margin_seconds",
        "Seconds until the broker deletes messages not archived yet.",
    ),
    (
        "",
        GAUGE,
        "dispatch_offset",
        "committed_phys",
        "Physical commitlog offset up to which everything is archived.",
    ),
    (
        "",
        GAUGE,
        "bound_offset",
        "bound_phys",
        "Physical commitlog offset up to which the broker allows uploads.",
    ),
    ("", GAUGE, "gaps", "gaps", "Gaps of the archive."),
    (
        "",
        GAUGE,
        "set_aside_messages",
        "set_aside_messages",
        "Messages set aside: the broker used their offsets again.",
    ),
    ("", GAUGE, "epoch", "epoch", "Epoch of this writer."),
    ("", GAUGE, "memory_budget_used_bytes", "budget_used_bytes", "Bytes of buffers in use."),
    ("", GAUGE, "memory_budget_limit_bytes", "budget_limit_bytes", "Limit of buffers in bytes."),
    ("", GAUGE, "pins", "pins", "Commitlog files pinned by hard links."),
    (
        "",
        GAUGE,
        "unindexed_objects",
        "unindexed_objects",
        "Damaged data objects excluded from the message index.",
    ),
    ("", COUNTER, "gaps_recorded", "new_gaps", "Gaps recorded by this process."),
    ("", COUNTER, "messages_dispatch", "messages", "Messages archived by this process."),
    ("", COUNTER, "upload_message_bytes", "bytes", "Message bytes archived by this process."),
    ("", COUNTER, "errors", "errors", "Upload attempts abandoned since the start."),
    (
        "",
        COUNTER,
        "index_files_rebuilt",
        "index_files_rebuilt",
        "Damaged index files rebuilt by this process.",
    ),
    (
        "",
        GAUGE,
        "pending_deletions",
        "pending_deletions",
        "Objects that garbage collection has still to delete.",
    ),
    (
        "",
        GAUGE,
        "oldest_pending_deletion_seconds",
        "oldest_pending_deletion_seconds",
        "Age in seconds of the oldest pending deletion.",
    ),
    (
        "",
        GAUGE,
        "garbage_overdue_seconds",
        "garbage_overdue_seconds",
        "Seconds by which the oldest garbage is past its grace period.",
    ),
    ("", GAUGE, "gc_interval_seconds", "gc_interval_seconds", "How often garbage should be collected."),
    ("gc", GAUGE, "last_gc_timestamp_seconds", "last_ms", "When this process collected garbage."),
    ("expiry", GAUGE, "last_expire_timestamp_seconds", "last_ms", "When this process made a pass of expiry."),
    (
        "",
        GAUGE,
        "diverged_objects",
        "diverged_objects",
        "Objects of a truncated or replaced log that wait for their deletion.",
    ),
    (
        "",
        GAUGE,
        "hidden_messages",
        "hidden_messages",
        "Messages that a truncated or replaced log has hidden, within gc.diverged_grace_ms.",
    ),
    ("compaction", GAUGE, "compaction_interval_seconds", "interval_seconds", "How often objects are joined."),
    (
        "compaction",
        GAUGE,
        "compaction_last_timestamp_seconds",
        "last_ms",
        "When a pass of compaction ended well.",
    ),
    (
        "compaction",
        GAUGE,
        "compaction_idle_seconds",
        "idle_seconds",
        "Seconds since a pass of compaction ended well, or the start.",
    ),
    ("compaction", GAUGE, "compaction_backlog_objects", "backlog_objects", "Objects due to be joined."),
    (
        "compaction",
        GAUGE,
        "compaction_backlog_bytes",
        "backlog_bytes",
        "Message bytes of objects due to be joined.",
    ),
    (
        "compaction",
        GAUGE,
        "compaction_round_seconds",
        "round_seconds",
        "Duration of the last round of compaction.",
    ),
    ("compaction", COUNTER, "compaction_failures", "failures", "Passes of compaction that failed."),
    ("compaction", COUNTER, "compaction_rounds", "rounds", "Rounds of compaction."),
    (
        "compaction",
        COUNTER,
        "compaction_joined_objects",
        "joined_objects",
        "Objects that compaction replaced.",
    ),
    ("compaction", COUNTER, "compaction_made_objects", "made_objects", "Objects that compaction wrote."),
    ("compaction", COUNTER, "compaction_read_bytes", "bytes_read", "Bytes that compaction read."),
    ("compaction", COUNTER, "compaction_sent_bytes", "bytes_sent", "Bytes that compaction wrote."),
    (
        "compaction",
        COUNTER,
        "compaction_copied_bytes",
        "bytes_copied",
        "Bytes that the object store copied for compaction.",
    ),
    ("scrub", GAUGE, "scrub_last_timestamp_seconds", "cycle_ms", "When everything had been read back last."),
    ("scrub", GAUGE, "scrub_cycle_ratio", "cycle_share", "Share of the cycle in progress."),
    (
        "scrub",
        GAUGE,
        "scrub_damaged_objects",
        "damaged",
        "Damaged objects not replaced, and other anomalies.",
    ),
    ("scrub", COUNTER, "scrub_objects", "objects", "Objects read back."),
    ("scrub", COUNTER, "scrub_healed_objects", "healed", "Damaged objects replaced by whole ones."),
    (
        "key_compaction",
        GAUGE,
        "key_compaction_last_timestamp_seconds",
        "last_ms",
        "When a pass of key compaction ended well.",
    ),
    (
        "key_compaction",
        GAUGE,
        "key_compaction_backlog_queues",
        "backlog_queues",
        "Queues with new keys to compact.",
    ),
    (
        "key_compaction",
        GAUGE,
        "key_compaction_backlog_bytes",
        "backlog_bytes",
        "New message bytes of these queues.",
    ),
    (
        "key_compaction",
        COUNTER,
        "key_compaction_failures",
        "failures",
        "Passes of key compaction that failed.",
    ),
    ("key_compaction", COUNTER, "key_compaction_rounds", "rounds", "Rounds of key compaction."),
    ("key_compaction", COUNTER, "key_compaction_keys", "keys", "Keys of compacted queues."),
    (
        "key_compaction",
        COUNTER,
        "key_compaction_read_messages",
        "read_messages",
        "Messages before key compaction.",
    ),
    (
        "key_compaction",
        COUNTER,
        "key_compaction_kept_messages",
        "kept_messages",
        "Messages that key compaction kept.",
    ),
    (
        "key_compaction",
        COUNTER,
        "key_compaction_spooled_bytes",
        "spooled_bytes",
        "Bytes of keys that exceeded memory.",
    ),
    ("timers", GAUGE, "timers_pending", "pending", "Timers that are not handed over to the broker."),
    ("timers", GAUGE, "timers_next_hour", "next_hour", "Pending timers due in this hour and the next."),
    ("timers", GAUGE, "timers_postponed", "postponed", "Pending timers that the broker refuses."),
    ("timers", GAUGE, "timers_refused", "refused", "Messages of the gateway topic that are not delivered."),
    ("timers", GAUGE, "timers_objects", "objects", "Objects of timers."),
    (
        "timers",
        GAUGE,
        "timers_overdue_seconds",
        "overdue_seconds",
        "How long the first pending timer has been due.",
    ),
    (
        "timers",
        GAUGE,
        "timers_late_p99_seconds",
        "late_p99_seconds",
        "How late the newest 10,000 were handed over.",
    ),
    ("timers", COUNTER, "timers_delivered", "delivered", "Timers handed over."),
    ("timers", COUNTER, "timers_found", "found", "Timers that the broker already had after a failure."),
    ("timers", COUNTER, "timers_cancelled", "cancelled", "Timers that were cancelled."),
    ("timers", COUNTER, "timers_dropped", "dropped", "Timers without their message."),
)
"""Part of the report, kind, name, member of that part, and meaning. Members of ``…_timestamp_seconds`` are in ms."""


def _figure_families(report: StatusReport) -> Iterator[Metric]:
    """The metrics of FIGURES: each is a member of the report or of one of its parts, such as the status of a task. A
    figure that is not known has no metric, nor have those of a part that this process does not have."""
    parts = {"": report, "gc": report.task(GARBAGE_COLLECTION), "expiry": report.task(EXPIRY)}
    for part, kind, name, member, meaning in FIGURES:
        source = parts[part] if part in parts else getattr(report, part)
        value = None if source is None else getattr(source, member)
        if value is not None:
            unit = 1000 if name.endswith("_timestamp_seconds") else 1
            yield _labelled(kind, name, meaning, value / unit if unit > 1 else value)
    stopped = "1 if retention.max_share stopped the last pass of expiry."
    yield _labelled(GAUGE, "expire_stopped", stopped, report.task(EXPIRY).problem == TOO_MUCH)
    yield _labelled(GAUGE, "unreadable_messages", UNREADABLE_MEANING, unreadable_messages(report.unreadable))


def _labelled(
    kind: type[GaugeMetricFamily | CounterMetricFamily], name: str, meaning: str, value: float
) -> Metric:
    family = kind(f"{PREFIX}_{name}", meaning, labels=list(_MEDIUM))
    family.add_metric(list(_MEDIUM.values()), value)
    return family


def store_families(metrics: StoreMetrics) -> Iterator[Metric]:
    """The metrics of all requests to the object store since the start: latency, failures, bytes written and read. Bytes
    are histograms as in RocketMQ, with sum and count only."""
    snapshot = metrics.snapshot()
    latency = HistogramMetricFamily(
        f"{PREFIX}_provider_rpc_latency",
        "Latency of a request in milliseconds.",
        labels=[*_MEDIUM, "operation", "request"],
    )
    failures = CounterMetricFamily(
        f"{PREFIX}_provider_failures",
        "Failed requests by error.",
        labels=[*_MEDIUM, "request", "error"],
    )
    uploaded = HistogramMetricFamily(
        f"{PREFIX}_provider_upload_bytes", "Bytes written to the object store.", labels=list(_MEDIUM)
    )
    downloaded = HistogramMetricFamily(
        f"{PREFIX}_provider_download_bytes", "Bytes read from the object store.", labels=list(_MEDIUM)
    )
    for request, stats in sorted(snapshot.items()):
        labels = [*_MEDIUM.values(), "write" if request in _WRITES else "read", request]
        latency.add_metric(labels, _buckets_ms(stats), stats.seconds * 1000)
        for error, count in sorted(stats.failures.items()):
            failures.add_metric([*_MEDIUM.values(), request, error], count)
    writes = [snapshot.get(request, OperationStats()) for request in ("put", "compose")]
    reads = [stats for request, stats in snapshot.items() if request.startswith("get")]
    for family, group in ((uploaded, writes), (downloaded, reads)):
        count = sum(stats.requests for stats in group)
        family.add_metric(list(_MEDIUM.values()), [("+Inf", count)], sum(stats.bytes for stats in group))
    yield from (latency, failures, uploaded, downloaded)


def decoding_families() -> Iterator[Metric]:
    """The metrics of decoding objects, in every mode."""
    meaning = "Objects that could not be decoded for lack of memory."
    yield _labelled(CounterMetricFamily, "decode_memory_shortages", meaning, SHORTAGES.count)


_WRITES = frozenset({"put", "compose", "delete"})


def _buckets_ms(stats: OperationStats) -> list[tuple[str, float]]:
    """Cumulative counts by upper bound in milliseconds."""
    bounds = [f"{bound * 1000:g}" for bound in LATENCY_BOUNDS_S] + ["+Inf"]
    return list(zip(bounds, itertools.accumulate(stats.latency_counts), strict=True))
