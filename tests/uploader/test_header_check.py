"""The consume queues' word against a record's header: never against a sound record, always against a flipped bit."""

import random
import shutil
import struct
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tests.archive.queue_reader import QueueReader, records_of
from tests.end_to_end.archive_check import STORES
from tests.end_to_end.ground_truth import load_truth
from tests.end_to_end.offloading import FILTER
from tests.kernels.record_builder import Message, build_log
from tests.sweeps import sweep
from tests.uploader.damaged_headers import (
    QUEUE_ID,
    QUEUE_OFFSET,
    archived,
    assert_all_but,
    flip,
    scanned_files,
)
from tiered.broker_store.commit_log import CommitLog
from tiered.broker_store.store import open_broker_store
from tiered.catalog.catalog_reader import load
from tiered.consume_queue.index import UNIT_DTYPE, BrokerQueue, QueueKind
from tiered.kernels.queue_table import QueueTable
from tiered.kernels.scan import scan_log
from tiered.model.tables import GapReason, Table
from uploader.cycle_plan import CyclePlanner, UnusualQueue
from uploader.header_check import HeaderCheck, HeaderComparison
from uploader.log_batch import LogBatch
from uploader.queue_tails import UNKNOWN, QueueTails

VICTIMS = 16
RECORD_BYTES, BEGIN_PHYS = 100, 10_000
"""Of the records of a played log."""


@pytest.mark.parametrize("next_offset", [UNKNOWN, 7])
@pytest.mark.parametrize("name", STORES)
def test_no_sound_record_is_contradicted(
    name: str, next_offset: int, real_store: Callable[[str], Path]
) -> None:
    """Deleted and recreated topics, inner batches, LMQs, transactions, expired logs: all queues suspected."""
    with open_broker_store(real_store(name) / "store") as store:
        index, table = store.consume_queues(), QueueTable()
        assert index is not None
        rows = 0
        for columns in scanned_files(store, table):
            rows += columns.rows
            everything = [UnusualQueue(ordinal, next_offset) for ordinal in range(len(table))]
            assert (
                HeaderComparison(columns, table, index, store.commit_log).contradicted(everything).tolist()
                == []
            )
        assert rows > 1000


def place_in(chance: random.Random, line: Mapping[str, Any], what: str) -> int:
    """A byte of ``what`` in the record."""
    if what == "topic":
        hosts = 20 + 20 if line["sysFlag"] & 0x30 else 8 + 8
        begin = 40 + 8 + hosts + 8 + 4 + 8 + 4 + line["bodyLen"] + 1
        return begin + chance.randrange(len(line["topic"]))
    begin, length = QUEUE_ID if what == "queue id" else QUEUE_OFFSET
    return begin + chance.randrange(length)


