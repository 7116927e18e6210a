"""Prefetch beside pulls: it shares the readers' budget and survives errors."""

import pytest

from fetcher.io.request_scheduler import Priority
from fetcher.io.waiting import Background, InlineExecutor, Wait, new_future
from tests.fetcher.reading_simulation import PREFETCH, QUEUES, Consumer, Simulation, archive
from tiered.errors import UnansweredError


def fast(_pull: int) -> float:
    return 0.02


def test_errors_of_prefetch_fail_no_pull() -> None:
    simulation = Simulation(archive(), 3)
    original = simulation.source.blocks_at

    async def failing(index, run, numbers, priority):  # type: ignore[no-untyped-def]
        if priority is Priority.PREFETCH:
            raise UnansweredError("no answer")
        return await original(index, run, numbers, priority)

    simulation.source.blocks_at = failing  # type: ignore[method-assign]
    consumer = simulation.add(Consumer("c", QUEUES[0], fast))
    simulation.run()
    assert consumer.got == simulation.builder.truth[QUEUES[0]].rows
    assert consumer.errors == 0
    failures = simulation.fetcher.prefetcher.counters.failures
    # A failure holds off; two fetches may have been under way.
    assert 0 < failures <= 2 * (1 + simulation.clock.time_s * 1000 / PREFETCH.hold_off_ms)
    assert failures < consumer.pulls / 2
    assert simulation.fetcher.prefetcher.unread_bytes == 0


def test_after_closing_nothing_is_prefetched() -> None:
    simulation = Simulation(archive(), 3)
    simulation.fetcher.close()
    consumer = simulation.add(Consumer("c", QUEUES[0], fast))
    simulation.run()
    assert consumer.got == simulation.builder.truth[QUEUES[0]].rows
    assert simulation.fetcher.prefetcher.counters.fetches == 0


def test_background_work_continues_when_what_it_waits_for_is_there(caplog: pytest.LogCaptureFixture) -> None:
    background = Background(InlineExecutor())
    future, steps = new_future(), []

    async def work() -> None:
        steps.append("begun")
        steps.append(await Wait(future))

    background.start(work(), inline=True)
    assert steps == ["begun"]
    future.set_result("done")
    assert steps == ["begun", "done"]

    async def broken() -> None:
        raise ZeroDivisionError

    background.start(broken(), inline=False)
    assert "prefetch failed" in caplog.text
    never = new_future()

    async def forgotten() -> None:
        await Wait(never)
        steps.append("never")

    background.start(forgotten(), inline=False)
    background.close()
    never.set_result(None)
    background.start(forgotten(), inline=True)
    assert steps == ["begun", "done"]
