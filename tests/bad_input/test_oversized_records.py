"""A record larger than block and batch: it gets room of its own, and nothing around it is lost."""

from __future__ import annotations

from pathlib import Path

from tests.archive.queue_reader import QueueReader
from tests.end_to_end.archive_check import records_of
from tests.end_to_end.offloading import BROKER, CLUSTER, backfill
from tests.kernels.record_builder import Message, build_log, encode
from tiered.archive.verify import verify_archive
from tiered.catalog.catalog_reader import load
from tiered.formats.keys import archive_prefix
from tiered.object_store.memory import MemoryStore
from tiered.object_store.prefixed import PrefixedStore
from tiered.settings.sections import OffloadSettings

FILE_BYTES = 4 << 20
SETTINGS = OffloadSettings(batch_bytes=64 << 10, split_bytes=64 << 10, block_bytes=4 << 10)


def test_a_record_of_many_batches_is_archived_whole(tmp_path: Path) -> None:
    sizes = [10, 3 << 10, 1 << 20, 20, 300 << 10, 30]
    messages = [
        Message(queue_id=i % 2, queue_offset=i // 2, body=bytes([i + 1]) * size)
        for i, size in enumerate(sizes)
    ]
    log = build_log(messages)
    directory = tmp_path / "store" / "commitlog"
    directory.mkdir(parents=True)
    (directory / f"{0:020d}").write_bytes(log + bytes(FILE_BYTES - len(log)))
    memory = MemoryStore("memory://oversize")
    backfill(tmp_path / "store", memory, settings=SETTINGS)
    archive = PrefixedStore(memory, archive_prefix(CLUSTER, BROKER))
    state = load(archive)
    found = {}
    for key in state.current_queues():
        for offset, phys, record in records_of(QueueReader(archive, state, key[0])):
            found[phys] = record
            message = messages[offset * 2 + key[0].queue_id]
            assert record == encode(message, phys)
    assert b"".join(found[phys] for phys in sorted(found)) == log
    assert verify_archive(archive, depth="full").anomalies == []
