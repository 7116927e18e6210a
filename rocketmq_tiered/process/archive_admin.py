"""Contents of the admin pages of `tiered serve`: health, readiness, status and metrics. Owns names and labels."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict

import orjson
from prometheus_client import CollectorRegistry, PlatformCollector, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from fetcher.access import ArchiveAccess
from rocketmq_tiered.process.findings import of_unreadable, unreadable_messages
from rocketmq_tiered.process.metrics import PREFIX, UNREADABLE_MEANING, DecodingCollector, ScrapeCollector
from rocketmq_tiered.server.archive_mode.archive_service import ArchiveService
from tiered.archive.unreadable import UnreadableRange
from tiered.console import camel_names

logger = logging.getLogger(__name__)

BEAT_S = 1.0
STALLED_S = 10.0
"""Without a beat for so long, the event loop is held up or has ended."""


class ArchiveAdminSource:
    """See AdminSource. ``beat`` runs on the event loop, the pages in the admin server's threads."""

    def __init__(
        self,
        access: ArchiveAccess,
        service: ArchiveService,
        problem: Callable[[], str] = str,
        clock_s: Callable[[], float] = time.monotonic,
    ) -> None:
        """``problem``: why the archive's catalog cannot be read; empty if it can."""
        self._access, self._service, self._clock_s = access, service, clock_s
        self._problem = problem
        self._beaten_s = clock_s()
        self._logged: frozenset[UnreadableRange] = frozenset()
        self.address = ""
        """The address that clients connect to, once it serves."""
        self._registry = CollectorRegistry()
        ProcessCollector(registry=self._registry)
        PlatformCollector(registry=self._registry)
        self._registry.register(DecodingCollector())
        self._registry.register(_ArchiveCollector(access, service, problem))

    async def beat(self) -> None:
        """Show that the event loop runs, until cancelled."""
        while True:
            self._beaten_s = self._clock_s()
            self._log_unreadable()
            await asyncio.sleep(BEAT_S)

    @property
    def unreadable(self) -> tuple[UnreadableRange, ...]:
        """What clients could not read."""
        return self._access.fetcher.unreadable.ranges()

    def _log_unreadable(self) -> None:
        ranges = self.unreadable
        for found in ranges:
            if found not in self._logged:
                logger.error("attention: %s", of_unreadable([found]).what, extra={"about": "unreadable"})
        self._logged = frozenset(ranges)

    def health(self) -> tuple[bool, str]:
        """Whether the event loop runs."""
        silent_s = self._clock_s() - self._beaten_s
        if silent_s > STALLED_S:
            return False, f"no request has been served for {silent_s:.0f} s: the event loop is held up"
        return True, "serving" if self.address else "starting"

    def readiness(self) -> tuple[bool, str]:
        """Whether consumers can commit offsets here."""
        if not self.address:
            return False, "starting"
        if problem := self._problem():
            return False, f"blocked: object store: {problem}"
        finding = f"\n{of_unreadable(ranges).text}" if (ranges := self.unreadable) else ""
        if not self._service.offsets.holds_lease:
            return False, f"another server owns the consumer groups; messages are served{finding}"
        return True, f"serving, and owner of the consumer groups{finding}"

    def status_json(self) -> bytes:
        """See AdminSource."""
        status, access = self._service.status(), self._access
        document = {
            "archive": access.title, "address": self.address, "catalogVersion": access.state.version,
            "storeProblem": self._problem(), "ownsGroups": status.owns_groups, "connections": status.connections,
            "groups": [{"name": name, "members": members} for name, members in status.groups],
            "audited": dict(self._service.audited),
            "unreadable": [camel_names(asdict(found)) for found in self.unreadable],
        }  # fmt: skip
        return orjson.dumps(document, option=orjson.OPT_APPEND_NEWLINE)

    def metrics(self) -> bytes:
        """See AdminSource."""
        return generate_latest(self._registry)


class _ArchiveCollector(ScrapeCollector):
    def __init__(self, access: ArchiveAccess, service: ArchiveService, problem: Callable[[], str]) -> None:
        self._access, self._service, self._problem = access, service, problem

    def collect(self) -> Iterator[Metric]:
        """All families of one scrape."""
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
        count = unreadable_messages(self._access.fetcher.unreadable.ranges())
        yield GaugeMetricFamily(f"{PREFIX}_unreadable_messages", UNREADABLE_MEANING, value=count)
        yield CounterMetricFamily(
            f"{PREFIX}_serve_refused_proxy_headers",
            "connections closed because of a PROXY header from outside serve.proxy_from",
            self._service.refused_proxy_headers,
        )
        audited = CounterMetricFamily(
            f"{PREFIX}_serve_audited",
            "refused requests, resets, commits by clients outside the group, reloads of rules and certificates",
            labels=["event"],
        )
        for event, count in sorted(self._service.audited.items()):
            audited.add_metric([event], count)
        yield audited
