"""The slave in metrics and status: where it is registered, who is connected, what was answered.

Owns names and labels.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from server.slave.registration import RegistrationState
from server.slave.slave_status import SlaveCounters, SlaveStatus
from sidecar.metrics import PREFIX
from sidecar.proxy_metrics import counted, group_reports
from sidecar.report import SlaveReport


class SlaveCollector(Collector):
    """Reads the slave at each scrape."""

    def __init__(self, status: Callable[[], SlaveStatus], counters: SlaveCounters) -> None:
        self._status, self._counters = status, counters

    def describe(self) -> Iterable[Metric]:
        """Nothing: codes appear when they are first asked."""
        return []

    def collect(self) -> Iterator[Metric]:
        """All families of one scrape."""
        status, counters = self._status(), self._counters
        registered = GaugeMetricFamily(
            f"{PREFIX}_slave_registered", "1 where the name server lists this process", labels=["name_server"]
        )
        for standing in status.standings:
            registered.add_metric([standing.name_server], int(standing.stand is RegistrationState.REGISTERED))
        yield registered
        yield GaugeMetricFamily(
            f"{PREFIX}_slave_connections", "clients connected to the slave", value=status.connections
        )
        yield GaugeMetricFamily(
            f"{PREFIX}_slave_master_answers", "1 while the master answers", value=int(status.is_master_well)
        )
        dropped = "offsets of groups that came while the master was away"
        yield CounterMetricFamily(f"{PREFIX}_slave_commits_dropped", dropped, counters.commits_dropped)
        pulls = {"here": counters.pulls.kept, "master": counters.pulls.handed_back}
        yield counted(
            "slave_pulls", "pulls answered, by where their clients were told to go on", "goes", pulls
        )
        put_off = "answers without news that waited, so that their clients ask once a second at most"
        yield CounterMetricFamily(f"{PREFIX}_slave_put_off", put_off, counters.pulls.put_off)
        answered = {str(code): count for code, count in list(counters.answered.items())}
        relayed = {str(code): count for code, count in list(counters.relayed.items())}
        yield counted("slave_answered", "requests to the slave answered here", "code", answered)
        yield counted("slave_relayed", "requests to the slave relayed to the master", "code", relayed)
        yield counted(
            "slave_failed", "requests not relayed, by what clients were told", "told", dict(counters.failed)
        )


def slave_report(status: SlaveStatus) -> SlaveReport:
    """The part of the status document about slave mode."""
    standings = tuple(
        (standing.name_server, standing.stand.value + (f": {standing.why}" if standing.why else ""))
        for standing in status.standings
    )
    return SlaveReport(
        status.address, status.broker_id, status.connections, status.is_archive_open, status.is_master_well,
        status.redirects, standings, group_reports(status.readings), status.master_failure,
    )  # fmt: skip
