"""Listings of one topic equal the same part of the listing of all."""

from fetcher.queries.queue_listing import list_queues
from tests.archive.archive_builder import ArchiveBuilder, Sent
from tiered.model.queue import QueueKey
from tiered.object_store.memory import MemoryStore


def test_the_queues_of_one_topic_are_those_of_the_whole_listing() -> None:
    archive = ArchiveBuilder(MemoryStore())
    for number in range(3):
        archive.commit([Sent(QueueKey(topic, number, 0)) for topic in ("b", "a", "ab")])
    earlier = archive.state
    archive.commit([Sent(QueueKey("a", 9, 0))])
    for state in (earlier, archive.state):
        whole = list_queues(state, hidden=True)
        for topic in ("a", "ab", "b"):
            assert list_queues(state, hidden=True, topic=topic) == [q for q in whole if q.topic == topic]
    assert [queue.queue_id for queue in list_queues(archive.state, hidden=False, topic="a")] == [0, 1, 2, 9]
    assert list_queues(archive.state, hidden=True, topic="c") == []
