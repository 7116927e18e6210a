"""Damages record headers in a copy of a real store, and archives it."""

import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tests.archive.queue_reader import QueueReader, records_of
from tests.end_to_end.ground_truth import GroundTruth, difference
from tests.end_to_end.offloading import BROKER, CLUSTER, FILTER, SMALL
from tiered.archive.verify import verify_archive
from tiered.broker_store.commit_log import CommitLog
from tiered.broker_store.store import BrokerStore, open_broker_store
from tiered.catalog.catalog_reader import load
from tiered.formats.keys import archive_prefix
from tiered.kernels.queue_table import QueueTable
from tiered.kernels.scan import RecordColumns, scan_log
from tiered.object_store.memory import MemoryStore
from tiered.object_store.prefixed import PrefixedStore
from uploader.bound_source import no_offsets
from uploader.offload import Offloader, OffloadIdentity, OffloadResult

QUEUE_ID, QUEUE_OFFSET = (12, 4), (20, 8)
"""Where in a record, and how many bytes."""


def scanned_files(store: BrokerStore, table: QueueTable) -> Iterator[RecordColumns]:
    """The rows of each commitlog file, of all topics."""
    for file in store.commit_log.files:
        data = np.frombuffer(store.commit_log.read(file.begin_phys, file.size_bytes), np.uint8)
        arena, columns = np.append(data, np.zeros(64, np.uint8)), RecordColumns()
        scan_log(arena, 0, len(data), file.begin_phys, file.end_phys, table, columns, delay_levels_ms=None)
        yield columns


def flip(copy: CommitLog, line: Mapping[str, Any], at: int, bit: int) -> None:
    """Flip one bit of a record."""
    phys = line["commitLogOffset"] + at
    file = copy.file_at(phys)
    assert file is not None
    with file.path.open("r+b") as opened:
        opened.seek(phys - file.begin_phys)
        (byte,) = opened.read(1)
        opened.seek(phys - file.begin_phys)
        opened.write(bytes([byte ^ 1 << bit]))


def assert_all_but(
    lost: Sequence[Mapping[str, Any]], truth: GroundTruth, archive: PrefixedStore, log: CommitLog
) -> None:
    """Every queue holds what the broker delivered but ``lost``, byte for byte, and the archive is whole."""
    state = load(archive)
    shown = {key[:2]: key for key in state.visible_queues()}
    places = {line["commitLogOffset"] for line in lost}
    for queue, lines in truth.queues.items():
        left = {line["queueOffset"]: line for line in lines if line["commitLogOffset"] not in places}
        for offset, _, record in records_of(QueueReader(archive, state, shown[queue])):
            assert difference(record, left.pop(offset), log) == "", (queue, offset)
        assert left == {}, queue
    assert verify_archive(archive, depth="full").anomalies == []


def archived(store_path: Path, name: str) -> tuple[OffloadResult, PrefixedStore]:
    """A backfill, and the archive."""
    memory = MemoryStore(f"memory://header_check-{name}")
    with open_broker_store(store_path) as store:
        result = Offloader(
            store,
            memory,
            OffloadIdentity(CLUSTER, BROKER, "test", "backfill"),
            SMALL,
            topic_filter=FILTER,
            offsets_source=no_offsets,
        ).run(threading.Event(), follow=False)
    return result, PrefixedStore(memory, archive_prefix(CLUSTER, BROKER))
