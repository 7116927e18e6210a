"""TieredDispatcher over a commitlog directory: never blocks, closes by size or age, lets a retry take newer data."""

from __future__ import annotations

from pathlib import Path

from tests.uploader.dispatch_bench import FILE_BYTES, Bench
from uploader.dispatcher import StepResult


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
