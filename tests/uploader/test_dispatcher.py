"""TieredDispatcher over a commitlog directory: never blocks, closes by size or age, lets a retry take newer data.

Which LMQ entries are made: by the units of the queue, else by what is certain. One test per rule.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import pytest

from tests.broker_store.record_bytes import queue_file, unit
from tests.kernels.record_builder import Message, build_log, properties
from tests.uploader.dispatch_bench import FILE_BYTES, Bench
from tiered.broker_store.bound import BrokerOffsets
from tiered.broker_store.liveness import Liveness, LivenessReport
from tiered.broker_store.store import open_broker_store
from tiered.consume_queue.file_queues import FileConsumeQueues
from tiered.consume_queue.index import UNIT_DTYPE, ConsumeQueueIndex
from tiered.kernels.queue_table import QueueTable
from tiered.kernels.scan import DOUBT_PLAIN, DOUBT_SLASH, DOUBT_TOPIC, RecordColumns, scan_log
from tiered.model.tables import Table
from uploader.bound_source import BoundSource
from uploader.dispatcher import StepResult
from uploader.lmq_dispatch import (
    ABSENT,
    NO_UNIT,
    NOT_DISPATCHED,
    LmqDispatch,
    LmqRules,
    UnitClaims,
    UnitPlace,
    decide_lmqs,
    resolved_lmq_rows,
)
from uploader.queue_tails import UNKNOWN
from uploader.store_feed import lmq_rules


def test_the_dispatch_step_never_waits_for_the_lock(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    bench.write(3)
    with bench.dispatcher._lock:
        assert bench.dispatcher.dispatch_step(bench.bound()) == StepResult.BUSY
    assert bench.dispatcher.dispatch_step(bench.bound()) != StepResult.BUSY
    assert bench.dispatcher.cursor == bench.end


def test_without_memory_the_bytes_stay_in_the_log_and_compensation_reads_them_later(tmp_path: Path) -> None:
    bench = Bench(tmp_path, count=1)
    bench.write(60)
    while bench.dispatcher.compensate(bench.bound()) == StepResult.HANDED_OVER:
        pass
    assert bench.dispatcher.compensate(bench.bound()) == StepResult.BUSY
    stopped_at = bench.dispatcher.cursor
    assert stopped_at < bench.end
    batch = bench.closed.get()
    assert batch is not None
    bench.pool.release(batch)
    bench.dispatcher.compensate(bench.bound())
    assert bench.dispatcher.cursor > stopped_at


def test_a_batch_closes_by_size(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    bench.write(40)
    while len(bench.closed) == 0:
        assert bench.dispatcher.compensate(bench.bound()) != StepResult.BUSY
    batch = bench.closed.get()
    assert batch is not None
    assert (batch.from_phys, batch.to_phys) == (0, batch.filled)
    assert 4096 - 400 <= batch.filled <= 4096 * 5 // 4


def test_a_batch_closes_by_the_age_of_its_first_row(tmp_path: Path) -> None:
    bench = Bench(tmp_path, age_ms=1000)
    bench.now_ms = 5000
    bench.write(1)
    bench.dispatcher.dispatch_step(bench.bound())
    bench.now_ms = 5999
    bench.dispatcher.close_if_due()
    assert len(bench.closed) == 0
    bench.now_ms = 6000
    bench.dispatcher.close_if_due()
    assert len(bench.closed) == 1


def test_filtered_traffic_is_committed_once_per_commitlog_file_and_not_by_age(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    bench.write(20, topic=b"rmq_sys_x")
    bench.dispatcher.compensate(bench.bound())
    bench.now_ms = 1 << 40
    bench.dispatcher.close_if_due()
    assert len(bench.closed) == 0
    bench.write(400, topic=b"rmq_sys_x")
    while bench.dispatcher.compensate(bench.bound()) != StepResult.CAUGHT_UP:
        pass
    bench.dispatcher.close_if_due()
    batch = bench.closed.get()
    assert batch is not None
    assert (batch.from_phys, batch.to_phys, batch.is_wanted) == (0, bench.end, False)
    assert batch.to_phys > FILE_BYTES
    check = batch.log_check()
    assert check is not None
    assert check.end_phys <= batch.to_phys


def test_a_retry_takes_the_newer_data_along(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    bench.write(4)
    bench.dispatcher.compensate(bench.bound())
    bench.dispatcher.close_if_due(force=True)
    failed = bench.closed.get()
    assert failed is not None
    rows, base, end = failed.columns.rows, failed.from_phys, failed.to_phys
    bench.write(3)
    bench.dispatcher.dispatch_step(bench.bound())
    assert bench.dispatcher.extend_into(failed, bench.bound())
    assert (failed.from_phys, failed.to_phys) == (base, bench.end)
    assert failed.to_phys > end
    assert failed.columns.rows == rows + 3
    assert bench.dispatcher.cursor == bench.end
    assert not bench.dispatcher.has_open_range


def test_a_retry_takes_no_data_that_a_later_attempt_already_holds(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    bench.write(4)
    bench.dispatcher.compensate(bench.bound())
    bench.dispatcher.close_if_due(force=True)
    failed = bench.closed.get()
    assert failed is not None
    bench.write(4)
    bench.dispatcher.compensate(bench.bound())
    bench.dispatcher.close_if_due(force=True)
    bench.write(4)
    bench.dispatcher.compensate(bench.bound())
    before = failed.to_phys
    assert not bench.dispatcher.extend_into(failed, bench.bound())
    assert failed.to_phys == before


def test_an_oversized_record_is_always_admitted(tmp_path: Path) -> None:
    bench = Bench(tmp_path, batch_bytes=1024)
    bench.write(1)
    bench.write(1, body_bytes=20_000)
    bench.write(1)
    while bench.dispatcher.compensate(bench.bound()) != StepResult.CAUGHT_UP:
        while (batch := bench.closed.get()) is not None:
            bench.pool.release(batch)
    assert bench.dispatcher.cursor == bench.end


def test_a_batch_does_not_wait_for_a_clock_that_was_set_back(tmp_path: Path) -> None:
    bench = Bench(tmp_path, age_ms=1000)
    bench.now_ms = 3_600_000
    bench.write(1)
    bench.dispatcher.dispatch_step(bench.bound())
    bench.now_ms = 0
    bench.dispatcher.close_if_due()
    assert len(bench.closed) == 1


FILES, ROCKSDB, OFF = LmqRules(), LmqRules(in_rocksdb=True), LmqRules(is_off=True)
RETRY = DOUBT_TOPIC


def decided(
    offsets: Sequence[int],
    doubts: Sequence[int] | None = None,
    *,
    times: Sequence[int] | None = None,
    said: Sequence[int] | None = None,
    end: int | UnitPlace = UNKNOWN,
    rules: LmqRules = FILES,
) -> tuple[list[int], UnitPlace]:
    count = len(offsets)
    claims = UnitClaims(offsets, times or [1] * count, doubts or [0] * count, said or [NO_UNIT] * count)
    return decide_lmqs(claims, end if isinstance(end, UnitPlace) else UnitPlace(end, end), rules)


def test_what_units_say_was_made_whatever_is_in_doubt() -> None:
    doubts = [RETRY, DOUBT_PLAIN, DOUBT_SLASH, 0]
    assert decided([4, 5, 6, 9], doubts, said=[4, 5, 6, 7])[0] == [4, 5, 6, 7]
    assert decided([4, 5], [0, RETRY], said=[ABSENT, ABSENT])[0] == [NOT_DISPATCHED] * 2


@pytest.mark.parametrize("end", [7, UNKNOWN])
def test_of_a_doubtful_topic_only_what_continues_its_queue_is_made(end: int) -> None:
    """A copied offset is of an earlier message, below where the queue ends. Where it ends must be known."""
    offsets, _ = decided([3, 7, 8, 8, 9, 6], [RETRY, RETRY, 0, RETRY, RETRY, RETRY], end=end)
    assert offsets == [
        NOT_DISPATCHED,
        7 if end == 7 else NOT_DISPATCHED,
        8,
        NOT_DISPATCHED,
        9,
        NOT_DISPATCHED,
    ]


def test_rocksdb_takes_any_name_and_nothing_of_doubtful_topics() -> None:
    doubts = [DOUBT_SLASH, RETRY, DOUBT_SLASH | RETRY, DOUBT_PLAIN]
    assert decided([0, 1, 1, 1], doubts, rules=ROCKSDB)[0] == [0] + [NOT_DISPATCHED] * 3
    assert decided([0, 1, 1, 1], doubts)[0] == [NOT_DISPATCHED] * 4


def test_a_queue_named_twice_continues_at_its_end_not_at_the_count() -> None:
    """Two offsets are counted, one unit is written: later claims stay ahead, until the broker is restarted."""
    claims, times = [0, 2, 4, 5, 7, 5, 6], [2, 2, 1, 2, 1, 1, 1]
    offsets, place = decided(claims, times=times, end=0)
    assert offsets == [0, 1, 2, 3, 4, 5, 6]
    assert place == UnitPlace(7, 7)
    assert decided([0, 1, 3], times=[2, 2, 1], end=0)[0] == [0, 1, 2], "4.9 counts once"
    assert decided(claims[:5], times=times[:5], end=0, rules=ROCKSDB)[0] == claims[:5], (
        "units stand as claimed"
    )


def test_a_jump_that_no_record_explains_is_a_gap() -> None:
    assert decided([0, 1, 5, 6], end=0)[0] == [0, 1, 5, 6]
    assert decided([0, 3], times=[2, 1], end=0)[0] == [0, 3]
    assert decided([5, 6, 0, 1], end=5)[0] == [5, 6, 0, 1], "a new generation"


def test_a_broker_that_dispatches_nothing_makes_no_queues_of_copied_names() -> None:
    assert decided([3, 4, 0], rules=OFF)[0] == [NOT_DISPATCHED] * 3
    assert decided([3, 4, 9], end=3, rules=OFF)[0] == [3, 4, NOT_DISPATCHED], "as far as it did"
    assert decided([3, 4], said=[3, NO_UNIT], rules=OFF)[0] == [3, 4]


class PlayedUnits:
    """Of each queue, by offset, the number of the record in the log."""

    def __init__(
        self,
        log: RecordColumns,
        queues: Mapping[tuple[str, int], Mapping[int, int]],
        *,
        is_broken: bool = False,
    ) -> None:
        self._log = log
        self._queues = queues
        self._is_broken = is_broken
        self.asked: list[tuple[str, int]] = []

    def units(self, topic: str, queue_id: int, from_offset: int, count: int) -> Table:
        units = self._all(topic, queue_id)
        return units[units["queue_offset"] >= from_offset][:count]

    def last_unit(self, topic: str, queue_id: int) -> Table:
        return self._all(topic, queue_id)[-1:]

    def units_of_records(self, topic: str, queue_id: int, begin_phys: int, end_phys: int) -> Table:
        if self._is_broken:
            raise OSError("no such device")
        self.asked.append((topic, queue_id))
        units = self._all(topic, queue_id)
        return units[(units["phys"] >= begin_phys) & (units["phys"] < end_phys)]

    def _all(self, topic: str, queue_id: int) -> Table:
        log, units = self._log, self._queues.get((topic, queue_id), {})
        rows = [(log.phys[row], log.size[row], 0, at, 1, 0) for at, row in sorted(units.items())]
        return np.array(rows, UNIT_DTYPE)


Made = list[tuple[int, str, int, int]]
"""(record, topic, queue id, offset)."""


def named(topic: str, names: str, offsets: str, queue_id: int = 0) -> Message:
    pairs = (b"INNER_MULTI_DISPATCH", names.encode()), (b"INNER_MULTI_QUEUE_OFFSET", offsets.encode())
    return Message(topic=topic.encode(), queue_id=queue_id, properties=properties(*pairs))


class Asked:
    """A log, and what is made of its references."""

    def __init__(self, *messages: Message) -> None:
        log = np.frombuffer(build_log(messages, 1 << 20), np.uint8)
        self.table, self.columns = QueueTable(), RecordColumns(1, 1, 1)
        scan_log(log, 0, len(log), 1 << 20, 1 << 40, self.table, self.columns, delay_levels_ms=None)
        self.table.admitted[:] = 1
        self.index: PlayedUnits | None = None

    def made(
        self,
        queues: Mapping[tuple[str, int], Mapping[int, int]] | None = None,
        *,
        ends: Mapping[str, int] | None = None,
        rules: LmqRules = FILES,
        is_broken: bool = False,
        index: ConsumeQueueIndex | None = None,
    ) -> Made:
        played = self.index = PlayedUnits(self.columns, queues or {}, is_broken=is_broken)

        def consume_queues() -> ConsumeQueueIndex | None:
            return index if queues is None else played  # type: ignore[return-value]

        def next_offsets(ordinals: np.ndarray) -> np.ndarray:
            return np.array(
                [(ends or {}).get(self.table.topic(ordinal), UNKNOWN) for ordinal in ordinals.tolist()]
            )

        references = LmqDispatch(self.table, consume_queues, lambda: rules)
        rows, offsets = resolved_lmq_rows(self.columns, references.offsets(self.columns, next_offsets))
        queue = self.columns.lmq_queue[rows].tolist()
        return [
            (record, self.table.topic(ordinal), int(self.table.queue_id[ordinal]), offset)
            for record, ordinal, offset in zip(
                self.columns.lmq_row[rows].tolist(), queue, offsets.tolist(), strict=True
            )
        ]


def test_a_plain_name_is_made_where_its_queue_has_the_unit() -> None:
    log = Asked(named("orders", "audit,%LMQ%a", "0,0", 3), named("orders", "audit,%LMQ%a", "1,1", 3))
    assert log.made({("audit", 3): {0: 0}}) == [(0, "audit", 3, 0), (0, "%LMQ%a", 0, 0), (1, "%LMQ%a", 0, 1)]
    assert log.made() == [(0, "%LMQ%a", 0, 0), (1, "%LMQ%a", 0, 1)]


def test_a_doubtful_record_whose_place_another_has_is_not_in_the_queue() -> None:
    log = Asked(named("t", "%LMQ%a", "0"), named("%RETRY%g", "%LMQ%a", "0"), named("t", "%LMQ%a", "1"))
    right = [(0, "%LMQ%a", 0, 0), (2, "%LMQ%a", 0, 1)]
    assert log.made({("%LMQ%a", 0): {0: 0, 1: 2}}, ends={"%LMQ%a": 0}) == right
    ahead = Asked(named("t", "%LMQ%a", "0"), named("%RETRY%g", "%LMQ%a", "1"), named("t", "%LMQ%a", "1"))
    assert ahead.made({("%LMQ%a", 0): {0: 0, 1: 2}}, ends={"%LMQ%a": 0}) == right
    assert log.made(ends={"%LMQ%a": 0}) == right


def test_places_are_those_of_the_units_not_those_that_were_counted() -> None:
    """A batch that begins while the broker's count is ahead: nothing before it is known."""
    log = Asked(named("t", "%LMQ%a,%LMQ%a", "6,6"), named("t", "%LMQ%a", "8"), named("t", "%LMQ%a", "5"))
    units = {("%LMQ%a", 0): {3: 0, 4: 1, 5: 2}}
    right = [(0, "%LMQ%a", 0, 3), (1, "%LMQ%a", 0, 4), (2, "%LMQ%a", 0, 5)]
    assert log.made(units) == right
    assert log.made(units, ends={"%LMQ%a": 3}) == right


