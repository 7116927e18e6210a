"""A damaged commitlog: what is lost is recorded with file and offset, all other queues are archived byte-exact.

A commitlog directory whose disk is not mounted: nothing is taken for deleted or replaced.

Unusual but valid records: archiving continues, each is stored as it is and read back, and the archive is whole.

A record larger than block and batch: it gets room of its own, and nothing around it is lost.
"""

import random
import shutil
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from benchmarks.synthetic_store import StoreSpec, write_store
from tests.archive.queue_reader import QueueReader, records_of
from tests.bad_input.stale_checksum import NAME, copy_with_stale_checksum
from tests.end_to_end.offloading import BROKER, CLUSTER, FILTER, SMALL, backfill, state_of
from tests.kernels.record_builder import Message, build_log, encode, properties
from tests.sweeps import sweep
from tiered.archive.verify import verify_archive
from tiered.broker_store.commit_log import CommitLog
from tiered.broker_store.store import open_broker_store
from tiered.catalog.catalog_reader import load
from tiered.errors import UnavailableError
from tiered.formats.keys import archive_prefix
from tiered.model.queue import TopicFilter
from tiered.model.tables import GapReason
from tiered.object_store.memory import MemoryStore
from tiered.object_store.prefixed import PrefixedStore
from tiered.settings.sections import IndexSettings, OffloadSettings
from uploader.bound_source import no_offsets
from uploader.offload import Offloader, OffloadIdentity, OffloadResult

SPEC = StoreSpec(topics=1, queues_per_topic=2, body_bytes=200)
# Where in a record of an IPv4 host. The last byte of QUEUEOFFSET, and QUEUEID, leave a record that looks whole.
LATER = pytest.mark.soak


@pytest.mark.parametrize("is_known", [True, False])
def test_a_copied_record_with_a_stale_checksum_is_archived_if_the_consume_queue_names_it(
    is_known: bool, real_store: Callable[[str], Path], tmp_path: Path
) -> None:
    victim, log = copy_with_stale_checksum(real_store(NAME), tmp_path / "store")
    phys, size = int(str(victim["commitLogOffset"])), int(str(victim["storeSize"]))
    if not is_known:
        unit = phys.to_bytes(8, "big") + size.to_bytes(4, "big")
        stranger = phys.to_bytes(8, "big") + (1).to_bytes(4, "big")
        for units in (tmp_path / "store" / "consumequeue").rglob("0" * 20):
            units.write_bytes(units.read_bytes().replace(unit, stranger))
    memory = MemoryStore(f"memory://stale-{is_known}")
    assert backfill(tmp_path / "store", memory).damaged == (0 if is_known else 1)
    archive = PrefixedStore(memory, archive_prefix(CLUSTER, BROKER))
    state = load(archive)
    key = next(key for key in state.visible_queues() if key[:2] == (victim["topic"], victim["queueId"]))
    found = {offset: record for offset, _, record in records_of(QueueReader(archive, state, key))}
    if is_known:
        assert found[int(str(victim["queueOffset"]))] == log.read(phys, size), "verbatim, checksum and all"
    else:
        assert victim["queueOffset"] not in found
    assert verify_archive(archive, depth="full").anomalies == []


@pytest.mark.parametrize(
    "stops",
    [pytest.param((), marks=pytest.mark.soak), pytest.param((1000,), marks=pytest.mark.soak), (1000, 1001)],
)
def test_damage_before_a_restart_is_recorded_as_damage(stops: tuple[int, ...], tmp_path: Path) -> None:
    """The queue continues after the restart, in a process that has not seen the damage."""
    memory = MemoryStore("memory://restarted")
    for messages in (*stops, 2000):
        store = tmp_path / str(messages)
        write_store(store, SPEC, messages=messages)
        with CommitLog([store / "commitlog"]).files[0].path.open("r+b") as file:
            file.seek(998 * SPEC.record_bytes + 120)
            file.write(b"\xff\x00\xff")
        backfill(store, memory)
    state = load(PrefixedStore(memory, archive_prefix(CLUSTER, BROKER)))
    assert [GapReason(int(gap["reason"])) for gap in state.gaps] == [GapReason.DAMAGED]


def backfill_from(store: Path, dirs: Sequence[Path], memory: MemoryStore) -> OffloadResult:
    with open_broker_store(store, commitlog_dirs=dirs) as broker_store:
        return Offloader(
            broker_store,
            memory,
            OffloadIdentity(CLUSTER, BROKER, "test", "backfill"),
            SMALL,
            topic_filter=FILTER,
            offsets_source=no_offsets,
        ).run(threading.Event(), follow=False)


def test_an_empty_commitlog_directory_is_no_other_log(
    real_store: Callable[[str], Path], tmp_path: Path
) -> None:
    store = tmp_path / "store"
    shutil.copytree(real_store("B") / "store", store)
    memory = MemoryStore("memory://empty")
    backfill(store, memory)
    before = state_of(memory)
    (store / "commitlog").rename(tmp_path / "the disk")
    (store / "commitlog").mkdir()
    with pytest.raises(UnavailableError, match="commitlog contains no commitlog file"):
        backfill(store, memory)
    assert state_of(memory).version == before.version

    (store / "commitlog").rmdir()
    (tmp_path / "the disk").rename(store / "commitlog")
    assert backfill(store, memory).messages == 0


@pytest.mark.parametrize("is_begun", sweep([True, False], fast=[True]))
def test_one_of_two_directories_without_its_disk_makes_no_gap(
    is_begun: bool, real_store: Callable[[str], Path], tmp_path: Path
) -> None:
    store = tmp_path / "store"
    shutil.copytree(real_store("A") / "store", store)
    files = sorted((store / "commitlog").iterdir())
    assert len(files) > 4
    dirs = [tmp_path / "d1", tmp_path / "d2"]
    for directory in dirs:
        directory.mkdir()
    for number, file in enumerate(files):
        file.rename(dirs[number % 2] / file.name)
    memory = MemoryStore(f"memory://two-{is_begun}")
    if is_begun:
        backfill_from(store, dirs, memory)
    dirs[1].rename(tmp_path / "the disk")
    dirs[1].mkdir()
    with pytest.raises(UnavailableError, match="d2 contains no commitlog file"):
        backfill_from(store, dirs, memory)

    dirs[1].rmdir()
    (tmp_path / "the disk").rename(dirs[1])
    result = backfill_from(store, dirs, memory)
    assert (result.lost, result.damaged) == (0, 0)
    single = MemoryStore(f"memory://single-{is_begun}")
    backfill(real_store("A") / "store", single)
    archive, expected = state_of(memory), state_of(single)
    assert archive.cursor == expected.cursor
    assert {key: row.tobytes() for key, row in archive.queues()} == {
        key: row.tobytes() for key, row in expected.queues()
    }


def test_the_directory_of_the_newest_file_alone_without_its_disk_is_no_shorter_log(
    real_store: Callable[[str], Path], tmp_path: Path
) -> None:
    store = tmp_path / "store"
    shutil.copytree(real_store("B") / "store", store)
    newest = sorted((store / "commitlog").iterdir())[-1]
    dirs = [store / "commitlog", tmp_path / "d2"]
    dirs[1].mkdir()
    newest.rename(dirs[1] / newest.name)
    memory = MemoryStore("memory://newest")
    backfill_from(store, dirs, memory)
    version = state_of(memory).version
    (dirs[1] / newest.name).rename(tmp_path / newest.name)
    with pytest.raises(UnavailableError, match="d2 contains no commitlog file"):
        backfill_from(store, dirs, memory)
    assert state_of(memory).version == version


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
