"""Drivers of the reading core and its gather: results, order, errors, cancelling, threads."""

import asyncio
import threading
import time
from collections.abc import Coroutine
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest

from fetcher.io.waiting import InlineExecutor, Wait, gather, new_future, run_async, run_sync
from tests.fetcher.virtual import VirtualClock


async def _value(future: Future[int]) -> int:
    return await Wait(future)


def _done(value: int) -> Future[int]:
    future: Future[int] = new_future()
    future.set_result(value)
    return future


def test_a_done_future_is_awaited_without_a_switch() -> None:
    coroutine = _value(_done(7))
    with pytest.raises(StopIteration) as stop:
        coroutine.send(None)
    assert stop.value.value == 7


def test_run_sync_blocks_until_another_thread_answers() -> None:
    future: Future[int] = new_future()
    threading.Timer(0.05, future.set_result, [3]).start()
    assert run_sync(_value(future)) == 3


def test_run_sync_raises_what_the_future_has() -> None:
    future: Future[int] = new_future()
    threading.Timer(0.02, future.set_exception, [KeyError("gone")]).start()
    with pytest.raises(KeyError, match="gone"):
        run_sync(_value(future))


@pytest.mark.parametrize("driver", ["sync", "async", "virtual"])
def test_gather_keeps_order_and_runs_side_by_side(driver: str) -> None:
    clock = VirtualClock()
    futures: list[Future[int]] = [new_future() for _ in range(5)]

    async def twice(number: int) -> int:
        first = await _value(futures[number])
        return first + await _value(futures[number])

    work = gather(twice(number) for number in range(5))
    for number in (3, 1, 4, 0, 2):
        if driver == "virtual":
            clock.call_at(1 + number, lambda number=number: futures[number].set_result(number))  # type: ignore[misc]
        else:
            threading.Timer(0.01, futures[number].set_result, [number]).start()
    if driver == "sync":
        found = run_sync(work)
    elif driver == "async":
        found = asyncio.run(run_async(work))
    else:
        found = clock.run_one(work)
        assert clock.time_s == 5  # the latest, not the sum
    assert found == [0, 2, 4, 6, 8]


def test_gather_of_gathers_and_of_nothing() -> None:
    assert run_sync(gather(Coroutine for Coroutine in ())) == []
    future: Future[int] = new_future()
    threading.Timer(0.01, future.set_result, [1]).start()
    inner = [gather([_value(future), _value(_done(2))]), gather([_value(future)])]
    assert run_sync(gather(inner)) == [[1, 2], [1]]


def test_the_first_error_closes_the_others() -> None:
    closed = []

    async def patient() -> int:
        try:
            return await Wait(new_future())
        finally:
            closed.append(True)

    async def failing() -> int:
        await Wait(_done(1))
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        run_sync(gather([patient(), failing(), patient()]))
    assert closed == [True]  # the third had not begun


def test_one_reader_cancelled_in_asyncio_leaves_the_future_to_others() -> None:
    future: Future[int] = new_future()

    async def both() -> int:
        impatient = asyncio.create_task(run_async(_value(future)))
        patient = asyncio.create_task(run_async(_value(future)))
        await asyncio.sleep(0)
        impatient.cancel()
        with pytest.raises(asyncio.CancelledError):
            await impatient
        threading.Timer(0.01, future.set_result, [9]).start()
        return await patient

    assert asyncio.run(both()) == 9


def test_a_coroutine_closed_by_its_driver_runs_its_finally() -> None:
    left = []

    async def reader() -> None:
        try:
            await Wait(new_future())
        finally:
            left.append(True)

    async def main() -> None:
        async with asyncio.timeout(0.01):
            await run_async(reader())

    with pytest.raises(TimeoutError):
        asyncio.run(main())
    assert left == [True]


def test_inline_executor_gives_results_and_errors() -> None:
    executor = InlineExecutor()
    assert executor.submit(divmod, 7, 2).result() == (3, 1)
    with pytest.raises(ZeroDivisionError):
        executor.submit(divmod, 1, 0).result()


def test_many_threads_complete_one_gather() -> None:
    with ThreadPoolExecutor(8) as pool:

        def answer(number: int) -> int:
            time.sleep(0.0005 * (number % 3))
            return number

        async def ask(number: int) -> int:
            return await Wait(pool.submit(answer, number)) + await Wait(pool.submit(answer, number))

        work: Coroutine[Any, Any, list[int]] = gather(ask(number) for number in range(300))
        assert run_sync(work) == [2 * number for number in range(300)]
