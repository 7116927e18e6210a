"""Every store a real broker wrote, archived and read back: byte-exact, counts equal, nothing left over."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.end_to_end.ground_truth import difference, load_truth
from tests.end_to_end.offloading import BROKER, CLUSTER, FILTER, backfill
from tiered.catalog.protocol import load
from tiered.flat_file.composite_flat_file import QueueReader
from tiered.flat_file.segment_reader import SegmentCache
from tiered.flat_file.verify import verify_archive
from tiered.formats.keys import archive_prefix
from tiered.object_store.file import FileStore
from tiered.object_store.prefixed import PrefixedStore
from tiered.object_store.protocol import ObjectStore

STORES = ["A", "B", "C", "D", "E", "F", "G", "H", "H2", "K"]
UNSTABLE = ("rmq_sys_REVIVE_LOG",)


def check_against_truth(root: ObjectStore, directory: Path, name: str) -> int:
    """Compare all queues; the number of messages compared."""
    archive = PrefixedStore(root, archive_prefix(CLUSTER, BROKER))
    state = load(archive)
    assert state is not None
    truth = load_truth(directory, name, FILTER)
    segments = SegmentCache(archive)
    shown = {key[:2]: key for key in state.visible_queues() if key.topic not in truth.compaction_topics}
    compared = 0
    for queue, lines in sorted(truth.queues.items()):
        reader = QueueReader(archive, state, shown.pop(queue), segments=segments)
        expected = {line["queueOffset"]: line for line in lines}
        offset, found = reader.min_offset, 0
        while offset < reader.max_offset:
            batch = reader.read(offset, max_rows=1000, max_bytes=1 << 20)
            for start, size, queue_offset in zip(batch.starts, batch.sizes, batch.queue_offsets, strict=True):
                line = expected[int(queue_offset)]
                record = batch.data[start : start + size].tobytes()
                assert difference(record, line, directory / "store") == "", (queue, int(queue_offset))
                found += 1
            assert batch.next_offset > offset
            offset = batch.next_offset
        assert found == len(expected) == len(lines), queue
        compared += found
    assert not shown, f"queues the broker does not show: {sorted(shown)}"
    return compared


@pytest.mark.parametrize("name", STORES)
def test_every_message_of_every_queue_comes_back_byte_exact(
    name: str, real_store: Callable[[str], Path], tmp_path: Path
) -> None:
    directory = real_store(name)
    root = FileStore(tmp_path)
    first = backfill(directory / "store", root)
    assert check_against_truth(root, directory, name) > 1000
    objects = [info.key for info in root.list("")]
    second = backfill(directory / "store", root)
    assert (second.messages, second.objects, second.commits) == (0, 0, 0)
    assert [info.key for info in root.list("")] == objects
    report = verify_archive(PrefixedStore(root, archive_prefix(CLUSTER, BROKER)), full=True)
    assert report.anomalies == []
    assert report.leftovers == []
    assert first.messages > 1000
