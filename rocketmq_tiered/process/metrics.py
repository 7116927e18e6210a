"""Prometheus metrics of a StatusReport and of StoreMetrics.

`rocketmq_tiered_store_dispatch_behind`, `_dispatch_latency` and `_messages_dispatch_total` have the meaning of
RocketMQ's tiered store, whose latency is declared in seconds but recorded in milliseconds; here it is in seconds.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from rocketmq_tiered.maintenance.compaction_status import CompactionStatus
from rocketmq_tiered.maintenance.expiry_task import TOO_MUCH
from rocketmq_tiered.maintenance.key_status import KeyCompactionStatus
from rocketmq_tiered.maintenance.scrub_status import ScrubStatus
from rocketmq_tiered.process.findings import ABOUT, Finding, of_report, unreadable_messages
from rocketmq_tiered.process.report import StatusReport
from rocketmq_tiered.process.run_state import UP, RunState, word_of
from rocketmq_tiered.sending.timer_status import TimerStatus
from tiered.archive.task import EXPIRY, GARBAGE_COLLECTION
from tiered.formats.memory_bound import SHORTAGES
from tiered.object_store.request_metrics import LATENCY_BOUNDS_S, OperationStats, StoreMetrics

PREFIX = "rocketmq_tiered_store"
QUEUES_MAX = 1000
"""Bound of per-queue series: the queues with the largest lag have them; totals count all."""
UNREADABLE_MEANING = "Archived messages that this process could not read: their object is missing or damaged."

Rows = list[tuple[str, str, float | None]]
"""Name, meaning and value of each family; without a value there is none."""

_MEDIUM = {"storage_type": "tiered", "storage_medium": "blob"}
_QUEUE_LABELS = [*_MEDIUM, "topic", "queue_id", "file_type"]


class ScrapeCollector(Collector):
    """Makes its families at each scrape."""

    def describe(self) -> Iterable[Metric]:
        """Nothing: names and labels are not known before a scrape."""
        return []


class StatusCollector(ScrapeCollector):
    """Metrics of the current report."""

    def __init__(self, report: Callable[[], StatusReport]) -> None:
        self._report = report

    def collect(self) -> Iterator[Metric]:
        """All families of one scrape."""
        report = self._report()
        word = word_of(report.state)
        meaning = "1 while an uploader archives, or stands by."
        yield _labelled(GaugeMetricFamily, "up", meaning, word in {state.value for state in UP})
        yield _state_family(word)
        if report.cluster:
            yield from _queue_families(report)
            yield from _total_families(report)
            yield from _garbage_families(report)
            yield attention_family(of_report(report))
            if report.compaction is not None:
                yield from _compaction_families(report.compaction)
            if report.key_compaction is not None:
                yield from _key_families(report.key_compaction)
            if report.timers is not None:
                yield from _timer_families(report.timers)
            if report.scrub is not None:
                yield from _scrub_families(report.scrub)


def _state_family(word: str) -> Metric:
    family = GaugeMetricFamily(f"{PREFIX}_state", "1 for the present state.", labels=[*_MEDIUM, "state"])
    for state in RunState:
        family.add_metric([*_MEDIUM.values(), state.value], int(state.value == word))
    return family


def attention_family(findings: Iterable[Finding]) -> Metric:
    """One gauge for each kind of finding."""
    meaning = "1 for what an operator should look at; tiered status has the next step."
    family = GaugeMetricFamily(f"{PREFIX}_attention", meaning, labels=[*_MEDIUM, "about"])
    found = {finding.about for finding in findings}
    for about in ABOUT:
        family.add_metric([*_MEDIUM.values(), about], int(about in found))
    return family


def _queue_families(report: StatusReport) -> Iterator[Metric]:
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


def _total_families(report: StatusReport) -> Iterator[Metric]:
    gauges: Rows = [
        ("behind_messages", "Messages not archived yet; above 64 MiB an estimate.", report.lag_messages),
        ("behind_bytes", "Bytes not archived yet, all queues.", report.lag_bytes),
        ("behind_seconds", "Age in seconds of the oldest message not archived yet.", report.lag_seconds),
        (
            "retention_margin_seconds",
            "Seconds until the broker deletes messages not archived yet.",
            report.retention_margin_seconds,
        ),
        (
            "dispatch_offset",
            "Physical commitlog offset up to which everything is archived.",
            report.committed_phys,
        ),
        (
            "bound_offset",
            "Physical commitlog offset up to which the broker allows uploads.",
            report.bound_phys,
        ),
        ("gaps", "Gaps of the archive.", report.gaps),
        ("epoch", "Epoch of this writer.", report.epoch),
        ("memory_budget_used_bytes", "Bytes of buffers in use.", report.budget_used_bytes),
        ("memory_budget_limit_bytes", "Limit of buffers in bytes.", report.budget_limit_bytes),
        ("pins", "Commitlog files pinned by hard links.", report.pins),
        (
            "unindexed_objects",
            "Damaged data objects excluded from the message index.",
            report.unindexed_objects,
        ),
        ("unreadable_messages", UNREADABLE_MEANING, unreadable_messages(report.unreadable)),
    ]
    yield from _families(GaugeMetricFamily, gauges)
    counters: Rows = [
        ("gaps_recorded", "Gaps recorded by this process.", report.new_gaps),
        ("messages_dispatch", "Messages archived by this process.", report.messages),
        ("upload_message_bytes", "Message bytes archived by this process.", report.bytes),
        ("errors", "Upload attempts abandoned since the start.", report.errors),
        ("index_files_rebuilt", "Damaged index files rebuilt by this process.", report.index_files_rebuilt),
    ]
    yield from _families(CounterMetricFamily, counters)


def _garbage_families(report: StatusReport) -> Iterator[Metric]:
    expiry, gc = report.task(EXPIRY), report.task(GARBAGE_COLLECTION)
    gauges: Rows = [
        (
            "pending_deletions",
            "Objects that garbage collection has still to delete.",
            report.pending_deletions,
        ),
        (
            "oldest_pending_deletion_seconds",
            "Age in seconds of the oldest pending deletion.",
            report.oldest_pending_deletion_seconds,
        ),
        (
            "garbage_overdue_seconds",
            "Seconds by which the oldest garbage is past its grace period.",
            report.garbage_overdue_seconds,
        ),
        ("gc_interval_seconds", "How often garbage should be collected.", report.gc_interval_seconds),
        (
            "last_gc_timestamp_seconds",
            "When this process collected garbage.",
            _seconds(gc.last_ms),
        ),
        (
            "last_expire_timestamp_seconds",
            "When this process made a pass of expiry.",
            _seconds(expiry.last_ms),
        ),
        (
            "expire_stopped",
            "1 if retention.max_share stopped the last pass of expiry.",
            float(expiry.problem == TOO_MUCH),
        ),
        (
            "diverged_objects",
            "Objects of a truncated or replaced log that wait for their deletion.",
            report.diverged_objects,
        ),
        (
            "hidden_messages",
            "Messages that a truncated or replaced log has hidden, within gc.diverged_grace_ms.",
            report.hidden_messages,
        ),
    ]
    yield from _families(GaugeMetricFamily, gauges)


def _compaction_families(report: CompactionStatus) -> Iterator[Metric]:
    gauges: Rows = [
        ("compaction_interval_seconds", "How often objects are joined.", report.interval_seconds),
        (
            "compaction_last_timestamp_seconds",
            "When a pass of compaction ended well.",
            _seconds(report.last_ms),
        ),
        (
            "compaction_idle_seconds",
            "Seconds since a pass of compaction ended well, or the start.",
            report.idle_seconds,
        ),
        ("compaction_backlog_objects", "Objects due to be joined.", report.backlog_objects),
        ("compaction_backlog_bytes", "Message bytes of objects due to be joined.", report.backlog_bytes),
        ("compaction_round_seconds", "Duration of the last round of compaction.", report.round_seconds),
    ]
    yield from _families(GaugeMetricFamily, gauges)
    counters: Rows = [
        ("compaction_failures", "Passes of compaction that failed.", report.failures),
        ("compaction_rounds", "Rounds of compaction.", report.rounds),
        ("compaction_joined_objects", "Objects that compaction replaced.", report.joined_objects),
        ("compaction_made_objects", "Objects that compaction wrote.", report.made_objects),
        ("compaction_read_bytes", "Bytes that compaction read.", report.bytes_read),
        ("compaction_sent_bytes", "Bytes that compaction wrote.", report.bytes_sent),
        (
            "compaction_copied_bytes",
            "Bytes that the object store copied for compaction.",
            report.bytes_copied,
        ),
    ]
    yield from _families(CounterMetricFamily, counters)


def _scrub_families(report: ScrubStatus) -> Iterator[Metric]:
    gauges: Rows = [
        (
            "scrub_last_timestamp_seconds",
            "When everything had been read back last.",
            _seconds(report.cycle_ms),
        ),
        ("scrub_cycle_ratio", "Share of the cycle in progress.", report.cycle_share),
        ("scrub_damaged_objects", "Damaged objects that scrub could not replace.", report.damaged),
    ]
    yield from _families(GaugeMetricFamily, gauges)
    counters: Rows = [
        ("scrub_objects", "Objects read back.", report.objects),
        ("scrub_healed_objects", "Damaged objects replaced by whole ones.", report.healed),
    ]
    yield from _families(CounterMetricFamily, counters)


def _key_families(report: KeyCompactionStatus) -> Iterator[Metric]:
    gauges: Rows = [
        (
            "key_compaction_last_timestamp_seconds",
            "When a pass of key compaction ended well.",
            _seconds(report.last_ms),
        ),
        ("key_compaction_backlog_queues", "Queues with new keys to compact.", report.backlog_queues),
        ("key_compaction_backlog_bytes", "New message bytes of these queues.", report.backlog_bytes),
    ]
    yield from _families(GaugeMetricFamily, gauges)
    counters: Rows = [
        ("key_compaction_failures", "Passes of key compaction that failed.", report.failures),
        ("key_compaction_rounds", "Rounds of key compaction.", report.rounds),
        ("key_compaction_keys", "Keys of compacted queues.", report.keys),
        ("key_compaction_read_messages", "Messages before key compaction.", report.read_messages),
        ("key_compaction_kept_messages", "Messages that key compaction kept.", report.kept_messages),
        ("key_compaction_spooled_bytes", "Bytes of keys that exceeded memory.", report.spooled_bytes),
    ]
    yield from _families(CounterMetricFamily, counters)


def _timer_families(report: TimerStatus) -> Iterator[Metric]:
    gauges: Rows = [
        ("timers_pending", "Timers that are not handed over to the broker.", report.pending),
        ("timers_next_hour", "Of them, those delivered in this hour and the next.", report.next_hour),
        ("timers_objects", "Objects of timers.", report.objects),
        ("timers_overdue_seconds", "How long the first pending timer has been due.", report.overdue_seconds),
        ("timers_late_p99_seconds", "How late the newest 10,000 were handed over.", report.late_p99_seconds),
    ]
    yield from _families(GaugeMetricFamily, gauges)
    counters: Rows = [
        ("timers_delivered", "Timers handed over.", report.delivered),
        ("timers_found", "Of them, those the broker already had after a failure.", report.found),
        ("timers_cancelled", "Timers that were cancelled.", report.cancelled),
        ("timers_repeated", "Timers with key and time of another one, not sent.", report.repeated),
        ("timers_refused", "Messages of the gateway topic that are no timers.", report.refused),
        ("timers_dropped", "Timers without their message.", report.dropped),
        ("timers_postponed", "Timers that the broker refused, to be sent again.", report.postponed),
    ]
    yield from _families(CounterMetricFamily, counters)


def _seconds(time_ms: int | None) -> float | None:
    return None if time_ms is None else time_ms / 1000


def _families(kind: type[GaugeMetricFamily | CounterMetricFamily], rows: Rows) -> Iterator[Metric]:
    for name, meaning, value in rows:
        if value is not None:
            yield _labelled(kind, name, meaning, value)


def _labelled(
    kind: type[GaugeMetricFamily | CounterMetricFamily], name: str, meaning: str, value: float
) -> Metric:
    family = kind(f"{PREFIX}_{name}", meaning, labels=list(_MEDIUM))
    family.add_metric(list(_MEDIUM.values()), value)
    return family


class ObjectStoreCollector(ScrapeCollector):
    """Metrics of object store requests. Bytes are histograms as in RocketMQ, with sum and count only."""

    def __init__(self, metrics: StoreMetrics) -> None:
        self._metrics = metrics

    def collect(self) -> Iterator[Metric]:
        """All families of one scrape."""
        snapshot = self._metrics.snapshot()
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


class DecodingCollector(ScrapeCollector):
    """Metrics of decoding objects, in every mode."""

    def collect(self) -> Iterator[Metric]:
        """All families of one scrape."""
        meaning = "Objects that could not be decoded for lack of memory."
        yield _labelled(CounterMetricFamily, "decode_memory_shortages", meaning, SHORTAGES.count)


_WRITES = frozenset({"put", "compose", "delete"})


def _buckets_ms(stats: OperationStats) -> list[tuple[str, float]]:
    """Cumulative counts by upper bound in milliseconds."""
    bounds = [f"{bound * 1000:g}" for bound in LATENCY_BOUNDS_S] + ["+Inf"]
    return list(zip(bounds, itertools.accumulate(stats.latency_counts), strict=True))
