"""RocketMQ's index files: every recorded answer of real brokers, and the same bytes from the same messages."""

import errno
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.archive.index.broker_index import BrokerIndex, broker_settings
from tests.end_to_end.ground_truth import read_jsonl
from tests.sweeps import sweep
from tiered.archive.index.rocketmq_index_file import (
    IndexedMessage,
    broker_hash,
    indexed_message,
    write_files,
)
from tiered.broker_store.commit_log import CommitLog
from tiered.errors import StoreFullError, UsageError
from tiered.formats.record import decode_record

SLOTS, ITEMS = 5000, 20_000
BLANK_MAGIC = 0xCBD43194
TRUTH_OF_ROUND = {"H": "after2", "H2": "after2"}


def messages_of(log: CommitLog, *, with_tags: bool) -> Iterator[IndexedMessage]:
    """Every record, in log order, as the broker indexes it."""
    for file in log.files:
        data = file.path.read_bytes()
        at = 0
        while at + 8 <= len(data):
            size, magic = (
                int.from_bytes(data[at : at + 4], "big"),
                int.from_bytes(data[at + 4 : at + 8], "big"),
            )
            if size == 0 or magic == BLANK_MAGIC:
                break
            record = decode_record(data[at : at + size])
            if record.sys_flag & 0xC != 0xC:
                yield indexed_message(record, with_tags=with_tags)
            at += size


def test_the_hash_is_the_broker_s() -> None:
    assert broker_hash("TopicTest", "MessageKey") == 638347386
    assert broker_hash("AaTopic", "Aa") == broker_hash("BBTopic", "BB") == broker_hash("AaTopic", "BB")


@pytest.mark.parametrize(
    "name", sweep(["A", "B", "C", "D", "E", "F", "G", "H", "H2", "K"], fast=["C", "H2", "K"])
)
def test_every_recorded_answer_comes_from_the_broker_s_files(
    name: str, real_store: Callable[[str], Path]
) -> None:
    directory = real_store(name)
    slots, _ = broker_settings(directory)
    truth = directory / "truth" / TRUTH_OF_ROUND.get(name, "") / "query_message.jsonl.zst"
    index = BrokerIndex(directory / "store" / "index", slots)
    asked = different = 0
    for line in read_jsonl(truth):
        found = index.query(line["topic"], line["key"], line["begin"], line["end"], min(line["maxNum"], 64))
        asked += 1
        different += sorted(found) != sorted(line["brokerPhys"])
    assert asked > 100
    assert different == 0


@pytest.mark.parametrize("name", sweep(["B", "E", "F", "K"], fast=["B", "K"]))
def test_the_same_messages_make_the_same_bytes(
    name: str, real_store: Callable[[str], Path], tmp_path: Path
) -> None:
    directory = real_store(name)
    slots, items = broker_settings(directory)
    log = CommitLog([directory / "store" / "commitlog"])
    written = write_files(messages_of(log, with_tags=name == "B"), tmp_path, slots=slots, items=items)
    theirs = sorted((directory / "store" / "index").iterdir())
    assert len(written) == len(theirs)
    # F was killed: the newest file had not been written to its end.
    compared = len(theirs) - (name == "F")
    for mine, their in zip(written[:compared], theirs[:compared], strict=True):
        assert mine.read_bytes() == their.read_bytes(), their.name
    assert compared >= 1


@pytest.mark.parametrize(("slots", "items"), [(0, 10), (10, 1), (1 << 29, 10), (10, 108_000_000)])
def test_sizes_that_no_broker_has_are_refused(slots: int, items: int, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="slots and"):
        write_files([IndexedMessage("t", ["k"], 0, 1)], tmp_path, slots=slots, items=items)
    assert not list(tmp_path.iterdir())


def test_a_disk_that_gets_full_is_an_error_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A page of a mapped file without room on the disk would kill the process."""
    allocated: list[tuple[int, int]] = []

    def allocate(_fd: int, begin: int, length: int) -> None:
        allocated.append((begin, begin + length))
        if len(allocated) > 3:
            raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", allocate)
    messages = (IndexedMessage("t", [str(i)], i, 1) for i in range(200_000))
    with pytest.raises(StoreFullError, match="No space left"):
        write_files(messages, tmp_path, slots=10, items=1_000_000)
    assert not list(tmp_path.iterdir())
    ends = [end for _, end in allocated]
    assert [begin for begin, _ in allocated] == [0, *ends[:-1]], "all of it, and in order"


def test_messages_whose_time_is_damaged_have_an_index_file(tmp_path: Path) -> None:
    """The broker names files by the clock; here they are named by the first message, whose time may be any."""
    times = [-(1 << 63), -1, 0, 1_700_000_000_000, 253_402_300_800_000, (1 << 63) - 1, 1_700_000_000_001]
    messages = [IndexedMessage("topic", (f"k{n}",), 100 * n, stored_ms) for n, stored_ms in enumerate(times)]
    written = write_files(messages, tmp_path, slots=10, items=2)
    assert len(written) == len(times)
    assert [path.name for path in written] == sorted(path.name for path in written)
    assert all(re.fullmatch("[0-9]{17}", path.name) for path in written[:4])
    for message, file in zip(messages, BrokerIndex(tmp_path, 10).files, strict=True):
        assert [*file.matches(broker_hash("topic", message.keys[0]), -(1 << 64), 1 << 64)] == [message.phys]
