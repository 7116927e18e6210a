"""NonStopWrite decisions: who retries at once, who backs off, who stops."""

import pytest

from tiered.errors import (
    AccessDeniedError,
    NotFoundError,
    RefusedRequestError,
    StoreFullError,
    ThrottledError,
    UnansweredError,
)
from uploader.attempts import AttemptPolicy, Retry, Stop, after_failure, attempt_timeout_ms

POLICY = AttemptPolicy(timeout_ms_min=1000, timeout_ms_max=30_000, backoff_ms_first=100, backoff_ms_max=5_000)


def test_an_unanswered_attempt_is_retried_at_once() -> None:
    assert after_failure(POLICY, UnansweredError("lost"), 1, 0.5) == Retry(0)
    assert after_failure(POLICY, UnansweredError("lost"), 2, 0.5) == Retry(0)


def test_a_dead_store_is_not_hammered() -> None:
    delays = [after_failure(POLICY, UnansweredError("lost"), n, 0.999) for n in range(3, 40)]
    milliseconds = [delay.delay_ms for delay in delays if isinstance(delay, Retry)]
    assert len(milliseconds) == len(delays)
    assert milliseconds == sorted(milliseconds)
    assert milliseconds[0] >= 50
    assert max(milliseconds) <= POLICY.backoff_ms_max


@pytest.mark.parametrize("error", [ThrottledError("503"), StoreFullError("disk")])
def test_a_refusal_backs_off_from_the_first_failure_with_jitter(error: Exception) -> None:
    low, high = (after_failure(POLICY, error, 1, jitter) for jitter in (0.0, 0.99))
    assert isinstance(low, Retry)
    assert isinstance(high, Retry)
    assert 0 < low.delay_ms < high.delay_ms <= POLICY.backoff_ms_first


@pytest.mark.parametrize(
    "error", [AccessDeniedError("403"), RefusedRequestError("400"), NotFoundError("404")]
)
def test_what_repeating_cannot_help_stops(error: Exception) -> None:
    assert after_failure(POLICY, error, 1, 0.0) == Stop(error)


def test_the_time_out_follows_size_and_failures_and_is_bounded() -> None:
    small = attempt_timeout_ms(POLICY, 1024, 0)
    assert small < attempt_timeout_ms(POLICY, 64 << 20, 0)
    assert small < attempt_timeout_ms(POLICY, 1024, 2)
    assert attempt_timeout_ms(POLICY, 1 << 40, 50) == POLICY.timeout_ms_max


def test_only_a_second_failure_makes_the_next_attempt_more_patient() -> None:
    first, second, third, fourth = (attempt_timeout_ms(POLICY, 1024, failures) for failures in range(4))
    assert first == second
    assert (third, fourth) == (2 * first, 4 * first)
