"""The scan over the commitlogs of real brokers equals what those brokers served, and their consume queues."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest

from tests.sweeps import sweep
from tests.truth import archived_messages, truth_directories
from tiered.kernels.queue_table import QueueTable
from tiered.kernels.scan import FLAG_BATCH, RecordColumns, ScanStop, StopReason, scan_log

STORES = ("A", "B", "C", "D", "E", "F", "G", "H", "H2", "K")
FILE_STORES = ("A", "B", "E", "F", "G", "H", "H2", "K")
DELAY_LEVELS_MS = np.array(
    [seconds * 1000 for seconds in (1, 5, 10, 30)]
    + [minutes * 60_000 for minutes in (1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 20, 30, 60, 120)],
    np.int64,
)
Unit = tuple[int, int, int]
"""(physical offset, size, tagsCode) of a consume-queue unit."""


@dataclass
class ScannedStore:
    """What the scan finds, by (topic, queue id, queue offset): a recreated topic has an offset twice."""

    units: dict[tuple[str, int, int], list[Unit]] = field(default_factory=dict)
    timestamps: dict[int, int] = field(default_factory=dict)
    crcs: dict[int, int] = field(default_factory=dict)
    batches: dict[tuple[str, int, int], tuple[int, int, int]] = field(default_factory=dict)
    stops: list[ScanStop] = field(default_factory=list)
    min_phys: int = 0


def scan_store(store: Path) -> ScannedStore:
    scanned, table, columns = ScannedStore(), QueueTable(), RecordColumns(1, 1, 1)
    files = sorted((store / "store" / "commitlog").iterdir())
    scanned.min_phys = int(files[0].name)
    for file in files:
        data, begin = file.read_bytes(), int(file.name)
        columns.reset()
        arena = np.frombuffer(data, np.uint8)
        stop = scan_log(
            arena, 0, len(data), begin, begin + len(data), table, columns, delay_levels_ms=DELAY_LEVELS_MS
        )
        scanned.stops.append(stop)
        add_rows(scanned, table, columns, data)
    return scanned


def add_rows(scanned: ScannedStore, table: QueueTable, columns: RecordColumns, data: bytes) -> None:
    def column(values: np.ndarray, count: int) -> list[int]:
        return [int(value) for value in values[:count].tolist()]

    rows = columns.rows
    phys, size, tags = column(columns.phys, rows), column(columns.size, rows), column(columns.tags_code, rows)
    position, offset = column(columns.position, rows), column(columns.queue_offset, rows)
    names = [(table.topic(ordinal), int(table.queue_id[ordinal])) for ordinal in range(len(table))]
    for row, ordinal in enumerate(column(columns.queue, rows)):
        unit = (phys[row], size[row], tags[row])
        scanned.units.setdefault((*names[ordinal], offset[row]), []).append(unit)
        scanned.timestamps[phys[row]] = int(columns.store_timestamp[row])
        scanned.crcs[phys[row]] = zlib.crc32(data[position[row] : position[row] + size[row]])
        if columns.flags[row] & FLAG_BATCH:
            scanned.batches[(*names[ordinal], offset[row])] = (
                phys[row],
                size[row],
                int(columns.inner_num[row]),
            )
    count = columns.lmq_rows
    parents, offsets = column(columns.lmq_row, count), column(columns.lmq_queue_offset, count)
    for index, ordinal in enumerate(column(columns.lmq_queue, count)):
        row = parents[index]
        scanned.units.setdefault((*names[ordinal], offsets[index]), []).append(
            (phys[row], size[row], tags[row])
        )


@pytest.fixture(scope="session")
def scanned_store(real_store: Callable[[str], Path]) -> Callable[[str], ScannedStore]:
    cache: dict[str, ScannedStore] = {}

    def get(name: str) -> ScannedStore:
        if name not in cache:
            cache.clear()  # one store at a time in memory
            cache[name] = scan_store(real_store(name))
        return cache[name]

    return get


@pytest.mark.parametrize("name", sweep(STORES, fast=["D", "E", "F", "H", "K"], rest="integration"))
def test_scan_gives_every_message_the_broker_served(
    name: str, real_store: Callable[[str], Path], scanned_store: Callable[[str], ScannedStore]
) -> None:
    scanned, compared = scanned_store(name), 0
    for truth in truth_directories(real_store(name)):
        for line in archived_messages(truth):
            phys = line["commitLogOffset"]
            if phys < scanned.min_phys:  # served before the broker removed the file
                continue
            found = scanned.units.get((line["topic"], line["queueId"], line["queueOffset"]), [])
            assert (phys, line["storeSize"]) in [unit[:2] for unit in found], line
            assert scanned.timestamps[phys] == line["storeTimestamp"], line
            assert "recCrc32" not in line or scanned.crcs[phys] == line["recCrc32"], line
            compared += 1
    assert compared >= 240


@pytest.mark.parametrize("name", STORES)
def test_scan_stops_only_at_the_ends_of_real_logs(
    name: str, scanned_store: Callable[[str], ScannedStore]
) -> None:
    stops = [stop.reason for stop in scanned_store(name).stops]
    complete = stops.index(StopReason.NO_RECORD)
    assert set(stops[:complete]) <= {StopReason.FILE_END}
    assert set(stops[complete:]) == {StopReason.NO_RECORD}
    assert all(stop.position == 0 for stop in scanned_store(name).stops[complete + 1 :])


def consume_queue_units(store: Path, unit_bytes: int, kind: str) -> Iterator[tuple[str, int, int, bytes]]:
    """(topic, queue id, index of the unit, its bytes)."""
    for queue in sorted((store / "store" / kind).glob("*/*")):
        for file in sorted(queue.iterdir()):
            data, first = file.read_bytes(), int(file.name) // unit_bytes
            for at in range(0, len(data) - unit_bytes + 1, unit_bytes):
                unit = data[at : at + unit_bytes]
                if struct.unpack_from(">i", unit, 8)[0] <= 0:
                    break
                yield queue.parent.name, int(queue.name), first + at // unit_bytes, unit


@pytest.mark.parametrize("name", FILE_STORES)
def test_scan_equals_the_consume_queues_on_disk(
    name: str, real_store: Callable[[str], Path], scanned_store: Callable[[str], ScannedStore]
) -> None:
    store, scanned, compared = real_store(name), scanned_store(name), 0
    for topic, queue_id, offset, unit in consume_queue_units(store, 20, "consumequeue"):
        phys, size, tags_code = struct.unpack(">qiq", unit)
        if phys < scanned.min_phys:
            continue
        if tags_code < -0x80000001:
            tags_code = extended_tags_code(store, topic, queue_id, tags_code)
        assert (phys, size, tags_code) in scanned.units.get((topic, queue_id, offset), []), (
            topic,
            queue_id,
            offset,
        )
        compared += 1
    assert compared > 2000


def extended_tags_code(store: Path, topic: str, queue_id: int, address: int) -> int:
    (file,) = (store / "store" / "consumequeue_ext" / topic / str(queue_id)).iterdir()
    with file.open("rb") as extension:
        extension.seek(address + (1 << 63))
        _, tags_code = struct.unpack(">hq", extension.read(10))
    return int(tags_code)


@pytest.mark.parametrize("name", ["A", "B", "K"])
def test_scan_equals_the_batch_consume_queues_on_disk(
    name: str, real_store: Callable[[str], Path], scanned_store: Callable[[str], ScannedStore]
) -> None:
    scanned, batches = scanned_store(name), 0
    for topic, queue_id, _, unit in consume_queue_units(real_store(name), 46, "batchconsumequeue"):
        phys, size, _, stored, base, number = struct.unpack_from(">qiqqqh", unit)
        assert scanned.timestamps[phys] == stored
        if (topic, queue_id, base) in scanned.batches:
            assert scanned.batches[topic, queue_id, base] == (phys, size, number)
            batches += 1
        else:  # a single message in a batch queue
            assert number == 1
            assert (phys, size) in [found[:2] for found in scanned.units[topic, queue_id, base]]
    assert batches > 0


def test_one_flipped_bit_in_a_real_log_is_found(real_store: Callable[[str], Path]) -> None:
    """Bit rot anywhere in what ``__CRC32#`` covers stops the scan at that record."""
    file = sorted((real_store("K") / "store" / "commitlog").iterdir())[0]
    data, table, columns = np.frombuffer(file.read_bytes(), np.uint8), QueueTable(), RecordColumns()
    scan_log(data, 0, len(data), 0, len(data), table, columns, delay_levels_ms=None)
    rng = np.random.default_rng(7)
    for row in rng.integers(0, columns.rows, 50).tolist():
        begin, size = int(columns.position[row]), int(columns.size[row])
        damaged = data.copy()
        damaged[begin + int(rng.integers(4, size - 20))] ^= 1 << int(rng.integers(8))
        stop = scan_log(
            damaged,
            begin,
            begin + size,
            begin,
            len(data),
            QueueTable(),
            RecordColumns(),
            delay_levels_ms=None,
        )
        assert (stop.reason, stop.position) == (StopReason.INVALID, begin)
