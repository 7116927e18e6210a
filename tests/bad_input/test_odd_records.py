"""Unusual but valid records: archiving continues, each is stored as it is and read back, and the archive is whole.

A record larger than block and batch: it gets room of its own, and nothing around it is lost.
"""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from tests.archive.queue_reader import QueueReader
from tests.end_to_end.archive_check import records_of
from tests.end_to_end.offloading import BROKER, CLUSTER, backfill
from tests.kernels.record_builder import Message, build_log, encode, properties
from tests.sweeps import sweep
from tiered.archive.verify import verify_archive
from tiered.catalog.catalog_reader import load
from tiered.formats.keys import archive_prefix
from tiered.model.queue import TopicFilter
from tiered.object_store.memory import MemoryStore
from tiered.object_store.prefixed import PrefixedStore
from tiered.settings.sections import IndexSettings, OffloadSettings

FILE_BYTES = 1 << 20
SETTINGS = OffloadSettings(batch_bytes=64 << 10, split_bytes=64 << 10, block_bytes=4 << 10, root_every=4)
OFFSET_MAX = ((1 << 63) - 1) // 20
TOPICS = (
    b"t",
    b"t",
    b"u",
    b"%LMQ%a",
    b"x" * 127,
    b"x" * 128,
    b"%RETRY%g",
    "日/ .".encode(),
    b"..",
    b"%LMQ%b$0",
)
Lasts = dict[tuple[bytes, int], int]


@pytest.mark.parametrize("seed", sweep(range(30), fast=range(0, 30, 4)))
def test_odd_records_are_archived_and_the_archive_is_whole(seed: int, tmp_path: Path) -> None:
    chance = random.Random(seed)
    lasts: Lasts = {}
    records: dict[int, tuple[Message, bytes]] = {}
    log = b""
    for _ in range(chance.choice([1, 3, 20, 120, 400])):
        message = _message(chance, lasts)
        records[len(log)] = message, encode(message, len(log))
        log += records[len(log)][1]
    file = tmp_path / "commitlog" / f"{0:020d}"
    file.parent.mkdir()
    topic_filter = TopicFilter(cluster=CLUSTER, broker=BROKER, exclude=chance.choice([[], ["t"], ["t", "u"]]))
    memory = MemoryStore("memory://odd")
    for end in (list(records)[len(records) // 2], len(log)):
        file.write_bytes(log[:end] + bytes(FILE_BYTES - end))
        backfill(
            tmp_path,
            memory,
            settings=SETTINGS,
            topic_filter=topic_filter,
            index_settings=IndexSettings(unindexed_objects_max=1, after_backfill=True),
        )
    archive = PrefixedStore(memory, archive_prefix(CLUSTER, BROKER))
    assert verify_archive(archive, depth="full").anomalies == []
    state = load(archive)
    found = {
        phys: record
        for key, _ in state.queues()
        for _, phys, record in records_of(QueueReader(archive, state, key))
    }
    for phys, (message, record) in records.items():
        if not message.sys_flag & 4 and topic_filter.admits(message.topic.decode()):
            assert found[phys] == record


def _message(chance: random.Random, lasts: Lasts) -> Message:
    topic, queue_id = chance.choice(TOPICS), chance.choice([0, 0, 0, 1, -1, -(1 << 31), (1 << 31) - 1])
    last = lasts.get((topic, queue_id), -1)
    odd = [last, last + 2, 0, 1, last - 3, last + 1000, OFFSET_MAX - 1, OFFSET_MAX]
    offset = min(max(chance.choice([last + 1] * 12 + odd), 0), OFFSET_MAX)
    pairs = _lmq_entries(chance, lasts) if chance.random() < 0.3 else []
    for name, values in (
        (b"TAGS", [b"", b"A", b"\xff", b"A||B"]),
        (b"KEYS", [b"k", b"a b  c ", b" ", b"\xe6\x97", b"k " * 50]),
        (b"UNIQ_KEY", [b"U1", b"U2"]),
        (b"DELAY", [b"1", b"0", b"99", b"-1", b"x"]),
    ):
        if chance.random() < 0.25:
            pairs.append((name, chance.choice(values)))
    flag = chance.choice([0] * 10 + [4, 8, 12, 0x10, 0x20, 0x30, 1])
    if chance.random() < 0.2:
        flag |= chance.choice([0x80, 0])
        count = chance.choice([b"1", b"2", b"5", b"32767", b"0", b"-1", b"70000", b"2147483648", b"x", b""])
        base = chance.choice([offset, offset, 0, -1, 1 << 62])
        pairs += [(b"INNER_BASE", b"%d" % base), (b"INNER_NUM", count)]
    lasts[topic, queue_id] = offset
    body = chance.choice([b"", b"b", b"body" * chance.randrange(300)])
    stored_ms = 1_700_000_000_000 + chance.choice([0, 1, -1, 86_400_000, -(1 << 62), 1 << 62])
    return Message(topic, queue_id, offset, body, properties(*pairs), flag, stored_ms, chance.random() < 0.3)


def _lmq_entries(chance: random.Random, lasts: Lasts) -> list[tuple[bytes, bytes]]:
    """Names that repeat or are none, and offsets that jump, repeat, or that no queue holds."""
    names = [chance.choice([b"%LMQ%a", b"%LMQ%b", b"%LMQ%c", b"%LMQ%c", b"plain", b""]) for _ in range(3)]
    offsets = []
    for name in names:
        last = lasts.get((name, 0), -1)
        odd = [last, last + 5, 0, -1, OFFSET_MAX, OFFSET_MAX + 1, 1 << 62, (1 << 63) - 1, 1 << 63, 1 << 64]
        offsets.append(chance.choice([last + 1] * 12 + odd))
        if 0 <= offsets[-1] < 1 << 40:
            lasts[name, 0] = offsets[-1]
    return [
        (b"INNER_MULTI_DISPATCH", b",".join(names)),
        (
            b"INNER_MULTI_QUEUE_OFFSET",
            b",".join(b"%d" % offset for offset in offsets[: chance.choice([3, 3, 3, 2])]),
        ),
    ]


SMALL_FILE_BYTES = 4 << 20
WAITING = OffloadSettings(batch_bytes=64 << 10, split_bytes=64 << 10, block_bytes=4 << 10)


def test_a_record_of_many_batches_is_archived_whole(tmp_path: Path) -> None:
    sizes = [10, 3 << 10, 1 << 20, 20, 300 << 10, 30]
    messages = [
        Message(queue_id=i % 2, queue_offset=i // 2, body=bytes([i + 1]) * size)
        for i, size in enumerate(sizes)
    ]
    log = build_log(messages)
    directory = tmp_path / "store" / "commitlog"
    directory.mkdir(parents=True)
    (directory / f"{0:020d}").write_bytes(log + bytes(SMALL_FILE_BYTES - len(log)))
    memory = MemoryStore("memory://oversize")
    backfill(tmp_path / "store", memory, settings=WAITING)
    archive = PrefixedStore(memory, archive_prefix(CLUSTER, BROKER))
    state = load(archive)
    found = {}
    for key in state.current_queues():
        for offset, phys, record in records_of(QueueReader(archive, state, key[0])):
            found[phys] = record
            assert record == encode(messages[offset * 2 + key[0].queue_id], phys)
    assert b"".join(found[phys] for phys in sorted(found)) == log
    assert verify_archive(archive, depth="full").anomalies == []
