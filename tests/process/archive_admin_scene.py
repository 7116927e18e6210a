"""The admin source of `tiered serve` over a service that owns its groups, without a network."""

from types import SimpleNamespace
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from rocketmq_tiered.process.archive_admin import ArchiveAdminSource
from rocketmq_tiered.server.archive_mode.archive_service import ArchiveStatus
from tiered.archive.unreadable import UnreadableRanges
from tiered.clock import Clock

PREFIX = "rocketmq_tiered_store_"


class Scene:
    """A source over a service that owns its groups, on a clock of its own."""

    def __init__(self) -> None:
        self.now_s = 100.0
        self.problem = ""
        self.offsets = SimpleNamespace(holds_lease=True)
        self.audited = {"refused": 3, "reset": 1}
        service: Any = SimpleNamespace(
            status=lambda: ArchiveStatus(5, [("a", 2), ("b", 1)], self.offsets.holds_lease),
            offsets=self.offsets,
            audited=self.audited,
            refused_proxy_headers=7,
        )
        self.unreadable = UnreadableRanges()
        access: Any = SimpleNamespace(
            title="c/b in file:///a",
            state=SimpleNamespace(version=9),
            fetcher=SimpleNamespace(unreadable=self.unreadable),
        )
        self.source = ArchiveAdminSource(
            access, service, lambda: self.problem, Clock(monotonic_s=lambda: self.now_s)
        )

    def metrics(self) -> dict[tuple[str, ...], float]:
        families = text_string_to_metric_families(self.source.metrics().decode())
        return {
            (sample.name.removeprefix(PREFIX), *sorted(sample.labels.values())): sample.value
            for family in families
            for sample in family.samples
        }
