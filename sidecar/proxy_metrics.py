"""The proxy in metrics and status: who is connected, what was relayed, answered and refused. Owns names and labels."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from server.proxy.group_reads import GroupReading
from server.proxy.proxy_status import ProxyCounters, ProxyStatus
from sidecar.metrics import PREFIX
from sidecar.report import GroupReport, ProxyReport


class ProxyCollector(Collector):
    """Reads the proxy at each scrape."""

    def __init__(self, status: Callable[[], ProxyStatus], counters: ProxyCounters) -> None:
        self._status, self._counters = status, counters

    def describe(self) -> Iterable[Metric]:
        """Nothing: codes appear when they are first asked."""
        return []

    def collect(self) -> Iterator[Metric]:
        """All families of one scrape."""
        status, counters = self._status(), self._counters
        gauges = [
            ("serve_connections", "clients connected", status.connections),
            ("serve_broker_connections", "clients' connections to the broker", status.broker_connections),
            ("serve_archive_open", "1 once the archive is open for clients", int(status.is_archive_open)),
            ("serve_consumers", "members of consumer groups here", sum(count for _, count in status.groups)),
        ]
        for name, meaning, value in gauges:
            yield GaugeMetricFamily(f"{PREFIX}_{name}", meaning, value=value)
        routes = "routes given out with this process in them"
        yield CounterMetricFamily(f"{PREFIX}_serve_routes", routes, counters.routes)
        relayed = {str(code): count for code, count in list(counters.relayed.items())}
        answered = {str(code): count for code, count in list(counters.answered.items())}
        yield counted("serve_relayed", "requests relayed to the broker", "code", relayed)
        yield counted("serve_answered", "requests answered here", "code", answered)
        yield counted(
            "serve_failed", "requests not relayed, by what clients were told", "told", dict(counters.failed)
        )


def group_reports(readings: Sequence[GroupReading]) -> tuple[GroupReport, ...]:
    """What groups read, for the status document."""
    return tuple(
        GroupReport(
            reading.name,
            reading.members,
            reading.archive_pulls,
            reading.broker_pulls,
            reading.behind_messages,
        )
        for reading in readings
    )


def serving_report(status: ProxyStatus) -> ProxyReport:
    """The part of the status document about clients."""
    groups = group_reports(status.readings)
    return ProxyReport(
        status.address, status.connections, status.broker_connections, status.is_archive_open, groups
    )


def counted(name: str, meaning: str, label: str, counts: Mapping[str, int]) -> Metric:
    """A counter by ``label``."""
    family = CounterMetricFamily(f"{PREFIX}_{name}", meaning, labels=[label])
    for value, count in sorted(counts.items()):
        family.add_metric([value], count)
    return family
