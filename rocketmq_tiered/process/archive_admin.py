"""Contents of the admin pages of `tiered serve`: health, readiness, status and metrics. Owns names and labels."""

from collections.abc import Callable, Iterator
from dataclasses import asdict

import orjson
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from fetcher.access import ArchiveAccess
from rocketmq_tiered.process.event_loop_admin import EventLoopSource
from rocketmq_tiered.process.findings import Finding, of_unreadable, unreadable_messages
from rocketmq_tiered.process.metrics import PREFIX, UNREADABLE_MEANING, decoding_families
from rocketmq_tiered.server.archive_mode.archive_service import ArchiveService
from tiered.archive.unreadable import UnreadableRange
from tiered.clock import MACHINE_CLOCK, Clock
from tiered.console import camel_names


class ArchiveAdminSource(EventLoopSource):
    """What the admin server of `tiered serve` shows."""

    def __init__(
        self,
        access: ArchiveAccess,
        service: ArchiveService,
        problem: Callable[[], str] = str,
        clock: Clock = MACHINE_CLOCK,
    ) -> None:
        """``service``: the server that reads messages by ``access``; ``problem`` says why the archive's catalog cannot
        be read, and is empty if it can."""
        super().__init__(clock, decoding_families, self.families)
        self._access, self._service, self._problem = access, service, problem
        self.address = ""
        """The address that clients connect to, once it serves."""

    @property
    def unreadable(self) -> tuple[UnreadableRange, ...]:
        """What clients could not read."""
        return self._access.fetcher.unreadable.ranges()

    def findings(self) -> list[Finding]:
        """A finding for each range that clients could not read."""
        return [of_unreadable([found]) for found in self.unreadable]

    def is_serving(self) -> bool:
        """Whether clients can connect."""
        return bool(self.address)

    def readiness(self) -> tuple[bool, str]:
        """The answer of /ready: whether this server owns the consumer groups, so that consumers can commit offsets
        here; and a text with the reason and unreadable messages, if there are any."""
        if not self.address:
            return False, "starting"
        if problem := self._problem():
            return False, f"blocked: object store: {problem}"
        finding = f"\n{of_unreadable(ranges).text}" if (ranges := self.unreadable) else ""
        if not self._service.offsets.holds_lease:
            return False, f"another server owns the consumer groups; messages are served{finding}"
        return True, f"serving, and owner of the consumer groups{finding}"

    def status_json(self) -> bytes:
        """The answer of /status.json: how `tiered serve` and its archive are, as JSON."""
        status, access = self._service.status(), self._access
        document = {
            "archive": access.title,
            "address": self.address,
            "catalogVersion": access.state.version,
            "storeProblem": self._problem(),
            "ownsGroups": status.owns_groups,
            "connections": status.connections,
            "groups": [{"name": name, "members": members} for name, members in status.groups],
            "audited": dict(self._service.audited),
            "unreadable": [camel_names(asdict(found)) for found in self.unreadable],
        }
        return orjson.dumps(document, option=orjson.OPT_APPEND_NEWLINE)

    def families(self) -> Iterator[Metric]:
        """The metrics of `tiered serve` at this moment, one family for each name."""
        status = self._service.status()
        gauges = {
            "connections": ("client connections", status.connections),
            "consumers": ("connected members of consumer groups", sum(count for _, count in status.groups)),
            "owns_groups": ("1 while this server owns the consumer groups", int(status.owns_groups)),
            "store_blocked": ("1 while the archive's catalog cannot be read", int(bool(self._problem()))),
            "catalog_version": ("catalog version that clients see", self._access.state.version),
        }
        for name, (meaning, value) in gauges.items():
            yield GaugeMetricFamily(f"{PREFIX}_serve_{name}", meaning, value=value)
        count = unreadable_messages(self.unreadable)
        yield GaugeMetricFamily(f"{PREFIX}_unreadable_messages", UNREADABLE_MEANING, value=count)
        yield CounterMetricFamily(
            f"{PREFIX}_serve_refused_proxy_headers",
            "connections closed because of a PROXY header from outside serve.proxy_from",
            self._service.refused_proxy_headers,
        )
        audited = CounterMetricFamily(
            f"{PREFIX}_serve_audited",
            "audit log: refused requests, resets, commits by clients outside the group, reloads of rules and files",
            labels=["event"],
        )
        for event, count in sorted(self._service.audited.items()):
            audited.add_metric([event], count)
        yield audited
