"""What Offloader.status says at the edges of a run and in an outage of the object store.

Absent is not deleted; backfill shows what the broker would show.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.end_to_end.offloading import BROKER, CLUSTER, SMALL, following
from tiered.broker_store.store import open_broker_store
from tiered.errors import ThrottledError, UnavailableError
from tiered.model.queue import QueueKey, TopicFilter
from tiered.object_store.memory import MemoryStore
from uploader.bound_source import no_offsets
from uploader.metadata_commits import ABSENT_MS_MIN, DeletedTopics, shown_again, without_units
from uploader.offload import Offloader, OffloadIdentity


def test_a_writer_without_messages_says_that_it_owns_the_archive(real_store: Callable[[str], Path]) -> None:
    with open_broker_store(real_store("F") / "store") as store:
        offloader = Offloader(
            store,
            MemoryStore("memory://no-messages"),
            OffloadIdentity(CLUSTER, BROKER, "test", "run"),
            SMALL,
            topic_filter=TopicFilter(include=("no such topic",), cluster=CLUSTER, broker=BROKER),
            offsets_source=no_offsets,
        )
        assert offloader.status() is None
        with following(offloader) as reached:
            status = reached(lambda status: True)
    assert status is not None
    assert status.epoch == 1, "the epoch is claimed before anything is followed"


class _Refusing(MemoryStore):
    """Refuses data objects while ``is_down``."""

    is_down = False

    def put_if_absent(self, key: str, *arguments: Any, **named: Any) -> Any:
        if self.is_down and "/data/" in f"/{key}":
            raise ThrottledError("the endpoint is unreachable")
        return super().put_if_absent(key, *arguments, **named)


def test_an_outage_of_the_store_is_a_problem_until_it_ends(real_store: Callable[[str], Path]) -> None:
    objects = _Refusing("memory://outage")
    objects.is_down = True
    with open_broker_store(real_store("F") / "store") as store:
        offloader = Offloader(
            store,
            objects,
            OffloadIdentity(CLUSTER, BROKER, "test", "run"),
            SMALL,
            topic_filter=TopicFilter(cluster=CLUSTER, broker=BROKER),
            offsets_source=no_offsets,
        )
        with following(offloader, 30) as reached:
            begun = reached(lambda status: "unreachable" in (status.store_problem or ""))
            assert begun is not None and "unreachable" in (begun.store_problem or "")
            objects.is_down = False
            ended = reached(lambda status: status.store_problem == "")
            assert ended is not None and ended.store_problem == ""


TOPICS = frozenset(f"t{i}" for i in range(20))


def test_a_queue_without_units_is_deleted_only_if_its_topic_is_not_in_a_table_that_is_known() -> None:
    kept, gone, emptied = QueueKey("kept", 0, 1), QueueKey("gone", 0, 0), QueueKey("recreated", 3, 0)
    lmq = QueueKey("%LMQ%gone", 0, 0)
    queues, units = [kept, gone, emptied, lmq], {("kept", 0), ("recreated", 0)}
    assert without_units(queues, units, {"kept", "recreated"}) == ([gone, lmq], [emptied])
    assert without_units(queues, units, set()) == ([lmq], [gone, emptied])


def test_a_hidden_queue_whose_files_cannot_be_read_stays_hidden() -> None:
    class Unreadable:
        def units(self, *place: object) -> object:
            raise UnavailableError("consumequeue/t/0: Input/output error")

    row = {"end_queue_offset": 3, "end_phys": 300}
    assert shown_again([(QueueKey("t", 0, 0), row)], Unreadable()) == []  # type: ignore[list-item, arg-type]


def test_absent_is_not_deleted() -> None:
    watch = DeletedTopics()
    assert watch.check(TOPICS, set(), [], 0).deleted == frozenset()
    without = TOPICS - {"t3"}
    assert watch.check(without, set(), [], 1).deleted == frozenset()
    assert watch.check(without, set(), [], ABSENT_MS_MIN).deleted == frozenset()
    assert watch.check(without, set(), [], ABSENT_MS_MIN + 1).deleted == {"t3"}
    assert watch.check(without, set(), [], ABSENT_MS_MIN * 3).deleted == frozenset()


def test_a_topic_kept_by_the_backup_or_a_consume_queue_is_not_absent() -> None:
    watch = DeletedTopics()
    watch.check(TOPICS, set(), [], 0)
    for now_ms in range(0, 5 * ABSENT_MS_MIN, ABSENT_MS_MIN):
        assert not watch.check(TOPICS - {"t1", "t2"}, {"t1"}, ["t2"], now_ms).deleted


def test_a_topic_that_comes_back_starts_a_new_hour() -> None:
    watch = DeletedTopics()
    watch.check(TOPICS, set(), [], 0)
    watch.check(TOPICS - {"t1"}, set(), [], 10)
    watch.check(TOPICS, set(), [], 20)
    assert not watch.check(TOPICS - {"t1"}, set(), [], ABSENT_MS_MIN + 15).deleted


def test_a_slave_that_wipes_its_table_deletes_nothing() -> None:
    watch = DeletedTopics()
    watch.check(TOPICS, set(), [], 0)
    watch.check(frozenset(), set(), [], 1)
    assert not watch.check(frozenset(), set(), [], 10 * ABSENT_MS_MIN).deleted


def test_losing_a_tenth_of_all_topics_at_once_is_an_alarm() -> None:
    watch = DeletedTopics()
    watch.check(TOPICS, set(), [], 0)
    most = TOPICS - {"t1", "t2", "t3"}
    watch.check(most, set(), [], 1)
    verdict = watch.check(most, set(), [], 2 * ABSENT_MS_MIN)
    assert verdict.deleted == frozenset()
    assert "3 of 20 topics" in verdict.alarm
