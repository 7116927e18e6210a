"""RequestScheduler by a virtual clock: concurrency, order, rates to within 5 %, full queues, failures."""

import threading
import time
from concurrent.futures import Future, wait

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fetcher.io.request_scheduler import (
    Priority,
    PriorityLimits,
    RangeRequest,
    RequestScheduler,
    ScheduledReader,
    ThreadRangeReader,
)
from fetcher.io.waiting import ThreadTimer
from tests.fetcher.virtual import VirtualClock, VirtualReader
from tiered.clock import Clock
from tiered.errors import ThrottledError, UnansweredError, UnavailableError
from tiered.object_store.memory import MemoryStore

MIB = 1024 * 1024
LIMITS = {
    Priority.USER: PriorityLimits(4),
    Priority.PREFETCH: PriorityLimits(2),
    Priority.BACKGROUND: PriorityLimits(1),
}
OBJECTS = {"x": bytes(4 * MIB)}


def _scheduler(
    limits: dict[Priority, PriorityLimits] = LIMITS, *, bytes_per_s: int = 0, latency_s: float = 1.0
) -> tuple[VirtualClock, VirtualReader, RequestScheduler]:
    clock = VirtualClock()
    reader = VirtualReader(clock, OBJECTS, latency_s=latency_s)
    priorities = RequestScheduler(
        reader, limits, clock=Clock(monotonic_s=clock.now_s), timer=clock, bytes_per_s=bytes_per_s
    )
    return clock, reader, priorities


def _ask(priorities: RequestScheduler, priority: Priority, length: int = 1, offset: int = 0) -> RangeRequest:
    request = RangeRequest("x", offset, length, priority)
    priorities.submit(request)
    return request


def test_each_lane_has_its_own_concurrency() -> None:
    clock, reader, priorities = _scheduler()
    for priority in Priority:
        for _ in range(10):
            _ask(priorities, priority)
    assert priorities.in_flight == {Priority.USER: 4, Priority.PREFETCH: 2, Priority.BACKGROUND: 1}
    assert priorities.queued == {Priority.USER: 6, Priority.PREFETCH: 8, Priority.BACKGROUND: 9}
    clock.run()
    assert reader.in_flight_max == 7
    assert clock.time_s == pytest.approx(10)  # ten background requests, one at a time
    assert [priorities.counts[priority].requests for priority in Priority] == [10, 10, 10]
    assert sum(priorities.in_flight.values()) == 0


def test_a_request_that_becomes_urgent_overtakes() -> None:
    clock, reader, priorities = _scheduler({**LIMITS, Priority.PREFETCH: PriorityLimits(1)})
    requests = [_ask(priorities, Priority.PREFETCH, offset=number) for number in range(5)]
    priorities.promote(requests[4], Priority.USER)
    assert reader.gets[-1][2] == 4 and requests[4].started_in is Priority.USER
    priorities.promote(requests[0], Priority.USER)  # has started: nothing changes but its name
    assert len(reader.gets) == 2
    clock.run()
    assert [get[2] for get in reader.gets] == [0, 4, 1, 2, 3]
    assert all(request.future.result() == b"\0" for request in requests)


