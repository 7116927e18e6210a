"""A pass of expiry inside `tiered run` stops at retention.max_share."""

from __future__ import annotations

from dataclasses import replace

import pytest

from rocketmq_tiered.maintenance.expire import TOO_MUCH, ExpiryTask
from tests.archive.archive_builder import NOW_MS, ArchiveBuilder, Sent
from tiered.archive.task import run_pass
from tiered.catalog.catalog_reader import load
from tiered.model.queue import QueueKey
from tiered.object_store.memory import MemoryStore
from tiered.settings.retention_sections import GcSettings, RetentionSettings
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


def task_of(store: MemoryStore, now_ms: list[int], ttl: str) -> ExpiryTask:
    settings = replace(
        Settings(), retention=RetentionSettings(ttl=ttl, max_share=0.2), gc=GcSettings(every_ms=HOUR_MS)
    )
    rules = TopicRules.of(settings)
    return ExpiryTask(
        store, settings, lambda _state: lambda topic: rules.of_topic(topic, {}), clock=lambda: now_ms[0]
    )


def test_an_outage_does_not_stop_the_pass_after_it() -> None:
    """A commit an hour, each a twentieth of the archive; then no pass for five hours."""
    now_ms, topic = [NOW_MS], QueueKey("a", 0, 0)
    store = MemoryStore(clock_ms=lambda: now_ms[0])
    made = ArchiveBuilder(store)
    for hour in range(20):
        now_ms[0] = NOW_MS + hour * HOUR_MS
        made.commit([Sent(topic, b"message", stored_ms=now_ms[0])])
    task = task_of(store, now_ms, "20h")
    for hour, first in ((20.5, 1), (21.5, 2), (26.5, 7)):
        now_ms[0] = NOW_MS + int(hour * HOUR_MS)
        assert run_pass(task, lambda: load(store))
        queue = load(store).queue(topic)
        assert queue is not None and (task.problem, int(queue["min_queue_offset"])) == ("", first)
    fresh = task_of(store, now_ms, "20h")
    now_ms[0] += 5 * HOUR_MS
    assert run_pass(fresh, lambda: load(store)) and fresh.problem == TOO_MUCH, "it knows of no pass"
    task._rules_of = task_of(store, now_ms, "10h")._rules_of
    assert run_pass(task, lambda: load(store)) and task.problem == TOO_MUCH, (
        "a rule that changed is no outage"
    )
