"""Up to where the log may be uploaded; each test is one rule."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tiered.broker_store.bound import Bound, BoundFacts, BoundReason, BrokerOffsets, decide_bound
from tiered.broker_store.liveness import Liveness

LIVE = BoundFacts(
    liveness=Liveness.ALIVE,
    offsets=BrokerOffsets(max_phys=1000, confirm_phys=1000),
    frontier_phys=1000,
    log_end_phys=4096,
    cursor_phys=500,
)


def test_a_live_brokers_word_is_the_bound() -> None:
    assert decide_bound(LIVE) == Bound(1000, 1000, BoundReason.BROKER)


def test_nothing_above_the_confirm_offset() -> None:
    assert decide_bound(replace(LIVE, offsets=BrokerOffsets(max_phys=1000, confirm_phys=700))).phys == 700


def test_one_number_is_enough() -> None:
    assert decide_bound(replace(LIVE, offsets=BrokerOffsets(confirm_phys=800))).phys == 800
    assert decide_bound(replace(LIVE, offsets=BrokerOffsets(max_phys=900))).phys == 900


def test_never_above_the_consume_queue_frontier_where_one_is_visible() -> None:
    bound = decide_bound(replace(LIVE, frontier_phys=640))
    assert (bound.phys, bound.why) == (640, BoundReason.CONSUME_QUEUE)


def test_no_visible_consume_queue_leaves_the_brokers_word() -> None:
    assert decide_bound(replace(LIVE, frontier_phys=None)).phys == 1000


def test_records_that_belong_to_no_queue_do_not_hold_the_bound() -> None:
    offsets = BrokerOffsets(max_phys=1000, confirm_phys=1000, dispatch_behind_bytes=0)
    assert decide_bound(replace(LIVE, offsets=offsets, frontier_phys=640)).phys == 1000


@pytest.mark.parametrize(("confirm_phys", "behind_bytes"), [(1000, 300), (800, 100)])
@pytest.mark.parametrize("frontier_phys", [640, None])
def test_what_the_broker_has_not_dispatched_is_counted_from_the_confirm_offset_and_above_the_bound(
    confirm_phys: int, behind_bytes: int, frontier_phys: int | None
) -> None:
    offsets = BrokerOffsets(max_phys=1000, confirm_phys=confirm_phys, dispatch_behind_bytes=behind_bytes)
    assert decide_bound(replace(LIVE, offsets=offsets, frontier_phys=frontier_phys)).phys == 700


def test_what_was_dispatched_stays_dispatched() -> None:
    """The broker counts the end of its log before the lag of its dispatch, which has grown since."""
    offsets = BrokerOffsets(max_phys=1000, confirm_phys=1000, dispatch_behind_bytes=400)
    live = replace(LIVE, offsets=offsets, frontier_phys=None)
    assert decide_bound(replace(live, previous=Bound(900, 900, BoundReason.BROKER))) == Bound(
        900, 900, BoundReason.CONSUME_QUEUE
    )
    assert decide_bound(replace(live, previous=Bound(1001, 1001, BoundReason.BROKER))).has_retreated
    assert decide_bound(replace(live, offsets=replace(offsets, max_phys=0, confirm_phys=0))).phys == 0
    assert decide_bound(replace(live, previous=Bound(900, 900, BoundReason.DEAD))).phys == 600


def test_a_lag_below_zero_proves_no_record_above_the_confirm_offset() -> None:
    offsets = BrokerOffsets(max_phys=1000, confirm_phys=800, dispatch_behind_bytes=-1)
    assert decide_bound(replace(LIVE, offsets=offsets, frontier_phys=None)).phys == 800
    assert decide_bound(replace(LIVE, offsets=offsets, frontier_phys=640)) == Bound(
        800, 800, BoundReason.BROKER
    )


def test_offsets_below_zero_are_not_reported_ones() -> None:
    offsets = BrokerOffsets(max_phys=-1, confirm_phys=-1)
    assert decide_bound(replace(LIVE, offsets=offsets)).why is BoundReason.FROZEN
    assert decide_bound(replace(LIVE, offsets=replace(offsets, confirm_phys=0))).phys == 0


def test_a_dead_brokers_log_is_proven_nowhere_until_its_queues_are_read() -> None:
    dead = replace(LIVE, liveness=Liveness.DEAD, offsets=None)
    assert decide_bound(dead) == Bound(4096, 0, BoundReason.DEAD)


def test_a_count_from_a_confirm_offset_that_may_be_lower_is_an_upper_limit_only() -> None:
    offsets = BrokerOffsets(
        max_phys=1000, confirm_phys=1000, dispatch_behind_bytes=0, is_dispatch_certain=False
    )
    assert decide_bound(replace(LIVE, offsets=offsets, frontier_phys=640)).phys == 640
    behind = replace(offsets, dispatch_behind_bytes=300)
    assert decide_bound(replace(LIVE, offsets=behind, frontier_phys=None)).phys == 700


def test_nothing_above_the_files_seen() -> None:
    assert decide_bound(replace(LIVE, log_end_phys=900)).phys == 900


@pytest.mark.parametrize("liveness", [Liveness.ALIVE, Liveness.UNKNOWN])
def test_a_live_but_unreachable_broker_freezes_the_bound(liveness: Liveness) -> None:
    before = decide_bound(LIVE)
    bound = decide_bound(replace(LIVE, liveness=liveness, offsets=None, frontier_phys=4000, previous=before))
    assert bound == Bound(1000, 1000, BoundReason.FROZEN, frozen=True)


def test_a_broker_that_says_no_number_freezes_the_bound() -> None:
    bound = decide_bound(replace(LIVE, offsets=BrokerOffsets(), previous=decide_bound(LIVE)))
    assert bound.frozen
    assert bound.phys == 1000


def test_frozen_from_the_start_uploads_nothing_new() -> None:
    bound = decide_bound(replace(LIVE, offsets=None, cursor_phys=0))
    assert (bound.phys, bound.frozen) == (0, True)


def test_bytes_alone_decide_only_for_a_broker_proven_dead() -> None:
    dead = replace(LIVE, liveness=Liveness.DEAD, offsets=None, proven_phys=3000)
    assert decide_bound(dead) == Bound(4096, 3000, BoundReason.DEAD)
    assert decide_bound(replace(dead, liveness=Liveness.UNKNOWN)).phys == 500


def test_a_dead_brokers_last_records_need_no_consume_queue() -> None:
    dead = replace(LIVE, liveness=Liveness.DEAD, offsets=None, frontier_phys=900, proven_phys=900)
    bound = decide_bound(dead)
    assert bound.phys == 4096
    assert bound.proven_phys == 900


def test_a_broker_that_comes_back_stops_the_scan_where_it_is() -> None:
    scan = decide_bound(replace(LIVE, liveness=Liveness.DEAD, offsets=None, proven_phys=900))
    bound = decide_bound(replace(LIVE, offsets=None, cursor_phys=950, previous=scan))
    assert (bound.phys, bound.frozen) == (950, True)


def test_an_answer_outweighs_a_free_lock() -> None:
    assert decide_bound(replace(LIVE, liveness=Liveness.DEAD)).phys == 1000


def test_a_bound_that_retreats_says_so() -> None:
    assert decide_bound(replace(LIVE, previous=Bound(2000, 2000, BoundReason.BROKER))).has_retreated
    assert not decide_bound(replace(LIVE, previous=Bound(900, 900, BoundReason.BROKER))).has_retreated


def test_a_log_that_ends_below_what_was_read_was_cut() -> None:
    assert decide_bound(replace(LIVE, offsets=BrokerOffsets(max_phys=400, confirm_phys=400))).has_retreated
    assert not decide_bound(
        replace(LIVE, offsets=BrokerOffsets(max_phys=500, confirm_phys=400))
    ).has_retreated


offsets = st.none() | st.integers(-1, 5000)


@given(
    liveness=st.sampled_from(Liveness),
    offsets=st.none() | st.builds(BrokerOffsets, offsets, offsets, offsets, st.booleans()),
    frontier=st.none() | st.integers(0, 5000),
    log_end=st.integers(0, 5000),
    cursor=st.integers(0, 5000),
    previous=st.none() | st.builds(Bound, st.integers(0, 5000), st.just(0), st.sampled_from(BoundReason)),
)
def test_no_facts_lift_the_bound_above_what_the_broker_said(
    liveness: Liveness,
    offsets: BrokerOffsets | None,
    frontier: int | None,
    log_end: int,
    cursor: int,
    previous: Bound | None,
) -> None:
    bound = decide_bound(BoundFacts(liveness, offsets, frontier, log_end, cursor, 10_000, previous))
    said = (
        [p for p in (offsets.max_phys, offsets.confirm_phys) if p is not None and p >= 0] if offsets else []
    )
    if said:
        assert bound.phys <= min(*said, log_end)
        assert not bound.frozen
    elif liveness is not Liveness.DEAD:
        assert bound.frozen
        assert bound.phys <= max(cursor, previous.phys if previous else 0)
    assert bound.proven_phys <= max(bound.phys, cursor)
