"""The timer with a thread: order, calls that fail, closing."""

import logging
import threading
import time

import pytest

from fetcher.io.waiting import ThreadTimer


def test_calls_come_in_order_of_their_time_and_never_early() -> None:
    timer, called, done = ThreadTimer(), [], threading.Event()
    begin_s = time.monotonic()
    for delay_s in (0.05, 0.01, 0.03, -1.0):
        timer.call_at(begin_s + delay_s, lambda delay_s=delay_s: called.append((delay_s, time.monotonic())))  # type: ignore[misc]
    timer.call_at(begin_s + 0.06, done.set)
    assert done.wait(10)
    timer.close()
    assert [delay_s for delay_s, _ in called] == [-1.0, 0.01, 0.03, 0.05]
    assert all(at_s >= begin_s + delay_s for delay_s, at_s in called)


def test_a_call_that_fails_is_logged_and_the_next_one_comes(caplog: pytest.LogCaptureFixture) -> None:
    timer, done = ThreadTimer(), threading.Event()

    def failing() -> None:
        raise ValueError("no")

    with caplog.at_level(logging.ERROR):
        timer.call_at(0, failing)
        timer.call_at(0, done.set)
        assert done.wait(10)
    timer.close()
    assert "a delayed start of archive reads failed" in caplog.text


def test_a_closed_timer_calls_nothing_and_closes_twice() -> None:
    timer, called = ThreadTimer(), []
    timer.call_at(time.monotonic() + 60, lambda: called.append(1))
    timer.close()
    timer.call_at(0, lambda: called.append(2))
    timer.close()
    ThreadTimer().close()  # one that never started
    assert called == []
