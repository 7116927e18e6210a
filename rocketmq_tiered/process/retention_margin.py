"""Measures the retention margin: the time until the broker deletes commitlog that is not archived.

Gathers the inputs of the estimate, which is tiered.broker_store.retention.
"""

from __future__ import annotations

import time
from dataclasses import replace

from tiered.broker_store.conf import BrokerConf
from tiered.broker_store.pins import measure_disk
from tiered.broker_store.retention import deletion_margin
from tiered.broker_store.store import BrokerStore

GROWTH_WINDOW_S = 10.0


def retention_margin_s(
    store: BrokerStore, committed_phys: int, end_phys: int, growth_bytes_per_s: float
) -> float | None:
    """Seconds until the broker deletes unarchived log; None without risk, or if unknown.

    ``end_phys``: end of the written log. Without a broker.conf, RocketMQ's defaults apply.
    """
    if committed_phys >= end_phys:
        return None
    files = []
    for file in store.commit_log.files:
        if file.is_pinned:
            continue
        try:
            files.append((file, int(file.path.stat().st_mtime * 1000)))
        except FileNotFoundError:  # the broker deleted it since the listing
            continue
    if not files:
        return None
    disk = replace(measure_disk(files[-1][0].path), growth_bytes_per_s=growth_bytes_per_s)
    margin = deletion_margin(
        files,
        committed_phys,
        store.conf or BrokerConf(),
        disk,
        now_ms=time.time_ns() // 1_000_000,
        zone=store.zone().zone,
    )
    return margin.seconds


class LogGrowth:
    """Growth rate of the commitlog, measured at least GROWTH_WINDOW_S apart."""

    def __init__(self) -> None:
        self._since: tuple[float, int] | None = None
        self._bytes_per_s = 0.0

    def bytes_per_s(self, now_s: float, end_phys: int) -> float:
        """The rate, given the present end of the log; 0 until known."""
        if self._since is None:
            self._since = (now_s, end_phys)
        elif now_s - self._since[0] >= GROWTH_WINDOW_S:
            self._bytes_per_s = max(0.0, (end_phys - self._since[1]) / (now_s - self._since[0]))
            self._since = (now_s, end_phys)
        return self._bytes_per_s
