"""A pass of expiry inside `tiered run` stops at retention.max_share."""

from __future__ import annotations

from dataclasses import replace

import pytest

from rocketmq_tiered.maintenance.expiry_task import TOO_MUCH, ExpiryTask
from tests.archive.archive_builder import NOW_MS, ArchiveBuilder, Sent
from tiered.archive.task import run_pass
from tiered.catalog.catalog_reader import load
from tiered.model.queue import QueueKey
from tiered.object_store.memory import MemoryStore
from tiered.settings.retention_sections import RetentionSettings
from tiered.settings.sections import Settings
from tiered.settings.topic_rules import TopicRules

HOUR_MS = 3_600_000


@pytest.mark.parametrize(("max_share", "stopped"), [(0.2, True), (1.0, False)])
def test_a_pass_says_whether_it_was_stopped(max_share: float, stopped: bool) -> None:
    now_ms = [NOW_MS]
    store = MemoryStore(clock_ms=lambda: now_ms[0])
    ArchiveBuilder(store).commit([Sent(QueueKey("a", 0, 0), b"message", stored_ms=NOW_MS)])
    now_ms[0] += 500 * HOUR_MS
    settings = replace(Settings(), retention=RetentionSettings(ttl="1h", max_share=max_share))
    before = load(store)
    rules = TopicRules.of(settings)
    task = ExpiryTask(
        store, settings, lambda _state: lambda topic: rules.of_topic(topic, {}), clock=lambda: now_ms[0]
    )
    assert run_pass(task, lambda: before)
    assert (task.problem == TOO_MUCH) is stopped
    assert (load(store).version == before.version) is stopped
