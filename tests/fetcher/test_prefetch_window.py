"""Additive increase, multiplicative decrease: by example, and as properties of any course of pulls and fetches.

Prefetch ranges that are lost, or left behind by a reader that jumps.
"""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from fetcher.prefetch.prefetch_window import (
    PrefetchRange,
    PrefetchWindow,
    PullProgress,
    RunEnds,
    WindowLimits,
)
from tests.sweeps import examples

BLOCK = 100
"""Offsets of a block; an offset is 10 bytes."""
LIMITS = WindowLimits(offsets_min=32, bytes_max=40_000, unread_s=180.0, hold_off_s=1.0)
PLENTY = 1 << 40


def window(limits: WindowLimits = LIMITS) -> PrefetchWindow:
    return PrefetchWindow(limits, bytes_per_offset=10.0)


def pull(subject: PrefetchWindow, offset: int, count: int = 32, time_s: float = 0.0) -> int:
    """A pull answered in full; returns the next offset."""
    end = offset + count
    covered = -(-end // BLOCK) * BLOCK
    subject.pulled(PullProgress(offset, end, covered, BLOCK * 10, time_s))
    return end


def fetch(subject: PrefetchWindow, time_s: float = 0.0) -> PrefetchRange | None:
    """Fetch what is wanted, in whole blocks."""
    span = subject.wanted(1 << 40, PLENTY) if subject.is_low(time_s) else None
    if span is None:
        return None
    part = subject.started(*span, time_s)
    covered = -(-span[1] // BLOCK) * BLOCK
    subject.finished(part, covered, (covered - span[0]) * 10, time_s)
    return part


@pytest.fixture
def subject() -> PrefetchWindow:
    return window()


def test_it_begins_at_the_smallest_size_and_grows_a_batch_for_every_window_consumed(
    subject: PrefetchWindow,
) -> None:
    offset, sizes = 0, []
    for _ in range(11):
        offset = pull(subject, offset)
        fetch(subject)
        sizes.append(subject.size)
    # one pull consumes 32, then two 64, then three 96, then four 128
    assert sizes == [32, 64, 64, 96, 96, 96, 128, 128, 128, 128, 160]


def test_a_larger_batch_is_the_smallest_window(subject: PrefetchWindow) -> None:
    pull(subject, 0, 500)
    assert subject.size == 500


def test_a_single_read_fetches_nothing_ahead_and_neither_do_jumps(subject: PrefetchWindow) -> None:
    for offset in (5_000, 17, 900_000, 40, 5_000):
        pull(subject, offset, 1)
        assert not subject.is_low(0.0)
        assert subject.size == 32


def test_the_same_pull_again_is_no_jump_and_no_progress(subject: PrefetchWindow) -> None:
    pull(subject, 0)
    pull(subject, 32)
    before = subject.size, subject.consumed
    pull(subject, 32)
    assert (subject.size, subject.consumed) == before
    assert subject.is_low(0.0) is (2 * (subject.fetched - 64) <= subject.size)


def test_a_jump_resets_the_window(subject: PrefetchWindow) -> None:
    offset = 0
    for _ in range(20):
        offset = pull(subject, offset)
        fetch(subject)
    pull(subject, 1_000_000)
    assert (subject.size, subject.unread_bytes, subject.sequential) == (32, 0, 0)


def test_expiry_halves_once_however_much_expires(subject: PrefetchWindow) -> None:
    offset = 0
    for _ in range(60):
        offset = pull(subject, offset, time_s=1.0)
        fetch(subject, 1.0)
    size, unread = subject.size, subject.unread_bytes
    assert size >= 320 and unread > 0
    assert subject.expire(180.9) == 0
    assert 0 < subject.expire(181.0) <= unread
    assert subject.size == size // 2
    assert subject.expire(500.0) == 0
    assert subject.size == size // 2
    assert fetch(subject, 181.0) is not None or subject.fetched > subject.position


def test_the_block_a_slow_reader_is_in_does_not_expire(subject: PrefetchWindow) -> None:
    pull(subject, 0)
    pull(subject, 32)
    pull(subject, 64)
    part = fetch(subject)
    assert part is not None
    subject.pulled(PullProgress(96, 128, part.end, BLOCK * 10, 10.0))
    assert subject.expire(10_000.0) == 0


def test_it_is_never_smaller_than_a_batch(subject: PrefetchWindow) -> None:
    offset = pull(subject, 0)
    for round_number in range(5):
        time_s = 1000.0 * round_number
        while fetch(subject, time_s) is None:
            offset = pull(subject, offset, time_s=time_s)
        subject.covered = subject.position
        subject.expire(time_s + 999.0)
        assert subject.size >= 32


def test_failure_is_tried_again_after_a_while_only(subject: PrefetchWindow) -> None:
    pull(subject, 0)
    pull(subject, 32)
    pull(subject, 64)
    span = subject.wanted(1 << 40, PLENTY)
    assert span is not None and span[0] == 100
    subject.failed(subject.started(*span, 5.0), 5.0)
    assert not subject.is_low(5.9)
    assert subject.is_low(6.0)
    assert subject.wanted(1 << 40, PLENTY) == span


def test_eviction_before_reading_halves(subject: PrefetchWindow) -> None:
    offset = 0
    for _ in range(60):
        offset = pull(subject, offset)
        fetch(subject)
    size = subject.size
    ready = subject.ready(subject.covered)
    assert ready is not None
    assert not subject.waited(ready, ready.end + 1, 1.0)
    assert subject.waited(ready, subject.covered + 1, 1.0)
    assert subject.size == size // 2


def test_what_was_fetched_by_one_size_is_lost_once(subject: PrefetchWindow) -> None:
    offset = 0
    ages: set[float] = set()
    time_s = 0.0
    while len(ages) < 2:
        time_s += 1
        offset = pull(subject, offset, time_s=time_s)
        fetch(subject, time_s)
        ages = {part.in_memory_since_s for part in subject.ranges}
    size = subject.size
    for time_s in sorted(ages):
        assert subject.expire(time_s + 180.0) > 0
    assert subject.size == size // 2
    while not fetch(subject, 1000.0):
        offset = pull(subject, offset, time_s=1000.0)
    size = subject.size
    assert subject.expire(1180.0) > 0
    assert subject.size == max(size // 2, 32)


FIRST = LIMITS._replace(bytes_first=10_000)


def test_it_begins_with_a_request_worth_of_bytes_when_the_pace_allows() -> None:
    for pause_s, size in ((0.001, 1000), (1.0, 720), (30.0, 64)):
        subject = window(FIRST)
        pull(subject, 0, time_s=5.0)
        assert subject.size == 32  # a single read dares nothing
        pull(subject, 32, time_s=5.0 + pause_s)
        assert subject.size == size
        pull(subject, 64, time_s=5.0 + pause_s + 0.001)
        assert subject.size in (size, size + 32)  # only the beginning is a leap
    pull(subject, 9_000, time_s=100.0)
    pull(subject, 9_032, time_s=100.001)
    assert subject.size == 1000  # a jump resets the window


def test_who_says_how_far_it_reads_is_fetched_for_at_once_and_no_further() -> None:
    subject = window(FIRST)
    subject.announced(50, 2_500, 0.999)
    assert subject.is_low(0.0)
    assert subject.wanted(1 << 40, PLENTY) == (50, 1050)
    assert subject.wanted(700, PLENTY) == (50, 700)
    subject.started(50, 1050, 0.0)
    pull(subject, 50, time_s=1.0)
    assert subject.sequential == 2
    assert subject.size == subject.size_max == 4000, "its pace is known with its first answer"
    assert subject.wanted(1 << 40, PLENTY) == (1050, 2_500)


def test_a_fetch_ends_where_a_run_does_if_that_is_near() -> None:
    subject = window(FIRST)
    subject.announced(0, 1 << 40, 0.0)
    assert subject.aligned(0, 1000, RunEnds(800, 1500), PLENTY) == 1500
    assert subject.aligned(0, 1000, RunEnds(800, 1501), PLENTY) == 800
    assert subject.aligned(0, 1000, RunEnds(800, 1500), 14_999) == 800  # there is no room for more
    assert subject.aligned(0, 1000, RunEnds(400, 4000), PLENTY) == 1000
    assert subject.aligned(900, 1000, RunEnds(0, 4000), PLENTY) == 1000
    subject.until = 1200
    assert subject.aligned(0, 1000, RunEnds(800, 1500), PLENTY) == 800
    assert subject.aligned(0, 1000, RunEnds(800, 1200), PLENTY) == 1200


@given(
    st.integers(0, 5000),
    st.integers(1, 5000),
    st.integers(0, 9000),
    st.integers(1, 9000),
    st.integers(0, 200_000),
)
def test_an_aligned_fetch_stays_near_what_is_wanted(
    begin: int, length: int, run_begin: int, run_length: int, room: int
) -> None:
    subject = window(FIRST)
    subject.announced(0, 1 << 40, 0.0)
    end = begin + length
    last = RunEnds(min(run_begin, end - 1), max(min(run_begin, end - 1) + run_length, end))
    found = subject.aligned(begin, end, last, room)
    assert found in (end, last.begin, last.end)
    assert begin < found
    assert abs(found - end) <= min(length, subject.size) / 2
    assert found <= end or (found - begin) * 10 <= room


def test_blocks_lost_unread_halve_and_are_fetched_again(subject: PrefetchWindow) -> None:
    offset = 0
    for _ in range(60):
        offset = pull(subject, offset)
        fetch(subject)
    size, part = subject.size, subject.ranges[-1]
    assert part.end > subject.read_end
    assert subject.lost(part, 1.0)
    assert (subject.size, subject.fetched) == (size // 2, max(part.begin, subject.read_end))
    assert not subject.lost(part, 1.0)  # gone already
    for other in [*subject.ranges]:
        assert not subject.lost(other, 1.5)  # one loss
    assert subject.size == size // 2


@given(st.lists(st.integers(1, 60), min_size=1, max_size=40), st.integers(1, 3))
def test_a_step_inside_the_buffered_block_is_a_pull_at_less_cost(counts: list[int], repeated: int) -> None:
    subject, other = window(FIRST), window(FIRST)
    for each in (subject, other):
        pull(each, 0, time_s=1.0)
        pull(each, 32, time_s=1.1)
        each.covered = 100_000
    offset, time_s = 64, 1.2
    for number, count in enumerate(counts):
        if number % 5 == repeated:
            assert not subject.stepped(offset - 1, offset, time_s)  # no progress: for ``pulled``
        assert subject.stepped(offset, offset + count, time_s)
        other.pulled(PullProgress(offset, offset + count, 100_000, 0, time_s))
        for name in ("position", "size", "consumed", "sequential", "batch", "last_offset", "last_s"):
            assert getattr(subject, name) == getattr(other, name), name
        offset, time_s = offset + count, time_s + 0.1
    assert not subject.stepped(99_990, 100_001, time_s)  # leaves the block
    assert not subject.stepped(offset + 1, offset + 2, time_s)  # a jump


def test_little_room_is_waited_for_while_half_of_it_is_still_unread() -> None:
    subject = window(FIRST)
    subject.announced(0, 1 << 40, 0.0)
    subject.started(0, 400, 0.0)
    assert subject.wanted(1 << 40, 399 * 10) is None
    assert subject.wanted(1 << 40, 400 * 10) == (400, 800)


def test_no_room_no_fetch_and_little_room_little_fetch(subject: PrefetchWindow) -> None:
    pull(subject, 0)
    pull(subject, 32)
    pull(subject, 64)
    assert subject.wanted(1 << 40, BLOCK * 10 - 1) is None
    assert subject.wanted(101, PLENTY) == (100, 101)
    assert subject.wanted(100, PLENTY) is None


def test_only_the_rest_of_a_failed_fetch_is_requested() -> None:
    """A later fetch, on its way or in memory, is not repeated."""
    subject = window(FIRST)
    subject.announced(0, 1 << 40, 0.0)
    first, second = subject.started(0, 100, 0.0), subject.started(100, 300, 0.0)
    subject.failed(first, 1.0)
    assert subject.wanted(1 << 40, PLENTY) == (0, 100)
    assert subject.aligned(0, 100, RunEnds(0, 120), PLENTY) == 100
    again = subject.started(0, 100, 10.0)
    begin, _ = subject.wanted(1 << 40, PLENTY) or (0, 0)
    assert begin == 300
    subject.finished(second, 300, 2000, 11.0)
    pull(subject, 0, 300, 12.0)
    assert list(subject.ranges) == [again], "what is read goes, also behind a fetch that is not done"


class Courses(RuleBasedStateMachine):
    """Any course of pulls, fetches that end in any order or fail, expiry and evictions."""

    def __init__(self) -> None:
        super().__init__()
        self.subject = window()
        self.time_s = 0.0
        self.flying: list[PrefetchRange] = []
        self.offset = 0
        self.room = 30_000

    @rule(count=st.integers(1, 200))
    def pull_on(self, count: int) -> None:
        before, was = self.subject.size, self.subject.position
        self.offset = pull(self.subject, self.offset, count, self.time_s)
        if was >= 0:
            assert self.subject.size >= min(before, self.subject.size_max)

    @rule(offset=st.integers(0, 100_000), count=st.integers(1, 64))
    def jump(self, offset: int, count: int) -> None:
        self.offset = pull(self.subject, offset, count, self.time_s)

    @rule()
    def begin_fetch(self) -> None:
        if not self.subject.is_low(self.time_s):
            return
        room = self.room - 2 * self.subject.unread_bytes
        span = self.subject.wanted(200_000, room)
        if span is None:
            return
        begin, end = span
        assert self.subject.position <= begin < end <= 200_000
        assert begin >= self.subject.fetched
        assert end - begin <= self.subject.size
        assert (end - begin) * 10 <= max(room, 10)
        assert not any(other.begin < end and begin < other.end for other in self.subject.ranges)
        self.flying.append(self.subject.started(begin, end, self.time_s))

    @precondition(lambda self: self.flying)
    @rule(data=st.data(), fails=st.booleans())
    def end_fetch(self, data: st.DataObject, fails: bool) -> None:
        part = self.flying.pop(data.draw(st.integers(0, len(self.flying) - 1)))
        if fails:
            self.subject.failed(part, self.time_s)
        else:
            covered = -(-part.end // BLOCK) * BLOCK
            self.subject.finished(part, covered, (covered - part.begin) * 10, self.time_s)

    @rule(seconds=st.sampled_from([0.1, 5.0, 100.0, 181.0]))
    def time_passes(self, seconds: float) -> None:
        self.time_s += seconds
        before, halved_s = self.subject.size, self.subject.halved_s
        smallest = max(self.subject.batch, LIMITS.offsets_min)
        lost = self.subject.expire(self.time_s)
        is_halved = self.subject.halved_s != halved_s
        assert lost or not is_halved
        assert self.subject.size == (max(before // 2, smallest) if is_halved else before)

    @invariant()
    def bounds_hold(self) -> None:
        subject = self.subject
        if subject.position < 0:
            return
        assert subject.size <= max(subject.size_max, subject.batch)
        assert subject.size >= min(LIMITS.offsets_min, subject.size_max)
        assert subject.fetched >= subject.position
        assert 0 <= subject.unread_bytes <= sum(part.bytes for part in subject.ranges)
        assert all(part.end > subject.position for part in subject.ranges if part.is_done)


Courses.TestCase.settings = settings(max_examples=examples(60), stateful_step_count=40)
TestCourses = Courses.TestCase


def read(subject: PrefetchWindow, offset: int, time_s: float = 0.0) -> None:
    """A pull of 50 offsets, answered in full; the reader holds only those."""
    subject.pulled(PullProgress(offset, offset + 50, offset + 50, BLOCK * 10, time_s))


def sequential(size: int = 400) -> PrefetchWindow:
    """A reader at offset 150 whose window has ``size`` offsets."""
    subject = PrefetchWindow(LIMITS, bytes_per_offset=10.0)
    for offset in (0, 50, 100):
        read(subject, offset)
    subject.size = size
    return subject


def test_a_lost_range_is_wanted_again_and_halves_the_window() -> None:
    subject = sequential()
    first, second = subject.started(150, 250, 0.0), subject.started(250, 550, 0.0)
    for one in (first, second):
        subject.finished(one, one.end, (one.end - one.begin) * 10, 1.0)
    assert subject.fetched == 550 and subject.unread_bytes == 4_000
    assert subject.lost(second, 2.0)
    assert (subject.size, subject.fetched, subject.unread_bytes) == (200, 250, 1_000)
    assert subject.wanted(PLENTY, PLENTY) == (250, 350)
    assert not subject.lost(second, 3.0)
    assert (subject.size, subject.fetched) == (200, 250)


def test_a_range_lost_in_the_middle_is_wanted_up_to_the_next_one() -> None:
    subject = sequential()
    ranges = [subject.started(begin, begin + 100, 0.0) for begin in (150, 250, 350)]
    for one in ranges:
        subject.finished(one, one.end, 1_000, 1.0)
    assert subject.lost(ranges[1], 2.0)
    assert subject.wanted(PLENTY, PLENTY) == (250, 350)
    assert subject.ready(260) is None
    assert subject.ready(360) is ranges[2]
    subject.position = subject.covered = 350
    subject.size = 400
    assert subject.wanted(PLENTY, PLENTY) == (450, 750), "what is in memory is not fetched twice"


def test_two_ranges_lost_of_one_size_halve_once() -> None:
    subject = sequential()
    ranges = [subject.started(begin, begin + 100, 0.0) for begin in (150, 250)]
    for one in ranges:
        subject.finished(one, one.end, 1_000, 1.0)
    assert subject.lost(ranges[0], 2.0)
    assert not subject.lost(ranges[1], 2.5)
    assert (subject.size, subject.fetched, subject.unread_bytes) == (200, 150, 0)


def test_a_range_lost_after_it_was_read_is_no_loss() -> None:
    subject = sequential()
    done = subject.started(150, 200, 0.0)
    subject.finished(done, 200, 500, 1.0)
    subject.position = subject.covered = 200
    assert not subject.lost(done, 2.0)
    assert subject.size == 400


def test_a_jump_leaves_its_ranges_behind() -> None:
    subject = sequential()
    done, in_flight, failing = (subject.started(begin, begin + 100, 0.0) for begin in (150, 250, 350))
    subject.finished(done, 250, 1_000, 1.0)
    read(subject, 9_000, 2.0)
    before = subject.fetched
    assert before == 9_050
    assert (subject.unread_bytes, subject.ranges, subject.size) == (0, [], 50)
    assert subject.ready(160) is None
    subject.finished(in_flight, 350, 1_000, 3.0)
    subject.failed(failing, 3.0)
    assert not subject.lost(done, 4.0)
    assert not subject.waited(done, 200, 4.0)
    assert (subject.fetched, subject.size, subject.unread_bytes) == (before, 50, 0)
    assert subject.expire(10_000.0) == 0
    read(subject, 9_050, 11.0)
    read(subject, 9_100, 12.0)
    assert subject.wanted(PLENTY, PLENTY) is not None


def test_a_range_of_before_a_jump_does_not_reach_behind_the_new_place() -> None:
    """It ends far above where the reader is now: nothing there is taken for fetched."""
    subject = sequential()
    far = subject.started(5_000, 6_000, 0.0)
    read(subject, 20_000, 1.0)
    read(subject, 10, 2.0)
    subject.finished(far, 6_000, 10_000, 3.0)
    assert subject.fetched == 60


def test_a_range_evicted_before_it_was_read_is_gone() -> None:
    subject = sequential()
    done = subject.started(150, 350, 0.0)
    subject.finished(done, 350, 2_000, 1.0)
    assert subject.waited(done, 200, 2.0)
    assert (subject.size, subject.fetched, subject.unread_bytes) == (200, 150, 0)
    assert subject.ready(160) is None
    assert not subject.waited(done, 200, 3.0)
    assert subject.wanted(PLENTY, PLENTY) == (150, 350)
