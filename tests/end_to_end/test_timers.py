"""Timers: from messages of the gateway topic to objects by hour, and what expiry and verification make of them."""

from pathlib import Path

import pytest

from rocketmq_tiered.maintenance.expire import Erasure, commit_pass, plan_pass
from rocketmq_tiered.maintenance.expire_plan import NEVER_MS
from tests.end_to_end.offloading import backfill
from tests.uploader.timer_broker import TOPIC as GATEWAY
from tests.uploader.timer_broker import TimerBroker
from tiered.archive.timers import TimerFiles, TimerName, joined, sort_out
from tiered.archive.verify import verify_archive
from tiered.catalog.catalog_reader import load
from tiered.clock import Clock
from tiered.errors import NotFoundError
from tiered.formats.keys import archive_prefix
from tiered.model.queue import QueueKey
from tiered.model.timer import (
    CANCEL,
    DELIVER_MS,
    QUEUE,
    TOPIC,
    EntryKind,
    Refusal,
    TimerPlace,
    cancel_properties,
)
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
    broker.timer("D", NOW + 9000 * HOUR, **{CANCEL: f"{NOW + 50 * HOUR} A"})
    broker.timer("A", NOW + 60 * HOUR, "mails")
    broker.timer("A", NOW + 60 * HOUR)
    broker.send_with(cancel_properties("orders", NOW + 60 * HOUR, "A"))
    backfill(broker.path, memory)
    return PrefixedStore(memory, archive_prefix("FxCluster", "fx-a")), broker


def test_timers_are_committed_with_their_messages(tmp_path: Path) -> None:
    """Cancellations end those of their own topic."""
    store, _ = archived(tmp_path)
    state, files = load(store), TimerFiles(store)
    hours = {(NOW + hours * HOUR) // HOUR: 1 for hours in (50, 60, 9000)}
    assert files.counts(state) == (hours, 0, 1)
    found = sort_out(joined(list(files.pending(state, 0, NEVER_MS))))
    assert found.timers["queue_offset"].tolist() == [2, 4, 3]
    assert found.cancelled["queue_offset"].tolist() == [0, 5]
    assert found.refused["queue_offset"].tolist() == [1]
    assert found.refused["key_hash"].tolist() == [Refusal.NO_TOPIC]
    assert files.find(state, TimerName("orders", "C")).table["queue_offset"].tolist() == [2]
    assert files.find(state, TimerName("mails", "A")).table["queue_offset"].tolist() == [4]
    assert files.find(state, TimerPlace(0, 4)).table["queue_offset"].tolist() == [4]
    with pytest.raises(NotFoundError, match="no timer A of topic orders is pending"):
        files.find(state, TimerName("orders", "A"))
    report = verify_archive(store, depth="full")
    assert not report.anomalies and not report.leftovers and report.counts["timers"] == 8


@pytest.mark.parametrize(
    ("properties", "refusal"),
    [
        ({TOPIC: "orders", DELIVER_MS: "1798534000"}, Refusal.SECONDS),
        ({TOPIC: "orders", DELIVER_MS: "-5"}, Refusal.BAD_TIME),
        ({TOPIC: "orders", CANCEL: "1798534000 K"}, Refusal.BAD_CANCEL),
        ({CANCEL: f"{NOW} K"}, Refusal.NO_TOPIC),
        ({TOPIC: "orders", DELIVER_MS: str(NOW), QUEUE: "first"}, Refusal.BAD_QUEUE),
        *(
            ({TOPIC: topic, DELIVER_MS: str(NOW)}, Refusal.BAD_TARGET)
            for topic in (
                "rmq_sys_wheel_timer",
                "RMQ_SYS_TRANS_HALF_TOPIC",
                "SCHEDULE_TOPIC_XXXX",
                "TBW102",
                "c_REPLY_TOPIC",
                "%RETRY%g",
                "%DLQ%g",
                "%LMQ%q",
                "TIERED_TIMERS",
                "two words",
                "x" * 2_000,
            )
        ),
    ],
    ids=lambda value: str(value)[:40],
)
def test_what_cannot_be_delivered_is_refused_when_it_is_archived(
    properties: dict[str, str], refusal: Refusal, tmp_path: Path
) -> None:
    broker, memory = TimerBroker(tmp_path / "store"), MemoryStore()
    broker.send_with({"UNIQ_KEY": "B", **properties}, body="x")
    backfill(broker.path, memory)
    store = PrefixedStore(memory, archive_prefix("FxCluster", "fx-a"))
    (row,) = next(TimerFiles(store).pending(load(store), 0, NEVER_MS)).table
    assert (row["kind"], row["key_hash"]) == (EntryKind.REFUSED, refusal)


def test_messages_of_timers_do_not_expire(tmp_path: Path) -> None:
    store, _ = archived(tmp_path)
    state, topic = load(store), QueueKey(GATEWAY, 0, 0)
    for erase in (None, Erasure(GATEWAY)):
        found = plan_pass(
            store, state, lambda _: RULE, clock=Clock(wall_ms=lambda: store_ms(store)), erase=erase
        )
        state = commit_pass(store, state, found, clock=Clock(wall_ms=lambda: store_ms(store)))
        row = state.queue(topic)
        assert row is not None and row["min_queue_offset"] == 0
    orders = state.queue(QueueKey("orders", 0, 0))
    assert orders is not None and orders["min_queue_offset"] == 3
    assert not verify_archive(store, depth="full").anomalies


def store_ms(store: PrefixedStore) -> int:
    return max(info.modified_ms for info in store.list("catalog/")) + 1
