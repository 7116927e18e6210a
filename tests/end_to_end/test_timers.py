"""Timers: from messages of the gateway topic to objects by hour, and what expiry and verification make of them."""

from __future__ import annotations

from pathlib import Path

from rocketmq_tiered.maintenance.expire import Erasure, commit_pass, plan_pass
from rocketmq_tiered.maintenance.expire_plan import NEVER_MS
from tests.end_to_end.offloading import backfill
from tests.uploader.timer_broker import TOPIC, TimerBroker
from tiered.archive.timers import TimerFiles
from tiered.archive.verify import verify_archive
from tiered.catalog.catalog_reader import load
from tiered.formats.keys import archive_prefix
from tiered.model.queue import QueueKey
from tiered.model.timer import EntryKind, Refusal
from tiered.object_store.memory import MemoryStore
from tiered.object_store.prefixed import PrefixedStore
from tiered.settings.topic_rules import TopicRule

HOUR = 3_600_000
NOW = 1_700_000_000_000
RULE = TopicRule("any", 1, 0, "", None, "", "off", "")


def archived(tmp_path: Path) -> tuple[PrefixedStore, TimerBroker]:
    broker, memory = TimerBroker(tmp_path / "store"), MemoryStore()
    broker.send(3)
    broker.timer("A", NOW + 50 * HOUR)
    broker.send_with({"UNIQ_KEY": "B"}, body="nonsense")
    broker.timer("C", NOW + 50 * HOUR + 1)
    broker.timer("D", NOW + 9000 * HOUR, TIERED_CANCEL=f"{NOW + 50 * HOUR} A")
    backfill(broker.path, memory)
    return PrefixedStore(memory, archive_prefix("FxCluster", "fx-a")), broker


def test_timers_are_committed_with_their_messages(tmp_path: Path) -> None:
    store, _ = archived(tmp_path)
    state, files = load(store), TimerFiles(store)
    assert files.hours(state) == {0: 1, (NOW + 50 * HOUR) // HOUR: 3, (NOW + 9000 * HOUR) // HOUR: 1}
    table = next(files.pending(state, 0, NEVER_MS)).table
    assert [(row["kind"], row["queue_offset"]) for row in table] == [
        (EntryKind.REFUSED, 1),
        (EntryKind.TIMER, 0),
        (EntryKind.CANCEL, 3),
        (EntryKind.TIMER, 2),
        (EntryKind.TIMER, 3),
    ]
    assert table["key_hash"][0] == Refusal.NO_TOPIC
    assert files.find(state, "C").table["queue_offset"].tolist() == [2]
    assert not len(files.find(state, "A").table)
    report = verify_archive(store, full=True)
    assert not report.anomalies and not report.leftovers and report.counts["timers"] == 5


def test_messages_of_timers_do_not_expire(tmp_path: Path) -> None:
    store, _ = archived(tmp_path)
    state, topic = load(store), QueueKey(TOPIC, 0, 0)
    for erase in (None, Erasure(TOPIC)):
        found = plan_pass(store, state, lambda _: RULE, clock=lambda: store_ms(store), erase=erase)
        state = commit_pass(store, state, found, clock=lambda: store_ms(store))
        row = state.queue(topic)
        assert row is not None and row["min_queue_offset"] == 0
    orders = state.queue(QueueKey("orders", 0, 0))
    assert orders is not None and orders["min_queue_offset"] == 3
    assert not verify_archive(store, full=True).anomalies


def store_ms(store: PrefixedStore) -> int:
    return max(info.modified_ms for info in store.list("catalog/")) + 1
