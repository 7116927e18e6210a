"""Reads of the broker's own files: the broker's answers, its bytes, never anything else, and no trace left."""

import os
import shutil
import subprocess
import sys
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fetcher.policy.read_policy import BrokerSide, HeldOffsets, LocalView
from fetcher.rows.pull import PullStatus
from fetcher.rows.tag_filter import TagFilter
from fetcher.sql92.message_filter import Sql92Filter
from tests.broker_store.lock_holder import HOLDER
from tests.broker_store.page_cache import resident_bytes
from tests.end_to_end.ground_truth import TRUTH_OF_ROUND, read_jsonl
from tests.fetcher.broker_store_writer import FILE_BYTES, WrittenStore
from tests.fetcher.hot_reader import SCAN_UNITS_MAX, HotReader, RecordGoneError
from tests.fetcher.store_growth import grows
from tests.kernels.record_builder import Message, encode
from tests.sweeps import examples
from tiered.broker_store.store import open_broker_store
from tiered.clock import Clock
from tiered.errors import UnavailableError
from tiered.model.tables import Table

S = PullStatus


@contextmanager
def reading(path: Path, *, refresh_s: float = 1e9) -> Iterator[HotReader]:
    reader = HotReader(open_broker_store(path), refresh_s=refresh_s)
    try:
        yield reader
    finally:
        reader.close()


# -- the broker's own answers ---------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["A", "B", "C", "D", "G", "H", "H2", "K"])
def test_pulls_at_and_beyond_the_ends_are_answered_as_by_the_broker(
    name: str, real_store: Callable[[str], Path]
) -> None:
    directory = real_store(name)
    truth = directory / "truth" / TRUTH_OF_ROUND.get(name, "")
    compacted = {
        line["topic"] for line in read_jsonl(truth / "topics.jsonl.zst") if "COMPACTION" in str(line)
    }
    answers = 0
    with reading(directory / "store") as reader:
        for line in read_jsonl(truth / "pull_edges.jsonl.zst"):
            if line["topic"] in compacted or grows(name, line["topic"]):
                continue
            result = reader.get(
                line["topic"], line["queueId"], line["reqOffset"], count=line["maxMsgNums"], max_bytes=1 << 20
            )
            assert result.status.value == line["remark"], line
            assert (result.next_offset, result.min_offset, result.max_offset) == (
                line["next"],
                line["min"],
                line["max"],
            ), line
            assert len(result.batch) == len(line["recQueueOffsets"]), line
            answers += 1
    assert answers >= 10


@pytest.mark.parametrize("name", ["B", "K"])
def test_every_message_is_read_as_the_broker_delivered_it(
    name: str, real_store: Callable[[str], Path]
) -> None:
    directory = real_store(name)
    truth = directory / "truth"
    compacted = {
        line["topic"] for line in read_jsonl(truth / "topics.jsonl.zst") if "COMPACTION" in str(line)
    }
    expected: dict[tuple[str, int], list[int]] = {}
    for line in read_jsonl(truth / "messages.jsonl.zst"):
        if line["topic"] not in compacted and not grows(name, line["topic"]):
            expected.setdefault((line["topic"], line["queueId"]), []).append(line["recCrc32"])
    with reading(directory / "store") as reader:
        for (topic, queue_id), checksums in expected.items():
            found, offset = [], 0
            while (
                result := reader.get(topic, queue_id, offset, count=100, max_bytes=1 << 20)
            ).status is S.FOUND:
                found += [zlib.crc32(record) for record in result.batch.records()]
                offset = result.next_offset
            assert result.status in (S.OFFSET_OVERFLOW_ONE, S.OFFSET_TOO_SMALL)
            if result.status is S.OFFSET_OVERFLOW_ONE:
                assert found == checksums, (topic, queue_id)
    assert sum(map(len, expected.values())) > 5000


def test_the_dead_units_of_an_expired_store_are_not_served(real_store: Callable[[str], Path]) -> None:
    with reading(real_store("G") / "store") as reader:
        view = reader.local_view("t_one", 0, 0)
        assert view.queue is not None and view.queue.min_offset == 600 and not view.is_record
        assert reader.local_view("t_one", 0, 600).is_record
        result = reader.get("t_one", 0, 599, count=1, max_bytes=100)
        assert (result.status, result.next_offset) == (S.OFFSET_TOO_SMALL, 600)


# -- limits and filters ---------------------------------------------------------------------------------------


@pytest.fixture
def written(tmp_path: Path) -> WrittenStore:
    """300 messages of 300 bytes in one queue, other queues' between them, over several files."""
    store = WrittenStore(tmp_path / "store")
    for number in range(300):
        store.put("t", 0, b"%d " % number * 60, tags="ab"[number % 2] if number % 3 else "")
        store.put("other", number % 4, b"x" * (number % 700))
    return store


def numbers(reader: HotReader, offset: int, **limits: object) -> tuple[S, list[int], int]:
    arguments = {"count": 32, "max_bytes": 1 << 20, **limits}
    result = reader.get("t", 0, offset, **arguments)  # type: ignore[arg-type]
    return result.status, result.batch.queue_offsets.tolist(), result.next_offset