def test_a_record_of_an_earlier_generation_of_the_queue_is_believed() -> None:
    log = Asked(named("t", "%LMQ%a", "1"), named("t", "%LMQ%a", "0"), named("t", "%LMQ%a", "1"))
    assert log.made({("%LMQ%a", 0): {0: 1, 1: 2}}) == [
        (0, "%LMQ%a", 0, 1),
        (1, "%LMQ%a", 0, 0),
        (2, "%LMQ%a", 0, 1),
    ]


def test_a_copied_name_in_a_queue_of_others_is_no_entry() -> None:
    log = Asked(named("t", "%LMQ%a", "0"), named("t", "%LMQ%a", "1"), named("copied", "%LMQ%a", "0"))
    assert log.made({("%LMQ%a", 0): {0: 0, 1: 1}}) == [(0, "%LMQ%a", 0, 0), (1, "%LMQ%a", 0, 1)]


def test_units_left_over_from_before_a_truncation_move_nothing() -> None:
    log = Asked(named("t", "%LMQ%a", "0"), named("t", "%LMQ%a", "3"))
    assert log.made({("%LMQ%a", 0): {0: 0, 9: 1}}) == [(0, "%LMQ%a", 0, 0), (1, "%LMQ%a", 0, 3)]
    log = Asked(named("t", "%LMQ%a", "0"), named("t", "%LMQ%a", "1"), named("t", "%LMQ%b", "0"))
    assert log.made({("%LMQ%a", 0): {0: 0, 1: 1, 2: 0, 3: 1}})[:2] == [
        (0, "%LMQ%a", 0, 0),
        (1, "%LMQ%a", 0, 1),
    ]


