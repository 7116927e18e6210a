"""Metrics of proxy and slave mode. Owns names and labels."""

from collections.abc import Iterator, Mapping
from typing import Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from rocketmq_tiered.process.metrics import PREFIX
from rocketmq_tiered.server.proxy.proxy_service import ProxyService
from rocketmq_tiered.server.proxy.relay_service import RelayService
from rocketmq_tiered.server.slave.registration import RegistrationState
from rocketmq_tiered.server.slave.slave_service import SlaveService


def serving_families(service: RelayService[Any]) -> Iterator[Metric]:
    """The metrics of proxy or slave mode at this moment, one family for each name."""
    if isinstance(service, SlaveService):
        yield from _shared("slave", "master", service)
        yield from _slave(service)
    elif isinstance(service, ProxyService):
        yield from _shared("proxy", "broker", service)
        yield from _proxy(service)


def _shared(mode: str, broker: str, service: RelayService[Any]) -> Iterator[Metric]:
    """Metrics that proxy and slave mode have in common, with ``mode`` in their names; ``broker`` is the word for the
    broker in their descriptions."""
    status, counters = service.status(), service.counters
    yield _gauge(f"{mode}_connections", "client connections", status.connections)
    yield _gauge(
        f"{mode}_archive_open", "1 once the archive is open for clients", int(status.is_archive_open)
    )
    members = sum(group.members for group in status.groups)
    yield _gauge(f"{mode}_consumers", "connected members of consumer groups", members)
    yield CounterMetricFamily(
        f"{PREFIX}_{mode}_refused_proxy_headers",
        "connections closed because of a PROXY header from outside serve.proxy_from",
        service.refused_proxy_headers,
    )
    moved = "consumers that were moved to the beginning of a recreated topic"
    yield CounterMetricFamily(f"{PREFIX}_{mode}_recreated_positions", moved, counters.recreated)
    answered = {str(code): count for code, count in list(counters.answered.items())}
    relayed = {str(code): count for code, count in list(counters.relayed.items())}
    yield _counters(f"{mode}_answered", "requests answered by this process", "code", answered)
    yield _counters(f"{mode}_relayed", f"requests relayed to the {broker}", "code", relayed)
    yield _counters(
        f"{mode}_failed",
        f"requests without a reply of the {broker}, by outcome for the client",
        "outcome",
        {name.lower(): count for name, count in list(counters.failed.items())},
    )
    events = (
        "refused requests, resets, commits by clients outside the group, reloads of rules and certificates"
    )
    yield _counters(f"{mode}_audited", events, "event", service.audited)


def _proxy(service: ProxyService) -> Iterator[Metric]:
    connections = service.status().broker_connections
    yield _gauge("proxy_broker_connections", "connections to the broker, made for clients", connections)
    routes = "routes sent to clients with this process in them"
    yield CounterMetricFamily(f"{PREFIX}_proxy_routes", routes, service.counters.routes)
    timers = "timers sent to the gateway topic, recalled there, and refused"
    yield _counters("proxy_timers", timers, "outcome", service.counters.timers)


def _slave(service: SlaveService) -> Iterator[Metric]:
    """Metrics that only slave mode has: registration, the master, and which broker consumers are sent to."""
    status, counters = service.status(), service.counters
    registered = GaugeMetricFamily(
        f"{PREFIX}_slave_registered", "1 if the name server lists this process", labels=["name_server"]
    )
    for address, state in status.name_servers:
        registered.add_metric([address], int(state == RegistrationState.REGISTERED.value))
    yield registered
    yield _gauge("slave_master_available", "1 while the master answers", int(status.is_master_available))
    dropped = "offset commits that came while the master was away"
    yield CounterMetricFamily(f"{PREFIX}_slave_commits_dropped", dropped, counters.commits_dropped)
    pulls = {"slave": counters.pulls.to_slave, "master": counters.pulls.to_master}
    yield _counters("slave_pulls", "pull replies, by the broker suggested for the next pull", "next", pulls)
    delayed = "empty pull replies delayed, so that clients pull at most once a second"
    yield CounterMetricFamily(f"{PREFIX}_slave_pulls_delayed", delayed, counters.pulls.delayed)


def _gauge(name: str, meaning: str, value: float) -> Metric:
    return GaugeMetricFamily(f"{PREFIX}_{name}", meaning, value=value)


def _counters(name: str, meaning: str, label: str, counts: Mapping[str, int]) -> Metric:
    family = CounterMetricFamily(f"{PREFIX}_{name}", meaning, labels=[label])
    for value, count in sorted(counts.items()):
        family.add_metric([value], count)
    return family
