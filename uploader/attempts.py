"""NonStopWrite: the next step after each answer, or no answer, to a data PUT. Pure.

- No answer in time, connection lost, 5xx: the attempt is abandoned and never checked; a new one under its own key
  starts at once. The third failure in a row backs off.
- Refused without effect (429, 503, connection refused, disk full): back off with jitter.
- 400, 403, 404: stop and alarm; a retry cannot help.
"""

from __future__ import annotations

from dataclasses import dataclass

from tiered.errors import ThrottledError, UnansweredError, UnavailableError

IMMEDIATE_RETRIES = 2


@dataclass(frozen=True)
class AttemptPolicy:
    """Bounds on time-outs and back-off; milliseconds."""

    timeout_ms_min: int = 2_000
    timeout_ms_max: int = 30_000
    backoff_ms_first: int = 100
    backoff_ms_max: int = 15_000
    rate_bytes_per_s_floor: int = 4 << 20


@dataclass(frozen=True)
class Retry:
    """Start a new attempt after ``delay_ms``."""

    delay_ms: int


@dataclass(frozen=True)
class Stop:
    """Stop and alarm."""

    error: Exception


def attempt_timeout_ms(policy: AttemptPolicy, size_bytes: int, consecutive_failures: int) -> int:
    """Timeout of one attempt: by size at a floor rate, doubled for each failure in a row after the first.

    One unanswered attempt means a lost connection, several mean a slow store.
    """
    transfer_ms = size_bytes * 1000 // policy.rate_bytes_per_s_floor
    patient_ms = (policy.timeout_ms_min + transfer_ms) << min(max(consecutive_failures - 1, 0), 8)
    return min(policy.timeout_ms_max, patient_ms)


def after_failure(
    policy: AttemptPolicy, error: Exception, consecutive_failures: int, jitter: float
) -> Retry | Stop:
    """The next step after ``error``, the ``consecutive_failures``-th in a row (from 1). ``jitter`` in [0, 1)."""
    if not isinstance(error, UnavailableError):
        return Stop(error)
    if isinstance(error, UnansweredError) and consecutive_failures <= IMMEDIATE_RETRIES:
        return Retry(0)
    exponent = consecutive_failures - 1
    if isinstance(error, UnansweredError) and not isinstance(error, ThrottledError):
        exponent -= IMMEDIATE_RETRIES
    ceiling_ms = min(policy.backoff_ms_max, policy.backoff_ms_first << min(max(exponent, 0), 16))
    return Retry(int(ceiling_ms * (0.5 + jitter / 2)))