def test_units_left_over_behind_the_end_of_a_queue_hide_none_of_its_own(tmp_path: Path) -> None:
    """They are lower in the log than those before them, and a search by place in the log goes astray there."""
    log = Asked(*(named("t", "%LMQ%a", str(ahead)) for ahead in (40, 42, 43, 45)))
    units = [unit(number * 100, 90) for number in range(30)]
    units[5:9] = map(unit, log.columns.phys[:4].tolist(), log.columns.size[:4].tolist())
    queue_file(tmp_path, "%LMQ%a", 0, b"".join(units), capacity=64)
    index = FileConsumeQueues(tmp_path, lambda: 0)
    assert log.made(ends={"%LMQ%a": 5}, index=index) == [(at, "%LMQ%a", 0, 5 + at) for at in range(4)]


def test_units_of_queues_that_continue_are_not_read() -> None:
    log = Asked(named("t", "%LMQ%a,%LMQ%b", "4,0"), named("t", "%LMQ%a,%LMQ%b", "5,1"))
    assert len(log.made({}, ends={"%LMQ%a": 4})) == 4
    assert log.index is not None
    assert log.index.asked == []
    assert len(log.made({}, ends={"%LMQ%a": 3})) == 4
    assert log.index.asked == [("%LMQ%a", 0)], "of nothing that it shows"


