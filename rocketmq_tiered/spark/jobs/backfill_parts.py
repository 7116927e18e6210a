"""Cuts a commitlog at the ends of its files, and groups tasks into stages. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import TypeVar

from rocketmq_tiered.spark.jobs.backfill_tasks import LogPart
from tiered.broker_store.store import BrokerStore

T = TypeVar("T")


def log_parts(store: BrokerStore, start_phys: int, limit_phys: int, proven_phys: int) -> list[LogPart]:
    """[start, limit) cut at the ends of commitlog files. Files above ``proven_phys`` join the part before them."""
    parts: list[LogPart] = []
    begin = start_phys
    for file in store.commit_log.files:
        end = min(file.end_phys, limit_phys)
        if end <= begin:
            continue
        if parts and begin > proven_phys:
            parts[-1] = replace(parts[-1], to_phys=end)
        else:
            parts.append(LogPart(begin, end, proven_phys))
        begin = end
    return parts


def grouped(items: Iterator[T], size: int) -> Iterator[list[T]]:
    """Lists of ``size`` items; the last may be shorter."""
    group: list[T] = []
    for item in items:
        group.append(item)
        if len(group) == size:
            yield group
            group = []
    if group:
        yield group
