"""Compares an archive with what the broker delivered."""

from collections.abc import Collection
from pathlib import Path

from tests.archive.queue_reader import QueueReader, records_of
from tests.end_to_end.ground_truth import difference, load_truth
from tests.end_to_end.offloading import BROKER, CLUSTER, FILTER
from tiered.archive.segment_reader import SegmentCache
from tiered.broker_store.commit_log import CommitLog
from tiered.catalog.catalog_reader import load
from tiered.formats.keys import archive_prefix
from tiered.model.queue import QueueKey
from tiered.object_store.interface import ObjectStore
from tiered.object_store.prefixed import PrefixedStore

STORES = ["A", "B", "C", "D", "E", "F", "G", "H", "H2", "K"]


def check_against_truth(
    root: ObjectStore, directory: Path, name: str, *, deleted: Collection[QueueKey] = ()
) -> int:
    """Compare all queues with what the broker delivered; the number of messages compared.

    COMPACTION topics are delivered from the broker's compacted copy: they are compared with its commitlog.
    ``deleted``: queues of deleted topics that a repair shows again.
    """
    archive = PrefixedStore(root, archive_prefix(CLUSTER, BROKER))
    state = load(archive)
    truth = load_truth(directory, name, FILTER)
    log = CommitLog([directory / "store" / "commitlog"])
    segments = SegmentCache(archive)
    shown = {key[:2]: key for key in state.visible_queues()}
    compared = 0
    for queue, lines in sorted(truth.queues.items()):
        expected = {line["queueOffset"]: line for line in lines}
        reader = QueueReader(archive, state, shown.pop(queue), segments=segments)
        found = 0
        for offset, _, record in records_of(reader):
            assert difference(record, expected[offset], log) == "", (queue, offset)
            found += 1
        assert found == len(expected) == len(lines), queue
        compared += found
    for queue, key in shown.items():
        if key in deleted:
            continue
        assert queue[0] in truth.compaction_topics, f"{queue} is not shown by the broker"
        for offset, phys, record in records_of(QueueReader(archive, state, key, segments=segments)):
            assert record == log.read(phys, len(record)), (queue, offset)
            compared += 1
    return compared