@pytest.mark.parametrize("latency_s", [0.001, 0.3])
@pytest.mark.parametrize("length", [10_000, 300_000])
def test_the_rate_is_kept_within_five_per_cent(length: int, latency_s: float) -> None:
    rate = 5_000_000
    limits = {**LIMITS, Priority.PREFETCH: PriorityLimits(1000, queue_max=20_000)}
    clock, _, priorities = _scheduler(limits, bytes_per_s=rate, latency_s=latency_s)
    arrived: list[float] = []
    for _ in range(20 * rate // length):
        _ask(priorities, Priority.PREFETCH, length).future.add_done_callback(
            lambda _: arrived.append(clock.time_s)
        )
    clock.run(10.0 + latency_s)
    measured = len(arrived) * length / 10.0
    assert measured == pytest.approx(rate, rel=0.05)


def test_a_common_rate_is_the_users_first() -> None:
    rate = 1_000_000
    clock, reader, priorities = _scheduler(
        {priority: PriorityLimits(100) for priority in Priority}, bytes_per_s=rate
    )
    for _ in range(100):
        _ask(priorities, Priority.BACKGROUND, 50_000)
        _ask(priorities, Priority.PREFETCH, 50_000)
    clock.run(1.0)
    for _ in range(40):
        _ask(priorities, Priority.USER, 50_000)
    clock.run(3.1)
    assert priorities.counts[Priority.USER].requests == 40  # two seconds' worth, before anything else
    assert 20 <= priorities.counts[Priority.PREFETCH].requests <= 24
    clock.run()
    assert sum(get[3] for get in reader.gets) / reader.gets[-1][0] == pytest.approx(rate, rel=0.05)
    assert priorities.counts[Priority.BACKGROUND].requests == 100


def test_a_slow_lane_does_not_hold_up_another() -> None:
    _, _, priorities = _scheduler({**LIMITS, Priority.USER: PriorityLimits(1)})
    for _ in range(3):
        _ask(priorities, Priority.USER, 100_000)
        _ask(priorities, Priority.PREFETCH, 100_000)
    assert priorities.in_flight == {Priority.USER: 1, Priority.PREFETCH: 2, Priority.BACKGROUND: 0}


def test_whole_objects_are_paced_by_what_they_turn_out_to_be() -> None:
    rate = 8 * MIB
    limits = {**LIMITS, Priority.USER: PriorityLimits(1)}
    clock, reader, priorities = _scheduler(limits, bytes_per_s=rate, latency_s=0.0)
    source = ScheduledReader(priorities, Priority.USER)
    for _ in range(11):
        source.submit_get("x")
    clock.run()
    assert clock.time_s == pytest.approx(10 * 4 * MIB / rate, rel=0.05)
    assert len(reader.gets) == 11


def test_a_full_queue_refuses_as_temporarily_unavailable() -> None:
    _, _, priorities = _scheduler({**LIMITS, Priority.BACKGROUND: PriorityLimits(1, queue_max=2)})
    requests = [_ask(priorities, Priority.BACKGROUND) for _ in range(4)]
    with pytest.raises(ThrottledError, match=r"background reads.*2 are waiting"):
        requests[3].future.result(timeout=0)
    assert not requests[2].future.done()
    assert priorities.counts[Priority.BACKGROUND].refused == 1


def test_a_failed_request_frees_its_place() -> None:
    clock, reader, priorities = _scheduler({**LIMITS, Priority.BACKGROUND: PriorityLimits(1)})
    reader.failures[0] = UnansweredError("lost")
    first, second = _ask(priorities, Priority.BACKGROUND), _ask(priorities, Priority.BACKGROUND)
    clock.run()
    with pytest.raises(UnansweredError):
        first.future.result()
    assert second.future.result() == b"\0"
    assert priorities.counts[Priority.BACKGROUND].failed == 1


def test_a_reader_that_answers_at_once_does_not_recurse() -> None:
    class Instant(VirtualReader):
        def submit(self, key: str, offset: int, length: int) -> Future[bytes]:
            future: Future[bytes] = Future()
            future.set_result(bytes(length))
            return future

    clock = VirtualClock()
    limits = {priority: PriorityLimits(1, 5000) for priority in Priority}
    priorities = RequestScheduler(
        Instant(clock), limits, clock=Clock(monotonic_s=clock.now_s), timer=clock, bytes_per_s=1_000_000
    )
    first = _ask(priorities, Priority.USER, 500_000)
    requests = [_ask(priorities, Priority.USER) for _ in range(3000)]
    assert first.future.done() and not requests[0].future.done()
    clock.run()
    assert all(request.future.done() for request in requests)


def test_closed_lanes_refuse_what_has_not_begun() -> None:
    clock, _, priorities = _scheduler()
    requests = [_ask(priorities, Priority.BACKGROUND) for _ in range(3)]
    priorities.close()
    late = _ask(priorities, Priority.USER)
    clock.run()
    assert requests[0].future.result() == b"\0"
    for request in (requests[1], requests[2], late):
        with pytest.raises(UnavailableError, match="closed"):
            request.future.result()


def test_a_reader_closed_first_fails_requests_and_nothing_hangs() -> None:
    store = MemoryStore("memory://closed")
    store.put_if_absent("x", [b"abc"])
    reader = ThreadRangeReader(store, 1)
    priorities = RequestScheduler(reader, LIMITS, clock=Clock(), timer=None)
    assert _ask(priorities, Priority.USER).future.result(timeout=5) == b"a"
    reader.close()
    with pytest.raises(UnavailableError, match="not read"):
        _ask(priorities, Priority.USER).future.result(timeout=5)
    assert sum(priorities.in_flight.values()) == 0


def test_a_rate_without_a_timer_is_refused() -> None:
    clock = VirtualClock()
    with pytest.raises(ValueError, match="timer"):
        RequestScheduler(
            VirtualReader(clock), LIMITS, clock=Clock(monotonic_s=clock.now_s), timer=None, bytes_per_s=1
        )


def test_threads_and_a_real_timer_keep_a_rate() -> None:
    """The one test with real time: a second's worth of small requests at 2 MB/s."""
    rate, length = 2_000_000, 20_000
    store = MemoryStore("memory://paced")
    store.put_if_absent("x", [bytes(length)])
    reader, timer = ThreadRangeReader(store, 4), ThreadTimer()
    priorities = RequestScheduler(reader, LIMITS, clock=Clock(), timer=timer, bytes_per_s=rate)
    began_s = time.monotonic()
    futures = [_ask(priorities, Priority.USER, length).future for _ in range(105)]
    assert not wait(futures, timeout=30).not_done
    taken_s = time.monotonic() - began_s
    reader.close()
    timer.close()
    assert 105 * length / taken_s <= 1.06 * rate
    assert taken_s < 10  # only a sanity bound: the machine is shared


@given(
    st.lists(st.tuples(st.sampled_from(Priority), st.integers(1, 5000), st.floats(0, 2)), max_size=60),
    st.integers(0, 20_000),
)
def test_every_request_ends_and_no_limit_is_ever_broken(
    asked: list[tuple[Priority, int, float]], common_rate: int
) -> None:
    limits = {**LIMITS, Priority.USER: PriorityLimits(3)}
    clock, reader, priorities = _scheduler(limits, bytes_per_s=common_rate, latency_s=0.1)
    requests = []

    def ask(priority: Priority, length: int) -> None:
        requests.append(_ask(priorities, priority, length))
        flying = priorities.in_flight
        assert all(flying[priority] <= limits[priority].concurrency for priority in Priority)

    for priority, length, at_s in asked:
        clock.call_at(at_s, lambda priority=priority, length=length: ask(priority, length))  # type: ignore[misc]
    clock.run()
    assert all(request.future.done() for request in requests)
    assert sum(priorities.in_flight.values()) == 0
    if common_rate:
        # In any window: no more than the rate, the burst, and one request of debt.
        for first, (begin_s, *_) in enumerate(reader.gets):
            taken = 0
            for at_s, _, _, length in reader.gets[first:]:
                assert taken <= (at_s - begin_s + 0.06) * common_rate + 1
                taken += length


def test_pumping_from_many_threads_starts_everything_once() -> None:
    store = MemoryStore("memory://many")
    store.put_if_absent("x", [bytes(100)])
    reader = ThreadRangeReader(store, 8)
    priorities = RequestScheduler(reader, LIMITS, clock=Clock(), timer=None)
    requests: list[RangeRequest] = []

    def user(priority: Priority) -> None:
        requests.extend([_ask(priorities, priority) for _ in range(200)])

    threads = [threading.Thread(target=user, args=(priority,)) for priority in Priority for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wait([request.future for request in requests], timeout=30).not_done
    reader.close()
    assert sum(priorities.counts[priority].requests for priority in Priority) == 1200
