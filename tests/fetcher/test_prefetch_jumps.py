"""Prefetch ranges that are lost, or left behind by a reader that jumps."""

from __future__ import annotations

from fetcher.prefetch.prefetch_window import PrefetchWindow, PullProgress, WindowLimits

BLOCK = 100
LIMITS = WindowLimits(offsets_min=32, bytes_max=40_000, unread_s=180.0, hold_off_s=1.0)
PLENTY = 1 << 40


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