@pytest.mark.parametrize("what", ["queue id", "queue offset", "topic"])
@pytest.mark.parametrize("name", sweep(["B", "C", "K"], fast=["K"]))
def test_a_flipped_bit_costs_the_record_it_is_in(
    name: str, what: str, real_store: Callable[[str], Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """None of them is in a checksum: other queues, a recreated queue's name, or a huge gap would come of it."""
    original = real_store(name)
    truth = load_truth(original, name, FILTER)
    shutil.copytree(original / "store", tmp_path / "store")
    log, copy = CommitLog([original / "store" / "commitlog"]), CommitLog([tmp_path / "store" / "commitlog"])
    chance = random.Random(f"{name} {what}")
    victims = choose(chance, truth.queues)
    for line in victims:
        flip(copy, line, place_in(chance, line, what), chance.randrange(8))
    result, archive = archived(tmp_path / "store", f"{name}-{what}")
    assert result.damaged == len(victims)
    damaged = [vars(line) for line in caplog.records if "damaged" in line.getMessage()]
    assert {line["begin_phys"] for line in damaged} == {line["commitLogOffset"] for line in victims}
    state = load(archive)
    shown = Counter(key[:2] for key in state.visible_queues() if key.topic not in truth.compaction_topics)
    assert set(shown) == set(truth.queues) and set(shown.values()) == {1}, "nothing strays, nothing is hidden"
    assert_all_but(victims, truth, archive, log)


def choose(
    chance: random.Random, queues: Mapping[tuple[str, int], list[dict[str, Any]]]
) -> list[dict[str, Any]]:
    """Records that are in one queue only, whose queue continues behind them; no neighbours in log or queue."""
    lines = [line for lines in queues.values() for line in lines[:-1]]
    times = Counter(line["commitLogOffset"] for lines in queues.values() for line in lines)
    chosen = chance.sample([line for line in lines if times[line["commitLogOffset"]] == 1], VICTIMS)
    ends = {line["commitLogOffset"] + line["storeSize"] for line in chosen}
    behind = {(line["topic"], line["queueId"], line["queueOffset"] + 1) for line in chosen}
    places = [(line["topic"], line["queueId"], line["queueOffset"]) for line in chosen]
    return [
        line
        for line, place in zip(chosen, places, strict=True)
        if line["commitLogOffset"] not in ends and place not in behind
    ]


def test_what_a_broker_that_lost_count_appends_is_sound(
    real_store: Callable[[str], Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """ConsumeQueue.putMessagePositionInfo says "[BUG]logic queue order maybe wrong" and appends all the same: from
    there on the queue's units stand at other offsets than its records name."""
    original = real_store("B")
    truth = load_truth(original, "B", FILTER)
    shutil.copytree(original / "store", tmp_path / "store")
    copy = CommitLog([tmp_path / "store" / "commitlog"])
    queue, lines = max(truth.queues.items(), key=lambda item: len(item[1]))
    first = len(lines) // 2
    for line in lines[first:]:
        file = copy.file_at(line["commitLogOffset"])
        assert file is not None
        with file.path.open("r+b") as opened:
            opened.seek(line["commitLogOffset"] + QUEUE_OFFSET[0] - file.begin_phys)
            opened.write((line["queueOffset"] + 2).to_bytes(8, "big"))
    result, archive = archived(tmp_path / "store", "lost-count")
    assert result.damaged == 0 and "damaged" not in caplog.text
    state = load(archive)
    key = next(key for key in state.visible_queues() if key[:2] == queue)
    found = [phys for _, phys, _ in records_of(QueueReader(archive, state, key))]
    assert found == [line["commitLogOffset"] for line in lines]


Claim = tuple[str, int, int]
"""Topic, queue id and offset in a record's header."""


class PlayedUnits:
    """A consume queue index: of each queue, by offset, the number of the record in the log."""

    def __init__(self, queues: Mapping[tuple[str, int], Mapping[int, int]]) -> None:
        self._queues = queues

    def refresh(self) -> None:
        """Nothing is created."""

    def queues(self) -> list[BrokerQueue]:
        return [BrokerQueue(*name, QueueKind.PLAIN) for name in self._queues]

    def units(self, topic: str, queue_id: int, from_offset: int, count: int) -> Table:
        units = self._queues.get((topic, queue_id), {})
        return self._table({at: units[at] for at in range(from_offset, from_offset + count) if at in units})

    def units_between(self, begin_phys: int, end_phys: int) -> dict[tuple[str, int], Table]:
        found = {name: self._table(units) for name, units in self._queues.items()}
        return {
            name: units[(units["phys"] >= begin_phys) & (units["phys"] < end_phys)]
            for name, units in found.items()
        }

    @staticmethod
    def _table(units: Mapping[int, int]) -> Table:
        rows = [
            (BEGIN_PHYS + RECORD_BYTES * number, RECORD_BYTES, 0, at, 1, 0) for at, number in units.items()
        ]
        return np.array(rows, UNIT_DTYPE)


def judged(
    claims: Sequence[Claim], units: Mapping[tuple[str, int], Mapping[int, int]], ended: Mapping[str, int]
) -> list[int]:
    """Which records of a played log are contradicted. ``ended``: where queue 0 of suspected topics ended before."""
    table = QueueTable()
    ordinals = [table.ordinal(topic, queue_id) for topic, queue_id, _ in claims]
    count = len(claims)
    columns = SimpleNamespace(
        rows=count,
        phys=BEGIN_PHYS + RECORD_BYTES * np.arange(count),
        size=np.full(count, RECORD_BYTES, np.int32),
        queue=np.array(ordinals, np.int32),
        queue_offset=np.array([offset for *_, offset in claims]),
        inner_num=np.ones(count, np.int32),
        flags=np.zeros(count, np.uint32),
    )

    def read(phys: int, _count: int) -> bytes:
        return struct.pack(">12xi4xq", *claims[(phys - BEGIN_PHYS) // RECORD_BYTES][1:])

    unusual = [UnusualQueue(table.ordinal(topic, 0), end) for topic, end in ended.items()]
    trial = HeaderComparison(columns, table, PlayedUnits(units), SimpleNamespace(read=read))  # type: ignore[arg-type]
    return trial.contradicted(unusual).tolist()


def test_a_topic_recreated_while_its_producer_was_sending_is_sound() -> None:
    """Dispatched late, a record of the old generation comes first in the new consume queue. The new one's first
    is appended behind it, since offset 0 is not checked there. What follows is dropped until the numbers meet."""
    claims = [("t", 0, 105), *(("t", 0, offset) for offset in range(109))]
    units = {105: 0, 106: 1, 107: 108, 108: 109}
    assert judged(claims, {("t", 0): units}, {"t": 105}) == []
    assert judged(claims[:2], {("t", 0): units | {107: 0}}, {"t": 105}) == []


def test_a_unit_left_over_from_another_history_of_the_log_is_no_contradiction() -> None:
    """Of another queue at another offset, or in more than one byte: no flipped byte makes one of the other."""
    claims = [("other", 0, 50), ("other", 0, 51)]
    for name, offset in (
        (("quiet", 0), 9),
        (("quiet", 3), 51),
        (("others", 0), 51),
        (("other", 0x101), 51),
        (("other", 0), 0x133),
    ):
        assert judged(claims, {name: {offset: 1}}, {"other": UNKNOWN}) == [], name


@pytest.mark.parametrize("name", [("other", 2), ("othes", 0)])
def test_what_a_queue_names_that_differs_in_one_byte_is_its_record(name: tuple[str, int]) -> None:
    claims = [("other", 0, 50), ("other", 0, 51)]
    assert judged(claims, {name: {51: 1}}, {"other": UNKNOWN}) == [1]
    own = {("other", 0): {51: 1}}
    assert judged(claims, {name: {51: 1}, **own}, {"other": UNKNOWN}) == [], "its own queue confirms it"


def test_who_cannot_be_asked_says_nothing() -> None:
    class Broken:
        def __getattr__(self, _name: str) -> object:
            raise OverflowError("can't convert negative int to unsigned")

    table, planner_tails = QueueTable(), QueueTails()
    planner = CyclePlanner(table, planner_tails, split_bytes=1)
    batch = LogBatch(1 << 16)
    data = build_log([Message(topic=b"t", queue_offset=7)], 0)
    batch.arena[: len(data)] = np.frombuffer(data, np.uint8)
    scan_log(batch.arena, 0, len(data), 0, 1 << 40, table, batch.columns, delay_levels_ms=None)
    table.admitted[:] = 1
    header_check = HeaderCheck(table, Broken, CommitLog([]))  # type: ignore[arg-type]
    plan = header_check.plan(planner, batch, lambda _: GapReason.NEVER_WRITTEN)
    assert (plan.messages, len(plan.unusual), batch.damaged) == (1, 1, [])