def test_counts_and_bytes_limit_a_pull(written: WrittenStore) -> None:
    three = sum(len(written.records["t", 0][offset]) for offset in (150, 151, 152))
    with reading(written.path) as reader:
        assert numbers(reader, 0) == (S.FOUND, list(range(32)), 32)
        assert numbers(reader, 290) == (S.FOUND, list(range(290, 300)), 300)
        assert numbers(reader, 150, max_bytes=three) == (S.FOUND, [150, 151, 152], 153)
        assert numbers(reader, 150, max_bytes=three - 1) == (S.FOUND, [150, 151], 152)
        assert numbers(reader, 150, max_bytes=1) == (S.FOUND, [150], 151)
        assert numbers(reader, 150, max_bytes=0) == (S.FOUND, [150], 151)
        result = reader.get("t", 0, 100, count=50, max_bytes=1 << 20)
        assert [bytes(record) for record in result.batch.records()] == [
            written.records["t", 0][offset] for offset in range(100, 150)
        ]
        assert b"".join(result.batch.buffers()) == b"".join(result.batch.records())
        assert set(result.batch.store_timestamp.tolist()) == {1_700_000_000_000}


def test_filters_pass_over_what_does_not_match(written: WrittenStore) -> None:
    with reading(written.path) as reader:
        tagged = [n for n in range(300) if n % 3 and n % 2 == 0]
        assert numbers(reader, 0, filter=TagFilter(["a"])) == (S.FOUND, tagged[:32], tagged[32])
        assert numbers(reader, 0, filter=TagFilter(["zz"])) == (S.NO_MATCHED_MESSAGE, [], 300)
        untagged = [n for n in range(300) if n % 3 == 0]
        assert numbers(reader, 0, filter=Sql92Filter("TAGS IS NULL"), count=1000)[1] == untagged
        status, found, after = numbers(reader, 10, filter=Sql92Filter("TAGS = 'b'"), count=3)
        assert (status, found) == (S.FOUND, [11, 13, 17]) and 18 <= after <= 19


def test_a_pull_looks_at_a_bounded_number_of_units(tmp_path: Path) -> None:
    store = WrittenStore(tmp_path / "store")
    for _ in range(SCAN_UNITS_MAX + 500):
        store.put("t", 0, b"")
    with reading(store.path) as reader:
        status, _, after = numbers(reader, 0, filter=TagFilter(["a"]))
        assert status is S.NO_MATCHED_MESSAGE and SCAN_UNITS_MAX <= after < SCAN_UNITS_MAX + 500


# -- what changes while we read -------------------------------------------------------------------------------


def test_new_messages_and_queues_are_seen(written: WrittenStore) -> None:
    clock = [0.0]
    reader = HotReader(
        open_broker_store(written.path), refresh_s=1.0, clock=Clock(monotonic_s=lambda: clock[0])
    )
    assert numbers(reader, 300) == (S.OFFSET_OVERFLOW_ONE, [], 300)
    for _ in range(200):
        written.put("t", 0, b"y" * 1000)
    assert numbers(reader, 300)[1] == list(range(300, 332))
    written.put("new", 3, b"z")
    assert reader.get("new", 3, 0, count=1, max_bytes=1).status is S.NO_MATCHED_LOGIC_QUEUE
    clock[0] = 1.5
    assert len(reader.get("new", 3, 0, count=1, max_bytes=1).batch) == 1
    reader.close()


def test_a_unit_half_written_is_not_served_yet(written: WrittenStore) -> None:
    with reading(written.path) as reader:
        offset = written.put("t", 0, b"new", with_unit=False)
        unit = (written.phys - len(written.records["t", 0][offset])).to_bytes(8, "big")
        written.put_unit("t", 0, offset, unit)
        assert numbers(reader, offset)[0] is S.OFFSET_OVERFLOW_ONE
        written.put_unit("t", 0, offset, unit + len(written.records["t", 0][offset]).to_bytes(4, "big"))
        assert numbers(reader, offset)[1] == [offset]


def test_a_unit_whose_tags_code_is_still_missing_is_not_judged_by_it(written: WrittenStore) -> None:
    """Else a filter would pass over the message for good."""
    last = written.put("t", 0, b"new", tags="a")
    with reading(written.path) as reader:
        index = reader._store.consume_queues()
        assert index is not None
        units, looks = index.units, []

        def torn_at_first(topic: str, queue_id: int, from_offset: int, count: int) -> Table:
            found = units(topic, queue_id, from_offset, count)
            if not looks:
                found["tags_code"][-1] = 0
            looks.append(from_offset)
            return found

        index.units = torn_at_first  # type: ignore[method-assign]
        assert numbers(reader, last - 1, filter=TagFilter(["a"])) == (S.FOUND, [last], last + 1)
        assert last in looks[1:]


class Meddler:
    """A filter that does something between the reading of units and of their records."""

    def __init__(self, meddle: Callable[[], None]) -> None:
        self._meddle = meddle

    def tags_mask(self, tags_code: np.ndarray) -> None:  # type: ignore[type-arg]
        self._meddle()

    def keep(self, record: memoryview) -> bool:
        return True