def test_consume_queues_that_fail_stop_nothing() -> None:
    log = Asked(named("t", "%LMQ%a", "4"), named("%RETRY%g", "%LMQ%a", "5"))
    assert log.made({}, is_broken=True) == [(0, "%LMQ%a", 0, 4), (1, "%LMQ%a", 0, 5)]


def test_the_count_that_is_ahead_is_known_in_the_next_batch_and_in_one_planned_again() -> None:
    logs = [Asked(named("t", "%LMQ%a,%LMQ%a", "0,0")), Asked(named("t", "%LMQ%a", "2"))]
    references = LmqDispatch(logs[0].table, lambda: None, LmqRules)
    for _ in range(2):
        for end, log in enumerate(logs):
            offsets = references.offsets(log.columns, lambda ordinals, end=end: np.full(len(ordinals), end))  # type: ignore[misc]
            assert resolved_lmq_rows(log.columns, offsets)[1].tolist() == [end]


def test_what_the_broker_last_said_of_its_configuration_is_kept(tmp_path: Path) -> None:
    (tmp_path / "commitlog").mkdir()
    said = [BrokerOffsets(), BrokerOffsets(config={"enableMultiDispatch": "false"}), BrokerOffsets(), None]
    words = iter(said)
    with open_broker_store(tmp_path) as store:
        source = BoundSource(store, lambda: next(words))
        store.liveness = lambda: LivenessReport(Liveness.ALIVE, 1, True, "it runs")  # type: ignore[method-assign]
        known = []
        for _ in said:
            source.ask(0)
            known.append(lmq_rules(store, source.config).is_off)
    assert known == [False, True, True, True]


def test_offsets_that_lie_far_apart_are_found_by_their_records() -> None:
    """A record may claim any offset: units between are not read, and one that is not there is no new generation."""
    log = Asked(
        named("t", "%LMQ%a", "0"),
        named("copied", "%LMQ%a", f"{1 << 58}"),
        named("t", "%LMQ%a,%LMQ%a", "1,1"),
        named("%RETRY%g", "%LMQ%a", "1"),
        named("t", "%LMQ%a", "3"),
    )
    assert [offset for *_, offset in log.made({("%LMQ%a", 0): {0: 0, 1: 2, 2: 4}})] == [0, 1, 2]
    assert [offset for *_, offset in log.made()] == [0, 1 << 58, 1, 2]
