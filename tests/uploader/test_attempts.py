"""NonStopWrite decisions: who retries at once, who backs off, who stops.

Numbers and order of queues' names, of a table that a scan makes grow at any moment.
"""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tiered.errors import (
    AccessDeniedError,
    NotFoundError,
    RefusedRequestError,
    StoreFullError,
    ThrottledError,
    UnansweredError,
)
from tiered.kernels.queue_table import QueueTable
from tiered.model.queue import QueueKey
from uploader.attempts import AttemptPolicy, attempt_timeout_ms, retry_delay_ms
from uploader.queue_tails import QueueGenerations

POLICY = AttemptPolicy(timeout_ms_min=1000, timeout_ms_max=30_000, backoff_ms_first=100, backoff_ms_max=5_000)


def test_an_unanswered_attempt_is_retried_at_once() -> None:
    assert retry_delay_ms(POLICY, UnansweredError("lost"), 1, 0.5) == 0
    assert retry_delay_ms(POLICY, UnansweredError("lost"), 2, 0.5) == 0


def test_a_dead_store_is_not_hammered() -> None:
    delays = [retry_delay_ms(POLICY, UnansweredError("lost"), n, 0.999) for n in range(3, 40)]
    milliseconds = [delay_ms for delay_ms in delays if delay_ms is not None]
    assert len(milliseconds) == len(delays)
    assert milliseconds == sorted(milliseconds)
    assert milliseconds[0] >= 50
    assert max(milliseconds) <= POLICY.backoff_ms_max


@pytest.mark.parametrize("error", [ThrottledError("503"), StoreFullError("disk")])
def test_a_refusal_backs_off_from_the_first_failure_with_jitter(error: Exception) -> None:
    low, high = (retry_delay_ms(POLICY, error, 1, jitter) for jitter in (0.0, 0.99))
    assert low is not None and high is not None
    assert 0 < low < high <= POLICY.backoff_ms_first


@pytest.mark.parametrize(
    "error", [AccessDeniedError("403"), RefusedRequestError("400"), NotFoundError("404")]
)
def test_what_repeating_cannot_help_stops(error: Exception) -> None:
    assert retry_delay_ms(POLICY, error, 1, 0.0) is None


def test_the_time_out_follows_size_and_failures_and_is_bounded() -> None:
    small = attempt_timeout_ms(POLICY, 1024, 0)
    assert small < attempt_timeout_ms(POLICY, 64 << 20, 0)
    assert small < attempt_timeout_ms(POLICY, 1024, 2)
    assert attempt_timeout_ms(POLICY, 1 << 40, 50) == POLICY.timeout_ms_max


def test_only_a_second_failure_makes_the_next_attempt_more_patient() -> None:
    first, second, third, fourth = (attempt_timeout_ms(POLICY, 1024, failures) for failures in range(4))
    assert first == second
    assert (third, fourth) == (2 * first, 4 * first)


class GrowingTable(QueueTable):
    """Gets another queue right after a thread read how many there are, as by a scan in another thread."""

    def __init__(self) -> None:
        self.waiting: list[tuple[str, int]] = []
        super().__init__()

    def __len__(self) -> int:
        count = super().__len__()
        if self.waiting:
            waiting, self.waiting = self.waiting, []
            self.ordinal(*waiting.pop())
            self.waiting = waiting
        return count


queues = st.lists(
    st.tuples(st.text("abc", min_size=1, max_size=3), st.integers(0, 5)), unique=True, max_size=80
)


@given(queues, queues)
def test_the_order_is_that_of_names_although_the_table_grows(
    first: list[tuple[str, int]], later: list[tuple[str, int]]
) -> None:
    table = GrowingTable()
    for queue in first:
        table.ordinal(*queue)
    table.waiting = [*later]
    lives = QueueGenerations(table)
    rank = lives.rank()
    table.waiting = []
    assert [first[at] for at in np.argsort(rank).tolist()] == sorted(first)
    names = [(table.topic(ordinal), int(table.queue_id[ordinal])) for ordinal in range(len(table))]
    assert [names[at] for at in np.argsort(lives.rank()).tolist()] == sorted(names)


@given(queues, st.lists(st.tuples(st.integers(0, 9), st.integers(0, 2)), max_size=40))
def test_each_life_has_one_number(named: list[tuple[str, int]], asked: list[tuple[int, int]]) -> None:
    table = QueueTable()
    for queue in named:
        table.ordinal(*queue)
    lives = QueueGenerations(table)
    asked = [(ordinal, generation) for ordinal, generation in asked if ordinal < len(table)]
    ordinal, generation = (np.array([life[i] for life in asked], np.int64) for i in (0, 1))
    for _ in range(2):
        numbers = lives.numbers(ordinal, generation).tolist()
        expected = [QueueKey(*named[at], life) for at, life in asked]
        assert [lives.roster.keys[number] for number in numbers] == expected
        assert len(lives.roster) == len(set(asked))
    assert [lives.key(*life) for life in asked] == expected