def test_files_deleted_while_they_are_read(written: WrittenStore) -> None:
    with reading(written.path) as reader:
        gone = sorted((written.path / "commitlog").iterdir())[-1]  # not looked into so far
        with pytest.raises(RecordGoneError, match="t queue 0: no record at offset 290"):
            numbers(reader, 290, filter=Meddler(gone.unlink))


def test_a_file_deleted_after_it_was_opened_still_gives_its_bytes(written: WrittenStore) -> None:
    with reading(written.path) as reader:
        numbers(reader, 0)
        shutil.rmtree(written.path / "commitlog")
        (written.path / "commitlog").mkdir()
        result = reader.get("t", 0, 1, count=1, max_bytes=1 << 20)
        assert bytes(result.batch.record(0)) == written.records["t", 0][1]


def test_a_file_cut_short_while_it_is_read(written: WrittenStore) -> None:
    """Not a signal, not zeros: the good records, then nothing."""
    with reading(written.path) as reader:
        first = sorted((written.path / "commitlog").iterdir())[0]
        status, found, after = numbers(reader, 0, filter=Meddler(lambda: os.truncate(first, 5000)))
        assert status is S.FOUND and found == list(range(len(found))) and after == len(found) < 32


@settings(max_examples=examples(25), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(cut=st.integers(0, 60), body_bytes=st.integers(1, 400), length=st.integers(1, 20_000))
def test_a_log_written_again_below_old_units_never_gives_wrong_bytes(
    written: WrittenStore, cut: int, body_bytes: int, length: int
) -> None:
    """As after a truncation: other records, whole and valid, from an old boundary on, the last one half written."""
    path = written.log_file(0)
    original = path.read_bytes()
    begin = int.from_bytes(written.records["t", 0][cut][28:36], "big")
    rolled = b""
    while len(rolled) < length:
        rolled += encode(Message(b"t", 0, 7, b"o" * body_bytes), begin + len(rolled))
    with path.open("r+b") as file:
        file.seek(begin)
        file.write(rolled[: min(length, FILE_BYTES - begin)])
    try:
        with reading(written.path) as reader:
            for offset in range(0, 60, 7):
                try:
                    result = reader.get("t", 0, offset, count=9, max_bytes=1 << 20)
                except RecordGoneError:
                    continue
                for number, record in zip(
                    result.batch.queue_offsets.tolist(), result.batch.records(), strict=True
                ):
                    assert bytes(record) == written.records["t", 0][number]
    finally:
        path.write_bytes(original)


def test_another_message_of_the_same_queue_and_size_is_not_taken_for_the_one_that_was_there(
    written: WrittenStore,
) -> None:
    """As in a log that was cut back and written again."""
    old = written.records["t", 0][10]
    phys = int.from_bytes(old[28:36], "big")
    new = encode(Message(b"t", 0, 7, b"o" * (len(old) - 91 - len(b"t"))), phys)
    assert len(new) == len(old)
    with written.log_file(0).open("r+b") as file:
        file.seek(phys)
        file.write(new)
    with reading(written.path) as reader:
        assert numbers(reader, 5) == (S.FOUND, [5, 6, 7, 8, 9], 10)
        with pytest.raises(RecordGoneError):
            numbers(reader, 10)


# -- sides ----------------------------------------------------------------------------------------------------


def test_a_live_broker_with_rocksdb_shows_nothing(real_store: Callable[[str], Path], tmp_path: Path) -> None:
    store = tmp_path / "store"
    shutil.copytree(real_store("C") / "store", store)
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(store / "lock")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert holder.stdout is not None and holder.stdout.readline().strip() == "locked"
        with reading(store) as reader:
            assert reader.local_view("t_one", 0, 0).side is BrokerSide.UNREADABLE
            with pytest.raises(UnavailableError, match="RocksDB"):
                reader.get("t_one", 0, 0, count=1, max_bytes=1)
    finally:
        holder.communicate()
    with reading(store) as reader:
        assert reader.local_view("t_one", 0, 0).queue == HeldOffsets(0, 1350)


def test_an_unknown_queue(written: WrittenStore) -> None:
    with reading(written.path) as reader:
        assert reader.local_view("unknown", 0, 0) == LocalView(BrokerSide.READABLE)
        assert reader.get("unknown", 0, 5, count=1, max_bytes=1).status is S.NO_MATCHED_LOGIC_QUEUE


def test_reading_leaves_the_page_cache_as_it_was(written: WrittenStore) -> None:
    files = [path for path in written.path.rglob("0*") if path.is_file()]
    for path in files:
        fd = os.open(path, os.O_RDWR)
        os.fsync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)
    if any(resident_bytes(path) for path in files):
        pytest.skip("this file system does not let go of pages (tmpfs?)")
    with reading(written.path) as reader:
        offset = 0
        while (result := reader.get("t", 0, offset, count=32, max_bytes=1 << 20)).status is S.FOUND:
            offset = result.next_offset
    assert offset == 300
    assert {path.name: resident_bytes(path) for path in files if resident_bytes(path)} == {}
